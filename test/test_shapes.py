"""Shapes, strides and sizes. Names as in the recipes."""

from dataclasses import replace

import pytest
import torch

from liger.testing import Inputs, assert_matches

F32 = torch.float32
REDUCTIONS = ["mean", "sum", "none"]


def contiguous(inputs):
    def copy(tensor):
        return None if tensor is None else tensor.detach().contiguous().clone()

    return Inputs(copy(inputs.input), copy(inputs.target), copy(inputs.weight), copy(inputs.bias), copy(inputs.class_weight))


def check_strided(loss, inputs, **options):
    """A call on tensors of any stride: right, the same as on contiguous copies, and nothing written to the tensors."""
    leaves = inputs.leaves()
    loss(leaves, **options).sum().backward()
    got, plain = loss.check(inputs, **options), contiguous(inputs)
    for name in ("input", "weight", "bias", "target"):
        tensor = getattr(leaves, name)
        assert tensor is None or torch.equal(tensor, getattr(plain, name))
    in_rows = inputs.input.stride(-1) < max(inputs.input.stride())
    if in_rows and not loss.fused:  # sums over columns, and products, add in an order that depends on the layout
        same = loss.outcome(plain, **options)
        assert torch.equal(got.output.loss, same.output.loss)
        assert torch.equal(got.input, same.input)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_S3_transposed_batch(loss, reduction):
    flat = loss.inputs(4, 9, 5)
    inputs = replace(flat, input=flat.input.unflatten(0, (2, 2)).transpose(0, 1), target=flat.target.view(2, 2))
    assert not inputs.input.is_contiguous()
    check_strided(loss, inputs, reduction=reduction)


def every_second_class(inputs):
    return replace(inputs, input=widened(inputs.input, 2)[:, ::2])


def columns_of_a_wider_tensor(inputs):
    wide = torch.full((inputs.input.shape[0], inputs.input.shape[1] + 8), 99.0, device=inputs.input.device)
    wide[:, 3 : 3 + inputs.input.shape[1]] = inputs.input
    return replace(inputs, input=wide[:, 3 : 3 + inputs.input.shape[1]])


def every_second_row(inputs):
    return replace(inputs, input=inputs.input.repeat_interleave(2, 0)[::2])


def transposed(inputs):
    return replace(inputs, input=inputs.input.t().contiguous().t())


def one_row_expanded(inputs):
    return replace(inputs, input=inputs.input[:1].expand_as(inputs.input))


def every_second_target(inputs):
    return replace(inputs, target=inputs.target.repeat_interleave(2)[::2])


def one_target_expanded(inputs):
    return replace(inputs, target=inputs.target.new_tensor(2).expand_as(inputs.target))


def widened(tensor, factor):
    """Every column `factor` times, the copies spoiled."""
    wide = tensor.repeat_interleave(factor, 1)
    wide[:, 1::factor] = 99.0
    return wide


