"""Fused linear cross entropy: the one chunk loop of every backend. The projections are torch's GEMMs.

Logits exist for one chunk of rows at a time, in one slab that its own gradient overwrites. Rows whose target is ignored
are left out of the projections where that saves work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..options import dtype_name
from ..spec import RowResults, compute_dtype

if TYPE_CHECKING:
    from ..call import Call, Gradients
    from . import RowKernels

GEMM_ROW_TILE = 128  # GEMM kernels work on tiles of this many rows: a chunk of 1000 costs what one of 1024 does
CPU_SLAB_BYTES = 64 << 20
GPU_SLAB_BYTES = 2 << 30
GPU_CHUNK_ROWS = (2048, 4096)
"""On a GPU: the first while that makes few chunks, else the second. Every chunk rereads and rewrites the weight gradient's
accumulator, which shows below 2048 rows and hardly above 4096; chunks of 2816 rows were up to 10 % slower than either at
H = 2048 and 2560, and no faster at 4096 (one H200, 2026-11-29, benchmark/data/tune_chunks*_h200.csv)."""
FEW_CHUNKS = 4
"""Up to here chunks may be summed in half precision: that multiplies one rounding's error by 1.35 at 2 chunks and 1.59 at 4
(measured as above, benchmark/data/fused_linear_cross_entropy_h200.csv; sqrt((k + 1) / 2) predicts 1.22 and 1.58)."""
SKIP_FRACTION = 1 / 16
"""Share of ignored rows from which gathering the others costs less than projecting all."""
MIB = 1 << 20


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
    """The logits slab, the only one."""
    peak_bytes: int
    """Predicted peak: slab, accumulators, gradients, and copies in the GEMM's dtype; every gradient wanted."""

    def spans(self, rows: int) -> Iterator[slice]:
        """Balanced ranges of at most `chunk_rows` rows: ceil(rows / chunk_rows) of them, none much shorter than the others."""
        count = -(-rows // self.chunk_rows)
        if count == 0:
            return
        step = -(-rows // count)
        tiled = _round_up(step, GEMM_ROW_TILE)
        if tiled <= self.chunk_rows and rows - tiled * (count - 1) >= GEMM_ROW_TILE:
            step = tiled
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def skips(self, labelled: int) -> bool:
        """Whether leaving out the other rows pays: a chunk goes away, or enough rows do."""
        fewer_chunks = -(-labelled // self.chunk_rows) < self.chunks
        return fewer_chunks or self.rows - labelled >= max(1, self.rows * SKIP_FRACTION)

    def __str__(self) -> str:
        when = "gradients in backward" if self.recompute else "gradients in forward"
        gemm, accum = dtype_name(self.gemm_dtype), dtype_name(self.accum_dtype)
        return (
            f"{self.chunks} chunk{'' if self.chunks == 1 else 's'} of up to {self.chunk_rows} rows, {gemm} GEMMs, "
            f"weight gradient summed in {accum}, {when}; "
            f"slab {self.slab_bytes / MIB:.1f} MiB, predicted peak {self.peak_bytes / MIB:.1f} MiB"
        )


def make_plan(
    shape: tuple[int, int, int],
    device_type: str,
    dtype: torch.dtype,
    *,
    weight_dtype: torch.dtype,
    chunk_size: int | None,
    accum_dtype: torch.dtype | None,
    recompute: bool,
) -> Plan:
    """The plan for `shape` (N, V, H).

    Args:
        dtype: of the projections, before what the device imposes.
        weight_dtype: of the caller's weight, which its gradient is returned in.
        recompute: whether gradients are made in backward.
    """
    n, vocab, hidden = shape
    # A CPU's own half-precision GEMMs are neither accurate nor fast: there everything is widened once.
    gemm_dtype = compute_dtype(dtype) if device_type == "cpu" else dtype
    row_bytes = vocab * gemm_dtype.itemsize
    chunk_rows = min(chunk_size or _default_chunk_rows(n, row_bytes, device_type), max(n, 1))
    chunks = -(-n // chunk_rows)
    if accum_dtype is None:
        accum_dtype = gemm_dtype if weight_dtype == gemm_dtype and chunks <= FEW_CHUNKS else compute_dtype(gemm_dtype)
    slab_bytes = chunk_rows * row_bytes
    weight_elements = vocab * hidden
    grad_bytes = n * hidden * dtype.itemsize + weight_elements * accum_dtype.itemsize
    copy_bytes = weight_elements * gemm_dtype.itemsize if gemm_dtype != weight_dtype else 0
    cast_bytes = weight_elements * weight_dtype.itemsize if accum_dtype != weight_dtype else 0
    peak_bytes = grad_bytes + max(slab_bytes + copy_bytes, cast_bytes)
    return Plan(n, chunk_rows, chunks, gemm_dtype, accum_dtype, recompute, slab_bytes, peak_bytes)


def _default_chunk_rows(n: int, row_bytes: int, device_type: str) -> int:
    if device_type == "cpu":
        rows = CPU_SLAB_BYTES // row_bytes
    else:
        small, large = GPU_CHUNK_ROWS
        rows = min(small if n <= FEW_CHUNKS * small else large, GPU_SLAB_BYTES // row_bytes)
    return max(1, rows if rows < GEMM_ROW_TILE else rows - rows % GEMM_ROW_TILE)


def plan_for(call: Call) -> Plan:
    """The plan of a call."""
    weight = _present(call.weight)
    return make_plan(
        (call.rows, call.vocab, call.input.shape[1]),
        call.input.device.type,
        call.recipe.logits_dtype,
        weight_dtype=weight.dtype,
        chunk_size=call.options.chunk_size,
        accum_dtype=call.options.accum_dtype,
        recompute=call.recipe.gradient_in_backward,
    )


def forward(call: Call, kernels: RowKernels) -> tuple[RowResults, Gradients | None]:
    """Row results and, unless backward makes them, the wanted gradients for an upstream gradient of 1."""
    plan = plan_for(call)
    inputs = call.row_inputs()  # launched before the host waits for the count, so that the device has work meanwhile
    index = _labelled_rows(call, plan)
    n = call.rows if index is None else index.shape[0]
    inputs = inputs if index is None else inputs.select(index)
    slab_like = call.input.new_empty(0, dtype=plan.gemm_dtype)
    results = RowResults.empty(n, slab_like, call.options, keep_lse=call.recipe.gradient_in_backward)
    gradients = GradientSums(call, plan, index) if call.recipe.gradient_in_forward else None

    def rows(logits: Tensor, span: slice) -> None:
        grad = None if gradients is None else logits
        kernels.rows(logits, inputs.select(span), results.narrow(span), grad)

    project(call, plan, index, rows, gradients)
    if index is not None:
        results = results.scatter(index, call.rows)
    return results, None if gradients is None else gradients.finish()


def backward(call: Call, kernels: RowKernels, lse: Tensor, grad_loss: Tensor) -> Gradients:
    """Gradients by projecting again, the upstream gradient of each row, `grad_loss` (N,), folded in before any sum."""
    plan = plan_for(call)
    inputs = call.row_inputs()
    index = _labelled_rows(call, plan)
    if index is not None:
        inputs, lse, grad_loss = inputs.select(index), lse[:, index], grad_loss[index]
    gradients = GradientSums(call, plan, index)

    def rows(logits: Tensor, span: slice) -> None:
        kernels.row_grad(logits, inputs.select(span), lse[:, span], grad_loss[span], logits)

    project(call, plan, index, rows, gradients)
    return gradients.finish()


def project(
    call: Call,
    plan: Plan,
    index: Tensor | None,
    rows: Callable[[Tensor, slice], None],
    gradients: GradientSums | None,
) -> None:
    """Run `rows` on the logits of each chunk in turn and, with `gradients`, add what it turned them into."""
    x, weight = call.input.detach(), _present(call.weight).detach().to(plan.gemm_dtype)
    bias = None if call.bias is None else call.bias.detach().to(plan.gemm_dtype)
    spans = list(plan.spans(call.rows if index is None else index.shape[0]))
    if not spans:
        return
    longest = max(span.stop - span.start for span in spans)
    slab = x.new_empty((longest, weight.shape[0]), dtype=plan.gemm_dtype)
    gathered = None if index is None else x.new_empty((longest, x.shape[1]))
    for span in spans:
        size = span.stop - span.start
        if index is None or gathered is None:
            chunk = x[span]
        else:
            chunk = torch.index_select(x, 0, index[span], out=gathered[:size])
        chunk, logits = chunk.to(plan.gemm_dtype), slab[:size]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        rows(logits, span)
        if gradients is not None:
            gradients.add(logits, chunk, weight, span)


class GradientSums:
    """The wanted gradients while chunks are added; what is not wanted is neither computed nor allocated."""

    def __init__(self, call: Call, plan: Plan, index: Tensor | None) -> None:
        x, weight, needs = call.input, _present(call.weight), call.recipe.needs
        vocab, hidden = weight.shape
        self.index = index
        self.started = False
        new_input = x.new_empty if index is None else x.new_zeros
        self.input = new_input(x.shape) if needs.input else None
        self.weight = weight.new_empty((vocab, hidden), dtype=plan.accum_dtype) if needs.weight else None
        self.bias = weight.new_zeros(vocab, dtype=compute_dtype(plan.gemm_dtype)) if needs.bias else None
        self.weight_dtype = weight.dtype
        self.bias_dtype = None if call.bias is None else call.bias.dtype

    def add(self, grad: Tensor, chunk: Tensor, weight: Tensor, span: slice) -> None:
        """Add a chunk: `grad` (n, V) of its logits, `chunk` (n, H) its input (whose storage may be overwritten if gathered)."""
        if self.weight is not None:
            _accumulate(self.weight, grad, chunk, first=not self.started)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.input is not None:
            if self.index is not None:  # the gathered chunk is no longer needed: reuse its storage
                rows = torch.mm(grad, weight, out=chunk)
                self.input.index_copy_(0, self.index[span], rows.to(self.input.dtype))
            elif self.input.dtype == grad.dtype:
                torch.mm(grad, weight, out=self.input[span])
            else:
                self.input[span] = torch.mm(grad, weight)
        self.started = True

    def finish(self) -> Gradients:
        """(input, weight, bias), each in its tensor's dtype."""
        if self.weight is not None and not self.started:
            self.weight.zero_()
        if self.input is not None and not self.started:
            self.input.zero_()
        weight = None if self.weight is None else self.weight.to(self.weight_dtype)
        bias = None if self.bias is None or self.bias_dtype is None else self.bias.to(self.bias_dtype)
        return self.input, weight, bias


def _accumulate(total: Tensor, grad: Tensor, chunk: Tensor, *, first: bool) -> None:
    """total (V, H) += grad (n, V) transposed @ chunk (n, H); the first chunk overwrites it."""
    if total.dtype == grad.dtype:
        if first:
            torch.mm(grad.t(), chunk, out=total)
        else:
            total.addmm_(grad.t(), chunk)
    elif _gemm_widens(grad) and total.dtype == torch.float32:  # the GEMM's own fp32 output, never rounded
        torch.addmm(total, grad.t(), chunk, out_dtype=torch.float32, beta=0 if first else 1, out=total)
    else:
        product = torch.mm(grad.t(), chunk)
        total.copy_(product) if first else total.add_(product)


def _gemm_widens(tensor: Tensor) -> bool:
    """Whether a GEMM of half-precision factors can add to an fp32 matrix: cuBLAS can."""
    return tensor.device.type == "cuda" and torch.version.hip is None


def _labelled_rows(call: Call, plan: Plan) -> Tensor | None:
    """Index of the rows to project, or None for all: because few are ignored, or the host may not wait for the count."""
    if not call.may_sync:
        return None
    index = (call.target != call.options.ignore_index).nonzero()[:, 0]
    return index if plan.skips(index.shape[0]) else None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("fused linear cross entropy was called without a weight")
    return tensor
