"""The row kernels over a vocabulary that is split over GPUs, made of any backend's kernels for a part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import spec
from ..context import may_wait
from ..exchange import PeerRows, peer_rows
from ..options import CrossEntropyOptions
from ..spec import RowInputs, RowResults, RowStats
from . import ExchangingKernels, RowKernels

if TYPE_CHECKING:
    from ..vocab_parallel import VocabParallel


class SplitVocabulary:
    """`RowKernels` whose logits are this rank's; `rows` and `row_stats` gather everyone's statistics in one collective.

    `rows` needs none where the kernels can exchange statistics themselves, for the options that most calls have.
    """

    def __init__(self, kernels: RowKernels, split: VocabParallel) -> None:
        self.kernels, self.split = kernels, split
        self.exchanging = kernels if isinstance(kernels, ExchangingKernels) else None
        self.ahead_by_triton = getattr(kernels, "ahead_by_triton", False)

    def rows(self, logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
        """In one launch that exchanges statistics, or: statistics, the collective, loss, gradient, which read twice."""
        if self.exchanging is not None and (peers := self._peers(logits, inputs.options)) is not None:
            classes = self.split.classes
            with peers.turn(logits.shape[0]) as turn:
                own_grad = None if grad is None else grad[:, :classes]
                self.exchanging.exchanged_rows(logits[:, :classes], inputs, results, own_grad, turn)
            if grad is not None:
                grad[:, classes:] = 0
            return
        stats = self.row_stats(logits, inputs)
        made = spec.row_loss(stats, self.split.vocab_size, inputs)
        results.copy_(made)
        if grad is not None and made.lse is not None:
            self.row_grad(logits, inputs, made.lse, made.lse.new_ones(()).expand(logits.shape[0]), grad)

    def _peers(self, logits: Tensor, options: CrossEntropyOptions) -> PeerRows | None:
        """Through which kernels that can exchange this call's statistics; the same answer on every rank."""
        plain = not (options.label_smoothing or options.wants_prediction or options.use_token_scaling)
        if not plain or logits.shape[0] == 0 or self.split.has_empty_part:
            return None
        if not may_wait(logits):  # as one does where memory has to be made; and in a graph a call's tag would be every replay's
            return None
        return peer_rows(self.split.group, logits.device, logits.shape[0])

    def row_stats(self, logits: Tensor, inputs: RowInputs) -> RowStats:
        """Statistics over the whole vocabulary, the same on every rank."""
        n, own = logits.shape[0], logits[:, : self.split.classes]
        if own.shape[1]:
            stats = self.kernels.row_stats(own, inputs)
        else:
            stats = RowStats.of_nothing(n, logits, inputs.options)
        weight_sum = None
        if stats.weighted_sum is not None:
            classes = own.shape[1] if inputs.class_weight is None else inputs.class_weight.sum()
            weight_sum = torch.zeros_like(stats.maximum) + classes
        # As integers, which no copy on the way can change: class ids beyond 2^24 are no fp32 numbers.
        bits = torch.int64 if stats.maximum.dtype == torch.float64 else torch.int32
        ids = None if stats.argmax is None else (stats.argmax + inputs.start).to(bits)
        sent = (*stats._replace(argmax=ids), weight_sum)
        packed = torch.stack([part.view(bits) for part in sent if part is not None])
        arrived = iter(self.split.gather(packed).unbind(1))
        *parts, weight_sums = [None if part is None else next(arrived).view(part.dtype) for part in sent]
        return RowStats._make(parts).combine(weight_sums)

    def row_grad(self, logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
        """As of any kernels, with `lse` over the whole vocabulary; no collective. Padding gets 0."""
        classes = self.split.classes
        if inputs.options.keeps_log_p:  # here p of the target is everyone's, so it is a factor like the upstream gradient
            grad_loss = grad_loss.to(lse.dtype) * lse[2].exp()
            inputs = inputs._replace(options=replace(inputs.options, use_token_scaling=False))
        if classes:
            self.kernels.row_grad(logits[:, :classes], inputs, lse, grad_loss, grad[:, :classes])
        grad[:, classes:] = 0

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """As of any kernels."""
        self.kernels.scale_(tensor, factor)
