"""Fused linear cross entropy: time, memory and error of every implementation, against bare GEMMs of the same run.

    python -m benchmark.benchmark_fused_linear_cross_entropy [--show [SET ...]] [--errors] [--checks]

Hidden states are normal, heads normal over the root of H, the ignored rows spread over the batch. Time: forward and
backward, all providers in turn, L2 flushed before each, medians; the gradients of one run are gone before the next.
The floor is timed in the same rounds: the products that the labelled rows need, by torch.mm (three of them; two with
`--frozen-head`, one with `--no-grad`; for `--reduction none`, whose backward projects again, one more).

`--chunk-size` compares chunk sizes of ours with the plan's. `--errors` sets gradients against float64 at a size where
that fits. `--checks` tests what skipping ignored rows must not change. `--show` does all that is claimed in one run, or
those sets of it that are named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger import explain, liger_fused_linear_cross_entropy
from liger.backends import linear as loop
from liger.backends.ahead import project_ahead
from liger.backends.plan import Plan
from liger.testing import CASES
from liger.testing import Case as Shape

from .common import (
    DATA,
    Measurement,
    Quantiles,
    Report,
    Sizing,
    SustainedLoad,
    default_device,
    describe,
    device_ms,
    peak_extra_mib,
    print_markdown,
    relative_error,
)
from .providers import (
    LinearCrossEntropy,
    Provider,
    chunked_provider,
    linear_cross_entropy_providers,
    load_providers,
    provider_version,
)

IGNORE_FRACTION_VARIABLE = "LIGER_FLCE_BENCH_IGNORE_FRACTION"
NAMED = {shape.name: shape for shape in CASES}
USUAL_SHAPES = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-4b", "qwen3-8b", "llama-3.1-8b")
GEMMS = "gemms"
LOOKED_AT = 64
"""Rows and classes whose gradients are compared before anything is timed."""
NOT_THE_SAME = 0.1
"""Relative error from which a result is not this loss at all: a filter of small gradients alone costs a few percent."""
ERROR_SIZE = (2048, 16384, 1024)
"""(N, V, H) of `--errors`: float64 logits of 256 MiB."""
ERROR_CHUNKS = (1, 2, 4, 8, 16, 32, 64)
MIB = 1 << 20
SEQUENCE = 1024
SKIPPING_MIB = 4
"""What skipping may allocate beside one chunk of rows: the index of the labelled rows."""


@dataclass(frozen=True)
class Setting:
    """What is asked of the loss."""

    reduction: str = "mean"
    frozen_head: bool = False
    no_grad: bool = False

    @property
    def mode(self) -> str:
        """As in Liger-Kernel's benchmarks."""
        return "no-grad-forward" if self.no_grad else "full"

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows in a CSV file have in common."""
        return {
            "reduction": self.reduction,
            "frozen_head": self.frozen_head,
            "kernel_operation_mode": self.mode,
        }

    def __str__(self) -> str:
        return self.reduction + (" frozen-head" if self.frozen_head else "") + (" no-grad" if self.no_grad else "")


class Case:
    """The tensors of one size, and what is known about them."""

    def __init__(self, shape: Shape, rows: int, ignored: float, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.rows, self.ignored, self.device = shape, rows, ignored, device
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        self.x = normal(rows, shape.hidden).to(dtype)
        self.weight = normal(shape.vocab, shape.hidden).mul_(shape.hidden**-0.5).to(dtype)
        self.target = torch.randint(shape.vocab, (rows,), generator=generator, device=device)
        self.target[torch.randperm(rows, generator=generator, device=device)[: round(ignored * rows)]] = -100
        self.valid = self.target != -100
        self.labelled = rows - round(ignored * rows)

    def __str__(self) -> str:
        return f"{self.shape.name} BT={self.rows} ignored={100 * self.ignored:g}%"

    def leaves(self, setting: Setting) -> tuple[Tensor, Tensor]:
        """(x, weight) to call a loss with."""
        trained = not (setting.no_grad or setting.frozen_head)
        return self.x.detach().requires_grad_(not setting.no_grad), self.weight.detach().requires_grad_(trained)

    def bare_gemms(self, setting: Setting) -> None:
        """The products that cannot be avoided."""
        x, weight = self.x[: self.labelled], self.weight
        logits = x @ weight.t()
        if setting.no_grad:
            return
        if setting.reduction == "none":
            del logits
            logits = x @ weight.t()
        logits @ weight
        if not setting.frozen_head:
            logits.t() @ x

    @functools.cached_property
    def lse(self) -> Tensor:
        """(N,) float32, a chunk of rows at a time."""
        return torch.cat([torch.logsumexp((x @ self.weight.t()).float(), -1) for x in self.x.split(1024)])

    @functools.cached_property
    def losses(self) -> Tensor:
        """(N,) float32."""
        at_target = (self.x.float() * self.weight[self.target.clamp(min=0)].float()).sum(-1)
        return (self.lse - at_target).where(self.valid, 0)

    @functools.cached_property
    def classes(self) -> Tensor:
        """A few that occur as targets."""
        return self.target[self.valid][:LOOKED_AT].unique()

    def few_gradients(self, scale: float) -> tuple[Tensor, Tensor]:
        """Gradient of the first rows of x, and of the rows of weight in `classes`, of a sum of losses times `scale`."""
        x, target, valid = self.x[:LOOKED_AT], self.target[:LOOKED_AT], self.valid[:LOOKED_AT]
        rows = torch.exp((x @ self.weight.t()).float() - self.lse[:LOOKED_AT, None])
        rows[torch.arange(len(rows)), target.clamp(min=0)] -= 1
        rows *= scale * valid[:, None]
        columns = torch.exp((self.x @ self.weight[self.classes].t()).float() - self.lse[:, None])
        columns -= (self.target[:, None] == self.classes).float()
        columns *= scale * self.valid[:, None]
        return (rows @ self.weight.float()).double(), (columns.t() @ self.x.float()).double()


@dataclass(frozen=True)
class Use:
    """One provider on one case: prepares the steps that are measured."""

    case: Case
    setting: Setting
    provider: Provider
    loss: LinearCrossEntropy

    def run(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """(loss, the wanted gradients...)"""
        if self.setting.no_grad:
            with torch.no_grad():
                return (self.loss(x, weight, self.case.target, self.setting.reduction),)
        loss = self.loss(x, weight, self.case.target, self.setting.reduction)
        upstream = loss.new_ones(()).expand(loss.shape)
        wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
        return (loss.detach(), *torch.autograd.grad(loss, wanted, upstream))

    def prepare(self) -> Callable[[], Any]:
        """A step ready to run."""
        return functools.partial(self.run, *self.case.leaves(self.setting))

    def look(self) -> None:
        """Raise ArithmeticError if this does not compute the loss."""
        case = self.case
        found = self.prepare()()
        mean, none = self.setting.reduction == "mean", self.setting.reduction == "none"
        scale = 1 / max(case.labelled, 1) if mean else 1.0
        pairs = [("loss", found[0], case.losses if none else case.losses.sum() * scale)]
        if case.labelled and not self.setting.no_grad:
            few_rows, few_classes = case.few_gradients(scale)
            pairs.append(("gradient of the hidden states", found[1][:LOOKED_AT], few_rows))
            if not self.setting.frozen_head:
                pairs.append(("gradient of the head", found[2][case.classes], few_classes))
        for what, got, right in pairs:
            error = relative_error(got, right.double()) if right.any() else float(got.abs().max())
            if not error < NOT_THE_SAME:
                raise ArithmeticError(f"the {what} is off by {error:.2g} of its norm")


@dataclass(frozen=True)
class Job:
    """A set of cases that are measured alike, in a table of their own."""

    name: str
    shapes: Sequence[Shape]
    rows: Sequence[int]
    ignored: Sequence[float]
    settings: Sequence[Setting]
    providers: Sequence[Provider]

    @property
    def units(self) -> int:
        """Rows of its tables."""
        return len(self.shapes) * len(self.rows) * len(self.ignored) * len(self.settings)


@dataclass
class Results:
    """What a job has found, by (case, setting, metric, provider); "ms" and "MiB" are the metrics."""

    job: Job
    found: dict[tuple[str, str, str, str], Quantiles] = field(default_factory=dict)

    def measured(self) -> list[str]:
        """The providers with any result, in the order of their first."""
        return [name for name in dict.fromkeys(key[3] for key in self.found) if name != GEMMS]

    def cell(self, case: str, setting: str, provider: str) -> str:
        """Time, its ratio to the bare GEMMs, and memory."""
        found, floor, memory = (
            self.found.get((case, setting, metric, name))
            for metric, name in (("ms", provider), ("ms", GEMMS), ("MiB", provider))
        )
        if found is None:
            return ""
        ratio = "" if floor is None else f" ({found.p50 / floor.p50:.2f}x)"
        return f"{found.p50:.2f}{ratio}" + ("" if memory is None else f" / {memory.p50:.0f}")


def measure_job(results: Results, dtype: torch.dtype, sizing: Sizing, report: Report) -> None:
    """Every case of a job; the report is on disk after each."""
    job = results.job
    for shape, rows, ignored in itertools.product(job.shapes, job.rows, job.ignored):
        facts = {"set": job.name, "model": shape.name, "x_value": rows, "ignored": ignored, "dtype": _short(dtype)}
        due = [
            setting
            for setting in job.settings
            if report.due(f"{shape.name} BT={rows} ignored={100 * ignored:g}% {setting}", **facts, **setting.facts)
        ]
        if not due:
            continue
        case = Case(shape, rows, ignored, dtype, report.device)
        fitting = [p for p in job.providers if p.chunk_size is None or p.chunk_size <= rows]
        losses = load_providers(fitting, str(case), report)
        for setting in due:
            measure_case(case, setting, losses, sizing, report, results)
        del case  # before the next one is made


def measure_case(
    case: Case,
    setting: Setting,
    losses: Iterable[tuple[Provider, LinearCrossEntropy]],
    sizing: Sizing,
    report: Report,
    results: Results,
) -> None:
    """Time and memory of every provider that computes the loss."""
    where = f"{case} {setting}"
    able = [(p, loss) for p, loss in losses if setting.reduction in p.reductions]
    ready = [use for p, loss in able if _computes(use := Use(case, setting, p, loss), report)]
    key = str(case), str(setting)
    for use in ready:
        if (mib := peak_extra_mib(use.prepare, case.device)) is not None:
            results.found[(*key, "MiB", use.provider.name)] = Quantiles(mib, mib, mib)
    steps = {use.provider.name: use.prepare for use in ready}
    if case.labelled:
        steps = {GEMMS: lambda: functools.partial(case.bare_gemms, setting), **steps}
    load = SustainedLoad(case.device)
    steps = {name: load.before(prepare) for name, prepare in steps.items()}
    times = device_ms(steps, case.device, sizing, lambda name, error: report.failed(name, where, error))
    results.found |= {(*key, "ms", name): found for name, found in times.items()}
    for name, found in times.items():
        described = functools.partial(_measurement, results.job, case, setting, name)
        report.measurements.append(described("speed", "ms", found))
        if name != GEMMS and GEMMS in times:
            ratio = Quantiles(*(value / times[GEMMS].p50 for value in found))
            report.measurements.append(described("ratio_to_gemms", "x", ratio))
        if (memory := results.found.get((*key, "MiB", name))) is not None:
            report.measurements.append(described("memory", "MiB", memory))
    report.say(f"{where}: " + ", ".join(f"{name} {found.p50:.2f}" for name, found in times.items()))


def _computes(use: Use, report: Report) -> bool:
    """Whether a provider computes the loss; it compiles what it needs on the way."""
    try:
        use.look()
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is a line of the report
        report.failed(use.provider.name, f"{use.case} {use.setting}", error)
        return False
    return True


def _measurement(job: Job, case: Case, setting: Setting, provider: str, metric: str, unit: str, y: Quantiles) -> Measurement:
    config = {
        "set": job.name,
        "model": case.shape.name,
        "H": case.shape.hidden,
        "V": case.shape.vocab,
        "dtype": str(case.x.dtype).removeprefix("torch."),
        "ignored": case.ignored,
        "reduction": setting.reduction,
        "frozen_head": setting.frozen_head,
        "version": provider_version(provider),
    }
    name = "fused_linear_cross_entropy"
    return Measurement(name, provider, setting.mode, metric, unit, "BT", "rows", case.rows, y, config)


# Errors.


def measure_errors(
    size: tuple[int, int, int], providers: Sequence[Provider], backend: str, device: torch.device, report: Report
) -> list[tuple[str, ...]]:
    """Relative error of loss, dx and dW from float64 in bfloat16: every provider, then ours by the number of chunks."""
    n, vocab, hidden = size
    case = Case(Shape("errors", hidden, vocab, ""), n, 0.0, torch.bfloat16, device)
    right = _in_float64(case)
    rounded = tuple(part.bfloat16() for part in right)
    lines = [("one rounding", "", *(f"{relative_error(*pair):.2e}" for pair in zip(rounded, right, strict=True)))]
    sweep = [
        (chunked_provider(backend, max(1, n // chunks), accum), chunks, accum)
        for accum in (None, torch.float32, torch.bfloat16)
        for chunks in ERROR_CHUNKS
        if chunks <= n
    ]
    named = [(provider, 0, None) for provider in providers]
    for provider, chunks, accum in (*named, *sweep):
        for _, loss in load_providers([provider], "errors", report):
            try:
                got = Use(case, Setting(), provider, loss).prepare()()
            except Exception as error:  # noqa: BLE001
                report.failed(provider.name, "errors", error)
                continue
            errors = [relative_error(*pair) for pair in zip(got, right, strict=True)]
            name = provider.name if not chunks else f"liger_{backend} accum {_short(accum)}"
            lines.append((name, str(chunks or ""), *(f"{error:.2e}" for error in errors)))
            _add_errors(report, case, name, chunks, errors)
    report.say(f"errors at N={n} V={vocab} H={hidden}: {len(lines)} lines")
    return lines


def _add_errors(report: Report, case: Case, name: str, chunks: int, errors: Sequence[float]) -> None:
    config = {"N": case.rows, "H": case.shape.hidden, "V": case.shape.vocab, "version": provider_version(name)}
    for metric, error in zip(("loss_error", "dx_error", "dW_error"), errors, strict=True):
        y, label = Quantiles(error, error, error), "chunks (0: its own choice)"
        report.measurements.append(
            Measurement("fused_linear_cross_entropy", name, "full", metric, "1", "chunks", label, chunks, y, config)
        )


def _in_float64(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dW) of the mean; every row is labelled."""
    x, weight, rows = case.x.double(), case.weight.double(), torch.arange(case.rows, device=case.device)
    log_p = torch.log_softmax(x @ weight.t(), -1)
    loss = -log_p[rows, case.target].mean()
    grad = log_p.exp_()
    grad[rows, case.target] -= 1
    grad /= case.rows
    return loss, grad @ weight, grad.t() @ x


