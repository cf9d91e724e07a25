"""What must hold of a call's tensors on every backend, checked once, before anything is launched."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import spec
from .context import autocast_dtype, is_traced, may_wait, on_host
from .dispatch import Op
from .options import FACTORS, FLOATING_DTYPES, SMALLEST_FACTOR, CrossEntropyOptions, dtype_name, is_real
from .vocab_parallel import VocabParallel, is_dtensor

IN_PLACE_IS_TRACED = (
    "in_place must be False under torch.compile and with fake tensors: what is traced may not change its inputs"
)
SPLIT_IS_TRACED = (
    "vocab_parallel must be None under torch.compile and with fake tensors: its collectives would be hidden in an opaque "
    "operator; call the loss between compiled parts, as with torch.compiler.disable or a graph break"
)


def check_tensors(
    op: Op,
    input: Tensor,
    target: Tensor,
    options: CrossEntropyOptions,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Raise ValueError for anything about the tensors that no backend could serve."""
    class_name = "weight" if op == "cross_entropy" else "ce_weight"
    named: dict[str, Any] = {"input": input, "target": target}
    if op == "fused_linear_cross_entropy":
        named["weight"] = weight
    if bias is not None:
        named["bias"] = bias
    if class_weight is not None:
        named[class_name] = class_weight
    for name, tensor in named.items():
        _check_tensor(name, tensor, of_head=tensor is weight or tensor is bias)
        if tensor.device != input.device:
            raise ValueError(f"{name} is on {tensor.device}, input on {input.device}: all tensors must be on one device")
        if tensor.is_meta:
            raise ValueError(f"{name} must hold values, got a tensor on the meta device")
        if name == "target":
            if tensor.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"target must be int64 or int32, got {dtype_name(tensor.dtype)}")
            if tensor.dtype == torch.int32 and not -(2**31) <= options.ignore_index < 2**31:
                raise ValueError(
                    f"ignore_index must fit into the target's int32, got {options.ignore_index}: use an int64 target"
                )
        elif tensor.dtype not in FLOATING_DTYPES:
            raise ValueError(f"{name} must be {', '.join(map(dtype_name, FLOATING_DTYPES))}, got {dtype_name(tensor.dtype)}")
    split = options.vocab_parallel
    may_be_empty = split is not None and split.width == 0
    if input.ndim == 0 or (input.shape[-1] == 0 and not (may_be_empty and weight is None)):
        raise ValueError(f"input must have a non-empty last dimension, got shape {tuple(input.shape)}")
    shape = tuple(input.shape[:-1])
    tokens = ""
    if split is not None and op == "cross_entropy" and not split.reduce_input_grad:
        raise ValueError("reduce_input_grad must be True for cross_entropy: its input's gradient is this rank's own")
    if split is not None and split.sequence_parallel:
        _check_sequence_parallel(op, input)
        shape, tokens = (split.ranks * shape[0], *shape[1:]), f" and {split.ranks} times as many tokens"
    if target.shape != shape:
        raise ValueError(
            f"target must have input's shape without the last dimension{tokens}, {shape}, "
            f"got {tuple(target.shape)} (input {tuple(input.shape)})" + _swapped(input, target, weight)
        )
    vocab = input.shape[-1]
    if weight is not None:
        vocab = weight.shape[0] if weight.ndim else 0
        if weight.ndim != 2 or (vocab == 0 and not may_be_empty) or weight.shape[1] == 0:
            raise ValueError(
                f"weight must be (V, H), got shape {tuple(weight.shape)}: this looks like a sharded or freed parameter; "
                "gather it, or call the loss inside the module that owns it"
            )
        if weight.shape[1] != input.shape[-1]:
            raise ValueError(
                f"weight must be (V, {input.shape[-1]}) to match input {tuple(input.shape)}, got {tuple(weight.shape)}"
            )
        _check_head_dtypes(input, weight, bias)
    if split is not None:
        if is_traced(input):
            raise ValueError(SPLIT_IS_TRACED)
        _check_split(split, "input's last dimension" if weight is None else "weight's first dimension", vocab)
    for name, vector in (("bias", bias), (class_name, class_weight)):
        if vector is not None and vector.shape != (vocab,):
            raise ValueError(f"{name} must have shape ({vocab},), one element per class, got {tuple(vector.shape)}")
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{class_name} requires grad, but class weights get no gradient: pass {class_name}.detach()")
    if class_weight is not None and _has_tangent(class_weight):
        raise ValueError(f"{class_name} has a tangent, but class weights get no derivative, forward-mode either")
    if weight is not None:
        check_accum_dtype(options.accum_dtype, weight.dtype)
    if options.in_place:
        if is_traced(input):
            raise ValueError(IN_PLACE_IS_TRACED)
        _check_in_place(input)


def _swapped(input: Tensor, target: Tensor, weight: Tensor | None) -> str:
    """What to add to a wrong shape that would be right if input and weight changed places."""
    if weight is None or input.ndim != 2 or weight.ndim < 2 or target.shape != weight.shape[:-1]:
        return ""
    return (
        f": are input and weight, {tuple(weight.shape)}, swapped? The module takes (weight, input, target), "
        "the function (input, weight, target)"
    )


