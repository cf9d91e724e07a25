"""The modules and the positional forms are the functions; options are validated where they are given."""

import copy
import dataclasses
import functools
import io
import math
import pickle
import re

import pytest
import torch

import liger
from liger import (
    CrossEntropyOutput,
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
)
from liger.options import CrossEntropyOptions

N, V, H = 6, 11, 4
SHARED = {
    "ignore_index": 3,
    "lse_square_scale": 0.1,
    "label_smoothing": 0.2,
    "reduction": "none",
    "softcap": 2.0,
    "logit_scale": 0.5,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
OPTIONS = {
    # module: the options it takes, at values that are not the default
    LigerCrossEntropyLoss: SHARED,
    LigerFusedLinearCrossEntropyLoss: SHARED
    | {
        "accum_dtype": torch.float64,
        "use_token_scaling": True,
        "chunk_size": 2,
    },
}
NOT_IN_APPLY = ("chunk_size", "logit_scale", "vocab_parallel")
TRITON_ONLY = {"loss_dtype": torch.float32, "in_place": True}
CASES = [(module, {name: value}) for module, options in OPTIONS.items() for name, value in options.items()]
CASES += [(module, {}) for module in OPTIONS] + list(OPTIONS.items())
CLASS_WEIGHT = {LigerCrossEntropyLoss: "weight", LigerFusedLinearCrossEntropyLoss: "ce_weight"}
LOSSES = pytest.mark.parametrize("module", list(OPTIONS))


@pytest.fixture
def tensors():
    """Leaves and other tensors of a call, in float64."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = {"logits": normal(N, V), "x": normal(N, H), "head": normal(V, H), "bias": normal(V)}
    target = torch.tensor([0, 3, 10, 7, 5, 3])  # 3 is ignored by the option, nothing by default
    return leaves | {"target": target, "w": torch.rand(V, generator=generator, dtype=torch.float64)}


def function(module, t, *, weighted=False, **options):
    """What the function gives that the module stands for."""
    w = t["w"] if weighted else None
    if module is LigerCrossEntropyLoss:
        return liger.liger_cross_entropy(t["logits"], t["target"], w, **options)
    return liger.liger_fused_linear_cross_entropy(t["x"], t["head"], t["target"], t["bias"], w, **options)


def apply(module, t, *, weighted=False, **options):
    loss = module(t["w"] if weighted else None, **options)
    return call(loss, t)


def call(loss, t):
    if isinstance(loss, LigerCrossEntropyLoss):
        return loss(t["logits"], t["target"])
    return loss(t["head"], t["x"], t["target"], t["bias"])


def assert_same(found, expected, t):
    """Bitwise: the outputs and every leaf's gradient."""
    assert type(found) is type(expected)
    outputs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
    for one, other in outputs:
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    leaves = [tensor for tensor in t.values() if tensor.requires_grad]
    losses = [output[0] if isinstance(output, tuple) else output for output in (found, expected)]
    upstream = torch.linspace(1, 2, losses[0].numel(), dtype=losses[0].dtype).view_as(losses[0])
    grads = [torch.autograd.grad(loss, leaves, upstream, allow_unused=True) for loss in losses]
    assert any(grad is not None for grad in grads[0])
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# Modules are the functions.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("module", "options"), CASES)
def test_module_is_the_function(tensors, module, options, weighted):
    found = apply(module, tensors, weighted=weighted, **options)
    assert_same(found, function(module, tensors, weighted=weighted, **options), tensors)


@LOSSES
def test_H8_every_option_reaches_the_loss(tensors, module):
    """An option that were dropped on the way would pass the test above if the function dropped it too."""
    for name, value in OPTIONS[module].items():
        if name in ("accum_dtype", "chunk_size"):  # where it is computed, not what
            continue
        plain, changed = apply(module, tensors), apply(module, tensors, **{name: value})
        same = isinstance(changed, torch.Tensor) and plain.shape == changed.shape and torch.equal(plain, changed)
        assert not same, name


def test_chunk_size_reaches_the_plan(tensors, monkeypatch):
    sizes = []
    make_plan = liger.backends.plan.make_plan

    def spy(*args, **kwargs):
        sizes.append((kwargs["chunk_size"], kwargs["accum_dtype"]))
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(liger.backends.plan, "make_plan", spy)
    apply(LigerFusedLinearCrossEntropyLoss, tensors, chunk_size=2, accum_dtype=torch.float64)
    assert sizes[0] == (2, torch.float64)


@LOSSES
def test_extra_outputs(tensors, module):
    options = {"ignore_index": 3, "lse_square_scale": 0.1, "return_z_loss": True, "return_token_accuracy": True}
    output = apply(module, tensors, **options, return_predicted_tokens=True)
    assert isinstance(output, CrossEntropyOutput)
    assert [tensor.shape for tensor in output] == [(), (), (), (N,)]
    assert output.z_loss.dtype == output.loss.dtype
    assert (output.token_accuracy.dtype, output.predicted_tokens.dtype) == (torch.float32, torch.int64)
    assert [tensor.requires_grad for tensor in output] == [True, False, False, False]
    assert (output.predicted_tokens == -1).tolist() == [False, True, False, False, False, True]
    some = apply(module, tensors, **options)
    assert some.predicted_tokens is None
    assert torch.equal(some.z_loss, output.z_loss)
    for name in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
        assert isinstance(apply(module, tensors, **{name: True}), CrossEntropyOutput)
    assert isinstance(apply(module, tensors), torch.Tensor)


@LOSSES
def test_modules_refuse_what_no_backend_has(tensors, module):
    if module is LigerCrossEntropyLoss:
        for name, value in TRITON_ONLY.items():
            loss = module(backend="torch", **{name: value})
            with pytest.raises(liger.UnsupportedError, match=f"{name}={value} is not supported"):
                call(loss, tensors)
    else:
        for name in TRITON_ONLY:
            with pytest.raises(TypeError, match=name):
                module(**{name: TRITON_ONLY[name]})


@LOSSES
def test_E12_backend_of_a_module(tensors, module, monkeypatch):
    with pytest.raises(ValueError, match="backend must be one of auto, cutedsl, triton, torch, got 'nonsense'"):
        apply(module, tensors, backend="nonsense")
    monkeypatch.setenv("LIGER_BACKEND", "nonsense")
    apply(module, tensors, backend="torch")
    with pytest.raises(ValueError, match="LIGER_BACKEND must be one of auto, cutedsl, triton, torch, got 'nonsense'"):
        apply(module, tensors)


@pytest.mark.parametrize("name", TRITON_ONLY)
def test_modules_hand_on_what_only_triton_has(ce, name):
    options = {name: TRITON_ONLY[name]}
    ce.needs(torch.bfloat16, **options)
    options["backend"] = ce.row.backend
    target = torch.tensor([0, 3, 10, -100, 5, 3], device=ce.device)
    outcomes = []
    for loss_of in (LigerCrossEntropyLoss(**options), functools.partial(liger.liger_cross_entropy, **options)):
        leaf = torch.linspace(-3, 3, N * V, device=ce.device).view(N, V).bfloat16().requires_grad_()
        logits = leaf * 1  # a leaf cannot be changed in place
        loss = loss_of(logits, target)
        loss.backward()
        outcomes.append((loss, leaf.grad, logits))
    assert outcomes[0][0].dtype == outcomes[1][0].dtype == options.get("loss_dtype", torch.bfloat16)
    assert all(map(torch.equal, *outcomes))
    assert torch.equal(logits, leaf) != (name == "in_place")


def test_bias_is_optional(tensors):
    t, loss = tensors, LigerFusedLinearCrossEntropyLoss()
    without = loss(t["head"], t["x"], t["target"])
    assert torch.equal(without, liger.liger_fused_linear_cross_entropy(t["x"], t["head"], t["target"]))
    assert not torch.equal(without, loss(t["head"], t["x"], t["target"], t["bias"]))


# The positional forms.


def positional(module, t, *, weighted, short, **options):
    """`Function.apply` with every argument by position, as code written for Liger-Kernel has it."""
    w = t["w"] if weighted else None
    o = {field.name: options.get(field.name, field.default) for field in dataclasses.fields(CrossEntropyOptions)}
    head = tuple(o[name] for name in ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap"))
    head += (o["return_z_loss"],)
    extras = (o["return_token_accuracy"], o["return_predicted_tokens"])
    if module is LigerCrossEntropyLoss:
        arguments = (t["logits"], t["target"], w, *head, *extras)
        arguments += () if short else (o["loss_dtype"], o["in_place"])
        assert len(arguments) == (11 if short else 13)
        return LigerCrossEntropyFunction.apply(*arguments)
    chunking = (o["accum_dtype"], o["use_token_scaling"])
    arguments = (t["x"], t["head"], t["target"], t["bias"], w, *head, *chunking, *extras)
    assert len(arguments) == 15
    return LigerFusedLinearCrossEntropyFunction.apply(*arguments)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("module", "options"), CASES)
def test_apply_is_the_function(tensors, module, options, weighted, short):
    options = {name: value for name, value in options.items() if name not in NOT_IN_APPLY}
    found = positional(module, tensors, weighted=weighted, short=short, **options)
    assert isinstance(found, tuple)
    assert len(found) == 4
    expected = function(module, tensors, weighted=weighted, **options)
    if isinstance(expected, torch.Tensor):
        expected = CrossEntropyOutput(expected)
    assert_same(found, expected, tensors)


def test_apply_unpacks_into_four(tensors):
    loss, z_loss, accuracy, predicted = LigerCrossEntropyFunction.apply(
        tensors["logits"], tensors["target"], None, -100, 0.0, 0.0, "mean", None, False, True, False
    )
    assert (z_loss, predicted) == (None, None)
    assert (loss.shape, accuracy.shape) == ((), ())


def test_apply_may_stop_after_any_argument(tensors):
    """Liger-Kernel's forward has a default for each argument after the class weights."""
    given = (3, 1e-3, 0.2, "sum", 5.0, True, True, True)
    names = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")
    names += ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    arguments = (tensors["logits"], tensors["target"], tensors["w"])
    for count in range(len(given) + 1):
        found = LigerCrossEntropyFunction.apply(*arguments, *given[:count])
        expected = liger.liger_cross_entropy(*arguments, **dict(zip(names[:count], given, strict=False)))
        expected = CrossEntropyOutput(expected) if isinstance(expected, torch.Tensor) else expected
        assert_same(found, expected, tensors)


@pytest.mark.parametrize("name", TRITON_ONLY)
def test_E7_apply_hands_on_loss_dtype_and_in_place(tensors, monkeypatch, name):
    monkeypatch.setenv("LIGER_BACKEND", "torch")
    with pytest.raises(liger.UnsupportedError, match=f"{name}={TRITON_ONLY[name]} is not supported"):
        positional(LigerCrossEntropyLoss, tensors, weighted=False, short=False, **{name: TRITON_ONLY[name]})


# A module's state.


@LOSSES
def test_class_weights_are_a_buffer(tensors, module):
    name = CLASS_WEIGHT[module]
    assert not module().state_dict()
    assert not list(module().parameters())
    loss = module(tensors["w"])
    assert list(loss.state_dict()) == [name]
    assert torch.equal(loss.state_dict()[name], tensors["w"])
    other = module(torch.ones(V, dtype=torch.float64))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(call(other, tensors), call(loss, tensors))


def saved_and_loaded(loss):
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@LOSSES
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss)), saved_and_loaded])
def test_copies_are_equal(tensors, module, copied):
    loss = module(tensors["w"], **OPTIONS[module], backend="torch")
    other = copied(loss)
    assert other is not loss
    assert (other.options, other.backend, repr(other)) == (loss.options, loss.backend, repr(loss))
    buffer = CLASS_WEIGHT[module]
    assert getattr(other, buffer).data_ptr() != tensors["w"].data_ptr()
    assert_same(call(other, tensors), call(loss, tensors), tensors)


