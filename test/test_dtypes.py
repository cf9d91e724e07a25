"""Which dtype goes in, which comes out, and how exact it is in between. Names as in the recipes."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from liger.options import CrossEntropyOptions, CrossEntropyOutput
from liger.testing import Inputs, Outcome, assert_matches, reference, yardstick

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALF = [BF16, F16]
REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_dtype_is_right_and_comes_back(loss, reduction, dtype):
    loss.needs(dtype)
    inputs = loss.inputs(3, 300, 32, dtype=dtype, class_weight=True, **({"bias": True} if loss.fused else {}))
    got = loss.check(
        inputs,
        reduction=reduction,
        label_smoothing=0.1,
        lse_square_scale=0.01,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    wide = F64 if dtype == F64 else F32
    loss_dtype = wide if loss.fused else dtype
    assert [part.dtype for part in got.output] == [loss_dtype, loss_dtype, F32, torch.int64]
    assert all(grad.dtype == dtype for grad in (got.input, got.weight, got.bias) if grad is not None)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_class_weights_of_any_dtype(loss, dtype):
    inputs = loss.inputs(3, 37, dtype=F32, class_weight=True)
    inputs = replace(inputs, class_weight=inputs.class_weight.to(dtype))
    loss.check(inputs, label_smoothing=0.1)


@pytest.mark.parametrize("autocast", [BF16, F16], ids=str)
@pytest.mark.parametrize("accum_dtype", [None, F32], ids=str)
@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
def test_D1_autocast_takes_any_pair_of_dtypes(flce, bias, accum_dtype, autocast):
    pairs = [(x, w) for x in (F32, BF16, F16) for w in (F32, BF16, F16)]
    for x, w in flce.few(pairs[::-1] if accum_dtype else pairs):
        made = flce.inputs(3, 37, dtype=F32, bias=bias is not None)
        inputs = Inputs(made.input.to(x), made.target, made.weight.to(w), None if bias is None else made.bias.to(bias))
        leaves = inputs.leaves()
        with torch.autocast(flce.device, autocast):
            value = flce(leaves, accum_dtype=accum_dtype)
        value.backward()
        assert value.dtype == F32
        assert [leaves.input.grad.dtype, leaves.weight.grad.dtype] == [x, w]
        assert bias is None or leaves.bias.grad.dtype == bias
        _check_autocast(inputs, leaves, value, autocast)


def _check_autocast(inputs, leaves, value, autocast):
    """Autocast's own dtype is what the products may be rounded to; a CPU makes them in float32."""
    bias = None if leaves.bias is None else leaves.bias.grad
    got = Outcome(CrossEntropyOutput(value.detach()), leaves.input.grad, leaves.weight.grad, bias)
    options = CrossEntropyOptions()
    assert_matches(got, reference(inputs, options), yardstick(inputs, options, gemm_dtype=autocast))


