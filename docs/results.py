"""Tables from the CSV files that the benchmarks wrote (benchmark/data/) and from measurements noted by hand (docs/data/).

Every number that the documentation states as measured goes through here. A file in the schema of `benchmark.common` is a
result: it becomes one table per usage, a row per shape, a column per implementation. Any other file in benchmark/data/ is
the raw sweep of a tuning program: it is linked and described.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from liger.backends.plan import make_plan

DOCS = Path(__file__).resolve().parent
DATA = DOCS.parent / "benchmark" / "data"
NOTED = DOCS / "data"
SCHEMA = "extra_benchmark_config_str"
"""The column that tells a benchmark's result from a sweep."""
MADE_ON = (
    ("gpu_name", ""),
    ("driver", "driver "),
    ("torch", "torch "),
    ("triton", "triton "),
    ("cutlass", "cutlass "),
    ("liger_version", "liger "),
)
NOTHING = "No result is checked in yet.\n"

Row = dict[str, str]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Result:
    """One row of a result file."""

    kernel: str
    provider: str
    mode: str
    metric: str
    x_name: str
    x: float
    y: float
    """The median."""
    config: dict[str, Any]
    facts: tuple[str, ...]
    """What it was made on, as `MADE_ON` names it, and the date; "" where the line does not tell."""

    @staticmethod
    def of(row: Row) -> Result:
        """From a line of the file."""
        return Result(
            row["kernel_name"],
            row["kernel_provider"],
            row["kernel_operation_mode"],
            row["metric_name"],
            row["x_name"],
            float(row["x_value"]),
            float(row["y_value_50"]),
            json.loads(row[SCHEMA]),
            (*(f"{word}{row[column]}" if row.get(column) else "" for column, word in MADE_ON), row["timestamp"][:10]),
        )


def made_on(results: Iterable[Result]) -> str:
    """What results were made on, all together: of a fact that differs, every value."""
    together = [dict.fromkeys(filter(None, values)) for values in zip(*(result.facts for result in results), strict=True)]
    return ", ".join(" and ".join(sorted(values)) for values in together if values)


Label = Callable[[Result], str]
Cells = dict[str, dict[str, dict[str, float]]]
"""Row label, provider, metric."""


@dataclass(frozen=True)
class Table:
    """Results that are comparable, to be shown as one table."""

    title: str
    floor: str
    """What ratios are ratios to, where that is no column; empty if there is none."""
    results: Sequence[Result]
    label: Label
    corner: str = "rows × vocabulary"
    base: str = "the floor"
    memory: str = "extra peak MiB"

    @property
    def made_on(self) -> str:
        """What its results were made on."""
        return made_on(self.results)

    @cached_property
    def cells(self) -> Cells:
        """Every metric of every cell."""
        found: Cells = {}
        for result in self.results:
            metric = "ratio" if result.metric.startswith("ratio") else result.metric
            found.setdefault(self.label(result), {}).setdefault(result.provider, {})[metric] = result.y
        return found

    @cached_property
    def providers(self) -> list[str]:
        """The columns."""
        return [name for name in dict.fromkeys(result.provider for result in self.results) if name not in FLOORS]

    def floor_ms(self, row: str) -> float | None:
        """What the ratios of a row are to: timed by itself, or a multiple of a copy that the ratios tell."""
        found = self.cells[row]
        if "gemms" in found:
            return found["gemms"]["speed"]
        return next((m["speed"] / m["ratio"] for m in found.values() if "ratio" in m), None)

    def cell(self, row: str, provider: str) -> str:
        """Time, its ratio and memory; empty if there is no time."""
        found = self.cells[row].get(provider, {})
        if "speed" not in found:
            return ""
        ratio = f" ({found['ratio']:.2f}×)" if "ratio" in found else ""
        return ms(found["speed"]) + ratio + (f" / {mib(found['memory'])}" if "memory" in found else "")

    def lines(self, providers: Sequence[str], names: dict[str, str] | None = None, only: str = "") -> str:
        """The table itself; `only` the rows that begin so."""
        floors = {row: self.floor_ms(row) for row in self.cells if row.startswith(only)}
        with_floor = bool(self.floor) and any(floor is not None for floor in floors.values())
        shown = [name for name in providers if name in self.providers]
        head = [
            self.corner,
            *(["floor"] if with_floor else []),
            *((names or {}).get(name, f"`{name}`") for name in shown),
        ]
        lines = [
            (
                row,
                *(["" if floors[row] is None else ms(floors[row])] if with_floor else []),
                *(self.cell(row, name) for name in shown),
            )
            for row in floors
        ]
        return table(head, lines)

    def unit(self) -> str:
        """How to read a cell."""
        times, memory = (
            any(metric in m for found in self.cells.values() for m in found.values()) for metric in ("ratio", "memory")
        )
        return "ms" + (f" (times {self.base})" if times else "") + (f" / {self.memory}" if memory else "")


FLOORS = ("copy", "gemms")
"""Providers that are what others are compared with."""


