"""Cross entropy on given logits: time, memory and error of every implementation, against the speed of a device copy.

    python -m benchmark.benchmark_cross_entropy [--errors] [--bitwise]

Logits are normal times 4, every 17th target is ignored. Time: all providers in turn, L2 flushed before each timed
region, medians. The backward of "none" gets its upstream gradient ready made, as autograd would hand it over: that of a
mean (`none_mean`) or a sum (`none_sum`), of stride 0; one of its own per row (`none_weighted`); every other element of
a longer one (`none_strided`). Each backward runs on a fresh graph, its forward untimed; where an implementation leaves
its gradient in the logits, fresh logits are copied in untimed. Nothing is timed before its results were compared.

The floor of a row of the table is what must move through memory, at the rate of a device copy timed in the same rounds:
one read and one write of the logits for mean and sum, a second read for none, one read without gradients.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger.testing import CASES

from .common import (
    DATA,
    Measurement,
    Quantiles,
    Report,
    Sizing,
    default_device,
    describe,
    device_ms,
    peak_extra_mib,
    print_markdown,
    relative_error,
)
from .providers import CrossEntropy, Provider, cross_entropy_providers, load_providers, provider_version

USAGES = {
    "mean": "mean",
    "sum": "sum",
    "none_sum": "none",
    "none_mean": "none",
    "none_weighted": "none",
    "none_strided": "none",
}
"""What a benchmark calls a loss with its upstream gradient, and the reduction it is made of."""
MODES = ("full", "forward", "backward", "no-grad-forward", "memory")
COPY = "copy"
PASSES = {
    ("full", "mean"): 2,
    ("full", "sum"): 2,
    ("full", "none"): 3,
    ("forward", "none"): 1,
    ("backward", "none"): 2,
    ("no-grad-forward", "mean"): 1,
    ("no-grad-forward", "sum"): 1,
    ("no-grad-forward", "none"): 1,
}
"""How often the logits' bytes must be read or written; absent where it depends on when a gradient is made."""
VOCABS = tuple(sorted({case.vocab for case in CASES if case.name in ("llama-2-7b", "llama-3.1-8b", "qwen3-8b")}))
IGNORE_EVERY = 17
SCALE = 4.0
FEW_ROWS = 256  # of logits in float64 at once
LOOKED_AT = 16
"""Rows whose gradient is compared before anything is timed."""
NOT_THE_SAME = 0.03
"""Relative error from which a result is not this loss at all; how accurate results are is for `--errors` to tell."""
BITWISE_USAGES = ("none_mean", "none_sum", "none_weighted")
BITWISE_DTYPES = ("bfloat16", "float32")


