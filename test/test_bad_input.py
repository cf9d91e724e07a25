"""What no call may do: take input it cannot serve, answer outside its range, or lose a reason on the way."""

import pickle
from dataclasses import replace

import pytest
import torch

import liger
from liger.call import Needs, Recipe
from liger.dispatch import Capability, DeviceInfo, Implementation, UnsupportedError
from liger.options import CrossEntropyOptions

F32 = torch.float32
LOGITS, HIDDEN, HEAD = torch.randn(4, 7), torch.randn(4, 5), torch.randn(7, 5)
TARGET = torch.tensor([0, 1, 2, 6])


@pytest.mark.parametrize("head", [None, [[1.0]], 3])
def test_a_fused_loss_without_a_head_is_not_a_loss_of_its_input(head):
    with pytest.raises(ValueError, match=r"weight must be a torch\.Tensor, got"):
        liger.liger_fused_linear_cross_entropy(HIDDEN, head, TARGET)
    with pytest.raises(ValueError, match=r"weight must be a torch\.Tensor, got"):
        liger.LigerFusedLinearCrossEntropyLoss()(head, HIDDEN, TARGET)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_a_head_in_the_place_of_the_hidden_states_is_recognised(shape):
    """The module takes the head first, as Liger-Kernel's does, and the function does not."""
    hidden, target = HIDDEN.view(*shape, 5), TARGET.view(shape)
    question = r"target must have .* \(input \(7, 5\)\): are input and weight, .*, swapped\? The module takes \(weight, input"
    with pytest.raises(ValueError, match=question):
        liger.liger_fused_linear_cross_entropy(HEAD, hidden, target)
    with pytest.raises(ValueError, match=question):
        liger.LigerFusedLinearCrossEntropyLoss()(hidden, HEAD, target)


@pytest.mark.parametrize(("input", "target"), [(HIDDEN, TARGET[:3]), (HIDDEN[None], TARGET)])
def test_a_wrong_target_alone_is_not_taken_for_a_swap(input, target):
    with pytest.raises(ValueError, match=r"target must have .* \(input \(.*\)\)$"):
        liger.liger_fused_linear_cross_entropy(input, HEAD, target)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (LOGITS.to_sparse(), "input must be a dense, strided tensor"),
        (LOGITS.numpy() if hasattr(LOGITS, "numpy") else [1.0], r"input must be a torch\.Tensor, got"),
        (LOGITS.tolist(), r"input must be a torch\.Tensor, got list"),
        (LOGITS.to("meta"), "input on meta|input must hold values"),
        (LOGITS.long(), "input must be float16"),
        (torch.empty(4, 0), "input must have a non-empty last dimension"),
    ],
    ids=["sparse", "numpy", "list", "meta", "integers", "empty"],
)
def test_input_that_is_no_matrix_of_logits(bad, message):
    with pytest.raises(ValueError, match=message):
        liger.liger_cross_entropy(bad, TARGET if getattr(bad, "device", None) != torch.device("meta") else TARGET.to("meta"))


@pytest.mark.parametrize("ignored", [2**31, -(2**31) - 1, 2**32])
def test_int32_targets_are_not_compared_modulo_their_range(loss, ignored):
    """As torch does: 2^32 would ignore class 0."""
    loss.needs()
    inputs = loss.inputs(4, 7, ignored=0.0)
    with pytest.raises(ValueError, match=f"ignore_index must fit into the target's int32, got {ignored}: use an int64 target"):
        loss(replace(inputs, target=inputs.target.int()), ignore_index=ignored)
    loss(inputs, ignore_index=ignored)


@pytest.mark.parametrize("backend", [[], ["torch"], {}, 3])
def test_a_backend_that_is_no_name(backend):
    with pytest.raises(ValueError, match="backend must be"):
        liger.liger_cross_entropy(LOGITS, TARGET, backend=backend)


def test_a_module_holds_tensors_only():
    with pytest.raises(ValueError, match="weight must be None or a"):
        liger.LigerCrossEntropyLoss([1.0] * 7)


@pytest.mark.parametrize("device", ["foo", None, ("cuda", (9, 0))])
def test_explain_names_a_bad_device(device):
    with pytest.raises(ValueError, match="device must be"):
        liger.explain("cross_entropy", device=device, dtype=F32, shape=(4, 7))


