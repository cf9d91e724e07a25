"""A vocabulary split over GPUs against one GPU that has all of it: correctness, time, memory, bytes.

    torchrun --nproc-per-node 2 -m benchmark.benchmark_vocab_parallel --out benchmark/data/vocab_parallel_h200.csv

Every rank also runs the whole vocabulary on its own, in turn with the split one and under the same sustained load: that is
the time of one GPU. Rank 0 reports the slowest rank's medians. Bytes are what the collectives were given, what a ring would
send of that, what kernels exchanged, and what NVLink's counters say where they can be read. The backend is the
dispatcher's choice, which may differ between one GPU and the split, or `--backend` for both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.common import (
    LEAD_CYCLES,
    Measurement,
    Quantiles,
    SustainedLoad,
    default_device,
    describe,
    peak_extra_mib,
    print_table,
    relative_error,
    write_csv,
)
from liger import VocabParallel, explain, liger_cross_entropy, liger_fused_linear_cross_entropy
from liger.backends.plan import make_plan
from liger.exchange import KNOWN, ROW_BYTES, PeerRows
from liger.options import CrossEntropyOptions
from liger.testing import Inputs, assert_within_budget, make_inputs, reference, yardstick

Step = Callable[[], Any]
WAYS = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
COUNTED_STEPS = 10
COLLECTIVE_ROW_BYTES = 12
"""Three fp32 statistics of a row, where a collective sends them."""
CHECKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mean", {}),
    ("none", {"reduction": "none"}),
    ("everything", {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0, "return_predicted_tokens": True}),
)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """(collective, bytes that this rank gives), filled while inside."""
    seen: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in WAYS if hasattr(dist, name)}

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, **options: Any) -> Any:
            given = tensors[0] if name == "all_reduce" else tensors[1]
            seen.append((re.sub("_(single|into_tensor|tensor)$", "", name), given.nbytes))
            return original(*tensors, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, recording(name, original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def sent_bytes(collectives: Sequence[tuple[str, int]], ranks: int) -> float:
    """What each rank sends over a ring."""
    share = {"all_gather": ranks - 1, "reduce_scatter": (ranks - 1) / ranks, "all_reduce": 2 * (ranks - 1) / ranks}
    return sum(share[name] * given for name, given in collectives)


def predicted_bytes(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, ranks: int, row_bytes: int
) -> float:
    """What a rank sends in a step: three statistics a row to every other rank, and the hidden states' gradient once."""
    n, _, hidden = shape
    plan = make_plan(shape, device.type, dtype, chunk_size=None, accum_dtype=None, recompute=False, ranks=ranks)
    sums = 0 if name.startswith("logits") or "not reduced" in name else n * hidden * plan.sum_dtype.itemsize
    gathers = n * hidden * dtype.itemsize if "sequence parallel" in name else 0
    if "sequence parallel" in name:  # an all-gather and a reduce-scatter, each half of an all-reduce
        return row_bytes * n * (ranks - 1) + (ranks - 1) / ranks * (gathers + sums)
    return row_bytes * n * (ranks - 1) + 2 * (ranks - 1) / ranks * sums


def nvlink_bytes(device: torch.device) -> int | None:
    """What this GPU has sent over NVLink since it was reset; None where that cannot be read."""
    if device.type != "cuda":
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    counts = [int(count) for count in re.findall(r"Data Tx:\s*(\d+)\s*KiB", text)]
    return 1024 * sum(counts) if counts else None


def slowest_rank_ms(prepare: Callable[[], Step], repeats: int, load: SustainedLoad, device: torch.device) -> Quantiles:
    """A step's time on the slowest rank, each after load and from a common start; the same number of steps on every rank."""
    prepare()()
    times: list[Callable[[], float]] = []
    for _ in range(repeats):
        step = load.before(prepare)()
        if device.type != "cuda":
            dist.barrier()
            began = time.perf_counter()
            step()
            elapsed = (time.perf_counter() - began) * 1e3
            times.append(lambda elapsed=elapsed: elapsed)  # type: ignore[misc]
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(LEAD_CYCLES)
        dist.all_reduce(torch.zeros(1, device=device))  # the GPUs, whose clocks differ, begin together
        start.record()
        step()
        end.record()
        times.append(lambda start=start, end=end: start.elapsed_time(end))  # type: ignore[misc]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    found = torch.tensor([*Quantiles.of([elapsed() for elapsed in times])], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return Quantiles(*found.tolist())