@dataclass(frozen=True)
class Run:
    """One result file."""

    path: Path
    results: Sequence[Result]

    @property
    def made_on(self) -> str:
        """What its results were made on."""
        return made_on(self.results)

    @property
    def kernel(self) -> str:
        """The benchmark."""
        return self.results[0].kernel

    @property
    def on_cpu(self) -> bool:
        """Whether `benchmark.benchmark_cpu` wrote it."""
        return any(result.x_name == "ignored" for result in self.results)

    def tables(self) -> list[Table]:
        """Everything timed in this run."""
        timed = [r for r in self.results if r.metric in ("speed", "memory") or r.metric.startswith("ratio")]
        if self.kernel == "cross_entropy":
            return _cross_entropy_tables(timed)
        if self.on_cpu:
            return _cpu_tables(timed)
        if self.kernel == "fused_linear_cross_entropy":
            return _linear_tables(timed)
        if self.kernel == "vocab_parallel":
            return _split_tables(timed)
        if self.kernel == "training_step":
            return _training_tables(timed)
        return _plain_tables(timed)

    def named(self, title: str) -> Table | None:
        """One of its tables."""
        return next((found for found in self.tables() if found.title == title), None)


def runs(kernel: str | None = None, *, on_cpu: bool | None = None) -> list[Run]:
    """The result files, of one kernel or of all."""
    found = [Run(path, [Result.of(row) for row in rows]) for path, rows in _files() if SCHEMA in rows[0]]
    return [run for run in found if kernel in (None, run.kernel) and on_cpu in (None, run.on_cpu)]


def _files() -> list[tuple[Path, list[Row]]]:
    return [(path, rows) for path in sorted(DATA.glob("*.csv")) if (rows := read(path))]