class Case:
    """The tensors of one size, and what is known about them."""

    def __init__(self, rows: int, vocab: int, dtype: str, device: torch.device) -> None:
        self.rows, self.vocab, self.dtype, self.device = rows, vocab, dtype, device
        generator = torch.Generator(device).manual_seed(0)
        normal = torch.randn(rows, vocab, generator=generator, device=device)
        self.logits = normal.mul_(SCALE).to(getattr(torch, dtype))
        self.target = torch.randint(vocab, (rows,), generator=generator, device=device)
        self.target[::IGNORE_EVERY] = -100
        self.valid = self.target != -100
        self._weights = torch.rand(2 * rows, generator=generator, device=device) + 0.5
        self._upstream: dict[tuple[str, torch.dtype], Tensor] = {}

    def __str__(self) -> str:
        return f"BT={self.rows} V={self.vocab} {self.dtype}"

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows in a CSV file have in common."""
        return {"kernel_name": "cross_entropy", "x_value": self.vocab, "BT": self.rows, "dtype": self.dtype}

    @functools.cached_property
    def scratch(self) -> Tensor:
        """Logits that may be overwritten, or the destination of a copy."""
        return torch.empty_like(self.logits)

    def leaf(self, *, fresh: bool, grad: bool = True) -> Tensor:
        """Logits to call a loss with; `fresh` are restored first, since the call may overwrite them."""
        if fresh:
            self.scratch.copy_(self.logits)
        return (self.scratch if fresh else self.logits).detach().requires_grad_(grad)

    def upstream(self, usage: str, dtype: torch.dtype) -> Tensor:
        """The gradient of a loss in `dtype`, made once."""
        if (usage, dtype) not in self._upstream:
            self._upstream[usage, dtype] = self._make_upstream(usage, dtype)
        return self._upstream[usage, dtype]

    def _make_upstream(self, usage: str, dtype: torch.dtype) -> Tensor:
        if USAGES[usage] != "none":
            return torch.ones((), dtype=dtype, device=self.device)
        if usage == "none_weighted":
            return self._weights[: self.rows].to(dtype)
        if usage == "none_strided":
            return self._weights.to(dtype)[::2]
        value = 1.0 if usage == "none_sum" else 1.0 / self.rows
        return torch.full((), value, dtype=dtype, device=self.device).expand(self.rows)

    @functools.cached_property
    def losses(self) -> Tensor:
        """(N,) the loss of every row in float64."""
        parts = []
        for start in range(0, self.rows, FEW_ROWS):
            rows = slice(start, start + FEW_ROWS)
            logits, target = self.logits[rows].double(), self.target[rows].clamp(min=0)
            parts.append(torch.logsumexp(logits, -1) - logits.gather(1, target[:, None])[:, 0])
        return torch.cat(parts).where(self.valid, 0)

    def few_gradients(self, usage: str) -> Tensor:
        """The gradient of the first rows in float64."""
        logits, target = self.logits[:LOOKED_AT].double(), self.target[:LOOKED_AT]
        grad = torch.softmax(logits, -1)
        grad[torch.arange(len(grad)), target.clamp(min=0)] -= 1
        upstream = self.upstream(usage, torch.float64).expand(self.rows)[:LOOKED_AT]
        if usage == "mean":
            upstream = upstream / self.valid.sum()
        return grad * (upstream * self.valid[:LOOKED_AT])[:, None]


@dataclass(frozen=True)
class Usage:
    """One provider on one case: prepares the steps that are measured."""

    case: Case
    provider: Provider
    loss: CrossEntropy
    name: str
    """A key of `USAGES`."""

    def forward(self, leaf: Tensor) -> Tensor:
        return self.loss(leaf, self.case.target, USAGES[self.name])

    def backward(self, loss: Tensor, leaf: Tensor) -> Tensor:
        # Not loss.backward(): logits are no leaf in training, and accumulating into one could cost a copy.
        return torch.autograd.grad(loss, leaf, self.case.upstream(self.name, loss.dtype))[0]

    def prepare(self, mode: str) -> Callable[[], Any]:
        """A step ready to run: its logits are fresh and, for a backward, its forward is done."""
        leaf = self.case.leaf(fresh=self.provider.overwrites, grad=mode != "no-grad-forward")
        if mode == "forward":
            return lambda: self.forward(leaf)
        if mode == "backward":
            return functools.partial(self.backward, self.forward(leaf), leaf)
        if mode == "full":
            return lambda: self.backward(self.forward(leaf), leaf)

        def without_grad() -> Tensor:
            with torch.no_grad():
                return self.forward(leaf)

        return without_grad

    def look(self) -> None:
        """Raise ArithmeticError if this does not compute the loss."""
        leaf = self.case.leaf(fresh=self.provider.overwrites)
        loss = self.forward(leaf)
        grad = self.backward(loss, leaf)[:LOOKED_AT]
        wanted = self.case.losses
        if USAGES[self.name] != "none":
            wanted = wanted.sum() / (self.case.valid.sum() if self.name == "mean" else 1)
        gradients = self.case.few_gradients(self.name)
        for what, got, right in (("loss", loss.detach(), wanted), ("gradient", grad, gradients)):
            error = relative_error(got, right)
            if not error < NOT_THE_SAME:
                raise ArithmeticError(f"the {what} is off by {error:.2g} of its norm")


@dataclass
class Results:
    """Everything measured, by (case, usage, mode, provider); mode "memory" holds MiB, the others ms."""

    found: dict[tuple[str, str, str, str], Quantiles]

    def measured(self) -> set[str]:
        """The providers with any result."""
        return {key[3] for key in self.found}

    def floor_ms(self, case: str, usage: str, mode: str) -> float | None:
        """What the bytes alone take; None where no one number says it."""
        passes, copy = PASSES.get((mode, USAGES[usage])), self.found.get((case, usage, mode, COPY))
        return None if passes is None or copy is None else copy.p50 * passes / 2

    def cell(self, case: str, usage: str, mode: str, provider: str) -> str:
        """Time, and in brackets its ratio to the floor."""
        found, floor = self.found.get((case, usage, mode, provider)), self.floor_ms(case, usage, mode)
        if found is None:
            return ""
        return f"{found.p50:.3f}" + ("" if floor is None else f" ({found.p50 / floor:.2f}x)")


def measure_case(
    case: Case,
    losses: Sequence[tuple[Provider, CrossEntropy]],
    usages: Sequence[str],
    modes: Sequence[str],
    sizing: Sizing,
    report: Report,
    results: Results,
) -> None:
    """Every usage in every mode. A forward knows nothing of its upstream gradient: it is timed once per reduction."""
    seen: set[str] = set()
    for usage in usages:
        again = USAGES[usage] in seen
        seen.add(USAGES[usage])
        if not report.due(f"{case} {usage}", usage=usage, **case.facts):
            continue
        ready = [use for provider, loss in losses if _computes(use := Usage(case, provider, loss, usage), report)]
        for mode in modes:
            if mode == "memory":
                _measure_memory(ready, report, results)
            elif not (again and mode in ("forward", "no-grad-forward")):
                _measure_time(ready, case, usage, mode, sizing, report, results)


def _computes(use: Usage, report: Report) -> bool:
    """Whether a provider computes the loss; it compiles what it needs on the way."""
    try:
        use.look()
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is a line of the report
        report.failed(use.provider.name, f"{use.case} {use.name}", error)
        return False
    return True


def _measure_time(
    ready: Sequence[Usage], case: Case, usage: str, mode: str, sizing: Sizing, report: Report, results: Results
) -> None:
    def prepare_copy() -> Callable[[], Any]:
        return lambda: case.scratch.copy_(case.logits)

    steps: dict[str, Callable[[], Callable[[], Any]]] = {COPY: prepare_copy}
    steps |= {use.provider.name: functools.partial(use.prepare, mode) for use in ready}
    where = f"{case} {usage} {mode}"
    times = device_ms(steps, case.device, sizing, lambda name, error: report.failed(name, where, error))
    for name, found in times.items():
        results.found[str(case), usage, mode, name] = found
    floor = results.floor_ms(str(case), usage, mode)
    for name, found in times.items():
        report.measurements.append(_measurement(case, usage, mode, name, "speed", "ms", found))
        if floor is not None and name != COPY:
            ratio = Quantiles(*(value / floor for value in found))
            report.measurements.append(_measurement(case, usage, mode, name, "ratio_to_floor", "x", ratio))
    report.say(f"{where}: " + ", ".join(f"{name} {found.p50:.3f}" for name, found in times.items()))


def _measure_memory(ready: Sequence[Usage], report: Report, results: Results) -> None:
    for use in ready:
        name, where = use.provider.name, f"{use.case} {use.name} memory"
        try:
            mib = peak_extra_mib(functools.partial(use.prepare, "full"), use.case.device)
        except Exception as error:  # noqa: BLE001
            report.failed(name, where, error)
            continue
        if mib is not None:
            found = results.found[str(use.case), use.name, "memory", name] = Quantiles(mib, mib, mib)
            report.measurements.append(_measurement(use.case, use.name, "full", name, "memory", "MiB", found))


def _measurement(
    case: Case, usage: str, mode: str, provider: str, metric: str, unit: str, y: Quantiles, **more: Any
) -> Measurement:
    config = {"BT": case.rows, "dtype": case.dtype, "usage": usage, "version": provider_version(provider), **more}
    return Measurement("cross_entropy", provider, mode, metric, unit, "V", "vocabulary size", case.vocab, y, config)


def measure_errors(case: Case, losses: Iterable[tuple[Provider, CrossEntropy]], report: Report) -> list[tuple[str, ...]]:
    """Largest error of a valid row's loss, absolute and relative, and that of the mean; from float64."""
    lines: list[tuple[str, ...]] = []
    right = case.losses
    for provider, loss in losses:
        try:
            with torch.no_grad():
                rows, mean = (
                    loss(case.leaf(fresh=provider.overwrites, grad=False), case.target, reduction).double()
                    for reduction in ("none", "mean")
                )
        except Exception as error:  # noqa: BLE001
            report.failed(provider.name, f"{case} errors", error)
            continue
        off = (rows - right).abs()[case.valid]
        absolute, relative = float(off.max()), float((off / right[case.valid].clamp(min=1)).max())
        of_mean = abs(float(mean) - float(right.sum() / case.valid.sum()))
        errors = (("loss_error", absolute), ("loss_relative_error", relative), ("mean_error", of_mean))
        for metric, value in errors:
            unit = "1" if value is relative else "nat"
            y, mode = Quantiles(value, value, value), "no-grad-forward"
            report.measurements.append(_measurement(case, "none", mode, provider.name, metric, unit, y))
        lines.append((str(case), provider.name, f"{absolute:.2e}", f"{relative:.2e}", f"{of_mean:.2e}"))
    return lines


