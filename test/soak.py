"""Thousands of mixed calls, and whether anything grows: `python test/soak.py --calls 20000 --out FILE.csv`.

Every backend that this machine has runs both losses with drawn options, shapes and uses. The first quarter visits every
combination that may compile something; after it nothing that is watched may grow. A growth makes the exit status 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch

import liger
import liger.backends  # fills the table
from liger.dispatch import OPS, Implementation, Request, device_info, registry, table
from liger.testing import Inputs, make_inputs

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHARE = 4
"""The first of so many equal parts of the calls is the warm-up."""
CHECKPOINTS = 5
"""In each of these parts."""
ROWS, LATER_ROWS = (2, 3, 16, 17, 33, 64), tuple(range(2, 65))
"""Numbers of rows in the warm-up, and after it: an N that nobody has seen compiles nothing."""
VOCAB, HIDDEN = {"cuda": 1000, "cpu": 40}, 32
BIG, BIG_EVERY = {"cuda": (2048, 8192, 256), "cpu": (256, 2048, 64)}, 200
"""(N, V, H) of every so-manieth call."""
RETAINED = 8
"""Graphs that stay alive, for a later backward or none."""


@dataclass(frozen=True)
class Profile:
    """Options that decide which kernels run; their numbers are drawn anew for every call, and decide nothing."""

    name: str
    dtype: torch.dtype
    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    target: torch.dtype = torch.int64


PROFILES = (
    Profile("plain", BF16),
    Profile("plain", F32, target=torch.int32),
    Profile("smoothed", BF16, ("label_smoothing", "lse_square_scale"), ("return_z_loss",), ("class_weight", "bias")),
    Profile("capped", F32, ("softcap", "logit_scale"), ("return_token_accuracy", "return_predicted_tokens")),
    Profile("scaled", F16, ("num_items",), ("use_token_scaling",), ("bias",)),
)
NUMBERS: dict[str, Callable[[random.Random], float]] = {
    "label_smoothing": lambda draw: draw.uniform(0.01, 0.5),
    "lse_square_scale": lambda draw: draw.uniform(1e-5, 1e-2),
    "softcap": lambda draw: draw.uniform(5, 50),
    "logit_scale": lambda draw: draw.uniform(0.1, 2),
    "num_items": lambda draw: draw.randint(1, 100),
}
USES = ("evaluate", "forward", "backward", "retain", "in_place", "slices", "invalid", "compiled")
INVALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("label_smoothing", {"label_smoothing": 2.0}),
    ("reduction", {"reduction": "avg"}),
    ("softcap", {"softcap": -1.0}),
    ("backend", {"backend": "none"}),
    ("target", {}),
)
"""What is wrong, and the options that are; a wrong target has a row too many."""


class Combination(NamedTuple):
    """All of a call that may compile something."""

    row: Implementation
    profile: Profile
    reduction: str
    use: str


def combinations(device: torch.device) -> list[Combination]:
    """Those that the machine's rows admit; none on an interpreter, which compiles nothing and takes long."""
    found = []
    for op in OPS:
        for row in table(op):
            interpreted = device.type == "cpu" and row.capability.interpreter is not None
            for profile in PROFILES:
                shape = (16, VOCAB[device.type], HIDDEN)[: 3 - (op == OPS[0])]
                if interpreted or row.reasons(Request(op, device_info(device), profile.dtype, shape, ())):
                    continue
                for reduction, use in itertools.product(("mean", "sum", "none"), USES):
                    # One compiled module for a row and a reduction: its options are its own.
                    compiles = use != "compiled" or (profile is PROFILES[0] and reduction != "sum")
                    in_place = use != "in_place" or "in_place" in row.capability.options
                    sliced = use != "slices" or reduction == "none"
                    if compiles and in_place and sliced:
                        found.append(Combination(row, profile, reduction, use))
    return found


