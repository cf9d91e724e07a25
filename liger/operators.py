"""The losses as opaque operators, for graphs that are traced: torch.compile and torch.export see one node and its gradient.

Their bodies are the code that eager calls run; eager calls do not go through them, which would cost microseconds. What is
not a tensor travels as the encoded `Recipe` of the call, and the implementation is chosen when the node runs. What has to be
known while tracing, shapes and dtypes, does not depend on the recipe's numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .autograd import gradients_in_backward, losses
from .backends import RowKernels
from .backends.linear import labelled_rows
from .call import NUMBERS, Call, Recipe
from .checks import check_target_values
from .context import in_backward, without_autocast
from .spec import compute_dtype

SCALED_ELEMENTS = 1 << 24
TENSORS = 6
"""`Call.tensors`, which come first."""
ARGUMENTS = TENSORS + 1 + len(NUMBERS)


def traced_loss(call: Call) -> tuple[Tensor | None, ...]:
    """The call's outputs, (loss, z_loss, token_accuracy, predicted_tokens), as nodes of the graph being traced."""
    text, numbers = call.recipe.encode()
    nodes = iter(loss(*call.tensors, text, *numbers))
    return tuple([next(nodes) if asked else None for asked in _asked_for(call.recipe)])


def _asked_for(recipe: Recipe) -> tuple[bool, bool, bool, bool]:
    options = recipe.options
    return True, options.return_z_loss, options.return_token_accuracy, options.return_predicted_tokens


def _kernels(call: Call) -> RowKernels:
    implementation = dispatch.resolve(call.request(), call.recipe.backend)
    if implementation.checks_target:
        check_target_values(call.target, call.vocab, call.options.ignore_index)
    return implementation.kernels()


@torch.library.custom_op("liger::loss", mutates_args=())
def loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    recipe: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    chunk_size: int | None,
) -> list[Tensor]:
    """The outputs asked for, then what backward needs."""
    numbers = (ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, chunk_size)
    call = Call(input, target, weight, bias, class_weight, Recipe.decode(recipe, *numbers), num_items)
    with without_autocast(input):  # a backend that traces without AOTAutograd runs this under the caller's
        output, saved = losses(call, _kernels(call))
    if call.recipe.gradient_in_backward:  # no graph can hold the index of rows: how many there are is not known before
        saved = saved[:1]
    return [tensor for tensor in (*output, *saved) if tensor is not None]


@loss.register_fake
def _(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    recipe: str,
    *numbers: float | None,
) -> list[Tensor]:
    made = Recipe.decode(recipe)
    rows = (input.shape[0],)
    shape = rows if made.options.reduction == "none" else ()
    dtypes = (made.loss_dtype, made.loss_dtype, torch.float32, torch.int64)
    shapes = (shape, shape, shape, rows)
    outputs = [
        input.new_empty(size, dtype=dtype) for asked, size, dtype in zip(_asked_for(made), shapes, dtypes, strict=True) if asked
    ]
    if made.gradient_in_forward:
        return outputs + _fake_gradients(input, weight, bias, made)
    if made.gradient_in_backward:
        outputs.append(input.new_empty((2, *rows), dtype=compute_dtype(made.logits_dtype)))
    return outputs


@torch.library.custom_op("liger::loss_gradients", mutates_args=())
def loss_gradients(
    grad_loss: Tensor,
    lse: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    recipe: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    chunk_size: int | None,
) -> list[Tensor]:
    """The wanted gradients, for losses whose gradients are made in backward."""
    numbers = (ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, chunk_size)
    call = Call(input, target, weight, bias, class_weight, Recipe.decode(recipe, *numbers), num_items)
    kernels = dispatch.resolve(call.request(), call.recipe.backend).kernels()
    index = None if weight is None else labelled_rows(call)
    with in_backward(input):
        return [made for made in gradients_in_backward(call, kernels, lse, index, grad_loss) if made is not None]


@loss_gradients.register_fake
def _(
    grad_loss: Tensor,
    lse: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    recipe: str,
    *numbers: float | None,
) -> list[Tensor]:
    return _fake_gradients(input, weight, bias, Recipe.decode(recipe))


@torch.library.custom_op("liger::scaled_gradients", mutates_args=())
def scaled_gradients(saved: list[Tensor], grad_loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Saved gradients times the upstream gradient: in fp32, rounded once, as the backends' own scaling.

    `inputs`, the tensors these are gradients of, are not read. They tell autograd that the result depends on them, so that
    a second derivative is an error and not a silent part of itself.
    """
    return [_scaled(gradient, grad_loss) for gradient in saved]


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Part by part, so that no fp32 copy of a head's whole gradient exists."""
    out = torch.empty_like(gradient)
    dtype = compute_dtype(gradient.dtype)
    parts = (torch.split(tensor.view(-1), SCALED_ELEMENTS) for tensor in (out, gradient))
    for into, part in zip(*parts, strict=True):
        into.copy_(part.to(dtype) * factor)
    return out


@scaled_gradients.register_fake
def _(saved: list[Tensor], grad_loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in saved]


def _fake_gradients(input: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Recipe) -> list[Tensor]:
    wanted = zip((input, weight, bias), recipe.needs, strict=True)
    return [of.new_empty(of.shape) for of, needed in wanted if needed and of is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, (text, *numbers) = inputs[:TENSORS], inputs[TENSORS:]
    outputs = sum(_asked_for(Recipe.decode(text)))
    ctx.recipe, ctx.numbers = text, numbers
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[outputs:])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad_loss, recipe = grads[0], Recipe.decode(ctx.recipe)
    if grad_loss is None:
        return (None,) * ARGUMENTS
    _check_wanted(ctx.needs_input_grad, recipe)
    tensors, saved = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    if recipe.gradient_in_backward:
        made = loss_gradients(grad_loss, *saved, *tensors, ctx.recipe, *ctx.numbers)
    else:
        of = [tensor for tensor, needed in zip(tensors[:1] + tensors[2:4], recipe.needs, strict=True) if needed]
        made = scaled_gradients(list(saved), grad_loss, of)
    wanted = iter(made)
    input, weight, bias = (next(wanted) if needed else None for needed in recipe.needs)
    return (input, None, weight, bias, *(None,) * (ARGUMENTS - 4))


def _check_wanted(needs_input_grad: tuple[bool, ...], recipe: Recipe) -> None:
    """A graph traced without a gradient must not be trained as if it had one."""
    wanted = (needs_input_grad[0], *needs_input_grad[2:4])
    triples = zip(recipe.needs._fields, wanted, recipe.needs, strict=True)
    missing = [name for name, want, needed in triples if want and not needed]
    if missing:
        raise RuntimeError(
            f"this graph was traced without a gradient of {', '.join(missing)}: trace it again with grad mode on and "
            "requires_grad set as in training"
        )


torch.library.register_autograd("liger::loss", _backward, setup_context=_setup_context)
