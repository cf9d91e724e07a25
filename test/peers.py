"""Buffers that processes on a CPU share, in place of memory that GPUs reach, so that exchanging kernels run anywhere."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from liger import exchange
from liger.backends import triton as backend
from liger.backends.triton.launch import Launch
from liger.exchange import PeerRows


def share(rank, name, folder, timeout_s=60.0):
    """Let a group's ranks, all of which call this, exchange through files in a folder."""
    Path(folder).mkdir(exist_ok=True)
    group, made = rank.groups[name], []
    place, ranks = dist.get_rank(group), dist.get_world_size(group)

    def allocate(words):
        files = [str(Path(folder) / f"{name}-{len(made)}-of-{sender}") for sender in range(ranks)]
        own = torch.from_file(files[place], shared=True, size=words, dtype=torch.int64).zero_()
        dist.barrier(group)
        everyones = [
            own if r == place else torch.from_file(files[r], shared=True, size=words, dtype=torch.int64) for r in range(ranks)
        ]
        made.append(everyones)
        return own, torch.tensor([buffer.data_ptr() for buffer in everyones])

    exchange.KNOWN.setdefault(group, {})[rank.device] = PeerRows(place, ranks, timeout_s, allocate)


def of(rank, name):
    """The `PeerRows` through which a group exchanges, if it does."""
    return exchange.KNOWN.get(rank.groups[name], {}).get(rank.device)


def forget(rank, name):
    """Back to collectives."""
    exchange.KNOWN.pop(rank.groups[name], None)


@contextlib.contextmanager
def launched(block, lag):
    """Exchanging kernels take so many logits at a time, and finish a row so many programs after it was sent, inside."""
    rule = backend.exchanged_rows_launch
    backend.exchanged_rows_launch = lambda *_: (Launch(block, 1), lag)
    try:
        yield
    finally:
        backend.exchanged_rows_launch = rule
