"""Times chunk sizes and accumulation dtypes of the fused loss: where the plan in liger/backends/linear.py comes from.

Run on a GPU: `python -m benchmark.tune_chunks [--out chunks.csv]`. Each time is set against three bare GEMMs of the same
shape timed in the same process.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    table = []
    for n, vocab, hidden in (*SHAPES, *((n, 128256, 4096) for n in OTHER_ROWS)):
        torch.manual_seed(0)
        x = torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
        target = torch.randint(vocab, (n,), device="cuda")

        def bare(x=x.detach(), weight=weight.detach(), n=n, vocab=vocab) -> None:
            logits = x @ weight.t()
            logits @ weight
            logits.t() @ x

        def step(chunk, accum, x=x, weight=weight, target=target) -> None:
            x.grad = weight.grad = None
            loss = liger_fused_linear_cross_entropy(x, weight, target, chunk_size=chunk, accum_dtype=accum, backend="triton")
            loss.backward()

        bare_ms = time_ms(bare, flush, args.repeats)
        for accum in (torch.bfloat16, torch.float32, None):
            for chunk in (c for c in (CHUNKS if accum else (None,)) if c is None or c <= n):
                torch.cuda.synchronize()
                x.grad = weight.grad = None
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step(chunk, accum)
                torch.cuda.synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                ms = time_ms(lambda c=chunk, a=accum: step(c, a), flush, args.repeats)
                table.append((n, vocab, hidden, chunk or "plan", str(accum), bare_ms, ms, ms / bare_ms, peak))
                print("N {} V {} H {} chunk {} {}: bare {:.2f} ms, {:.2f} ms, {:.3f}x, {:.0f} MiB".format(*table[-1]))
        del x, weight, target
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("rows", "vocab", "hidden", "chunk", "accum_dtype", "bare_ms", "ms", "ratio", "extra_peak_mib"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
