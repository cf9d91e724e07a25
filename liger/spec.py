r"""The mathematics, once: plain torch, no host sync; float64 in gives float64 out, anything else computes in float32.

For one row with logits \(x\), target \(y\), class weights \(w\) (1 if absent), vocabulary size \(V\),
\(e\) = `label_smoothing`, \(k\) = `lse_square_scale`, \(c\) = `softcap` and \(l\) = `logit_scale`:

$$
\begin{aligned}
s_v &= c \tanh(l\, x_v / c) \quad (s = l\, x \text{ without softcap}) \\
\mathrm{lse} &= \log \textstyle\sum_v e^{s_v}, \qquad p_v = e^{s_v - \mathrm{lse}} \\
\mathrm{core} &= (1-e)\, w_y (\mathrm{lse} - s_y) + \tfrac{e}{V} \textstyle\sum_v w_v (\mathrm{lse} - s_v) \\
z &= k\, \mathrm{lse}^2 \\
t &= \mathrm{stop\_gradient}(p_y) \text{ with use\_token\_scaling, else } 1 \\
\mathrm{loss} &= t\, (\mathrm{core} / D + z / M)
\end{aligned}
$$

mean: \(D\) is the sum of \(w_y\) over valid rows and \(M\) the number of valid rows, or both are `num_items` where that is
given; sum and none: \(D = M = 1\).
A row is valid when its target differs from `ignore_index`. Where \(D\) or \(M\) is 0 that term is 0.

$$
\begin{aligned}
\frac{\partial\, \mathrm{core}}{\partial s_v} &= (1-e)\, w_y (p_v - [v=y])
    + \tfrac{e}{V} \big(p_v \textstyle\sum_u w_u - w_v\big) \\
\frac{\partial z}{\partial s_v} &= 2 k\, \mathrm{lse}\; p_v, \qquad
\frac{\partial s_v}{\partial x_v} = l\, (1 - (s_v / c)^2)
\end{aligned}
$$

so that a row's gradient is \((a\, p_v - b\, [v=y] - d\, w_v)(1 - (s_v/c)^2)\) with three coefficients per row,
\(l\) among their factors.

\(\mathrm{lse} - s_y\) is formed as \(\log \sum_v e^{s_v - m} - (s_y - m)\) with \(m = \max_v s_v\), and the pair
\((m, \log \sum_v e^{s_v - m})\) is what is kept of a row: their sum would lose the loss's digits in a large common offset.
A valid row whose target lies outside \([0, V)\) has NaN loss and NaN gradient.

Cross entropy and label smoothing follow `torch.nn.functional.cross_entropy`; the z-loss is that of PaLM
(Chowdhery et al. 2022, section 5); the soft cap that of Gemma 2 (2024, section 2).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .options import CrossEntropyOptions, CrossEntropyOutput


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses, statistics and gradients of `dtype` tensors are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Divisors(NamedTuple):
    """D and M of the mean, as 0-D tensors on the device, so that nothing waits for a count."""

    core: Tensor
    z: Tensor


class RowInputs(NamedTuple):
    """What the row kernels need beside the logits. n rows; V vocabulary, of which the logits may cover a part."""

    target: Tensor
    """(n,) int64 or int32, any stride; ids of the whole vocabulary."""
    options: CrossEntropyOptions
    divisors: Divisors | None = None
    """None: both are 1."""
    class_weight: Tensor | None = None
    """Of the classes that the logits cover, in the compute dtype, contiguous."""
    class_weight_sum: Tensor | None = None
    """0-D sum of the class weights of the whole vocabulary, with label smoothing."""
    target_weight: Tensor | None = None
    """(n,) w_y, contiguous: the target's class may lie in another part; given when `class_weight` is."""
    start: int = 0
    """Id of the first class that the logits cover."""
    vocab: int | None = None
    """V; None: the logits cover all of it."""

    def select(self, rows: slice | Tensor) -> RowInputs:
        """The same inputs for a slice, or an index, of the rows."""
        weight = None if self.target_weight is None else self.target_weight[rows]
        return self._replace(target=self.target[rows], target_weight=weight)