def with_fp32_loss(losses: Sequence[tuple[Provider, CrossEntropy]]) -> list[tuple[Provider, CrossEntropy]]:
    """The same, and ours with loss_dtype=torch.float32."""
    added = cross_entropy_providers()["liger_triton_fp32_loss"]
    return [*losses] if added in (provider for provider, _ in losses) else [*losses, (added, added.load())]


def compare_bitwise(rows: int, vocabs: Iterable[int], device: torch.device, report: Report) -> list[tuple[str, ...]]:
    """Whether in_place=True gives the very bits of in_place=False, for each usage, vocabulary and dtype."""
    providers = cross_entropy_providers()
    lines: list[tuple[str, ...]] = []
    for vocab in vocabs:
        for dtype in BITWISE_DTYPES:
            case = Case(rows, vocab, dtype, device)
            for usage in BITWISE_USAGES:
                pair = [providers[name] for name in ("liger_triton", "liger_triton_in_place")]
                try:
                    grads = [Usage(case, provider, provider.load(), usage).prepare("full")() for provider in pair]
                except Exception as error:  # noqa: BLE001
                    report.failed("liger_triton", f"{case} {usage} bitwise", error)
                    continue
                same = torch.equal(*(grad.view(torch.int16 if dtype == "bfloat16" else torch.int32) for grad in grads))
                in_place = grads[1].data_ptr() == case.scratch.data_ptr()
                lines.append((str(case), usage, "equal" if same else "DIFFERENT", "yes" if in_place else "NO"))
                report.say(f"{case} {usage}: {lines[-1][2]}")
                del grads
    return lines


