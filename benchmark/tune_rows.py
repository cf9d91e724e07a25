"""Times launch configurations of the Triton row kernels: where the table in liger/backends/triton/launch.py comes from.

Run on a GPU: `python -m benchmark.tune_rows [--rows 8192] [--vocab 32000 ...] [--out rows.csv]`. For each vocabulary and
kernel every candidate is checked against the spec on a few rows, then timed with L2 flushed before each run; the floor is
the bytes the kernel must move at the rate of a device copy timed in the same process.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from liger import spec
from liger.backends import triton as backend
from liger.backends.triton.launch import Launch
from liger.options import CrossEntropyOptions

BLOCKS_AND_WARPS = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32))
HELD = (0, 16384, 32768, 49152, 65536, 98304)


def time_ms(run: Callable[[], None], flush: torch.Tensor, repeats: int) -> float:
    """Median of `repeats` runs, each after overwriting a buffer larger than L2."""
    run()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def candidates(kernel: str, vocab: int) -> Iterator[Launch]:
    """Launches worth a look: held logits only where a gradient follows, and not much more of them than there are."""
    for block, warps in BLOCKS_AND_WARPS:
        if block > 2 * vocab:
            continue
        for held in HELD if kernel == "rows" else (0,):
            per_thread = held // (warps * 32)
            if held % block == 0 and held < vocab + block and per_thread <= 128:
                yield Launch(block, warps, held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, nargs="*", default=[32000, 128256, 151936, 262144])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", nargs="*", default=["rows", "loss", "row_grad"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    table = []
    for vocab in args.vocab:
        torch.manual_seed(0)
        logits = (torch.randn(args.rows, vocab, device="cuda") * 4).to(dtype)
        target = torch.randint(vocab, (args.rows,), device="cuda")
        target[::17] = -100
        grad = torch.empty_like(logits)
        copy_ms = time_ms(lambda: grad.copy_(logits), flush, args.repeats)
        options = CrossEntropyOptions()
        inputs = spec.RowInputs(target, options, spec.divisors(target, None, options, torch.float32))
        few = inputs.select(slice(0, 64))
        lse = spec.row_stats(logits, inputs._replace(options=options)).lse if "row_grad" in args.kernels else None
        wanted = spec.row_grad(logits[:64], few, spec.row_stats(logits[:64], few).lse)
        upstream = torch.ones(args.rows, device="cuda")
        results = spec.RowResults.empty(args.rows, logits, options, keep_lse=False)
        for kernel in args.kernels:
            floor_ms = copy_ms / 2 if kernel == "loss" else copy_ms
            for launch in candidates(kernel, vocab):
                backend.rows_launch = lambda *_, launch=launch: launch
                backend.row_grad_launch = lambda *_, launch=launch: launch
                run = {
                    "rows": lambda: backend.rows(logits, inputs, results, grad),
                    "loss": lambda: backend.rows(logits, inputs, results, None),
                    "row_grad": lambda: backend.row_grad(logits, inputs, lse, upstream, grad),
                }[kernel]
                grad.fill_(float("nan"))
                try:
                    ms = time_ms(run, flush, args.repeats)
                except Exception as error:  # a launch that does not fit is an answer too
                    print(vocab, kernel, launch, type(error).__name__, str(error)[:80], file=sys.stderr)
                    continue
                if kernel != "loss" and not torch.allclose(grad[:64].float(), wanted, rtol=1e-2, atol=1e-9):
                    print("WRONG", vocab, kernel, launch, file=sys.stderr)
                    continue
                table.append((vocab, kernel, launch.block, launch.num_warps, launch.held, ms, ms / floor_ms))
        del logits, grad, lse, wanted
    for vocab in args.vocab:
        for kernel in args.kernels:
            best = sorted((row for row in table if row[:2] == (vocab, kernel)), key=lambda row: row[5])[:6]
            for _, _, block, warps, held, ms, ratio in best:
                print(f"{vocab:7d} {kernel:9s} block {block:6d} warps {warps:3d} held {held:6d}  {ms:.3f} ms  {ratio:.3f} x floor")
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("vocab", "kernel", "block", "num_warps", "held", "ms", "ratio_to_floor"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
