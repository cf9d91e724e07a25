"""`num_items`, what a mean divides by: any number or tensor of one, in every place where a divisor counts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import liger
from liger.testing import make_inputs

FORMS = {
    "int": 5,
    "float": 5.0,
    "numpy's int64": np.int64(5),
    "int64": torch.tensor(5),
    "int32": torch.tensor([5], dtype=torch.int32),
    "float32": torch.tensor([[5.0]]),
    "bfloat16": torch.tensor(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("class_weight", [False, True])
def test_every_form_divides_core_and_z_loss(loss, form, class_weight):
    items = FORMS[form]
    items = items.to(loss.device) if isinstance(items, torch.Tensor) else items
    inputs = replace(loss.inputs(4, 37, dtype=loss.finest, class_weight=class_weight), num_items=items)
    loss.check(inputs, lse_square_scale=0.1, return_z_loss=True, label_smoothing=0.1)


def test_a_tensor_on_the_host_serves_a_device(loss):
    inputs = loss.inputs(4, 37)
    there = loss(replace(inputs, num_items=torch.tensor(5)))
    assert torch.equal(there, loss(replace(inputs, num_items=5)))


@pytest.mark.parametrize("items", [0, torch.tensor(0), torch.tensor([0.0])], ids=repr)
def test_of_no_items_the_mean_is_zero_and_attached(loss, items):
    got = loss.check(replace(loss.inputs(4, 37), num_items=items), lse_square_scale=0.1)
    assert got.output.loss == 0
    assert not got.input.any()


def test_with_nothing_valid_the_mean_is_zero(loss):
    got = loss.check(replace(loss.inputs(4, 37, ignored=1.0), num_items=9))
    assert got.output.loss == 0


def test_accuracy_stays_a_share_of_the_valid_rows(loss):
    inputs = loss.inputs(6, 37, ignored=0.5)
    asked = {"return_token_accuracy": True}
    plain, divided = loss(inputs, **asked), loss(replace(inputs, num_items=100), **asked)
    assert torch.equal(plain.token_accuracy, divided.token_accuracy)


BAD = [-1, -0.5, 1e-40, math.nan, math.inf, 10**25, True, np.True_, "5", 1j, [5]]
BAD += [torch.tensor(value) for value in (-1, math.nan, math.inf, True, 1j, [1, 2])] + [torch.empty(0)]


@pytest.mark.parametrize("items", BAD, ids=repr)
def test_what_is_no_count_is_refused(loss, items):
    with pytest.raises(ValueError, match=r"^num_items must be"):
        loss(replace(loss.inputs(4, 37), num_items=items))


def test_what_is_differentiated_is_refused(loss):
    with pytest.raises(ValueError, match="num_items is differentiated, but gets no derivative"):
        loss(replace(loss.inputs(4, 37), num_items=torch.tensor(5.0, requires_grad=True)))
    with pytest.raises(ValueError, match="num_items must be a dense"):
        loss(replace(loss.inputs(4, 37), num_items=torch.tensor([5.0]).to_sparse()))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_only_a_mean_divides(loss, reduction):
    for items in (5, torch.tensor(5)):
        with pytest.raises(ValueError, match=f"num_items must be None with reduction='{reduction}'"):
            loss(replace(loss.inputs(4, 37), num_items=items), reduction=reduction)


def test_N19_fp16_gradients_survive_many_items(loss):
    """1 / num_items folded into a stored fp16 gradient would be 0 before a loss scaler could lift it."""
    loss.needs(torch.float16)
    rows, vocab, items, scaler = 4, 64, 2.0**24, 32768.0
    if loss.fused:
        zeros = torch.ones(rows, 1, dtype=torch.float16), torch.zeros(vocab, 1, dtype=torch.float16)
    else:
        zeros = torch.zeros(rows, vocab, dtype=torch.float16), None
    inputs = replace(loss.tensors(zeros[0], torch.zeros(rows, dtype=torch.int64), zeros[1]), num_items=items)
    leaves = inputs.leaves()
    (loss(leaves).float() * scaler).backward()
    got = leaves.weight.grad[1:] / rows if loss.fused else leaves.input.grad[:, 1:]
    assert torch.equal(got, torch.full_like(got, scaler / items / vocab))


@pytest.mark.parametrize("weighted", [False, True])
def test_N19_fp16_gradients_survive_a_small_scale(loss, weighted):
    """What `logit_scale` or a class weight makes of p in a stored fp16 gradient of a sum must not be 0 either."""
    loss.needs(torch.float16)
    rows, vocab, scale, scaler = 4, 64, 2.0**-20, 32768.0
    inputs = loss.inputs(rows, vocab, 1, dtype=torch.float16, ignored=0.0)
    inputs.target.zero_()
    options = {} if weighted else {"logit_scale": scale}
    if weighted:
        inputs = replace(inputs, class_weight=torch.full((vocab,), scale, device=loss.device))
        inputs.input.zero_()
    if loss.fused:
        inputs.input.fill_(1)
        if weighted:
            inputs.weight.zero_()
    leaves = inputs.leaves()
    (loss(leaves, reduction="sum", **options).float() * scaler).backward()
    got = leaves.weight.grad[1:] / rows if loss.fused else leaves.input.grad[:, 1:]
    torch.testing.assert_close(got, torch.full_like(got, scaler * scale / vocab), rtol=2**-9, atol=0)


def step(subject, inputs, items):
    leaves = inputs.leaves()
    loss = subject(leaves, num_items=items)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in (leaves.input, leaves.weight) if leaf is not None)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
def test_C1_compiled_once_for_every_number_of_items(loss):
    torch._dynamo.reset()

    def forward(input, weight, target, items):
        options = {"num_items": items, "backend": loss.row.backend}
        if weight is None:
            return liger.liger_cross_entropy(input, target, **options)
        return liger.liger_fused_linear_cross_entropy(input, weight, target, **options)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = loss.inputs(6, 37)
    for kind in (int, lambda value: torch.tensor(value, device=loss.device)):
        for value, stance in ((5, "default"), (7, "fail_on_recompile"), (900, "fail_on_recompile")):
            leaves = inputs.leaves()
            with torch.compiler.set_stance(stance):
                got = compiled(leaves.input, leaves.weight, leaves.target, kind(value))
                got.backward()
            wanted = step(loss, inputs, value)
            gradients = [leaf.grad for leaf in (leaves.input, leaves.weight) if leaf is not None]
            for ours, theirs in zip(wanted, [got.detach(), *gradients], strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("items", [-1.0, math.nan, math.inf])
def test_a_value_that_nobody_may_read_shows(loss, items):
    """On a device, or in a traced graph: the loss is NaN, never a finite number."""
    torch._dynamo.reset()
    inputs = loss.inputs(6, 37)
    value = torch.tensor(items, device=loss.device)
    if loss.device == "cpu":
        got = torch.compile(lambda x: loss(inputs, num_items=x), fullgraph=True, backend="aot_eager")(value)
    else:
        got = loss(inputs, num_items=value)
    assert got.isnan()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("where", ["cpu", "cuda", None])
def test_C5_items_are_not_waited_for(where):
    inputs = make_inputs(64, 1000, dtype=torch.bfloat16, device="cuda").leaves()
    items = 48 if where is None else torch.tensor(48, device=where)
    torch.cuda.set_sync_debug_mode("error")
    try:
        liger.liger_cross_entropy(inputs.input, inputs.target, num_items=items, backend="triton").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # warm-up ran on a side stream
@pytest.mark.parametrize("fused", [False, True], ids=["ce", "flce"])
def test_C5_a_captured_step_replays_with_other_items(fused):
    inputs = make_inputs(64, 1000, 32 if fused else None, dtype=torch.bfloat16, device="cuda").leaves()
    items = torch.tensor(48, device="cuda")

    def captured():
        if fused:
            return liger.liger_fused_linear_cross_entropy(inputs.input, inputs.weight, inputs.target, num_items=items)
        return liger.liger_cross_entropy(inputs.input, inputs.target, num_items=items)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(captured(), inputs.input)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured()
        (gradient,) = torch.autograd.grad(loss, inputs.input)
    for count in (48, 1, 1000, 0):
        items.fill_(count)
        graph.replay()
        wanted = captured()
        torch.testing.assert_close(loss, wanted, rtol=2**-7, atol=0)
        (expected,) = torch.autograd.grad(wanted, inputs.input)
        torch.testing.assert_close(gradient, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())