@LOSSES
def test_to_moves_and_casts_the_class_weights(tensors, module):
    loss = module(tensors["w"]).to(torch.bfloat16)
    name = CLASS_WEIGHT[module]
    assert getattr(loss, name).dtype == torch.bfloat16
    rounded = {**tensors, "w": tensors["w"].bfloat16()}
    assert torch.equal(call(loss, tensors), function(module, rounded, weighted=True))
    moved = module(tensors["w"]).to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta, input on cpu"):
        call(moved, tensors)


@pytest.mark.gpu
@LOSSES
def test_to_cuda(tensors, module):
    loss = module(tensors["w"], backend="torch").to("cuda")
    moved = {name: tensor.detach().cuda() for name, tensor in tensors.items()}
    expected = function(module, tensors, weighted=True)
    torch.testing.assert_close(call(loss, moved).cpu(), expected)


def test_repr_shows_what_is_not_the_default():
    assert repr(LigerCrossEntropyLoss()) == "LigerCrossEntropyLoss()"
    assert repr(LigerFusedLinearCrossEntropyLoss(chunk_size=64, reduction="sum", backend="torch")) == (
        "LigerFusedLinearCrossEntropyLoss(reduction='sum', chunk_size=64, backend='torch')"
    )
    assert "label_smoothing=0.1, softcap=30.0" in repr(LigerCrossEntropyLoss(softcap=30.0, label_smoothing=0.1))