@pytest.mark.parametrize("autocast", HALF, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_D6_cross_entropy_under_autocast_is_fp32_as_torchs(ce, reduction, dtype, autocast):
    inputs = ce.inputs(2, 37, dtype=dtype, ignored=0.5)
    leaves = inputs.leaves()
    with torch.autocast(ce.device, autocast):
        value = ce(leaves, reduction=reduction, return_z_loss=True)
        theirs = F.cross_entropy(inputs.input, inputs.target, reduction=reduction)
    assert value.loss.dtype == value.z_loss.dtype == theirs.dtype == F32
    value.loss.sum().backward()
    assert leaves.input.grad.dtype == dtype
    got = Outcome(CrossEntropyOutput(value.loss.detach()), leaves.input.grad)
    assert_matches(got, *ce.expected(inputs, reduction=reduction))


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_D6_autocast_leaves_float64_alone(loss, autocast):
    loss.needs(F64)
    inputs = loss.inputs(3, 37, dtype=F64)
    plain = loss.outcome(inputs)
    with torch.autocast(loss.device, autocast):
        got = loss.outcome(inputs)
    assert got.output.loss.dtype == F64
    assert torch.equal(got.output.loss, plain.output.loss)
    assert torch.equal(got.input, plain.input)


def test_D6_backward_outside_or_inside_autocast_is_the_same(loss):
    inputs = loss.inputs(3, 37, dtype=F32)
    for reduction in ("mean", "none"):
        leaves, others = inputs.leaves(), inputs.leaves()
        with torch.autocast(loss.device, BF16):
            outside = loss(leaves, reduction=reduction).sum()
            loss(others, reduction=reduction).sum().backward()
        outside.backward()
        assert torch.equal(leaves.input.grad, others.input.grad)


PAIRS = [(x, w) for x in (F64, F32, BF16, F16) for w in (F64, F32, BF16, F16) if x != w]


@pytest.mark.parametrize(("x", "w"), PAIRS, ids=str)
def test_D2_mixed_dtypes_without_autocast_are_named(flce, x, w):
    inputs = flce.inputs(3, 37, bias=True)
    with pytest.raises(ValueError, match=rf"weight is {str(w)[6:]} but input is {str(x)[6:]}"):
        flce(replace(inputs, input=inputs.input.to(x), weight=inputs.weight.to(w)))
    same = replace(inputs, input=inputs.input.to(x), weight=inputs.weight.to(x), bias=inputs.bias.to(w))
    with pytest.raises(ValueError, match=rf"bias is {str(w)[6:]} but input is {str(x)[6:]}"):
        flce(same)


def test_D2_autocast_does_not_cast_float64(flce):
    inputs = flce.inputs(3, 37)
    with torch.autocast(flce.device, BF16), pytest.raises(ValueError, match="weight is float64 but input is float32"):
        flce(replace(inputs, weight=inputs.weight.double()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_D5_targets_of_int32_and_int64(loss, reduction, dtype):
    inputs = loss.inputs(3, 37)
    got = loss.check(replace(inputs, target=inputs.target.to(dtype)), reduction=reduction)
    assert torch.equal(got.input, loss.outcome(inputs, reduction=reduction).input)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.bool, F32, F16], ids=str)
def test_D5_other_targets_are_refused(loss, dtype):
    inputs = loss.inputs(3, 37)
    with pytest.raises(ValueError, match=rf"target must be int64 or int32, got {str(dtype)[6:]}"):
        loss(replace(inputs, target=inputs.target.to(dtype)))


@pytest.mark.parametrize("name", ["input", "class_weight"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_that_are_no_floats_are_refused(loss, dtype, name):
    inputs = loss.inputs(3, 37, class_weight=True)
    with pytest.raises(ValueError, match=rf"{'weight' if name != 'input' else name} must be .*got {str(dtype)[6:]}"):
        loss(replace(inputs, **{name: getattr(inputs, name).to(dtype)}))


@pytest.mark.parametrize("name", ["input", "target", "class_weight"])
def test_tensors_without_values_are_refused(loss, name):
    inputs = loss.inputs(3, 37, class_weight=True)
    with pytest.raises(ValueError, match=r"on (the )?meta"):
        loss(replace(inputs, **{name: getattr(inputs, name).to("meta")}))


def test_tensors_on_two_devices_are_refused(loss):
    if loss.device == "cpu":
        pytest.skip("the other device is a GPU")
    inputs = loss.inputs(3, 37)
    with pytest.raises(ValueError, match=r"target is on cpu, input on cuda.*: all tensors must be on one device"):
        loss(replace(inputs, target=inputs.target.cpu()))


@pytest.mark.parametrize("weight_dtype", [F64, F32, BF16, F16], ids=str)
def test_accum_dtype_is_the_weights_or_the_wider_one(flce, weight_dtype):
    flce.needs(weight_dtype)
    inputs = flce.inputs(6, 37, dtype=weight_dtype)
    wide = F64 if weight_dtype == F64 else F32
    for accum in (F64, F32, BF16, F16):
        if accum in (weight_dtype, wide):
            got = flce.outcome(inputs, accum_dtype=accum, chunk_size=6)
            assert got.weight.dtype == weight_dtype
        else:
            with pytest.raises(ValueError, match=rf"accum_dtype must be .*got {str(accum)[6:]}"):
                flce(inputs, accum_dtype=accum)


def test_class_weights_that_want_a_gradient_are_refused(loss):
    inputs = loss.inputs(3, 37, class_weight=True)
    wanting = replace(inputs, class_weight=inputs.class_weight.requires_grad_())
    with pytest.raises(ValueError, match=r"weight requires grad, .*\.detach\(\)"):
        loss(wanting)
    with torch.no_grad():
        loss(wanting)
