"""What the benchmarks share: interleaved timing, quantiles, what a number was measured on, and CSV files.

The columns of a CSV file are those of Liger-Kernel's benchmark data, then what that schema does not tell.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger.__main__ import device_name, versions

DATA = Path(__file__).resolve().parent / "data"
COLUMNS = (
    "kernel_name",
    "kernel_provider",
    "kernel_operation_mode",
    "metric_name",
    "metric_unit",
    "x_name",
    "x_label",
    "x_value",
    "y_value_50",
    "y_value_20",
    "y_value_80",
    "extra_benchmark_config_str",
    "gpu_name",
    "timestamp",
    "liger_version",
    "device",
    "torch",
    "triton",
    "driver",
    "cutlass",
)
PACKAGES = {"torch": "torch", "triton": "triton", "driver": "driver", "cutlass": "nvidia-cutlass-dsl"}
"""Column to what `liger.__main__.versions` calls it."""


class Quantiles(NamedTuple):
    """The median, and the quantiles 0.2 and 0.8 around it."""

    p50: float
    p20: float
    p80: float

    @staticmethod
    def of(values: Sequence[float]) -> Quantiles:
        """Of at least one value, with linear interpolation."""
        wanted = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        return Quantiles(*torch.tensor(values, dtype=torch.float64).quantile(wanted).tolist())

    def __str__(self) -> str:
        return f"{self.p50:.1f} ({self.p20:.1f} - {self.p80:.1f})"


@dataclass(frozen=True)
class Measurement:
    """One row of a CSV file."""

    kernel_name: str
    kernel_provider: str
    kernel_operation_mode: str
    """forward, backward, full or no-grad-forward."""
    metric_name: str
    """speed or memory."""
    metric_unit: str
    x_name: str
    x_label: str
    x_value: float
    y: Quantiles
    config: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else decides the number."""


