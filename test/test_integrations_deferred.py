"""Deferred logits: whatever is done to them gives what it gives of real ones, and a fused loss where it can be one."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from liger.integrations.deferred import DeferredLogits, Tally, defer, real, replaced

N, VOCAB, HIDDEN = 6, 11, 4


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "torch")


class Head:
    """A linear head whose output is deferred, with the real one beside it."""

    def __init__(self, shape=(2, 3), *, bias=True, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(size, generator=generator, dtype=dtype).requires_grad_()

        self.hidden, self.weight, self.bias = normal(*shape, HIDDEN), normal(VOCAB, HIDDEN), normal(VOCAB) if bias else None
        self.target = torch.randint(VOCAB, shape, generator=generator)
        self.tally = Tally()

    @property
    def leaves(self):
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def forward(self, hidden):
        return F.linear(hidden, self.weight, self.bias)

    def deferred(self):
        return defer(self.forward, self.hidden, self.weight, self.bias, backend=None, tally=self.tally)

    def real(self):
        return self.forward(self.hidden)

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.leaves)


FUSED = {
    "nothing": lambda x: x,
    "scale": lambda x: 0.5 * x,
    "divide": lambda x: x / 3,
    "softcap": lambda x: 2.0 * torch.tanh(x / 2.0),
    "softcap by F": lambda x: F.tanh(x / 2.0) * 2.0,
    "scale and softcap": lambda x: torch.tanh(x * 0.5 / 4) * 4,
    "a cap alone": lambda x: x.tanh(),
    "torch.mul": lambda x: torch.div(torch.mul(x, 3), 2.0),
    "a tensor on the host": lambda x: x * torch.tensor(0.5),
    "a tensor on the left": lambda x: torch.mul(torch.tensor(2.0), torch.tensor(0.5, dtype=torch.float64) * x),
    "casts": lambda x: x.float().to(torch.float64).contiguous(),
    "a move": lambda x: x.to("cpu").to(device=torch.device("cpu"), dtype=torch.float64),
    "as another": lambda x: x.type_as(torch.zeros(1)),
    "shifted": lambda x: x[..., :-1, :].contiguous(),
    "rows": lambda x: x[:, 1:],
    "flat": lambda x: x.view(-1, VOCAB).view(3, -1, VOCAB),
    "a tuple of sizes": lambda x: x.reshape((2, 3, 1, VOCAB)),
}
MADE = {
    "negative": lambda x: x * -1.0,
    "zero": lambda x: x * 0,
    "two caps": lambda x: x.tanh().tanh(),
    "added": lambda x: x + 1,
    "subtracted from": lambda x: 1 - x,
    "in place": lambda x: x.clone().mul_(2),
    "a vector": lambda x: x * torch.arange(VOCAB),
    "a vector on the left": lambda x: torch.arange(VOCAB) * x,
    "clamped": lambda x: x.clamp(max=1),
    "columns": lambda x: x[..., :5],
    "an element": lambda x: x[0],
    "a mask": lambda x: x[torch.tensor([True, False])],
    "transposed": lambda x: x.transpose(1, 2),
    "another vocabulary": lambda x: x.view(-1, 3),
    "inverse": lambda x: 2 / x,
    "over zero": lambda x: (x / 0).isinf() + x,
    "stacked": lambda x: torch.stack([x, x * 2]),
    "compared": lambda x: (x > 0).double() * x,
    "power": lambda x: x**2,
    "product": lambda x: x @ torch.ones(VOCAB, 2, dtype=x.dtype),
    "integers": lambda x: x.to(torch.int64).double() + x,
    "to another's": lambda x: x.to(torch.zeros(1)),
    "softmax": lambda x: x.softmax(-1),
}


def same(one, other):
    assert (one.shape, one.dtype, one.device, one.ndim) == (other.shape, other.dtype, other.device, other.ndim)
    torch.testing.assert_close(real(one, "test"), other, rtol=1e-6 if one.dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_what_is_repeated(name):
    """The same logits, and with its targets one fused loss with the same gradients."""
    head = Head()
    deferred, wanted = FUSED[name](head.deferred()), FUSED[name](head.real())
    assert isinstance(deferred, DeferredLogits)
    assert deferred.requires_grad
    assert (deferred.size(), deferred.size(-1), deferred.dim(), deferred.numel()) == (
        wanted.size(), wanted.size(-1), wanted.dim(), wanted.numel(),
    )  # fmt: skip
    target = FUSED[name](head.target[..., None].expand(2, 3, VOCAB)) if name in ("shifted", "rows", "flat") else None
    target = head.target if target is None else target[..., 0]
    rows, target = deferred.reshape(-1, VOCAB), target.reshape(-1)
    loss, expected = F.cross_entropy(rows, target), F.cross_entropy(wanted.reshape(-1, VOCAB), target)
    assert (head.tally.fused, head.tally.materialised) == (1, {})
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected)
    for one, other in zip(head.gradients(loss), head.gradients(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    same(deferred, wanted)
    assert head.tally.materialised == {"test": 1}


@pytest.mark.parametrize("name", MADE)
def test_what_is_not_repeated_gets_real_logits(name):
    head = Head()
    deferred, wanted = MADE[name](head.deferred()), MADE[name](head.real())
    torch.testing.assert_close(real(deferred, "test"), wanted)
    if isinstance(deferred, DeferredLogits):  # a factor that turns out not to be one when the loss is asked for
        rows = deferred.reshape(-1, VOCAB)
        loss, expected = (F.cross_entropy(x, head.target.reshape(-1)) for x in (rows, wanted.reshape(-1, VOCAB)))
    else:
        loss, expected = deferred.sum(), wanted.sum()
    assert head.tally.materialised
    assert head.tally.fused == 0
    for one, other in zip(*(torch.autograd.grad(x, head.leaves, allow_unused=True) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(one, other)


numbers = st.sampled_from((0.5, 2.0, 3.0, 30.0, -1.0))
steps = st.one_of(
    st.tuples(st.just("mul"), numbers),
    st.tuples(st.just("div"), numbers),
    st.tuples(st.just("tanh"), st.none()),
    st.tuples(st.just("to"), st.sampled_from((torch.float32, torch.float64))),
    st.tuples(st.just("rows"), st.sampled_from((slice(None), slice(0, 1), slice(1, None), slice(None, None, 2)))),
    st.tuples(st.just("add"), numbers),
)


def applied(x, step):
    name, value = step
    if name == "rows":
        return x[:, value]
    if name == "tanh":
        return torch.tanh(x)
    return getattr(x, name)(value)


@given(st.lists(steps, max_size=5), st.booleans(), st.integers(0, 2**20))
def test_any_sequence_of_steps(sequence, bias, seed):
    head = Head(bias=bias, seed=seed)
    deferred, wanted, target = head.deferred(), head.real(), head.target
    for step in sequence:
        deferred, wanted = applied(deferred, step), applied(wanted, step)
        target = target[:, step[1]] if step[0] == "rows" else target
    loss = F.cross_entropy(deferred.reshape(-1, VOCAB), target.reshape(-1), reduction="sum")
    expected = F.cross_entropy(wanted.reshape(-1, VOCAB), target.reshape(-1), reduction="sum")
    single = torch.float32 in [value for _, value in sequence]
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if single else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(loss, expected, **tolerance)
    for one, other in zip(head.gradients(loss), head.gradients(expected), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"ignore_index": 3}, 1),
        ({"reduction": "none"}, 1),
        ({"reduction": "sum", "label_smoothing": 0.1}, 1),
        ({"weight": torch.arange(1.0, VOCAB + 1, dtype=torch.float64)}, 0),
    ],
    ids=str,
)
def test_arguments_of_cross_entropy(options, fused):
    head = Head((N,))
    loss, expected = (F.cross_entropy(x, head.target, **options) for x in (head.deferred(), head.real()))
    assert head.tally.fused == fused
    torch.testing.assert_close(loss, expected)


def test_targets_that_no_fused_call_takes():
    head = Head((N,))
    soft = torch.rand(N, VOCAB, dtype=torch.float64)
    torch.testing.assert_close(F.cross_entropy(head.deferred(), soft), F.cross_entropy(head.real(), soft))
    with pytest.raises(ValueError, match="Expected input batch_size"):
        F.cross_entropy(head.deferred(), head.target[:2])
    assert head.tally.materialised == {"targets that are no class ids": 1, "targets of shape (2,)": 1}
    three = Head((2, 3))
    with pytest.raises(RuntimeError):
        F.cross_entropy(three.deferred(), three.target)


def test_logits_made_for_a_metric_keep_their_gradient():
    head = Head((N,))
    deferred = head.deferred()
    with torch.no_grad():
        assert (deferred.argmax(-1) == head.real().argmax(-1)).all()
    loss = F.cross_entropy(deferred, head.target)
    for one, other in zip(head.gradients(loss), head.gradients(F.cross_entropy(head.real(), head.target)), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        constant = head.deferred()
    assert not constant.requires_grad
    assert not F.cross_entropy(constant, head.target).requires_grad


def test_logits_made_outside_of_autocast_are_those_of_inside():
    head = Head((N,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside, wanted = head.deferred(), head.real()
    assert inside.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(real(inside, "test"), wanted)


def test_changing_the_head_before_the_loss_is_an_error():
    head = Head((N,))
    deferred = head.deferred()
    with torch.no_grad():
        head.weight.mul_(2)
    for use in (lambda: F.cross_entropy(deferred, head.target), lambda: deferred + 1):
        with pytest.raises(RuntimeError, match="changed in place between the head and the loss"):
            use()


def test_in_place_changes_reach_every_holder():
    head = Head()
    first = head.deferred()
    second = first
    second += 1
    same(first + 0, head.real() + 1)
    first = head.deferred()
    first[0] = 0
    assert not real(first, "test")[0].any()


def columns(x):
    x[..., 3] = -1e9
    return x.view(-1, VOCAB)


def masked(x):
    x.masked_fill_(torch.arange(VOCAB) == 3, -1e9)
    return x[:, :-1]


def view_first(x):
    before = x[:, :-1]
    x *= 0.1
    return before


def view_changed(x):
    x[:, :-1].mul_(0.1)
    return x


def copy_first(x):
    before = x * 2
    x.mul_(0)
    return before


def copy_of_no_cast_first(x):
    before = x.to(torch.float64) * 2
    x.mul_(0)
    return before


def contiguous_rows_first(x):
    before = x[:, :-1].contiguous()
    x.mul_(0)
    return before


def view_of_a_copy_first(x):
    before = (x * 2).view(-1, VOCAB)
    x.mul_(0)
    return before


def copy_changed(x):
    (x * 2).mul_(0)
    return x


def copy_between(x):
    x.add_(1)
    between = x.tanh()
    x.mul_(0)
    return between


def changed_beside(x):
    view, other = x.view(-1, VOCAB), x[:, 1:]
    other.mul_(0.1)
    return view


CHANGES = [
    columns, masked, view_first, view_changed, copy_first, copy_of_no_cast_first, contiguous_rows_first,
    view_of_a_copy_first, copy_changed, copy_between, changed_beside,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", [F.cross_entropy, lambda x, target: x.softmax(-1)[range(len(target)), target].sum()])
def test_changes_in_place_reach_what_is_made_before_and_after(change, use):
    """Views have them, copies taken before do not, as with real logits."""
    head, found = Head(), []
    for logits in (head.deferred(), head.real()):
        x = change(logits)
        value = use(x if x.ndim == 2 else x.reshape(-1, VOCAB), head.target.reshape(-1)[: x.shape[:-1].numel()])
        found.append((value, *head.gradients(value)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("change", [columns, view_first, copy_first, view_of_a_copy_first])
def test_changes_in_place_where_no_tensor_counts_them(change):
    head = Head()
    with torch.inference_mode():
        torch.testing.assert_close(real(change(head.deferred()), "test"), change(head.real()))
    torch._dynamo.reset()
    compiled = torch.compile(lambda hidden: real(change(deferred_of(head, hidden)), "test") + 0, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(head.hidden), change(head.real()))
    torch._dynamo.reset()


def test_logits_are_made_once_where_no_tensor_counts_changes():
    head, calls = Head(), []
    forward, head.forward = head.forward, lambda hidden: calls.append(hidden) or forward(hidden)
    with torch.inference_mode():
        found, wanted = (((x * 2).tanh() * 3).softmax(-1) for x in (head.deferred(), forward(head.hidden)))
    torch.testing.assert_close(found, wanted)
    assert len(calls) == 1


def deferred_of(head, hidden):
    return defer(head.forward, hidden, head.weight, head.bias, backend=None, tally=head.tally)


def test_a_change_of_a_weights_data_is_an_error():
    head = Head((N,))
    deferred = head.deferred()
    head.weight.data = head.weight.data * 2
    with pytest.raises(RuntimeError, match="changed in place between the head and the loss"):
        F.cross_entropy(deferred, head.target)


@pytest.mark.parametrize("where", ["loss", "step", "head"])
def test_a_part_under_no_grad_has_no_graph(where):
    def no_grad(name):
        return torch.set_grad_enabled(name != where)

    head, found = Head((N,)), []
    for make in (head.deferred, head.real):
        with no_grad("head"):
            logits = make()
        with no_grad("step"):
            logits = logits * 2
        with no_grad("loss"):
            loss = F.cross_entropy(logits, head.target)
        assert not loss.requires_grad
        assert logits.requires_grad == (where == "loss")
        found.append(loss)
    assert head.tally.fused == 1
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.reshape(shape=(-1, VOCAB)),
        lambda x: x.view(size=(-1, VOCAB)),
        lambda x: x.view(dtype=torch.int64).double() * 0,
        lambda x: x.mul(other=2.0),
        lambda x: x.div(other=2.0),
        lambda x: x.div(other=2.0, rounding_mode="floor"),
        lambda x: x.contiguous(memory_format=torch.contiguous_format),
        lambda x: x.float(memory_format=torch.preserve_format),
        lambda x: torch.mul(input=x, other=2.0),
        lambda x: torch.reshape(x, shape=(-1, VOCAB)),
    ],
)
def test_arguments_by_name(step):
    head = Head()
    same(step(head.deferred()), step(head.real()))


@pytest.mark.parametrize("hidden", [torch.float64, torch.float32])
def test_the_dtypes_of_autocast(hidden):
    """It leaves float64 alone: logits and losses have the dtypes of real ones, and one head of both is torch's error."""
    head = Head((N,), dtype=hidden)
    with torch.autocast("cpu", torch.bfloat16):
        deferred, wanted = head.deferred(), head.real()
        assert deferred.dtype == wanted.dtype
        loss, expected = F.cross_entropy(deferred, head.target), F.cross_entropy(wanted, head.target)
        assert head.tally.fused == 1
        assert loss.dtype == expected.dtype
        mixed = Head((N,), dtype=hidden)
        mixed.weight = mixed.weight.detach().to(torch.float32 if hidden == torch.float64 else torch.float64)
        for make in (mixed.deferred, mixed.real):
            with pytest.raises(RuntimeError, match="same dtype"):
                F.cross_entropy(make(), mixed.target)
    torch.testing.assert_close(loss, expected, **({} if hidden == torch.float64 else {"rtol": 0.02, "atol": 0.02}))


