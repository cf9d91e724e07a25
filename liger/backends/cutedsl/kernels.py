"""Device code of the row kernels. The equations are in `liger.spec`; the names of its coefficients a, b, d are used here.

A cluster of thread blocks owns one row at a time and walks over the rows; each block owns a slice of the row. A ring of
shared-memory slots takes the slice piece by piece. One warp, the producer, keeps bulk asynchronous copies of the pieces to
come in flight; the other warps, the consumers, take the pieces in turn:

    statistics   each thread keeps a running (maximum, sum) of the logits that it reads from the pieces
    exchange     every warp sends its pair to every block of the cluster, straight into their shared memory, where the
                 arriving bytes themselves complete a barrier: one hop, and no barrier of a whole block or cluster; a
                 block alone stores it, and its warps arrive
    gradient     from the pieces, which are still on chip, rounded once; a piece read for the last time is free for the
                 producer, which by then is loading the next rows

so device memory reads and writes go on while a row is reduced. Every logit is read from device memory once and its gradient
written once. A slice of more pieces than there are slots is read twice, the second time mostly from L2. Kernels that need
one pass only (statistics, or the gradient from known ones) free a piece as soon as it was read and run in clusters of one.

A block may hold several such pipelines, each with a ring, a producer and consumers of its own, which share its rows: short
rows leave little to do between two exchanges, and while one pipeline waits the others work.

Where a row stays on chip the consumers may be two teams: one makes statistics and hands over what the gradient is made from,
the other writes it, while the first reads the next row.

Target logits are taken from the pieces as they pass, so that nothing waits for them; where statistics are known already, the
thread that writes the target's gradient reads its logit first. A row is not touched in any other way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

LOG2_E = math.log2(math.e)
LOWEST = -3.4028234663852886e38  # finite: a thread that has seen nothing yields exp(-inf - LOWEST) = 0
HUGE = 2.0**30  # numbers of this size that differ at all differ by 64, and exp of that is nothing
NONE = 2**31 - 1  # an arg max that is not there
WARP = 32
VECTOR_BYTES = 16  # what one thread loads and stores at once

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


class Layout(NamedTuple):
    """How rows are laid out on the multiprocessors."""

    cluster: int
    """Blocks that share a row."""
    pipelines: int
    """Independent pipelines of a block, which take rows in turn."""
    warps: int
    """Consumer warps of a pipeline, or of each of its teams."""
    vectors: int
    """Vectors of 16 bytes that a consumer thread reads of each piece."""
    slots: int
    """Pieces that fit into the ring of a pipeline."""
    teams: int = 1
    """2: where a row stays on chip, as many consumer warps more write its gradient while the others read the next row."""

    @property
    def threads(self) -> int:
        """Of a block: consumers, and a warp for each producer."""
        return self.pipelines * (self.warps * self.teams + 1) * WARP

    @property
    def piece_vectors(self) -> int:
        """Vectors of a piece."""
        return self.warps * WARP * self.vectors

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all rings of a block."""
        return self.pipelines * self.slots * self.piece_vectors * VECTOR_BYTES

    def holds(self, row_bytes: int) -> bool:
        """Whether a row stays on chip between its statistics and its gradient."""
        vectors = -(-row_bytes // VECTOR_BYTES)
        return -(-vectors // self.cluster) <= self.slots * self.piece_vectors


class Variant(NamedTuple):
    """What is compiled: what changes a kernel's inner loops. Neither N nor V is in it, nor what costs a row a branch."""

    kernel: str
    """"rows" (statistics, loss and, with `grad`, gradient), "row_stats", or "row_grad"."""
    dtype: str
    target_dtype: str
    grad: bool = False
    resident: bool = False
    """Whether the layout holds a row; only for statistics with a gradient."""
    smoothing: bool = False
    scaled: bool = False
    """Whether logits are multiplied by `logit_scale`."""
    softcap: bool = False
    class_weight: bool = False
    """Whether smoothing weighs classes; a weight of the target alone costs a row one load."""
    predicted: bool = False
    upstream_dtype: str = "float32"
    """Of the upstream gradient, for "row_grad"."""

    @property
    def wide(self) -> bool:
        """Whether statistics are more than a maximum, a sum and the target's logit."""
        return self.kernel != "row_grad" and (self.smoothing or self.predicted)


class Arguments(NamedTuple):
    """Of a kernel: addresses (0: absent), strides in elements, and numbers."""

    logits: Any
    logits_stride: Any
    grad: Any
    grad_stride: Any
    target: Any
    target_stride: Any
    class_weight: Any
    target_weight: Any
    class_weight_sum: Any
    core_divisor: Any
    z_divisor: Any
    loss: Any
    """For "row_stats", sum_exp."""
    z_loss: Any
    """For "row_stats", weighted_sum."""
    predicted: Any
    lse: Any
    """Maximum and, `lse_stride` further, log sum; for "row_stats", maximum and the target's logit."""
    lse_stride: Any
    upstream: Any
    upstream_stride: Any
    ignore_index: Any
    start: Any
    """Id of the row's first class."""
    rows: Any
    vocab: Any
    """Classes of a row."""
    total: Any
    """Classes altogether."""
    token_scaling: Any
    """1: scale each row by its target's probability; 0: do not."""
    label_smoothing: Any
    lse_square_scale: Any
    logit_scale: Any
    softcap: Any


ARGUMENT_TYPES = Arguments(*[Int64] * 20, *[Int32] * 4, *[Float32] * 4)


class _Pipeline(NamedTuple):
    """What a thread knows of its pipeline."""

    ring: Any
    full: Any
    """A barrier for each slot: its piece has arrived."""
    empty: Any
    """A barrier for each slot: every consumer warp has read its piece."""
    entries: Any
    """Two buffers of what the warps exchange."""
    arrived: Any
    """A barrier for each of them."""
    target_logits: Any
    """For each slot: the target's logit of the row whose first piece it holds, if that travels with the row."""
    coefficients: Any
    """What the gradients of rows in the ring are made from, handed over from one team to the other."""
    known: Any
    """A barrier for each of them."""
    thread: Any
    """Of the pipeline's consumers."""
    warp: Any
    """Of the pipeline's consumers."""
    lane: Any
    rank: Any
    """Of the block in its cluster."""
    start: Any
    """First element of the block's slice."""
    vectors: Any
    """Of the block's slice."""
    pieces: Any
    """Of the block's slice."""
    full_pieces: Any
    """Those in which every thread has all its vectors."""


class _Statistics(NamedTuple):
    """Of the logits that a thread has seen of a row, or of the row."""

    maximum: Any
    base: Any
    """`base_of` the maximum: carried along, since a thread that makes it again for each piece needs more registers."""
    sum_exp: Any
    """sum exp2(s * factor - base); of a whole row sum exp(s - maximum)."""
    weighted: Any
    """sum w (s - maximum)"""
    weight: Any
    """sum w"""
    target_logit: Any
    """s of the target, or -inf."""
    best: Any
    """Least index of the maximum."""

    @staticmethod
    def of_nothing() -> _Statistics:
        """Before any logit was seen."""
        zero, lowest = Float32(0.0), Float32(LOWEST)
        return _Statistics(lowest, lowest, zero, zero, zero, Float32(-math.inf), Int32(NONE))


class _Coefficients(NamedTuple):
    """What a row's gradient is made from, beside the logits."""

    factor: Any
    base: Any
    """With the factor, `base_of` the row's maximum."""
    a: Any
    """The spec's, over the sum of the row's powers."""
    b: Any
    d: Any
    target_logit: Any


HANDED = len(_Coefficients._fields)


class _Cap(NamedTuple):
    """A soft cap, and its inverse."""

    value: Any
    inverse: Any


def pointer_to(dtype, address, alignment=None):
    """A typed pointer to device memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment or dtype.width // 8)


def load(dtype, address, index=0):
    """One element of an array in device memory."""
    return cute.make_tensor(pointer_to(dtype, address) + index, cute.make_layout(1))[0]


def store(dtype, address, index, value):
    """Write one element of an array in device memory."""
    cute.make_tensor(pointer_to(dtype, address) + index, cute.make_layout(1))[0] = dtype(value)


def vector_at(dtype, address):
    """The 16 bytes at an address in device memory, as a tensor."""
    return cute.make_tensor(pointer_to(dtype, address, VECTOR_BYTES), cute.make_layout(VECTOR_BYTES * 8 // dtype.width))


def store_vector(dtype, address, values):
    """Round a register tensor of floats and store it at once."""
    rounded = cute.make_rmem_tensor(values.shape, dtype)
    rounded.store(values.load().to(dtype))
    cute.autovec_copy(rounded, vector_at(dtype, address))


def exp2(x):
    """2^x, by the special-function unit."""
    return cute.math.exp2(x, fastmath=True)


def product(a, b):
    """a * b, rounded: no compiler may fuse it with a sum."""
    return arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def base_of(m):
    """(factor, base) of a maximum: exp(s - m) is about exp2(s * factor - base), one fused operation and an exponential.

    The base is m * log2 e rounded, which shifts all logits alike: `residue` tells by how much, at most 64. From `HUGE` on that
    would be too much, and a factor of 1, with which nothing is rounded, does as well.
    """
    factor = cutlass.select_(arch.fmax(m, -m) < HUGE, Float32(LOG2_E), Float32(1.0))
    return factor, product(m, factor)


def power(s, factor, base):
    """exp2(s * factor - base), rounded before the exponential only once."""
    return exp2(cute.math.fma(s, factor, -base))


def rebased(base, higher):
    """What a sum of powers is multiplied by where the base rises."""
    shift = base - higher
    return exp2(cutlass.select_(shift > 0.0, Float32(-math.inf), shift))  # positive only where the factor changes


def residue(m):
    """log2 of what exp(s - m) is multiplied by in a power relative to the base of m."""
    factor, base = base_of(m)
    return cute.math.fma(m, factor, -base)


def bits(x):
    """The 32 bits of a float."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def float_of(x):
    """The float of 32 bits."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def tree(operation, values):
    """Reduce a list pairwise, so that no long chain of dependent instructions forms."""
    while len(values) > 1:
        pairs = [operation(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


def add(a, b):
    """a + b"""
    return a + b


def moved(weighted, weight, shift):
    """sum w (s - m) after m was lowered by `shift`; nothing was added yet where the weight is 0, and `shift` may be -inf."""
    return weighted + cutlass.select_(weight == 0.0, Float32(0.0), weight * shift)


def tanh(x):
    """Of a float: (1 - e) / (1 + e) cancels near 0; there five terms of the series are exact to fp32."""
    size = arch.fmax(x, -x)
    e = exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - e) * arch.rcp_approx(1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return cutlass.select_(size < 0.3, near, cutlass.select_(x < 0.0, -far, far))


class RowKernel:
    """The kernel of one `Variant` in one `Layout`."""

    def __init__(self, variant: Variant, layout: Layout) -> None:
        self.variant, self.layout = variant, layout if variant.resident else layout._replace(teams=1)
        self.dtype = DTYPES[variant.dtype]
        self.itemsize = self.dtype.width // 8
        self.width = VECTOR_BYTES // self.itemsize  # elements of a vector
        self.piece_elements = layout.piece_vectors * self.width
        self.has_stats, self.has_grad = variant.kernel != "row_grad", variant.grad
        self.reads = 2 if self.has_stats and self.has_grad and not variant.resident else 1
        # Ignored rows are not read, but for statistics, which know no ignored rows.
        self.reads_all = variant.kernel == "row_stats"
        self.entry_words = 8 if variant.wide else 4  # of an exchanged entry
        self.entries = layout.cluster * layout.warps

    @cute.jit
    def __call__(self, a: Arguments, clusters: Int32, stream):
        """Launch on `clusters` clusters: no more than the device runs at once, or the last rows would wait."""
        self.kernel(a).launch(
            grid=[clusters * self.layout.cluster, 1, 1],
            block=[self.layout.threads, 1, 1],
            cluster=[self.layout.cluster, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: Arguments):
        """Share out shared memory and rows, and go separate ways."""
        layout = self.layout
        thread = arch.thread_idx()[0]
        warp = arch.make_warp_uniform(arch.warp_idx())
        rank = arch.block_idx()[0] % layout.cluster
        cluster, clusters = arch.block_idx()[0] // layout.cluster, arch.grid_dim()[0] // layout.cluster
        team = layout.pipelines * layout.warps
        consumers = team * self.layout.teams
        pipeline = warp % team // layout.warps if warp < consumers else warp - consumers

        memory = SmemAllocator()
        slots, buffers = layout.pipelines * layout.slots, layout.pipelines * 2
        ring = memory.allocate_array(self.dtype, slots * self.piece_elements, byte_alignment=128)
        entries = memory.allocate_array(Float32, buffers * self.entries * self.entry_words, byte_alignment=16)
        full = memory.allocate_array(Int64, slots, byte_alignment=8)
        empty = memory.allocate_array(Int64, slots, byte_alignment=8)
        arrived = memory.allocate_array(Int64, buffers, byte_alignment=8)
        target_logits = memory.allocate_array(Float32, slots, byte_alignment=4)
        handed = slots if self.layout.teams == 2 else 1
        coefficients = memory.allocate_array(Float32, handed * HANDED, byte_alignment=4)
        known = memory.allocate_array(Int64, handed, byte_alignment=8)
        if thread == 0:
            for i in cutlass.range_constexpr(slots):
                arch.mbarrier_init(full + i, 1)
                arch.mbarrier_init(empty + i, layout.warps)
            for i in cutlass.range_constexpr(handed):
                arch.mbarrier_init(known + i, 1)
            for i in cutlass.range_constexpr(buffers):
                arch.mbarrier_init(arrived + i, 1 if layout.cluster > 1 else layout.warps)
            arch.mbarrier_init_fence()
        self._sync_cluster()

        all_vectors = a.vocab // self.width
        slice_vectors = (all_vectors + layout.cluster - 1) // layout.cluster
        last_vectors = all_vectors - slice_vectors * (layout.cluster - 1)  # of the last block's slice
        p = _Pipeline(
            ring + pipeline * (layout.slots * self.piece_elements),
            full + pipeline * layout.slots,
            empty + pipeline * layout.slots,
            entries + pipeline * (2 * self.entries * self.entry_words),
            arrived + pipeline * 2,
            target_logits + pipeline * layout.slots,
            coefficients + pipeline * (layout.slots * HANDED),
            known + pipeline * layout.slots,
            thread % (layout.warps * WARP),
            warp % layout.warps,
            arch.lane_idx(),
            rank,
            rank * (slice_vectors * self.width),
            last_vectors if rank == layout.cluster - 1 else slice_vectors,
            (slice_vectors + layout.piece_vectors - 1) // layout.piece_vectors,
            last_vectors // layout.piece_vectors,
        )
        first, step = cluster + pipeline * clusters, clusters * layout.pipelines
        if warp < team:
            self._consume(a, p, first, step)
        elif warp < consumers:
            self._write(a, p, first, step)
        elif p.lane == 0:
            self._produce(a, p, first, step)
        self._sync_cluster()  # a block's shared memory outlives what others send to it

    @cute.jit
    def _sync_cluster(self):
        if const_expr(self.layout.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
        else:
            arch.sync_threads()

    @cute.jit
    def _produce(self, a, p, first: Int32, step: Int32):
        """One thread: copy the pieces of every row that is read into the ring."""
        layout = self.layout
        position = Int32(0)  # in the sequence of all pieces that ever pass through the ring
        target_logit = Float32(0.0)
        y = self._target(a, first)
        for row in cutlass.range(first, a.rows, step, unroll=1):
            y_next = self._target(a, row + step)  # on its way while this row is copied
            if self._is_read(a, y):
                row_start = Int64(row) * a.logits_stride
                source = a.logits + (row_start + p.start) * self.itemsize
                # With known statistics and token scaling, the target's logit is needed before the first piece, and the
                # gradient may be in place. What is written of a row waits for its first piece, so it is read before that.
                if const_expr(not self.has_stats):
                    if a.token_scaling != 0:
                        column = y - a.start
                        column = column if (column >= 0) & (column < a.vocab) else Int64(0)
                        target_logit = self._score(a, load(self.dtype, a.logits, row_start + column), self._cap(a))
                for _ in cutlass.range_constexpr(self.reads):
                    for piece in cutlass.range(p.pieces, unroll=1):
                        slot = position % layout.slots
                        arch.mbarrier_wait(p.empty + slot, (position // layout.slots + 1) & 1)
                        if const_expr(not self.has_stats):
                            if piece == 0:
                                (p.target_logits + slot).store(target_logit)
                        vectors = cutlass.min(p.vectors - piece * layout.piece_vectors, layout.piece_vectors)
                        offset = Int64(piece) * (layout.piece_vectors * VECTOR_BYTES)
                        self._copy(p.ring + slot * self.piece_elements, source + offset, vectors, p.full + slot)
                        position += 1
            y = y_next

    @cute.jit
    def _copy(self, destination, source: Int64, vectors: Int32, barrier):
        """Start a copy from device memory, whose bytes complete the barrier's phase.

        The last block's slice may be so much shorter than the others' that nothing is left for its last piece.
        """
        size = cutlass.max(vectors, 0) * VECTOR_BYTES
        arch.mbarrier_arrive_and_expect_tx(barrier, size)
        if size > 0:
            arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[destination.toint(), source, size, barrier.toint()],
            )

    @cute.jit
    def _target(self, a, row: Int32):
        """The row's target; past the last row, one that is ignored."""
        y = a.ignore_index
        if row < a.rows:
            y = Int64(load(DTYPES[self.variant.target_dtype], a.target, Int64(row) * a.target_stride))
        return y

    def _is_read(self, a, y):
        return True if self.reads_all else y != a.ignore_index

    def _cap(self, a):
        return _Cap(a.softcap, 1.0 / a.softcap) if self.variant.softcap else None

    def _score(self, a, x, cap):
        """The spec's s of a logit, in fp32."""
        s = Float32(x) * a.logit_scale if self.variant.scaled else Float32(x)
        return s if cap is None else cap.value * tanh(s * cap.inverse)

    @cute.jit
    def _consume(self, a, p, first: Int32, step: Int32):
        """The other warps, or one of their two teams: rows from their pieces."""
        variant, layout = self.variant, self.layout
        inverse_core, inverse_z = self._inverse(a.core_divisor), self._inverse(a.z_divisor)
        weight_sum = Float32(a.total)
        if const_expr(variant.class_weight and variant.smoothing):
            weight_sum = load(Float32, a.class_weight_sum)
        cap = self._cap(a)
        speaks = (p.rank == 0) & (p.thread == 0)  # the one thread that writes a row's results

        position, exchanges = Int32(0), Int32(0)
        y = self._target(a, first)
        for row in cutlass.range(first, a.rows, step, unroll=1):
            y_next = self._target(a, row + step)
            if self._is_read(a, y):
                in_range = (y >= 0) & (y < a.total)
                here, local_y = self._place(a, p, y)
                target_weight, scale = Float32(1.0), Float32(1.0)
                if const_expr(not self.reads_all):
                    if a.target_weight != 0:
                        target_weight = load(Float32, a.target_weight, row)
                target_logit = Float32(0.0)
                whole = _Statistics.of_nothing()
                if const_expr(self.has_stats):
                    whole = self._statistics(a, p, cap, position, exchanges, local_y)
                    m, target_logit = whole.maximum, whole.target_logit
                    log_sum = cute.math.log(whole.sum_exp, fastmath=False)
                    exchanges += 1
                else:
                    m, log_sum = load(Float32, a.lse, row), load(Float32, a.lse, a.lse_stride + row)
                    scale = Float32(load(DTYPES[variant.upstream_dtype], a.upstream, Int64(row) * a.upstream_stride))
                    if a.token_scaling != 0:
                        slot = position % layout.slots
                        arch.mbarrier_wait(p.full + slot, (position // layout.slots) & 1)
                        target_logit = (p.target_logits + slot).load()
                if const_expr(self.reads_all):
                    if speaks:
                        store(Float32, a.lse, row, m)
                        store(Float32, a.loss, row, whole.sum_exp)
                        store(Float32, a.lse, a.lse_stride + row, target_logit - m if here else Float32(math.nan))
                        if const_expr(variant.smoothing):
                            store(Float32, a.z_loss, row, whole.weighted)
                        if const_expr(variant.predicted):
                            store(Int64, a.predicted, row, whole.best)
                else:
                    nll = log_sum - (target_logit - m)
                    t = scale if in_range else Float32(math.nan)
                    if a.token_scaling != 0:
                        t *= exp2(nll * -LOG2_E)
                    core = t * inverse_core
                    b = core * (1.0 - a.label_smoothing) * target_weight
                    d = core * a.label_smoothing / Float32(a.total)
                    lse = m + log_sum
                    if const_expr(self.has_stats):
                        if speaks:
                            loss = b * nll  # b = t (1 - e) w_y / D
                            if const_expr(variant.smoothing):
                                loss += d * (weight_sum * log_sum - whole.weighted)
                            z = t * inverse_z * (a.lse_square_scale * lse) * lse  # in this order 0 times a huge lse stays 0
                            self._write_results(a, row, loss + z, z, Int64(whole.best), m, log_sum)
                    if const_expr(self.has_grad):
                        c = b + d * weight_sum + t * inverse_z * 2.0 * a.lse_square_scale * lse
                        if const_expr(variant.scaled):
                            c, b, d = c * a.logit_scale, b * a.logit_scale, d * a.logit_scale
                        c *= exp2(-(log_sum * LOG2_E + residue(m)))
                        factor, base = base_of(m)
                        made_from = _Coefficients(factor, base, c, b, d, target_logit)
                        if const_expr(self.layout.teams == 1):
                            self._gradient(a, p, cap, row, position, local_y, made_from)
                        else:
                            self._hand_over(p, exchanges - 1, made_from)
                position += p.pieces * self.reads
            else:
                if const_expr(self.has_stats):
                    if speaks:
                        zero = Float32(0.0)
                        self._write_results(a, row, zero, zero, Int64(-1), zero, zero)
                if const_expr(self.has_grad and self.layout.teams == 1):
                    self._write_zeros(a, p, row)
            y = y_next

    def _place(self, a, p, y):
        """Whether a target is one of the row's classes, and its place in the slice: outside of that if it is in none."""
        column = y - a.start
        here = (column >= 0) & (column < a.vocab)
        return here, Int32(cutlass.select_(here, column, Int64(-1))) - p.start

    @cute.jit
    def _hand_over(self, p, count: Int32, coefficients):
        """Give the gradient of the row that is the `count`-th in the ring to the other team.

        There is an entry for each slot, and no row of the ring has none: one that is written again was read by all.
        """
        entry = count % self.layout.slots
        if p.thread == 0:
            for i in cutlass.range_constexpr(HANDED):
                (p.coefficients + entry * HANDED + i).store(coefficients[i])
            arch.mbarrier_arrive(p.known + entry)

    @cute.jit
    def _write(self, a, p, first: Int32, step: Int32):
        """The other team: gradients of rows whose statistics are known, while those of the next are made."""
        cap = self._cap(a)
        position, count = Int32(0), Int32(0)
        y = self._target(a, first)
        for row in cutlass.range(first, a.rows, step, unroll=1):
            y_next = self._target(a, row + step)
            if self._is_read(a, y):
                entry = count % self.layout.slots
                arch.mbarrier_wait(p.known + entry, (count // self.layout.slots) & 1)
                made_from = _Coefficients(*[(p.coefficients + entry * HANDED + i).load() for i in range(HANDED)])
                self._gradient(a, p, cap, row, position, self._place(a, p, y)[1], made_from)
                position += p.pieces
                count += 1
            else:
                self._write_zeros(a, p, row)
            y = y_next

    @cute.jit
    def _inverse(self, divisor: Int64):
        """1 / D, 0 for D = 0, 1 if there is none."""
        inverse = Float32(1.0)
        if divisor != 0:
            value = load(Float32, divisor)
            inverse = 1.0 / value if value != 0.0 else Float32(0.0)
        return inverse

    @cute.jit
    def _write_results(
        self, a, row: Int32, loss: Float32, z: Float32, predicted: Int64, m: Float32, log_sum: Float32
    ):  # fmt: skip
        store(Float32, a.loss, row, loss)
        if a.z_loss != 0:
            store(Float32, a.z_loss, row, z)
        if const_expr(self.variant.predicted):
            store(Int64, a.predicted, row, predicted)
        if a.lse != 0:
            store(Float32, a.lse, row, m)
            store(Float32, a.lse, a.lse_stride + row, log_sum)

    def _read(self, a, p, slot, cap):
        """The thread's scores of a piece: a list for each of its vectors."""
        scores = []
        for j in range(self.layout.vectors):
            offset = (p.thread + j * (self.layout.warps * WARP)) * self.width
            place = self._aligned(p.ring + slot * self.piece_elements + offset)
            fragment = cute.make_rmem_tensor(self.width, self.dtype)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(self.width)), fragment)
            scores.append([self._score(a, value, cap) for value in self._floats(fragment)])
        return scores

    def _aligned(self, pointer):
        """A pointer to shared memory that is known to be that of a vector; `pointer.align` would round it up at run time."""
        return cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)

    def _floats(self, fragment):
        """The elements of a register tensor in fp32."""
        if self.dtype is not cutlass.BFloat16:
            values = fragment.load().to(Float32)
            return [values[e] for e in range(self.width)]
        words = cute.recast_tensor(fragment, Int32)  # one instruction an element; the compiler's conversion takes 1.5
        pairs = [(words[i] << 16, words[i] & -65536) for i in range(self.width // 2)]
        return [float_of(half) for pair in pairs for half in pair]

    def _vector(self, p, piece, j):
        """Which vector of the slice the thread's `j`-th of a piece is."""
        return piece * self.layout.piece_vectors + j * (self.layout.warps * WARP) + p.thread

    def _class_weights(self, a, p, first, count):
        """Those of so many classes from one on, which is counted from the slice's start; without any, ones."""
        if not self.variant.class_weight:
            return [Float32(1.0)] * count
        return [load(Float32, a.class_weight, Int64(p.start + first + e)) for e in range(count)]

    def _element(self, p, slot, index):
        """One logit of a piece."""
        return (p.ring + slot * self.piece_elements + index).load()

    @cute.jit
    def _release(self, p, slot: Int32):
        """Tell the producer that this warp has read a slot.

        The copy that fills it again is asynchronous: without the fence it may overtake reads that are under way, whose data
        then are another row's.
        """
        arch.fence_view_async_shared()
        arch.sync_warp()
        if p.lane == 0:
            arch.mbarrier_arrive(p.empty + slot)

    @cute.jit
    def _statistics(self, a, p, cap, position: Int32, exchanges: Int32, local_y: Int32):
        """The row's statistics, in every thread of every block that owns it."""
        stats = _Statistics.of_nothing()
        for piece in cutlass.range(p.full_pieces, unroll=1):
            stats = self._add_piece(a, p, cap, position, piece, local_y, stats, False)
        for piece in cutlass.range(p.full_pieces, p.pieces, unroll=1):
            stats = self._add_piece(a, p, cap, position, piece, local_y, stats, True)
        return self._exchange(p, exchanges, stats)

    @cute.jit
    def _add_piece(
        self, a, p, cap, position: Int32, piece: Int32, local_y: Int32, stats, masked: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Fold a thread's part of a piece into its statistics; the target's logit falls to every thread."""
        m, base, sum_exp, weighted, weight, target_logit, best = stats
        variant, layout = self.variant, self.layout
        slot = (position + piece) % layout.slots
        arch.mbarrier_wait(p.full + slot, ((position + piece) // layout.slots) & 1)
        scores = self._read(a, p, slot, cap)
        vectors = [self._vector(p, piece, j) for j in range(layout.vectors)]
        if const_expr(masked):  # what lies behind the slice is left over from another row
            scores = [
                [cutlass.select_(vector < p.vectors, s, Float32(-math.inf)) for s in part]
                for vector, part in zip(vectors, scores, strict=True)
            ]
        flat = [s for part in scores for s in part]
        larger = arch.fmax(m, tree(arch.fmax, flat))
        if const_expr(variant.predicted):
            if larger > m:
                for j in cutlass.range_constexpr(layout.vectors - 1, -1, -1):
                    for e in cutlass.range_constexpr(self.width - 1, -1, -1):
                        index = p.start + vectors[j] * self.width + e
                        best = index if scores[j][e] == larger else best
        factor, higher = base_of(larger)
        sum_exp = sum_exp * rebased(base, higher) + tree(add, [power(s, factor, higher) for s in flat])
        if const_expr(variant.smoothing):
            weighted = moved(weighted, weight, m - larger)
            for j in cutlass.range_constexpr(layout.vectors):
                here = vectors[j] < p.vectors
                weights = self._class_weights(a, p, cutlass.min(vectors[j], p.vectors - 1) * self.width, self.width)
                terms = [w * (s - larger) for w, s in zip(weights, scores[j], strict=True)]
                weighted += cutlass.select_(here, tree(add, terms), Float32(0.0))
                weight += cutlass.select_(here, tree(add, weights), Float32(0.0))
        within = local_y - piece * self.piece_elements
        if (local_y >= 0) & (local_y < p.vectors * self.width) & (within >= 0) & (within < self.piece_elements):
            target_logit = self._score(a, self._element(p, slot, within), cap)
        if const_expr(not variant.resident):
            self._release(p, slot)
        return _Statistics(larger, higher, sum_exp, weighted, weight, target_logit, best)

    @cute.jit
    def _exchange(self, p, exchanges: Int32, stats):
        """From the statistics of threads to those of the row.

        Entries lie in two buffers in turn. A warp that sends into one again has received everything of the exchange in
        between: so every warp has sent that, and has read this buffer before.
        """
        layout = self.layout
        m, base, sum_exp, weighted, weight, target_logit, best = self._combine_warp(stats)
        buffer = p.entries + (exchanges & 1) * (self.entries * self.entry_words)
        barrier = p.arrived + (exchanges & 1)
        mine = self._aligned(buffer + (p.rank * layout.warps + p.warp) * self.entry_words)
        halves = [(bits(m), bits(sum_exp), bits(target_logit), bits(weighted)), (bits(weight), best, Int32(0), Int32(0))]
        if const_expr(layout.cluster > 1):
            if p.thread == 0:
                arch.mbarrier_arrive_and_expect_tx(barrier, self.entries * self.entry_words * 4)
            if p.lane < layout.cluster:  # a lane for each block
                for i in cutlass.range_constexpr(self.entry_words // 4):
                    arch.store_async_dsmem(self._aligned(mine + 4 * i), halves[i], barrier, p.lane)
        else:  # the same without a cluster's stores, which compute-sanitizer refuses in a cluster of one block
            if p.lane == 0:
                for i in cutlass.range_constexpr(self.entry_words):
                    (cute.recast_ptr(mine, dtype=Int32) + i).store(halves[i // 4][i % 4])
                arch.mbarrier_arrive(barrier)
        arch.mbarrier_wait(barrier, (exchanges >> 1) & 1)
        m, base, sum_exp, weighted, weight, target_logit, best = _Statistics.of_nothing()
        for i in cutlass.range_constexpr(-(-self.entries // WARP)):
            index = p.lane + i * WARP
            if index < self.entries:
                entry = buffer + index * self.entry_words
                their_m, their_sum = entry.load(), (entry + 1).load()
                target_logit = arch.fmax(target_logit, (entry + 2).load())
                larger = arch.fmax(m, their_m)
                higher = base_of(larger)[1]
                if const_expr(self.variant.wide):
                    their_weight, their_best = (entry + 4).load(), bits((entry + 5).load())
                    if (their_m > m) | ((their_m == m) & (their_best < best)):
                        best = their_best
                    weighted = moved(weighted, weight, m - larger)
                    weighted += moved((entry + 3).load(), their_weight, their_m - larger)
                    weight += their_weight
                sum_exp = sum_exp * rebased(base, higher) + their_sum * rebased(base_of(their_m)[1], higher)
                m, base = larger, higher
        m, base, sum_exp, weighted, weight, target_logit, best = self._combine_warp(
            _Statistics(m, base, sum_exp, weighted, weight, target_logit, best)
        )
        sum_exp = sum_exp * exp2(-residue(m))
        if best == NONE:  # a row that has no maximum: all NaN or all -inf
            best = Int32(0)
        return _Statistics(m, base, sum_exp, weighted, weight, arch.warp_reduction(target_logit, arch.fmax), best)

    @cute.jit
    def _combine_warp(self, stats):
        """The statistics of a warp's threads together; of the target's logit each has its own."""
        m, base, sum_exp, weighted, weight, target_logit, best = stats
        largest = arch.warp_reduction(m, arch.fmax)
        highest = base_of(largest)[1]
        sum_exp = arch.warp_reduction(sum_exp * rebased(base, highest), add)
        if const_expr(self.variant.smoothing):
            weighted = arch.warp_reduction(moved(weighted, weight, m - largest), add)
            weight = arch.warp_reduction(weight, add)
        if const_expr(self.variant.predicted):
            best = arch.warp_redux_sync(best if m == largest else Int32(NONE), "min")
        return _Statistics(largest, highest, sum_exp, weighted, weight, target_logit, best)

    @cute.jit
    def _gradient(self, a, p, cap, row: Int32, position: Int32, local_y: Int32, made_from):
        """Write the gradient of the block's slice of a row, from the pieces, which it frees.

        The target's element, too, is formed in fp32 and rounded once. The thread that wrote it as if it were another's
        writes it again, so that no thread has to ask of every element.
        """
        target_logit = made_from.target_logit
        start = position + p.pieces * (self.reads - 1)
        address = self._grad_of(a, p, row)
        vector = local_y // self.width
        mine = (local_y >= 0) & (vector < p.vectors) & (vector % (self.layout.warps * WARP) == p.thread)
        if const_expr(not self.has_stats):
            if mine:  # the gradient may be in place, but nobody else writes here
                place = Int64(row) * a.logits_stride + p.start + local_y
                target_logit = self._score(a, load(self.dtype, a.logits, place), cap)
        of_others = made_from._replace(b=Float32(0.0))
        for piece in cutlass.range(p.full_pieces, unroll=1):
            self._write_piece(a, p, cap, address, start, piece, of_others, False)
        for piece in cutlass.range(p.full_pieces, p.pieces, unroll=1):
            self._write_piece(a, p, cap, address, start, piece, of_others, True)
        if mine:
            weights = self._class_weights(a, p, local_y, 1)
            store(self.dtype, address, local_y, self._gradients([target_logit], weights, cap, made_from)[0])

    @cute.jit
    def _write_piece(
        self, a, p, cap, address: Int64, start: Int32, piece: Int32, made_from, masked: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Write the thread's part of the gradient of a piece, as if the target were not in it."""
        layout = self.layout
        slot = (start + piece) % layout.slots
        if const_expr(not self.variant.resident or self.layout.teams == 2):
            arch.mbarrier_wait(p.full + slot, ((start + piece) // layout.slots) & 1)
        scores = self._read(a, p, slot, cap)
        self._release(p, slot)
        for j in cutlass.range_constexpr(layout.vectors):
            vector = self._vector(p, piece, j)
            known = cutlass.min(vector, p.vectors - 1) if const_expr(masked) else vector
            weights = self._class_weights(a, p, known * self.width, self.width)
            out = cute.make_rmem_tensor(self.width, Float32)
            for e, value in enumerate(self._gradients(scores[j], weights, cap, made_from)):
                out[e] = value
            if const_expr(masked):
                if vector < p.vectors:
                    store_vector(self.dtype, address + Int64(vector) * VECTOR_BYTES, out)
            else:
                store_vector(self.dtype, address + Int64(vector) * VECTOR_BYTES, out)

    def _gradients(self, scores, weights, cap, made_from):
        """Of logits with these scores and class weights; b is 0 but for the target."""
        factor, base, c, b, d, _ = made_from
        gradient = [c * power(s, factor, base) - b for s in scores]
        if self.variant.smoothing:
            gradient = [g - d * w for g, w in zip(gradient, weights, strict=True)]
        if self.variant.softcap:
            ratios = [s * cap.inverse for s in scores]
            gradient = [g * (1.0 - ratio * ratio) for g, ratio in zip(gradient, ratios, strict=True)]
        return gradient

    @cute.jit
    def _write_zeros(self, a, p, row: Int32):
        zeros = cute.make_rmem_tensor(self.width, Float32)
        zeros.fill(0.0)
        address = self._grad_of(a, p, row)
        for vector in cutlass.range(p.thread, p.vectors, self.layout.warps * WARP, unroll=4):
            store_vector(self.dtype, address + Int64(vector) * VECTOR_BYTES, zeros)

    def _grad_of(self, a, p, row):
        """Address of the gradient of the block's slice of a row."""
        return a.grad + (Int64(row) * a.grad_stride + p.start) * self.itemsize


class ScaleArguments(NamedTuple):
    """Of `ScaleKernel`."""

    array: Any
    size: Any
    factor: Any


SCALE_ARGUMENT_TYPES = ScaleArguments(Int64, Int64, Int64)


class ScaleKernel:
    """Multiplies a contiguous array by a 0-D factor, in fp32, rounded once; blocks that end at once if it is 1.

    A thread loads and stores 16 bytes at a time; the elements behind the last whole vector are handled one by one.
    """

    THREADS = 512

    def __init__(self, dtype: str, factor_dtype: str) -> None:
        self.dtype, self.factor_dtype = DTYPES[dtype], DTYPES[factor_dtype]
        self.width = VECTOR_BYTES * 8 // self.dtype.width

    @cute.jit
    def __call__(self, a: ScaleArguments, blocks: Int32, stream):
        """Launch on so many blocks."""
        self.kernel(a).launch(grid=[blocks, 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: ScaleArguments):
        """Walk over the array, unless there is nothing to do."""
        factor = Float32(load(self.factor_dtype, a.factor))
        if factor != 1.0:
            self._scale(a, factor)

    @cute.jit
    def _scale(self, a, factor: Float32):
        first = arch.block_idx()[0] * self.THREADS + arch.thread_idx()[0]
        step = arch.grid_dim()[0] * self.THREADS
        vectors = Int32(a.size // self.width)
        for vector in cutlass.range(first, vectors, step, unroll=1):
            address = a.array + Int64(vector) * VECTOR_BYTES
            scaled = cute.make_rmem_tensor(self.width, Float32)
            scaled.store(vector_at(self.dtype, address).load().to(Float32) * factor)
            store_vector(self.dtype, address, scaled)
        index = Int64(vectors) * self.width + first
        if index < a.size:
            store(self.dtype, a.array, index, Float32(load(self.dtype, a.array, index)) * factor)
