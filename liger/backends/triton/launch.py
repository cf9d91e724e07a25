"""Launch configurations: from (device, dtype, vocabulary, kernel), by one readable rule and the measurement behind it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

LOAD_BYTES = 16  # one thread's widest load
LONG_ROW_BYTES = 96 << 10


class Launch(NamedTuple):
    """How one program is laid out."""

    block: int
    """Logits a program handles at a time."""
    num_warps: int
    held: int = 0
    """Logits at the head of a row that stay in registers between the two passes; a multiple of `block`."""

    def width(self, itemsize: int) -> int:
        """Logits of one lane group."""
        return min(LOAD_BYTES // itemsize, self.block)


@lru_cache(maxsize=256)
def rows_launch(vocab: int, itemsize: int, with_grad: bool, is_hip: bool) -> Launch:
    """Launch of `rows` (and, without gradient, of `row_stats`).

    Sizes are in bytes of logits because bytes are what the kernels wait for. Measured on one H200 (torch 2.11, triton 3.6,
    2026-11-29, bf16, 8192 rows; benchmark/data/tune_rows_h200.csv), as multiples of one read + one write, or one read:
    statistics alone 1.01 / 0.93 / 0.91 at V = 32000 / 128256 / 151936 with 16 KiB blocks and 16 warps; with the gradient
    1.08 at V = 32000 with 16 KiB and 8 warps, and 1.21 / 1.22 at the larger two with 32 KiB, 32 warps and 64 KiB of the row
    held in registers (1.23 / 1.29 without). Few rows in flight keep the second read in L2, so long rows take whole
    multiprocessors. Other architectures use the same rule; it was not measured there.
    """
    if not with_grad:
        launch = Launch((16 << 10) // itemsize, 16)
    elif vocab * itemsize < LONG_ROW_BYTES:
        launch = Launch((16 << 10) // itemsize, 8)
    else:
        launch = Launch((32 << 10) // itemsize, 32, held=(64 << 10) // itemsize)
    return _fit(launch, vocab, is_hip)


@lru_cache(maxsize=256)
def row_grad_launch(vocab: int, itemsize: int, is_hip: bool) -> Launch:
    """Launch of `row_grad`: 1.05 to 1.08 times one read + one write (as above) with 8 KiB and 16 warps; it varies little."""
    return _fit(Launch((8 << 10) // itemsize, 16), vocab, is_hip)


def _fit(launch: Launch, vocab: int, is_hip: bool) -> Launch:
    """The launch for a row that may be shorter than a block, on waves that may be twice as wide as NVIDIA's warps."""
    block = min(launch.block, triton.next_power_of_2(vocab))
    num_warps = max(1, min(launch.num_warps, block // 128))
    return Launch(block, max(1, num_warps // 2) if is_hip else num_warps, launch.held)


@lru_cache(maxsize=64)
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
