"""What a GPU does while the host waits for the number of labelled rows: it projects the first of them.

A host that has waited for a step's whole forward pass is slow to launch the next product. So the first one is launched
before, by a kernel that learns on the device how many rows there are: none, for a batch without labels.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from ..dispatch import device_info
from ..dispatch.capability import release
from . import INTERPRETER, TRITON
from .plan import GEMM_ROW_TILE, Plan, round_up

AHEAD_FLOP = 3e11
"""Of the product that is launched before the host knows how many rows are labelled. In bfloat16 an H200 takes about 0.5 ms
for it: as long as the host takes to launch the next one after it has waited for a step's whole forward pass (profiled there,
2026-11-30)."""
ARCHS = {(9, 0), (10, 0), (10, 3)}
"""Whose shared memory holds the kernel's blocks, and whose copies it needs. On the others the host waits without it."""
DESCRIPTORS = (3, 4)
"""The first version of Triton that has tensor descriptors."""
ALIGNMENT = 16
"""Rows of all its matrices start at multiples of so many bytes."""


def rows_ahead(weight: Tensor, plan: Plan, kernels: object) -> int:
    """How many rows to project before the host knows how many there are; 0 where that would be most of the work.

    Args:
        weight: (V, H) of the head, in the GEMM's dtype.
        kernels: the call's row kernels: those with a true `ahead_by_triton` admit Triton's kernel beside them.
    """
    if not getattr(kernels, "ahead_by_triton", False):
        return 0
    classes, hidden = weight.shape
    rows = round_up(math.ceil(AHEAD_FLOP / max(1, 2 * classes * hidden)), GEMM_ROW_TILE)
    return rows if rows <= plan.chunk_rows // 2 and fits(weight) and runs_on(weight.device) else 0


def fits(weight: Tensor) -> bool:
    """Whether the kernel takes this head, and contiguous matrices of H and of V columns."""
    sizes = all(size * weight.element_size() % ALIGNMENT == 0 for size in weight.shape)
    return weight.dtype in (torch.float16, torch.bfloat16) and sizes and _aligned(weight)


def _aligned(matrix: Tensor) -> bool:
    (step, stride), begins = matrix.stride(), (matrix.data_ptr(), matrix.stride(0) * matrix.element_size())
    return stride == 1 and step >= matrix.shape[1] and all(begin % ALIGNMENT == 0 for begin in begins)


def project_ahead(x: Tensor, count: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """`triton.projection.project`, where `rows_ahead` is not 0."""
    from .triton.projection import project

    x = x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)
    project(x, count, weight, None if bias is None else bias.contiguous(), logits)


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs there."""
    if device.type != "cuda" or device_info(device).capability not in ARCHS or os.environ.get(INTERPRETER) == "1":
        return False
    version = TRITON.version()
    return version is not None and TRITON.reason() is None and release(version) >= DESCRIPTORS


def sent(*numbers: Tensor) -> Callable[[], list[int]]:
    """Begin to copy integers to the host; the function returned waits for them, and for nothing that is launched after.

    The copies run beside what comes next, on a stream of their own.
    """
    device = numbers[0].device
    if device.type != "cuda":
        return lambda: [int(number) for number in numbers]
    side, copied = side_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        there = [number.to("cpu", non_blocking=True) for number in numbers]
        copied.record(side)

    def received() -> list[int]:
        copied.synchronize()
        return [int(number) for number in there]

    return received


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device, because cuBLAS keeps a workspace for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
