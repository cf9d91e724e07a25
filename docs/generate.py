"""Writes the generated parts of the documentation: `python docs/generate.py`; `--check` only says what is stale.

A generated part stands between `<!-- generated: NAME -->` and `<!-- /generated -->` in a page of docs/ or in README.md. What
the registry says is made here, what was measured in `results`.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import plots
import results
import split
import torch
from results import table as _table

import liger
import liger.backends  # fills the table
from liger.dispatch import DeviceInfo, Implementation, Request, table

DOCS = Path(__file__).resolve().parent
PAGES = (*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md")
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)

FUNCTIONS = {
    "cross_entropy": liger.liger_cross_entropy,
    "fused_linear_cross_entropy": liger.liger_fused_linear_cross_entropy,
}
NOT_OPTIONS = {"cross_entropy": {"input", "target"}, "fused_linear_cross_entropy": {"input", "weight", "target"}}
SHAPES = {"cross_entropy": (8192, 128256), "fused_linear_cross_entropy": (8192, 128256, 4096)}
NVIDIA = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
DEVICES = (*(DeviceInfo("cuda", arch) for arch in NVIDIA), DeviceInfo("rocm"), DeviceInfo("xpu"), DeviceInfo("cpu"))


def support() -> str:
    """What each row of the registry's table needs, and which options it honours."""
    return "\n".join(_support(op) for op in FUNCTIONS)


def auto() -> str:
    """What auto would choose on each kind of device."""
    head = ("device", *(f"`{op}`" for op in FUNCTIONS))
    return _table(head, ((str(device), *(_auto(op, device) for op in FUNCTIONS)) for device in DEVICES))


def recipes() -> str:
    """Which tests of which recipe have passed where: from the files that `pytest --record-recipes` wrote."""
    lines = [line for path in sorted(DOCS.glob("data/recipes_*.csv")) for line in csv.DictReader(path.open(encoding="utf-8"))]
    passed: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for line in lines:
        if int(line["failed"]):
            raise ValueError(f"{line['test']} failed on {line['where']}: a record of failures is not for the docs")
        places = passed.setdefault((line["recipe"], line["test"]), {})
        if int(line["passed"]):
            places.setdefault(line["where"], {})[line["backend"]] = None
    where = list(dict.fromkeys(line["where"] for line in lines if int(line["passed"])))
    dates = " and ".join(sorted({line["date"] for line in lines}))

    def cell(places: dict[str, dict[str, None]], place: str) -> str:
        return ", ".join(backend or "yes" for backend in places.get(place, {}))

    order = sorted(passed, key=lambda key: (key[0][0], int(key[0][1:]), key[1]))
    rows = ((key[0], f"`{key[1].partition('::')[2]}`", *(cell(passed[key], place) for place in where)) for key in order)
    return f"*Recorded {dates}.*\n\n{_table(('recipe', 'test', *where), rows)}"


def installations() -> str:
    """What the package did in each environment: from the file that test/installations.py wrote."""
    lines = list(csv.DictReader((DOCS / "data" / "installations.csv").read_text("utf-8").splitlines()))
    not_run = [line for line in lines if line["verdict"].startswith("not run")]
    bad = [line["environment"] for line in lines if line["verdict"] != "good" and line not in not_run]
    if bad:
        raise ValueError(f"{', '.join(bad)}: a record of failures is not for the docs")
    absent = re.compile(r"package \S+ is not installed \([^)]*\)")
    out = [f"*Recorded {' and '.join(sorted({line['date'] for line in lines}))}.*\n"]
    for python, torch_version in dict.fromkeys((line["python"], line["torch"]) for line in lines if line["verdict"] == "good"):
        here = [line for line in lines if (line["python"], line["torch"]) == (python, torch_version)]
        head = ("environment", "installed", "triton", "cutedsl", "triton, interpreted", "tests", "verdict")
        columns = ("environment", "packages", "triton", "cutedsl", "interpreter", "tests", "verdict")
        rows = ([absent.sub("not installed", line[name]) for name in columns] for line in here)
        out += [f"### Python {python}, torch {torch_version}\n", _table(head, rows)]
    columns = ("python", "torch", "verdict")
    rows = ([line[name] for name in columns] for line in not_run)
    out += ["### What was not run\n", _table(("Python", "torch", "why"), rows)]
    return "\n".join(out)


