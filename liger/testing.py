"""What tests and benchmarks share: real shapes, seeded inputs, an oracle of its own, and error budgets.

The oracle is dense, made of ordinary torch ops and differentiated by autograd. It shares no formula with `liger.spec`:
the target distribution is written out, rows that count for nothing are taken out before anything is computed.
`reference` runs it in float64; `yardstick` runs the same in float32 and rounds wherever an implementation in the
tensors' dtype has to, so that its distance from `reference` is the error that the dtype itself costs.

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

POOL = 64
"""How many errors are taken together at least: the largest of 64 samples is not small by chance."""


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

    @property
    def vocab(self) -> int:
        """V"""
        return self.input.shape[-1] if self.weight is None else self.weight.shape[0]

    def leaves(self, *frozen: str) -> Inputs:
        """Fresh copies that require grad, except those named in `frozen`."""
        copies: dict[str, Any] = {}
        for name in ("input", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                copies[name] = tensor.detach().clone().requires_grad_(name not in frozen)
        return replace(self, **copies)

    def rows(self, index: Tensor) -> Inputs:
        """The same call for some of the rows."""
        return replace(self, input=self.input[index], target=self.target[index])


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
    row_losses: CrossEntropyOutput | None = None
    """Only of the oracle: (N,) the parts that `loss` and `z_loss` are sums of."""
    scores: Tensor | None = None
    """Only of the oracle: (N, V) logits after bias and softcap."""


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
        _map(output, Tensor.detach),
        leaves.input.grad,
        None if weight is None else weight.grad,
        None if bias is None else bias.grad,
    )


def _map(output: CrossEntropyOutput, change: Callable[[Tensor], Tensor]) -> CrossEntropyOutput:
    extras = (None if part is None else change(part) for part in output[1:])
    return CrossEntropyOutput(change(output.loss), *extras)


def reference(inputs: Inputs, options: CrossEntropyOptions, upstream: Tensor | None = None) -> Outcome:
    """The truth: the oracle in float64. Arguments as in `yardstick`."""
    return _dense(inputs, options, upstream, torch.float64, None)


def yardstick(
    inputs: Inputs,
    options: CrossEntropyOptions,
    upstream: Tensor | None = None,
    *,
    gemm_dtype: torch.dtype | None = None,
) -> Outcome:
    """The oracle in float32, rounded where an implementation in the tensors' dtypes cannot help it.

    Gradients are rounded once to their tensor's dtype (for float64 tensors they stay float32, see `error_budget`).
    torch's own half-precision kernels take no part: on a CPU their gradient at a confident target is off by a quarter.

    Args:
        inputs: the tensors; leading dimensions are flattened in the result's row-wise parts.
        options: as in a call; what only steers an implementation is not looked at.
        upstream: gradient of the loss, in the loss's shape; None is 1 everywhere.
        gemm_dtype: where the head's products run in half precision, the dtype that their operands, the logits and the
            logits' gradient are rounded to. None: they do not.
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
) -> Outcome:
    def leaf(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(dtype).requires_grad_()

    def rounded(tensor: Tensor) -> Tensor:
        return tensor if gemm_dtype is None else _Rounded.apply(tensor, gemm_dtype)  # type: ignore[no-untyped-call]

    x, weight, bias = leaf(inputs.input), leaf(inputs.weight), leaf(inputs.bias)
    if x is None:
        raise TypeError("inputs.input is missing")
    logits = x.reshape(-1, x.shape[-1])
    if weight is not None:
        logits = F.linear(rounded(logits), rounded(weight), None if bias is None else rounded(bias))
        logits = rounded(logits)
    class_weight = None if inputs.class_weight is None else inputs.class_weight.to(dtype)
    output, row_losses, scores = _dense_loss(logits, inputs.target.reshape(-1), class_weight, options)
    if options.reduction == "none":
        output = _map(output, lambda rows: rows.reshape(inputs.target.shape))
    output.loss.backward(torch.ones_like(output.loss) if upstream is None else upstream.to(dtype))  # type: ignore[no-untyped-call]

    def grad(leaf: Tensor | None, stored: Tensor | None) -> Tensor | None:
        if leaf is None or stored is None:
            return None
        made = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return made if torch.float64 in (dtype, stored.dtype) else made.to(stored.dtype)

    gradients = (grad(x, inputs.input), grad(weight, inputs.weight), grad(bias, inputs.bias))
    return Outcome(_map(output, Tensor.detach), *gradients, row_losses=row_losses, scores=scores)


def _dense_loss(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, options: CrossEntropyOptions
) -> tuple[CrossEntropyOutput, CrossEntropyOutput, Tensor]:
    """(what a call returns, its row-wise parts, the scores) from logits (N, V), in their dtype."""
    n, vocab = logits.shape
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    valid = (target != options.ignore_index).nonzero()[:, 0]
    s, y = logits[valid], target[valid].long()
    w = torch.ones(vocab, dtype=s.dtype, device=s.device) if class_weight is None else class_weight

    log_p = F.log_softmax(s, -1)
    wanted = (1 - options.label_smoothing) * F.one_hot(y, vocab).to(s.dtype) + options.label_smoothing / vocab
    core = -(wanted * w * log_p).sum(-1)
    z = options.lse_square_scale * torch.logsumexp(s, -1).square()
    if options.reduction == "mean":
        mass, count = w[y].sum(), len(valid)
        core = core / mass if mass > 0 else core * 0
        z = z / max(count, 1)
    if options.use_token_scaling:
        scale = log_p.gather(-1, y[:, None])[:, 0].exp().detach()
        core, z = core * scale, z * scale

    def spread(rows: Tensor) -> Tensor:
        return logits.new_zeros(n).index_put((valid,), rows)

    best = s.argmax(-1)
    losses, z_losses, hits = spread(core + z), spread(z), spread((best == y).to(s.dtype))
    predicted = torch.full_like(target, -1, dtype=torch.int64).index_put((valid,), best)
    rows = CrossEntropyOutput(losses.detach(), z_losses.detach())
    keep = options.reduction == "none"
    output = CrossEntropyOutput(
        losses if keep else losses.sum(),
        (z_losses if keep else z_losses.sum()) if options.return_z_loss else None,
        (hits if keep else hits.sum() / max(len(valid), 1)) if options.return_token_accuracy else None,
        predicted if options.return_predicted_tokens else None,
    )
    return output, rows, logits.detach()


def error_budget(reference: Tensor, yardstick: Tensor, dtype: torch.dtype) -> Tensor:
    r"""How far each element of a result in `dtype` may be from `reference`, in float64, flattened.

    An implementation in `dtype` that is as careful as torch's operations makes errors of the same kind as the
    yardstick, but not the same ones, hence twice the yardstick's; its last step is to round the result, hence one
    rounding. With \(d_j\) the yardstick's error at element j:

    $$ |got_i - ref_i| \le 2 \max\Big(\max_{|ref_j| \le |ref_i|} d_j,\;
       |ref_i| \max_{|ref_j| \ge |ref_i|} \frac{d_j}{|ref_j|}\Big) + \epsilon\, |ref_i| $$

    The maxima make a chance hit of the yardstick harmless. An absolute error is lent only to elements at least as large,
    a relative one only to elements at most as large, so that the gradient at the target lends nothing to tiny ones, and
    sums that cancel lend nothing to others. The `POOL` elements at either end share one maximum.

    Errors are proportional to the dtype's epsilon. For float64, where no better arithmetic is at hand, the yardstick is
    float32's, and its error is scaled by the ratio of the two epsilons. Its factor of two then serves the reference as
    well, which is float64 too.

    What falls below the smallest normal float32 may be flushed to zero, as GPUs do.

    Args:
        reference: in float64.
        yardstick: of the same shape.
        dtype: of the result.
    """
    reference, yardstick = (tensor.detach().double().flatten() for tensor in (reference, yardstick))
    epsilon = torch.finfo(dtype).eps
    own = (yardstick - reference).abs()
    if dtype == torch.float64:
        own *= epsilon / torch.finfo(torch.float32).eps
    size, order = reference.abs().sort()
    own = own[order]
    absolute = _pooled(own)
    relative = size * _pooled(torch.where(size > 0, own / size, 0).flip(0)).flip(0)
    budget = torch.empty_like(reference)
    budget[order] = 2 * torch.maximum(absolute, relative) + epsilon * size + torch.finfo(torch.float32).tiny
    return budget


def _pooled(errors: Tensor) -> Tensor:
    """The largest error up to each element; the first `POOL` share one."""
    largest = errors.cummax(0).values
    largest[:POOL] = largest[:POOL].amax() if len(largest) else 0
    return largest


def assert_within_budget(
    got: Tensor, reference: Tensor, yardstick: Tensor, dtype: torch.dtype, *, what: str = "result"
) -> None:
    """Raise AssertionError unless every element of `got` is within `error_budget` of `reference`.

    Args:
        got: the result, in any dtype.
        reference: what it should be, in float64.
        yardstick: what torch's operations make of it in `dtype` (float32 for float64).
        dtype: of the result; `got` itself may already have been widened.
        what: its name in the message.
    """
    if got.shape != reference.shape:
        raise AssertionError(f"{what} has shape {tuple(got.shape)}, expected {tuple(reference.shape)}")
    budget = error_budget(reference, yardstick, dtype)
    error = (got.detach().double() - reference).abs().flatten()
    wrong = ~(error <= budget)  # NaN is wrong
    if not wrong.any():
        return
    excess = torch.where(error.isnan(), torch.inf, error / budget)
    worst = int(excess.argmax())
    position = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    value, truth, own = (tensor.flatten()[worst].item() for tensor in (got, reference, yardstick))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are outside their error budget for {dtype}; "
        f"the worst is {what}{position} = {value:.9g}, expected {truth:.9g} (torch in that dtype: {own:.9g}), "
        f"error {error[worst]:.3g}, {excess[worst]:.3g} times the budget of {budget[worst]:.3g}"
    )


