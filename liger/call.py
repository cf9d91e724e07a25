"""One call: its tensors and options, checked once; the only autograd Function; and `run`, which ties it all together."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch, spec
from .backends import linear, logits
from .dispatch import Implementation, Op, Request, device_info
from .options import FLOATING_DTYPES, CrossEntropyOptions, CrossEntropyOutput

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of (input, weight, bias); None where not wanted."""


class Needs(NamedTuple):
    """Which gradients the caller wants."""

    input: bool
    weight: bool
    bias: bool


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A checked call, flattened to rows. N rows, V vocabulary, H hidden."""

    input: Tensor
    """(N, V) logits, or (N, H) hidden states when `weight` is given."""
    target: Tensor
    """(N,) int64 or int32."""
    weight: Tensor | None
    """(V, H) of the head, for fused linear cross entropy."""
    bias: Tensor | None
    """(V,) of the head."""
    class_weight: Tensor | None
    """(V,)"""
    options: CrossEntropyOptions
    needs: Needs
    logits_dtype: torch.dtype
    """Dtype of the logits: the input's, or the one autocast projects in."""
    loss_dtype: torch.dtype

    @property
    def rows(self) -> int:
        """N"""
        return self.input.shape[0]

    @property
    def vocab(self) -> int:
        """V"""
        return self.input.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def gradient_in_backward(self) -> bool:
        """Whether gradients wait for the upstream gradient: row by row for "none"; in fp16, 1/D would underflow without it."""
        fp16_mean = self.logits_dtype == torch.float16 and self.options.reduction == "mean"
        return any(self.needs) and (self.options.reduction == "none" or fp16_mean)

    @property
    def gradient_in_forward(self) -> bool:
        """Whether gradients are made together with the loss."""
        return any(self.needs) and not self.gradient_in_backward

    @property
    def may_sync(self) -> bool:
        """Whether the host may wait for a count: not while a graph is being captured or traced."""
        return not _recording(self.input)

    def row_inputs(self) -> spec.RowInputs:
        """What the row kernels need beside the logits."""
        weight, weight_sum = self.class_weight, None
        dtype = spec.compute_dtype(self.logits_dtype)
        if weight is not None:
            weight = weight.detach().to(dtype).contiguous()
            weight_sum = weight.sum() if self.options.label_smoothing else None
        divisors = spec.divisors(self.target, weight, self.options, dtype)
        return spec.RowInputs(self.target, self.options, divisors, weight, weight_sum)

    def request(self) -> Request:
        """The call without its tensors."""
        given: tuple[tuple[str, Tensor | None], ...] = (("weight", self.class_weight),)
        if self.weight is not None:
            given = (("ce_weight", self.class_weight), ("bias", self.bias))
        flags = tuple((name, True) for name, tensor in given if tensor is not None)
        op: Op = "cross_entropy" if self.weight is None else "fused_linear_cross_entropy"
        shape = (self.rows, self.vocab) if self.weight is None else (self.rows, self.vocab, self.input.shape[1])
        options = self.options.nondefault() + flags
        return Request(op, device_info(self.input.device), self.logits_dtype, shape, options)


def run(
    input: Tensor,
    target: Tensor,
    options: CrossEntropyOptions,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    backend: str | None = None,
) -> CrossEntropyOutput:
    """Check a call, find its implementation, run it under autograd. Shapes as in `liger.functional`.

    Raises:
        ValueError: a tensor, an option or a backend is not usable; nothing has been launched.
        UnsupportedError: no backend can serve the call.
    """
    _check(input, target, options, weight, bias, class_weight)
    # Inside an autograd Function grad mode and requires_grad always read the same, so what is wanted is decided here.
    on = torch.is_grad_enabled()
    needs = Needs(*(on and t is not None and t.requires_grad for t in (input, weight, bias)))
    autocast = _autocast_dtype(input)
    fused = weight is not None
    logits_dtype = autocast if fused and autocast is not None and input.dtype != torch.float64 else input.dtype
    if fused or autocast is not None:  # under autocast a loss is fp32, as torch's are
        loss_dtype = options.loss_dtype or spec.compute_dtype(input.dtype)
    else:
        loss_dtype = options.loss_dtype or input.dtype
    call = Call(
        input.reshape(-1, input.shape[-1]),
        target.reshape(-1),
        weight,
        bias,
        class_weight,
        options,
        needs,
        logits_dtype,
        loss_dtype,
    )
    implementation = dispatch.resolve(call.request(), backend)
    if implementation.checks_target:
        _check_target_values(target, call.vocab, options.ignore_index)
    output: tuple[Any, ...] = _Loss.apply(call.input, weight, bias, call, implementation)  # type: ignore[no-untyped-call]
    if options.reduction == "none":
        output = tuple(None if rows is None else rows.view(target.shape) for rows in output)
    return CrossEntropyOutput(*output)