def _check_split(split: VocabParallel, what: str, width: int) -> None:
    if width != split.width:
        all_classes = width >= split.vocab_size and split.ranks > 1
        raise ValueError(
            f"{what} must be this rank's stop - start = {split.width} classes of vocab_parallel, got {width}"
            + (": the whole vocabulary has been gathered; pass the local part, or no vocab_parallel" if all_classes else "")
        )


def _check_sequence_parallel(op: Op, input: Tensor) -> None:
    if op == "cross_entropy":
        raise ValueError("sequence_parallel must be False for cross_entropy: logits hold all tokens of this rank's classes")
    if input.ndim < 2:
        raise ValueError(f"input must be (tokens, ..., H) with sequence_parallel, got shape {tuple(input.shape)}")


def _check_tensor(name: str, tensor: Any, *, of_head: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a dense, strided tensor, got a {kind} one")
    if is_dtensor(tensor):
        what = f"{name} must be a plain torch.Tensor, got a DTensor, which does not tell what it is split for"
        if not of_head:
            raise ValueError(f"{what}: {name}.to_local(), with vocab_parallel= where that holds some of the classes only")
        raise ValueError(
            f"{what}. If each rank projects all tokens on its own classes (tensor parallel): "
            "vocab_parallel=VocabParallel.from_dtensor(head). If ranks have different tokens (FSDP): "
            "liger.integrations.fsdp.gather_weight(head), since the gradient of full_tensor() is not reduced. "
            f"Otherwise {name}.to_local()"
        )


def check_class_weight(name: str, weight: object) -> None:
    """Raise ValueError unless a module can hold this as its class weights."""
    if weight is not None and not isinstance(weight, Tensor):
        raise ValueError(f"{name} must be None or a torch.Tensor of shape (V,), got {type(weight).__name__}")


INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_num_items(num_items: Any, options: CrossEntropyOptions) -> None:
    """Raise ValueError unless a mean can be divided by this. A value on a device is not read."""
    if num_items is None:
        return
    if options.reduction != "mean":
        raise ValueError(
            f"num_items must be None with reduction={options.reduction!r}, got {num_items!r}: it is what the mean divides by"
        )
    allowed = f"0, {FACTORS} or a real tensor of one element"
    if not isinstance(num_items, Tensor):
        if isinstance(num_items, numbers.Integral) and not isinstance(num_items, bool):
            num_items = int(num_items)  # numpy's are not Python's
        if not (is_real(num_items) and (num_items == 0 or num_items >= SMALLEST_FACTOR)):
            raise ValueError(f"num_items must be None, {allowed}, got {num_items!r}")
        return
    _check_tensor("num_items", num_items)
    shape, dtype = tuple(num_items.shape), num_items.dtype
    if num_items.numel() != 1 or dtype not in FLOATING_DTYPES + INTEGER_DTYPES or num_items.is_meta:
        raise ValueError(
            f"num_items must be None, {allowed} that holds a value, got {dtype_name(dtype)} of shape {shape} "
            f"on {num_items.device}"
        )
    if (num_items.requires_grad and torch.is_grad_enabled()) or _has_tangent(num_items):
        raise ValueError("num_items is differentiated, but gets no derivative: pass num_items.detach()")
    if on_host(num_items):
        check_num_items(num_items.item(), options)


def _has_tangent(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():  # a traced graph has no forward-mode AD
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def check_accum_dtype(accum: torch.dtype | None, weight: torch.dtype) -> None:
    """Raise ValueError unless a weight's gradient can be summed in this: its own dtype, or the one that computes."""
    allowed = dict.fromkeys((weight, spec.compute_dtype(weight)))
    if accum is not None and accum not in allowed:
        names = " or ".join(map(dtype_name, allowed))
        raise ValueError(f"accum_dtype must be None or {names} for a {dtype_name(weight)} weight, got {dtype_name(accum)}")


def _check_head_dtypes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Without autocast the head has one dtype; with it, anything it casts."""
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, tensor in others.items():
        mixed = tensor.dtype != input.dtype
        casts = autocast_dtype(input) is not None and torch.float64 not in (tensor.dtype, input.dtype)
        if mixed and not casts:
            raise ValueError(
                f"{name} is {dtype_name(tensor.dtype)} but input is {dtype_name(input.dtype)}: "
                "they must have one dtype (or be called under autocast)"
            )


def _check_in_place(input: Tensor) -> None:
    try:
        rows = input.view(input.shape[:-1].numel(), input.shape[-1])
    except RuntimeError as error:
        raise ValueError(
            f"in_place=True needs an input that flattens to (N, V) without a copy, got shape {tuple(input.shape)} "
            f"with strides {input.stride()}"
        ) from error
    (n, vocab), (row_stride, stride) = rows.shape, rows.stride()
    apart = n <= 1 or (row_stride > 0 and (row_stride > (vocab - 1) * stride or stride > (n - 1) * row_stride))
    if not apart or (vocab > 1 and stride == 0):
        raise ValueError(f"in_place=True needs elements of their own, got an overlapping input with strides {input.stride()}")


def check_target_values(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise for a target outside [0, V). Reads the device, so it is left out where the host may not wait for it."""
    if not may_wait(target):
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        where = "".join(f"[{i}]" for i in position)
        raise ValueError(
            f"target{where} is {target[position].item()}, outside [0, {vocab}) and not ignore_index={ignore_index}; "
            f"{int(wrong.sum())} of {wrong.numel()} targets are"
        )