def assert_matches(got: Outcome, reference: Outcome, yardstick: Outcome) -> None:
    """Raise AssertionError unless everything that `got` holds is within budget of `reference`.

    The errors of a sum's rows cancel by chance, so a reduced loss may err as far as the yardstick's rows do together.
    A predicted token is right when its score is the maximum, up to what the yardstick's scores are off.
    """
    if [part is None for part in got.output] != [part is None for part in reference.output]:
        raise AssertionError(f"got {got.output}, expected the same parts as in {reference.output}")
    for name in ("loss", "z_loss"):
        value, truth, own = (getattr(outcome.output, name) for outcome in (got, reference, yardstick))
        if value is None:
            continue
        if value.ndim == 0 and reference.row_losses is not None and yardstick.row_losses is not None:
            rows, own_rows = (getattr(outcome.row_losses, name) for outcome in (reference, yardstick))
            own = truth + (own_rows - rows).abs().sum()
        assert_within_budget(value, truth, own, value.dtype, what=name)
    for name in ("input", "weight", "bias"):
        grad = getattr(got, name)
        if grad is not None:
            truth, own = getattr(reference, name), getattr(yardstick, name)
            assert_within_budget(grad, truth, own, grad.dtype, what=f"gradient of {name}")
    accuracy, truth = got.output.token_accuracy, reference.output.token_accuracy
    if accuracy is not None and truth is not None:  # a ratio of two counts: one rounding is all it may be off
        assert_within_budget(accuracy, truth, truth, torch.float32, what="token_accuracy")
    if got.output.predicted_tokens is not None:
        _assert_predicted(got.output.predicted_tokens.flatten(), reference, yardstick)


def _assert_predicted(predicted: Tensor, reference: Outcome, yardstick: Outcome) -> None:
    truth, scores, own = reference.output.predicted_tokens, reference.scores, yardstick.scores
    if truth is None or scores is None or own is None:
        raise TypeError("the reference has no predicted tokens: pass it options with return_predicted_tokens=True")
    ignored = truth.flatten() < 0
    if not torch.equal(predicted < 0, ignored):
        raise AssertionError(f"predicted_tokens: {predicted.tolist()}, must be -1 exactly where {ignored.tolist()}")
    slack = 2 * (own - scores).abs().amax(1)
    short = scores.amax(1) - scores.gather(1, predicted.clamp(min=0)[:, None])[:, 0] > slack
    if (short & ~ignored).any():
        raise AssertionError(f"predicted_tokens: {predicted.tolist()}, expected {truth.flatten().tolist()}")
