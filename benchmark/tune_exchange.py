"""Times launches of the Triton kernel that exchanges statistics, each with several lags: where `exchanged_rows_launch` in
liger/backends/triton/launch.py comes from.

    torchrun --nproc-per-node 2 -m benchmark.tune_exchange [--rows 8192] [--vocab 128256] [--out exchange.csv]

Times are the slowest rank's medians, of steps after load and from a common start, as `benchmark.benchmark_vocab_parallel`
takes them; what collectives and two kernels take is in the table too. Every launch's loss and gradient are compared to theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmark.benchmark_vocab_parallel import joined, slowest_rank_ms
from benchmark.common import SustainedLoad, print_table
from liger import VocabParallel, spec
from liger.backends import triton as backend
from liger.backends.split import SplitVocabulary
from liger.backends.triton.launch import Launch
from liger.exchange import KNOWN
from liger.options import CrossEntropyOptions

WITH_GRAD = (
    ((8192, 16), (8192, 8), (4096, 8), (16384, 32), (16384, 16)),
    (0, 33, 66, 132, 198, 264),
)
"""(block, warps), lag"""
WITHOUT_GRAD = (
    ((8192, 16), (4096, 8)),
    (0, 264, 528, 1056),
)
LOAD_PRODUCTS = 50  # half of the benchmark's


class Candidate(NamedTuple):
    """What is timed; without a launch collectives."""

    with_grad: bool
    launch: Launch | None
    lag: int = 0


def candidates() -> Iterator[Candidate]:
    """All, a compiled kernel's neighbours together."""
    for with_grad, (launches, lags) in ((True, WITH_GRAD), (False, WITHOUT_GRAD)):
        yield Candidate(with_grad, None)
        for launch in launches:
            for lag in lags:
                yield Candidate(with_grad, Launch(*launch), lag)


class Problem:
    """A rank's part of the logits, and what the kernels are to do with it."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.split = VocabParallel.even(vocab)
        self.kernels = SplitVocabulary(backend, self.split)
        self.device = device
        torch.manual_seed(dist.get_rank())
        self.logits = (torch.randn(rows, self.split.width, device=device) * 4).to(dtype)
        self.grad = torch.empty_like(self.logits)
        torch.manual_seed(0)  # the targets are the same on every rank
        options = CrossEntropyOptions()
        target = torch.randint(vocab, (rows,), device=device)
        divisors = spec.divisors(target, None, options, torch.float32)
        self.inputs = spec.RowInputs(target, options, divisors, start=self.split.start, vocab=vocab)
        self.results = spec.RowResults.empty(rows, self.logits, options, keep_lse=True)
        self.run(Candidate(True, None))
        self.right = self.results.loss.clone(), self.grad.clone()

    @contextlib.contextmanager
    def collectives(self) -> Iterator[None]:
        """Kernels exchange nothing inside."""
        known = KNOWN.setdefault(self.split.group, {})
        before = dict(known)
        known[self.device] = None
        yield
        known.clear()
        known.update(before)

    def run(self, candidate: Candidate) -> None:
        """One call of `rows`."""
        backend.exchanged_rows_launch = lambda *_: (candidate.launch, candidate.lag)
        with self.collectives() if candidate.launch is None else contextlib.nullcontext():
            self.kernels.rows(self.logits, self.inputs, self.results, self.grad if candidate.with_grad else None)

    def check(self, candidate: Candidate) -> None:
        """Raise if a candidate is not right, or did not exchange."""
        self.results.loss.fill_(float("nan"))
        self.grad.fill_(float("nan"))
        self.run(candidate)
        loss, grad = self.right
        torch.testing.assert_close(self.results.loss, loss, rtol=1e-5, atol=0)
        if candidate.with_grad:
            torch.testing.assert_close(self.grad, grad, rtol=2e-2, atol=1e-9)
        if candidate.launch is not None and KNOWN[self.split.group][self.device] is None:
            raise RuntimeError("these ranks cannot exchange statistics in a kernel")


def main() -> None:
    """Time, print a table, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default=None, help="CSV file to write")
    given = parser.parse_args()
    device = joined(given.device)
    problem, load = Problem(given.rows, given.vocab, getattr(torch, given.dtype), device), SustainedLoad(device)
    load.REPEATS = LOAD_PRODUCTS
    found = []
    for candidate in candidates():
        problem.check(candidate)
        found.append((candidate, slowest_rank_ms(lambda c=candidate: lambda: problem.run(c), given.repeats, load, device)))
    if dist.get_rank() == 0:
        found.sort(key=lambda pair: (not pair[0].with_grad, pair[1].p50))
        lines = []
        for (with_grad, launch, lag), y in found:
            way = ("collective", "", "") if launch is None else (str(launch.block), str(launch.num_warps), str(lag))
            lines.append(("yes" if with_grad else "no", *way, *(f"{ms:.4f}" for ms in y)))
        head = ("gradient", "block", "warps", "lag", *(f"{name} ms" for name in y._fields))
        print_table(head, lines)
        if given.out:
            with open(given.out, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([head, *lines])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
