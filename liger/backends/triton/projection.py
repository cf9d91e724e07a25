"""A projection whose number of rows only the device knows: a product that may be launched before the host has counted them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _on_device
from .launch import processor_count

# As fast as cuBLAS for a few hundred rows: 0.99 to 1.05 of its time for 256 to 640 rows at H = 2048 and 4096, V = 128256, after
# other products (one H200, torch 2.11, triton 3.6, 2026-11-30, benchmark/data/tune_projection_h200.csv).
BLOCK_ROWS, BLOCK_CLASSES, BLOCK_HIDDEN = 128, 256, 64
WARPS, STAGES = 8, 3


@triton.jit(do_not_specialize=["rows", "classes", "hidden"])
def projection_kernel(
    x, weight, logits, bias_ptr, count_ptr, rows, classes, hidden,
    BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """x @ weight.T + bias for the first `count` rows of x; persistent programs, which have nothing to do if that is 0.

    The three matrices are tensor descriptors: their copies stop at the matrices' edges.
    """
    row_blocks = tl.cdiv(tl.minimum(rows, tl.load(count_ptr).to(tl.int32)), BLOCK_ROWS)
    blocks = row_blocks * tl.cdiv(classes, BLOCK_CLASSES)
    # Neighbouring programs take the same classes, so that the weight is read once.
    for block in tl.range(tl.program_id(0), blocks, PROGRAMS, flatten=True):
        row = block % row_blocks * BLOCK_ROWS
        first = block // row_blocks * BLOCK_CLASSES
        total = tl.zeros((BLOCK_ROWS, BLOCK_CLASSES), tl.float32)
        for k in range(0, hidden, BLOCK_HIDDEN):
            total = tl.dot(x.load([row, k]), weight.load([first, k]).T, total)
        if bias_ptr is not None:
            columns = first + tl.arange(0, BLOCK_CLASSES)
            total += tl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(tl.float32)[None, :]
        logits.store([row, first], total.to(logits.dtype))


def project(x: Tensor, count: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """Write x @ weight.T + bias into `logits`, for as many rows as `count` says and may be a few more; nothing if it is 0.

    Args:
        x: (n, H), half precision, as weight (V, H), bias (V,) and logits (n, V); what `ahead.fits` asks of their rows.
        count: () int64 on the device.
    """
    programs = processor_count(x.device)
    with _on_device(x):
        projection_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [BLOCK_ROWS, BLOCK_HIDDEN]),
            TensorDescriptor.from_tensor(weight, [BLOCK_CLASSES, BLOCK_HIDDEN]),
            TensorDescriptor.from_tensor(logits, [BLOCK_ROWS, BLOCK_CLASSES]),
            bias,
            count,
            x.shape[0],
            *weight.shape,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_CLASSES=BLOCK_CLASSES,
            BLOCK_HIDDEN=BLOCK_HIDDEN,
            PROGRAMS=programs,
            num_warps=WARPS,
            num_stages=STAGES,
        )
