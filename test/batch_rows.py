"""Whether a row's loss and gradient depend on how many other rows there are: `python test/batch_rows.py --out FILE.csv`.

Cross entropy promises that they do not (test_isolation.py). In fused linear cross entropy the products are cuBLAS's, which may
choose another kernel, with another order of sums, for another number of rows: here is counted for how many rows that shows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import records
import torch
from torch import Tensor

import liger
import liger.backends  # fills the table
from liger.dispatch import OPS, Implementation, Request, device_info, table
from liger.testing import Inputs, make_inputs

SIZES = {"cuda": (1, 2, 16, 100, 1024, 4096), "cpu": (1, 2, 16, 33)}
"""Numbers of rows; each is compared with all rows of `SHAPES`."""
SHAPES = {"cuda": ((8192, 32000, 2048), (8192, 128256, 4096)), "cpu": ((64, 1000, 32),)}
"""(N, V, H)"""


class Line(NamedTuple):
    """The first `rows` of `of` rows, alone and among all."""

    op: str
    backend: str
    dtype: str
    vocab: int
    hidden: int
    of: int
    rows: int
    equal_losses: int
    """Rows whose loss is the same bit for bit."""
    equal_gradients: int
    """Rows of the input's gradient that are."""
    largest_loss_difference: float
    largest_gradient_difference: float
    """Relative to the largest gradient."""


def outcome(row: Implementation, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(N,) losses and the input's gradient; the head is frozen."""
    x = inputs.input.detach().requires_grad_()
    options = {"reduction": "none", "backend": row.backend}
    if row.op == OPS[1]:
        loss = liger.liger_fused_linear_cross_entropy(x, inputs.weight, inputs.target, **options)
    else:
        loss = liger.liger_cross_entropy(x, inputs.target, **options)
    loss.backward(torch.ones_like(loss))
    return loss.detach(), x.grad


def lines(device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    """For every backend that this machine has, but no interpreter."""
    for op in OPS:
        for n, vocab, hidden in SHAPES[device.type]:
            inputs = make_inputs(n, vocab, hidden if op == OPS[1] else None, dtype=dtype, device=device, ignored=0.0)
            for row in table(op):
                request = Request(op, device_info(device), dtype, (n, vocab, hidden)[: 2 + (op == OPS[1])], ())
                if row.reasons(request) or (device.type == "cpu" and row.capability.interpreter):
                    continue
                losses, gradient = outcome(row, inputs)
                scale = gradient.abs().max().item()
                for size in SIZES[device.type]:
                    part = replace(inputs, input=inputs.input[:size], target=inputs.target[:size])
                    loss, grad = outcome(row, part)
                    off, off_grad = (loss - losses[:size]).abs(), (grad - gradient[:size]).abs()
                    yield Line(
                        *(op, row.backend, str(dtype).removeprefix("torch."), vocab, hidden if op == OPS[1] else 0, n, size),
                        *(int((off == 0).sum()), int((off_grad.amax(-1) == 0).sum())),
                        *(off.max().item(), off_grad.max().item() / scale),
                    )
                del losses, gradient


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--out", type=Path, help="write a line per backend, shape and number of rows to this CSV file")
    given = parser.parse_args()
    found = []
    for line in lines(given.device, getattr(torch, given.dtype)):
        found.append(line)
        print(
            f"{line.op:27} {line.backend:8} V={line.vocab:<7} H={line.hidden:<5} {line.rows:5} of {line.of} rows: "
            f"{line.equal_losses} losses equal (off by up to {line.largest_loss_difference:.3g}), "
            f"{line.equal_gradients} gradients (up to {line.largest_gradient_difference:.3g})",
            flush=True,
        )
    if given.out is not None:
        records.write(given.out, Line._fields, found, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