MADE_ELSEWHERE = {"mutants"}
"""By test/mutants.py, which takes minutes."""
PARTS: dict[str, Callable[[], str]] = {
    "support": support,
    "auto": auto,
    "recipes": recipes,
    "installations": installations,
    "measured": results.measured,
    "ce_summary": results.ce_summary,
    "flce_summary": results.flce_summary,
    "step_summary": results.step_summary,
    **{f"figures_{what}": partial(plots.shown, what) for what in ("vocabulary", "labelled", "pareto", "chunks")},
    "faster_peers": results.faster_peers,
    "copy_rate": results.copy_rate,
    "launches": results.launches,
    "chunk_sizes": results.chunk_sizes,
    "accumulation": results.accumulation,
    "causal_classes": results.causal_classes,
    "hf_trainer": results.hf_trainer,
    "cutedsl_rows": results.cutedsl_rows,
    "cutedsl_facts": results.cutedsl_facts,
    "gemm_rates": results.gemm_rates,
    "chunk_streams": results.chunk_streams,
    "clock": results.clock,
    "bytes_moved": results.bytes_moved,
    "host_time": results.host_time,
    "first_calls": results.first_calls,
    "sweeps": results.sweeps,
    "soak": results.soak,
    "sanitizer": results.sanitizer,
    "batch_rows": results.batch_rows,
    "split_volumes": split.volumes,
    "split_times": split.predicted,
    "split_measured": split.times_measured,
    "split_bytes": split.bytes_measured,
}


def _support(op: str) -> str:
    rows = table(op)
    names = [n for n in inspect.signature(FUNCTIONS[op]).parameters if n not in NOT_OPTIONS[op] | {"backend"}]
    lines = [(title, *map(needs, rows)) for title, needs in NEEDS.items()]
    lines += [(f"`{name}`", *("yes" if name in row.capability.options else "no" for row in rows)) for name in names]
    return f"### `{op}`\n\n{_table(('', *(_label(row, rows) for row in rows)), lines)}"


def _label(row: Implementation, rows: tuple[Implementation, ...]) -> str:
    """The backend, with its module where one backend has several rows."""
    several = sum(other.backend == row.backend for other in rows) > 1
    return f"{row.backend} ({row.module.rpartition('.')[2]})" if several else row.backend


def _devices(row: Implementation) -> str:
    needs = row.capability
    devices = "any" if needs.devices is None else ", ".join(sorted(needs.devices))
    return devices if needs.interpreter is None else f"{devices}; cpu with `{needs.interpreter}=1`"


def _archs(row: Implementation) -> str:
    archs, lowest = row.capability.archs, row.capability.min_capability
    if archs is not None:
        return ", ".join(_dotted(arch) for arch in sorted(archs))
    return "any" if lowest is None else f"≥ {_dotted(lowest)}"


def _dtypes(row: Implementation) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in row.capability.dtypes))


def _packages(row: Implementation) -> str:
    windows = (f"{p.name} ≥ {_dotted(p.minimum)}, < {_dotted(p.below)}" for p in row.capability.packages)
    return "; ".join(windows) or "none"


def _rule(row: Implementation) -> str:
    rule = row.capability.rule
    return "none" if rule is None else (inspect.getdoc(rule) or rule.__name__).splitlines()[0]


NEEDS: dict[str, Callable[[Implementation], str]] = {
    "devices": _devices,
    "compute capability": _archs,
    "dtypes": _dtypes,
    "packages": _packages,
    "further condition": _rule,
    "bad target": lambda row: "`ValueError`" if row.checks_target else "NaN in its row",
    "backward twice": lambda row: "`RuntimeError`" if row.consumes_saved else "works",
}


def _auto(op: str, device: DeviceInfo) -> str:
    """The first row with no reason against a plain bfloat16 call, were its packages installed."""
    request = Request(op, device, torch.bfloat16, SHAPES[op])
    for row in table(op):
        if not replace(row.capability, packages=(), interpreter=None).reasons(request):
            return _label(row, table(op))
    return "none"


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def regenerate(page: str) -> str:
    """A page's text with its generated parts made anew."""

    def make(part: re.Match[str]) -> str:
        return part[0] if part[2] in MADE_ELSEWHERE else f"{part[1]}{PARTS[part[2]]()}{part[3]}"

    return PART.sub(make, page)


def main() -> int:
    """Write the pages, or with `--check` name the stale ones and return 1."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    stale = False
    for path in PAGES:
        page, name = path.read_text(encoding="utf-8"), path.relative_to(DOCS.parent)
        if (new := regenerate(page)) != page:
            stale = True
            if check:
                print(f"{name} is stale: run python docs/generate.py", file=sys.stderr)
            else:
                path.write_text(new, encoding="utf-8")
                print(f"wrote {name}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
