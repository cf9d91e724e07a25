"""Layouts, compiled kernels and their launch: host side.

A kernel is compiled when a call first needs its `Variant`, once a process and for every N and V. What it is compiled for is
its cached function's own arguments, the device's architecture among them.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, cute
from cutlass.utils import HardwareInfo

from ...context import make_context_current
from .kernels import (
    ARGUMENT_TYPES,
    SCALE_ARGUMENT_TYPES,
    VECTOR_BYTES,
    WARP,
    Layout,
    RowKernel,
    ScaleKernel,
    Variant,
)

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability to the compiler's target."""
RING_BYTES = 216 << 10
"""Of the 227 KiB of shared memory that a block may have, what pieces of rows get."""


def layout_of(cluster: int, pipelines: int, warps: int, vectors: int, teams: int = 1) -> Layout:
    """A layout with as many slots as fit."""
    piece_bytes = warps * WARP * vectors * VECTOR_BYTES
    return Layout(cluster, pipelines, warps, vectors, RING_BYTES // pipelines // piece_bytes, teams)


# `rows` with gradient, by the bytes of a row: up to so many, this layout. Long rows want few blocks with much of them each,
# since an exchange between blocks costs the same for all sizes, and two blocks always find multiprocessors that lie together
# (66 clusters of two ran at once, but only 30 of four). Short rows want several pipelines: with one, V = 4096 took 3.3.
# Measured on one H200 (torch 2.11, triton 3.6, nvidia-cutlass-dsl 4.8.1, 2026-11-30; 8192 rows of bf16), as multiples of one
# read + one write, and for Triton's kernel in the same run: 1.32 (1.23) at V = 4096, 1.11 (1.09) at 32000, 1.05 (1.21) at
# 128256, 1.06 (1.22) at 151936, 1.07 (1.30) at 262144; after products, which lower the clock, 1.09 (1.41) at 128256 and 1.17
# (1.42) at 262144, both on 4096 rows. Other architectures use the same layouts; nothing was run there.
ROWS: tuple[tuple[float, Layout], ...] = (
    (48 << 10, layout_of(1, 4, 4, 4)),
    (72 << 10, layout_of(1, 2, 4, 2, teams=2)),
    (160 << 10, layout_of(1, 1, 8, 4, teams=2)),
    (320 << 10, layout_of(2, 1, 12, 2, teams=2)),
    (640 << 10, layout_of(4, 1, 16, 2)),
    (math.inf, layout_of(8, 1, 16, 2)),  # beyond 1664 KiB no cluster holds a row
)
# What reads every logit once keeps nothing on chip. Statistics took 0.90 to 1.03 of half a copy from V = 32000 on, and the
# gradient from known ones 1.05 to 1.06 of a copy (Triton: 0.89 to 1.03, and 1.07); 1.70 and 1.08 at V = 4096 (2.49 and 1.25),
# all measured as above.
ONE_PASS = layout_of(1, 4, 4, 4)
WIDE_PASS = layout_of(1, 3, 4, 4)
"""For smoothing and predictions, which need more registers than a thread has with a fourth pipeline."""


def rows_layout(row_bytes: int) -> Layout:
    """Layout of `rows` with gradient."""
    return next(layout for limit, layout in ROWS if row_bytes <= limit)


def one_pass_layout(*, wide: bool = False) -> Layout:
    """Layout of kernels that read every logit once. `wide`: `Variant.wide`."""
    return WIDE_PASS if wide else ONE_PASS


class Launcher:
    """Calls a compiled kernel with plain numbers.

    A compiled host function takes the addresses of its arguments. They lie in a buffer of the calling thread's own, eight
    bytes each, so that a call packs numbers and does nothing else.
    """

    def __init__(self, function: Any, types: tuple[Any, ...]) -> None:
        self.run = function.to(None).run_compiled_program
        letters = {Int64: "q", Int32: "i4x", Float32: "f4x"}
        self.packing = struct.Struct("<" + "".join(letters[kind] for kind in (*types, Int32, Int64)))
        self.local = threading.local()

    def __call__(self, arguments: tuple[float, ...], size: int, stream: int) -> None:
        """Launch on a grid of this size and a stream given by its handle."""
        local = self.local
        if not hasattr(local, "buffer"):
            local.buffer = ctypes.create_string_buffer(self.packing.size)
            start = ctypes.addressof(local.buffer)
            local.addresses = list(range(start, start + self.packing.size, 8))
        self.packing.pack_into(local.buffer, 0, *arguments, size, stream)
        self.run(local.addresses)


class Ready(NamedTuple):
    """A kernel on a device."""

    launch: Launcher
    size: int
    """The grid that fills the device: of clusters that run at once, or of multiprocessors."""


@cache
def compiled_rows(variant: Variant, layout: Layout, arch: str, flags: str = "") -> Any:
    """The kernel of a variant in a layout, compiled for an architecture such as "sm_90a"; needs no GPU."""
    return _compile(RowKernel(variant, layout), ARGUMENT_TYPES, arch, flags)


@cache
def compiled_scale(dtype: str, factor_dtype: str, arch: str, flags: str = "") -> Any:
    """The kernel of `scale_` for arrays and factors of these dtypes, likewise."""
    return _compile(ScaleKernel(dtype, factor_dtype), SCALE_ARGUMENT_TYPES, arch, flags)


def _compile(kernel: Any, types: Any, arch: str, flags: str) -> Any:
    """`types` is a tuple with names, so that the kernel sees the names; `flags` are the compiler's."""
    examples = type(types)(*(kind(0) for kind in types))
    with warnings.catch_warnings():  # whatever the compiler deprecates of itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return cute.compile(kernel, examples, Int32(1), driver.CUstream(0), options=f"--gpu-arch {arch} {flags}")


@cache
def rows_on(device: int, variant: Variant, layout: Layout) -> Ready:
    """The kernel of a variant on a device, which has to be the current one."""
    make_context_current(device)
    function = compiled_rows(variant, layout, ARCHS[torch.cuda.get_device_capability(device)])
    return Ready(Launcher(function, ARGUMENT_TYPES), HardwareInfo(device).get_max_active_clusters(layout.cluster))


@cache
def scale_on(device: int, dtype: str, factor_dtype: str) -> Ready:
    """The kernel of `scale_` on a device, which has to be the current one."""
    make_context_current(device)
    function = compiled_scale(dtype, factor_dtype, ARCHS[torch.cuda.get_device_capability(device)])
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Ready(Launcher(function, SCALE_ARGUMENT_TYPES), processors)
