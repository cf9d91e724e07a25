"""Bytes that the row kernels move through device memory, by the hardware's counters, against what they must move.

    python -m benchmark.bytes_moved [--out bytes.csv]

On a GPU, with NVIDIA Nsight Compute (`ncu`) on the path. The rows of cross entropy with their gradient, on every backend that
has kernels of its own: a logit is read once and its gradient written once. What a kernel wrote last is still in the L2 cache
when it ends, and is not counted.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import torch

from liger import LigerCrossEntropyLoss
from liger.dispatch import backends

from .common import describe, print_markdown

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
KERNELS = {"cutedsl": "regex:RowKernel", "triton": "regex:rows_kernel"}
"""What the kernels' names hold."""


def run(backend: str, rows: int, vocab: int) -> None:
    """The step that is counted."""
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab, (rows,), device="cuda")
    LigerCrossEntropyLoss(backend=backend)(logits, target)
    torch.cuda.synchronize()


def counted(backend: str, rows: int, vocab: int) -> tuple[float, float]:
    """(bytes read, bytes written) of one launch."""
    ncu = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(COUNTERS), "--kernel-name", KERNELS[backend]]
    child = [sys.executable, "-m", "benchmark.bytes_moved", "--step", backend, "--rows", str(rows), "--vocab", str(vocab)]
    answer = subprocess.run([*ncu, *child], capture_output=True, text=True)
    table = [line for line in answer.stdout.splitlines() if line.startswith('"')]
    found = {line["Metric Name"]: line["Metric Value"] for line in csv.DictReader(table) if line["Metric Name"]}
    if set(found) != set(COUNTERS):
        raise RuntimeError(f"ncu counted nothing of {backend}: {(answer.stderr or answer.stdout).strip()[-500:]}")
    read, written = (float(found[name].replace(",", "")) for name in COUNTERS)
    return read, written


def main() -> None:
    """Count, print and write."""
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("--rows", type=int, default=2048)
    top.add_argument("--vocab", type=int, default=128256)
    top.add_argument("--out", type=Path, help="a CSV file to write")
    top.add_argument("--step", choices=KERNELS, help=argparse.SUPPRESS)
    arguments = top.parse_args()
    if arguments.step:
        run(arguments.step, arguments.rows, arguments.vocab)
        return
    ideal = arguments.rows * arguments.vocab * torch.bfloat16.itemsize
    lines = []
    for backend in (name for name in backends() if name in KERNELS):
        try:
            read, written = counted(backend, arguments.rows, arguments.vocab)
        except (OSError, RuntimeError) as error:
            print(f"{backend}: {error}", file=sys.stderr)
            continue
        lines.append((backend, f"{arguments.rows} × {arguments.vocab}", *(f"{b / 1e6:.2f}" for b in (read, written, ideal))))
    head = ("backend", "rows × vocabulary", "MB read", "MB written", "MB of logits")
    print_markdown(head, lines)
    made_on = describe(torch.device("cuda"))
    if arguments.out:
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*head, "made_on"))
            writer.writerows((*line, made_on) for line in lines)
    print(made_on)


if __name__ == "__main__":
    main()