class _Loss(torch.autograd.Function):
    """The only autograd node, for both ops and every backend."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, implementation: Implementation
    ) -> tuple[Tensor | None, ...]:
        op = logits if call.weight is None else linear
        with _without_autocast(input):
            results, gradients, index = op.forward(call, implementation.kernels())
            output = spec.reduce(results, call.target, call.options, call.loss_dtype)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        elif call.gradient_in_backward:
            tensors = (call.input, call.target, call.weight, call.bias, call.class_weight)
            ctx.save_for_backward(*tensors, results.lse, index)
        ctx.recipe = (call.options, call.needs, call.logits_dtype, call.loss_dtype)
        ctx.implementation, ctx.op = implementation, op
        ctx.in_backward = call.gradient_in_backward
        ctx.first_factor = None
        ctx.used = False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "liger's losses have no second derivative: backward ran with create_graph=True; "
                "use torch.nn.functional.cross_entropy where a double backward is needed"
            )
        if grad_loss is None:
            return (None,) * 5
        options = ctx.recipe[0]
        if options.in_place and ctx.used:
            raise RuntimeError(
                "in_place=True makes the graph single-use: the logits' storage already holds the gradient handed out by "
                "the first backward; use in_place=False to call backward again"
            )
        with _without_autocast(grad_loss):
            gradients = _made_in_backward(ctx, grad_loss) if ctx.in_backward else _made_in_forward(ctx, grad_loss)
        ctx.used = True
        return (*gradients, None, None)


def _made_in_backward(ctx: Any, grad_loss: Tensor) -> Gradients:
    *tensors, lse, index = ctx.saved_tensors
    call = Call(*tensors, *ctx.recipe)
    grad_rows = grad_loss.reshape(-1) if call.options.reduction == "none" else grad_loss.expand(call.rows)
    gradients: Gradients = ctx.op.backward(call, ctx.implementation.kernels(), lse, index, grad_rows)
    return gradients


def _made_in_forward(ctx: Any, grad_loss: Tensor) -> Gradients:
    """The saved gradients times the upstream gradient.

    A graph that is not retained gives its buffers away. In a retained one autograd may add to what it was given, so
    copies are handed out; an implementation that scales its saved buffer can then serve only factors of 1 again.
    """
    saved: Gradients = ctx.saved_tensors
    scale_ = ctx.implementation.kernels().scale_
    if ctx.first_factor is not None and bool(ctx.first_factor != 1):
        raise RuntimeError(
            "this loss's saved gradient was scaled by the first backward's upstream gradient, which was not 1; "
            "backward again needs a new forward, reduction='none', or backend='torch'"
        )
    retained = torch._C._autograd._get_current_graph_task_keep_graph()
    if retained and ctx.implementation.consumes_saved and not ctx.recipe[0].in_place:
        ctx.first_factor = grad_loss.detach().clone()
        _scale_all(scale_, saved, grad_loss)
        return tuple(None if t is None else t.clone() for t in saved)  # type: ignore[return-value]
    if retained and not ctx.implementation.consumes_saved:
        saved = tuple(None if t is None else t.clone() for t in saved)  # type: ignore[assignment]
    _scale_all(scale_, saved, grad_loss)
    return saved


def _scale_all(scale_: Any, tensors: Gradients, factor: Tensor) -> None:
    for tensor in tensors:
        if tensor is not None:
            scale_(tensor, factor)


def _check(
    input: Tensor,
    target: Tensor,
    options: CrossEntropyOptions,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Raise ValueError for anything about the tensors that no backend could serve."""
    class_name = "weight" if weight is None else "ce_weight"
    named = {"input": input, "target": target}
    if weight is not None:
        named["weight"] = weight
    if bias is not None:
        named["bias"] = bias
    if class_weight is not None:
        named[class_name] = class_weight
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != input.device:
            raise ValueError(
                f"{name} is on {tensor.device}, input on {input.device}: all tensors must be on one device"
            )
        if name == "target":
            if tensor.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"target must be int64 or int32, got {_short(tensor.dtype)}")
        elif tensor.dtype not in FLOATING_DTYPES:
            raise ValueError(f"{name} must be {', '.join(map(_short, FLOATING_DTYPES))}, got {_short(tensor.dtype)}")
    if input.ndim == 0 or input.shape[-1] == 0:
        raise ValueError(f"input must have a non-empty last dimension, got shape {tuple(input.shape)}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target must have input's shape without the last dimension, {tuple(input.shape[:-1])}, "
            f"got {tuple(target.shape)} (input {tuple(input.shape)})"
        )
    vocab = input.shape[-1]
    if weight is not None:
        vocab = weight.shape[0] if weight.ndim else 0
        if weight.ndim != 2 or vocab == 0 or weight.shape[1] == 0:
            raise ValueError(
                f"weight must be (V, H), got shape {tuple(weight.shape)}: this looks like a sharded or freed parameter; "
                "gather it, or call the loss inside the module that owns it"
            )
        if weight.shape[1] != input.shape[-1]:
            raise ValueError(
                f"weight must be (V, {input.shape[-1]}) to match input {tuple(input.shape)}, got {tuple(weight.shape)}"
            )
        _check_head_dtypes(input, weight, bias)
    for name, vector in (("bias", bias), (class_name, class_weight)):
        if vector is not None and vector.shape != (vocab,):
            raise ValueError(f"{name} must have shape ({vocab},), one element per class, got {tuple(vector.shape)}")
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{class_name} requires grad, but class weights get no gradient: pass {class_name}.detach()")
    if class_weight is not None and forward_ad.unpack_dual(class_weight).tangent is not None:  # type: ignore[no-untyped-call]
        raise ValueError(f"{class_name} has a tangent, but class weights get no derivative, forward-mode either")
    accum = options.accum_dtype
    if weight is not None and accum is not None and accum not in (weight.dtype, spec.compute_dtype(weight.dtype)):
        allowed = dict.fromkeys((weight.dtype, spec.compute_dtype(weight.dtype)))
        raise ValueError(
            f"accum_dtype must be None or {' or '.join(map(_short, allowed))} for this weight, got {_short(accum)}"
        )
    if options.in_place:
        _check_in_place(input)


