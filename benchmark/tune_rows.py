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
from liger.backends import RowKernels
from liger.backends import triton as backend
from liger.backends.triton.launch import Launch
from liger.options import CrossEntropyOptions

BLOCKS_AND_WARPS = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32))
HELD = (0, 16384, 32768, 49152, 65536, 98304)


def time_ms(run: Callable[[], None], flush: torch.Tensor, repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Median of `repeats` runs, each after `before` and after overwriting a buffer larger than L2."""
    run()
    pairs = []
    for _ in range(repeats):
        before()
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
            if held % block == 0 and held <= vocab and per_thread <= 128:
                yield Launch(block, warps, held)


class Problem:
    """Tensors of one vocabulary, and what each kernel has to do with them."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.logits = (torch.randn(rows, vocab, device="cuda") * 4).to(dtype)
        self.grad = torch.empty_like(self.logits)
        target = torch.randint(vocab, (rows,), device="cuda")
        target[::17] = -100
        options = CrossEntropyOptions()
        self.inputs = spec.RowInputs(target, options, spec.divisors(target, None, options, torch.float32))
        self.results = spec.RowResults.empty(rows, self.logits, options, keep_lse=True)
        self.upstream = torch.ones(rows, device="cuda")
        few = self.inputs.select(slice(0, 64))
        self.wanted = spec.row_grad(self.logits[:64], few, spec.row_stats(self.logits[:64], few).lse)
        backend.rows(self.logits, self.inputs, self.results, None)

    def copy(self) -> None:
        self.grad.copy_(self.logits)

    def run(self, kernel: str, kernels: RowKernels = backend) -> None:
        if kernel == "row_grad":
            kernels.row_grad(self.logits, self.inputs, self.results.lse, self.upstream, self.grad)
        else:
            kernels.rows(self.logits, self.inputs, self.results, self.grad if kernel == "rows" else None)

    def is_right(self, kernel: str) -> bool:
        return kernel == "loss" or torch.allclose(self.grad[:64].float(), self.wanted, rtol=1e-2, atol=1e-9)


def timed(problem: Problem, kernel: str, launch: Launch, flush: torch.Tensor, repeats: int) -> float | None:
    """Time of one launch; None, with the reason on stderr, for one that does not fit or is wrong."""
    backend.rows_launch = backend.row_grad_launch = lambda *_: launch
    problem.grad.fill_(float("nan"))
    try:
        ms = time_ms(lambda: problem.run(kernel), flush, repeats)
    except RuntimeError as error:
        print(kernel, launch, type(error).__name__, str(error)[:80], file=sys.stderr)
        return None
    if not problem.is_right(kernel):
        print("WRONG", kernel, launch, file=sys.stderr)
        return None
    return ms


def parser(description: str | None, vocabularies: list[int]) -> argparse.ArgumentParser:
    """The command line of a sweep over launches."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, nargs="*", default=vocabularies)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", nargs="*", default=["rows", "loss", "row_grad"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=None)
    return parser


def main() -> None:
    args = parser(__doc__, [32000, 128256, 151936, 262144]).parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    table = []
    for vocab in args.vocab:
        problem = Problem(args.rows, vocab, getattr(torch, args.dtype))
        copy_ms = time_ms(problem.copy, flush, args.repeats)
        for kernel in args.kernels:
            floor_ms = copy_ms / 2 if kernel == "loss" else copy_ms
            for launch in candidates(kernel, vocab):
                ms = timed(problem, kernel, launch, flush, args.repeats)
                if ms is not None:
                    table.append((vocab, kernel, launch.block, launch.num_warps, launch.held, ms, ms / floor_ms))
    for vocab in args.vocab:
        for kernel in args.kernels:
            best = sorted((row for row in table if row[:2] == (vocab, kernel)), key=lambda row: row[5])[:6]
            for _, _, block, warps, held, ms, ratio in best:
                launch = f"block {block:6d} warps {warps:3d} held {held:6d}"
                print(f"{vocab:7d} {kernel:9s} {launch}  {ms:.3f} ms  {ratio:.3f} x floor")
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("vocab", "kernel", "block", "num_warps", "held", "ms", "ratio_to_floor"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