class Soak:
    """The calls, one after the other."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.draw = device, random.Random(seed)
        self.graphs: deque[torch.Tensor] = deque(maxlen=RETAINED)
        self.pool: dict[tuple[Any, ...], Inputs] = {}
        self.modules: dict[tuple[str, str, str], Any] = {}
        self.known: dict[Combination, list[torch.Tensor]] = {}
        self.vocab, self.big = VOCAB[device.type], BIG[device.type]

    def fill_pool(self, every: list[Combination]) -> None:
        """Tensors made later would look like a leak."""
        for chosen in every:
            self.inputs(chosen, LATER_ROWS[-1], self.vocab, HIDDEN)
            self.inputs(chosen, *self.big)

    def inputs(self, chosen: Combination, rows: int, vocab: int, hidden: int) -> Inputs:
        """The first `rows` rows of tensors that are made once."""
        profile, fused = chosen.profile, chosen.row.op == OPS[1]
        key = (profile, fused, vocab, hidden)
        if key not in self.pool:
            given = {"class_weight": "class_weight" in profile.tensors, "bias": fused and "bias" in profile.tensors}
            size = (rows, vocab, hidden if fused else None)
            made = make_inputs(*size, dtype=profile.dtype, device=self.device, **given)
            self.pool[key] = replace(made, target=made.target.to(profile.target))
        whole = self.pool[key]
        return replace(whole, input=whole.input[:rows], target=whole.target[:rows])

    def options(self, chosen: Combination, rows: int) -> dict[str, Any]:
        """Every number is new."""
        admitted = chosen.row.capability.options
        options: dict[str, Any] = {"backend": chosen.row.backend, "reduction": chosen.reduction}
        options |= {name: NUMBERS[name](self.draw) for name in chosen.profile.numbers}
        options |= {name: True for name in chosen.profile.flags if name in admitted}
        if chosen.reduction != "mean":
            options.pop("num_items", None)
        if "chunk_size" in admitted and self.draw.random() < 0.3:
            options["chunk_size"] = self.draw.randint(max(1, rows // 4), rows)
        return options

    def call(self, chosen: Combination, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        """The loss alone."""
        if chosen.row.op == OPS[1]:
            made = liger.liger_fused_linear_cross_entropy(
                inputs.input, inputs.weight, inputs.target, inputs.bias, inputs.class_weight, **options
            )
        else:
            made = liger.liger_cross_entropy(inputs.input, inputs.target, inputs.class_weight, **options)
        return made if isinstance(made, torch.Tensor) else made.loss

    def compiled(self, chosen: Combination) -> Any:
        """One module for a row and a reduction."""
        fused = chosen.row.op == OPS[1]
        key = (chosen.row.op, chosen.row.backend, chosen.reduction)
        if key not in self.modules:
            kind = liger.LigerFusedLinearCrossEntropyLoss if fused else liger.LigerCrossEntropyLoss
            module = kind(reduction=chosen.reduction, backend=chosen.row.backend)
            self.modules[key] = torch.compile(module, backend="aot_eager", fullgraph=True)
        return self.modules[key]

    def use(self, chosen: Combination, rows: int, vocab: int | None = None, hidden: int = HIDDEN) -> None:
        """One call, and what becomes of its graph."""
        inputs, options = self.inputs(chosen, rows, vocab or self.vocab, hidden), self.options(chosen, rows)
        if chosen.use == "invalid":
            self.refuse(chosen, inputs, options)
            return
        if chosen.use == "evaluate":
            with torch.no_grad():
                self.call(chosen, inputs, options)
            return
        leaves = inputs.leaves(*(name for name in ("input", "weight", "bias") if self.frozen(name, inputs)))
        if chosen.use == "in_place":
            leaves, options = replace(leaves, input=leaves.input * 1), options | {"in_place": True}
        if chosen.use == "compiled":
            # Which gradients are wanted decides what is traced.
            leaves = inputs.leaves()
            given = (leaves.input, leaves.target) if leaves.weight is None else (leaves.weight, leaves.input, leaves.target)
            loss = self.compiled(chosen)(*given)
        else:
            loss = self.call(chosen, leaves, options)
        if not loss.requires_grad:
            raise AssertionError(f"{chosen}: the loss has no graph")
        if chosen.use in ("backward", "in_place", "compiled"):
            loss.backward(torch.rand_like(loss))
        elif chosen.use == "slices":
            half = rows // 2
            loss[:half].sum().backward(retain_graph=True)
            loss[half:].sum().backward()
        elif chosen.use == "retain":
            loss.backward(torch.ones_like(loss), retain_graph=True)
            self.graphs.append(loss)
            if self.draw.random() < 0.5:
                earlier = self.draw.choice(self.graphs)
                earlier.backward(torch.ones_like(earlier), retain_graph=True)

    def frozen(self, name: str, inputs: Inputs) -> bool:
        """One of several is frozen now and then, never all."""
        return inputs.weight is not None and name != "input" and self.draw.random() < 0.25

    def refuse(self, chosen: Combination, inputs: Inputs, options: dict[str, Any]) -> None:
        """A ValueError that names what is wrong."""
        name, wrong = self.draw.choice(INVALID)
        if name == "target":
            inputs = replace(inputs, target=inputs.target.new_zeros(len(inputs.target) + 1))
        try:
            self.call(chosen, inputs, options | wrong)
        except ValueError as error:
            if name not in str(error):
                raise
        else:
            raise AssertionError(f"{chosen}: {name} was accepted")

    def same_as_before(self, chosen: Combination) -> None:
        """A row's first combination gives bit for bit what it gave at first."""
        leaves = self.inputs(chosen, LATER_ROWS[-1], self.vocab, HIDDEN).leaves()
        loss = self.call(chosen, leaves, {"backend": chosen.row.backend})
        loss.backward()
        got = [loss.detach(), leaves.input.grad]
        known = self.known.setdefault(chosen, got)
        if not all(torch.equal(*pair) for pair in zip(known, got, strict=True)):
            raise AssertionError(f"{chosen}: another result than at first")


