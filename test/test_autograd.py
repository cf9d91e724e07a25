"""What autograd sees: who may use the logits, how often backward may run, what is computed. Names as in the recipes."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn import functional as F
from watch import Operators

from liger.testing import Inputs, assert_within_budget, collect

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
REDUCTIONS = ["mean", "sum", "none"]
UPSTREAM_FREE = ["mean", "sum"]


def leaves_of(inputs):
    return [leaf for leaf in (inputs.input, inputs.weight, inputs.bias) if leaf is not None]


def grads(loss, inputs, upstream=None, **kwargs):
    return torch.autograd.grad(loss, leaves_of(inputs), upstream, **kwargs)


def made(subject, reduction, *, frozen=(), dtype=None, rows=4, vocab=40, **options):
    """(inputs as leaves, loss) of a small call."""
    leaves = subject.inputs(rows, vocab, dtype=dtype or subject.finest).leaves(*frozen)
    return leaves, subject(leaves, reduction=reduction, **options)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- A1: other consumers of the logits ------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A1_another_consumer_of_the_logits(loss, reduction):
    inputs = loss.inputs(4, 40, dtype=loss.finest)
    leaves = inputs.leaves()
    z = leaves.input * 1.0
    total = loss(replace(leaves, input=z), reduction=reduction).sum() + z.square().mean()
    total.backward()
    alone = loss.outcome(inputs, reduction=reduction)
    of_square = (2 / inputs.input.numel()) * inputs.input
    # torch multiplies these factors in another order: three roundings, and the sum's, of what is added.
    allowed = 4 * torch.finfo(loss.finest).eps * (alone.input.abs() + of_square.abs())
    assert ((leaves.input.grad - (alone.input + of_square)).abs() <= allowed).all()


def test_A1_softmax_whose_output_is_the_logits(ce):
    """softmax saves its output for its own backward: writing into the logits would corrupt it."""
    inputs = ce.inputs(4, 40, dtype=ce.finest)
    u = inputs.input.clone().requires_grad_()
    ce(Inputs(u.softmax(-1), inputs.target)).backward()
    wide = inputs.input.detach().clone().double().requires_grad_()
    F.cross_entropy(wide.softmax(-1), inputs.target).backward()
    single = inputs.input.float().requires_grad_()
    F.cross_entropy(single.softmax(-1), inputs.target).backward()
    assert_within_budget(u.grad, wide.grad, single.grad, ce.finest)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A1_the_callers_tensors_are_never_changed(loss, reduction):
    for dtype in loss.few(loss.dtypes):
        options = {"bias": True} if loss.fused else {}
        inputs = loss.inputs(4, 40, dtype=dtype, class_weight=True, **options)
        leaves = inputs.leaves()
        versions = [leaf._version for leaf in leaves_of(leaves)]
        loss(leaves, reduction=reduction, softcap=3.0).sum().backward()
        assert same(leaves_of(inputs), leaves_of(leaves))
        assert versions == [leaf._version for leaf in leaves_of(leaves)]
        assert torch.equal(leaves.target, inputs.target)


# --- A2: a retained graph -------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", UPSTREAM_FREE)
def test_A2_two_backwards_with_different_factors(loss, reduction):
    leaves, value = made(loss, reduction, dtype=F32)
    two, three = (torch.tensor(factor, device=loss.device) for factor in (2.0, 3.0))
    first = grads(value, leaves, two, retain_graph=True)
    kept = [grad.clone() for grad in first]
    if loss.row.consumes_saved:
        with pytest.raises(RuntimeError, match="was not 1"):
            grads(value, leaves, three)
    else:
        second = grads(value, leaves, three)
        # 1.5 times the double is the triple, rounded once either way.
        assert same(second, [grad * 1.5 for grad in kept])
    assert same(first, kept)


@pytest.mark.parametrize("reduction", UPSTREAM_FREE)
def test_A2_any_number_of_backwards_with_a_factor_of_one(loss, reduction):
    leaves, value = made(loss, reduction, dtype=F32)
    first = grads(value, leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.fill_(torch.nan)  # what was handed out is the caller's
    assert same(grads(value, leaves, retain_graph=True), kept)
    assert same(grads(value, leaves), kept)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A2_accumulation_into_grad_does_not_reach_what_is_saved(loss, reduction):
    """autograd adopts the first returned tensor as .grad and adds the second in place."""
    inputs = loss.inputs(4, 40, dtype=F32)
    once = loss.outcome(inputs, reduction=reduction)
    leaves = inputs.leaves()
    value = loss(leaves, reduction=reduction).sum()
    for _ in range(2):
        value.backward(retain_graph=True)
    value.backward()
    g = once.input
    assert torch.equal(leaves.input.grad, g + g + g)


@pytest.mark.parametrize("reduction", UPSTREAM_FREE)
def test_A2_a_factor_of_one_first_leaves_the_next_free(loss, reduction):
    leaves, value = made(loss, reduction, dtype=F32)
    first = grads(value, leaves, retain_graph=True)
    second = grads(value, leaves, torch.tensor(4.0, device=loss.device))
    assert same(second, [grad * 4 for grad in first])


def test_A2_none_keeps_everything(loss):
    leaves, value = made(loss, "none", dtype=F32)
    upstream = torch.randn(value.shape, device=loss.device)
    first = grads(value, leaves, upstream, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = grads(value, leaves, upstream * 2, retain_graph=True)  # a power of two scales without rounding
    assert same(second, [grad * 2 for grad in kept])
    assert same(first, kept)
    assert same(grads(value, leaves, upstream), kept)


# --- A3, A4, A5: the upstream gradient ------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_A3_every_row_has_its_own_upstream_gradient(loss, smoothing):
    options = {"bias": True} if loss.fused else {}
    for dtype in loss.few(loss.dtypes):
        inputs = loss.inputs(5, 40, dtype=dtype, **options)
        upstream = torch.arange(5.0, device=loss.device)
        assert upstream[0] == 0
        loss.check(inputs, upstream=upstream, reduction="none", label_smoothing=smoothing, lse_square_scale=0.01)


FACTORS = {
    "3 * loss": lambda value: 3 * value,
    "loss / 7": lambda value: value / 7,
    "loss ** 2": lambda value: value**2,
    "65536 * loss": lambda value: 65536 * value,
    "-loss": lambda value: -value,
    "0 * loss": lambda value: 0 * value,
}


@pytest.mark.parametrize("function", FACTORS)
@pytest.mark.parametrize("reduction", UPSTREAM_FREE)
def test_A4_a_function_of_the_loss_scales_exactly(loss, reduction, function):
    inputs = loss.inputs(2, 40, dtype=F32)
    plain = loss.outcome(inputs, reduction=reduction)
    leaves = inputs.leaves()
    value = loss(leaves, reduction=reduction)
    FACTORS[function](value).backward()
    bare = value.detach().requires_grad_()
    (factor,) = torch.autograd.grad(FACTORS[function](bare), bare)
    assert torch.equal(leaves.input.grad, plain.input * factor)
    if loss.fused:
        assert torch.equal(leaves.weight.grad, plain.weight * factor)


@pytest.mark.parametrize("factor", [3.0, 1 / 7])
def test_A4_half_precision_gradients_are_scaled_in_float32(flce, factor):
    """The factor itself has more digits than the gradient: rounding it first would be a second error. fp16 is never scaled."""
    dtype = BF16
    flce.needs(dtype)
    inputs = flce.inputs(4, 40, dtype=dtype)
    plain = flce.outcome(inputs, reduction="sum")
    leaves = inputs.leaves()
    (flce(leaves, reduction="sum") * factor).backward()
    exact = plain.weight.float() * torch.tensor(factor, device=flce.device)
    if flce.rounding(dtype) < torch.finfo(dtype).eps:
        assert torch.equal(leaves.weight.grad, exact.to(dtype))
    else:
        assert ((leaves.weight.grad - exact).abs() <= exact.abs() * flce.rounding(dtype)).all()


UPSTREAMS = {
    "sum": lambda rows: rows.sum(),
    "mean of a slice": lambda rows: rows[1:].mean(),
    "transposed": lambda rows: (rows.t() * torch.arange(6.0, device=rows.device).view(3, 2)).sum(),
    "strided": lambda rows: (rows[:, ::2] * 3).sum(),
    "expanded": lambda rows: (rows.expand(4, 2, 3) * torch.arange(4.0, device=rows.device).view(4, 1, 1)).sum(),
}


@pytest.mark.parametrize("name", UPSTREAMS)
def test_A5_upstream_gradients_of_any_stride(loss, name):
    flat = loss.inputs(6, 40, dtype=loss.finest, ignored=0.17)
    inputs = replace(flat, input=flat.input.unflatten(0, (2, 3)), target=flat.target.view(2, 3))
    leaves = inputs.leaves()
    value = loss(leaves, reduction="none")
    assert value.shape == (2, 3)
    UPSTREAMS[name](value).backward()
    bare = value.detach().double().requires_grad_()
    (upstream,) = torch.autograd.grad(UPSTREAMS[name](bare), bare)
    expected = loss.check(inputs, upstream=upstream, reduction="none")
    # The same upstream gradient, contiguous this time: strides must not change a bit.
    assert torch.equal(leaves.input.grad, expected.input)


def test_A5_upstream_gradients_that_share_memory(loss):
    inputs = loss.inputs(4, 40, dtype=F32)
    base = torch.arange(8.0, device=loss.device)
    for upstream in (base[:1].expand(4), base[::2], base[:4], base.view(4, 2).t()[1]):
        leaves = inputs.leaves()
        got = grads(loss(leaves, reduction="none"), leaves, upstream)
        other = inputs.leaves()
        expected = grads(loss(other, reduction="none"), other, upstream.contiguous())
        assert same(got, expected)


# --- A7, A9: what is not wanted is not computed ---------------------------------------------------


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "input bias", "weight bias", "input weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A7_frozen_combinations(flce, reduction, frozen):
    inputs = flce.inputs(3, 40, 8, dtype=flce.finest, bias=True)
    frozen = frozen.split()
    got = flce.check(inputs, frozen=frozen, reduction=reduction, chunk_size=2)
    for name in ("input", "weight", "bias"):
        assert (getattr(got, name) is None) == (name in frozen)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A7_a_frozen_weight_costs_no_memory(flce, reduction):
    vocab, hidden, rows = 128256, 4, 2
    inputs = flce.inputs(rows, vocab, hidden, ignored=0.0)
    for frozen in ("weight", "input"):
        leaves = inputs.leaves(frozen)
        with Operators() as seen:
            flce(leaves, reduction=reduction).sum().backward()
        of_weight = [shape for shape in seen.allocated if sorted(shape) == sorted((vocab, hidden))]
        assert bool(of_weight) == (frozen == "input")
        assert bool(seen.weight_products(vocab, hidden)) == (frozen == "input")
        assert bool(seen.input_products(vocab, hidden)) == (frozen == "weight")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A9_without_grad_there_is_a_loss_and_no_gradient_work(loss, monkeypatch, reduction, requires_grad, mode):
    bias = {"bias": mode is torch.no_grad} if loss.fused else {}
    inputs = loss.inputs(3, 40, 16, dtype=F32, **bias)
    with_grad = loss.outcome(inputs, reduction=reduction).output.loss
    leaves = inputs.leaves(*(() if requires_grad else ("input", "weight", "bias")))
    kernels, wanted = loss.row.kernels(), []
    rows = kernels.rows
    monkeypatch.setattr(kernels, "rows", lambda *args: wanted.append(args[3]) or rows(*args))
    with Operators() as seen, mode():
        value = loss(leaves, reduction=reduction)
    assert wanted == [None]
    assert not value.requires_grad
    assert torch.equal(value, with_grad)
    assert same(leaves_of(leaves), leaves_of(inputs))
    assert not seen.input_products(40, 16)
    assert not seen.weight_products(40, 16)


def test_A9_tensors_that_need_no_gradient_give_a_loss_that_needs_none(loss):
    assert not loss(loss.inputs(4, 40)).requires_grad


# --- A13: no second derivative, no forward mode ---------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A13_create_graph_raises(loss, reduction):
    leaves, value = made(loss, reduction)
    with pytest.raises(RuntimeError, match="second derivative"):
        grads(value.sum(), leaves, create_graph=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A13_a_composition_gives_no_partial_hessian(loss, reduction):
    """loss(x) times another function of x: an error, not the other function's part of the second derivative."""
    leaves, value = made(loss, reduction)
    with pytest.raises(RuntimeError, match="second derivative"):
        grads(value.sum() * leaves.input.square().sum(), leaves, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in its first make_dual
@pytest.mark.parametrize("place", ["input", "weight", "bias", "class_weight"])
def test_A13_forward_mode_raises(loss, place):
    options = {"bias": True} if loss.fused else {}
    inputs = loss.inputs(4, 40, class_weight=True, **options)
    if getattr(inputs, place) is None:
        pytest.skip(f"cross entropy has no {place}")
    with forward_ad.dual_level():
        primal = getattr(inputs, place)
        dual = forward_ad.make_dual(primal, torch.ones_like(primal))
        with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=r"forward|jvp"):
            loss(replace(inputs, **{place: dual}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own transforms, when they are first used
def test_A13_function_transforms_raise(loss):
    inputs = loss.inputs(4, 40)

    def call(x):
        return loss(replace(inputs, input=x))

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"functorch|forward"):
            transform(call)(inputs.input)


# --- A14, A16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A14_extras_are_not_differentiable(loss, reduction):
    inputs = loss.inputs(4, 40, dtype=F32)
    options = {"reduction": reduction, "lse_square_scale": 0.01}
    plain = loss.outcome(inputs, **options)
    leaves = inputs.leaves()
    out = loss(leaves, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **options)
    assert [part.requires_grad for part in out] == [True, False, False, False]
    (out.loss + 0.5 * out.z_loss).sum().backward()
    assert torch.equal(leaves.input.grad, plain.input)


@pytest.mark.parametrize("k", [0, 2, 5])
def test_A16_slices_of_the_loss_one_after_the_other(loss, k):
    for dtype in loss.few(loss.dtypes):
        inputs = loss.inputs(5, 40, dtype=dtype)
        once = loss.outcome(inputs, reduction="none")
        leaves = inputs.leaves("weight")
        rows = loss(leaves, reduction="none")
        rows[:k].sum().backward(retain_graph=True)
        rows[k:].sum().backward()
        assert torch.equal(leaves.input.grad, once.input)


def test_A16_the_heads_gradient_adds_up(flce):
    """Its sum over rows is cut in two: the order of summation changes, nothing else."""
    inputs = flce.inputs(5, 40, dtype=F32)
    leaves = inputs.leaves()
    rows = flce(leaves, reduction="none")
    rows[:2].sum().backward(retain_graph=True)
    rows[2:].sum().backward()
    truth, own = flce.expected(inputs, reduction="none")
    assert_within_budget(leaves.weight.grad, truth.outcome.weight, own.outcome.weight, F32, magnitude=truth.magnitudes.weight)


@pytest.mark.parametrize("shape", [(0,), (0, 16), (160,), (40, 15), (20, 16)])
def test_a_head_that_is_gone_in_backward_is_named(flce, shape):
    """As a tool leaves a parameter that has data only while its module runs."""
    leaves, rows = made(flce, "none")
    leaves.weight.data = leaves.weight.new_zeros(shape)
    with pytest.raises(RuntimeError, match="weight was freed or resized between forward and backward") as raised:
        grads(rows.sum(), leaves)
    assert str(shape) in str(raised.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_nobody_uses_needs_no_backward(loss, reduction):
    leaves, _ = made(loss, reduction)
    (leaves.input * 2).sum().backward()
    assert torch.equal(leaves.input.grad, torch.full_like(leaves.input, 2))


# --- in_place -------------------------------------------------------------------------------------


def in_place_call(ce, reduction, dtype=F32, **options):
    """(inputs, the logits given to the call, loss): logits with a history, as a model's are."""
    ce.needs(dtype, in_place=True)
    inputs = ce.inputs(4, 40, dtype=dtype)
    leaf = inputs.input.clone().requires_grad_()
    z = leaf.clone()
    z.retain_grad()
    return inputs, z, ce(Inputs(z, inputs.target), reduction=reduction, in_place=True, **options)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_place_gradients_are_bitwise_the_default_ones(ce, reduction, dtype, options):
    inputs, z, value = in_place_call(ce, reduction, dtype, **options)
    plain = ce.outcome(inputs, reduction=reduction, **options)
    assert torch.equal(value, plain.output.loss)
    (value * 1).sum().backward()
    assert torch.equal(z.grad, plain.input)
    assert torch.equal(z, plain.input)  # the logits' storage holds it


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_place_makes_no_second_buffer(ce, reduction, dtype):
    ce.needs(dtype, in_place=True)
    inputs = ce.inputs(4, 40, dtype=dtype).leaves()
    with Operators() as seen:
        ce(inputs, reduction=reduction, in_place=True).sum().backward()
    assert inputs.input.grad.data_ptr() == inputs.input.data_ptr()
    buffers = [shape for shape in seen.allocated if shape == (4, 40)]
    assert not buffers
    with Operators() as seen:
        ce(inputs.leaves(), reduction=reduction).sum().backward()
    assert (4, 40) in seen.allocated  # the watch sees such a buffer where there is one


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_place_bumps_the_version_counter(ce, reduction):
    _, z, value = in_place_call(ce, reduction)
    if reduction == "none":  # backward is what overwrites
        assert z._version == 0
        value.sum().backward()
    assert z._version == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_A1_in_place_gives_another_consumer_an_error(ce, reduction):
    ce.needs(in_place=True)
    inputs = ce.inputs(4, 40)
    leaf = inputs.input.clone().requires_grad_()
    z = leaf * 1.0
    square = z.square().mean()
    value = ce(Inputs(z, inputs.target), reduction=reduction, in_place=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (value + square).backward() if reduction != "none" else [value.backward(retain_graph=True), square.backward()]


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_place_graphs_are_single_use(ce, reduction, factor):
    _, z, value = in_place_call(ce, reduction)
    upstream = torch.full_like(value, factor)
    torch.autograd.grad(value, z, upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="single-use"):
        torch.autograd.grad(value, z, upstream)


@pytest.mark.parametrize("mode", [torch.no_grad, contextlib.nullcontext])
def test_in_place_without_a_gradient_changes_nothing(ce, mode):
    ce.needs(in_place=True)
    inputs = ce.inputs(4, 40)
    before, version = inputs.input.clone(), inputs.input._version
    with mode():
        ce(inputs, in_place=True)
    assert torch.equal(inputs.input, before)
    assert inputs.input._version == version


def test_in_place_keeps_strides(ce):
    """Logits cut out of a wider tensor: the gradient fills them and touches nothing beside them."""
    ce.needs(in_place=True)
    inputs = ce.inputs(4, 40)
    wide = torch.full((4, 48), 7.0, device=ce.device)
    wide[:, 3:43] = inputs.input
    z = wide[:, 3:43].requires_grad_()
    ce(Inputs(z, inputs.target), in_place=True).backward()
    assert torch.equal(z.grad, ce.outcome(inputs).input)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, 43:] == 7).all()


def test_in_place_fills_a_transposed_layout(ce):
    ce.needs(in_place=True)
    inputs = ce.inputs(4, 40)
    z = inputs.input.t().contiguous().t().requires_grad_()
    ce(Inputs(z, inputs.target), in_place=True).backward()
    assert torch.equal(z.grad, ce.outcome(inputs).input)


def test_in_place_refuses_what_it_could_only_copy(ce):
    ce.needs(in_place=True)
    target = torch.tensor([1, 2, 3], device=ce.device)
    base = torch.randn(200, device=ce.device)
    for strides in ((0, 1), (20, 1), (1, 0), (1, 2)):  # expanded rows, overlapping ones, expanded columns, interleaved
        with pytest.raises(ValueError, match=r"in_place=True .* overlapping"):
            ce(Inputs(base.as_strided((3, 40), strides), target), in_place=True)
    unviewable = torch.randn(2, 3, 40, device=ce.device).transpose(0, 1)
    with pytest.raises(ValueError, match=r"in_place=True .* \(3, 2, 40\)"):
        ce(Inputs(unviewable, target.view(3, 1).expand(3, 2)), in_place=True)


def test_leaves_collect_what_backward_gives(loss):
    """The helper all tests lean on: gradients are of the leaves, and fresh leaves have none."""
    inputs = loss.inputs(3, 5)
    leaves = inputs.leaves()
    assert leaves.input.grad is None
    outcome = collect(loss(leaves), leaves)
    assert outcome.input is leaves.input.grad
    assert inputs.input.grad is None