def read(path: Path) -> list[Row]:
    """A CSV file's rows."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Which table a result belongs to.


def _grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


MODES = {"full": "forward + backward", "no-grad-forward": "forward without gradients"}


def _cross_entropy_tables(results: list[Result]) -> list[Table]:
    """One per usage, then the halves of a step."""
    dtypes = {result.config["dtype"] for result in results}

    def shape(result: Result) -> str:
        dtype = "" if len(dtypes) == 1 else f", {result.config['dtype']}"
        return f"{result.config['BT']} × {result.x:.0f}{dtype}"

    tables = []
    groups = _grouped(results, lambda r: (MODES.get(r.mode, r.mode), r.config["usage"]))
    order = [MODES["full"], MODES["no-grad-forward"], "forward", "backward"]
    for (mode, usage), group in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        reduction, _, upstream = usage.partition("_")
        told = mode in (MODES["full"], "backward")  # a forward pass does not know its upstream gradient
        title = f"`{reduction}`{UPSTREAM[upstream] if told else ''}, {mode}"
        tables.append(Table(title, _passes(group), group, shape))
    return tables


UPSTREAM = {
    "": "",
    "mean": " and its mean",
    "sum": " and its sum",
    "weighted": " and a weight per row",
    "strided": " and a weight per row, strided",
}


def _passes(group: list[Result]) -> str:
    """The floor in words: how many passes over the logits, from its ratio to the copy of the same rounds."""
    one = Table("", "", group, lambda result: str(result.x))
    for row, found in one.cells.items():
        floor = one.floor_ms(row)
        if floor is not None and "copy" in found:
            count = round(2 * floor / found["copy"]["speed"])
            return f"{count} pass{'es' * (count > 1)} over the logits at the rate of a device copy"
    return ""


def _linear_tables(results: list[Result]) -> list[Table]:
    """One per set of cases and setting."""
    tables = []
    for (name, reduction, frozen, mode), group in _grouped(
        results, lambda r: (r.config["set"], r.config["reduction"], r.config["frozen_head"], r.mode)
    ).items():
        title = f"{name.capitalize()}: `{reduction}`{', frozen head' if frozen else ''}, {MODES[mode]}"
        gemms = 1 if mode == "no-grad-forward" else 3 - frozen + (reduction == "none")
        floor = f"{gemms} bare product{'s' * (gemms > 1)} of the labelled rows"
        tables.append(Table(title, floor, group, _linear_label(group), "model, hidden × vocabulary, rows"))
    return tables


def _linear_label(group: list[Result]) -> Label:
    ignored = len({result.config["ignored"] for result in group}) > 1

    def label(result: Result) -> str:
        config = result.config
        share = f", {100 * config['ignored']:.0f} % ignored" if ignored else ""
        return f"{config['model']}, {config['H']} × {config['V']}, {result.x:.0f}{share}"

    return label


def _cpu_tables(results: list[Result]) -> list[Table]:
    def label(result: Result) -> str:
        return f"{result.config['dtype']}, {result.x:.0f} % ignored"

    return [
        Table(f"{n} rows, {h} × {v}, {threads} threads", "", group, label, "dtype, rows", "`torch`")
        for (n, h, v, threads), group in _grouped(
            _with_ratios(results, "torch", label), lambda r: tuple(r.config[name] for name in ("N", "H", "V", "threads"))
        ).items()
    ]


def _split_tables(results: list[Result]) -> list[Table]:
    """A row per step: what differs is how the vocabulary is split, by one implementation."""
    steps = [replace(r, provider="liger", config=r.config | {"step": r.provider}) for r in results]
    config = results[0].config
    title = f"{results[0].x:g} GPUs, {config['N']} rows, {config['H']} × {config['V']}, {config['dtype']}"
    return [Table(title, "", steps, lambda result: str(result.config["step"]), "step")]


def _with_ratios(results: list[Result], base: str, label: Label) -> list[Result]:
    """And every time over that of `base` in the same row."""
    base_ms = {label(r): r.y for r in results if r.provider == base and r.metric == "speed"}
    ratios = [
        replace(r, metric="ratio", y=r.y / base_ms[label(r)])
        for r in results
        if r.provider != base and r.metric == "speed" and label(r) in base_ms
    ]
    return [*results, *ratios]


def _training_tables(results: list[Result]) -> list[Table]:
    """One per model; shares in order."""

    def label(result: Result) -> str:
        return f"{result.x:g} %"

    return [
        Table(
            f"{model}{', layers compiled' * compiled}, {TRAINED[trained]}, {sequences} × {length} tokens, {MODES['full']}",
            "",
            _with_ratios(sorted(group, key=lambda r: -r.x), "transformers", label),
            label,
            "labelled",
            "`transformers`",
            "peak MiB, weights and gradients included",
        )
        for (model, compiled, trained, sequences, length), group in _grouped(
            results, lambda r: tuple(r.config[name] for name in ("model", "compiled", "trained", "sequences", "length"))
        ).items()
    ]


TRAINED = {"all": "all weights trained", "lora": "LoRA of rank 16 on every linear layer but the head"}


def _plain_tables(results: list[Result]) -> list[Table]:
    """Of a benchmark that nothing is known about."""

    def label(result: Result) -> str:
        config = {name: value for name, value in result.config.items() if name != "version"}
        return ", ".join([f"{result.x_name} {result.x:g}", *(f"{name} {value}" for name, value in config.items())])

    return [Table(mode, "", group, label, "case") for mode, group in _grouped(results, lambda r: r.mode).items()]


# The results page.

PROVIDERS = {
    "liger_cutedsl": "this package's CuTe DSL backend",
    "liger_triton": "this package's Triton backend",
    "liger_triton_in_place": "this package, `in_place=True`",
    "liger_triton_fp32_loss": "this package, `loss_dtype=torch.float32`",
    "liger_triton_fp32": "this package, `accum_dtype=torch.float32`",
    "liger_triton_small": "this package, `chunk_size=448, accum_dtype=torch.bfloat16`",
    "liger_torch": "this package's PyTorch backend",
    "liger": "this package",
    "liger_all_rows": "this package, told not to skip rows",
    "transformers": "the model's own loss",
    "torch": "`F.cross_entropy`",
    "torch_compile": "the same, compiled by `torch.compile`",
    "torch_chunked": "`F.linear_cross_entropy`",
    "liger_kernel": "its defaults",
    "liger_kernel_fp32": "with float32 accumulation",
    "cce": "its defaults, which leave out small gradients",
    "cce_exact": "which leaves out nothing and accumulates in float32",
    "quack": "its defaults",
    "quack_in_place": "which leaves the gradient in the logits",
}
TITLES = {
    "cross_entropy": "Cross entropy",
    "fused_linear_cross_entropy": "Fused linear cross entropy",
    "vocab_parallel": "A vocabulary split over GPUs",
    "training_step": "Training steps",
}
COMMANDS = {
    "cross_entropy": "python -m benchmark.benchmark_cross_entropy --errors",
    "fused_linear_cross_entropy": "python -m benchmark.benchmark_fused_linear_cross_entropy --show --backend cutedsl",
    "vocab_parallel": "torchrun --nproc-per-node 2 -m benchmark.benchmark_vocab_parallel --backend triton",
    "training_step": "python -m benchmark.benchmark_training_step",
}


def measured() -> str:
    """Every result file."""
    return "\n".join(_page_of(run) for run in runs()) or NOTHING


def _page_of(run: Run) -> str:
    device = run.made_on.split(",")[0]
    command = "python -m benchmark.benchmark_cpu" if run.on_cpu else COMMANDS.get(run.path.stem, COMMANDS.get(run.kernel, ""))
    parts = [f"## {TITLES.get(run.kernel, run.kernel)} on {'a CPU' if run.on_cpu else device}\n"]
    parts.append(f"From {link(run.path)}" + (f", written by `{command}`" if command else "") + ".\n")
    parts.append("".join(f"* {line}\n" for line in _legend(run)))
    for found in run.tables():
        caption = [found.unit(), *([f"floor: {found.floor}"] if found.floor else [])]
        parts.append(f"### {found.title}\n")
        parts.append(f"*{'; '.join(caption)}. {found.made_on}.*\n")
        parts.append(found.lines(found.providers))
        if (noise := _noise(found)) is not None:
            parts.append(noise)
    parts += _error_tables(run)
    return "\n".join(parts)


def _legend(run: Run) -> list[str]:
    versions = {result.provider: str(result.config.get("version", "")) for result in run.results}
    told = {name: text for name, text in PROVIDERS.items() if name in versions}
    if run.kernel == "fused_linear_cross_entropy" and "torch" in told:
        told["torch"] = "`F.linear` and `F.cross_entropy`"
    return [f"`{name}`: {text}" + (f" ({versions[name]})" if versions[name] else "") for name, text in told.items()]


def _noise(found: Table) -> str | None:
    """How far two names for one computation differ: the plan's choice, and the same chunk size asked for by hand."""
    apart = []
    for result in found.results:
        if result.metric != "speed" or result.provider != "liger_triton":
            continue
        chunk = _plan_rows(round(result.x), result.config["V"], result.config["H"]) if "H" in result.config else 0
        same = found.cells[found.label(result)].get(f"liger_triton_chunk{chunk}")
        if same is not None:
            apart.append(abs(same["speed"] / result.y - 1))
    if not apart:
        return None
    return (
        f"`liger_triton` runs the plan's chunk size; where that size was also asked for by hand, the two times differ by "
        f"up to {100 * max(apart):.1f} %: that is noise.\n"
    )


