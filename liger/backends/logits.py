"""Cross entropy on given logits: the row kernels applied to the whole matrix at once, on any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..spec import RowResults

if TYPE_CHECKING:
    from ..call import Call, Gradients
    from . import RowKernels


def forward(call: Call, kernels: RowKernels) -> tuple[RowResults, Gradients | None]:
    """Row results and, unless backward makes it or nobody wants it, the gradient for an upstream gradient of 1."""
    logits = call.input.detach()
    results = RowResults.empty(call.rows, logits, call.options, keep_lse=call.recipe.gradient_in_backward)
    grad = _gradient_storage(call, logits) if call.recipe.gradient_in_forward else None
    kernels.rows(logits, call.row_inputs(), results, grad)
    if grad is None:
        return results, None
    if call.options.in_place:
        torch.autograd.graph.increment_version(call.input)
    return results, (grad, None, None)


def backward(call: Call, kernels: RowKernels, lse: Tensor, grad_loss: Tensor) -> Gradients:
    """The gradient with the upstream gradient of each row, `grad_loss` (N,), folded in before the one rounding."""
    logits = call.input.detach()
    grad = _gradient_storage(call, logits)
    kernels.row_grad(logits, call.row_inputs(), lse, grad_loss, grad)
    if call.options.in_place:
        torch.autograd.graph.increment_version(call.input)
    return grad, None, None


def _gradient_storage(call: Call, logits: Tensor) -> Tensor:
    return logits if call.options.in_place else logits.new_empty(logits.shape)