class RowResults(NamedTuple):
    """What the row kernels write, one element per row; None where nobody wants it."""

    loss: Tensor
    """(n,) compute dtype, divided by D and M; 0 where ignored."""
    z_loss: Tensor | None
    """(n,) compute dtype, the z part of `loss`."""
    predicted: Tensor | None
    """(n,) int64, the arg max; -1 where ignored."""
    lse: Tensor | None
    """(2, n) compute dtype: the row's maximum m, and log sum exp(s - m). With use_token_scaling over a vocabulary that is
    split over GPUs (3, n): log p_y as well, which only one of them could find again."""

    @staticmethod
    def empty(n: int, like: Tensor, options: CrossEntropyOptions, keep_lse: bool) -> RowResults:
        """Uninitialised results of n rows on the device of `like`."""
        new = like.new_empty
        dtype = compute_dtype(like.dtype)
        return RowResults(
            loss=new(n, dtype=dtype),
            z_loss=new(n, dtype=dtype) if options.return_z_loss else None,
            predicted=new(n, dtype=torch.int64) if options.wants_prediction else None,
            lse=new(2 + options.keeps_log_p, n, dtype=dtype) if keep_lse else None,
        )

    def copy_(self, rows: RowResults) -> None:
        """Take over what is wanted of the same rows."""
        for into, value in zip(self, rows, strict=True):
            if into is not None and value is not None:
                into.copy_(value)

    def narrow(self, rows: slice) -> RowResults:
        """Views of a range of the rows."""

        def part(rows_of: Tensor | None) -> Tensor | None:
            return None if rows_of is None else rows_of[..., rows]

        return RowResults(self.loss[rows], part(self.z_loss), part(self.predicted), part(self.lse))

    def scatter(self, index: Tensor, n: int) -> RowResults:
        """The results of n rows, of which only those in `index` were computed."""

        def spread(part: Tensor | None, fill: int) -> Tensor | None:
            if part is None:
                return None
            return part.new_full((*part.shape[:-1], n), fill).index_copy_(-1, index, part)

        loss = self.loss.new_zeros(n).index_copy_(0, index, self.loss)
        return RowResults(loss, spread(self.z_loss, 0), spread(self.predicted, -1), spread(self.lse, 0))


class RowStats(NamedTuple):
    """Statistics of rows over a range of the vocabulary: they combine across ranges, so a vocabulary may be split."""

    maximum: Tensor
    """(n,) m, the largest s; the lowest finite number if all are -inf, so that such a range carries no mass."""
    sum_exp: Tensor
    """(n,) sum of exp(s - m)."""
    target_logit: Tensor
    """(n,) s_y - m; NaN where the target is not in the range."""
    weighted_sum: Tensor | None
    """(n,) sum of w_v (s_v - m), only with label smoothing."""
    argmax: Tensor | None
    """(n,) int64, only when a prediction is wanted; the lowest index wins ties."""

    @property
    def lse(self) -> Tensor:
        """(2, n): m and log sum exp(s - m)."""
        return torch.stack((self.maximum, self.sum_exp.log()))

    @staticmethod
    def of_nothing(n: int, like: Tensor, options: CrossEntropyOptions) -> RowStats:
        """Statistics of n rows over an empty range, on the device of `like`: they change no others."""
        new, dtype = like.new_full, compute_dtype(like.dtype)
        return RowStats(
            maximum=new((n,), torch.finfo(dtype).min, dtype=dtype),
            sum_exp=new((n,), 0, dtype=dtype),
            target_logit=new((n,), torch.nan, dtype=dtype),
            weighted_sum=new((n,), 0, dtype=dtype) if options.label_smoothing else None,
            argmax=new((n,), 0, dtype=torch.int64) if options.wants_prediction else None,
        )

    def combine(self, weight_sum: Tensor | None) -> RowStats:
        """Statistics over the whole vocabulary from those of its ranges, which are (ranges, n) here.

        Args:
            weight_sum: (ranges, n) sum of the class weights of each range, with label smoothing.
        """
        maximum = self.maximum.amax(0)
        shift = self.maximum - maximum
        target_logit = functools.reduce(torch.fmax, (self.target_logit + shift).unbind(0))  # the one that is not NaN
        weighted_sum = argmax = None
        if self.weighted_sum is not None and weight_sum is not None:
            moved = torch.where(weight_sum != 0, weight_sum * shift, 0)  # an empty range is infinitely far below
            weighted_sum = (self.weighted_sum + moved).sum(0)
        if self.argmax is not None:
            argmax = torch.where(shift == 0, self.argmax.long(), torch.iinfo(torch.int64).max).amin(0)
            argmax = torch.where(maximum.isnan(), 0, argmax)  # where nothing is the largest
        return RowStats(maximum, (self.sum_exp * shift.exp()).sum(0), target_logit, weighted_sum, argmax)


