"""How one fused linear cross entropy is cut up: its chunks of rows, what they need, and what to do where memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from ..options import dtype_name
from ..spec import compute_dtype

if TYPE_CHECKING:
    from ..call import Call

GEMM_ROW_TILE = 128  # GEMM kernels work on tiles of this many rows: a chunk of 1000 costs what one of 1024 does
CPU_SLAB_BYTES = 64 << 20
GPU_SLAB_BYTES = 5 << 29  # 2.5 GiB
GPU_CHUNK_ROWS = (4096, 3072, 2048)
"""On a GPU the first of these that keeps the peak within `PEAK_SHARE`, or the last. Every chunk rereads and rewrites the
weight gradient's accumulator, which shows below 2048 rows and hardly above 4096; sizes between these cost up to 10 % more,
because their products fill the GPU's last wave of tiles badly (one H200, 2026-11-29, benchmark/data/tune_chunks*_h200.csv)."""
PEAK_SHARE = 0.65
"""Of what one chunk of all rows would take."""
FEW_CHUNKS = 4
"""Up to here chunks may be summed in half precision: that multiplies one rounding's error by 1.35 at 2 chunks and 1.59 at 4
(measured as above, benchmark/data/fused_linear_cross_entropy_h200.csv; sqrt((k + 1) / 2) predicts 1.22 and 1.58)."""
SKIP_FRACTION = 1 / 16
"""Share of ignored rows from which gathering the others costs less than projecting all."""
MIB = 1 << 20

