"""The row kernels in plain PyTorch: `liger.spec`, a block of rows at a time. Runs on any device torch has."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import spec
from ...spec import RowInputs, RowResults, RowStats

BLOCK_ELEMENTS = 1 << 21  # 8 MiB of fp32: the few temporaries of the spec stay in a CPU's last-level cache


def rows(logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
    n, vocab = logits.shape
    for block in _blocks(n, vocab):
        part = inputs.select(block)
        stats = spec.row_stats(logits[block], part)
        results.narrow(block).copy_(spec.row_loss(stats, vocab, part))
        if grad is not None:
            grad[block] = spec.row_grad(logits[block], part, stats.lse)


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    parts = [spec.row_stats(logits[block], inputs.select(block)) for block in _blocks(*logits.shape)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowStats.of_nothing(0, logits, inputs.options)
    return RowStats._make(None if rows[0] is None else torch.cat(rows) for rows in zip(*parts, strict=True))


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
    for block in _blocks(*logits.shape):
        grad[block] = spec.row_grad(logits[block], inputs.select(block), lse[:, block], grad_loss[block])


def scale_(tensor: Tensor, factor: Tensor) -> None:
    dtype = spec.compute_dtype(tensor.dtype)
    if tensor.dtype == dtype:
        tensor.mul_(factor)
    else:  # in half precision the factor itself would be rounded first
        for part in torch.split(tensor.view(-1), BLOCK_ELEMENTS):
            part.copy_(part.to(dtype) * factor)


def _blocks(n: int, vocab: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // vocab)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]
