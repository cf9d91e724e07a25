"""Times layouts of the CuTe DSL row kernels: where the rules in liger/backends/cutedsl/launch.py come from.

Run on a GPU of compute capability 9.0, 10.0 or 10.3: `python -m benchmark.tune_layouts [--rows 8192] [--vocab 32000 ...]
[--out layouts.csv]`. For each vocabulary and kernel every candidate is checked against the spec on a few rows, then timed
with L2 flushed before each run; the floor is the bytes the kernel must move at the rate of a device copy timed in the same
process. The Triton kernels are timed beside them. `--chosen` times only the layouts that the package uses; `--sustained`
after matrix products, which lower the clock: that is how the fused loss meets the kernels.
"""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Callable, Iterator

import torch

from liger.backends import cutedsl, triton
from liger.backends.cutedsl import launch
from liger.backends.cutedsl.kernels import Layout
from liger.backends.cutedsl.launch import layout_of

from .common import SustainedLoad
from .tune_rows import Problem, parser, time_ms

PIPELINES_WARPS_VECTORS = ((1, 16, 2), (1, 16, 4), (2, 8, 2), (2, 8, 4), (3, 4, 4), (4, 4, 4))


def candidates(kernel: str, row_bytes: int) -> Iterator[Layout]:
    """Layouts worth a look: that hold the row if a gradient follows its statistics, in clusters no larger than needed."""
    for shape in PIPELINES_WARPS_VECTORS:
        for cluster in (1, 2, 4, 8) if kernel == "rows" else (1,):
            layout = layout_of(cluster, *shape)
            if kernel != "rows" or layout.holds(row_bytes):
                yield layout
                break


def chosen(kernel: str, row_bytes: int) -> Iterator[Layout]:
    """The one that the package uses."""
    yield launch.rows_layout(row_bytes) if kernel == "rows" else launch.one_pass_layout()


def timed(problem: Problem, kernel: str, layout: Layout, time: Callable[[Callable[[], None]], float]) -> float | None:
    """Time of one launch; None, with the reason on stderr, for a layout whose result is wrong."""
    cutedsl.rows_layout = cutedsl.one_pass_layout = lambda *_, **__: layout
    problem.grad.fill_(float("nan"))
    ms = time(lambda: problem.run(kernel, cutedsl))
    if not problem.is_right(kernel):
        print("WRONG", kernel, layout, file=sys.stderr)
        return None
    return ms


def main() -> None:
    top = parser(__doc__, [4096, 32000, 128256, 151936, 262144])
    top.add_argument("--chosen", action="store_true", help="only the layouts that the package uses")
    top.add_argument("--sustained", action="store_true", help="each run after matrix products")
    args = top.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    load = SustainedLoad(torch.device("cuda" if args.sustained else "cpu")).before(lambda: lambda: None)
    time = functools.partial(time_ms, flush=flush, repeats=args.repeats, before=load)
    layouts = chosen if args.chosen else candidates
    table = []
    for vocab in args.vocab:
        problem = Problem(args.rows, vocab, getattr(torch, args.dtype))
        copy_ms = time(problem.copy)
        for kernel in args.kernels:
            floor_ms = copy_ms / 2 if kernel == "loss" else copy_ms
            ms = time(lambda problem=problem, kernel=kernel: problem.run(kernel, triton))
            found = [("triton", ms)]
            for layout in layouts(kernel, vocab * problem.logits.element_size()):
                ms = timed(problem, kernel, layout, time)
                if ms is not None:
                    found.append((" ".join(map(str, layout)), ms))
            for name, ms in sorted(found, key=lambda row: row[1]):
                table.append((vocab, args.dtype, kernel, name, round(ms, 4), round(ms / floor_ms, 3)))
                print(f"{vocab:7d} {kernel:9s} {name:16s}  {ms:.3f} ms  {ms / floor_ms:.3f} x floor")
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("vocab", "dtype", "kernel", "layout", "ms", "ratio_to_floor"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