class Sample(NamedTuple):
    """What is watched. Nothing is in use but what the library and torch keep."""

    calls: int
    allocated: int
    """Bytes of the GPU in live tensors and workspaces."""
    reserved: int
    """Bytes of the GPU that torch's allocator holds."""
    resident: int
    """Bytes of the process in memory."""
    blocks: int
    """Of Python's allocator."""
    tensors: int
    """That Python's collector sees; not those of the warm-up."""
    threads: int
    triton_compiled: int
    """Compiled kernels, and keys that lead to them."""
    cutedsl_compiled: int
    graphs: int
    """That Dynamo has traced."""


WATCHED = Sample._fields[1:]


def tolerances(calls: int) -> dict[str, float]:
    """How much more than at the end of the warm-up each may be, `calls` later.

    What is counted exactly may not grow at all. The rest is allowed what chance may do, and less than what a leak in every
    tenth call costs: an object is at least a block, and a graph that is kept alive has thousands of bytes.
    """
    return {
        **dict.fromkeys(("allocated", "tensors", "threads", "triton_compiled", "cutedsl_compiled", "graphs"), 0),
        "blocks": 500 + calls / 10,
        "reserved": 3 * (20 << 20),  # segments of torch's allocator: among which of them blocks lie is chance
        "resident": (32 << 20) + 100 * calls,  # arenas of the C library come and go in megabytes
    }


def growths(samples: list[Sample]) -> list[str]:
    """What grew after the warm-up, beyond its tolerance."""
    warm = [sample for sample in samples if sample.calls * SHARE <= samples[-1].calls]
    first, last = warm[-1], samples[-1]
    allowed = tolerances(last.calls - first.calls)
    return [
        f"{name} grew from {getattr(first, name)} to {getattr(last, name)} in {last.calls - first.calls} calls "
        f"(allowed: {allowed[name]:.0f})"
        for name in WATCHED
        if getattr(last, name) - getattr(first, name) > allowed[name]
    ]


