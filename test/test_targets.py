"""Which rows count: ignored ones, none at all, targets that name no class. Names as in the recipes."""

from dataclasses import replace

import pytest
import torch
from watch import NothingIsZeroByChance

from liger import spec
from liger.options import CrossEntropyOptions
from liger.testing import Inputs, assert_within_budget, reference, yardstick

F32 = torch.float32
REDUCTIONS = ["mean", "sum", "none"]
EXTRAS = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def gradients(outcome):
    return [grad for grad in (outcome.input, outcome.weight, outcome.bias) if grad is not None]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0}], ids=str)
def test_T1_every_row_ignored(loss, reduction, options):
    for dtype in loss.few(loss.dtypes):
        for full in (False, True):
            extra = {"bias": full} if loss.fused else {}
            inputs = loss.inputs(2, 37, dtype=dtype, ignored=1.0, class_weight=full, **extra)
            got = loss.outcome(inputs, reduction=reduction, **options, **EXTRAS)
            out = got.output
            assert not any(part.any() for part in (out.loss, out.z_loss, out.token_accuracy))
            assert (out.predicted_tokens == -1).all()
            for grad in gradients(got):  # attached, or there would be none
                assert not grad.any()


def test_T1_no_class_weight_at_all(loss):
    """D = 0 takes the core term away; the z-loss has a divisor of its own."""
    inputs = loss.inputs(4, 37, dtype=F32, class_weight=True)
    inputs.class_weight[inputs.target.clamp(min=0)] = 0
    loss.check(inputs, lse_square_scale=0.01, return_z_loss=True)
    got = loss.outcome(inputs)
    assert got.output.loss == 0
    assert not any(grad.any() for grad in gradients(got))


WRONG = [40, 45, -1, -2, 2**31, 2**32 + 3]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T3_a_target_that_names_no_class(loss, reduction, wrong):
    inputs = loss.inputs(3, 40, dtype=F32, ignored=0.34)
    row = int((inputs.target >= 0).nonzero()[1])
    bad = replace(inputs, target=inputs.target.clone())
    bad.target[row] = wrong
    if loss.row.checks_target:
        with pytest.raises(ValueError, match=rf"target\[{row}\] is {wrong}, outside \[0, 40\).*ignore_index=-100"):
            loss(bad, reduction=reduction)
        return
    good, got = loss.outcome(inputs, reduction=reduction), loss.outcome(bad, reduction=reduction)
    others = torch.arange(3, device=loss.device) != row
    assert got.input[row].isnan().all()
    assert torch.equal(got.input[others], good.input[others])
    if reduction == "none":
        assert got.output.loss[row].isnan()
        assert torch.equal(got.output.loss[others], good.output.loss[others])
    else:
        assert got.output.loss.isnan()
    if loss.fused:  # every row of the head's gradient is a sum over rows
        assert got.weight.isnan().all()


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"use_token_scaling": True}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_T3_nor_with_other_options(loss, options, weighted):
    if loss.row.checks_target:
        pytest.skip(f"{loss} raises, which test_T3_a_target_that_names_no_class has seen")
    loss.needs(**options)
    inputs = loss.inputs(3, 37, dtype=F32, ignored=0.0, class_weight=weighted)
    inputs.target[1] = 99
    for reduction in ("none", "mean"):
        got = loss.outcome(inputs, reduction=reduction, **options)
        assert got.input.isnan().any(-1).tolist() == [False, True, False]
        assert got.output.loss.isnan().any()


def test_T3_position_in_a_batch(loss):
    if not loss.row.checks_target:
        pytest.skip(f"{loss} does not check targets")
    flat = loss.inputs(6, 40, ignored=0.0)
    inputs = replace(flat, input=flat.input.unflatten(0, (2, 3)), target=flat.target.view(2, 3))
    inputs.target[1, 2] = 40
    with pytest.raises(ValueError, match=r"target\[1\]\[2\] is 40"):
        loss(inputs)


@pytest.mark.parametrize("wrong", WRONG)
def test_T3_the_mathematics_makes_it_nan(wrong):
    """What the torch backend computes where it may not look, as under graph capture."""
    logits = torch.randn(3, 37, dtype=torch.float64)
    options = CrossEntropyOptions(label_smoothing=0.1)
    inputs = spec.RowInputs(torch.tensor([0, wrong, -100]), options)
    stats = spec.row_stats(logits, inputs)
    assert spec.row_loss(stats, 37, inputs).loss.isnan().tolist() == [False, True, False]
    grad = spec.row_grad(logits, inputs, stats.lse)
    assert grad.isnan().all(1).tolist() == [False, True, False]
    assert grad.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 36, 37, 1000])
def test_ignore_index_may_be_any_number(loss, ignore_index):
    inputs = loss.inputs(4, 37, ignored=0.5, ignore_index=ignore_index)
    loss.check(inputs, ignore_index=ignore_index, **EXTRAS)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_T5_the_mean_is_over_valid_rows(loss, share):
    inputs = loss.inputs(8, 37, dtype=loss.finest, ignored=share)
    got = loss.check(inputs)
    rows = loss(inputs, reduction="none")
    count = int((inputs.target != -100).sum())
    assert count == round(8 * (1 - share))
    # As many roundings as there are rows, and one for the division.
    eps = torch.finfo(loss.finest).eps
    assert abs(got.output.loss.item() - rows.sum().item() / count) <= 9 * eps * rows.sum().item() / count


