"""Shapes, strides and sizes. Names as in the recipes."""

from dataclasses import replace

import pytest
import torch

from liger.testing import Inputs

F32 = torch.float32
REDUCTIONS = ["mean", "sum", "none"]


def assert_same_as_contiguous(loss, inputs, **options):
    """A call on tensors of any stride gives what it gives on contiguous copies, and leaves the tensors as they were."""
    given = [t for t in (inputs.input, inputs.weight, inputs.bias) if t is not None]
    leaves = [t.detach().requires_grad_() for t in given]  # detached: the strides are kept
    copies = [t.detach().contiguous().clone() for t in given]
    names = [name for name in ("input", "weight", "bias") if getattr(inputs, name) is not None]
    strided = replace(inputs, **dict(zip(names, leaves, strict=True)))
    plain = replace(inputs, **dict(zip(names, copies, strict=True)), target=inputs.target.clone())
    value = loss(strided, **options)
    gradients = torch.autograd.grad(value.sum(), leaves)
    expected = loss.check(plain, **options)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.shape == getattr(inputs, name).shape
    if torch.equal(value, expected.output.loss):  # the same order of summation gives the same bits
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(gradient, getattr(expected, name), rtol=0, atol=0)
    else:  # a product whose operand is transposed may add in another order
        assert loss.fused
        reference, yardstick = loss.expected(plain, **options)
        for name, gradient in zip(names, gradients, strict=True):
            _within(loss, gradient, reference, yardstick, name)
    for tensor, copy in zip(given, copies, strict=True):
        assert torch.equal(tensor, copy)


def _within(loss, gradient, reference, yardstick, name):
    from liger.testing import assert_within_budget

    assert_within_budget(
        gradient,
        getattr(reference.outcome, name),
        getattr(yardstick.outcome, name),
        gradient.dtype,
        magnitude=getattr(reference.magnitudes, name),
        what=name,
    )
