"""What tests and benchmarks share: real shapes, seeded inputs, an oracle of its own, and error budgets.

The oracle is dense, made of ordinary torch ops and differentiated by autograd. It shares no formula with `liger.spec`:
the target distribution is written out, and rows that count for nothing are taken out before anything is computed.
`reference` runs it in float64; `yardstick` runs the same in float32 and rounds where an implementation in the tensors'
dtype has to, so that its distance from `reference` is the error that the dtype itself costs.

Example:
    >>> inputs = make_inputs(16, 1000, dtype=torch.bfloat16)
    >>> options = CrossEntropyOptions(label_smoothing=0.1)
    >>> leaves = inputs.leaves()
    >>> loss = liger.liger_cross_entropy(leaves.input, leaves.target, label_smoothing=0.1)
    >>> assert_matches(collect(loss, leaves), reference(inputs, options), yardstick(inputs, options))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .options import CrossEntropyOptions, CrossEntropyOutput

ROUNDINGS = 4
"""A term is a product of about so many rounded factors (probability, weight, divisor, upstream gradient)."""


@dataclass(frozen=True, slots=True)
class Case:
    """The head of a published model."""

    name: str
    hidden: int
    """H, `hidden_size` of its config.json."""
    vocab: int
    """V, `vocab_size` of its config.json."""
    source: str
    """Repository on the Hugging Face hub that the two numbers come from."""


CASES = (
    Case("llama-2-7b", 4096, 32000, "meta-llama/Llama-2-7b-hf"),
    Case("llama-3.2-1b", 2048, 128256, "meta-llama/Llama-3.2-1B"),
    Case("llama-3.1-8b", 4096, 128256, "meta-llama/Llama-3.1-8B"),
    Case("qwen3-0.6b", 1024, 151936, "Qwen/Qwen3-0.6B"),
    Case("qwen3-1.7b", 2048, 151936, "Qwen/Qwen3-1.7B"),
    Case("qwen3-4b", 2560, 151936, "Qwen/Qwen3-4B"),
    Case("qwen3-8b", 4096, 151936, "Qwen/Qwen3-8B"),
    Case("gemma-3-4b", 2560, 262208, "google/gemma-3-4b-pt"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The tensors of one call. N rows, V vocabulary, H hidden."""

    input: Tensor
    """(..., V) logits, or (..., H) hidden states when `weight` is given."""
    target: Tensor
    """(...)"""
    weight: Tensor | None = None
    """(V, H) of the head."""
    bias: Tensor | None = None
    """(V,) of the head."""
    class_weight: Tensor | None = None
    """(V,)"""
    num_items: float | Tensor | None = None
    """What the mean divides by instead of the valid rows."""

    @property
    def vocab(self) -> int:
        """V"""
        return self.input.shape[-1] if self.weight is None else self.weight.shape[0]

    def leaves(self, *frozen: str) -> Inputs:
        """Fresh copies in the same memory layout that require grad, except those named in `frozen`."""
        copies: dict[str, Any] = {}
        for name in ("input", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                copies[name] = _copy(tensor).requires_grad_(name not in frozen)
        return replace(self, **copies)

    def rows(self, index: Tensor) -> Inputs:
        """The same call for some of the rows."""
        return replace(self, input=self.input[index], target=self.target[index])


def _copy(tensor: Tensor) -> Tensor:
    storage = tensor.detach().untyped_storage().clone()  # type: ignore[no-untyped-call]
    return tensor.detach().new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def make_inputs(
    rows: int,
    vocab: int,
    hidden: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 3.0,
    ignored: float = 0.25,
    ignore_index: int = -100,
    bias: bool = False,
    class_weight: bool = False,
) -> Inputs:
    """Random tensors of one call, the same for the same seed and device.

    Args:
        rows: N.
        vocab: V.
        hidden: H, for fused linear cross entropy; None makes logits.
        dtype: of all floating-point tensors but the class weights, which are float32 (float64 for float64).
        device: where they are made.
        seed: of the generator.
        scale: standard deviation of the logits.
        ignored: share of the rows whose target is `ignore_index`, rounded to a whole number of them.
        ignore_index: as in a call.
        bias: make a bias as well; needs `hidden`.
        class_weight: make class weights as well, in [0.5, 1.5).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    target = torch.randint(vocab, (rows,), generator=generator, device=device)
    target[torch.randperm(rows, generator=generator, device=device)[: round(ignored * rows)]] = ignore_index
    classes = None
    if class_weight:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        classes = torch.rand(vocab, generator=generator, device=device, dtype=wide) + 0.5
    if hidden is None:
        return Inputs(normal(rows, vocab).mul_(scale), target, class_weight=classes)
    weight = normal(vocab, hidden).mul_(scale / hidden**0.5)
    return Inputs(normal(rows, hidden), target, weight, normal(vocab) if bias else None, classes)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a call returned, and the gradients it gave."""

    output: CrossEntropyOutput
    input: Tensor | None = None
    """Gradient of the input."""
    weight: Tensor | None = None
    """Gradient of the head's weight."""
    bias: Tensor | None = None
    """Gradient of the head's bias."""


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the oracle found."""

    outcome: Outcome
    rows: CrossEntropyOutput
    """(N,) the parts that `loss` and `z_loss` are sums of."""
    scores: Tensor
    """(N, V) logits after bias, scale and softcap."""
    magnitudes: Outcome
    """For every number in `outcome`, the sum of the absolute values of its terms, times what amplifies their errors."""
    row_magnitudes: CrossEntropyOutput
    """The same for `rows`."""


def collect(output: Tensor | CrossEntropyOutput, leaves: Inputs, upstream: Tensor | None = None) -> Outcome:
    """Run backward from a loss of `leaves` and gather everything.

    Args:
        output: what a call returned.
        leaves: its tensors, from `Inputs.leaves`.
        upstream: gradient of the loss, in the loss's shape; None is 1 everywhere.
    """
    output = output if isinstance(output, CrossEntropyOutput) else CrossEntropyOutput(output)
    output.loss.backward(torch.ones_like(output.loss) if upstream is None else upstream.to(output.loss.dtype))  # type: ignore[no-untyped-call]
    weight, bias = leaves.weight, leaves.bias
    return Outcome(
        _map(Tensor.detach, output),
        leaves.input.grad,
        None if weight is None else weight.grad,
        None if bias is None else bias.grad,
    )


def _map(change: Callable[[Tensor], Tensor], output: CrossEntropyOutput) -> CrossEntropyOutput:
    return CrossEntropyOutput(change(output.loss), *(None if part is None else change(part) for part in output[1:]))


def reference(inputs: Inputs, options: CrossEntropyOptions, upstream: Tensor | None = None) -> Expected:
    """The truth: the oracle in float64. Arguments as in `yardstick`."""
    return _dense(inputs, options, upstream, torch.float64, None)


def yardstick(
    inputs: Inputs,
    options: CrossEntropyOptions,
    upstream: Tensor | None = None,
    *,
    gemm_dtype: torch.dtype | None = None,
) -> Expected:
    """The oracle in float32, before the result is rounded.

    torch's own half-precision kernels take no part: on a CPU their gradient at a confident target is off by a quarter.

    Args:
        inputs: the tensors; leading dimensions are flattened in the row-wise parts of the result.
        options: as in a call; what only steers an implementation is not looked at.
        upstream: gradient of the loss, in the loss's shape; None is 1 everywhere.
        gemm_dtype: where the head's products run in half precision, the dtype that their operands, the logits and the
            logits' gradient are rounded to. None: they run in float32.
    """
    return _dense(inputs, options, upstream, torch.float32, gemm_dtype)


class _Rounded(torch.autograd.Function):
    """Rounds a tensor on the way forward and its gradient on the way back; both keep their dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return tensor.to(dtype).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return grad[0].to(ctx.dtype).to(grad[0].dtype), None


def _dense(
    inputs: Inputs,
    options: CrossEntropyOptions,
    upstream: Tensor | None,
    dtype: torch.dtype,
    gemm_dtype: torch.dtype | None,
) -> Expected:
    def leaf(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(dtype).requires_grad_()

    def rounded(tensor: Tensor) -> Tensor:
        return tensor if gemm_dtype is None else _Rounded.apply(tensor, gemm_dtype)  # type: ignore[no-untyped-call]

    x, weight, bias = inputs.input.detach().to(dtype).requires_grad_(), leaf(inputs.weight), leaf(inputs.bias)
    flat = x.reshape(-1, x.shape[-1])
    if weight is None:
        logits, spread = flat, torch.zeros_like(flat)
    else:
        head_bias = None if bias is None else rounded(bias)
        logits = rounded(F.linear(rounded(flat), rounded(weight), head_bias))
        spread = F.linear(flat.abs(), weight.abs(), None if bias is None else bias.abs()).detach()
    if options.logit_scale != 1:
        logits = options.logit_scale * logits
        spread = options.logit_scale * spread + logits.detach().abs()
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
        spread = spread + logits.detach().abs()
    logits.retain_grad()

    class_weight = None if inputs.class_weight is None else inputs.class_weight.to(dtype)
    num_items = None if inputs.num_items is None else float(inputs.num_items)
    output, rows, pull, z_pull = _dense_loss(logits, inputs.target.reshape(-1), class_weight, num_items, options)
    if options.reduction == "none":
        output = _map(lambda part: part.reshape(inputs.target.shape), output)
    upstream = torch.ones_like(output.loss) if upstream is None else upstream.to(dtype)
    output.loss.backward(upstream)  # type: ignore[no-untyped-call]

    per_row = upstream.reshape(-1) if options.reduction == "none" else upstream.expand(len(logits))
    row_magnitudes, into_logits = _magnitudes(logits, spread, pull, z_pull, per_row, options)
    into_input, into_weight, into_bias = into_logits, None, None
    if weight is not None:
        into_input, into_weight = into_logits @ weight.detach().abs(), into_logits.t() @ flat.detach().abs()
        into_bias = None if bias is None else into_logits.sum(0)

    gradients = [None if t is None else torch.zeros_like(t) if t.grad is None else t.grad for t in (x, weight, bias)]
    return Expected(
        Outcome(_map(Tensor.detach, output), *gradients),
        rows,
        logits.detach(),
        Outcome(row_magnitudes, into_input.reshape(x.shape), into_weight, into_bias),
        row_magnitudes,
    )


def _dense_loss(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, num_items: float | None, options: CrossEntropyOptions
) -> tuple[CrossEntropyOutput, CrossEntropyOutput, Tensor, Tensor]:
    """From capped logits (N, V), in their dtype: what a call returns, its row-wise parts, and the magnitudes of the
    loss's factors, (N, V) those of each class's -log p and (N,) those of lse squared.
    """
    n, vocab = logits.shape
    valid = (target != options.ignore_index).nonzero()[:, 0]
    s, y = logits[valid], target[valid].long()
    w = torch.ones(vocab, dtype=s.dtype, device=s.device) if class_weight is None else class_weight

    log_p = F.log_softmax(s, -1)
    wanted = (1 - options.label_smoothing) * F.one_hot(y, vocab).to(s.dtype) + options.label_smoothing / vocab
    pull = wanted * w
    z_pull = torch.full_like(s[:, 0], options.lse_square_scale)
    if options.reduction == "mean":
        mass = w[y].sum() if num_items is None else num_items
        count = len(valid) if num_items is None else num_items
        pull = pull / mass if mass > 0 else pull * 0
        z_pull = z_pull / count if count > 0 else z_pull * 0
    pull_magnitude, z_magnitude = pull, z_pull
    if options.use_token_scaling:
        scale = log_p.gather(-1, y[:, None]).exp().detach()
        single = torch.finfo(torch.float32)
        least = scale.clamp(min=single.smallest_normal / single.eps)  # a smaller factor may be flushed to zero
        pull_magnitude, z_magnitude = pull * least, z_pull * least[:, 0]
        pull, z_pull = pull * scale, z_pull * scale[:, 0]
    core = -(pull * log_p).sum(-1)
    z = z_pull * torch.logsumexp(s, -1).square()

    def spread(rows: Tensor) -> Tensor:
        return logits.new_zeros((n, *rows.shape[1:])).index_put((valid,), rows)

    best = s.argmax(-1)
    losses, z_losses, hits = spread(core + z), spread(z), spread((best == y).to(s.dtype))
    predicted = torch.full_like(target, -1, dtype=torch.int64).index_put((valid,), best)
    keep = options.reduction == "none"
    output = CrossEntropyOutput(
        losses if keep else losses.sum(),
        (z_losses if keep else z_losses.sum()) if options.return_z_loss else None,
        (hits if keep else hits.sum() / max(len(valid), 1)) if options.return_token_accuracy else None,
        predicted if options.return_predicted_tokens else None,
    )
    rows = CrossEntropyOutput(losses.detach(), z_losses.detach())
    return output, rows, spread(pull_magnitude).detach(), spread(z_magnitude).detach()


def _magnitudes(
    logits: Tensor, spread: Tensor, pull: Tensor, z_pull: Tensor, upstream: Tensor, options: CrossEntropyOptions
) -> tuple[CrossEntropyOutput, Tensor]:
    """How far an error of one rounding in every term reaches, to first order and in units of it: (N,) into the rows'
    loss and z-loss, (N, V) into the gradient of the logits before scale and softcap.

    Args:
        logits: (N, V) after the softcap, with their gradient.
        spread: (N, V) the sum of the absolute values of the terms that each logit is the sum of; 0 where it is given.
        pull: (N, V) from `_dense_loss`.
        z_pull: (N,) from `_dense_loss`.
        upstream: (N,) gradient of each row's loss.
        options: of the call.
    """
    s, grad = logits.detach(), torch.zeros_like(logits) if logits.grad is None else logits.grad
    m, log_p = s.amax(-1, keepdim=True), F.log_softmax(s, -1)
    p = log_p.exp()
    drift = 1 + (p * spread).sum(-1, keepdim=True)
    off_log_p = drift + spread - log_p
    off_lse = drift + m.abs() + torch.logsumexp(s - m, -1, keepdim=True)

    z_loss = z_pull * off_lse[:, 0].square()
    loss = (pull * off_log_p).sum(-1) + z_loss
    u, u_pull = upstream[:, None].abs(), upstream[:, None] * pull
    # The gradient is (its p term) - pull: what pull took away is put back, so that nothing cancels.
    single = torch.finfo(torch.float32)
    least = single.smallest_normal / single.eps  # a smaller p may be flushed to zero before its large factor comes
    p_term = (grad + u_pull).abs()
    p_term = torch.where(p < least, p_term.amax(-1, keepdim=True) / p.amax(-1, keepdim=True) * least, p_term)
    into_logits = p_term * off_log_p + u_pull.abs() + u * z_pull[:, None] * 2 * off_lse * p
    if options.use_token_scaling:  # every factor holds p of the target, whose error is off_log_p there
        loss, z_loss = loss * off_log_p.amax(-1), z_loss * off_log_p.amax(-1)
        into_logits = into_logits * off_log_p.amax(-1, keepdim=True)
    if options.softcap is not None:
        into_logits = into_logits * (1 + (s / options.softcap).square())
    into_logits = into_logits * options.logit_scale
    return CrossEntropyOutput(loss, z_loss), into_logits


def own_error(reference: Tensor, yardstick: Tensor, magnitude: Tensor, dtype: torch.dtype) -> float:
    """torch's own error relative to the magnitudes, as `assert_within_budget` defines it, with the same arguments."""
    single = torch.finfo(torch.float32).eps
    errors = torch.where(magnitude > 0, (yardstick.double() - reference).abs() / magnitude, 0)
    largest = max(ROUNDINGS * single, errors.amax().item() if errors.numel() else 0)
    return largest * torch.finfo(torch.float64).eps / single if dtype == torch.float64 else largest


def assert_within_budget(
    got: Tensor,
    reference: Tensor,
    yardstick: Tensor,
    dtype: torch.dtype,
    *,
    magnitude: Tensor | None = None,
    what: str = "result",
) -> None:
    r"""Raise AssertionError unless every element of `got` is as near to `reference` as careful code brings it.

    Code in `dtype` that is as careful as torch's operations makes errors of the same kind as the yardstick's, but not
    the same ones, hence twice torch's own error \(r\); then it rounds its result, hence one rounding:

    $$ |got_i - ref_i| \le 2\, r\, a_i + \epsilon\, |ref_i|, \qquad r = \max_j |yard_j - ref_j| / a_j $$

    \(a_i\) is the magnitude of element i: the sum of the absolute values of the terms that it is the sum of, amplified
    as their errors are. That makes the elements' errors comparable: one that is small because its terms cancel is
    granted the error of its terms, one that is small because they are small is not. And a chance hit of the yardstick
    in one element is harmless. \(r\) is at least the epsilon of what is computed in, times `ROUNDINGS`.

    Errors are proportional to epsilon. For float64, where no better arithmetic is at hand, the yardstick is float32's,
    and its error is scaled by the ratio of the two epsilons; the factor of two then serves the reference as well, which
    is float64 too. What falls below the smallest normal float32 may be flushed to zero, as GPUs do.

    Args:
        got: the result, in any dtype.
        reference: what it should be, in float64.
        yardstick: what torch's operations make of it in float32, before the result is rounded.
        dtype: that the result was rounded to; `got` itself may have been widened since.
        magnitude: of each element; None takes the largest of `reference` for all.
        what: the name of the result in the message.
    """
    if got.shape != reference.shape:
        raise AssertionError(f"{what} has shape {tuple(got.shape)}, expected {tuple(reference.shape)}")
    if magnitude is None:
        magnitude = (reference.abs().amax() if reference.numel() else reference.sum()).expand(reference.shape)
    limits = torch.finfo(dtype)
    budget = 2 * own_error(reference, yardstick, magnitude, dtype) * magnitude + limits.eps * reference.abs()
    budget = budget + max(limits.smallest_normal * limits.eps, torch.finfo(torch.float32).smallest_normal)
    error = (got.detach().double() - reference).abs()
    wrong = ~(error <= budget)  # NaN is wrong
    if not wrong.any():
        return
    excess = torch.where(error.isnan(), torch.inf, error / budget).flatten()
    worst = int(excess.argmax())
    position = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    value, truth, own, off, allowed = (t.flatten()[worst].item() for t in (got, reference, yardstick, error, budget))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are outside their error budget for {dtype}; "
        f"the worst is {what}{position} = {value:.9g}, expected {truth:.9g} (torch in float32: {own:.9g}), "
        f"error {off:.3g}, {excess[worst]:.3g} times the budget of {allowed:.3g}"
    )


def assert_matches(got: Outcome, reference: Expected, yardstick: Expected) -> None:
    """Raise AssertionError unless everything that `got` holds is within budget of `reference`.

    A reduced loss may err as far as its rows may together: that their errors cancel is chance. A predicted token is
    right when its score is the maximum, up to twice what the yardstick's scores are off, and `ROUNDINGS` of the largest:
    under a soft cap whole rows come to lie that close together.
    """
    truths, own = reference.outcome, yardstick.outcome
    if [part is None for part in got.output] != [part is None for part in truths.output]:
        raise AssertionError(f"got {got.output}, expected the same parts as in {truths.output}")
    for name in ("loss", "z_loss"):
        value, truth = getattr(got.output, name), getattr(truths.output, name)
        if value is not None:
            rows, own_rows, magnitude = (
                getattr(part, name) for part in (reference.rows, yardstick.rows, reference.row_magnitudes)
            )
            together = magnitude.sum() if truth.ndim == 0 else magnitude.reshape(truth.shape)
            measure = truth + own_error(rows, own_rows, magnitude, torch.float32) * together
            assert_within_budget(value, truth, measure, value.dtype, magnitude=together, what=name)
    for name in ("input", "weight", "bias"):
        grad = getattr(got, name)
        if grad is not None:
            truth, measure, magnitude = (getattr(part, name) for part in (truths, own, reference.magnitudes))
            assert_within_budget(grad, truth, measure, grad.dtype, magnitude=magnitude, what=f"gradient of {name}")
    _assert_predicted(got.output, truths.output, reference.scores, yardstick.scores)


def _assert_predicted(got: CrossEntropyOutput, truth: CrossEntropyOutput, scores: Tensor, own: Tensor) -> None:
    n, largest = len(scores), scores.abs().amax(1)
    slack = 2 * torch.maximum((own - scores).abs().amax(1), ROUNDINGS * torch.finfo(torch.float32).eps * largest)
    if got.predicted_tokens is not None and truth.predicted_tokens is not None:
        ignored, predicted = truth.predicted_tokens.flatten() < 0, got.predicted_tokens.flatten()
        chosen = scores.gather(1, predicted.clamp(min=0)[:, None])[:, 0]
        short = (scores.amax(1) - chosen > slack) & ~ignored
        if short.any() or not torch.equal(predicted < 0, ignored):
            raise AssertionError(f"predicted_tokens: {predicted.tolist()}, expected {truth.predicted_tokens.tolist()}")
    if got.token_accuracy is not None and truth.token_accuracy is not None and n and scores.shape[1] > 1:
        first, second = scores.topk(2).values.unbind(1)
        if (first - second > slack).all():  # otherwise a tie may go either way
            exact = truth.token_accuracy
            assert_within_budget(got.token_accuracy, exact, exact, torch.float32, what="token_accuracy")
