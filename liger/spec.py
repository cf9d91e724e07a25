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
    """What the row kernels need beside the logits. n rows; V vocabulary."""

    target: Tensor
    """(n,) int64 or int32, any stride."""
    options: CrossEntropyOptions
    divisors: Divisors | None = None
    """None: both are 1."""
    class_weight: Tensor | None = None
    """(V,) in the compute dtype, contiguous."""
    class_weight_sum: Tensor | None = None
    """0-D sum of `class_weight`."""

    def select(self, rows: slice | Tensor) -> RowInputs:
        """The same inputs for a slice, or an index, of the rows."""
        return self._replace(target=self.target[rows])


class RowResults(NamedTuple):
    """What the row kernels write, one element per row; None where nobody wants it."""

    loss: Tensor
    """(n,) compute dtype, divided by D and M; 0 where ignored."""
    z_loss: Tensor | None
    """(n,) compute dtype, the z part of `loss`."""
    predicted: Tensor | None
    """(n,) int64, the arg max; -1 where ignored."""
    lse: Tensor | None
    """(2, n) compute dtype: the row's maximum m, and log sum exp(s - m)."""

    @staticmethod
    def empty(n: int, like: Tensor, options: CrossEntropyOptions, keep_lse: bool) -> RowResults:
        """Uninitialised results of n rows on the device of `like`."""
        new = like.new_empty
        dtype = compute_dtype(like.dtype)
        return RowResults(
            loss=new(n, dtype=dtype),
            z_loss=new(n, dtype=dtype) if options.return_z_loss else None,
            predicted=new(n, dtype=torch.int64) if options.wants_prediction else None,
            lse=new(2, n, dtype=dtype) if keep_lse else None,
        )

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
    """(n,) m, the largest s."""
    sum_exp: Tensor
    """(n,) sum of exp(s - m)."""
    target_logit: Tensor
    """(n,) s_y - m; NaN where the target is out of range."""
    weighted_sum: Tensor | None
    """(n,) sum of w_v (s_v - m), only with label smoothing."""
    argmax: Tensor | None
    """(n,) int64, only when a prediction is wanted; the lowest index wins ties."""

    @property
    def lse(self) -> Tensor:
        """(2, n): m and log sum exp(s - m)."""
        return torch.stack((self.maximum, self.sum_exp.log()))


def divisors(
    target: Tensor,
    class_weight: Tensor | None,
    options: CrossEntropyOptions,
    dtype: torch.dtype,
    num_items: Tensor | None = None,
) -> Divisors | None:
    """D and M for the mean; None for the other reductions. `target` (N,), `class_weight` (V,) and `num_items` () or None."""
    if options.reduction != "mean":
        return None
    if num_items is not None:  # its value is on the device: nobody could refuse one that is no count, so it shows
        items = num_items.to(dtype)
        items = torch.where((items >= 0) & (items < torch.inf), items, torch.nan)
        return Divisors(items, items)
    valid = target != options.ignore_index
    count = valid.sum(dtype=dtype)
    if class_weight is None:
        return Divisors(count, count)
    index, in_range = _safe_index(target, class_weight.shape[0])
    mass = torch.where(valid & in_range, class_weight[index], 0)
    return Divisors(mass.sum(dtype=dtype), count)


def row_stats(logits: Tensor, inputs: RowInputs) -> RowStats:
    """Statistics of each row. `logits` (n, V)."""
    s = scores(logits, inputs.options)
    index, in_range = _safe_index(inputs.target, s.shape[1])
    if inputs.options.wants_prediction:
        argmax = s.argmax(-1)
        maximum = s.gather(1, argmax[:, None])[:, 0]
    else:
        argmax, maximum = None, s.amax(-1)
    shifted = s - maximum[:, None]
    target_logit = torch.where(in_range, shifted.gather(1, index[:, None])[:, 0], torch.nan)
    weighted_sum = None
    if inputs.options.label_smoothing:
        w = inputs.class_weight
        weighted_sum = shifted.sum(-1) if w is None else shifted @ w
    return RowStats(maximum, shifted.exp_().sum(-1), target_logit, weighted_sum, argmax)


