"""Times chunk sizes and accumulation dtypes of the fused loss: where the plan in liger/backends/plan.py comes from.

Run on a GPU: `python -m benchmark.tune_chunks [--out chunks.csv] [--setting frozen-head]`. All chunk sizes of a shape and
the bare GEMMs they need are timed in turn, each under sustained load.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Callable

import torch

from benchmark.benchmark_fused_linear_cross_entropy import Case, Setting
from benchmark.common import Quantiles, Sizing, SustainedLoad, device_ms, peak_extra_mib
from liger import liger_fused_linear_cross_entropy
from liger.testing import CASES

SHAPES = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-4b", "qwen3-8b", "llama-3.1-8b")
SETTINGS = {
    "mean": Setting(),
    "none": Setting("none"),
    "frozen-head": Setting(frozen_head=True),
    "no-grad": Setting(no_grad=True),
}
CHUNKS = (1024, 2048, 3072, 3328, 4096)
NAMES = ("setting", "rows", "vocab", "hidden", "chunk", "accum_dtype", "bare_ms", "ms", "ratio", "extra_peak_mib")


def step(case: Case, setting: Setting, chunk: int | None, accum: torch.dtype | None) -> Callable[[], object]:
    """A step ready to run."""
    x, weight = case.leaves(setting)
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]

    def run() -> None:
        with torch.set_grad_enabled(not setting.no_grad):
            loss = liger_fused_linear_cross_entropy(
                x, weight, case.target, reduction=setting.reduction, chunk_size=chunk, accum_dtype=accum, backend="triton"
            )
        if wanted:
            torch.autograd.grad(loss, wanted, loss.new_ones(()).expand(loss.shape))

    return run


def sweep(case: Case, setting: Setting, candidates: list[tuple[int | None, torch.dtype | None]], least: int) -> list[tuple]:
    """One line per candidate, of which None is the plan's own choice."""
    load = SustainedLoad(case.device)
    steps = {candidate: functools.partial(step, case, setting, *candidate) for candidate in candidates}
    loaded = {str(candidate): load.before(prepare) for candidate, prepare in steps.items()}
    loaded["bare"] = load.before(lambda: functools.partial(case.bare_gemms, setting))
    times: dict[str, Quantiles] = device_ms(loaded, case.device, Sizing(200.0, least), _raise)
    bare_ms = times["bare"].p50
    lines = []
    for chunk, accum in candidates:
        ms = times[str((chunk, accum))].p50
        peak_mib = peak_extra_mib(steps[chunk, accum], case.device)
        size = (case.rows, case.shape.vocab, case.shape.hidden)
        lines.append((*size, chunk or "plan", str(accum).removeprefix("torch."), bare_ms, ms, ms / bare_ms, peak_mib))
    return lines


def _raise(name: str, error: Exception) -> None:
    raise RuntimeError(f"{name} failed") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=["mean"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS)
    parser.add_argument("--accum", nargs="+", default=["bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--least", type=int, default=4, help="fewest repeats of one step (default: 4)")
    args = parser.parse_args()
    named = {case.name: case for case in CASES}
    table = []
    for name in args.shapes:
        for rows in args.rows:
            case = Case(named[name], rows, 0.0, torch.bfloat16, torch.device("cuda"))
            for setting in args.setting:
                dtypes = [getattr(torch, accum) for accum in args.accum]
                candidates = [(chunk, accum) for accum in dtypes for chunk in args.chunks if chunk <= rows]
                for line in sweep(case, SETTINGS[setting], [*candidates, (None, None)], args.least):
                    table.append((setting, *line))
                    print("{} N {} V {} H {} chunk {} {}: bare {:.2f} ms, {:.2f} ms, {:.3f}x, {:.0f} MiB".format(*table[-1]))
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(NAMES)
            writer.writerows(table)


if __name__ == "__main__":
    main()
