"""Launch configurations: from (device, dtype, vocabulary, kernel), by one readable rule and the measurement behind it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

LOAD_BYTES = 16  # one thread's widest load


class Launch(NamedTuple):
    """How one program is laid out."""

    block: int
    """Logits a program handles at a time."""
    num_warps: int
    held: int = 0
    """Logits at the head of a row that stay in registers between the two passes: whole blocks, no more than there are."""

    def width(self, itemsize: int) -> int:
        """Logits of one lane group."""
        return min(LOAD_BYTES // itemsize, self.block)


# `rows` with gradient, by itemsize: up to this vocabulary, this launch. Few long rows in flight keep their second read in L2,
# so long rows take whole multiprocessors, and what registers can hold of a row is not read twice.
# Measured on one H200 (torch 2.11, triton 3.6, 2026-11-29; 8192 rows of bf16, 4096 of fp32; benchmark.tune_rows), as multiples
# of one read + one write: bf16 1.22 / 1.09 at V = 4096 / 16384, 1.08 at 32000, 1.22 / 1.14 at 50304 / 65536, then 1.27 / 1.21 /
# 1.22 / 1.31 at 102400 / 128256 / 151936 / 262144; fp32 1.04 / 1.21 at 32000 / 128256. Other architectures use the same
# table; it was not measured there.
ROWS_WITH_GRAD: dict[int, tuple[tuple[float, Launch], ...]] = {
    2: (
        (24576, Launch(4096, 8)),
        (40960, Launch(8192, 8)),
        (81920, Launch(8192, 16, held=16384)),
        (math.inf, Launch(16384, 32, held=32768)),
    ),
    4: (
        (20480, Launch(4096, 8)),
        (65536, Launch(8192, 32)),
        (math.inf, Launch(8192, 32, held=32768)),
    ),
}
# Statistics alone: 1.01 / 0.93 / 0.91 of one read at half a copy's rate at V = 32000 / 128256 / 151936, measured as above.
ROWS_BYTES, ROWS_WARPS = 16 << 10, 16
# `row_grad`: 1.05 to 1.08 times one read + one write; it varies little with the launch.
ROW_GRAD_BYTES, ROW_GRAD_WARPS = 8 << 10, 16

# `exchanged_rows`: many small programs wait for each other's statistics best. With a gradient a row is finished at once, since
# the rows between its two reads have to stay in L2; without one, so many rows of each multiprocessor later that nobody waits.
# Measured on two H200s (torch 2.11, triton 3.6, 2026-11-30, benchmark/data/tune_exchange_h200.csv).
EXCHANGED_WITH_GRAD, EXCHANGED_WITHOUT_GRAD = Launch(8192, 8), Launch(4096, 8)  # for two bytes a logit
LAG_WITHOUT_GRAD = 8


@lru_cache(maxsize=256)
def rows_launch(vocab: int, itemsize: int, with_grad: bool, is_hip: bool) -> Launch:
    """Launch of `rows` and, without gradient, of `row_stats`."""
    if with_grad:
        launch = next(launch for limit, launch in ROWS_WITH_GRAD[itemsize] if vocab <= limit)
    else:
        launch = Launch(ROWS_BYTES // itemsize, ROWS_WARPS)
    return _fit(launch, vocab, is_hip)


@lru_cache(maxsize=256)
def exchanged_rows_launch(vocab: int, itemsize: int, with_grad: bool, processors: int) -> tuple[Launch, int]:
    """Launch of `exchanged_rows`, and how many rows after a row has been sent it is finished."""
    launch = EXCHANGED_WITH_GRAD if with_grad else EXCHANGED_WITHOUT_GRAD
    launch = launch._replace(block=2 * launch.block // itemsize)
    return _fit(launch, vocab, is_hip=False), 0 if with_grad else LAG_WITHOUT_GRAD * processors


@lru_cache(maxsize=256)
def row_grad_launch(vocab: int, itemsize: int, is_hip: bool) -> Launch:
    """Launch of `row_grad`."""
    return _fit(Launch(ROW_GRAD_BYTES // itemsize, ROW_GRAD_WARPS), vocab, is_hip)


def _fit(launch: Launch, vocab: int, is_hip: bool) -> Launch:
    """The launch for a row that may be shorter than a block, on waves that may be twice as wide as NVIDIA's warps."""
    block = min(launch.block, triton.next_power_of_2(vocab))
    num_warps = max(1, min(launch.num_warps, block // 128))
    return Launch(block, max(1, num_warps // 2) if is_hip else num_warps, launch.held)


@lru_cache(maxsize=64)
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