def _plan_rows(n: int, vocab: int, hidden: int, chunk_size: int | None = None) -> int:
    """Rows of the longest chunk of the plan in bfloat16."""
    dtype = torch.bfloat16
    plan = make_plan((n, vocab, hidden), "cuda", dtype, chunk_size=chunk_size, accum_dtype=dtype, recompute=False)
    return plan.longest(n)


def _error_tables(run: Run) -> list[str]:
    errors = [result for result in run.results if result.metric.endswith("_error")]
    by_chunks = [result for result in errors if result.x_name == "chunks" and result.x > 0]
    others = [result for result in errors if result not in by_chunks]
    parts = []
    if others:
        metrics = list(dict.fromkeys(result.metric for result in others))
        tables = _grouped(others, lambda r: (_error_case(r), r.provider))
        lines = [
            (case, f"`{provider}`", *(f"{r.y:.2e}" if (r := _of(group, metric)) else "" for metric in metrics))
            for (case, provider), group in tables.items()
        ]
        parts += [
            f"### Error from float64: {run.kernel.replace('_', ' ')}\n",
            f"*bfloat16; {ERRORS[run.kernel]}. {made_on(others)}.*\n",
            table(("case", "", *(metric.replace("_", " ") for metric in metrics)), lines),
        ]
    return parts


ERRORS = {
    "cross_entropy": "loss error: the largest of a valid row, absolute (nats) and relative; mean error: of the mean, absolute",
    "fused_linear_cross_entropy": "norm of the difference over the norm of what is right, of the mean and its gradients",
}


def _error_case(result: Result) -> str:
    config = result.config
    if result.x_name == "V":
        return f"{config['BT']} × {result.x:.0f}"
    return f"{config['N']} rows, {config['H']} × {config['V']}"


def _of(group: list[Result], metric: str) -> Result | None:
    return next((result for result in group if result.metric == metric), None)


# Summaries and facts.

FRIENDLY = {
    "liger_cutedsl": "liger, CuTe DSL",
    "liger_triton": "liger, Triton",
    "liger_triton_in_place": "liger, in place",
    "torch": "torch",
    "torch_compile": "torch.compile",
    "liger_kernel": "liger-kernel",
    "quack": "QuACK",
    "cce": "CCE",
}


def _summary(run: Run, title: str, only: str = "") -> str:
    found = run.named(title)
    if found is None:
        return ""
    caption = f"*{found.unit()}; floor: {found.floor}. {found.made_on}.*"
    return f"{caption}\n\n{found.lines(list(FRIENDLY), FRIENDLY, only)}"


def ce_summary() -> str:
    """Cross entropy, mean, on one GPU."""
    return "\n".join(_summary(run, "`mean`, forward + backward") for run in runs("cross_entropy")) or NOTHING


def flce_summary() -> str:
    """Fused linear cross entropy, mean: every shape with all rows labelled, one with ignored rows."""
    tables = (("Shapes: `mean`, forward + backward", ""), ("Ignored rows: `mean`, forward + backward", "llama-3.1-8b"))
    found = runs("fused_linear_cross_entropy", on_cpu=False)
    return "\n".join(filter(None, (_summary(run, *which) for run in found for which in tables))) or NOTHING


def step_summary() -> str:
    """Training steps: ours beside the others, and what skipping is worth."""
    return "\n".join(_step_summary(run) for run in runs("training_step")) or NOTHING