def divisors(
    target: Tensor,
    class_weight: Tensor | None,
    options: CrossEntropyOptions,
    dtype: torch.dtype,
    num_items: Tensor | None = None,
    labelled: Tensor | None = None,
) -> Divisors | None:
    """D and M for the mean; None for the other reductions.

    Args:
        target: (N,).
        class_weight: (V,) or None.
        num_items: () or None.
        labelled: () number of valid rows, if it has been counted.
    """
    if options.reduction != "mean":
        return None
    if num_items is not None:  # its value is on the device: nobody could refuse one that is no count, so it shows
        items = num_items.to(dtype)
        items = torch.where((items >= 0) & (items < torch.inf), items, torch.nan)
        return Divisors(items, items)
    if class_weight is None:
        count = (target != options.ignore_index).sum(dtype=dtype) if labelled is None else labelled.to(dtype)
        return Divisors(count, count)
    valid = target != options.ignore_index
    _, in_range = _safe_index(target, class_weight.shape[0])
    mass = torch.where(valid & in_range, target_weight(target, class_weight), 0)
    return Divisors(mass.sum(dtype=dtype), valid.sum(dtype=dtype))


def target_weight(target: Tensor, class_weight: Tensor) -> Tensor:
    """(N,) w_y of each row; any number where the target is out of range. `class_weight` (V,) of the whole vocabulary."""
    return class_weight[_safe_index(target, class_weight.shape[0])[0]]


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    """Statistics of each row over the classes that `logits` (n, classes) cover."""
    s = scores(logits, inputs.options)
    index, in_range = _safe_index(inputs.target, s.shape[1], inputs.start)
    if inputs.options.wants_prediction:
        argmax = s.argmax(-1)
        maximum = s.gather(1, argmax[:, None])[:, 0]
    else:
        argmax, maximum = None, s.amax(-1)
    maximum = maximum.clamp(min=torch.finfo(maximum.dtype).min)
    shifted = s - maximum[:, None]
    target_logit = torch.where(in_range, shifted.gather(1, index[:, None])[:, 0], torch.nan)
    weighted_sum = None
    if inputs.options.label_smoothing:
        w = inputs.class_weight
        weighted_sum = shifted.sum(-1) if w is None else (shifted * w).sum(-1)
    return RowStats(maximum, shifted.exp_().sum(-1), target_logit, weighted_sum, argmax)