logger = logging.getLogger("liger")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one fused linear cross entropy is cut up. Bytes are those beyond the caller's tensors."""

    rows: int
    """N, ignored rows included."""
    chunk_rows: int
    """Most rows of logits alive at once."""
    chunks: int
    """Chunks when every row is labelled; ignored rows leave whole chunks out."""
    gemm_dtype: torch.dtype
    """Dtype of the projections and of the logits slab."""
    accum_dtype: torch.dtype
    """Dtype in which the weight's gradient is summed over chunks."""
    recompute: bool
    """Whether backward projects again because the gradient needs the upstream gradient first."""
    slab_bytes: int
    """The logits slab: the only one, but for a smaller one that it may take over from before there are gradients."""
    copy_bytes: int
    """The weight in the GEMM's dtype, where its own is another: alive as long as the slab."""
    input_bytes: int
    """The input's gradient."""
    weight_bytes: int
    """The weight's gradient while it is summed."""
    cast_bytes: int
    """That sum in the weight's own dtype, where it is another: made once the slab is gone."""
    ranks: int = 1
    """Among how many the vocabulary is split; bytes are those of one."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, every gradient wanted."""
        return self.needed_bytes(input=True, weight=True)

    def needed_bytes(self, *, input: bool, weight: bool) -> int:
        """Predicted peak of a pass that makes the gradients of `input` and of `weight`, or not."""
        kept = self.input_bytes * input + self.weight_bytes * weight
        return kept + max(self.slab_bytes + self.copy_bytes, self.cast_bytes * weight)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which the ranks sum the input's gradient: of few parts a half-precision one, as with few chunks."""
        return self.gemm_dtype if self.ranks <= FEW_CHUNKS else compute_dtype(self.gemm_dtype)

    def spans(self, rows: int) -> Iterator[slice]:
        """Ranges of `chunk_rows` rows, ceil(rows / chunk_rows) of them; a short rest shares with the chunk before it."""
        start, left = 0, rows
        while left > 0:
            size = min(left, self.chunk_rows)
            if size < left < 1.5 * self.chunk_rows:  # the last two: no GEMM on a handful of rows
                half = round_up(-(-left // 2), GEMM_ROW_TILE)
                size = half if half <= self.chunk_rows and left - half >= GEMM_ROW_TILE else -(-left // 2)
            yield slice(start, start + size)
            start, left = start + size, left - size

    def longest(self, rows: int) -> int:
        """Rows of the longest of `spans`; 0 if there is none."""
        return max((span.stop - span.start for span in self.spans(rows)), default=0)

    def skips(self, labelled: int) -> bool:
        """Whether leaving out the other rows pays: a chunk goes away, or enough rows do."""
        fewer_chunks = -(-labelled // self.chunk_rows) < self.chunks
        return fewer_chunks or self.rows - labelled >= max(1, self.rows * SKIP_FRACTION)

    def __str__(self) -> str:
        when = "gradients in backward" if self.recompute else "gradients in forward"
        gemm, accum = dtype_name(self.gemm_dtype), dtype_name(self.accum_dtype)
        ranks = f"input gradient summed over {self.ranks} ranks in {dtype_name(self.sum_dtype)}, " if self.ranks > 1 else ""
        return (
            f"{self.chunks} chunk{'' if self.chunks == 1 else 's'} of up to {self.chunk_rows} rows, {gemm} GEMMs, "
            f"weight gradient summed in {accum}, {ranks}{when}; "
            f"slab {self.slab_bytes / MIB:.1f} MiB, predicted peak {self.peak_bytes / MIB:.1f} MiB"
        )


def make_plan(
    shape: tuple[int, int, int],
    device_type: str,
    dtype: torch.dtype,
    *,
    chunk_size: int | None,
    accum_dtype: torch.dtype | None,
    recompute: bool,
    input_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    ranks: int = 1,
) -> Plan:
    """The plan for `shape` (N, V, H).

    Args:
        dtype: of the projections, before what the device imposes.
        recompute: whether gradients are made in backward.
        input_dtype: of the caller's input, which its gradient is returned in; None: as the projections.
        weight_dtype: likewise of the weight.
        ranks: among how many the vocabulary is split. They have to agree on the chunks, so these come from V; and one's
            logits are narrower, so that the same slab has more rows.
    """
    n, vocab, hidden = shape
    input_dtype, weight_dtype = input_dtype or dtype, weight_dtype or dtype
    # A CPU's own half-precision GEMMs are neither accurate nor fast: there everything is widened once.
    gemm_dtype = compute_dtype(dtype) if device_type == "cpu" else dtype
    default_rows = ranks * _default_chunk_rows(n, vocab, hidden, gemm_dtype.itemsize, device_type)
    chunk_rows = min(chunk_size or default_rows, max(n, 1))
    chunks = -(-n // chunk_rows)
    if accum_dtype is None:
        accum_dtype = gemm_dtype if weight_dtype == gemm_dtype and chunks <= FEW_CHUNKS else compute_dtype(gemm_dtype)
    classes = -(-vocab // ranks)
    weight_elements = classes * hidden
    return Plan(
        rows=n,
        chunk_rows=chunk_rows,
        chunks=chunks,
        gemm_dtype=gemm_dtype,
        accum_dtype=accum_dtype,
        recompute=recompute,
        slab_bytes=chunk_rows * classes * gemm_dtype.itemsize,
        copy_bytes=weight_elements * gemm_dtype.itemsize if gemm_dtype != weight_dtype else 0,
        input_bytes=n * hidden * input_dtype.itemsize,
        weight_bytes=weight_elements * accum_dtype.itemsize,
        cast_bytes=weight_elements * weight_dtype.itemsize if accum_dtype != weight_dtype else 0,
        ranks=ranks,
    )


def _default_chunk_rows(n: int, vocab: int, hidden: int, itemsize: int, device_type: str) -> int:
    if device_type == "cpu":
        rows = CPU_SLAB_BYTES // (vocab * itemsize)
    else:
        whole = n * vocab + vocab * hidden + n * hidden  # logits, and the gradients of weight and input
        fitting = [rows for rows in GPU_CHUNK_ROWS if whole - (n - rows) * vocab <= PEAK_SHARE * whole]
        rows = min((*fitting, GPU_CHUNK_ROWS[-1])[0], GPU_SLAB_BYTES // (vocab * itemsize))
    return max(1, rows if rows < GEMM_ROW_TILE else rows - rows % GEMM_ROW_TILE)


def plan_for(call: Call, chunk_size: int | None = None) -> Plan:
    """The plan of a call; with `chunk_size`, as if the caller had given that."""
    weight, split = call.head, call.options.vocab_parallel
    return make_plan(
        _shape(call),
        call.input.device.type,
        call.recipe.logits_dtype,
        chunk_size=chunk_size or call.options.chunk_size,
        accum_dtype=call.options.accum_dtype,
        recompute=call.recipe.gradient_in_backward,
        input_dtype=call.input.dtype,
        weight_dtype=weight.dtype,
        ranks=1 if split is None else split.ranks,
    )


def within_memory(call: Call, run: Callable[[Plan], Made], *, gradients: bool) -> Made:
    """`run` with the call's plan; where memory runs out and the caller gave no chunk_size, again with smaller chunks.

    What it ran out in is thrown away: a run writes to nothing but its own, and the one that fits gives what a call with that
    chunk_size gives.

    Args:
        gradients: whether `run` makes the wanted gradients.

    Raises:
        torch.OutOfMemoryError: no smaller plan needs less; the message says how many bytes this one does.
    """
    plan = plan_for(call)
    while True:
        try:
            return run(plan)
        except torch.OutOfMemoryError as error:
            failure = error
        failure.__traceback__ = None  # its frames hold the tensors of the run that failed
        smaller = _smaller(call, plan, gradients)
        if smaller is None:
            failure.args = (f"{failure}\n{_what_it_needs(call, plan, gradients)}",)
            raise failure
        if call.input.is_cuda:
            torch.cuda.empty_cache()  # smaller tensors would split the blocks of the run that failed, and lose the rest of them
        _report_smaller(_shape(call), plan.chunk_rows, smaller.chunk_rows)
        plan = smaller


def _smaller(call: Call, plan: Plan, gradients: bool) -> Plan | None:
    """The plan to go on with where memory does not suffice for `plan`, or None."""
    split, x = call.options.vocab_parallel, call.input
    agreed = split is not None and split.ranks > 1  # every rank makes the same chunks, whatever memory it has
    if call.options.chunk_size is not None or agreed or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return _needing_less(call, plan, gradients)


def _needing_less(call: Call, plan: Plan, gradients: bool) -> Plan | None:
    """The next plan that needs less memory than `plan`, or None.

    Half the rows a chunk; but not beyond `FEW_CHUNKS` before these have been tried, since the sum in fp32 that more chunks need
    may cost more than their logits save.
    """
    rows, few = plan.chunk_rows, round_up(-(-plan.rows // FEW_CHUNKS), GEMM_ROW_TILE)
    while rows > GEMM_ROW_TILE:
        half = round_up(rows // 2, GEMM_ROW_TILE)
        rows = few if half < few < rows else half
        found = plan_for(call, rows)
        if _needed(call, found, gradients) < _needed(call, plan, gradients):
            return found
    return None


def _shape(call: Call) -> tuple[int, int, int]:
    """(N, V, H)"""
    return call.rows, call.vocab, call.input.shape[1]


def _made(call: Call, gradients: bool) -> tuple[bool, bool]:
    needs = call.recipe.needs
    return gradients and needs.input, gradients and needs.weight


def _needed(call: Call, plan: Plan, gradients: bool) -> int:
    input, weight = _made(call, gradients)
    return plan.needed_bytes(input=input, weight=weight)


def _what_it_needs(call: Call, plan: Plan, gradients: bool) -> str:
    input, weight = _made(call, gradients)
    accum, gemm = dtype_name(plan.accum_dtype), dtype_name(plan.gemm_dtype)
    parts = (
        (plan.slab_bytes, f"the logits of {plan.chunk_rows} rows"),
        (plan.copy_bytes, f"weight in {gemm}"),
        (plan.input_bytes * input, "the gradient of input"),
        (plan.weight_bytes * weight, f"the gradient of weight, summed in {accum}"),
        (plan.cast_bytes * weight, "that sum in weight's dtype, after the logits are gone"),
    )
    listed = "; ".join(f"{size} for {what}" for size, what in parts if size)
    less = _needing_less(call, plan, gradients)
    if less is not None:
        ranks = " on every rank" if plan.ranks > 1 else ""
        advice = f"chunk_size={less.chunk_rows}{ranks} would need {_needed(call, less, gradients)}"
    elif call.options.chunk_size is not None:
        advice = "another chunk_size, or none, may need less"
    else:
        advice = "smaller chunks would not need less"
    return (
        f"fused_linear_cross_entropy with (N, V, H) = {_shape(call)} needs {_needed(call, plan, gradients)} bytes beyond its "
        f"arguments and the products' workspace: {listed}. {advice}"
    )


_reported: set[tuple[int, int]] = set()


def _report_smaller(shape: tuple[int, int, int], rows: int, smaller: int) -> None:
    """Say once for a head that its chunks are smaller than planned."""
    if shape[1:] not in _reported:
        _reported.add(shape[1:])
        logger.warning(
            "fused_linear_cross_entropy with (N, V, H) = %s ran out of memory with chunks of %s rows and goes on with %s; "
            "chunk_size=%s saves the attempt",
            *(shape, rows, smaller, smaller),
        )


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple
