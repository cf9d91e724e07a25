"""The losses as functions, and `explain`: what a call would get, and why."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .backends.plan import make_plan
from .call import gradient_waits
from .checks import check_accum_dtype, check_num_items
from .dispatch import OPS, SHAPE_LETTERS, DeviceInfo, Explanation, Request, device_info, explain_request
from .options import FLOATING_DTYPES, CrossEntropyOptions, CrossEntropyOutput, Reduction
from .run import run
from .vocab_parallel import VocabParallel


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    loss_dtype: torch.dtype | None = None,
    in_place: bool = False,
    vocab_parallel: VocabParallel | None = None,
    backend: str | None = None,
) -> Tensor | CrossEntropyOutput:
    r"""Cross entropy of logits with integer targets; the equations are in `liger.spec`.

    Args:
        input: (..., V) logits, fp16, bf16, fp32 or fp64; never changed unless `in_place`.
        target: (...) int64 or int32 class ids in [0, V), or `ignore_index`.
        weight: (V,) class weights, any floating dtype; they get no gradient.
        ignore_index: rows with this target count for nothing and get a zero gradient.
        reduction: "mean" over valid rows (weighted by `weight`), "sum", or "none".
        label_smoothing: in [0, 1].
        lse_square_scale: z-loss coefficient, >= 0.
        softcap: logits become `softcap * tanh(input / softcap)`.
        logit_scale: multiplies the logits before `softcap`, > 0.
        num_items: what "mean" divides by instead of the valid rows: a number >= 0, or a tensor of one on any device, whose
            value nobody waits for; 0 gives 0.
        return_z_loss: also return the z-loss part.
        return_token_accuracy: also return the accuracy of the arg max.
        return_predicted_tokens: also return the arg max.
        loss_dtype: dtype of the loss; None is the input's (fp32 under autocast). Triton only.
        in_place: the gradient takes the logits' storage, and the graph becomes single-use. Triton only.
        vocab_parallel: this rank's part of a vocabulary split over a process group: V above is then its width.
        backend: "triton", "cutedsl" or "torch"; None and "auto" leave it to `$LIGER_BACKEND`, then to the first that can.

    Returns:
        The loss, () or the target's shape for "none"; a `CrossEntropyOutput` if any extra was asked for. Computed in
        fp32 (fp64 for fp64 logits) and rounded once. With nothing valid the mean is 0, not NaN.

    Raises:
        ValueError: an argument is out of range; the message names it, what was given and what is allowed.
        UnsupportedError: no backend can serve the call.

    Example:
        >>> logits = torch.randn(4, 32000, requires_grad=True)
        >>> liger_cross_entropy(logits, torch.tensor([1, 5, -100, 7]), label_smoothing=0.1).backward()
    """
    options = CrossEntropyOptions(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        loss_dtype=loss_dtype,
        in_place=in_place,
        vocab_parallel=vocab_parallel,
    )
    output = run(input, target, options, op="cross_entropy", class_weight=weight, num_items=num_items, backend=backend)
    return output if options.wants_extras else output.loss


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    chunk_size: int | None = None,
    vocab_parallel: VocabParallel | None = None,
    backend: str | None = None,
) -> Tensor | CrossEntropyOutput:
    r"""Cross entropy of `input @ weight.T + bias` without the full logits; the equations are in `liger.spec`.

    Args:
        input: (..., H) hidden states.
        weight: (V, H) of the head, of the input's dtype (any pair of dtypes under autocast).
        target: (...) int64 or int32 class ids in [0, V), or `ignore_index`.
        bias: (V,) of the head.
        ce_weight: (V,) class weights, any floating dtype; they get no gradient.
        ignore_index: rows with this target count for nothing, get a zero gradient and, where it pays, no GEMM.
        reduction: "mean" over valid rows (weighted by `ce_weight`), "sum", or "none" (backward projects again).
        label_smoothing: in [0, 1].
        lse_square_scale: z-loss coefficient, >= 0.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        logit_scale: multiplies the logits before `softcap`, > 0.
        num_items: what "mean" divides by instead of the valid rows: a number >= 0, or a tensor of one on any device, whose
            value nobody waits for; 0 gives 0.
        return_z_loss: also return the z-loss part.
        return_token_accuracy: also return the accuracy of the arg max.
        return_predicted_tokens: also return the arg max.
        accum_dtype: dtype in which `weight`'s gradient is summed over chunks: its own, or fp32; None lets the plan choose.
        use_token_scaling: scale each row by the detached probability of its target.
        chunk_size: rows of logits that exist at once; None lets the plan choose, and take fewer where memory runs out.
        vocab_parallel: this rank's part of a vocabulary split over a process group: V above is then its width.
        backend: "triton", "cutedsl" or "torch"; None and "auto" leave it to `$LIGER_BACKEND`, then to the first that can.

    Returns:
        The loss, fp32 (fp64 for fp64 input), () or the target's shape for "none"; a `CrossEntropyOutput` if any extra was
        asked for. With nothing valid the mean is 0, not NaN.

    Raises:
        ValueError: an argument is out of range; the message names it, what was given and what is allowed.
        UnsupportedError: no backend can serve the call.
        torch.OutOfMemoryError: not even smaller chunks fit; the message says how many bytes are needed, and for what.

    Example:
        >>> hidden, head = torch.randn(8, 64, requires_grad=True), torch.randn(32000, 64, requires_grad=True)
        >>> liger_fused_linear_cross_entropy(hidden, head, torch.arange(8)).backward()
    """
    options = CrossEntropyOptions(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        accum_dtype=accum_dtype,
        use_token_scaling=use_token_scaling,
        chunk_size=chunk_size,
        vocab_parallel=vocab_parallel,
    )
    output = run(
        input,
        target,
        options,
        op="fused_linear_cross_entropy",
        weight=weight,
        bias=bias,
        class_weight=ce_weight,
        num_items=num_items,
        backend=backend,
    )
    return output if options.wants_extras else output.loss


def _options_of(call: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(call).parameters if name in CrossEntropyOptions.__dataclass_fields__)


GIVEN_OPTIONS: dict[str, tuple[str, ...]] = {
    "cross_entropy": _options_of(liger_cross_entropy),
    "fused_linear_cross_entropy": _options_of(liger_fused_linear_cross_entropy),
}
"""Which fields of `CrossEntropyOptions` each op takes."""
GIVEN_TENSORS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weight", "num_items"),
    "fused_linear_cross_entropy": ("bias", "ce_weight", "num_items"),
}


def explain(
    op: str,
    *,
    device: torch.device | DeviceInfo,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Which implementation a call would get on a device, and every reason against the others.

    Args:
        op: "cross_entropy" or "fused_linear_cross_entropy".
        device: of the tensors; a fabricated `DeviceInfo` asks about hardware that is not here.
        dtype: of the logits and, for fused_linear_cross_entropy, of the weight.
        shape: (N, V), or (N, V, H) for fused_linear_cross_entropy.
        backend: as in a call.
        options: as in a call, plus `weight=True`, `ce_weight=True`, `bias=True`, `num_items=True` for what that would be given;
            `vocab_parallel` may be a number of ranks, and V is that of all of them.

    Returns:
        An `Explanation`. That nothing fits is an answer, not an error.

    Raises:
        ValueError: the op, the shape, the backend or an option is not one there is.

    Example:
        >>> print(explain("cross_entropy", device=DeviceInfo("cuda", (9, 0)), dtype=torch.bfloat16, shape=(8192, 128256)))
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    letters = SHAPE_LETTERS[op]
    if not _is_shape(shape, len(letters)):
        raise ValueError(f"shape must be ({', '.join(letters)}) of ints for {op}, all but N at least 1, got {shape!r}")
    if dtype not in FLOATING_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATING_DTYPES))}, got {dtype!r}")
    given = {name: options.pop(name, False) for name in GIVEN_TENSORS[op]}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False: whether the tensor would be given, got {type(value).__name__}")
    split = options.pop("vocab_parallel", None)
    ranks = split.ranks if isinstance(split, VocabParallel) else split
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ValueError(f"vocab_parallel must be None, a VocabParallel or a number of ranks >= 1, got {split!r}")
    facts: tuple[tuple[str, Any], ...] = tuple((name, True) for name, value in given.items() if value)
    facts += () if ranks is None else (("vocab_parallel", ranks),)
    unknown = [name for name in options if name not in GIVEN_OPTIONS[op]]
    if unknown:
        allowed = ", ".join((*GIVEN_OPTIONS[op], *GIVEN_TENSORS[op]))
        raise ValueError(f"options of {op} must be among {allowed}, got {', '.join(unknown)}")
    checked = CrossEntropyOptions(**options)
    check_num_items(1 if given["num_items"] else None, checked)
    if op == "fused_linear_cross_entropy":
        check_accum_dtype(checked.accum_dtype, dtype)
    info = _device_of(device)
    explanation = explain_request(Request(op, info, dtype, tuple(shape), checked.nondefault() + facts), backend)
    if op == "cross_entropy" or explanation.chosen is None:
        return explanation
    plan = make_plan(
        (shape[0], shape[1], shape[2]),
        info.type,
        dtype,
        chunk_size=checked.chunk_size,
        accum_dtype=checked.accum_dtype,
        recompute=gradient_waits(checked, dtype),
        ranks=ranks or 1,
    )
    return Explanation(explanation.request, explanation.rows, explanation.chosen, explanation.source, plan)


def _is_shape(shape: object, length: int) -> bool:
    sized = isinstance(shape, (tuple, list)) and len(shape) == length and all(type(size) is int for size in shape)
    return sized and shape[0] >= 0 and min(shape[1:]) >= 1  # type: ignore[index]


def _device_of(device: torch.device | DeviceInfo) -> DeviceInfo:
    if isinstance(device, DeviceInfo):
        return device
    try:
        return device_info(torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"device must be a DeviceInfo or a device of this machine, got {device!r}: {error}") from error
