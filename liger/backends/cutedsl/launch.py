"""Layouts, compiled kernels and their launch: host side.

A kernel is compiled when a call first needs its `Variant`, once a process and for every N and V. What it is compiled for is
its cached function's own arguments, the device's architecture among them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, cute
from cutlass.utils import HardwareInfo

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


def _layout(cluster: int, pipelines: int, warps: int, vectors: int) -> Layout:
    """With as many slots as fit."""
    piece_bytes = warps * WARP * vectors * VECTOR_BYTES
    return Layout(cluster, pipelines, warps, vectors, RING_BYTES // pipelines // piece_bytes)


@cache
def rows_layout(row_bytes: int) -> Layout:
    """Layout of `rows` with gradient."""
    if row_bytes <= 48 << 10:
        return _layout(1, 4, 4, 4)
    if row_bytes <= 72 << 10:
        return _layout(1, 3, 4, 4)
    for cluster in (1, 2, 4):
        if row_bytes <= cluster * (160 << 10):
            return _layout(cluster, 1, 16, 2)
    return _layout(8, 1, 16, 2)


@cache
def one_pass_layout(row_bytes: int) -> Layout:
    """Layout of kernels that read every logit once: nothing has to stay on chip."""
    return _layout(1, 4, 4, 4)


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
    function = compiled_rows(variant, layout, ARCHS[torch.cuda.get_device_capability(device)])
    return Ready(Launcher(function, ARGUMENT_TYPES), HardwareInfo(device).get_max_active_clusters(layout.cluster))


@cache
def scale_on(device: int, dtype: str, factor_dtype: str) -> Ready:
    """The kernel of `scale_` on a device, which has to be the current one."""
    function = compiled_scale(dtype, factor_dtype, ARCHS[torch.cuda.get_device_capability(device)])
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Ready(Launcher(function, SCALE_ARGUMENT_TYPES), processors)
