"""The row kernels in Triton. Host side: pointers, strides and launch shapes; the device code is in `kernels`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from ...exchange import WORDS, Turn
from ...options import CrossEntropyOptions
from ...spec import RowInputs, RowResults, RowStats
from . import kernels
from .launch import exchanged_rows_launch, processor_count, row_grad_launch, rows_launch

SCALE_BLOCK = 4096
SCALE_PROGRAMS_PER_PROCESSOR = 8
IS_HIP = torch.version.hip is not None
ASSERTING = {"debug": True, "sanitize_overflow": False}
"""Compile the kernel's own assertion, and none of Triton's about every sum."""
INTERPRETED_ATTEMPTS_PER_SECOND = 200
"""More than the interpreter makes."""
ahead_by_triton = True
"""See `liger.backends.ahead`."""


def rows(logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
    n, vocab = logits.shape
    if n == 0:
        return
    launch = rows_launch(vocab, logits.element_size(), grad is not None, IS_HIP)
    options, lse = inputs.options, results.lse
    with _on_device(logits):
        kernels.rows_kernel[(n,)](
            *_matrix(logits),
            *_matrix(grad),
            inputs.target,
            inputs.target.stride(0),
            *_normalisers(inputs),
            results.loss,
            results.z_loss,
            results.predicted,
            lse,
            0 if lse is None else lse.stride(0),
            vocab,
            *_scalars(options),
            SMOOTHING=options.label_smoothing > 0,
            TOKEN_SCALING=options.use_token_scaling,
            STRIDED=logits.stride(1) != 1,
            GRAD_STRIDED=grad is not None and grad.stride(1) != 1,
            BLOCK=launch.block,
            WIDTH=launch.width(logits.element_size()),
            HELD=launch.held,
            num_warps=launch.num_warps,
        )


def exchanged_rows(logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None, turn: Turn) -> None:
    n, vocab = logits.shape
    launch, lag = exchanged_rows_launch(vocab, logits.element_size(), grad is not None, processor_count(logits.device))
    lag, lse = min(lag, n), results.lse
    with _on_device(logits):
        kernels.exchanged_rows_kernel[(n + lag,)](
            *_matrix(logits),
            *_matrix(grad),
            inputs.target,
            inputs.target.stride(0),
            inputs.target_weight,
            *(inputs.divisors or (None, None)),
            results.loss,
            results.z_loss,
            lse,
            0 if lse is None else lse.stride(0),
            vocab,
            inputs.start,
            inputs.vocab or vocab,
            inputs.options.ignore_index,
            float(inputs.options.lse_square_scale),
            *_transform(inputs.options),
            n,
            lag,
            turn.addresses,
            turn.rank,
            turn.capacity,
            turn.tag,
            int(turn.timeout_s * (1e9 if logits.is_cuda else INTERPRETED_ATTEMPTS_PER_SECOND)),
            STRIDED=logits.stride(1) != 1,
            GRAD_STRIDED=grad is not None and grad.stride(1) != 1,
            BLOCK=launch.block,
            WIDTH=launch.width(logits.element_size()),
            RANKS=turn.ranks,
            WORDS=WORDS,
            LANES=WORDS * triton.next_power_of_2(turn.ranks),
            CLOCK=logits.is_cuda,
            num_warps=launch.num_warps,
            **ASSERTING,
        )


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    n, vocab = logits.shape
    options = inputs.options
    new = logits.new_empty
    stats = RowStats(
        maximum=new(n, dtype=torch.float32),
        sum_exp=new(n, dtype=torch.float32),
        target_logit=new(n, dtype=torch.float32),
        weighted_sum=new(n, dtype=torch.float32) if options.label_smoothing else None,
        argmax=new(n, dtype=torch.int64) if options.wants_prediction else None,
    )
    if n == 0:
        return stats
    launch = rows_launch(vocab, logits.element_size(), False, IS_HIP)
    with _on_device(logits):
        kernels.row_stats_kernel[(n,)](
            *_matrix(logits),
            inputs.target,
            inputs.target.stride(0),
            inputs.class_weight,
            *stats,
            vocab,
            inputs.start,
            *_transform(options),
            SMOOTHING=options.label_smoothing > 0,
            STRIDED=logits.stride(1) != 1,
            BLOCK=launch.block,
            WIDTH=launch.width(logits.element_size()),
            num_warps=launch.num_warps,
        )
    return stats


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
    n, vocab = logits.shape
    if n == 0:
        return
    launch = row_grad_launch(vocab, logits.element_size(), IS_HIP)
    options = inputs.options
    with _on_device(logits):
        kernels.row_grad_kernel[(n,)](
            *_matrix(logits),
            *_matrix(grad),
            inputs.target,
            inputs.target.stride(0),
            *_normalisers(inputs),
            lse,
            lse.stride(0),
            grad_loss,
            grad_loss.stride(0),
            vocab,
            inputs.start,
            inputs.vocab or vocab,
            *_scalars(options),
            SMOOTHING=options.label_smoothing > 0,
            TOKEN_SCALING=options.use_token_scaling,
            STRIDED=logits.stride(1) != 1,
            GRAD_STRIDED=grad.stride(1) != 1,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
        )


def scale_(tensor: Tensor, factor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1, tensor.shape[-1])
    rows, columns = tensor.shape
    with _on_device(tensor):
        kernels.scale_kernel[(min(rows, SCALE_PROGRAMS_PER_PROCESSOR * processor_count(tensor.device)),)](
            *_matrix(tensor),
            factor,
            rows,
            columns,
            STRIDED=tensor.stride(1) != 1,
            BLOCK=SCALE_BLOCK,
            num_warps=8,
        )


def _matrix(matrix: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Pointer and strides, as every kernel takes them."""
    return (None, 0, 0) if matrix is None else (matrix, matrix.stride(0), matrix.stride(1))


def _normalisers(inputs: RowInputs) -> tuple[Tensor | None, ...]:
    core, z = (None, None) if inputs.divisors is None else inputs.divisors
    return inputs.class_weight, inputs.target_weight, inputs.class_weight_sum, core, z


def _scalars(options: CrossEntropyOptions) -> tuple[int | float | None, ...]:
    return (
        options.ignore_index,
        float(options.label_smoothing),
        float(options.lse_square_scale),
        *_transform(options),
    )


def _transform(options: CrossEntropyOptions) -> tuple[float | None, float | None]:
    """What becomes of a logit before anything else; None leaves its part out of the compiled kernel."""
    scale, cap = options.logit_scale, options.softcap
    return None if scale == 1 else float(scale), None if cap is None else float(cap)


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
