"""The row kernels in plain PyTorch: `liger.spec`, a block of rows at a time. Runs on any device torch has."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import spec
from ...spec import RowInputs, RowResults, RowStats

CPU_BLOCK_ELEMENTS = 1 << 21  # 8 MiB of fp32: the few temporaries of the spec stay in the last-level cache
BLOCK_ELEMENTS = 1 << 23  # on other devices, where an operation on less takes no longer than its launch


def rows(logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
    vocab = logits.shape[1]
    for block in _blocks(logits):
        part = inputs.select(block)
        stats = spec.row_stats(logits[block], part)
        results.narrow(block).copy_(spec.row_loss(stats, vocab, part))
        if grad is not None:
            grad[block] = spec.row_grad(logits[block], part, stats.lse)


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    parts = [spec.row_stats(logits[block], inputs.select(block)) for block in _blocks(logits)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowStats.of_nothing(0, logits, inputs.options)
    return RowStats._make(None if rows[0] is None else torch.cat(rows) for rows in zip(*parts, strict=True))


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
    for block in _blocks(logits):
        grad[block] = spec.row_grad(logits[block], inputs.select(block), lse[:, block], grad_loss[block])


def scale_(tensor: Tensor, factor: Tensor) -> None:
    dtype = spec.compute_dtype(tensor.dtype)
    if tensor.dtype == dtype:
        tensor.mul_(factor)
    else:  # in half precision the factor itself would be rounded first
        for part in torch.split(tensor.view(-1), _block_elements(tensor)):
            part.copy_(part.to(dtype) * factor)


def _block_elements(tensor: Tensor) -> int:
    return CPU_BLOCK_ELEMENTS if tensor.is_cpu else BLOCK_ELEMENTS


def _blocks(logits: Tensor) -> list[slice]:
    n, vocab = logits.shape
    step = max(1, _block_elements(logits) // vocab)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]