def interleaved_ms(
    steps: Mapping[str, Callable[[], Callable[[], Any]]],
    rounds: int,
    *,
    synchronize: Callable[[], None] = lambda: None,
    warm_up: int = 1,
) -> dict[str, Quantiles]:
    """Time steps in turn, round after round, so that whatever else the machine does falls on all alike.

    Args:
        steps: name to a function that prepares a step, untimed, and returns it.
        rounds: timed rounds.
        synchronize: waits for a device that works in the background.
        warm_up: rounds before them.

    Returns:
        Quantiles over the rounds, in ms.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(warm_up + rounds):
        for name, prepare in steps.items():
            step = prepare()
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            if round_ >= warm_up:
                times_ms[name].append((time.perf_counter() - start) * 1e3)
            del step
    return {name: Quantiles.of(times) for name, times in times_ms.items()}


@dataclass(frozen=True)
class Sizing:
    """How often a step is repeated: for a given time, as triton.testing.do_bench does it."""

    time_ms: float = 100.0
    least: int = 5
    most: int = 40

    def repeats(self, once_ms: float) -> int:
        """Of a step that takes `once_ms`."""
        return max(self.least, min(self.most, int(self.time_ms / max(once_ms, 1e-3))))


L2_FLUSH_BYTES = 256 << 20  # what do_bench overwrites; several times the largest L2
LEAD_CYCLES = 1_000_000
"""How long a GPU spins before a timed step, about half a millisecond, so that the host has launched the step by then.
In training the host is ahead too; a step that makes the host wait still pays for it."""


def device_ms(
    steps: Mapping[str, Callable[[], Callable[[], Any]]],
    device: torch.device,
    sizing: Sizing,
    failed: Callable[[str, Exception], None],
) -> dict[str, Quantiles]:
    """Time steps on a device in turn, each with L2 flushed before it, as often as `sizing` says.

    Args:
        steps: name to a function that prepares a step, untimed, and returns it.
        device: events time it on a GPU, the host's clock elsewhere.
        sizing: slower steps are repeated less often; the repeats of all are spread over the same stretch of time.
        failed: is told of a step that raises, which is then left out.

    Returns:
        Quantiles in ms, of the steps that did not fail.
    """
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    repeats: dict[str, int] = {}
    for name, prepare in steps.items():
        try:
            _timed(prepare, flush)()
            repeats[name] = sizing.repeats(_timed(prepare, flush)())
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is a line of the report
            failed(name, error)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in repeats}
    for name in spread(repeats):
        if name not in pending:  # it has failed since
            continue
        try:
            pending[name].append(_timed(steps[name], flush))
        except Exception as error:  # noqa: BLE001
            failed(name, error)
            pending.pop(name)
    return {name: Quantiles.of([elapsed() for elapsed in measured]) for name, measured in pending.items()}


class SustainedLoad:
    """Matrix products before every timed step, so that each meets the GPU as training keeps it.

    Under sustained products the chip's power limit lowers its clock. A step timed after an idle or memory-bound one would
    look faster than the same step in a training loop: on one H200 bare products by up to 15 %.
    """

    SIZE, REPEATS = 8192, 100  # about 150 ms on an H200

    def __init__(self, device: torch.device) -> None:
        self.matrix = None
        if device.type == "cuda":
            self.matrix = torch.randn(self.SIZE, self.SIZE, device=device, dtype=torch.bfloat16)
            self.product = torch.empty_like(self.matrix)

    def before(self, prepare: Callable[[], Callable[[], Any]]) -> Callable[[], Callable[[], Any]]:
        """The same preparation, with the load behind it."""

        def loaded() -> Callable[[], Any]:
            step = prepare()
            if self.matrix is not None:
                for _ in range(self.REPEATS):
                    torch.mm(self.matrix, self.matrix, out=self.product)
            return step

        return loaded


def spread(repeats: Mapping[str, int]) -> list[str]:
    """Every name as often as it says, in turn: `{"a": 4, "b": 2}` is a a b a a b."""
    rounds = max(repeats.values(), default=0)
    return [
        name
        for round_ in range(rounds)
        for name, count in repeats.items()
        if (round_ + 1) * count // rounds > round_ * count // rounds
    ]


def _timed(prepare: Callable[[], Callable[[], Any]], flush: torch.Tensor | None) -> Callable[[], float]:
    """Run a step; the function returned tells how many ms it took and waits for it if need be."""
    step = prepare()
    if flush is None:
        began = time.perf_counter()
        step()
        elapsed_ms = (time.perf_counter() - began) * 1e3
        return lambda: elapsed_ms
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    step()
    end.record()

    def elapsed() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return elapsed


def default_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((got.double() - right).norm() / right.norm())


def peak_extra_mib(prepare: Callable[[], Callable[[], Any]], device: torch.device) -> float | None:
    """How far a step raises the memory allocated on a GPU above what its inputs hold; None elsewhere."""
    step = prepare()
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / (1 << 20)


class Report:
    """What a run has found so far: kept on disk as it grows, since a device may be taken away at any time.

    A run consists of units, each asked for by `due`. A unit is written when it is complete; with `resume`, those that the
    file already holds are not due.
    """

    def __init__(self, path: Path, device: torch.device, budget_s: float, *, resume: bool = False) -> None:
        self.path, self.device, self.budget_s = path, device, budget_s
        self.measurements: list[Measurement] = []
        self.failures: dict[tuple[str, str], list[str]] = {}
        """(provider, reason) -> where"""
        self.began = time.monotonic()
        self.kept = _kept(path, device) if resume else []
        self.units, self.of_units, self.found_there = 0, 0, 0
        self.bar = contextlib.ExitStack()
        self.advance: Callable[[int], None] = lambda units: None

    def expect(self, title: str, units: int) -> None:
        """How many units there will be: a bar shows them on a terminal, if `rich` is installed."""
        self.of_units = units
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            progress = importlib.import_module("rich.progress")
            columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
            shown = self.bar.enter_context(progress.Progress(*columns))
            task = shown.add_task(title, total=units)
            self.advance = lambda done: shown.update(task, completed=done)

    def due(self, where: str, **facts: Any) -> bool:
        """Whether a unit has to be measured: the resumed file has no row with these facts, and there is time left.

        Args:
            where: the unit's name.
            facts: columns of its rows, or entries of their config.
        """
        self._complete()
        self.units += 1
        if self._has(facts):
            self.found_there += 1
            return False
        late = time.monotonic() - self.began > self.budget_s
        if late:
            self.say(f"{where}: left out, the {self.budget_s:.0f} s of --budget-s are over")
            self.failures.setdefault(("everything", "out of time"), []).append(where)
        return not late

    def _has(self, facts: Mapping[str, Any]) -> bool:
        wanted = {name: str(value) for name, value in facts.items()}
        return any(all(str(found.get(name)) == value for name, value in wanted.items()) for found in map(_facts, self.kept))

    def _complete(self) -> None:
        """The unit before is over."""
        self.advance(self.units)
        if self.measurements:
            write_csv(self.path, self.measurements, self.device, self.kept)

    def say(self, line: str) -> None:
        """A line of progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s, {self.units}/{self.of_units}] {line}", flush=True)

    def finish(self) -> None:
        """All units are over: the file is complete as far as time allowed."""
        self._complete()
        write_csv(self.path, self.measurements, self.device, self.kept)

    def end(self) -> None:
        """Say what is missing from the tables, and why. An unfinished unit is lost."""
        self.bar.close()
        print()
        if self.found_there:
            print(f"{self.found_there} of {self.of_units} parts were in {self.path} already; --fresh measures them again")
        self.print_failures()

    def failed(self, provider: str, where: str, error: Exception) -> None:
        """Note why a provider has no result; raises if the device itself is lost."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if (provider, reason) not in self.failures:
            self.say(f"{where}: {provider} failed, {reason}")
        self.failures.setdefault((provider, reason), []).append(where)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def print_failures(self) -> None:
        """What is missing from the tables, and why."""
        for (provider, reason), places in self.failures.items():
            first, *others = dict.fromkeys(places)
            more = f" and {len(others)} more" if others else ""
            print(f"not measured: {provider} ({first}{more}): {reason}")


def write_csv(
    path: Path, measurements: Iterable[Measurement], device: torch.device, kept: Iterable[Mapping[str, str]] = ()
) -> None:
    """Write the measurements of one run, and what they were made on, after rows `kept` from an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on = _made_on(device)
    unfinished = path.with_suffix(".part")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows(_row(measurement) | on for measurement in measurements)
    unfinished.replace(path)