def test_logits_in_an_output_of_any_shape():
    head = Head()
    wanted = head.real()
    output = {0: head.deferred(), "none": None, "more": [head.deferred(), (1, {2: head.deferred()})]}
    found = real(output, "test")
    assert list(found) == [0, "none", "more"]
    assert found["none"] is None
    for logits in (found[0], found["more"][0], found["more"][1][1][2]):
        torch.testing.assert_close(logits, wanted)
    assert replaced({"loss": 1, "none": None, "logits": head.deferred()}, lambda _: None) == {"loss": 1, "none": None}


def test_asking_what_it_is_makes_no_logits():
    head = Head()
    deferred = head.deferred()
    assert not hasattr(deferred, "keys")
    assert not deferred.is_cuda
    assert deferred.is_floating_point()
    assert len(deferred) == 2
    assert repr(deferred) == f"DeferredLogits(shape=(2, 3, {VOCAB}), dtype=torch.float64, device=cpu)"
    assert {deferred: 1}[deferred] == 1
    with pytest.raises(AttributeError, match="logits have no attribute 'nothing'"):
        _ = deferred.nothing
    assert head.tally.materialised == {}


def test_copies_and_pickles_are_tensors():
    head = Head()
    with torch.no_grad():
        deferred = head.deferred()
    for other in (copy.deepcopy(deferred), pickle.loads(pickle.dumps(deferred))):
        assert torch.equal(other, head.real())
    assert math.isfinite(float(deferred[0, 0, 0]))