class Bench:
    """Both ops, whole and split, on this rank."""

    def __init__(
        self, device: torch.device, rows: int, vocab: int, hidden: int, dtype: torch.dtype, backend: str | None
    ) -> None:
        self.device, self.shape, self.dtype, self.backend = device, (rows, vocab, hidden), dtype, backend
        self.split = VocabParallel.even(vocab)
        self.chosen = slice(self.split.start, self.split.stop)
        full = make_inputs(rows, vocab, hidden, dtype=dtype, device=device, ignored=0.0)
        self.x, self.target, weight = full.input.requires_grad_(), full.target, full.weight
        if weight is None:
            raise RuntimeError("make_inputs gave no head")
        self.weight = weight.requires_grad_()
        self.own_weight = weight.detach()[self.chosen].clone().requires_grad_()
        self.load = SustainedLoad(device)

    def fused(self, weight: Tensor, split: VocabParallel | None, **options: Any) -> tuple[Tensor, ...]:
        """(loss, dx, dW)"""
        x = self.x
        if split is not None and split.sequence_parallel:
            x = x.detach().chunk(split.ranks)[dist.get_rank()].requires_grad_()
        loss = liger_fused_linear_cross_entropy(x, weight, self.target, vocab_parallel=split, backend=self.backend, **options)
        return (loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight)))

    def logits(self, weight: Tensor) -> Tensor:
        """Given to the loss alone."""
        with torch.no_grad():
            return (self.x @ weight.t()).requires_grad_()

    def steps(self) -> Mapping[str, Callable[[], Step]]:
        """Name to what prepares a step."""
        one, own, split, n = self.weight, self.own_weight, self.split, self.shape[0]
        tokens, left = replace(split, sequence_parallel=True), replace(split, reduce_input_grad=False)

        def fused(*args: Any, **options: Any) -> Callable[[], Step]:
            return lambda: lambda: self.fused(*args, **options)

        steps = {
            "linear, one GPU": fused(one, None),
            "linear, split": fused(own, split),
            "linear, split, one chunk": fused(own, split, chunk_size=n),
            "linear, split, dx not reduced": fused(own, left),
            "linear, split, sequence parallel": fused(own, tokens),
            "linear, one GPU, none": fused(one, None, reduction="none"),
            "linear, split, none": fused(own, split, reduction="none"),
        }
        whole, part = self.logits(one), self.logits(own)

        def given(logits: Tensor, split: VocabParallel | None, **options: Any) -> Callable[[], Step]:
            def step() -> Any:
                loss = liger_cross_entropy(logits, self.target, vocab_parallel=split, backend=self.backend, **options)
                return torch.autograd.grad(loss.sum(), logits)

            return lambda: step

        for reduction in ("mean", "none"):
            suffix = "" if reduction == "mean" else ", none"
            steps[f"logits, one GPU{suffix}"] = given(whole, None, reduction=reduction)
            steps[f"logits, split{suffix}"] = given(part, split, reduction=reduction)
        dx, statistics = torch.empty_like(self.x), torch.empty(3, n, device=self.device)
        steps["sum of dx alone"] = lambda: lambda: dist.all_reduce(dx)
        steps["statistics alone"] = lambda: lambda: split.gather(statistics)
        return steps

    def errors(self) -> dict[str, float]:
        """Of the split loss and gradients relative to those of one GPU, the worst rank's."""
        whole, split = self.fused(self.weight, None), self.fused(self.own_weight, self.split)
        right = (whole[0], whole[1], whole[2][self.chosen])
        found = [relative_error(ours, theirs.double()) for ours, theirs in zip(split, right, strict=True)]
        worst = torch.tensor(found, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return dict(zip(("loss", "dx", "dW"), worst.tolist(), strict=True))

    def backends(self) -> Iterator[str]:
        """Which backend runs what."""
        about = {"device": self.device, "dtype": self.dtype, "backend": self.backend}
        for name, shape in (("logits", self.shape[:2]), ("linear", self.shape)):
            op = "cross_entropy" if name == "logits" else "fused_linear_cross_entropy"
            one, split = (explain(op, shape=shape, **about, **more).chosen for more in ({}, {"vocab_parallel": self.split}))
            yield f"{name}: one GPU {one}, split {split}"

    @property
    def peers(self) -> PeerRows | None:
        """Through which kernels exchange statistics, once they have; None where a collective does."""
        return KNOWN.get(self.split.group, {}).get(self.device)

    def exchanged_rows(self) -> int:
        """How many rows kernels have exchanged so far."""
        return 0 if self.peers is None else self.peers.rows_sent

    def bytes(self, step: Step) -> tuple[list[tuple[str, int]], int, float | None]:
        """(what the collectives of a step were given, rows that kernels exchanged, bytes that NVLink counted in a step)"""
        sent = self.exchanged_rows()
        with recorded() as given:
            step()
        sent = self.exchanged_rows() - sent
        dist.barrier()
        before = nvlink_bytes(self.device)
        for _ in range(COUNTED_STEPS):
            step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        after = nvlink_bytes(self.device)
        dist.barrier()
        return given, sent, None if before is None or after is None else (after - before) / COUNTED_STEPS


def check_against_oracle(device: torch.device, backend: str | None) -> int:
    """Uneven, padded parts against the float64 oracle of the whole; returns how many calls were checked."""
    vocab, ranks, rank = 1000, dist.get_world_size(), dist.get_rank()
    cut = [0, *(600 + 20 * r for r in range(ranks - 1)), vocab + 40]
    split = VocabParallel(None, cut[rank], cut[rank + 1], vocab)
    checked = 0
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (None, 64):
            for _, options in CHECKS:
                whole = make_inputs(96, vocab, hidden, dtype=dtype, class_weight=True, bias=hidden is not None)
                _check_one(whole, split, options, backend, device)
                checked += 1
    return checked


def _check_one(whole: Inputs, split: VocabParallel, options: dict[str, Any], backend: str | None, device: torch.device) -> None:
    asked, how = CrossEntropyOptions(**options), {"vocab_parallel": split, "backend": backend, **options}
    half = whole.weight is not None and whole.input.dtype == torch.bfloat16 and device.type != "cpu"
    truth, own = reference(whole, asked), yardstick(whole, asked, gemm_dtype=whole.input.dtype if half else None)

    def part(tensor: Tensor | None, dim: int = 0) -> Any:
        if tensor is None:
            return None
        found = tensor.narrow(dim, split.start, split.classes)
        shape = list(tensor.shape)
        shape[dim] = split.width - split.classes
        return torch.cat((found, tensor.new_full(shape, torch.nan)), dim).to(device)

    target, weights = whole.target.to(device), part(whole.class_weight)
    if whole.weight is None:
        leaves = [part(whole.input, 1).requires_grad_()]
        got = liger_cross_entropy(leaves[0], target, weights, **how)
        names = [("input", 1)]
    else:
        leaves = [tensor.requires_grad_() for tensor in (whole.input.to(device), part(whole.weight), part(whole.bias))]
        got = liger_fused_linear_cross_entropy(*leaves[:2], target, leaves[2], weights, **how)
        names = [("input", None), ("weight", 0), ("bias", 0)]
    loss = got if isinstance(got, Tensor) else got.loss
    gradients = torch.autograd.grad(loss.sum(), leaves)
    for gradient, (name, dim) in zip(gradients, names, strict=True):
        wanted = [getattr(found, name) for found in (truth.outcome, own.outcome, truth.magnitudes)]
        ours = gradient.cpu()
        if dim is not None:
            if ours.narrow(dim, split.classes, split.width - split.classes).any():
                raise AssertionError(f"padding of {name} has a gradient")
            ours = ours.narrow(dim, 0, split.classes)
            wanted = [tensor.narrow(dim, split.start, split.classes) for tensor in wanted]
        # The ranks' parts of dx are rounded before they are summed, which a yardstick of one rank does not do.
        slack = 2 if name == "input" and half else 1
        assert_within_budget(ours, wanted[0], wanted[1], ours.dtype, magnitude=slack * wanted[2], what=f"gradient of {name}")


def joined(kind: str) -> torch.device:
    """This rank's device of a kind, once the process is one of the default group."""
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, count; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device().type)
    parser.add_argument("--backend", help="for one GPU and for the split; default: the dispatcher's choice for each")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    device = joined(given.device)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def say(line: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    say(f"{describe(device)}, {ranks} ranks")
    say(f"within the budget of the float64 oracle: {check_against_oracle(device, given.backend)} calls")
    bench = Bench(device, given.rows, given.vocab, given.hidden, getattr(torch, given.dtype), given.backend)
    for line in bench.backends():
        say(line)
    measurements: list[Measurement] = []
    config = {"N": given.rows, "V": given.vocab, "H": given.hidden, "dtype": given.dtype}
    config |= {"backend": given.backend} if given.backend else {}

    def note(name: str, metric: str, unit: str, y: Quantiles, **more: Any) -> None:
        measurements.append(
            Measurement("vocab_parallel", name, "full", metric, unit, "ranks", "ranks", ranks, y, config | more)
        )

    errors = bench.errors()
    say(f"relative to one GPU at {given.rows} x {given.vocab}: {errors}")
    for what, error in errors.items():
        note("linear, split", f"{what}_difference", "1", Quantiles(error, error, error))
    lines = []
    for name, prepare in bench.steps().items():
        y, peak = slowest_rank_ms(prepare, given.repeats, bench.load, device), peak_extra_mib(prepare, device)
        note(name, "speed", "ms", y)
        if peak is not None:
            note(name, "memory", "MB", Quantiles(peak, peak, peak))
        collectives, rows, counted = ([], 0, None) if "one GPU" in name else bench.bytes(prepare())
        ring = sent_bytes(collectives, ranks) + ROW_BYTES * rows * (ranks - 1)
        if "split" in name:
            row_bytes = COLLECTIVE_ROW_BYTES if bench.peers is None else ROW_BYTES
            expected = predicted_bytes(name, bench.shape, bench.dtype, device, ranks, row_bytes)
            note(name, "sent", "B", Quantiles(ring, ring, ring), collectives=collectives, exchanged=rows, predicted=expected)
            if ring != expected:
                raise AssertionError(f"{name}: a rank sends {ring} bytes, predicted {expected}: {collectives}, {rows} rows")
        if counted is not None:
            note(name, "nvlink_sent", "B", Quantiles(counted, counted, counted))
        lines.append(
            (
                name,
                f"{y.p50:.3f}",
                "" if peak is None else f"{peak:.0f}",
                f"{len(collectives)}",
                f"{rows}",
                f"{ring / 1e6:.3f}",
                "" if counted is None else f"{counted / 1e6:.3f}",
            )
        )
        say(f"{name}: {y.p50:.3f} ms")
        if rank == 0:
            write_csv(given.out, measurements, device)
    if rank == 0:
        print_table(
            ("step", "ms", "extra MiB", "collectives", "rows exchanged", "MB sent (ring)", "MB sent (NVLink counters)"), lines
        )
        ms = {m.kernel_provider: m.y.p50 for m in measurements if m.metric_name == "speed"}
        for op in ("linear", "logits"):
            for suffix in ("", ", none"):
                print(f"{op}{suffix}: {ms[f'{op}, split{suffix}'] / ms[f'{op}, one GPU{suffix}']:.3f} of one GPU's time")
    return 0


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
