"""`python -m liger bench`: time and memory of one shape on this machine, for every backend and PyTorch's own functions.

A quick answer: forward and backward of random inputs, all in turn, medians. How implementations of other packages compare,
with a flushed cache and under load, is for `python -m benchmark` in the repository.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import Explanation, Op
from .functional import GIVEN_TENSORS, explain, liger_cross_entropy, liger_fused_linear_cross_entropy
from .options import CrossEntropyOptions, CrossEntropyOutput
from .testing import Inputs, make_inputs

EAGER = "F.cross_entropy"
"""PyTorch's own, after `F.linear` for the fused loss."""
EAGER_OPTIONS = frozenset({"ignore_index", "reduction", "label_smoothing", "weight", "ce_weight", "bias"})
LEAST_STEPS = 3
"""Of an implementation: to warm up, for its memory, for its time."""
MOST_ROUNDS = 20
MIB = 1 << 20
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One implementation."""

    name: str
    """A backend's, or `EAGER`."""
    ms: float | None
    """Median of a forward and backward; None where it did not run."""
    extra_mib: float | None
    """How far a step raises the peak of memory above what its inputs hold; None where nobody tells."""
    reasons: tuple[str, ...] = ()
    """Why it did not run."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a shape costs."""

    explanation: Explanation
    """What the call gets, and the plan."""
    ignored: float
    """Share of the rows whose target is ignored."""
    lines: tuple[Line, ...]


def bench(
    op: Op,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    ignored: float = 0.0,
    seconds: float = 2.0,
    backend: str | None = None,
    say: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> Result:
    """Time every implementation that can serve a call.

    Args:
        op, dtype, shape, backend, options: as for `explain`; with a backend only that is compared with PyTorch.
        device: of this machine.
        ignored: share of the rows whose target is ignored, in [0, 1].
        seconds: about how long to measure. Whatever it is, each implementation runs once to warm up, once for its memory where
            that can be told, and once for its time at least.
        say: gets a line before whatever may take long.

    Raises:
        ValueError: as `explain`, and for a shape without rows, a share outside [0, 1] or a device that is not here.
    """
    asked = explain(op, device=device, dtype=dtype, shape=shape, backend=backend, **options)
    if shape[0] < 1:
        raise ValueError(f"shape must have at least one row to be timed, got {shape!r}")
    if not 0 <= ignored <= 1:
        raise ValueError(f"ignored must be in [0, 1], the share of rows that are ignored, got {ignored!r}")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    calls = {name: _Ours(op, name) for name in dict.fromkeys(name for name, _ in asked.rows)}
    reasons: dict[str, tuple[str, ...]] = {}
    for name in calls:
        answer = explain(op, device=device, dtype=dtype, shape=shape, backend=name, **options)
        if answer.chosen is None:
            reasons[name] = tuple(reason for _, against in answer.rows for reason in against)
    lacking = [f"torch has no {name}" for name, _ in asked.request.options if name not in EAGER_OPTIONS]
    if lacking:
        reasons[EAGER] = tuple(lacking)
    everything: dict[str, Callable[..., Tensor]] = {**calls, EAGER: _eager}
    able = {name: call for name, call in everything.items() if name not in reasons}
    steps: dict[str, Callable[[], Step]] = {}
    memory: dict[str, float | None] = {}
    if able:
        try:
            inputs, keywords = _inputs(op, device, dtype, shape, ignored, options)
        except (RuntimeError, OverflowError, TypeError) as error:  # out of memory, or of what torch can count
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"shape must be of tensors that fit into {device}, got {shape}: {said}") from error
        say(f"timing {asked.request}: {', '.join(able)}, at least {LEAST_STEPS} steps each")
    for name, call in able.items():
        prepare = _preparation(call, inputs, keywords)
        say(f"{name}: a first step, which compiles what has to be")
        try:
            start = time.monotonic()
            prepare()()
            _synchronize(device)
            say(f"{name}: took {time.monotonic() - start:.1f} s; a step for its memory")
            memory[name] = _extra_mib(prepare, device)
            steps[name] = prepare
        except Exception as error:  # noqa: BLE001 - out of memory, most likely: a line of the answer
            reasons[name] = (f"{type(error).__name__}: {' '.join(str(error).split())}",)
    if steps:
        say(f"{', '.join(steps)}: in turn for about {seconds:g} s, a step each at least")
    times = _interleaved_ms(steps, device, seconds)
    lines = tuple(Line(name, times.get(name), memory.get(name), reasons.get(name, ())) for name in everything)
    return Result(asked, ignored, lines)