@pytest.mark.parametrize("smoothing", [0.1, 0.2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T6_ignored_rows_count_for_nothing(loss, reduction, smoothing):
    """Smoothing, class weights, z-loss: a batch equals itself without its ignored rows."""
    inputs = loss.inputs(6, 37, dtype=loss.finest, class_weight=True, ignored=1 / 3)
    options = {"reduction": reduction, "label_smoothing": smoothing, "lse_square_scale": 0.01}
    kept = inputs.target != -100
    got, short = loss.check(inputs, **options), loss.check(inputs.rows(kept), **options)
    assert torch.equal(got.input[kept], short.input)
    if reduction == "none":
        assert torch.equal(got.output.loss[kept], short.output.loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T8_every_output_element_is_written(loss, reduction):
    """Fresh memory holds NaN here, so that a zero is one that was written."""
    for ignored in (0.25, 0.75):
        bias = {"bias": True} if loss.fused else {}
        inputs = loss.inputs(4, 37, dtype=F32, ignored=ignored, **bias)
        options = {"reduction": reduction, "lse_square_scale": 0.01, **EXTRAS}
        plain = loss.outcome(inputs, **options)
        with NothingIsZeroByChance():
            assert torch.empty(3).isnan().all()
            got = loss.outcome(inputs, **options)
        for value, expected in zip((*got.output, *gradients(got)), (*plain.output, *gradients(plain)), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T11_logits_of_ignored_rows_reach_nothing(ce, reduction, spoiled):
    inputs = ce.inputs(4, 37, dtype=F32)
    clean = ce.outcome(inputs, reduction=reduction, lse_square_scale=0.01, **EXTRAS)
    inputs.input[inputs.target == -100] = spoiled
    got = ce.outcome(inputs, reduction=reduction, lse_square_scale=0.01, **EXTRAS)
    assert torch.equal(got.input, clean.input)
    for value, expected in zip(got.output, clean.output, strict=True):
        assert torch.equal(value, expected)


def hidden_with_spoiled_rows(flce, rows, ignored, spoiled):
    """(clean, spoiled) inputs whose ignored hidden states are zero, and NaN or infinite."""
    clean = flce.inputs(rows, 37, dtype=F32, ignored=ignored / rows, bias=True)
    clean.input[clean.target == -100] = 0
    dirty = replace(clean, input=clean.input.clone())
    dirty.input[clean.target == -100] = spoiled
    return clean, dirty


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T11_hidden_states_of_skipped_rows_reach_nothing(flce, reduction, spoiled):
    clean, dirty = hidden_with_spoiled_rows(flce, 8, 4, spoiled)
    expected = flce.outcome(clean, reduction=reduction, chunk_size=4)
    got = flce.outcome(dirty, reduction=reduction, chunk_size=4)
    assert torch.equal(got.output.loss, expected.output.loss)
    for grad, other in zip(gradients(got), gradients(expected), strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_T11_where_all_rows_are_projected_only_the_heads_gradient_is_lost(flce, reduction, spoiled):
    """The documented policy: 0 * NaN is NaN in the one product that sums over rows, as in torch's own linear."""
    clean, dirty = hidden_with_spoiled_rows(flce, 20, 1, spoiled)  # one of 20: leaving it out does not pay
    expected = flce.outcome(clean, reduction=reduction, chunk_size=20)
    got = flce.outcome(dirty, reduction=reduction, chunk_size=20)
    assert torch.equal(got.output.loss, expected.output.loss)
    assert torch.equal(got.input, expected.input)
    assert torch.equal(got.bias, expected.bias)
    assert got.weight.isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_nan_in_a_valid_row_is_not_hidden(loss, reduction):
    inputs = loss.inputs(4, 37, dtype=F32, ignored=0.25)
    row = int((inputs.target >= 0).nonzero()[0])
    clean = loss.outcome(inputs, reduction=reduction)
    inputs.input[row, 3] = torch.nan
    got = loss.outcome(inputs, reduction=reduction)
    others = torch.arange(4, device=loss.device) != row
    assert got.output.loss.isnan()
    assert got.input[row].isnan().all()
    assert torch.equal(got.input[others], clean.input[others])


def test_class_weighted_mean_has_the_weights_in_its_divisor(loss):
    inputs = loss.inputs(6, 37, dtype=loss.finest, class_weight=True, ignored=1 / 3)
    inputs = replace(inputs, class_weight=inputs.class_weight * 100)  # which the mean does not feel
    got = loss.check(inputs)
    plain = Inputs(inputs.input, inputs.target, inputs.weight, inputs.bias)
    options = CrossEntropyOptions(reduction="none")
    w = inputs.class_weight.double()[inputs.target.clamp(min=0)] * (inputs.target != -100)
    truth, own = (oracle(plain, options).outcome.output.loss.double() for oracle in (reference, yardstick))
    assert_within_budget(got.output.loss, (w * truth).sum() / w.sum(), (w * own).sum() / w.sum(), loss.finest)