def row_loss(stats: RowStats, vocab: int, inputs: RowInputs) -> RowResults:
    """Loss, z-loss, prediction and lse of each row from its statistics over the whole vocabulary."""
    options = inputs.options
    valid = inputs.target != options.ignore_index
    log_sum = stats.sum_exp.log()
    nll = log_sum - stats.target_logit
    core = (1 - options.label_smoothing) * _target_weight(inputs) * nll
    if stats.weighted_sum is not None:
        core = core + options.label_smoothing / vocab * (_weight_sum(inputs, vocab) * log_sum - stats.weighted_sum)
    inverse = _inverse_divisors(inputs.divisors)
    t = torch.exp(-nll) if options.use_token_scaling else 1.0
    loss, z_loss = torch.where(valid, t * inverse.core * core, 0), None
    if options.lse_square_scale or options.return_z_loss:
        lse = stats.maximum + log_sum
        z = (options.lse_square_scale * lse) * lse  # in this order 0 times a huge lse stays 0
        z_loss = torch.where(valid, t * inverse.z * z, 0)
        loss = loss + z_loss
    kept = (stats.maximum, log_sum, -nll) if options.keeps_log_p else (stats.maximum, log_sum)
    return RowResults(
        loss=loss,
        z_loss=z_loss if options.return_z_loss else None,
        predicted=None if stats.argmax is None else torch.where(valid, stats.argmax, -1),
        lse=torch.stack(kept),
    )


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor | None = None) -> Tensor:
    """Gradient of (the sum of) the rows' losses with respect to the logits, in the compute dtype.

    Args:
        logits: (n, classes).
        inputs: of the same n rows.
        lse: as in `RowResults`, over the whole vocabulary.
        grad_loss: (n,) upstream gradient of each row's loss; None is 1.
    """
    options, vocab = inputs.options, inputs.vocab or logits.shape[1]
    e, k = options.label_smoothing, options.lse_square_scale
    s = scores(logits, options)
    index, here = _safe_index(inputs.target, logits.shape[1], inputs.start)
    _, in_range = _safe_index(inputs.target, vocab)
    valid = inputs.target != options.ignore_index
    inverse = _inverse_divisors(inputs.divisors)

    p = (s - lse[0][:, None]).sub_(lse[1][:, None]).exp_()
    t = p.gather(1, index[:, None])[:, 0] if options.use_token_scaling else torch.ones_like(lse[0])
    if grad_loss is not None:
        t = t * grad_loss.to(t.dtype)
    if options.logit_scale != 1:
        t = t * options.logit_scale
    t = torch.where(in_range, t, torch.nan)
    b = t * inverse.core * (1 - e) * _target_weight(inputs)
    d = t * inverse.core * (e / vocab)
    a = b + d * _weight_sum(inputs, vocab) + t * inverse.z * (2 * k) * (lse[0] + lse[1])

    grad = p.mul_(a[:, None]).scatter_add_(1, index[:, None], torch.where(here, -b, 0)[:, None])
    if e:
        grad -= d[:, None] if inputs.class_weight is None else d[:, None] * inputs.class_weight
    if options.softcap is not None:
        grad *= 1 - (s / options.softcap) ** 2
    return grad.masked_fill_(~valid[:, None], 0)


def reduce(results: RowResults, target: Tensor, options: CrossEntropyOptions, loss_dtype: torch.dtype) -> CrossEntropyOutput:
    """What the caller sees, from what the rows hold: summed in the compute dtype, rounded once. `target` (N,)."""
    keep_rows = options.reduction == "none"

    def fold(rows: Tensor) -> Tensor:
        return (rows if keep_rows else rows.sum()).to(loss_dtype)

    accuracy = None
    if options.return_token_accuracy:
        valid = target != options.ignore_index
        hit = (results.predicted == target) & valid
        accuracy = hit.float() if keep_rows else hit.sum() / valid.sum().clamp(min=1)
    return CrossEntropyOutput(
        loss=fold(results.loss),
        z_loss=None if results.z_loss is None else fold(results.z_loss),
        token_accuracy=accuracy,
        predicted_tokens=results.predicted if options.return_predicted_tokens else None,
    )


def scores(logits: Tensor, options: CrossEntropyOptions) -> Tensor:
    """s, in the compute dtype: logits after scale and soft cap."""
    x = logits.to(compute_dtype(logits.dtype))
    if options.logit_scale != 1:
        x = x * options.logit_scale
    return x if options.softcap is None else torch.tanh(x / options.softcap).mul_(options.softcap)


def _safe_index(target: Tensor, classes: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Int64 columns of the targets among classes [start, start + classes), never others, and where there was one."""
    column = target.long() - start if start else target
    in_range = (column >= 0) & (column < classes)
    return torch.where(in_range, column, 0).long(), in_range


def _target_weight(inputs: RowInputs) -> Tensor | float:
    return 1.0 if inputs.target_weight is None else inputs.target_weight


def _weight_sum(inputs: RowInputs, vocab: int) -> Tensor | float:
    return vocab if inputs.class_weight_sum is None else inputs.class_weight_sum


class _Inverse(NamedTuple):
    core: Tensor | float
    z: Tensor | float


def _inverse_divisors(divisors: Divisors | None) -> _Inverse:
    if divisors is None:
        return _Inverse(1.0, 1.0)
    core = _inverse(divisors.core)
    return _Inverse(core, core if divisors.z is divisors.core else _inverse(divisors.z))


def _inverse(divisor: Tensor) -> Tensor:
    return torch.where(divisor != 0, 1 / divisor, 0)
