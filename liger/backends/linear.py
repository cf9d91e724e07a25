"""Fused linear cross entropy: the one chunk loop of every backend. The products are torch's, but for one in `ahead`.

Logits exist for one chunk of rows at a time, in one slab that its own gradient overwrites. Rows whose target is ignored
are left out of the projections where that saves work.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..context import may_wait
from ..spec import RowResults, compute_dtype
from .ahead import project_ahead, rows_ahead, sent, side_stream
from .plan import Plan, plan_for, within_memory

if TYPE_CHECKING:
    from ..call import Call, Gradients
    from ..vocab_parallel import VocabParallel
    from . import RowKernels

OVERLAPPED_FLOP = 1e11
"""From here, about 0.15 ms on an H200, two products are worth a second stream."""


def forward(call: Call, kernels: RowKernels) -> tuple[RowResults, Gradients | None, Tensor | None]:
    """Row results; unless backward makes them, the wanted gradients for an upstream gradient of 1; the rows projected."""
    return within_memory(call, functools.partial(_forward, call, kernels), gradients=call.recipe.gradient_in_forward)


def _forward(call: Call, kernels: RowKernels, plan: Plan) -> tuple[RowResults, Gradients | None, Tensor | None]:
    results, gradients, index = _run(call, kernels, plan)
    if index is not None:
        results = results.scatter(index, call.rows)
    return results, None if gradients is None else gradients.finish(), index


def _run(call: Call, kernels: RowKernels, plan: Plan) -> tuple[RowResults, GradientSums | None, Tensor | None]:
    """Results and gradients of all chunks; when it returns the logits are gone, before the gradients may be cast."""
    projection = Projection(call, plan, kernels)
    index = projection.begin()
    chunks = projection.chunks(index)
    inputs = call.row_inputs(projection.labelled)
    n = call.rows if index is None else index.shape[0]
    inputs = inputs if index is None else inputs.select(index)
    slab_like = call.input.new_empty(0, dtype=plan.gemm_dtype)
    results = RowResults.empty(n, slab_like, call.options, keep_lse=call.recipe.gradient_in_backward)
    gradients = GradientSums(call, plan, index) if call.recipe.gradient_in_forward else None
    for chunk in chunks:
        grad = None if gradients is None else chunk.logits
        kernels.rows(chunk.logits, inputs.select(chunk.span), results.narrow(chunk.span), grad)
        if gradients is not None:
            gradients.add(chunk)
    return results, gradients, index


def backward(call: Call, kernels: RowKernels, lse: Tensor, grad_loss: Tensor, index: Tensor | None) -> Gradients:
    """Gradients by projecting again, the upstream gradient of each row, `grad_loss` (N,), folded in before any sum.

    `index`: the rows that forward projected, None for all.
    """
    inputs = call.row_inputs()
    if index is not None:
        inputs, lse, grad_loss = inputs.select(index), lse[:, index], grad_loss[index]

    def write_gradient(logits: Tensor, span: slice) -> None:
        kernels.row_grad(logits, inputs.select(span), lse[:, span], grad_loss[span], logits)

    return gradients_from(call, kernels, index, write_gradient)


def gradients_from(
    call: Call, kernels: RowKernels, index: Tensor | None, write_gradient: Callable[[Tensor, slice], None]
) -> Gradients:
    """Gradients by projecting again the rows in `index`, None for all; `write_gradient` overwrites their logits.

    `kernels`: those that made the statistics of these logits, which are then projected the same way.
    """

    def run(plan: Plan) -> GradientSums:
        chunks = Projection(call, plan, kernels).chunks(index)
        gradients = GradientSums(call, plan, index)
        for chunk in chunks:
            write_gradient(chunk.logits, chunk.span)
            gradients.add(chunk)
        return gradients

    return within_memory(call, lambda plan: run(plan).finish(), gradients=True)


class Chunk(NamedTuple):
    """Some of the rows that are projected."""

    span: slice
    """Which of them."""
    input: Tensor
    """(n, H) in the GEMM's dtype. Its storage may be overwritten if the rows were gathered."""
    weight: Tensor
    """(V, H) of the head, in the GEMM's dtype."""
    logits: Tensor
    """(n, V); their gradient may overwrite them."""
    last: bool


