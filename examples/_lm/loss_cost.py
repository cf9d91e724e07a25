"""What the loss layer alone costs: time and peak extra memory of its forward and backward, fused against unfused."""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from _lm.tokens import IGNORE_INDEX

LossLayer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head weight (V, H), hidden states (N, H), targets (N,)) -> mean loss over labelled targets."""


def unfused_loss(weight: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """The same loss by way of all N x V logits: what a training loop without this package computes."""
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)


@dataclass(frozen=True)
class LossCost:
    """Cost of one forward and backward of a loss layer."""

    milliseconds: float
    """Median of the repeats."""
    peak_extra_bytes: int | None
    """Most bytes alive at once beyond the inputs, the gradients included; None where the device cannot tell."""


def measure(layers: dict[str, LossLayer], weight: Tensor, hidden: Tensor, targets: Tensor, repeats: int) -> dict[str, LossCost]:
    """Measure each layer on the same inputs, interleaved so that a busy machine slows all of them alike."""

    def run(layer: LossLayer) -> None:
        weight_leaf, hidden_leaf = weight.detach().requires_grad_(), hidden.detach().requires_grad_()
        torch.autograd.backward(layer(weight_leaf, hidden_leaf, targets))

    def run_timed(layer: LossLayer) -> float:
        _synchronize(weight.device)
        start = time.perf_counter()
        run(layer)
        _synchronize(weight.device)
        return 1e3 * (time.perf_counter() - start)

    # Memory first: it warms up as well.
    peaks = {name: peak_extra_bytes(functools.partial(run, layer), weight.device) for name, layer in layers.items()}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _, (name, layer) in itertools.product(range(repeats), layers.items()):
        times[name].append(run_timed(layer))
    return {name: LossCost(statistics.median(times[name]), peaks[name]) for name in layers}


def peak_extra_bytes(function: Callable[[], None], device: torch.device) -> int | None:
    """Run a function and return how far the allocated memory rose above where it started, at its highest."""
    if device.type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type == "cpu":
        return max(itertools.accumulate(_cpu_allocations(function)), default=0)
    function()
    return None


def _cpu_allocations(function: Callable[[], None]) -> Iterator[int]:
    """Run a function and yield, in order, what it allocates (bytes > 0) and frees (bytes < 0) on the CPU.

    The profiler hears of it from PyTorch's allocator itself, so temporaries inside an operator count as well. A buffer
    that an external library takes from the system for itself does not.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise its start and stop are reported on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory_events = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(memory_events, key=lambda event: event["ts"]):
        yield event["args"]["Bytes"]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