def _short(dtype: torch.dtype | None) -> str:
    return "by plan" if dtype is None else str(dtype).removeprefix("torch.")


# Checks.


class CountGemms(TorchDispatchMode):
    """Counts the matrix products that run inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_, aten.bmm)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def never_skipping() -> Iterator[None]:
    """Inside, every row is projected."""
    with mock.patch.object(Plan, "skips", return_value=False):
        yield


@dataclass(frozen=True)
class Checks:
    """What skipping ignored rows must not change; each check gives "ok" or "FAILED" and the detail."""

    case: Case
    backend: str

    def ours(self, target: Tensor, x: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, dx, dW)"""
        x, weight = ((self.case.x if x is None else x).detach().requires_grad_(), self.case.leaves(Setting())[1])
        loss = liger_fused_linear_cross_entropy(x, weight, target, backend=self.backend, **options)
        return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))

    def all(self) -> list[tuple[str, ...]]:
        """Every check."""
        skipping = (self.last_labels, self.all_ignored, self.nan_in_ignored_rows, self.memory_of_skipping)
        checks = (*skipping, self.frozen_head)
        return [(check.__name__.replace("_", " "), *check()) for check in checks]

    def last_labels(self) -> tuple[str, str]:
        """Only the last label of each sequence ignored, as shifting leaves it: the contiguous path, bit by bit."""
        step = min(self.case.rows, SEQUENCE)
        target = self.case.target.clone()
        target[step - 1 :: step] = -100
        got = self.ours(target)
        with never_skipping():
            contiguous = self.ours(target)
        same = [torch.equal(*pair) for pair in zip(got, contiguous, strict=True)]
        return _verdict(all(same)), f"loss, dx, dW bit-identical: {same}"

    def all_ignored(self) -> tuple[str, str]:
        """No GEMM, zero gradients; a kernel that learns on the device that there is no row projects none."""
        target, ahead = torch.full_like(self.case.target, -100), 0

        def watched(x: Tensor, count: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
            nonlocal ahead
            project_ahead(x, count, weight, bias, logits.fill_(torch.nan))
            ahead += int((~logits.isnan()).any(1).sum())

        patched = mock.patch.object(loop, "project_ahead", watched)
        with patched, torch.autograd.set_multithreading_enabled(False), CountGemms() as gemms:
            loss, dx, dw = self.ours(target)
        zero = not (loss.any() or dx.any() or dw.any())
        detail = f"{gemms.count} GEMMs, {ahead} rows projected ahead, loss and gradients zero: {zero}"
        return _verdict(zero and gemms.count == ahead == 0), detail

    def nan_in_ignored_rows(self) -> tuple[str, str]:
        """NaN in half of the rows, all ignored, changes no bit."""
        target, ignored = self._half_ignored()
        clean = self.ours(target)
        dirty = self.ours(target, self.case.x.masked_fill(ignored[:, None], torch.nan))
        same = [torch.equal(*pair) for pair in zip(clean, dirty, strict=True)]
        return _verdict(all(same) and not dirty[1][ignored].any()), f"loss, dx, dW bit-identical: {same}"

    def memory_of_skipping(self) -> tuple[str, str]:
        """Against the full path on the same tensors."""
        target, _ = self._half_ignored()
        step = functools.partial(self.ours, target)
        skipping = peak_extra_mib(lambda: step, self.case.device)
        with never_skipping():
            full = peak_extra_mib(lambda: step, self.case.device)
        if skipping is None or full is None:
            return "not measured", "memory is measured on a GPU only"
        plan = self._plan()
        allowed = SKIPPING_MIB + plan.chunk_rows * self.case.shape.hidden * self.case.x.itemsize / MIB
        detail = f"{skipping:.1f} MiB, full path {full:.1f}, may be {allowed:.1f} more"
        return _verdict(skipping <= full + allowed), detail

    def frozen_head(self) -> tuple[str, str]:
        """No buffer of the head's size, and what is there fits the plan: one slab and dx."""
        case = self.case

        def step() -> None:
            x = case.x.detach().requires_grad_()
            loss = liger_fused_linear_cross_entropy(x, case.weight, case.target, backend=self.backend)
            torch.autograd.grad(loss, x)

        peak = peak_extra_mib(lambda: step, case.device)
        if peak is None:
            return "not measured", "memory is measured on a GPU only"
        needed = (self._plan().slab_bytes + case.x.nbytes) / MIB
        return _verdict(peak < needed + case.weight.nbytes / MIB / 2), f"{peak:.1f} MiB; slab and dx are {needed:.1f}"

    def _half_ignored(self) -> tuple[Tensor, Tensor]:
        ignored = torch.arange(self.case.rows, device=self.case.device) % 2 == 0
        return self.case.target.masked_fill(ignored, -100), ignored

    def _plan(self) -> Plan:
        shape, x = self.case.shape, self.case.x
        size = (self.case.rows, shape.vocab, shape.hidden)
        op = "fused_linear_cross_entropy"
        plan = explain(op, device=x.device, dtype=x.dtype, shape=size, backend=self.backend).plan
        if plan is None:
            raise RuntimeError(f"{self.backend} cannot run {op} on {x.device}")
        return plan


def _verdict(holds: bool) -> str:
    return "ok" if holds else "FAILED"


# The command line.


def print_tables(results: Results) -> None:
    """One table per setting: forward + backward, or forward."""
    providers = results.measured()
    for setting in dict.fromkeys(key[1] for key in results.found):
        cases = dict.fromkeys(key[0] for key in results.found if key[1] == setting)
        shown = [p for p in providers if any((case, setting, "ms", p) in results.found for case in cases)]
        print(f"\n{results.job.name}, {setting}: ms (times the bare GEMMs) / extra peak MiB\n")
        rows = []
        for case in cases:
            floor = results.found.get((case, setting, "ms", GEMMS))
            cells = (results.cell(case, setting, name) for name in shown)
            rows.append((case, "" if floor is None else f"{floor.p50:.2f}", *cells))
        print_markdown(("case", "GEMMs", *shown), rows)


def against_best_chunk(results: Results, plan: str) -> list[tuple[str, ...]]:
    """The plan's time over that of the best chunk size, for each case where chunk sizes were compared."""
    lines: list[tuple[str, ...]] = []
    for case, setting in dict.fromkeys(key[:2] for key in results.found):
        times = {key[3]: y.p50 for key, y in results.found.items() if key[:3] == (case, setting, "ms")}
        chunked = {name: ms for name, ms in times.items() if name.startswith(f"{plan}_chunk")}
        if plan in times and chunked:
            best = min(chunked, key=chunked.__getitem__)
            lines.append((case, best.rpartition("chunk")[2], f"{times[plan] / min(times[plan], chunked[best]):.3f}"))
    return lines


def against_all_labelled(results: Results, provider: str) -> list[tuple[str, ...]]:
    """A provider's time over its time with every row labelled, for each share of ignored rows."""
    lines: list[tuple[str, ...]] = []
    for case, setting, metric, name in results.found:
        stem, marker, percent = case.rpartition(" ignored=")
        whole = results.found.get((f"{stem}{marker}0%", setting, metric, name))
        if name == provider and metric == "ms" and whole is not None and percent != "0%":
            share = 1 - float(percent.rstrip("%")) / 100
            ratio = results.found[case, setting, metric, name].p50 / whole.p50
            lines.append((f"{case} {setting}", f"{share:.2f}", f"{ratio:.3f}", f"{ratio - share:+.3f}"))
    return lines


def show_jobs(backend: str) -> list[Job]:
    """Everything that the package claims about this loss on a GPU."""
    known = linear_cross_entropy_providers()
    usual = [provider for provider in known.values() if provider.default]
    ours = known[f"liger_{backend}"]
    peers = [ours, *(known[name] for name in ("liger_kernel", "cce"))]
    few = [ours, *(known[name] for name in ("torch", "liger_kernel", "cce"))]
    llamas = [NAMED["llama-3.2-1b"], NAMED["llama-3.1-8b"]]
    masked = [NAMED["qwen3-1.7b"], NAMED["llama-3.1-8b"]]
    every = [Setting(frozen_head=True), Setting("none"), Setting(no_grad=True)]

    def sweep(*sizes: int) -> list[Provider]:
        return [ours, *(chunked_provider(backend, size) for size in sizes)]

    small, large = sweep(512, 1024, 2048), sweep(2048, 4096, 8192, 16384)
    return [
        Job("shapes", [NAMED[name] for name in USUAL_SHAPES], (8192,), (0.0,), (Setting(),), usual),
        Job("settings", llamas, (8192,), (0.0,), every, few),
        Job("ignored rows", masked, (8192,), (0.0, 0.25, 0.5, 0.75, 0.9), (Setting(),), peers),
        Job("chunk sizes, few rows", llamas[1:], (512, 2048), (0.0,), (Setting(),), small),
        Job("chunk sizes", llamas[1:], (8192, 32768, 65536), (0.0,), (Setting(),), large),
    ]


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """What the command line asks for."""
    if arguments.show is not None:
        wanted = [job for job in show_jobs(arguments.backend) if not arguments.show or job.name in arguments.show]
        if arguments.providers is None:
            return wanted
        named = arguments.providers
        return [replace(job, providers=[p for p in job.providers if p.name in named or p.chunk_size]) for job in wanted]
    known = linear_cross_entropy_providers()
    sweep = [chunked_provider(arguments.backend, size) for size in arguments.chunk_size]
    named = arguments.providers or ([f"liger_{arguments.backend}"] if sweep else None)
    chosen = [p for name, p in known.items() if (p.default if named is None else name in named)]
    settings = [Setting(r, arguments.frozen_head, arguments.no_grad) for r in arguments.reduction]
    return [Job("chosen", arguments.shapes, arguments.bt, arguments.ignore_fraction, settings, [*chosen, *sweep])]


def _shape(text: str) -> Shape:
    if text in NAMED:
        return NAMED[text]
    if not re.fullmatch(r"\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither HxV, such as 4096x128256, nor one of {', '.join(NAMED)}")
    hidden, vocab = map(int, text.split("x"))
    return Shape(text, hidden, vocab, "the command line")


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value


def _default_fractions() -> list[float]:
    return [_fraction(part) for part in os.environ.get(IGNORE_FRACTION_VARIABLE, "0").replace(",", " ").split()]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = linear_cross_entropy_providers()
    prog, summary = "python -m benchmark.benchmark_fused_linear_cross_entropy", (__doc__ or "").splitlines()[0]
    top = argparse.ArgumentParser(prog=prog, description=summary)
    sets = [job.name for job in show_jobs("torch")]
    claimed = f"what is claimed, all of it or sets of {', '.join(map(repr, sets))}; the choice of cases is its own"
    top.add_argument("--show", nargs="*", choices=sets, metavar="SET", help=claimed)
    shapes = f"HxV or one of {', '.join(NAMED)}; default: {' '.join(USUAL_SHAPES)}"
    usual = [NAMED[name] for name in USUAL_SHAPES]
    top.add_argument("--shapes", nargs="+", type=_shape, default=usual, metavar="SHAPE", help=shapes)
    top.add_argument("--bt", nargs="+", type=int, default=[8192], help="rows (default: 8192)")
    top.add_argument(
        "--ignore-fraction",
        nargs="+",
        type=_fraction,
        default=_default_fractions(),
        help=f"share of ignored rows (default: ${IGNORE_FRACTION_VARIABLE} or 0)",
    )
    top.add_argument("--reduction", nargs="+", choices=("mean", "sum", "none"), default=["mean"])
    top.add_argument("--frozen-head", action="store_true", help="the head needs no gradient, as in LoRA")
    top.add_argument("--no-grad", action="store_true", help="the loss alone")
    names = f"of {', '.join(known)}; default: all but liger_torch, with --show all of a set"
    top.add_argument("--providers", nargs="+", choices=known, metavar="NAME", help=names)
    top.add_argument("--chunk-size", nargs="+", type=int, default=[], help="of ours, against the plan's choice")
    top.add_argument("--backend", default="triton", help="of ours in sweeps, errors and checks (default: triton)")
    top.add_argument("--errors", action="store_true", help="also errors of the gradients from float64")
    top.add_argument("--checks", action="store_true", help="also what skipping ignored rows must not change")
    top.add_argument("--error-size", nargs=3, type=int, default=ERROR_SIZE, metavar=("N", "V", "H"))
    top.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    top.add_argument("--rep-ms", type=float, default=200.0, help="time for the repeats of one step (default: 200)")
    top.add_argument("--least", type=int, default=3, help="fewest repeats of one step (default: 3)")
    top.add_argument("--budget-s", type=float, default=300.0, help="what is then left is left out (default: 300)")
    top.add_argument("--fresh", action="store_true", help="measure again what the file already has")
    top.add_argument("--device", type=torch.device, default=default_device())
    top.add_argument("--out", type=Path, default=DATA / "fused_linear_cross_entropy.csv", help="default: %(default)s")
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    arguments = parser().parse_args(argv)
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    report = Report(arguments.out, device, arguments.budget_s, resume=not arguments.fresh)
    found = [Results(job) for job in jobs(arguments)]
    everything = arguments.show == []
    with_errors = arguments.errors or everything
    report.expect("fused linear cross entropy", with_errors + sum(results.job.units for results in found))
    print(describe(device), flush=True)
    errors: list[tuple[str, ...]] = []
    checks: list[tuple[str, ...]] = []
    try:
        if arguments.checks or everything:
            case = Case(found[-1].job.shapes[0], arguments.bt[0], 0.0, dtype, device)
            checks = Checks(case, arguments.backend).all()
            report.say(f"checks on {case}: {', '.join(verdict for _, verdict, _ in checks)}")
            del case
        size = tuple(arguments.error_size)
        sized = dict(zip(("N", "V", "H"), size, strict=True))
        if with_errors and report.due("errors", metric_name="dW_error", **sized):
            providers = [provider for provider in found[0].job.providers if provider.chunk_size is None]
            errors = measure_errors(size, providers, arguments.backend, device, report)
        for results in found:
            measure_job(results, dtype, Sizing(arguments.rep_ms, arguments.least), report)
        report.finish()
    finally:
        print_everything(found, errors, checks, f"liger_{arguments.backend}")
        report.end()
        print(f"\n{describe(device)}; wrote {arguments.out}")


def print_everything(found: Sequence[Results], errors: list[tuple[str, ...]], checks: list[tuple[str, ...]], ours: str) -> None:
    """All tables; those with nothing in them are left out."""
    titled: list[tuple[str, Sequence[str], list[tuple[str, ...]]]] = [
        ("relative error from float64, bfloat16, mean", ("provider", "chunks", "loss", "dx", "dW"), errors),
        ("checks", ("what", "verdict", "detail"), checks),
    ]
    for results in found:
        print_tables(results)
        titled += [
            (
                f"{ours} against the best chunk size",
                ("case", "best chunk size", "plan's time over the best"),
                against_best_chunk(results, ours),
            ),
            (
                f"{ours} against all rows labelled",
                ("case", "labelled", "time", "difference"),
                against_all_labelled(results, ours),
            ),
        ]
    for title, head, rows in titled:
        if rows:
            print(f"\n{title}\n")
            print_markdown(head, rows)


if __name__ == "__main__":
    main()