LAYOUTS = [
    every_second_class,
    columns_of_a_wider_tensor,
    every_second_row,
    transposed,
    one_row_expanded,
    every_second_target,
    one_target_expanded,
]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_S4_strided_tensors(loss, layout, reduction):
    check_strided(loss, layout(loss.inputs(3, 37, ignored=0.34)), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_S4_tensors_whose_memory_holds_their_negatives(loss, reduction):
    loss.needs()
    inputs = loss.inputs(3, 37)
    negated = torch.complex(torch.zeros_like(inputs.input), -inputs.input).conj().imag.requires_grad_()
    assert negated.is_neg()
    upstream = torch.complex(torch.zeros((), device=loss.device), torch.full((), -2.0, device=loss.device)).conj().imag
    assert upstream.is_neg()
    value = loss(replace(inputs, input=negated), reduction=reduction)
    value.backward(upstream.expand(value.shape))
    wanted = loss.outcome(inputs, upstream=torch.full(value.shape, 2.0, device=loss.device), reduction=reduction)
    assert torch.equal(value, wanted.output.loss)
    assert torch.equal(negated.grad, wanted.input)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_S4_strided_head(flce, reduction):
    inputs = flce.inputs(4, 37, bias=True, class_weight=True)
    w, b, c = inputs.weight, inputs.bias, inputs.class_weight
    check_strided(flce, replace(inputs, weight=w.t().contiguous().t()), reduction=reduction)
    check_strided(flce, replace(inputs, weight=widened(w, 2)[:, ::2]), reduction=reduction)
    strided = {"bias": b.repeat_interleave(2)[::2], "class_weight": c.repeat_interleave(2)[::2]}
    check_strided(flce, replace(inputs, **strided), reduction=reduction)


@pytest.mark.parametrize("shape", [(0, 16), (16,), (0,), (4, 0), (4, 4, 16), ()])
def test_S7_a_sharded_head_is_named(flce, shape):
    inputs = flce.inputs(4, 37)
    head = torch.zeros(shape, device=flce.device)
    with pytest.raises(ValueError, match=r"weight .*sharded") as raised:
        flce(replace(inputs, weight=head))
    assert str(shape) in str(raised.value)


WRONG = {
    "target of another length": ({"target": torch.zeros(3, dtype=torch.int64)}, r"target .*\(4,\).*\(3,\)"),
    "target with a dimension too many": ({"target": torch.zeros(4, 1, dtype=torch.int64)}, r"target .*\(4, 1\)"),
    "class weight of another length": ({"class_weight": torch.ones(36)}, r"weight .*\(40,\).*\(36,\)"),
    "class weight with two dimensions": ({"class_weight": torch.ones(1, 40)}, r"weight .*\(40,\).*\(1, 40\)"),
    "input without dimensions": ({"input": torch.tensor(1.0), "target": torch.tensor(0)}, r"input .*\(\)"),
    "input without classes": ({"input": torch.zeros(4, 0)}, r"input .*\(4, 0\)"),
    "target that is no tensor": ({"target": [0, 1, 2, 3]}, r"target must be a torch.Tensor, got list"),
}
WRONG_HEAD = {
    "bias of another length": ({"bias": torch.ones(36)}, r"bias .*\(40,\).*\(36,\)"),
    "weight of another width": ({"weight": torch.ones(40, 15)}, r"weight .*16.*\(40, 15\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_S7_wrong_shapes_are_named(loss, case):
    changed, message = WRONG[case]
    changed = {name: t.to(loss.device) if isinstance(t, torch.Tensor) else t for name, t in changed.items()}
    with pytest.raises(ValueError, match=message):
        loss(replace(loss.inputs(4, 40), **changed))


@pytest.mark.parametrize("case", WRONG_HEAD)
def test_S7_wrong_shapes_of_the_head_are_named(flce, case):
    changed, message = WRONG_HEAD[case]
    with pytest.raises(ValueError, match=message):
        flce(replace(flce.inputs(4, 40), **{name: t.to(flce.device) for name, t in changed.items()}))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_S8_no_rows(loss, shape, reduction):
    extras = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    for dtype in loss.dtypes:
        flat = loss.inputs(0, 37, dtype=dtype, **({"bias": True} if loss.fused else {}))
        inputs = replace(flat, input=flat.input.reshape(*shape, -1 if 0 not in shape else flat.input.shape[1]))
        inputs = replace(inputs, target=flat.target.reshape(shape))
        leaves = inputs.leaves()
        out = loss(leaves, reduction=reduction, label_smoothing=0.1, **extras)
        expected = shape if reduction == "none" else ()
        assert out.loss.shape == out.z_loss.shape == out.token_accuracy.shape == expected
        assert out.predicted_tokens.shape == shape
        assert out.loss.sum() == out.z_loss.sum() == out.token_accuracy.sum() == 0
        out.loss.sum().backward()
        for leaf in (leaves.input, leaves.weight, leaves.bias):
            if leaf is not None:
                assert leaf.grad.shape == leaf.shape
                assert not leaf.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 4096, 4097])
def test_S9_any_number_of_rows_and_chunk_size(flce, rows, reduction):
    if flce.interpreted and rows > 33:
        pytest.skip("thousands of rows in the interpreter")
    inputs = flce.inputs(rows, 20, 8, ignored=0.1)
    reference, yardstick = flce.expected(inputs, reduction=reduction)
    for size in flce.few([16, None, 1, 1000, 4096, 10**6]):
        if size != 1 or rows <= 33:
            assert_matches(flce.outcome(inputs, reduction=reduction, chunk_size=size), reference, yardstick)


SIZES = [1, 2, 3, 127, 128, 129, 32768, 65535, 65536, 65537, 131072, 262144, 1000003]


@pytest.mark.parametrize("vocab", SIZES)
def test_S10_any_vocabulary(loss, vocab):
    options = {"label_smoothing": 0.1, "return_predicted_tokens": True, "return_token_accuracy": True}
    for reduction in ["mean"] if vocab > 2**16 else ["mean", "none"]:
        rows = 1 if vocab > 2**17 else 2  # one of two rows is ignored
        inputs = loss.inputs(rows, vocab, 4, ignored=0.5)
        inputs.target[inputs.target >= 0] = vocab - 1  # the last class, next to whatever padding there is
        loss.check(inputs, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [20011, 100003])
def test_S10_every_option_where_a_row_takes_several_blocks(loss, vocab, reduction):
    """Kernels walk through a long row in blocks, the last of them partial; an option has to reach all of them."""
    every = {"label_smoothing": 0.3, "lse_square_scale": 0.01, "softcap": 4.0, "return_predicted_tokens": True}
    if loss.fused:
        every["use_token_scaling"] = True
    rows = 2 if vocab < 2**16 else 1
    upstream = torch.tensor([3.0, -0.5][:rows] if reduction == "none" else 4.0, device=loss.device)
    if loss.fused and loss.interpreted and reduction == "mean":
        upstream = None  # scaling the head's gradient row by row takes the interpreter minutes
    for dtype in loss.dtypes:
        inputs = loss.inputs(rows, vocab, 4, dtype=dtype, class_weight=True, ignored=0.0)
        inputs.target[0] = vocab - 1
        for options in ({}, every):
            loss.check(inputs, upstream=upstream, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_predicted_tokens_have_the_targets_shape(loss, reduction):
    flat = loss.inputs(2, 9)
    inputs = replace(flat, input=flat.input.unflatten(0, (1, 2)), target=flat.target.view(1, 2))
    assert loss(inputs, reduction=reduction, return_predicted_tokens=True).predicted_tokens.shape == (1, 2)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (1, 2, 2), (4, 1)])
def test_R4_none_has_the_targets_shape(loss, shape):
    flat = loss.inputs(4, 9) if shape else loss.inputs(1, 9, ignored=0.0)
    inputs = replace(flat, input=flat.input.reshape(*shape, -1), target=flat.target.reshape(shape))
    extras = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    got = loss.check(inputs, reduction="none", lse_square_scale=0.01, **extras)
    ignored = inputs.target == -100
    for part in got.output:
        assert part.shape == shape
    assert not got.output.loss[ignored].any()
    assert not got.output.z_loss[ignored].any()
    assert not got.output.token_accuracy[ignored].any()
    assert (got.output.predicted_tokens[ignored] == -1).all()
    assert got.input.shape == inputs.input.shape
