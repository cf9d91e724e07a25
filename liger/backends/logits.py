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
    recipe = call.recipe
    results = RowResults.empty(call.rows, call.input, call.options, keep_lse=recipe.gradient_in_backward)
    grad = _gradient_storage(call) if recipe.gradient_in_forward else None
    kernels.rows(call.input, call.row_inputs(), results, grad)
    if grad is None:
        return results, None
    _tell_autograd(call)
    return results, (grad, None, None)


def backward(call: Call, kernels: RowKernels, lse: Tensor, grad_loss: Tensor) -> Gradients:
    """The gradient with the upstream gradient of each row, `grad_loss` (N,), folded in before the one rounding."""
    grad = _gradient_storage(call)
    kernels.row_grad(call.input, call.row_inputs(), lse, grad_loss, grad)
    _tell_autograd(call)
    return grad, None, None


def _gradient_storage(call: Call) -> Tensor:
    return call.input.detach() if call.options.in_place else call.input.new_empty(call.input.shape)


def _tell_autograd(call: Call) -> None:
    """Whoever else saved logits that now hold their gradient gets autograd's error, not a wrong number."""
    if call.options.in_place:
        torch.autograd.graph.increment_version(call.input)