def read_csv(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _kept(path: Path, device: torch.device) -> list[dict[str, str]]:
    """The rows of a file to add to: none if there is none; another machine's or another version's are not added to.

    A package that was not there then, or is not now, has had no part in the rows of the other time.
    """
    rows = read_csv(path) if path.is_file() else []
    here = _made_on(device)
    for row in rows:
        both = [name for name in here if name != "timestamp" and here[name] and row.get(name)]
        other = [name for name in both if row[name] != here[name]]
        if other:
            told = ", ".join(f"{name} {row.get(name, '')} (here {here[name]})" for name in other)
            sys.exit(f"{path} was measured with {told}: give another --out, or replace it with --fresh")
    return rows


def _facts(row: Mapping[str, str]) -> dict[str, Any]:
    return {**row, **json.loads(row["extra_benchmark_config_str"])}


def _row(measurement: Measurement) -> dict[str, Any]:
    row = {name: getattr(measurement, name) for name in COLUMNS[:8]}
    row |= {f"y_value_{name[1:]}": float(f"{value:.6g}") for name, value in measurement.y._asdict().items()}
    return row | {"extra_benchmark_config_str": json.dumps(dict(measurement.config))}


def _made_on(device: torch.device) -> dict[str, Any]:
    installed = versions()
    return {
        "gpu_name": device_name(device),
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "liger_version": installed["liger"],
        "device": device.type,
        **{column: installed[name] or "" for column, name in PACKAGES.items()},
    }


def describe(device: torch.device) -> str:
    """One line: the device, the versions and the date."""
    on = _made_on(device)
    named = ", ".join(f"{name} {on[name]}" for name in PACKAGES if on[name])
    cores = f" ({os.cpu_count()} cores, {torch.get_num_threads()} threads)" if device.type == "cpu" else ""
    return f"{on['gpu_name']}{cores}, {named}, liger {on['liger_version']}, {on['timestamp'][:10]}"


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table, columns aligned."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for a page or a comment."""
    for line in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(line)} |")
