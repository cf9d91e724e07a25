"""The row kernels in CuTe DSL. Host side: addresses, strides and options; the device code is in `kernels`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ...options import dtype_name
from ...spec import RowInputs, RowResults, RowStats
from .kernels import Variant
from .launch import one_pass_layout, rows_layout, rows_on, scale_on

SCALE_BLOCKS_PER_PROCESSOR = 4
ahead_by_triton = True
"""See `liger.backends.ahead`."""


def rows(logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
    lse = results.lse
    variant = _variant("rows", logits, inputs, grad=grad is not None)
    outputs = (_address(results.loss), _address(results.z_loss), _address(results.predicted))
    kept = (0, 0) if lse is None else (lse.data_ptr(), lse.stride(0))
    _launch(variant, logits, inputs, grad, (*outputs, *kept, 0, 0))


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    n, options = logits.shape[0], inputs.options
    new = logits.new_empty
    pair = new(2, n, dtype=torch.float32)
    stats = RowStats(
        maximum=pair[0],
        sum_exp=new(n, dtype=torch.float32),
        target_logit=pair[1],
        weighted_sum=new(n, dtype=torch.float32) if options.label_smoothing else None,
        argmax=new(n, dtype=torch.int64) if options.wants_prediction else None,
    )
    variant = _variant("row_stats", logits, inputs, grad=False)
    outputs = (_address(stats.sum_exp), _address(stats.weighted_sum), _address(stats.argmax))
    _launch(variant, logits, inputs, None, (*outputs, pair.data_ptr(), n, 0, 0))
    return stats


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
    variant = _variant("row_grad", logits, inputs, grad=True)
    variant = variant._replace(predicted=False, upstream_dtype=dtype_name(grad_loss.dtype))
    known = (lse.data_ptr(), lse.stride(0), grad_loss.data_ptr(), grad_loss.stride(0))
    _launch(variant, logits, inputs, grad, (0, 0, 0, *known))


def scale_(tensor: Tensor, factor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    flat = tensor.view(-1)  # gradients of ours are contiguous, and as aligned as the allocator makes them
    with _on_device(tensor):
        launch, processors = scale_on(tensor.device.index, dtype_name(tensor.dtype), dtype_name(factor.dtype))
        arguments = (flat.data_ptr(), flat.shape[0], factor.data_ptr())
        launch(arguments, SCALE_BLOCKS_PER_PROCESSOR * processors, _stream(tensor))


def _variant(kernel: str, logits: Tensor, inputs: RowInputs, grad: bool) -> Variant:
    options = inputs.options
    return Variant(
        kernel,
        dtype_name(logits.dtype),
        dtype_name(inputs.target.dtype),
        grad=grad,
        smoothing=options.label_smoothing > 0,
        scaled=options.logit_scale != 1,
        softcap=options.softcap is not None,
        class_weight=options.label_smoothing > 0 and inputs.class_weight is not None,
        predicted=options.wants_prediction,
    )


def _launch(variant: Variant, logits: Tensor, inputs: RowInputs, grad: Tensor | None, outputs: tuple[int, ...]) -> None:
    (n, vocab), options, target = logits.shape, inputs.options, inputs.target
    if n == 0:
        return
    row_bytes = vocab * logits.element_size()
    if variant.kernel == "rows" and variant.grad:
        layout = rows_layout(row_bytes)
        variant = variant._replace(resident=layout.holds(row_bytes))
    else:
        layout = one_pass_layout(wide=variant.wide)
    core, z = (None, None) if inputs.divisors is None else inputs.divisors
    arguments = (
        logits.data_ptr(),
        logits.stride(0),
        *((0, 0) if grad is None else (grad.data_ptr(), grad.stride(0))),
        target.data_ptr(),
        target.stride(0),
        _address(inputs.class_weight),
        _address(inputs.target_weight),
        _address(inputs.class_weight_sum),
        _address(core),
        _address(z),
        *outputs,
        options.ignore_index,
        inputs.start,
        n,
        vocab,
        inputs.vocab or vocab,
        options.use_token_scaling,
        options.label_smoothing,
        options.lse_square_scale,
        options.logit_scale,
        0.0 if options.softcap is None else options.softcap,
    )
    with _on_device(logits):
        launch, clusters = rows_on(logits.device.index, variant, layout)
        launch(arguments, min(n, clusters), _stream(logits))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A launch goes to the current device: make it the tensor's."""
    if tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
