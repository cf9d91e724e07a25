"""Inputs on which the loss or its gradient loses its digits. N rows, V vocabulary; names as in the recipes."""

import math

import pytest
import torch

from liger.testing import Inputs, assert_within_budget

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def spacing(value, dtype):
    """Distance of the numbers of a dtype around a value."""
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps


def as_call(subject, logits, target):
    """These logits for either op: the fused one gets them as the head's weight, and an identity as hidden states.

    A product with one non-zero term rounds nothing.
    """
    if not subject.fused:
        return subject.tensors(logits, target)
    identity = torch.eye(len(logits), dtype=logits.dtype)
    return subject.tensors(identity, target, weight=logits.t().contiguous())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_N1_confident_target(ce, dtype, reduction):
    """p - 1 cancels: stored as p / N and subtracted from later, it is off by 0.8, 13.6 and 100 %."""
    ce.needs(dtype)
    vocab, chances = 32000, (0.9, 0.99, 0.999)
    logits = torch.zeros(len(chances), vocab, dtype=dtype)
    target = torch.tensor([5, 31999, 17000])
    for row, p in enumerate(chances):
        logits[row, target[row]] = math.log(p * (vocab - 1) / (1 - p))
    inputs = ce.tensors(logits, target)
    got = ce.check(inputs, reduction=reduction)
    truth = ce.expected(inputs, reduction=reduction)[0].outcome
    rows = torch.arange(len(chances))
    error = (got.input[rows, target].double() / truth.input[rows, target] - 1).abs()
    assert error.max() <= ce.rounding(dtype)