@LOSSES
def test_inside_another_module(tensors, module):
    model = torch.nn.Sequential()
    model.add_module("loss", module(tensors["w"]))
    model.train()
    model.eval()
    assert list(model.state_dict()) == [f"loss.{CLASS_WEIGHT[module]}"]


# Values that are refused, where they are given.

ALLOWED = {
    "ignore_index": "an int of 64 bits",
    "reduction": "'mean', 'sum' or 'none'",
    "label_smoothing": "a number in [0, 1]",
    "lse_square_scale": "a number in [0, 1e+30]",
    "softcap": "None or a number in [1e-30, 1e+30]",
    "logit_scale": "a number in [1e-30, 1e+30]",
    "return_z_loss": "True or False",
    "return_token_accuracy": "True or False",
    "return_predicted_tokens": "True or False",
    "loss_dtype": "None or a floating-point torch.dtype",
    "in_place": "True or False",
    "accum_dtype": "None or a floating-point torch.dtype",
    "use_token_scaling": "True or False",
    "chunk_size": "None or an int >= 1",
    "vocab_parallel": "None or a VocabParallel",
}
BAD = {
    "ignore_index": (None, 1.0, "-100", True),
    "reduction": ("max", "Mean", "", None, 0, ["mean"]),
    "label_smoothing": (-0.1, 1.1, math.nan, math.inf, "0.1", None, True, 1j),
    "lse_square_scale": (-1e-4, math.nan, math.inf, "0", None, False),
    "softcap": (0.0, 0, -30.0, math.nan, math.inf, "30", True),
    "logit_scale": (0.0, 0, -1.0, math.nan, math.inf, "1", None, True),
    "return_z_loss": (None, 1, "yes"),
    "return_token_accuracy": (None, 0, "no"),
    "return_predicted_tokens": (None, 1, []),
    "loss_dtype": (torch.int64, torch.bool, torch.complex64, "float32", float),
    "in_place": (None, 1, "yes"),
    "accum_dtype": (torch.int32, torch.complex64, "float32", float),
    "use_token_scaling": (None, 1, "yes"),
    "chunk_size": (0, -1, 1.5, "16", True),
    "vocab_parallel": (2, "tp", True, [(0, 10)]),
}
BAD_VALUES = [(name, value) for name, values in BAD.items() for value in values]
REFUSED = pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=repr)


