"""Runs the source of the CuTe DSL kernels in Python, without a GPU and without the compiler.

The module of the device code is loaded once more with stand-ins for what it imports: scalars are numpy's, shared memory is
a buffer, every thread of a cluster is a greenlet, and so is every asynchronous copy. Which of them goes on is decided wherever
one waits or could let another go on; where none can, some barrier waits for what does not come. What the compiler makes of the
source is not tested by this; what the source means is.
"""

from __future__ import annotations

import ctypes
import heapq
import importlib.util
import random
import sys
import types
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from greenlet import getcurrent, greenlet

import liger.backends

SOURCE = Path(liger.backends.__file__).parent / "cutedsl" / "kernels.py"
WARP = 32
SHARED_BYTES = 227 << 10


class Integer:
    """Int32 and Int64: calls give Python's ints."""

    def __init__(self, width):
        self.width, self.format = width, np.dtype(f"<i{width // 8}")

    def __call__(self, value):
        return int(value)


class Float:
    """Calls give numpy's float32, rounded to the dtype."""

    def __init__(self, width, dtype):
        self.width, self.dtype = width, dtype

    def __call__(self, value):
        value = np.float32(value)
        return value if self.dtype is torch.float32 else self.decoded(self.encoded(value))

    def encoded(self, value):
        """The 16 bits of a float32 after it has been rounded to the nearest, ties to even."""
        if self.dtype is torch.float16:
            with np.errstate(over="ignore"):
                return int(np.float16(value).view("<u2"))
        bits = int(value.view("<u4"))
        return 0x7FC0 if np.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def decoded(self, bits):
        """The float32 of 16 bits."""
        return np.float32(np.uint16(bits).view("<f2")) if self.dtype is torch.float16 else np.uint32(bits << 16).view("<f4")


INT32, INT64 = Integer(32), Integer(64)
FLOAT32, FLOAT16, BFLOAT16 = Float(32, torch.float32), Float(16, torch.float16), Float(16, torch.bfloat16)