@pytest.mark.parametrize("k", range(12, 24))
def test_N2_common_offset(loss, k):
    """lse - s_y of separate float32 numbers near 2 ** k keeps 23 - k binary digits."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    target = torch.tensor([1])
    if loss.fused:  # the offset is the bias
        inputs = loss.tensors(torch.ones(1, 1), target, weight=logits.t().contiguous(), bias=torch.full((4,), 2.0**k))
    else:
        inputs = loss.tensors(logits + 2.0**k, target)
    got = loss.check(inputs)
    assert got.output.loss.item() == pytest.approx(2.440190, rel=torch.finfo(F32).eps, abs=5e-7)  # seven digits given


@pytest.mark.parametrize("vocab", [129, 1000, 50257, 129920])
def test_N3_padding_carries_no_mass(loss, vocab):
    """A block that reaches beyond V must not count what is there: 0, against logits of -30, would be everything."""
    target = torch.tensor([0, vocab - 1])
    if loss.fused:
        hidden = 4  # -7.5 * 4 is exact
        inputs = loss.tensors(torch.ones(2, hidden), target, weight=torch.full((vocab, hidden), -30 / hidden))
    else:
        inputs = loss.tensors(torch.full((2, vocab), -30.0), target)
    got = loss.check(inputs)
    assert got.output.loss.item() == pytest.approx(math.log(vocab), rel=2 * torch.finfo(F32).eps)


def test_classes_that_a_low_cap_makes_equal(ce):
    """In float32 both capped scores are the same number: either may be predicted, the first one by rule."""
    logits = torch.zeros(1, 40)
    logits[0, 3], logits[0, 6] = 0.875, 1.5
    ce.check(ce.tensors(logits, torch.tensor([0])), softcap=0.1, return_predicted_tokens=True)


@pytest.mark.parametrize("softcap", [30.0, 1.0])
@pytest.mark.parametrize("vocab", [32000, 65537])
def test_N4_padding_carries_no_mass_after_the_cap(loss, vocab, softcap):
    """tanh maps minus infinity to -1: padding has to be masked after the cap, not before."""
    target = torch.tensor([0, vocab - 1])
    if loss.fused:
        inputs = loss.tensors(torch.ones(2, 4), target, weight=torch.full((vocab, 4), -25.0))
    else:
        inputs = loss.tensors(torch.full((2, vocab), -100.0), target)
    got = loss.check(inputs, softcap=softcap)
    assert got.output.loss.item() == pytest.approx(math.log(vocab), rel=2 * torch.finfo(F32).eps)


def relative_error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_N7_chunks_add_no_error(flce, reduction):
    """Running sums in bf16 would be 4 % off at 1024 chunks. The error has to stay that of one rounding."""
    rows = 16 if flce.interpreted else 8192
    inputs = flce.inputs(rows, 128, 64, dtype=BF16)
    truth, own = flce.expected(inputs, reduction=reduction)
    for chunks in (1, 16) if flce.interpreted else (1, 16, 128, 1024):
        got = flce.outcome(inputs, reduction=reduction, chunk_size=rows // chunks)
        for name in ("weight", "input"):
            exact = getattr(truth.outcome, name)
            error = relative_error(getattr(got, name), exact)
            one_rounding = relative_error(getattr(own.outcome, name).to(BF16), exact)
            assert error <= 2 * one_rounding, f"{name}: {error:.2e} in {chunks} chunks, torch {one_rounding:.2e}"


@pytest.mark.parametrize("largest", [5.0, 40.0, 160.0, 640.0])
def test_N9_rows_of_the_gradient_sum_to_zero_at_every_scale(flce, largest):
    """A head with one constant column shows the row sums of the logits' gradient in that column of x's gradient."""
    flce.needs(BF16)
    inputs = flce.inputs(4, 200, 32, dtype=BF16)
    inputs.input[:, 0] = 0  # the constant column adds nothing to the logits
    weight = inputs.weight.float()
    weight *= largest / (inputs.input.float() @ weight.t()).abs().max()
    weight[:, 0] = 1
    inputs = loss_inputs(inputs, weight.to(BF16))
    got = flce.check(inputs, reduction="sum")
    # Each of dz's elements may be rounded to bf16 once, and their absolute values sum to at most 2 in a row.
    assert got.input[:, 0].abs().max() <= 2 * flce.rounding(BF16)


def loss_inputs(inputs, weight):
    return Inputs(inputs.input, inputs.target, weight)


@pytest.mark.parametrize("largest", [5.0, 40.0, 160.0, 640.0])
def test_N9_the_error_stays_one_rounding_at_every_scale(ce, largest):
    ce.needs(BF16)
    inputs = ce.inputs(4, 200, dtype=BF16)
    inputs.input.mul_(largest / inputs.input.abs().max())
    got = ce.check(inputs, reduction="sum")
    sums = got.input.double().sum(1)
    assert (sums.abs() <= got.input.double().abs().sum(1) * ce.rounding(BF16)).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_N10_bf16_logits_give_the_loss_of_equal_fp32_logits(ce, reduction):
    ce.needs(BF16)
    inputs = ce.inputs(5, 300, dtype=BF16)
    wide = Inputs(inputs.input.float(), inputs.target)
    exact = ce(wide, reduction=reduction)
    rounded = ce(inputs, reduction=reduction)
    assert rounded.dtype == BF16
    assert ((rounded.float() - exact).abs() <= exact * ce.rounding(BF16)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_N10_loss_dtype_gives_it_in_fp32(ce, dtype, reduction):
    ce.needs(dtype, loss_dtype=F32)
    inputs = ce.inputs(5, 300, dtype=dtype)
    wide = Inputs(inputs.input.float(), inputs.target)
    truth, own = ce.expected(wide, reduction=reduction)
    for given in (inputs, wide):
        got = ce(given, reduction=reduction, loss_dtype=F32)
        assert got.dtype == F32
        assert_within_budget(got, truth.outcome.output.loss, own.outcome.output.loss, F32)


def test_minus_infinity_takes_a_class_away(ce):
    """A vocabulary padded with -inf logits is the one without them; a row may not become NaN for it."""
    inputs = ce.inputs(4, 40, ignored=0.0, dtype=F32)
    short = ce.outcome(inputs, return_predicted_tokens=True)
    padded = torch.full((4, 64), -torch.inf, device=ce.device)
    padded[:, :40] = inputs.input
    got = ce.outcome(Inputs(padded, inputs.target), return_predicted_tokens=True)
    assert torch.equal(got.output.predicted_tokens, short.output.predicted_tokens)
    assert not got.input[:, 40:].any()
    truth, own = ce.expected(inputs, return_predicted_tokens=True)
    assert_within_budget(got.output.loss, truth.outcome.output.loss, own.outcome.output.loss, F32)
    assert_within_budget(got.input[:, :40], truth.outcome.input, own.outcome.input, F32, magnitude=truth.magnitudes.input)


def near_36(rows):
    """bf16 logits whose losses lie between bf16 numbers: rounding each row first would move the mean by a whole step.

    A quarter of the rows lose 35.80 (bf16 35.75), the others 35.88 (bf16 36.0). Their mean 35.86 rounds to 35.75; the
    mean of the rounded losses is 35.9375, which rounds to 36.0.
    """
    logits = torch.zeros(rows, 4, dtype=BF16)
    logits[:, 0] = 36
    logits[:, 1] = torch.where(torch.arange(rows) % 4 == 0, 0.2, 0.12)
    return logits, torch.ones(rows, dtype=torch.int64)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_N12_the_loss_is_rounded_once(ce, reduction):
    ce.needs(BF16)
    inputs = ce.tensors(*near_36(8 if ce.interpreted else 8192))
    truth = ce.expected(inputs, reduction=reduction)[0].outcome.output.loss.item()
    got = ce(inputs, reduction=reduction)
    assert got.dtype == BF16
    assert abs(got.item() - truth) <= spacing(truth, BF16) / 2 + 1e-5 * truth
    if reduction == "mean":
        assert got.item() == 35.75


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_N12_loss_dtype_returns_the_value_before_the_rounding(ce, reduction):
    ce.needs(BF16, loss_dtype=F32)
    inputs = ce.tensors(*near_36(8 if ce.interpreted else 8192))
    truth = ce.expected(inputs, reduction=reduction)[0].outcome.output.loss.item()
    got = ce(inputs, reduction=reduction, loss_dtype=F32)
    assert got.dtype == F32
    assert got.item() == pytest.approx(truth, rel=1e-5)
    assert ce(inputs, reduction=reduction).item() == got.to(BF16).item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_N12_the_fused_loss_is_fp32(flce, reduction):
    flce.needs(BF16)
    inputs = flce.tensors(*near_36(8 if flce.interpreted else 8192))
    inputs = Inputs(inputs.input, inputs.target, torch.eye(4, dtype=BF16, device=inputs.input.device))
    truth = flce.expected(inputs, reduction=reduction)[0].outcome.output.loss.item()
    got = flce(inputs, reduction=reduction)
    assert got.dtype == F32
    assert got.item() == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_N13_without_hidden_states_the_bias_is_the_logits(flce, reduction):
    inputs = flce.inputs(4, 50, dtype=flce.finest, bias=True)
    inputs.input.zero_()
    got = flce.check(inputs, reduction=reduction)
    rows = torch.nn.functional.cross_entropy(inputs.bias.double().expand(4, -1), inputs.target, reduction=reduction)
    own = torch.nn.functional.cross_entropy(inputs.bias.float().expand(4, -1), inputs.target, reduction=reduction)
    assert_within_budget(got.output.loss, rows, own, flce.finest)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logit_scale", [1.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_N15_options_that_change_the_logits(loss, softcap, logit_scale, bias, reduction):
    if bias and not loss.fused:
        pytest.skip("cross entropy has no bias")
    for dtype in loss.few(loss.dtypes):
        inputs = loss.inputs(4, 130, dtype=dtype, **({"bias": bias} if loss.fused else {}))
        loss.check(inputs, softcap=softcap, logit_scale=logit_scale, reduction=reduction)


def test_N19_fp16_gradients_survive_the_mean(flce):
    """1/N folded into a stored fp16 gradient is 0 before a loss scaler can lift it."""
    if flce.interpreted:
        pytest.skip("67 million logits; test_N19_fp16_small_probabilities is the same on few")
    flce.needs(F16)
    rows, vocab = 16384, 4096
    target = torch.zeros(rows, dtype=torch.int64)
    leaves = flce.tensors(torch.ones(rows, 1, dtype=F16), target, weight=torch.zeros(vocab, 1, dtype=F16)).leaves("input")
    (flce(leaves) * 65536).backward()
    # Every class but the target gets the same; 16 is what the sum may be rounded to, 65536 / 4096 exactly.
    assert torch.equal(leaves.weight.grad[1:], torch.full_like(leaves.weight.grad[1:], 65536 / vocab))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_N19_fp16_small_probabilities(loss, reduction):
    """p = 1.1e-7 is hardly above fp16's smallest number, 6e-8, and p over 8 rows is below; times the loss scaler it is not."""
    loss.needs(F16)
    rows, vocab, scaler = 8, 64, 32768.0  # an fp16 loss, like torch's, has an fp16 upstream gradient: 65536 is inf
    logits = torch.zeros(rows, vocab, dtype=F16)
    logits[:, 0] = 16
    target = torch.zeros(rows, dtype=torch.int64)
    if loss.fused:
        inputs = loss.tensors(torch.ones(rows, 1, dtype=F16), target, weight=logits[:1].t().contiguous())
    else:
        inputs = loss.tensors(logits, target)
    upstream = torch.tensor(scaler, device=loss.device)
    if reduction == "none":  # what a mean taken outside gives
        upstream = upstream.expand(rows) / rows
    leaves = inputs.leaves()
    value = loss(leaves, reduction=reduction)
    (value.float() * upstream).sum().backward()
    p = (rows if reduction == "sum" else 1) / (vocab - 1 + math.exp(16))
    for gradient, count in ((leaves.weight, 1), (leaves.input, rows)):
        if gradient is not None and (loss.fused == (gradient is leaves.weight)):
            small = gradient.grad.reshape(-1, vocab)[:, 1:].double() / scaler * count
            assert ((small / p - 1).abs() <= 2 * loss.rounding(F16)).all()
