"""Times the projection whose number of rows only the device knows against torch's product of as many rows.

Run on a GPU of compute capability 9.0 or 10: `python -m benchmark.tune_projection [--shapes HxV ...] [--rows 256 512 ...]
[--out projection.csv]`. Each run follows matrix products, which lower the clock, as in the fused loss. Candidates are block
sizes, warps and stages; the one that `liger/backends/triton/projection.py` has is the first.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger.backends.triton import projection

from .benchmark_fused_linear_cross_entropy import NAMED, _shape
from .common import Sizing, SustainedLoad, describe, device_ms

BLOCKS = ("BLOCK_ROWS", "BLOCK_CLASSES", "BLOCK_HIDDEN", "WARPS", "STAGES")
CHOSEN = tuple(getattr(projection, name) for name in BLOCKS)
CANDIDATES = tuple(dict.fromkeys((CHOSEN, (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4))))
CLOSE = 2e-2


def project(blocks: tuple[int, ...], *tensors: Any) -> None:
    """`projection.project` with these blocks, warps and stages."""
    for name, value in zip(BLOCKS, blocks, strict=True):
        setattr(projection, name, value)
    projection.project(*tensors)


def measure(hidden: int, vocab: int, rows: int, load: SustainedLoad, sizing: Sizing) -> dict[str, float]:
    """Milliseconds of torch's product and of every candidate whose result is right."""
    device = torch.device("cuda")

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    x, weight = normal(rows, hidden), normal(vocab, hidden) * hidden**-0.5
    logits, count = torch.empty(rows, vocab, device=device, dtype=torch.bfloat16), torch.tensor(rows, device=device)
    right = x @ weight.t()
    steps: dict[str, Callable[[], Any]] = {"torch": functools.partial(torch.mm, x, weight.t(), out=logits)}
    for blocks in CANDIDATES:
        name = " ".join(map(str, blocks))
        logits.zero_()
        project(blocks, x, count, weight, None, logits)
        if torch.allclose(logits, right, rtol=CLOSE, atol=CLOSE):
            steps[name] = functools.partial(project, blocks, x, count, weight, None, logits)
        else:
            print("WRONG", name, file=sys.stderr)
    prepared = {name: load.before(lambda step=step: step) for name, step in steps.items()}  # type: ignore[misc]
    found = device_ms(prepared, device, sizing, lambda name, error: print(name, error, file=sys.stderr))
    return {name: quantiles.p50 for name, quantiles in found.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[NAMED["llama-3.2-1b"], NAMED["llama-3.1-8b"]])
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 384, 640])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = SustainedLoad(torch.device("cuda"))
    table: list[tuple[Any, ...]] = [("hidden", "vocab", "rows", "blocks", "ms", "ratio_to_torch")]
    print(describe(torch.device("cuda")))
    for shape in arguments.shapes:
        for rows in arguments.rows:
            found = measure(shape.hidden, shape.vocab, rows, load, Sizing(1, arguments.repeats))
            for name, ms in sorted(found.items(), key=lambda item: item[1]):
                table.append((shape.hidden, shape.vocab, rows, name, round(ms, 4), round(ms / found["torch"], 3)))
                print("H={} V={} rows={} {:24s} {:.4f} ms {:.3f} x torch".format(*table[-1]), flush=True)
            if arguments.out:
                with arguments.out.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()