def _step_summary(run: Run) -> str:
    lines = []
    groups = _grouped(run.results, lambda r: (r.config["model"], r.config["compiled"], r.x))
    for (model, compiled, share), group in groups.items():
        times = {r.provider: r.y for r in group if r.metric == "speed"}
        peaks = {r.provider: r.y for r in group if r.metric == "memory"}
        launched = next((ms(r.y) for r in group if r.metric == "host" and r.provider == "liger"), "")
        losses = [r.y for r in group if r.metric == "loss"]
        config = group[0].config
        lora = config["trained"] == "lora"
        if "liger" in times:
            ratios = {name: times["liger"] / time for name, time in times.items()}
            others = (f"{ms(times[name])} ({ratios[name]:.2f}×)" if name in times else "" for name in OTHERS)
            shown = (peaks.get(name) for name in ("liger", "transformers", "liger_kernel"))
            memory = ("" if peak is None else f"{peak / 1024:.1f}" for peak in shown)
            name = f"{model}{', LoRA' * lora}{', compiled' * compiled}"
            through = next(r.config["through"] for r in group if r.provider == "liger")
            cells = (name, f"{share:g}", through, ms(times["liger"]), launched, *others, *memory, _apart(losses))
            lines.append(((lora, config["H"], config["V"], compiled, -share), cells))
    head = (
        *("model", "labelled, %", "through", "liger, ms", "launched after, ms"),
        *(f"{name}, ms (liger / it)" for name in OTHERS.values()),
        *("peak GiB, liger", "its own loss", "liger-kernel", "losses apart"),
    )
    unbroken = ((cells[0].replace("-", "\N{NON-BREAKING HYPHEN}"), *cells[1:]) for _, cells in sorted(lines))
    return f"*{run.made_on}.*\n\n" + table(head, unbroken)


OTHERS = {"transformers": "its own loss", "liger_kernel": "liger-kernel", "liger_all_rows": "all rows"}
DIGITS = 6
"""To which the benchmarks write a value."""


def _apart(losses: Sequence[float]) -> str:
    """How far the values of one loss differ, relative to them."""
    apart = (max(losses) - min(losses)) / min(losses)
    return f"{apart:.0e}" if apart else f"< {10.0 ** (1 - DIGITS):.0e}"


def faster_peers() -> str:
    """Every timed step that another package, or torch, does faster than this package's default."""
    lines = []
    for run in runs(on_cpu=False):
        for found in run.tables():
            if not found.title.endswith(tuple(MODES.values())):
                continue  # a forward that makes the gradient as well is not comparable with one that does not
            for row, cells in found.cells.items():
                times = {name: m["speed"] for name, m in cells.items() if "speed" in m and name not in FLOORS}
                ours = next((name for name in DEFAULTS if name in times), None)
                for name, time in times.items():
                    if ours is not None and not _is_ours(name) and time < times[ours]:
                        lines.append((found.title, row, f"`{name}`", ms(time), ms(times[ours]), f"{times[ours] / time:.2f}×"))
    return table(("what", "case", "faster", "ms", "ours, ms", "ours over it"), lines) if lines else "None.\n"


DEFAULTS = ("liger_cutedsl", "liger_triton", "liger")
"""This package as it comes, where it is measured under either name."""


def _is_ours(provider: str) -> bool:
    return PROVIDERS.get(provider, "").startswith("this package") or provider.startswith("liger_triton_chunk")


def copy_rate() -> str:
    """What the floor of cross entropy rests on."""
    parts = []
    for run in runs("cross_entropy"):
        lines = []
        for result in run.results:
            whole = result.mode == "full" and result.config["usage"] == "mean"
            if result.provider == "copy" and result.metric == "speed" and whole:
                rows, dtype = result.config["BT"], result.config["dtype"]
                bytes_ = 2 * rows * result.x * getattr(torch, dtype).itemsize
                lines.append((f"{rows} × {result.x:.0f} {dtype}", ms(result.y), f"{bytes_ / result.y / 1e9:.2f}"))
        parts.append(f"*{run.made_on}.*\n\n" + table(("logits copied", "ms", "TB/s, read and written"), lines))
    return "\n".join(parts) or NOTHING


def launches() -> str:
    """The sweep of launches in three columns: small programs, whole multiprocessors, and registers that hold a part."""
    lines = []
    for dtype, name in (("bfloat16", "tune_rows_h200"), ("float32", "tune_rows_fp32_h200")):
        swept = [row for row in _swept(name) if row["kernel"] == "rows"]
        for vocab in sorted({int(row["vocab"]) for row in swept}):
            rows = [row for row in swept if int(row["vocab"]) == vocab]
            few = _best(row for row in rows if int(row["num_warps"]) <= 8 and row["held"] == "0")
            whole = _best(row for row in rows if int(row["num_warps"]) == 32 and row["held"] == "0")
            held = _best(row for row in rows if row["held"] != "0")
            lines.append((dtype, str(vocab), few, whole, held))
    head = ("dtype", "vocabulary", "at most 8 warps", "32 warps", "with held logits")
    return table(head, lines) if lines else NOTHING


