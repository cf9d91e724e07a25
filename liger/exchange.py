"""Row statistics that the GPUs of one host tell each other from inside a kernel, through memory that all of them reach.

A collective between two kernels makes the second read the logits again from device memory. A kernel that stores a row's
statistics into its peers' memory, and waits for theirs, still has the row at hand.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import everyones

logger = logging.getLogger("liger")
Made = TypeVar("Made")

WORDS = 4
"""64-bit words from one row's statistics to the next's, a sector of 32 bytes: three hold a number and a tag each."""
ROW_BYTES = 24
"""Of these, what a rank sends each of the others of a row."""
LEAST_ROWS = 8192
"""That buffers have room for."""
MOST_RANKS = 8
"""That exchange: as many GPUs as reach each other's memory in the usual host."""
LAST_TAG = 2**31 - 1
"""Tags are positive int32."""


class Turn(NamedTuple):
    """What the kernel of one call is told."""

    addresses: Tensor
    """(ranks,) int64, on the device: of every rank's buffer, (2, ranks, capacity, WORDS) int64, as this rank sees it."""
    rank: int
    capacity: int
    tag: int
    """Of this call, positive; its lowest bit says which half of the buffers. The other half's words may still be read."""
    timeout_s: float
    """A rank whose statistics have not come by then is lost."""

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.addresses.shape[0]


class Unusable(RuntimeError):
    """Memory that all ranks reach could not be made; raised on all of them."""


class PeerRows:
    """One process group's buffers on one device: who writes where, and which call a word is of.

    Two halves suffice. A kernel ends only when all rows of every rank have come, so a peer that is at call k + 2 has seen
    my kernel of call k + 1, before which that of call k had ended: nobody reads call k's half any more.

    Args:
        rank: of this process in the group.
        timeout_s: the group's.
        allocate: gives, for a number of words, this rank's zeroed int64 buffer and the addresses of everyone's as int64
            on the device. A collective operation that waits for whatever uses an earlier buffer, or raises `Unusable`.
    """

    def __init__(self, rank: int, ranks: int, timeout_s: float, allocate: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self.rank, self.ranks, self.timeout_s, self._allocate = rank, ranks, timeout_s, allocate
        self.capacity = 0
        self.tag = 1
        self.rows_sent = 0
        """By all calls so far; those that are ignored are sent like all others."""

    def reserve(self, rows: int) -> None:
        """Make room for a call of `rows` rows, which are as many on every rank: so all grow, or none."""
        if rows > self.capacity or self.tag == LAST_TAG:  # a new buffer has no words whose tags could come again
            capacity = max(LEAST_ROWS, 1 << (rows - 1).bit_length(), self.capacity)
            self._own, self._addresses = self._allocate(2 * self.ranks * capacity * WORDS)  # own: to keep it
            self.capacity, self.tag = capacity, 1

    @contextlib.contextmanager
    def turn(self, rows: int) -> Iterator[Turn]:
        """One call's kernel is launched inside, after `reserve`."""
        self.tag += 1
        self.rows_sent += rows
        with _in_order(self._addresses.device):
            yield Turn(self._addresses, self.rank, self.capacity, self.tag, self.timeout_s)


KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerRows | None]] = WeakKeyDictionary()
"""What `peer_rows` has found."""


def peer_rows(group: dist.ProcessGroup, device: torch.device, rows: int) -> PeerRows | None:
    """A group's buffers, with room for `rows` rows; None on every rank if any of them cannot have them.

    The first call of a group, and one with more rows than any before, is a collective operation. Which it is, and why, is
    logged once.
    """
    known = KNOWN.setdefault(group, {})
    try:
        if device not in known:
            known[device] = _found(group, device, rows)
        peers = known[device]
        if peers is not None:
            peers.reserve(rows)
    except Unusable as error:
        logger.info("vocab_parallel: row statistics go through a collective, because %s", error)
        known[device] = peers = None
    return peers


def _found(group: dist.ProcessGroup, device: torch.device, rows: int) -> PeerRows:
    """Raises `Unusable` on every rank, or on none."""
    ranks = dist.get_world_size(group)
    if device.type != "cuda" or torch.version.hip is not None:
        raise Unusable("only NVIDIA's GPUs exchange them in a kernel")
    if not 2 <= ranks <= MOST_RANKS:
        raise Unusable(f"the group's size is {ranks}, and not from 2 to {MOST_RANKS}")
    with torch.cuda.device(device):  # NCCL sends what is no tensor from the current one
        told = everyones((_host(), str(torch.cuda.get_device_properties(device).uuid)), group)
        # Two ranks on one GPU could wait for each other's kernels for ever.
        if len({host for host, _ in told}) > 1 or len({gpu for _, gpu in told}) < ranks:
            raise Unusable("the ranks do not have a GPU each of one host")
        timeout = _on_all(group, lambda: group._get_backend(device).options._timeout)  # a backend may know none
    of_group = ref(group)  # which `KNOWN` must not keep alive

    def allocate(words: int) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(device):
            return _symmetric(of_group(), device, words)

    peers = PeerRows(dist.get_rank(group), ranks, timeout.total_seconds(), allocate)
    peers.reserve(rows)
    logger.info("vocab_parallel: kernels exchange row statistics, over memory that all %d GPUs reach", ranks)
    return peers


def _symmetric(group: dist.ProcessGroup | None, device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    """As `PeerRows` asks for it, by torch's symmetric memory."""
    if group is None:
        raise RuntimeError("the process group is gone")

    def allocated() -> Tensor:
        from torch._C._distributed_c10d import _SymmetricMemory

        torch.cuda.synchronize(device)  # my kernels have ended, so nobody writes to an earlier buffer of mine any more
        torch.cuda.empty_cache()  # this memory is none of torch's allocator
        buffer = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int64, device).zero_()
        torch.cuda.synchronize(device)  # nobody knows its address before that
        return buffer

    def mapped() -> list[int]:
        from torch.distributed import _symmetric_memory

        return list(_symmetric_memory.rendezvous(own, group).buffer_ptrs)

    own = _on_all(group, allocated)  # before a rendezvous, to which all have to come
    bases = _on_all(group, mapped)
    starts = everyones((own.data_ptr() - bases[dist.get_rank(group)],), group)
    return own, torch.tensor([base + start for base, (start,) in zip(bases, starts, strict=True)], device=device)


def _on_all(group: dist.ProcessGroup, attempt: Callable[[], Made]) -> Made:
    """What `attempt` makes, where it fails on no rank; raises `Unusable` on all if on any."""
    made, failure = [], None
    try:
        made.append(attempt())
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    failures = [f"rank {rank}: {said}" for rank, (said,) in enumerate(everyones((failure,), group)) if said is not None]
    if failures:
        raise Unusable("; ".join(failures))
    return made[0]


def _host() -> str:
    """Of containers on one machine the same, of machines with one name another."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


_LAST: dict[torch.device, torch.cuda.Event] = {}
"""The end of the last kernel that waits for peers."""


@contextlib.contextmanager
def _in_order(device: torch.device) -> Iterator[None]:
    """Kernels that wait for peers run one after another on a device, in the order of their calls, on whatever streams.

    Two at once could take turns to fill two GPUs, each waiting for the one that does not fit.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.current_stream(device)
    if device in _LAST:
        stream.wait_event(_LAST[device])
    yield
    if device not in _LAST:
        _LAST[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
    _LAST[device].record(stream)
