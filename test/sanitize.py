"""compute-sanitizer over small tests of the kernels: `python test/sanitize.py --tools memcheck racecheck --out FILE.csv`.

Needs a GPU and NVIDIA's compute-sanitizer, which comes with the CUDA toolkit. A line per tool says how many tests ran and how
many errors the tool saw: in this package's kernels, and in others (torch's and cuBLAS's own), which are named. Errors in ours,
a failing test or a tool that did not run make the exit status 1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
TESTS = ("test/test_isolation.py", "test/test_targets.py")
SELECTED = (
    "cuda and (triton or cutedsl) and ((nothing_beside and 40 and smoothed and not sum) or "
    "(in_place_writes and 40 and mean) or (names_no_class and mean and (40 or 2147483648)))"
)
"""Both losses and all row kernels on the smallest vocabulary, guards around the tensors, targets far out of range."""
NOT_SELECTED = {"initcheck": "flce and nothing_beside"}
"""cuBLAS writes its half-precision products with the GPU's copy engine, and initcheck does not see such writes: everybody who
reads a product, torch too, would be reported. The fused loss in fp32 stays."""
SECONDS = 150
OURS = ("rows_kernel", "row_stats_kernel", "row_grad_kernel", "scale_kernel", "kernel_cutlass", "RowKernel", "ScaleKernel")
"""What the names of this package's kernels contain: Triton's are the functions' own, CuTe DSL's made from the classes'."""
COLUMNS = ("tool", "passed", "failed", "errors", "errors_elsewhere", "elsewhere", "seconds", "version", "gpu", "torch", "date")
SUMMARY = re.compile(r"=+ ERROR SUMMARY: (\d+) error|=+ RACECHECK SUMMARY: (\d+) hazard")
RECORD = re.compile(r"^=========\x20(?=Invalid|Misaligned|Uninitialized|Out-of-|Error: |Warning: |Potential)", re.MULTILINE)
KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?P<name>[A-Za-z_].*?)(?=\+0x|:0x|$)", re.MULTILINE)
ENDED = re.compile(r"^.*\d (?:passed|failed|skipped|error).* in [\d.]+s", re.MULTILINE)
COUNTS = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True)
class Found:
    """What one tool said."""

    passed: int
    failed: int
    errors: int
    """In this package's kernels, or in none that has a name."""
    elsewhere: Counter[str]
    """Errors in others' kernels, by name."""


def tool_path() -> str | None:
    """Where compute-sanitizer is."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *TOOLKITS))
    return shutil.which("compute-sanitizer", path=path)


def is_ours(kernel: str) -> bool:
    return any(part in kernel for part in OURS)


def parsed(output: str) -> Found:
    """What a run's output says.

    Raises:
        ValueError: no summary of the tool is in it.
    """
    summary = SUMMARY.search(output)
    if summary is None:
        raise ValueError(f"the tool said nothing:\n{output[-2000:]}")
    total = int(summary[1] or summary[2])
    elsewhere: Counter[str] = Counter()
    starts = [match.start() for match in RECORD.finditer(output)]
    for start, end in itertools.pairwise([*starts, summary.start()]):
        kernel = KERNEL.search(output, start, end)
        if kernel is not None and not is_ours(kernel["name"]):
            elsewhere[kernel["name"].split("(")[0].split("<")[0][:80]] += 1
    ended = ENDED.search(output)
    counts = {word: int(number) for number, word in COUNTS.findall(ended[0] if ended else "")}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return Found(counts.get("passed", 0), failed, total - elsewhere.total(), elsewhere)


def run(program: str, tool: str, selected: str) -> tuple[Found, float, str]:
    """(what it found, seconds, its whole output).

    Raises:
        RuntimeError: it did not run to its end.
    """
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "1000", "--report-api-errors", "no"]
    if tool == "memcheck":
        options += ["--padding", "32"]  # so that what lies past an allocation is nobody's
    if tool in NOT_SELECTED:
        selected = f"({selected}) and not ({NOT_SELECTED[tool]})"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", selected, *TESTS]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # every tensor is an allocation of its own
    began = time.monotonic()
    try:
        done = subprocess.run(
            [program, *options, *tests],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{tool} took more than {SECONDS} s") from error
    output = done.stdout + done.stderr
    try:
        return parsed(output), time.monotonic() - began, output
    except ValueError as error:
        raise RuntimeError(f"{tool}: {error}") from error


def version_of(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version ([\d.]+)", said)
    return found[1] if found else said.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--select", default=SELECTED, help="which tests, as pytest's -k takes it")
    parser.add_argument("--out", type=Path, help="write a line per tool to this CSV file")
    parser.add_argument("--logs", type=Path, help="write the tools' whole outputs into this folder")
    given = parser.parse_args()
    program = tool_path()
    if program is None:
        print(f"compute-sanitizer is not on the PATH nor in {', '.join(TOOLKITS)}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    made_on = (version_of(program), torch.cuda.get_device_name(), torch.__version__, date.today().isoformat())
    lines, wrong = [], False
    for tool in given.tools:
        try:
            found, seconds, output = run(program, tool, given.select)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            wrong = True
            continue
        if given.logs is not None:
            given.logs.mkdir(parents=True, exist_ok=True)
            (given.logs / f"{tool}.txt").write_text(output, "utf-8")
        wrong = wrong or bool(found.errors or found.failed) or not found.passed
        names = "; ".join(f"{name} {count}" for name, count in found.elsewhere.most_common())
        lines.append((tool, found.passed, found.failed, found.errors, found.elsewhere.total(), names, round(seconds), *made_on))
        print(
            f"{tool}: {found.passed} tests passed, {found.failed} failed, {found.errors} errors in our kernels, "
            f"{found.elsewhere.total()} in others{': ' + names if names else ''} ({seconds:.0f} s)",
            flush=True,
        )
    if given.out is not None:
        with given.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(lines)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