def sample(calls: int, device: torch.device) -> Sample:
    """Measured when nothing is under way. The memo of choices, which is bounded, is emptied first."""
    if len(registry._memo) > registry.MEMO_SIZE:
        raise AssertionError(f"the dispatcher's memo has {len(registry._memo)} entries")
    registry._memo.clear()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    for _ in range(2):
        gc.collect()
    return Sample(
        calls,
        torch.cuda.memory_allocated(device) if cuda else 0,
        torch.cuda.memory_reserved(device) if cuda else 0,
        _status("VmRSS") << 10,
        sys.getallocatedblocks(),
        sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        _status("Threads"),
        triton_kernels(),
        cutedsl_kernels(),
        torch._dynamo.utils.counters["stats"]["unique_graphs"] if "torch._dynamo" in sys.modules else 0,
    )


def _status(name: str) -> int:
    """A number of this process, as Linux tells it; elsewhere Python's own threads, and 0."""
    path = Path("/proc/self/status")
    if not path.exists():
        return threading.active_count() if name == "Threads" else 0
    return next(int(line.split()[1]) for line in path.read_text("utf-8").splitlines() if line.startswith(name + ":"))


def triton_kernels() -> int:
    """Of all devices."""
    kernels = sys.modules.get("liger.backends.triton.kernels")
    found = [value for value in vars(kernels).values() if hasattr(value, "device_caches")] if kernels else []
    caches = [cache for kernel in found for cache in kernel.device_caches.values()]
    return sum(len(part) for cache in caches for part in cache if isinstance(part, dict))


def cutedsl_kernels() -> int:
    """Of all devices, and their places on them."""
    launch = sys.modules.get("liger.backends.cutedsl.launch")
    names = ("compiled_rows", "compiled_scale", "rows_on", "scale_on")
    return 0 if launch is None else sum(getattr(launch, name).cache_info().currsize for name in names)


def run(calls: int, device: torch.device, seed: int) -> Iterator[Sample]:
    """A sample at the start and after every part of the calls.

    Raises:
        AssertionError: a call gave what it should not.
        ValueError: too few calls to visit every combination in the warm-up.
    """
    every, soak = combinations(device), Soak(device, seed)
    first = {chosen.row: chosen for chosen in reversed(every) if chosen.reduction == "mean"}
    bigs = [c for c in every if c.use == "backward" and c.profile is PROFILES[0] and c.reduction != "sum"]
    warm_up, part = calls // SHARE, calls // (SHARE * CHECKPOINTS)
    waiting = list(every)
    if len(waiting) + warm_up // BIG_EVERY > warm_up:
        raise ValueError(f"too few calls: the first quarter of them has to meet {len(waiting)} combinations, got {calls}")
    soak.fill_pool(every)
    for chosen in every:  # traced for the first N, then for all others
        for rows in ROWS[:3] if chosen.use == "compiled" else ():
            soak.use(chosen, rows)
    for chosen in bigs:
        soak.use(chosen, *soak.big)
    soak.draw.shuffle(waiting)
    for number in range(1, calls + 1):
        warm = number <= warm_up
        if number % BIG_EVERY == 0:
            soak.use(bigs[number // BIG_EVERY % len(bigs)], *soak.big)
        else:
            chosen = waiting.pop() if waiting and warm else soak.draw.choice(every)
            soak.use(chosen, soak.draw.choice(ROWS if warm else LATER_ROWS))
        if number % part == 0:
            soak.graphs.clear()
            for chosen in first.values():
                soak.same_as_before(chosen)
            yield sample(number, device)
            if number < warm_up:
                gc.freeze()  # modules and what else is there for good: to look at it every time would take most of the time


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000, help="how many (20000)")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the samples to this CSV file")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch's own tracing
    samples: list[Sample] = []
    print(" ".join(f"{name:>16}" for name in Sample._fields))
    for found in run(given.calls, given.device, given.seed):
        samples.append(found)
        print(" ".join(f"{value:16}" for value in found), flush=True)
    if given.out is not None:
        records.write(given.out, Sample._fields, samples, given.device)
    grown = growths(samples)
    print("\n".join(grown) or f"{given.calls} calls, and nothing grew")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