def refused(name, value):
    message = f"{name} must be {ALLOWED[name]}, got {value!r}"
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def takes(module, name):
    everywhere = name in OPTIONS[module] or name == "vocab_parallel"  # of which test_vocab_parallel.py makes some
    return everywhere or (module is LigerCrossEntropyLoss and name in TRITON_ONLY)


def test_bad_values_cover_every_option():
    assert set(BAD) == set(ALLOWED) == {field.name for field in dataclasses.fields(CrossEntropyOptions)}


@REFUSED
def test_constructor_refuses_bad_values(name, value):
    modules = [module for module in OPTIONS if takes(module, name)]
    assert modules
    for module in modules:
        with refused(name, value):
            module(**{name: value})


@pytest.mark.parametrize("module", OPTIONS)
@pytest.mark.parametrize("backend", ["trition", 5, ("torch",)])
def test_E12_constructor_refuses_a_backend_that_nobody_knows(module, backend):
    message = re.escape(f"backend must be one of auto, cutedsl, triton, torch, got {backend!r}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        module(backend=backend)


@REFUSED
def test_functions_refuse_bad_values_before_anything_is_computed(tensors, name, value):
    broken = {**tensors, "logits": None, "x": None, "head": None}  # would raise otherwise
    for module in OPTIONS:
        if takes(module, name):
            with refused(name, value):
                function(module, broken, **{name: value})


@REFUSED
def test_apply_refuses_bad_values(tensors, name, value):
    for module in OPTIONS:
        if takes(module, name) and name not in NOT_IN_APPLY:
            with refused(name, value):
                positional(module, tensors, weighted=False, short=False, **{name: value})


def test_what_is_at_the_edge_is_allowed():
    for options in (
        {"label_smoothing": 0},
        {"label_smoothing": 1},
        {"lse_square_scale": 0},
        {"softcap": 1e-3},
        {"chunk_size": 1},
        {"chunk_size": 1 << 40},
        {"ignore_index": -(1 << 40)},
        {"accum_dtype": torch.float64},
    ):
        assert CrossEntropyOptions(**options) is not None


def test_accum_dtype_must_suit_the_weight(tensors):
    for accum in (torch.bfloat16, torch.float32):
        with pytest.raises(ValueError, match="accum_dtype must be None or float64 for a float64 weight, got"):
            apply(LigerFusedLinearCrossEntropyLoss, tensors, accum_dtype=accum)