class Projection:
    """The products of a call's rows with its head. All logits lie in one slab: the next chunk's overwrite the last one's."""

    def __init__(self, call: Call, plan: Plan, kernels: RowKernels) -> None:
        x, classes, split = call.input.detach(), _classes(call), call.options.vocab_parallel
        self.call, self.plan = call, plan
        self.input = x if split is None or not split.sequence_parallel else split.gather_tokens(x)
        self.weight = call.head.detach()[:classes].to(plan.gemm_dtype)
        self.bias = None if call.bias is None else call.bias.detach()[:classes].to(plan.gemm_dtype)
        self.slab: Tensor | None = None
        self.ahead = rows_ahead(self.weight, plan, kernels)
        self.begun = False
        """Whether the slab holds the logits of the first `ahead` rows, or of as many as there are."""
        self.labelled: Tensor | None = None
        """() int64, how many rows are labelled, if the device has counted them."""

    def begin(self) -> Tensor | None:
        """`labelled_rows` of the call; while the host waits for their number, the device projects the first of them."""
        ahead = self.ahead
        if not ahead or not may_wait(self.call.input):
            return labelled_rows(self.call, self.plan)
        labelled = _labelled(self.call)
        self.labelled = labelled.sum()
        first = torch.nonzero_static(labelled, size=ahead, fill_value=0)[:, 0]
        counted = sent(self.labelled, first[-1])
        slab = self._slab_of(ahead if self._can_grow() else min(self.plan.chunk_rows, self.call.rows))
        self._multiply_ahead(self.input[first].to(self.plan.gemm_dtype), slab[:ahead], self.labelled)
        count, last = counted()
        index = _skipping(labelled, count, self.plan)
        # Where all rows are projected, the first labelled ones have to be the first of all.
        self.begun = index is not None or last == ahead - 1
        return index

    def _can_grow(self) -> bool:
        """Whether the slab may begin with the first rows alone: two are alive while a larger one takes over.

        It may where gradients that are still to be made need more memory than that. Elsewhere the slab has its full size at
        once, however few rows are labelled.
        """
        recipe, plan = self.call.recipe, self.plan
        if not recipe.gradient_in_forward:
            return False
        gradients = plan.input_bytes * recipe.needs.input + plan.weight_bytes * recipe.needs.weight
        return self.ahead * (plan.slab_bytes // plan.chunk_rows) <= gradients

    def chunks(self, index: Tensor | None) -> Iterator[Chunk]:
        """Chunk after chunk of the rows in `index`, None for all.

        The first product is launched at once, so that the device has work while the caller allocates what it needs.
        """
        x = self.input
        n = self.call.rows if index is None else index.shape[0]
        spans, longest = list(self.plan.spans(n)), self.plan.longest(n)
        if not spans:
            return iter(())
        slab = self._slab_of(longest)
        gathered = None if index is None else x.new_empty((longest, x.shape[1]))

        def projected(span: slice) -> Chunk:
            size = span.stop - span.start
            if index is None or gathered is None:
                rows = x[span]
            else:
                rows = torch.index_select(x, 0, index[span], out=gathered[:size])
            rows, logits = rows.to(self.plan.gemm_dtype), slab[:size]
            # In two products even if nothing was projected ahead: what a row gives may not depend on whether the host waited.
            ahead = min(self.ahead, size) if span is spans[0] else 0
            if ahead and not self.begun:
                self._multiply_ahead(rows[:ahead], logits[:ahead], torch.full((), ahead, device=rows.device))
            if ahead < size:
                self._multiply(rows[ahead:], logits[ahead:])
            return Chunk(span, rows, self.weight, logits, last=span is spans[-1])

        return itertools.chain((projected(spans[0]),), map(projected, spans[1:]))

    def _slab_of(self, rows: int) -> Tensor:
        """The slab, with room for at least so many rows."""
        slab = self.slab
        if slab is None or slab.shape[0] < rows:
            slab = self.input.new_empty((rows, self.weight.shape[0]), dtype=self.plan.gemm_dtype)
            if self.slab is not None and self.begun:
                slab[: self.ahead] = self.slab[: self.ahead]
            self.slab = slab
        return slab

    def _multiply_ahead(self, rows: Tensor, logits: Tensor, count: Tensor) -> None:
        project_ahead(rows, count, self.weight, self.bias, logits)

    def _multiply(self, rows: Tensor, logits: Tensor) -> None:
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=logits)


class GradientSums:
    """The wanted gradients while chunks are added; what is not wanted is neither computed nor allocated."""

    def __init__(self, call: Call, plan: Plan, index: Tensor | None) -> None:
        x, weight, needs, split = call.input, call.head, call.recipe.needs, call.options.vocab_parallel
        self.index = index
        self.started = False
        self.parts = None
        if needs.input and split is not None and split.reduce_input_grad:
            self.parts = _InputParts(call, plan, index, split)
        new_input = x.new_empty if index is None else x.new_zeros
        self.input = new_input(x.shape) if needs.input and self.parts is None else None
        self.weight = weight.new_empty(weight.shape, dtype=plan.accum_dtype) if needs.weight else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=compute_dtype(plan.gemm_dtype)) if needs.bias else None
        self.classes = _classes(call)
        self.weight_dtype = weight.dtype
        self.bias_dtype = None if call.bias is None else call.bias.dtype

    def add(self, chunk: Chunk) -> None:
        """Add a chunk whose logits their gradient has overwritten."""
        if self.bias is not None:
            self.bias[: self.classes] += chunk.logits.sum(0, dtype=self.bias.dtype)
        if self.parts is not None:  # first and alone, so that the ranks sum it while the weight's product runs
            self.parts.add(chunk)
            self._add_weight(chunk)
        elif self.input is None or self.weight is None or self.index is not None:
            self._add_weight(chunk)
            self._add_input(chunk)
        else:
            with _side_stream(chunk) as side:
                self._add_input(chunk)
                with side:
                    self._add_weight(chunk)
        self.started = True

    def _add_weight(self, chunk: Chunk) -> None:
        if self.weight is not None:
            _accumulate(self.weight[: self.classes], chunk.logits.t(), chunk.input, first=not self.started)

    def _add_input(self, chunk: Chunk) -> None:
        if self.input is None:
            return
        grad, weight, span = chunk.logits, chunk.weight, chunk.span
        if self.index is not None:  # the gathered rows are no longer needed: reuse their storage
            rows = torch.mm(grad, weight, out=chunk.input)
            self.input.index_copy_(0, self.index[span], rows.to(self.input.dtype))
        elif self.input.dtype == grad.dtype:
            torch.mm(grad, weight, out=self.input[span])
        else:
            self.input[span] = torch.mm(grad, weight)

    def finish(self) -> Gradients:
        """(input, weight, bias), each in its tensor's dtype."""
        if self.weight is not None:
            self.weight[self.classes if self.started else 0 :] = 0
        if self.input is not None and not self.started:
            self.input.zero_()
        input = self.input if self.parts is None else self.parts.finish()
        weight = None if self.weight is None else self.weight.to(self.weight_dtype)
        bias = None if self.bias is None or self.bias_dtype is None else self.bias.to(self.bias_dtype)
        return input, weight, bias


