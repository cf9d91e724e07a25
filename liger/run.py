"""From the caller's arguments to a call, to its implementation, to its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from . import dispatch, spec
from .autograd import LossFunction
from .call import Call, Needs, Recipe, gradient_waits
from .checks import check_num_items, check_target_values, check_tensors
from .context import autocast_dtype, holding, is_traced, on_host, projected_dtype
from .dispatch import Op
from .dispatch.registry import check_backend
from .operators import traced_loss
from .options import CrossEntropyOptions, CrossEntropyOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Given(TypedDict, total=False):
    """What a call may have beside its input and target."""

    weight: Tensor | None
    bias: Tensor | None
    class_weight: Tensor | None
    num_items: float | Tensor | None


def run(
    input: Tensor,
    target: Tensor,
    options: CrossEntropyOptions,
    *,
    op: Op,
    backend: str | None = None,
    **given: Unpack[Given],
) -> CrossEntropyOutput:
    """Check a call, find its implementation, run it under autograd. Shapes as in `liger.functional`.

    Raises:
        ValueError: a tensor, an option or a backend is not usable; nothing has been launched.
        UnsupportedError: no backend can serve the call.
    """
    split = options.vocab_parallel
    if (options.in_place or split is not None) and torch.compiler.is_dynamo_compiling():
        from . import untraced

        again = untraced.run_in_place if options.in_place else untraced.run_split
        return again(input, target, options, op=op, backend=backend, **given)
    call = prepared(input, target, options, op=op, backend=backend, **given)
    outputs: tuple[Any, ...]
    if is_traced(call.input):
        if not torch.compiler.is_compiling():  # there the operator looks for it when it runs, which fake tensors never do
            check_backend(backend)
        outputs = traced_loss(call)
    else:
        implementation = dispatch.resolve(call.request(), backend)
        if implementation.checks_target:
            check_target_values(call.target.view(target.shape), call.vocab, options.ignore_index)
        if split is not None and call.class_weight is not None:
            call = replace(call, class_weight=split.gather_classes(call.class_weight))
        outputs = LossFunction.apply(call.input, call.weight, call.bias, call, implementation)  # type: ignore[no-untyped-call]
    if options.reduction == "none":
        outputs = tuple(None if rows is None else rows.view(target.shape) for rows in outputs)
    elif outputs[3] is not None:
        outputs = (*outputs[:3], outputs[3].view(target.shape))
    return CrossEntropyOutput(*outputs)


def prepared(
    input: Tensor,
    target: Tensor,
    options: CrossEntropyOptions,
    *,
    op: Op,
    backend: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> Call:
    """The checked call of a loss, before the autograd Function that runs it. Shapes as in `run`.

    Raises:
        ValueError: a tensor or an option is not usable.
    """
    split = options.vocab_parallel
    if split is not None:
        shared = 0 if split.sequence_parallel else None
        input = split.local("input", input, -1 if weight is None else shared)
        target = split.local("target", target, None)
        weight = None if weight is None else split.local("weight", weight, 0)
        bias = None if bias is None else split.local("bias", bias, 0)
        name = "weight" if op == "cross_entropy" else "ce_weight"
        class_weight = None if class_weight is None else split.local(name, class_weight, 0)
    check_tensors(op, input, target, options, weight, bias, class_weight)
    tracing = is_traced(input)
    if not tracing:
        input, target = holding(input), holding(target)
        weight, bias, class_weight = (None if t is None else holding(t) for t in (weight, bias, class_weight))
    check_num_items(num_items, options)
    recipe = _recipe(input, weight, bias, options, backend, tracing)
    flat = input if input.ndim == 2 else input.flatten(0, -2) if input.ndim > 2 else input[None]
    rows_of = target if target.ndim == 1 else target.reshape(-1)
    return Call(flat, rows_of, weight, bias, class_weight, recipe, _beside(flat, num_items))


def _beside(input: Tensor, num_items: float | Tensor | None) -> Tensor | None:
    """As a () tensor on the device of `input`, which nobody waits for."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor) and on_host(num_items):
        num_items = num_items.item()
    if isinstance(num_items, Tensor):
        # What a CPU is sent it would read before it has arrived.
        return num_items.detach().reshape(()).to(input.device, non_blocking=not input.is_cpu)
    return input.new_full((), num_items, dtype=spec.compute_dtype(input.dtype))


def _recipe(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: CrossEntropyOptions,
    backend: str | None,
    tracing: bool,
) -> Recipe:
    # Inside an autograd Function grad mode and requires_grad always read the same, so what is wanted is decided here.
    on = torch.is_grad_enabled()
    needs = Needs(*[on and t is not None and t.requires_grad for t in (input, weight, bias)])
    fused = weight is not None
    logits_dtype = projected_dtype(input) if fused else input.dtype
    if fused or autocast_dtype(input) is not None:  # under autocast a loss is fp32, as torch's are
        loss_dtype = options.loss_dtype or spec.compute_dtype(input.dtype)
    else:
        loss_dtype = options.loss_dtype or input.dtype
    # A traced graph may not scale a saved gradient in place: there one more read of given logits costs less than a second
    # gradient.
    in_backward = any(needs) and (gradient_waits(options, logits_dtype) or (tracing and not fused))
    return Recipe(options, needs, logits_dtype, loss_dtype, in_backward, backend)