def print_tables(results: Results, providers: Sequence[str]) -> None:
    """What the run found; the table of usages last."""
    cases = list(dict.fromkeys(key[0] for key in results.found))
    for mode in ("forward", "backward", "no-grad-forward"):
        keys = dict.fromkeys(key[:2] for key in results.found if key[2] == mode)
        if keys:
            print(f"\n{mode}, ms (times its floor)\n")
            rows = [(*key, *(results.cell(*key, mode, name) for name in providers)) for key in keys]
            print_markdown(("case", "usage", *providers), rows)
    for case in cases:
        print(f"\n{case}: forward + backward, ms (times the floor) / extra peak MiB\n")
        print_markdown(("usage", "floor", *providers), _usage_rows(results, case, providers))


def _usage_rows(results: Results, case: str, providers: Sequence[str]) -> list[tuple[str, ...]]:
    def cell(usage: str, name: str) -> str:
        time, memory = results.cell(case, usage, "full", name), results.found.get((case, usage, "memory", name))
        return time if memory is None else f"{time} / {memory.p50:.0f}"

    rows = []
    for usage in dict.fromkeys(key[1] for key in results.found if key[0] == case):
        floor = results.floor_ms(case, usage, "full")
        shown = "" if floor is None else f"{floor:.3f}"
        rows.append((usage.replace("none_", "none+"), shown, *(cell(usage, name) for name in providers)))
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = cross_entropy_providers()
    usual = ", ".join(name for name, provider in known.items() if provider.default)
    prog, summary = "python -m benchmark.benchmark_cross_entropy", (__doc__ or "").splitlines()[0]
    top = argparse.ArgumentParser(prog=prog, description=summary)
    usages = ["none_mean", "none_sum", "none_weighted", "none_strided", "mean"]
    top.add_argument("--reduction", nargs="+", choices=USAGES, default=usages, help=f"default: {' '.join(usages)}")
    top.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    top.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    top.add_argument("--bt", nargs="+", type=int, default=[8192], help="rows (default: 8192)")
    top.add_argument("--vocab", nargs="+", type=int, default=list(VOCABS))
    names = f"of {', '.join(known)}; default: {usual}"
    top.add_argument("--providers", nargs="+", choices=known, metavar="NAME", help=names)
    top.add_argument("--in-place", action="store_true", help="only those that may overwrite the logits, none_* only")
    top.add_argument("--errors", action="store_true", help="also the error of each row's loss from float64")
    top.add_argument("--bitwise", action="store_true", help="also whether in_place=True changes a bit of the gradient")
    top.add_argument("--rep-ms", type=float, default=60.0, help="time for the repeats of one step (default: 60)")
    top.add_argument("--least", type=int, default=5, help="fewest repeats of one step (default: 5)")
    top.add_argument("--budget-s", type=float, default=300.0, help="what is then left is left out (default: 300)")
    top.add_argument("--fresh", action="store_true", help="measure again what the file already has")
    top.add_argument("--device", type=torch.device, default=default_device())
    top.add_argument("--out", type=Path, default=DATA / "cross_entropy.csv", help="default: %(default)s")
    return top