def row_loss(stats: RowStats, vocab: int, inputs: RowInputs) -> RowResults:
    """Loss, z-loss, prediction and lse of each row from its statistics over the whole vocabulary."""
    options = inputs.options
    valid = inputs.target != options.ignore_index
    log_sum = stats.sum_exp.log()
    nll = log_sum - stats.target_logit
    core = (1 - options.label_smoothing) * _target_weight(inputs, vocab) * nll
    if stats.weighted_sum is not None:
        core = core + options.label_smoothing / vocab * (_weight_sum(inputs, vocab) * log_sum - stats.weighted_sum)
    lse = stats.maximum + log_sum
    z = (options.lse_square_scale * lse) * lse  # in this order 0 times a huge lse stays 0
    inverse = _inverse_divisors(inputs.divisors)
    t = torch.exp(-nll) if options.use_token_scaling else 1.0
    z_loss = torch.where(valid, t * z * inverse.z, 0)
    return RowResults(
        loss=torch.where(valid, t * core * inverse.core, 0) + z_loss,
        z_loss=z_loss if options.return_z_loss else None,
        predicted=None if stats.argmax is None else torch.where(valid, stats.argmax, -1),
        lse=stats.lse,
    )


def row_grad(logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor | None = None) -> Tensor:
    """Gradient of (the sum of) the rows' losses with respect to the logits, in the compute dtype.

    Args:
        logits: (n, V).
        inputs: of the same n rows.
        lse: (2, n) as in `RowResults`.
        grad_loss: (n,) upstream gradient of each row's loss; None is 1.
    """
    options, vocab = inputs.options, logits.shape[1]
    e, k = options.label_smoothing, options.lse_square_scale
    s = scores(logits, options)
    index, in_range = _safe_index(inputs.target, vocab)
    valid = inputs.target != options.ignore_index
    inverse = _inverse_divisors(inputs.divisors)

    p = (s - lse[0][:, None]).sub_(lse[1][:, None]).exp_()
    t = p.gather(1, index[:, None])[:, 0] if options.use_token_scaling else torch.ones_like(lse[0])
    if grad_loss is not None:
        t = t * grad_loss.to(t.dtype)
    if options.logit_scale != 1:
        t = t * options.logit_scale
    t = torch.where(in_range, t, torch.nan)
    target_weight = _target_weight(inputs, vocab)
    b = t * inverse.core * (1 - e) * target_weight
    d = t * inverse.core * (e / vocab)
    a = b + d * _weight_sum(inputs, vocab) + t * inverse.z * (2 * k) * (lse[0] + lse[1])

    grad = p.mul_(a[:, None]).scatter_add_(1, index[:, None], -b[:, None])
    if e:
        grad -= d[:, None] if inputs.class_weight is None else d[:, None] * inputs.class_weight
    if options.softcap is not None:
        grad *= 1 - (s / options.softcap) ** 2
    return grad.masked_fill_(~valid[:, None], 0)


def reduce(
    results: RowResults, target: Tensor, options: CrossEntropyOptions, loss_dtype: torch.dtype
) -> CrossEntropyOutput:
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


def _safe_index(target: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """An int64 index that never leaves [0, V), and where the target was in range by itself."""
    in_range = (target >= 0) & (target < vocab)
    return torch.where(in_range, target, 0).long(), in_range


def _target_weight(inputs: RowInputs, vocab: int) -> Tensor | float:
    if inputs.class_weight is None:
        return 1.0
    return inputs.class_weight[_safe_index(inputs.target, vocab)[0]]


def _weight_sum(inputs: RowInputs, vocab: int) -> Tensor | float:
    return vocab if inputs.class_weight_sum is None else inputs.class_weight_sum


class _Inverse(NamedTuple):
    core: Tensor | float
    z: Tensor | float


def _inverse_divisors(divisors: Divisors | None) -> _Inverse:
    return _Inverse(1.0, 1.0) if divisors is None else _Inverse(_inverse(divisors.core), _inverse(divisors.z))


def _inverse(divisor: Tensor) -> Tensor:
    return torch.where(divisor != 0, 1 / divisor, 0)