def test_a_device_has_numbers_for_a_capability():
    with pytest.raises(ValueError, match="capability must be"):
        DeviceInfo("cuda", "9.0")


def _implementation(**changes):
    anything = Capability(devices=None, dtypes=frozenset({F32}), options=frozenset())
    return Implementation(**{"op": "cross_entropy", "backend": "mine", "module": "nowhere", "capability": anything} | changes)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "implementation must be"),
        (_implementation(op="foo"), "op must be one of"),
        (_implementation(backend="auto"), "backend must be a name"),
        (_implementation(backend="a;b"), "backend must be a name"),
    ],
)
def test_register_refuses_what_could_not_be_called(bad, message):
    with pytest.raises(ValueError, match=message):
        liger.register(bad)


def test_a_rule_that_raises_is_a_reason():
    def rule(request):
        raise KeyError("oops")

    capability = Capability(devices=None, dtypes=frozenset({F32}), options=frozenset(), rule=rule)
    remove = liger.register(_implementation(capability=capability), first=True)
    try:
        answer = liger.explain("cross_entropy", device=DeviceInfo("cpu"), dtype=F32, shape=(4, 7))
    finally:
        remove()
        remove()  # twice is once
    assert answer.rows[0] == ("mine", ("its rule raised KeyError: 'oops'",))
    assert answer.chosen is not None


def test_the_error_reaches_the_parent_of_a_worker():
    with pytest.raises(UnsupportedError) as caught:
        liger.liger_cross_entropy(LOGITS, TARGET, in_place=True, backend="torch")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.reasons == caught.value.reasons


@pytest.mark.parametrize("backend", [None, "torch", "True_", "None_"])
def test_a_recipe_keeps_the_backend(backend):
    recipe = Recipe(CrossEntropyOptions(), Needs(True, False, False), F32, F32, False, backend)
    text, numbers = recipe.encode()
    assert Recipe.decode(text, *numbers).backend == backend


def test_in_place_needs_elements_of_its_own(ce):
    ce.needs(in_place=True)
    rows = torch.arange(20.0, device=ce.device).unfold(0, 8, 1)[:4]
    target = torch.zeros(4, dtype=torch.int64, device=ce.device)
    for overlapping in (rows, torch.ones(8, device=ce.device).expand(4, 8)):
        with pytest.raises(ValueError, match="elements of their own"):
            liger.liger_cross_entropy(overlapping, target, in_place=True, backend=ce.row.backend)


def test_a_perfect_batch_has_accuracy_one(ce):
    ce.needs()
    logits = (torch.eye(48) * 5).to(ce.device)
    output = liger.liger_cross_entropy(
        logits, torch.arange(48, device=ce.device), return_token_accuracy=True, backend=ce.row.backend
    )
    assert output.token_accuracy.item() == 1.0


@pytest.mark.parametrize("masked", [-1e4, -1e9])
def test_smoothing_survives_a_masked_first_class(ce, masked):
    """What smoothing's sum is taken relative to must not be a class that a mask has pushed away."""
    ce.needs()
    inputs = ce.inputs(3, 200, dtype=torch.float32, ignored=0.0)
    inputs.input[:, 0] = masked
    inputs.target.clamp_(min=1)
    ce.check(inputs, label_smoothing=0.1)


@pytest.mark.parametrize("fill", [float("nan"), -float("inf"), torch.finfo(F32).min])
def test_a_row_without_a_maximum_predicts_a_class_all_the_same(ce, fill):
    ce.needs()
    logits = torch.full((2, 12), fill, device=ce.device)
    target = torch.tensor([0, 3], device=ce.device)
    output = liger.liger_cross_entropy(logits, target, return_predicted_tokens=True, backend=ce.row.backend)
    assert ((output.predicted_tokens >= 0) & (output.predicted_tokens < 12)).all()


def test_a_uniform_row_of_the_lowest_logits_is_uniform(ce):
    ce.needs()
    logits = torch.full((2, 12), torch.finfo(F32).min, device=ce.device)
    target = torch.tensor([0, 3], device=ce.device)
    loss = liger.liger_cross_entropy(logits, target, backend=ce.row.backend)
    torch.testing.assert_close(loss.cpu(), torch.tensor(12.0).log())