def _best(rows: Iterable[Row]) -> str:
    best = min(rows, key=lambda row: float(row["ratio_to_floor"]), default=None)
    if best is None:
        return ""
    held = f", {best['held']} held" if best["held"] != "0" else ""
    return f"{float(best['ratio_to_floor']):.2f}× ({best['block']}, {best['num_warps']} warps{held})"


def chunk_sizes() -> str:
    """The two sweeps of chunk sizes, by the rows that a chunk really had; times over three bare products."""
    found: dict[tuple[int, int, int, str], dict[int, list[float]]] = {}
    for row in (row for name in ("tune_chunks_h200", "tune_chunks_fine_h200") for row in _swept(name)):
        n, vocab, hidden = (int(row[name]) for name in ("rows", "vocab", "hidden"))
        if row["chunk"] == "plan" or n < 8192:
            continue  # what the plan was then; and one chunk says little about chunks
        accum = row["accum_dtype"].removeprefix("torch.")
        rows = _plan_rows(n, vocab, hidden, int(row["chunk"]))
        found.setdefault((hidden, vocab, n, accum), {}).setdefault(rows, []).append(float(row["ratio"]))
    sizes = sorted({size for columns in found.values() for size in columns})
    lines = [
        (f"{hidden} × {vocab}, {n}, {accum}", *(_range(columns.get(size, [])) for size in sizes))
        for (hidden, vocab, n, accum), columns in sorted(found.items())
    ]
    return table(("hidden × vocabulary, rows, sum in", *map(str, sizes)), lines) if lines else NOTHING


def _range(values: list[float]) -> str:
    low, high = (f"{pick(values):.2f}" if values else "" for pick in (min, max))
    return low if low == high else f"{low} – {high}"


def _swept(name: str) -> list[Row]:
    path = DATA / f"{name}.csv"
    return read(path) if path.exists() else []


def accumulation() -> str:
    """Error of the weight's gradient by the number of chunks, beside what independent roundings would give."""
    for run in runs("fused_linear_cross_entropy", on_cpu=False):
        swept = [r for r in run.results if r.x_name == "chunks" and r.x > 0 and r.metric == "dW_error"]
        names = list(dict.fromkeys(result.provider for result in swept))
        one = next((r.y for r in swept if r.x == 1 and r.provider.endswith("float32")), None)
        if one is None:
            continue
        lines = [
            (
                f"{chunks:.0f}",
                *(f"{r.y:.2e} ({r.y / one:.2f})" for name in names for r in swept if (r.provider, r.x) == (name, chunks)),
                f"{math.sqrt((chunks + 1) / 2):.2f}",
            )
            for chunks in sorted({result.x for result in swept})
        ]
        columns = [name.partition(" ")[2].replace("accum", "summed") for name in names]
        config = swept[0].config
        caption = f"*Error (times that of one chunk); {config['N']} rows, {config['H']} × {config['V']}. {made_on(swept)}.*\n\n"
        return caption + table(("chunks", *columns, r"\(\sqrt{(k+1)/2}\)"), lines)
    return NOTHING


