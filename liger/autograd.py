"""The losses' only autograd Function, for both ops and every backend; forward is shared with `liger.operators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import spec
from .backends import RowKernels, linear, logits
from .backends.split import SplitVocabulary
from .call import Call, Gradients
from .context import holding, in_backward, without_autocast
from .dispatch import Implementation
from .options import CrossEntropyOutput


def losses(call: Call, kernels: RowKernels) -> tuple[CrossEntropyOutput, tuple[Tensor | None, ...]]:
    """What the call returns, per row or reduced, and what backward needs beside the call itself.

    That is the gradients of (input, weight, bias) for an upstream gradient of 1; or the rows' lse and the index of the
    rows that were projected (None for all); or nothing.
    """
    index = None
    if call.weight is None:
        results, gradients = logits.forward(call, kernels)
    else:
        results, gradients, index = linear.forward(call, kernels)
    output = spec.reduce(results, call.target, call.options, call.recipe.loss_dtype)
    if gradients is not None:
        return output, gradients
    return output, (results.lse, index) if call.recipe.gradient_in_backward else ()


def gradients_in_backward(call: Call, kernels: RowKernels, lse: Tensor, index: Tensor | None, grad_loss: Tensor) -> Gradients:
    """The gradients of (input, weight, bias) with the upstream gradient, () or (N,) of any stride, folded in."""
    grad_loss = grad_loss.reshape(-1).expand(call.rows)
    if call.weight is None:
        return logits.backward(call, kernels, lse, grad_loss)
    return linear.backward(call, kernels, lse, grad_loss, index)


def kernels_for(call: Call, implementation: Implementation) -> RowKernels:
    """The kernels of an implementation, for as much of the vocabulary as the call's logits cover."""
    kernels, split = implementation.kernels(), call.options.vocab_parallel
    return kernels if split is None else SplitVocabulary(kernels, split)


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass whose own derivative is wanted."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "liger's losses have no second derivative: backward ran with create_graph=True; "
            "use torch.nn.functional.cross_entropy where a double backward is needed"
        )


def check_head_kept(call: Call, shape: torch.Size | None) -> None:
    """Raise RuntimeError if the head that backward projects with again has not the shape it had in forward."""
    if call.weight is not None and call.weight.shape != shape:
        raise RuntimeError(
            f"weight was freed or resized between forward and backward, which projects again: it must be {tuple(shape or ())} "
            f"as in forward, got {tuple(call.weight.shape)}; keep it, or gather it, until backward has run"
        )


class LossFunction(torch.autograd.Function):
    """Forward and backward of every eager call."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, implementation: Implementation
    ) -> tuple[Tensor | None, ...]:
        """The call's outputs; gradients for an upstream gradient of 1 are made here unless the recipe says later."""
        with without_autocast(input):
            output, saved = losses(call, kernels_for(call, implementation))
        if call.recipe.gradient_in_backward:
            ctx.save_for_backward(*call.tensors, *saved)
        else:
            ctx.save_for_backward(*saved)
        ctx.recipe, ctx.implementation = call.recipe, implementation
        ctx.head_shape = None if weight is None else weight.shape
        ctx.first_factor = None
        ctx.used = False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """The gradients of (input, weight, bias); errors for what a loss with a hand-written gradient cannot do."""
        refuse_second_derivative()
        if grad_loss is None:
            return (None,) * 5
        if ctx.recipe.options.in_place and ctx.used:
            raise RuntimeError(
                "in_place=True makes the graph single-use: the logits' storage already holds the gradient handed out by "
                "the first backward; use in_place=False to call backward again"
            )
        grad_loss = holding(grad_loss)
        with in_backward(grad_loss):
            if ctx.recipe.gradient_in_backward:
                input, target, weight, bias, class_weight, num_items, lse, index = ctx.saved_tensors
                call = Call(input, target, weight, bias, class_weight, ctx.recipe, num_items)
                check_head_kept(call, ctx.head_shape)
                kernels = kernels_for(call, ctx.implementation)
                gradients = gradients_in_backward(call, kernels, lse, index, grad_loss)
            else:
                gradients = _saved_gradients(ctx, grad_loss)
        ctx.used = True
        return (*gradients, None, None)


def _saved_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    """The saved gradients times the upstream gradient.

    A graph that is not retained gives its buffers away. In a retained one autograd may add to what it was given, so
    copies are handed out; an implementation that scales its saved buffer can then serve only factors of 1 again.
    """
    saved: Gradients = ctx.saved_tensors
    kernels = ctx.implementation.kernels()
    if ctx.first_factor is not None and bool(ctx.first_factor != 1):
        raise RuntimeError(
            "this loss's saved gradient was scaled by an earlier backward's upstream gradient, which was not 1; "
            "backward again needs a new forward, reduction='none', or backend='torch'"
        )
    retained = torch._C._autograd._get_current_graph_task_keep_graph() and not ctx.recipe.options.in_place
    if retained and ctx.implementation.consumes_saved:
        ctx.first_factor = grad_loss.detach().clone()
        _scale_all(kernels, saved, grad_loss)
        return _copies(saved)
    if retained:
        saved = _copies(saved)
    _scale_all(kernels, saved, grad_loss)
    return saved


def _copies(gradients: Gradients) -> Gradients:
    first, second, third = (None if gradient is None else gradient.clone() for gradient in gradients)
    return first, second, third


def _scale_all(kernels: RowKernels, gradients: Gradients, factor: Tensor) -> None:
    for gradient in gradients:
        if gradient is not None:
            kernels.scale_(gradient, factor)