def _check_head_dtypes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Without autocast the head has one dtype; with it, anything it casts."""
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, tensor in others.items():
        mixed = tensor.dtype != input.dtype
        casts = _autocast_dtype(input) is not None and torch.float64 not in (tensor.dtype, input.dtype)
        if mixed and not casts:
            raise ValueError(
                f"{name} is {_short(tensor.dtype)} but input is {_short(input.dtype)}: "
                "they must have one dtype (or be called under autocast)"
            )


def _check_in_place(input: Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(input.shape, input.stride(), strict=True)):
        raise ValueError(f"in_place=True needs rows of their own, got an expanded input with strides {input.stride()}")
    try:
        input.view(-1, input.shape[-1])
    except RuntimeError as error:
        raise ValueError(
            f"in_place=True needs an input that flattens to (N, V) without a copy, got shape {tuple(input.shape)} "
            f"with strides {input.stride()}"
        ) from error


def _check_target_values(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise for a target outside [0, V). Reads the device, so it is left out while a graph is recorded."""
    if _recording(target):
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        where = "".join(f"[{i}]" for i in position)
        raise ValueError(
            f"target{where} is {target[position].item()}, outside [0, {vocab}) and not ignore_index={ignore_index}; "
            f"{wrong.sum().item()} such targets"
        )


def _recording(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast projects in on the tensor's device; None where it is off."""
    device = tensor.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


@lru_cache
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, every dtype is what the code says."""
    if _autocast_dtype(tensor) is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