def causal_classes() -> str:
    """What the patch makes of every causal class of transformers; classes with the same verdict in one line."""
    verdicts: dict[tuple[str, str], list[str]] = {}
    for row in read(NOTED / "transformers_classes.csv"):
        verdicts.setdefault((row["status"], row["reason"]), []).append(row["class"])
    order = ("fused", "materialised", "refused", "not built")
    lines = [
        (str(len(names)), status, reason, ", ".join(names))
        for (status, reason), names in sorted(verdicts.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]
    return table(("classes", "what becomes of the logits", "why", "which"), lines)


def hf_trainer() -> str:
    """The Trainer of transformers with and without the patch."""
    path = NOTED / "hf_trainer_h200.csv"
    if not path.exists():
        return NOTHING
    rows = read(path)
    found = {(row["kernel_provider"], row["metric_name"]): Result.of(row) for row in rows}
    names = tuple(dict.fromkeys(provider for provider, _ in found))
    shown = (("speed", "ms per optimizer step", "{:.0f}"), ("memory", "peak MiB", "{:.0f}"), ("loss", "last loss", "{:.5f}"))
    lines = [(title, *(form.format(found[name, metric].y) for name in names)) for metric, title, form in shown]
    config = found[names[0], "speed"].config
    size = f"{config['sequences']} × {config['length']} tokens, {config['accumulate']} of them accumulated"
    versions = f"transformers {config['transformers']}, accelerate {config['accelerate']}"
    titles = {"transformers": "the model's own loss", "liger": "patched"}
    caption = f"*{config['model']}'s dimensions, {size}, {config['dtype']}; {versions}. {made_on(map(Result.of, rows))}.*\n\n"
    return caption + table(("", *(titles[name] for name in names)), lines)


def cutedsl_rows() -> str:
    """The row kernels of two backends, as noted from one run."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    rows = read(NOTED / "cutedsl_rows_h200.csv")
    for row in rows:
        found.setdefault((row["kernel"], row["vocab"]), {})[row["provider"]] = f"{float(row['ratio_to_floor']):.2f}×"
    lines = [(*key, ratios["cutedsl"], ratios["triton"]) for key, ratios in found.items()]
    return _caption(rows) + table(("kernel", "vocabulary", "CuTe DSL", "Triton"), lines)


def cutedsl_facts() -> str:
    """What else was noted of the CuTe DSL backend."""
    return _noted("cutedsl_facts_h200")


def bytes_moved() -> str:
    """What the row kernels read and wrote of device memory."""
    return _noted("bytes_moved_h200")


def gemm_rates() -> str:
    """The products of a chunk by its rows, as noted before there was a package."""
    return _noted("gemm_rates_h200")


STREAMS = {"c4096": "one stream, ms", "c4096_dualdw": "two, ms", "c4096_lt": "one, cuBLASLt, ms"}
"""Variants in the file, all in chunks of 4096 rows."""


def chunk_streams() -> str:
    """The products of a chunk's gradients one after the other and side by side, as noted."""
    times: dict[str, dict[str, str]] = {}
    rows = read(NOTED / "chunk_streams_h200.csv")
    for row in rows:
        times.setdefault(f"{row['hidden']} × {row['vocab']}, {row['rows']}", {})[row["variant"]] = row["ms"]
    lines = ((shape, *(ms(float(found[variant])) for variant in STREAMS)) for shape, found in times.items())
    return _caption(rows) + table(("hidden × vocabulary, rows", *STREAMS.values()), lines)


def clock() -> str:
    """The same bare products in one run without a load before each step, and in one with it."""
    before = [Result.of(row) for row in read(NOTED / "gemms_without_load_h200.csv")]
    lines = []
    for run in runs("fused_linear_cross_entropy", on_cpu=False):
        for model in dict.fromkeys(result.config["model"] for result in before):
            shown = [_spread_ms([r for r in of if _plain_gemms(r, model)]) for of in (before, run.results)]
            if all(shown):
                lines.append((model, *shown))
    if not lines:
        return NOTHING
    return f"*ms. {made_on(before)}.*\n\n" + table(("three bare products, 8192 rows", "no load before", "load before"), lines)


def _plain_gemms(result: Result, model: str) -> bool:
    config = result.config
    wanted = result.provider == "gemms" and result.metric == "speed" and result.x_name == "BT" and result.x == 8192
    plain = result.mode == "full" and not config.get("ignored") and not config.get("frozen_head")
    return wanted and plain and config["reduction"] == "mean" and config["model"] == model


def _spread_ms(results: list[Result]) -> str:
    values = [result.y for result in results]
    if not values:
        return ""
    low, high = (f"{pick(values):.1f}" for pick in (min, max))
    return low if low == high else f"{low} – {high} ({max(values) / min(values):.2f}×)"


DISPATCH = ("the arguments checked", "the request built", "the backend resolved")


NEW_PROCESS = "a new process: "


def host_time() -> str:
    """Host time per call by backend, and what this package's own decisions add up to."""
    rows, names, times = _host_times()
    called = {what: found for what, found in times.items() if not what.startswith(NEW_PROCESS)}
    lines = [(what, *(found.get(name, "") for name in names)) for what, found in called.items()]
    decided = [found for what, found in times.items() if what.endswith(DISPATCH)]
    sums = (f"{name} {sum(float(found[name]) for found in decided):.0f} us" for name in names if name in decided[0])
    return f"{_caption(rows, 'us')}{table(('what', *names), lines)}\nCheck, request and choice together: {', '.join(sums)}.\n"


def first_calls() -> str:
    """What the first calls in a process take, by backend."""
    rows, names, times = _host_times()
    first = {what.removeprefix(NEW_PROCESS): found for what, found in times.items() if what.startswith(NEW_PROCESS)}
    shown = [name for name in names if any(name in found for found in first.values())]
    lines = [(what, *(f"{float(found[name]) / 1e6:.3g}" for name in shown)) for what, found in first.items()]
    return _caption(rows, "s") + table(("what", *shown), lines)


def _host_times() -> tuple[list[Row], list[str], dict[str, dict[str, str]]]:
    """(lines, backends, what to backend to us)"""
    rows = read(NOTED / "host_time_h200.csv")
    times = {what: {row["backend"]: row["us"] for row in group} for what, group in _grouped(rows, lambda r: r["what"]).items()}
    return rows, list(dict.fromkeys(row["backend"] for row in rows)), times


def _caption(rows: Sequence[Row], unit: str = "") -> str:
    """What noted rows were measured on, and in what."""
    return f"*{unit and unit + '. '}{rows[0]['made_on']}.*\n\n"


def _noted(name: str) -> str:
    rows = read(NOTED / f"{name}.csv")
    names = [name for name in rows[0] if name != "made_on"]
    return _caption(rows) + table(names, ([row[name] for name in names] for row in rows))


WATCHED = {
    "allocated": "bytes of the GPU in tensors and workspaces",
    "reserved": "bytes of the GPU that torch's allocator holds",
    "resident": "bytes of the process in memory",
    "blocks": "blocks of Python's allocator",
    "tensors": "tensors made since the warm-up",
    "threads": "threads",
    "triton_compiled": "Triton's compiled kernels and the keys that lead to them",
    "cutedsl_compiled": "CuTe DSL's compiled kernels and their places on the GPU",
    "graphs": "graphs traced by Dynamo",
}


def soak() -> str:
    """What test/soak.py watched, when its warm-up ended and at its end."""
    rows = _noted_if_there("soak_h200")
    if not rows:
        return NOTHING
    last = rows[-1]
    warm = [row for row in rows if 4 * int(row["calls"]) <= int(last["calls"])][-1]
    head = ("", f"after {warm['calls']} calls", f"after {last['calls']} calls")
    return f"*{_where(last)}*\n\n" + table(head, ((what, warm[name], last[name]) for name, what in WATCHED.items()))


def sanitizer() -> str:
    """What compute-sanitizer's tools found, a line for each that ran."""
    rows = _noted_if_there("sanitizer_h200")
    if not rows:
        return NOTHING
    head = ("tool", "tests passed", "failed", "errors in this package's kernels", "in others", "which")
    names = ("tool", "passed", "failed", "errors", "errors_elsewhere", "elsewhere")
    on = f"*compute-sanitizer {rows[0]['version']}, {_where(rows[0])}*\n\n"
    return on + table(head, ([row[name] for name in names] for row in rows))


def batch_rows() -> str:
    """For each backend and shape, in how many of the rows the loss and the gradient are those of the larger batch."""
    rows = _noted_if_there("batch_rows_h200")
    if not rows:
        return NOTHING
    sizes = sorted({int(row["rows"]) for row in rows})
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        shape = row["vocab"] if row["hidden"] == "0" else f"{row['hidden']} × {row['vocab']}"
        cells.setdefault((row["op"], row["backend"], shape), {})[int(row["rows"])] = _equal(row)
    head = ("op", "backend", "(hidden ×) vocabulary", *(f"{size} of {rows[0]['of']} rows" for size in sizes))
    lines = ((f"`{op}`", backend, shape, *(of.get(n, "") for n in sizes)) for (op, backend, shape), of in cells.items())
    return f"*{_where(rows[0])}*\n\n" + table(head, lines)


def _equal(row: Row) -> str:
    """The word all, or how many losses and gradients are equal and how far the others are off."""
    losses, gradients, rows = (row[name] for name in ("equal_losses", "equal_gradients", "rows"))
    if losses == gradients == rows:
        return "all"
    off, off_gradient = (float(row[f"largest_{what}_difference"]) for what in ("loss", "gradient"))
    return f"{losses} losses ({off:.1e}), {gradients} gradients ({off_gradient:.1e})"


def _noted_if_there(name: str) -> list[Row]:
    path = NOTED / f"{name}.csv"
    return read(path) if path.exists() else []


def _where(row: Row) -> str:
    packages = (f"{name} {row[name]}" for name in ("torch", "triton", "nvidia-cutlass-dsl") if row.get(name))
    return ", ".join((row["gpu"] or "CPU", *packages, row["date"])) + "."


SWEEPS = {
    "tune_rows_h200": (
        "python -m benchmark.tune_rows",
        "every launch of the Triton row kernels worth a look, bfloat16; decides the table in `liger/backends/triton/launch.py`",
    ),
    "tune_rows_fp32_h200": (
        "python -m benchmark.tune_rows --dtype float32 --rows 4096",
        "the same for float32",
    ),
    "tune_exchange_h200": (
        "torchrun --nproc-per-node 2 -m benchmark.tune_exchange",
        "launches and lags of the Triton kernel that exchanges statistics between GPUs, on two H200s, bfloat16",
    ),
    "tune_projection_h200": (
        "python -m benchmark.tune_projection",
        "the projection whose number of rows the device knows, against torch's product; decides its blocks",
    ),
    "tune_chunks_h200": (
        "python -m benchmark.tune_chunks",
        "chunk sizes and accumulation dtypes of the fused loss; decides the constants of the plan in `liger/backends/plan.py`",
    ),
    "tune_chunks_fine_h200": (
        "python -m benchmark.tune_chunks --accum bfloat16 --chunks 1024 ... 4096",
        "the same between 1024 and 4096 rows, bfloat16",
    ),
}


def sweeps() -> str:
    """The other files: a link, what made them, what they decide."""
    lines = []
    for path, rows in _files():
        if SCHEMA in rows[0]:
            continue
        command, what = SWEEPS.get(path.stem, ("", f"columns {', '.join(rows[0])}"))
        lines.append(f"* {link(path)}" + (f", by `{command}`" if command else "") + f": {what}.\n")
    return "".join(lines) or NOTHING


# Text.


def ms(value: float | None) -> str:
    """A time with about three digits."""
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def mib(value: float) -> str:
    """A size with a digit after the point where that matters."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def link(path: Path) -> str:
    """A link that works in the repository; the site carries the files along (docs/hooks/data.py)."""
    return f"[`{path.name}`](../benchmark/data/{path.name})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