class _InputParts:
    """The input's gradient where it is the sum of what the ranks of a split vocabulary have of it.

    One collective, begun after the last chunk's product, for the labelled rows alone; with sequence_parallel for all,
    since each rank gets its own tokens of the sum.
    """

    def __init__(self, call: Call, plan: Plan, index: Tensor | None, split: VocabParallel) -> None:
        self.like, self.index, self.split, self.everywhere = call.input, index, split, split.sequence_parallel
        n = call.rows if index is None or self.everywhere else index.shape[0]
        new = self.like.new_empty if index is None or not self.everywhere else self.like.new_zeros
        self.part = new((n, self.like.shape[1]), dtype=plan.sum_dtype)
        self.total: Callable[[], Tensor] | None = None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, as `GradientSums` does."""
        grad, weight, span = chunk.logits, chunk.weight, chunk.span
        if self.index is not None and self.everywhere:
            rows = self.part.new_empty((grad.shape[0], weight.shape[1]))
            _accumulate(rows, grad, weight, first=True)
            self.part.index_copy_(0, self.index[span], rows)
        else:
            _accumulate(self.part[span], grad, weight, first=True)
        if chunk.last:
            self.total = self.split.start_sum(self.part)

    def finish(self) -> Tensor:
        """The sum, for this rank's tokens, in the input's dtype."""
        if self.total is None:  # there was no chunk
            return torch.zeros_like(self.like)
        total = self.total().to(self.like.dtype)
        if self.index is None or self.everywhere:
            return total
        return self.like.new_zeros(self.like.shape).index_copy_(0, self.index, total)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """total += left @ right; the first overwrites it."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif _gemm_widens(left) and total.dtype == torch.float32:  # the GEMM's own fp32 output, never rounded
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=0 if first else 1, out=total)
    else:
        product = torch.mm(left, right)
        total.copy_(product) if first else total.add_(product)


@contextlib.contextmanager
def _side_stream(chunk: Chunk) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Gives a context whose kernels may run beside those launched outside it; both begin after, and end before, all others.

    The two products of a chunk's gradients fill each other's last wave of tiles: 1 to 2 % of a step at 4096 rows (one H200,
    2026-11-29). None while a graph is captured, which must not share a stream with other threads.
    """
    grad, device = chunk.logits, chunk.logits.device
    products = 2 * grad.shape[0] * grad.shape[1] * chunk.input.shape[1]
    if not grad.is_cuda or products < OVERLAPPED_FLOP or torch.cuda.is_current_stream_capturing():
        yield contextlib.nullcontext()
        return
    current, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(current)
    try:
        yield torch.cuda.stream(side)
    finally:
        current.wait_stream(side)


def _gemm_widens(tensor: Tensor) -> bool:
    """Whether a GEMM of half-precision factors can add to an fp32 matrix: cuBLAS can."""
    return tensor.device.type == "cuda" and torch.version.hip is None


def labelled_rows(call: Call, plan: Plan | None = None) -> Tensor | None:
    """Index of the rows to project, or None for all: because few are ignored, or the host may not wait for the count."""
    if not may_wait(call.input):
        return None
    labelled = _labelled(call)
    return _skipping(labelled, int(labelled.sum()), plan or plan_for(call))


def _labelled(call: Call) -> Tensor:
    """(N,) bool"""
    return call.target != call.options.ignore_index


def _skipping(labelled: Tensor, count: int, plan: Plan) -> Tensor | None:
    """Index of the labelled rows, or None if leaving the others out does not pay."""
    if not plan.skips(count):
        return None
    index = torch.nonzero_static(labelled, size=count) if labelled.is_cuda else labelled.nonzero()
    return index[:, 0]


def _classes(call: Call) -> int:
    """Rows of the weight that are classes: those behind are a split vocabulary's padding, and take no part."""
    split, weight = call.options.vocab_parallel, call.head
    return weight.shape[0] if split is None else split.classes