class Pointer:
    """Typed, into a buffer of bytes: shared memory of a block, or all of the process's memory (None)."""

    def __init__(self, dtype, offset, block=None):
        self.dtype, self.offset, self.block = dtype, int(offset), block

    def __add__(self, count):
        return Pointer(self.dtype, self.offset + int(count) * self.dtype.width // 8, self.block)

    def align(self, size):
        assert self.offset % size == 0, "a misaligned pointer"
        return self

    def toint(self):
        return self

    def bytes(self, size):
        if self.block is None:
            return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.offset))
        assert 0 <= self.offset <= SHARED_BYTES - size, "outside of shared memory"
        return self.block.shared[self.offset : self.offset + size]

    def load(self):
        raw = self.bytes(self.dtype.width // 8)
        if isinstance(self.dtype, Integer):
            return int(raw.view(self.dtype.format)[0])
        if self.dtype.width == 32:
            return raw.view("<f4")[0]
        return self.dtype.decoded(int(raw.view("<u2")[0]))

    def store(self, value):
        raw = self.bytes(self.dtype.width // 8)
        if isinstance(self.dtype, Integer):
            raw.view(self.dtype.format)[0] = value
        elif self.dtype.width == 32:
            raw.view("<f4")[0] = value
        else:
            raw.view("<u2")[0] = self.dtype.encoded(np.float32(value))


class Tensor:
    """Elements behind a pointer, or in registers."""

    def __init__(self, size, dtype, pointer=None):
        self.shape, self.dtype, self.pointer = size, dtype, pointer
        self.registers = [None] * size

    def __getitem__(self, index):
        return self.registers[index] if self.pointer is None else (self.pointer + index).load()

    def __setitem__(self, index, value):
        if self.pointer is None:
            self.registers[index] = self.dtype(value)
        else:
            (self.pointer + index).store(value)

    def fill(self, value):
        self.store([value] * self.shape)

    def load(self):
        return Vector(self[i] for i in range(self.shape))

    def store(self, values):
        for i, value in enumerate(values):
            self[i] = value


def recast_tensor(tensor, dtype):
    """A register tensor of 16-bit floats as words of 32 bits."""
    assert tensor.pointer is None
    assert dtype is INT32
    words = Tensor(tensor.shape // 2, dtype)
    halves = np.array([tensor.dtype.encoded(value) for value in tensor.load()], "<u2")
    words.store(halves.view("<i4").tolist())
    return words


def make_ptr(dtype, address, space, assumed_align):
    """To shared memory from what `Pointer.toint` gives, or to all of the process's memory from a number."""
    offset, block = (address.offset, address.block) if space == "shared" else (address, None)
    return Pointer(dtype, offset, block).align(assumed_align)


class Vector(list):
    """What a tensor's load gives."""

    def to(self, dtype):
        return Vector(map(dtype, self))

    def __mul__(self, factor):
        return Vector(value * factor for value in self)


class Deadlock(Exception):
    """Everybody waits."""


class Schedule:
    """Runs greenlets, one at a time, until all have ended: of those that can go on always the most urgent.

    How urgent a warp or a copy is, is drawn: so some run far ahead, and some come when nobody else can go on.
    """

    def __init__(self, seed):
        self.drawn, self.runner, self.ready, self.unfinished = random.Random(seed), getcurrent(), [], 0

    def start(self, block, threads, function):
        """Let a function go on as each of some threads of a block, which are equally urgent."""
        urgency = self.drawn.random()
        for thread in threads:
            started = greenlet(function, self.runner)
            started.block, started.thread, started.urgency = block, thread, urgency
            self.release([started])
        self.unfinished += len(threads)

    def wait(self, waiting):
        """Called by one of them: go on after somebody has released those in the list `waiting`."""
        waiting.append(getcurrent())
        self.runner.switch()

    def pause(self):
        """Called by one of them: the others may go on first."""
        self.release([getcurrent()])
        self.runner.switch()

    def release(self, waiting):
        """Those who wait in a list can go on."""
        for released in waiting:
            heapq.heappush(self.ready, (-released.urgency, self.drawn.random(), released))
        waiting.clear()

    def run(self):
        """Raises what one of them raises."""
        while self.ready:
            running = heapq.heappop(self.ready)[-1]
            running.switch()
            self.unfinished -= running.dead
        if self.unfinished:
            raise Deadlock(f"{self.unfinished} threads wait for what does not come")


class Meeting:
    """Whoever comes waits until all have come."""

    def __init__(self, schedule, count):
        self.schedule, self.count, self.waiting = schedule, count, []

    def wait(self):
        if len(self.waiting) == self.count - 1:
            self.schedule.release(self.waiting)
            self.schedule.pause()
        else:
            self.schedule.wait(self.waiting)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self, schedule, count):
        self.schedule, self.count, self.waiting = schedule, count, []
        self.pending, self.bytes, self.phase = count, 0, 0

    def change(self, arrivals=0, expected=0, came=0):
        self.pending -= arrivals
        self.bytes += expected - came
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.schedule.release(self.waiting)
        self.schedule.pause()

    def wait(self, parity):
        while self.phase & 1 == parity:
            self.schedule.wait(self.waiting)


class Block:
    """A thread block."""

    def __init__(self, cluster, index, grid, threads):
        self.cluster, self.index, self.grid, schedule = cluster, index, grid, cluster.schedule
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)  # NaN: whoever reads before it was written will see
        self.barriers = {}
        self.together = Meeting(schedule, threads)
        self.warps = [Meeting(schedule, WARP) for _ in range(threads // WARP)]
        self.exchanged = [[None] * WARP for _ in range(threads // WARP)]


class Cluster:
    """Blocks whose threads run at the same time."""

    def __init__(self, indices, grid, threads):
        self.schedule = Schedule(seed=indices.start)
        self.blocks = [Block(self, index, grid, threads) for index in indices]
        self.together = Meeting(self.schedule, len(indices) * threads)


def _block():
    return getcurrent().block


def _warp():
    return _block().warps[getcurrent().thread // WARP]


def _later(function):
    """Asynchronously."""
    _block().cluster.schedule.start(_block(), [None], function)


def _warp_reduction(value, operation):
    warp, lane = divmod(getcurrent().thread, WARP)
    exchanged = _block().exchanged[warp]
    exchanged[lane] = value
    _warp().wait()
    values = list(exchanged)
    _warp().wait()
    return reduce(operation, values)


def _fma(a, b, c):
    """Rounded once: a product of two float32 is exact in float64."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def _barrier(pointer):
    return pointer.block.barriers[pointer.offset]


def _mbarrier_init(pointer, count):
    pointer.block.barriers[pointer.offset] = Barrier(pointer.block.cluster.schedule, count)


def _store_async(pointer, values, barrier, peer):
    block = _block().cluster.blocks[peer]

    def arrive():
        for i, value in enumerate(values):
            Pointer(INT32, pointer.offset + 4 * i, block).store(value)
        block.barriers[barrier.offset].change(came=4 * len(values))

    _later(arrive)


def _inline_ptx(code, write_only_types=None, read_only_args=()):
    if code.startswith("mov.b32"):
        if write_only_types == [FLOAT32]:
            return np.uint32(read_only_args[0] & 0xFFFFFFFF).view("<f4")
        return int(np.float32(read_only_args[0]).view("<i4"))
    if code.startswith("mul.rn.f32"):
        return np.float32(read_only_args[0]) * np.float32(read_only_args[1])
    destination, source, size, barrier = read_only_args
    assert code.startswith("cp.async.bulk.shared::cluster.global")
    assert size > 0
    assert source % 16 == destination.offset % 16 == size % 16 == 0, "a copy that is not of whole vectors"

    def arrive():
        destination.bytes(size)[:] = Pointer(INT32, source).bytes(size)
        _barrier(barrier).change(came=size)

    _later(arrive)


class _Allocator:
    """Every thread of a block makes the same allocations and gets the same memory."""

    def __init__(self):
        self.used = 0

    def allocate_array(self, dtype, size, byte_alignment):
        start = -(-self.used // byte_alignment) * byte_alignment
        self.used = start + size * dtype.width // 8
        assert self.used <= SHARED_BYTES, "more shared memory than a block may have"
        return Pointer(dtype, start, _block())


def _module(name, **content):
    module = types.ModuleType(name)
    vars(module).update(content)
    return module


def _same(function):
    return function


def _range(*bounds, unroll=1):
    return range(*bounds)


def load_kernels():
    """The module `liger.backends.cutedsl.kernels`, on stand-ins."""
    arch = _module(
        "arch",
        thread_idx=lambda: (getcurrent().thread, 0, 0),
        warp_idx=lambda: getcurrent().thread // WARP,
        lane_idx=lambda: getcurrent().thread % WARP,
        block_idx=lambda: (_block().index, 0, 0),
        grid_dim=lambda: (_block().grid, 1, 1),
        make_warp_uniform=_same,
        fmax=np.fmax,
        rcp_approx=lambda x: np.float32(1) / x,
        warp_reduction=_warp_reduction,
        warp_redux_sync=lambda value, kind: _warp_reduction(value, {"min": min}[kind]),
        sync_warp=lambda: _warp().wait(),
        sync_threads=lambda: _block().together.wait(),
        cluster_arrive=lambda: None,
        cluster_wait=lambda: _block().cluster.together.wait(),
        mbarrier_init=_mbarrier_init,
        mbarrier_init_fence=lambda: None,
        mbarrier_wait=lambda pointer, parity: _barrier(pointer).wait(parity),
        mbarrier_arrive=lambda pointer: _barrier(pointer).change(arrivals=1),
        mbarrier_arrive_and_expect_tx=lambda pointer, size: _barrier(pointer).change(arrivals=1, expected=size),
        store_async_dsmem=_store_async,
        inline_ptx=_inline_ptx,
        fence_view_async_shared=lambda: None,
    )
    cute = _module(
        "cute",
        arch=arch,
        jit=_same,
        kernel=_same,
        AddressSpace=types.SimpleNamespace(gmem="global", smem="shared"),
        make_ptr=make_ptr,
        recast_tensor=recast_tensor,
        make_layout=_same,
        recast_ptr=lambda pointer, dtype: Pointer(dtype, pointer.offset, pointer.block),
        make_tensor=lambda pointer, size: Tensor(size, pointer.dtype, pointer),
        make_rmem_tensor=Tensor,
        autovec_copy=lambda source, destination: destination.store(source.load()),
        math=types.SimpleNamespace(
            exp2=lambda x, fastmath: np.exp2(x, dtype=np.float32), fma=_fma, log=lambda x, fastmath: np.log(x, dtype=np.float32)
        ),
    )
    cutlass = _module(
        "cutlass",
        cute=cute,
        BFloat16=BFLOAT16,
        Float16=FLOAT16,
        Float32=FLOAT32,
        Int32=INT32,
        Int64=INT64,
        const_expr=_same,
        range=_range,
        range_constexpr=range,
        min=min,
        max=max,
        select_=lambda condition, yes, no: yes if condition else no,
    )
    stands_in = {
        "cutlass": cutlass,
        "cutlass.cute": cute,
        "cutlass.memory": _module("memory", SmemAllocator=_Allocator),
    }
    spec = importlib.util.spec_from_file_location("interpreted_kernels", SOURCE)
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in stands_in}
    sys.modules.update(stands_in)
    try:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
        for name, loaded in before.items():
            if loaded is None:
                del sys.modules[name]
            else:
                sys.modules[name] = loaded
    return module


def launch(kernel, arguments, *, grid, threads, cluster=1):
    """Run a kernel, a function of its arguments, on a grid of blocks; clusters one after the other."""

    def run():
        with np.errstate(all="ignore"):  # each greenlet's own from NumPy 2 on, the thread's before
            kernel(arguments)

    for first in range(0, grid, cluster):
        together = Cluster(range(first, first + cluster), grid, threads)
        for block in together.blocks:
            for warp in range(threads // WARP):
                together.schedule.start(block, range(warp * WARP, (warp + 1) * WARP), run)
        with np.errstate(all="ignore"):
            together.schedule.run()
        leftover = [b for block in together.blocks for b in block.barriers.values() if b.bytes or b.pending != b.count]
        assert not leftover, "a barrier was left in the middle of a phase"