@dataclass(frozen=True, slots=True)
class _Ours:
    op: Op
    backend: str

    def __call__(self, inputs: Inputs, **keywords: Any) -> Tensor:
        output: Tensor | CrossEntropyOutput
        if inputs.weight is None:
            output = liger_cross_entropy(inputs.input, inputs.target, inputs.class_weight, backend=self.backend, **keywords)
        else:
            tensors = (inputs.input, inputs.weight, inputs.target, inputs.bias, inputs.class_weight)
            output = liger_fused_linear_cross_entropy(*tensors, backend=self.backend, **keywords)
        return output.loss if isinstance(output, CrossEntropyOutput) else output


def _eager(inputs: Inputs, **keywords: Any) -> Tensor:
    logits = inputs.input if inputs.weight is None else F.linear(inputs.input, inputs.weight, inputs.bias)
    class_weight = None if inputs.class_weight is None else inputs.class_weight.to(logits.dtype)
    shared = {name: value for name, value in keywords.items() if name in EAGER_OPTIONS}
    return F.cross_entropy(logits, inputs.target, class_weight, **shared)


def _inputs(
    op: Op, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], ignored: float, options: dict[str, Any]
) -> tuple[Inputs, dict[str, Any]]:
    """Random tensors, and the keywords of a call on them."""
    keywords = {name: value for name, value in options.items() if name not in GIVEN_TENSORS[op]}
    ignore_index = CrossEntropyOptions(**keywords).ignore_index
    inputs = make_inputs(
        *shape,
        dtype=dtype,
        device=device,
        ignored=ignored,
        ignore_index=ignore_index,
        bias=options.get("bias", False),
        class_weight=options.get("weight", False) or options.get("ce_weight", False),
    )
    if options.get("num_items", False):
        keywords["num_items"] = float((inputs.target != ignore_index).sum())
    return inputs, keywords


def _preparation(call: Callable[..., Tensor], inputs: Inputs, keywords: dict[str, Any]) -> Callable[[], Step]:
    """What makes a step, untimed; where the logits may be overwritten it gets fresh ones."""

    def prepare() -> Step:
        tensors = inputs.leaves() if keywords.get("in_place", False) else _attached(inputs)
        wanted = [t for t in (tensors.input, tensors.weight, tensors.bias) if t is not None]

        def step() -> object:
            loss = call(tensors, **keywords)
            return torch.autograd.grad(loss, wanted, torch.ones_like(loss))

        return step

    return prepare


def _attached(inputs: Inputs) -> Inputs:
    """The same storage, requiring gradients."""
    weight, bias = (None if t is None else t.detach().requires_grad_() for t in (inputs.weight, inputs.bias))
    return replace(inputs, input=inputs.input.detach().requires_grad_(), weight=weight, bias=bias)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _interleaved_ms(steps: dict[str, Callable[[], Step]], device: torch.device, seconds: float) -> dict[str, float]:
    """Medians of rounds in which every step has its turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    end = time.monotonic() + seconds
    for round_ in range(MOST_ROUNDS):
        if round_ and time.monotonic() > end:
            break
        for name, prepare in steps.items():
            step = prepare()
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            found[name].append((time.perf_counter() - start) * 1e3)
            del step
    return {name: statistics.median(times) for name, times in found.items()}


def _extra_mib(prepare: Callable[[], Step], device: torch.device) -> float | None:
    """Of the allocator on a GPU; of the process, by its largest resident size, on a CPU where the system tells."""
    step = prepare()
    if device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process keeps would be used again without being seen
        Path("/proc/self/clear_refs").write_text("5")  # forgets the largest size so far
    except (OSError, AttributeError):  # another kernel, another C library
        return None
    before = _resident_bytes("VmRSS")
    step()
    return (_resident_bytes("VmHWM") - before) / MIB


def _resident_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024