def chosen_providers(arguments: argparse.Namespace, top: argparse.ArgumentParser) -> list[Provider]:
    """The providers that the command line asks for."""
    known = cross_entropy_providers()
    named = arguments.providers
    if arguments.in_place:
        reduced = [usage for usage in arguments.reduction if USAGES[usage] != "none"]
        if reduced:
            top.error(f"--in-place needs none_* reductions: the gradient of {', '.join(reduced)} is made in forward")
        keeping = [name for name in named or () if not known[name].overwrites]
        if keeping:
            top.error(f"--in-place needs providers that may overwrite the logits, not {', '.join(keeping)}")
        return [provider for name, provider in known.items() if provider.overwrites and name in (named or known)]
    return [provider for name, provider in known.items() if (provider.default if named is None else name in named)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    top = parser()
    arguments = top.parse_args(argv)
    providers = chosen_providers(arguments, top)
    device = arguments.device
    report, results = Report(arguments.out, device, arguments.budget_s, resume=not arguments.fresh), Results({})
    cases = len(arguments.dtype) * len(arguments.bt) * len(arguments.vocab)
    report.expect("cross entropy", cases * (len(arguments.reduction) + arguments.errors))
    print(describe(device), flush=True)
    errors: list[tuple[str, ...]] = []
    bits: list[tuple[str, ...]] = []
    try:
        if arguments.bitwise:
            bits = compare_bitwise(max(arguments.bt), arguments.vocab, device, report)
        for dtype in arguments.dtype:
            for rows in arguments.bt:
                for vocab in arguments.vocab:
                    case = Case(rows, vocab, dtype, device)
                    losses = load_providers(providers, str(case), report)
                    if arguments.errors and report.due(f"{case} errors", metric_name="loss_error", **case.facts):
                        errors += measure_errors(case, with_fp32_loss(losses), report)
                    sizing = Sizing(arguments.rep_ms, arguments.least)
                    measure_case(case, losses, arguments.reduction, arguments.mode, sizing, report, results)
                    del case
        report.finish()
    finally:
        if errors:
            print("\nerror of the loss of a row from float64: largest, relative to the loss, of the mean\n")
            print_markdown(("case", "provider", "largest", "relative", "mean"), errors)
        if bits:
            print("\ngradients of in_place=True and False\n")
            print_markdown(("case", "usage", "bits", "in the logits' storage"), bits)
        report.end()
        print_tables(results, [provider.name for provider in providers if provider.name in results.measured()])
        print(f"\n{describe(device)}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
