"""Processes that make up one world of `torch.distributed`, started once for many tests, and what tests run in them."""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist

import liger
from liger import VocabParallel
from liger.testing import Inputs, Outcome, collect

SECONDS = 120
"""After which a rank that has not answered is taken for hung."""


@dataclass
class Rank:
    """What a function that runs in a rank is given."""

    rank: int
    device: torch.device
    groups: dict = field(default_factory=dict)
    """name -> the group that this rank is in"""


def serve(connection, rank, size, device_type, groups, store):
    """Be one rank: run functions until there are no more."""
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    me = Rank(rank, device)
    for name, (ranks, seconds) in groups.items():
        group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=seconds))
        if rank in ranks:
            me.groups[name] = group
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        task = pickle.loads(connection.recv_bytes())
        if task is None:
            break
        function, args = task
        try:
            answer = (True, function(me, *args))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent hears of it
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        connection.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # threads of a group whose partner was lost would keep the process alive


class RankError(AssertionError):
    """A function has raised in a rank."""

    def __init__(self, rank, name, message, trace):
        super().__init__(f"rank {rank}: {trace}")
        self.name, self.message = name, message


class World:
    """The parent's side."""

    def __init__(self, size, groups, device_type="cpu"):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="liger-ranks-")
        self.ranks = {name: ranks for name, (ranks, _) in groups.items()} | {None: list(range(size))}
        self.connections, self.processes = [], []
        for rank in range(size):
            parent, child = context.Pipe()
            args = (child, rank, size, device_type, groups, f"{self.folder.name}/store")
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            self.connections.append(parent)
            self.processes.append(process)
        for rank in range(size):
            self.answer(rank)

    def answer(self, rank):
        """(whether it returned, what); raises if the rank hangs or has died."""
        if not self.connections[rank].poll(SECONDS):
            self.close()
            raise TimeoutError(f"rank {rank} has not answered for {SECONDS} s")
        return pickle.loads(self.connections[rank].recv_bytes())

    def outcomes(self, group, function, *args):
        """What `function(rank, *args)` gave or raised in every rank of a group (None: all), in its order."""
        task = pickle.dumps((function, args))
        for rank in self.ranks[group]:
            self.connections[rank].send_bytes(task)
        return [self.answer(rank) for rank in self.ranks[group]]

    def run(self, group, function, *args):
        """What `function(rank, *args)` returned in every rank of a group, in its order.

        Raises:
            RankError: the first that has raised.
        """
        answers = self.outcomes(group, function, *args)
        for rank, (returned, value) in zip(self.ranks[group], answers, strict=True):
            if not returned:
                raise RankError(rank, *value)
        return [value for _, value in answers]

    def close(self):
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


@dataclass
class Split:
    """How a call is split over the ranks of a group."""

    bounds: tuple
    """(start, stop) of every rank"""
    flags: dict = field(default_factory=dict)
    """of VocabParallel"""

    def of(self, rank, group, vocab):
        place = dist.get_rank(rank.groups[group] if group else None)
        return VocabParallel(rank.groups.get(group), *self.bounds[place], vocab, **self.flags, bounds=self.bounds)


def part(tensor, start, stop, dim=0):
    """Classes [start, stop) of a tensor, with NaN in place of those it does not have: padding may hold anything."""
    if tensor is None:
        return None
    size = tensor.shape[dim]
    own = tensor.narrow(dim, min(start, size), max(0, min(stop, size) - start))
    shape = list(tensor.shape)
    shape[dim] = stop - start - own.shape[dim]
    return torch.cat((own, tensor.new_full(shape, torch.nan)), dim)


def own_part(inputs: Inputs, split: VocabParallel) -> Inputs:
    """This rank's inputs from those of the whole vocabulary."""
    bounds = (split.start, split.stop)
    place, x = dist.get_rank(split.group), inputs.input
    if inputs.weight is None:
        x = part(x, *bounds, dim=x.ndim - 1)
    elif split.sequence_parallel:
        x = x.chunk(split.ranks)[place].contiguous()
    weight, bias = part(inputs.weight, *bounds), part(inputs.bias, *bounds)
    return replace(inputs, input=x, weight=weight, bias=bias, class_weight=part(inputs.class_weight, *bounds))


def loss_of(leaves: Inputs, split, **options):
    """The loss of what `own_part` gave."""
    options |= {"vocab_parallel": split, "num_items": leaves.num_items}
    if leaves.weight is None:
        return liger.liger_cross_entropy(leaves.input, leaves.target, leaves.class_weight, **options)
    return liger.liger_fused_linear_cross_entropy(
        leaves.input, leaves.weight, leaves.target, leaves.bias, leaves.class_weight, **options
    )


def to(device, inputs: Inputs) -> Inputs:
    moved = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return Inputs(**{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in moved.items()})


def outcome(rank, group, inputs, split: Split, options, upstream=None, frozen=()) -> Outcome:
    """Loss and gradients of this rank, on the CPU."""
    made = split.of(rank, group, inputs.vocab)
    leaves = own_part(to(rank.device, inputs), made).leaves(*frozen)
    got = collect(loss_of(leaves, made, **options), leaves, None if upstream is None else upstream.to(rank.device))
    output = type(got.output)(*(None if t is None else t.cpu() for t in got.output))
    return Outcome(output, *(None if t is None else t.cpu() for t in (got.input, got.weight, got.bias)))


@contextlib.contextmanager
def traffic():
    """A list of (collective, bytes that this rank gives), filled while inside."""
    seen, originals = [], {}
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")

    def recorded(name, original):
        def call(*tensors, **options):
            given = tensors[0] if name == "all_reduce" else tensors[1]
            seen.append((name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor"), given.nbytes))
            return original(*tensors, **options)

        return call

    for name in names:
        if hasattr(dist, name):
            originals[name] = getattr(dist, name)
            setattr(dist, name, recorded(name, originals[name]))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
