"""Times chunk sizes and accumulation dtypes of the fused loss: where the plan in liger/backends/linear.py comes from.

Run on a GPU: `python -m benchmark.tune_chunks [--out chunks.csv]`. Each time is set against three bare GEMMs
of the same shape timed in the same process.
"""

from __future__ import annotations

import argparse
import csv

import torch

from benchmark.tune_rows import time_ms
from liger import liger_fused_linear_cross_entropy

SHAPES = ((8192, 128256, 2048), (8192, 151936, 2048), (8192, 262208, 2560), (8192, 151936, 4096), (8192, 128256, 4096))
OTHER_ROWS = (512, 2048, 16384, 32768)
CHUNKS = (512, 1024, 2048, 4096, 8192)


class Problem:
    """Tensors of one shape, the fused step on them, and its three bare GEMMs."""

    def __init__(self, rows: int, vocab: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.weight = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
        self.target = torch.randint(vocab, (rows,), device="cuda")

    @torch.no_grad()
    def bare(self) -> None:
        logits = self.x @ self.weight.t()
        logits @ self.weight
        logits.t() @ self.x

    def step(self, chunk: int | None, accum: torch.dtype | None) -> None:
        self.x.grad = self.weight.grad = None
        loss = liger_fused_linear_cross_entropy(
            self.x, self.weight, self.target, chunk_size=chunk, accum_dtype=accum, backend="triton"
        )
        loss.backward()

    def extra_peak_mib(self, chunk: int | None, accum: torch.dtype | None) -> float:
        self.x.grad = self.weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(chunk, accum)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS)
    parser.add_argument("--accum", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="*", default=OTHER_ROWS, help="other row counts, at V=128256 H=4096")
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    table = []
    for rows, vocab, hidden in (*SHAPES, *((rows, 128256, 4096) for rows in args.rows)):
        problem = Problem(rows, vocab, hidden)
        bare_ms = time_ms(problem.bare, flush, args.repeats)
        dtypes = [getattr(torch, name) for name in args.accum]
        sweep = [(chunk, accum) for accum in dtypes for chunk in args.chunks if chunk <= rows]
        for chunk, accum in (*sweep, (None, None)):
            peak = problem.extra_peak_mib(chunk, accum)
            ms = time_ms(lambda p=problem, c=chunk, a=accum: p.step(c, a), flush, args.repeats)
            table.append((rows, vocab, hidden, chunk or "plan", str(accum), bare_ms, ms, ms / bare_ms, peak))
            print("N {} V {} H {} chunk {} {}: bare {:.2f} ms, {:.2f} ms, {:.3f}x, {:.0f} MiB".format(*table[-1]))
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            names = ("rows", "vocab", "hidden", "chunk", "accum_dtype", "bare_ms", "ms", "ratio", "extra_peak_mib")
            writer.writerow(names)
            writer.writerows(table)


if __name__ == "__main__":
    main()
