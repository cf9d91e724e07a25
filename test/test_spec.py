"""The mathematics: against torch's losses, against finite differences, and option by option on every implementation."""

import contextlib
from dataclasses import fields, replace
from itertools import product

import mutants
import pytest
import torch
from torch.nn import functional as F

from liger import explain, spec
from liger.dispatch import OPS, Request, UnsupportedError, device_info, resolve, table
from liger.functional import GIVEN_TENSORS
from liger.options import CrossEntropyOptions
from liger.testing import CASES, Inputs, assert_matches, assert_within_budget, reference, yardstick

REDUCTIONS = ("mean", "sum", "none")


def torch_loss(inputs, dtype, **options):
    """torch's own loss and gradients in a dtype: [loss, gradient of input, gradient of weight, gradient of bias]."""
    leaves = [
        None if tensor is None else tensor.detach().to(dtype).requires_grad_()
        for tensor in (inputs.input, inputs.weight, inputs.bias)
    ]
    options["weight"] = None if inputs.class_weight is None else inputs.class_weight.to(dtype)
    if inputs.weight is None:
        loss = F.cross_entropy(leaves[0], inputs.target, **options)
    else:
        loss = F.linear_cross_entropy(leaves[0], leaves[1], inputs.target, linear_bias=leaves[2], **options)
    loss.backward(torch.ones_like(loss))
    return [loss.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_torch(loss, reduction, smoothing, class_weight):
    if loss.fused and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no F.linear_cross_entropy")
    bias = {"bias": True} if loss.fused else {}
    inputs = loss.inputs(4, 37, dtype=loss.finest, class_weight=class_weight, **bias)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    got = loss.outcome(inputs, **options)
    truth = torch_loss(inputs, torch.float64, **options)
    own = torch_loss(inputs, torch.float32, **options)
    sizes = loss.expected(inputs, **options)[0].magnitudes
    size = sizes.output.loss.sum() if reduction != "none" else sizes.output.loss
    values = (got.output.loss, got.input, got.weight, got.bias)
    magnitudes = (size, sizes.input, sizes.weight, sizes.bias)
    for value, expected, measure, magnitude in zip(values, truth, own, magnitudes, strict=True):
        if expected is not None:
            assert_within_budget(value, expected, measure, loss.finest, magnitude=magnitude)


# Option combinations with distinct gradients. Token scaling is not one: it stops a gradient on purpose.
COMBINATIONS = [
    {"reduction": reduction, "label_smoothing": e, "lse_square_scale": k, "softcap": cap, "logit_scale": 0.75}
    for reduction, e, k, cap in product(REDUCTIONS, (0.0, 0.1), (0.0, 0.01), (None, 2.0))
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_gradient_is_the_derivative(loss, options):
    loss.needs(torch.float64)
    biases = (False, True) if loss.fused else (False,)
    for class_weight, bias in product((False, True), biases):
        extra = {"bias": bias} if loss.fused else {}
        inputs = loss.inputs(3, 4, 2, dtype=torch.float64, scale=1.0, class_weight=class_weight, **extra)
        names = [name for name in ("input", "weight", "bias") if getattr(inputs, name) is not None]
        chunks = {"chunk_size": 1} if loss.fused else {}

        def call(*tensors, inputs=inputs, names=names, chunks=chunks):
            given = dict(zip(names, tensors, strict=True))
            leaves = loss.tensors(target=inputs.target, class_weight=inputs.class_weight, **given)
            return loss(leaves, **options, **chunks)

        leaves = inputs.leaves()
        assert torch.autograd.gradcheck(call, tuple(getattr(leaves, name) for name in names))


# One value other than the default for every option, and what a call needs to notice it.
VALUES = {
    "ignore_index": 3,
    "reduction": "sum",
    "label_smoothing": 0.1,
    "lse_square_scale": 0.01,
    "softcap": 2.0,
    "logit_scale": 0.25,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "loss_dtype": torch.float32,
    "in_place": True,
    "accum_dtype": torch.bfloat16,
    "use_token_scaling": True,
    "chunk_size": 3,
    "weight": True,
    "bias": True,
    "ce_weight": True,
    "num_items": torch.tensor([5]),
}
TENSORS = ("weight", "bias", "ce_weight", "num_items")
BF16_OPTIONS = ("loss_dtype", "accum_dtype")


def option_names(op):
    return [field.name for field in fields(CrossEntropyOptions)] + list(GIVEN_TENSORS[op])


def call_with(subject, name):
    """(inputs, options) of a call with this option at the value above."""
    dtype = torch.bfloat16 if name in BF16_OPTIONS else subject.finest
    given = {"bias": name == "bias"} if subject.fused else {}
    inputs = subject.inputs(4, 37, dtype=dtype, class_weight=name in ("weight", "ce_weight"), **given)
    if name == "ignore_index":
        inputs.target[inputs.target == -100] = VALUES[name]
    if name == "num_items":
        inputs = replace(inputs, num_items=VALUES[name].to(subject.device))
    options = {} if name in TENSORS else {name: VALUES[name]}
    return inputs, options | ({"lse_square_scale": 0.01} if name == "return_z_loss" else {})


@pytest.mark.parametrize("op", OPS)
def test_every_option_has_a_value_to_try(op):
    assert set(option_names(op)) <= set(VALUES) | {"vocab_parallel"}  # which test_vocab_parallel.py tries


@pytest.mark.parametrize("name", VALUES)
def test_an_option_is_right_or_refused(loss, name):
    if name in loss.row.capability.options:
        loss.check(*(call := call_with(loss, name))[:1], **call[1])
    elif name in option_names(loss.row.op):
        shape = (4, 40, 16) if loss.fused else (4, 40)
        info = device_info(torch.device(loss.device))
        request = Request(loss.row.op, info, torch.bfloat16, shape, ((name, name in TENSORS or VALUES[name]),))
        with pytest.raises(UnsupportedError, match=rf"{loss.row.backend}: .*{name}="):
            resolve(request, loss.row.backend)


def observed(subject, name):
    """(without the option, with it): whatever the option is there to change."""
    inputs, options = call_with(subject, name)
    if name in ("accum_dtype", "chunk_size"):
        describe = {"device": torch.device(subject.device), "dtype": torch.bfloat16, "shape": (4, 40, 16)}
        describe["backend"] = subject.row.backend
        plain = explain(subject.row.op, **describe).plan
        if name == "accum_dtype" and plain.accum_dtype == options[name]:  # already what the plan chooses here
            options = {name: torch.float32}
        changed = explain(subject.row.op, **describe, **options).plan
        return (plain.accum_dtype, plain.chunk_rows), (changed.accum_dtype, changed.chunk_rows)
    without = {key: value for key, value in options.items() if key != name}
    if name == "in_place":
        leaves = inputs.leaves()
        subject(leaves, **options).backward()
        return inputs.input.tolist(), leaves.input.tolist()
    plain_inputs = inputs
    if name in TENSORS:
        cleared = "class_weight" if name in ("weight", "ce_weight") else name
        plain_inputs = replace(inputs, **{cleared: None})
    plain, changed = subject(plain_inputs, **without), subject(inputs, **options)
    if name == "loss_dtype":
        return plain.dtype, changed.dtype
    if name.startswith("return_"):
        part = name.removeprefix("return_")
        return getattr(plain, part, None), getattr(changed, part)
    return plain.item(), changed.item()


@pytest.mark.parametrize("name", VALUES)
def test_H8_an_accepted_option_changes_the_result(loss, name):
    if name not in loss.row.capability.options:
        pytest.skip(f"{loss} refuses {name}, which test_an_option_is_right_or_refused has seen")
    without, with_it = observed(loss, name)
    assert without is not with_it
    if name not in ("return_token_accuracy", "return_predicted_tokens", "return_z_loss"):
        assert without != with_it


def test_lowest_index_wins_a_tie(loss):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    target = torch.tensor([2, 0, -100])
    if loss.fused:
        inputs = loss.tensors(torch.eye(3), target, weight=logits.t().contiguous())
    else:
        inputs = loss.tensors(logits, target)
    output = loss(inputs, return_predicted_tokens=True, return_token_accuracy=True)
    assert output.predicted_tokens.tolist() == [1, 0, -1]
    assert output.token_accuracy.item() == 0.5


def test_statistics_of_a_split_vocabulary_combine(ce):
    """What a vocabulary that is split over memory or GPUs rests on: maxima and sums of the parts give the whole's."""
    ce.needs(vocab_parallel=2)
    inputs = ce.inputs(4, 50, dtype=ce.finest, class_weight=True, ignored=0.0)
    options = CrossEntropyOptions(label_smoothing=0.1, return_predicted_tokens=True)
    kernels, w = ce.row.kernels(), inputs.class_weight.to(spec.compute_dtype(ce.finest))

    def stats(start, stop):
        part = w[start:stop].contiguous()
        rows = spec.RowInputs(inputs.target, options, None, part, w.sum(), start=start, vocab=50)
        return kernels.row_stats(inputs.input[:, start:stop], rows)

    parts = [stats(0, 20), stats(20, 50)]
    together = spec.RowStats._make(map(torch.stack, zip(*parts, strict=True)))
    together = together._replace(argmax=together.argmax + torch.tensor([[0], [20]], device=w.device))
    weight_sums = torch.stack([w[:20].sum(), w[20:].sum()])[:, None].expand(2, 4)
    combined = together.combine(weight_sums)
    truth, own = ce.expected(replace(inputs, class_weight=None), reduction="none")
    nll = combined.sum_exp.log() - combined.target_logit
    assert_within_budget(nll, truth.outcome.output.loss, own.outcome.output.loss, ce.finest)
    in_first = inputs.target < 20
    assert torch.equal(parts[0].target_logit.isnan(), ~in_first)
    assert torch.equal(parts[1].target_logit.isnan(), in_first)
    assert torch.equal(combined.argmax, inputs.input.argmax(-1))
    whole = stats(0, 50)
    shifted = (inputs.input.double() - inputs.input.double().amax(1, keepdim=True)) @ w.double()
    assert_within_budget(whole.weighted_sum, shifted, _float_weighted_sum(inputs.input, w), ce.finest)
    assert_within_budget(combined.weighted_sum, shifted, _float_weighted_sum(inputs.input, w), ce.finest)


def test_smoothing_of_a_part_whose_first_class_is_masked(ce):
    """The target is in another part, so nothing but this part's own values may set the scale of the sum."""
    ce.needs(vocab_parallel=2)
    vocab, rows = 40, 3
    inputs = ce.inputs(rows, vocab, dtype=ce.finest, class_weight=True, ignored=0.0)
    logits, w = inputs.input.clone(), inputs.class_weight.to(spec.compute_dtype(ce.finest))
    logits[:, 0], w[0] = -1e30, 0.0
    target = torch.full_like(inputs.target, vocab + 1)
    options = CrossEntropyOptions(label_smoothing=0.1)
    found = ce.row.kernels().row_stats(logits, spec.RowInputs(target, options, None, w, w.sum(), start=0, vocab=2 * vocab))
    shifted = logits.double()[:, 1:] - logits.double().amax(-1, keepdim=True)
    wanted = (w.double()[1:] * shifted).sum(-1)
    bound = vocab * torch.finfo(w.dtype).eps * (w.double()[1:] * shifted.abs()).sum(-1)
    assert ((found.weighted_sum.double() - wanted).abs() <= bound).all()


def _float_weighted_sum(logits, w):
    logits = logits.float()
    return (logits - logits.amax(1, keepdim=True)) @ w.float()


def test_every_mutant_still_applies():
    for mutant in mutants.MUTANTS:
        assert mutant.apply((mutants.ROOT / mutant.file).read_text("utf-8"))


def test_the_oracle_is_torch_cross_entropy(ce):
    """The oracle is checked by what it does not contain: torch's own cross entropy."""
    inputs = ce.inputs(9, 37, dtype=torch.float32, class_weight=True)
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "label_smoothing": 0.1}
        oracle = reference(inputs, CrossEntropyOptions(**options))
        loss, grad, *_ = torch_loss(inputs, torch.float64, **options)
        torch.testing.assert_close(oracle.outcome.output.loss, loss, rtol=1e-13, atol=1e-13)  # a few hundred roundings
        torch.testing.assert_close(oracle.outcome.input, grad, rtol=1e-13, atol=1e-13)


def test_an_error_budget_is_one_rounding_where_torch_is_exact():
    truth = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    assert_within_budget(truth + torch.tensor([0.0078, 0, 0]), truth, truth, torch.bfloat16)  # epsilon is 2 ** -7
    with pytest.raises(AssertionError, match=r"result\[0\] = 1.0079, expected 1 .* times the budget"):
        assert_within_budget(truth + torch.tensor([0.0079, 0, 0]), truth, truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="nan"):
        assert_within_budget(truth * torch.nan, truth, truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(truth[:2], truth, truth, torch.bfloat16)


def test_a_large_element_lends_no_error_to_a_small_one():
    truth = torch.tensor([1e-6, 1.0], dtype=torch.float64)
    near = {"magnitude": truth, "yardstick": truth * 1.001, "reference": truth, "dtype": torch.float32}
    assert_within_budget(truth + torch.tensor([1.9e-9, 1.9e-3]), **near)
    with pytest.raises(AssertionError, match=r"1 of 2 elements .* result\[0\]"):
        assert_within_budget(truth + torch.tensor([2.1e-9, 0]), **near)


@pytest.mark.parametrize(("below", "holds"), [(88.0, True), (60.0, False)])
def test_what_a_gpu_flushes_is_within_budget_whatever_it_is_multiplied_by(below, holds):
    """p of a score that lies 88 below the others' is no normal float32; its gradient is, where z-loss multiplies it by 60."""
    inputs = Inputs(torch.tensor([[100.0, 0.0, 100.0 - below]]), torch.tensor([0]))
    options = CrossEntropyOptions(lse_square_scale=0.3)
    truth = reference(inputs, options)
    flushed = truth.outcome.input.float()
    flushed[0, 2] = 0
    assert truth.outcome.input[0, 2] > torch.finfo(torch.float32).smallest_normal
    with contextlib.nullcontext() if holds else pytest.raises(AssertionError, match=r"gradient of input\[0, 2\] = 0"):
        assert_matches(replace(truth.outcome, input=flushed), truth, yardstick(inputs, options))


def test_cases_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(len(table(op)) > 0 for op in OPS)
