"""What a result does not depend on, bit for bit: chance, the other rows of a batch, and memory beside the tensors."""

from dataclasses import replace

import pytest
import torch

from liger.testing import Inputs, collect

REDUCTIONS = ["mean", "sum", "none"]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "return_z_loss": True},
    {"softcap": 5.0, "logit_scale": 0.5, "return_token_accuracy": True, "return_predicted_tokens": True},
]
NAMES = ["plain", "smoothed", "capped"]
SIZES = {"ce": [(6, 40), (33, 1000), (9, 33000)], "flce": [(6, 40), (96, 1000), (300, 4096)]}


def named(options):
    return pytest.mark.parametrize("options", options, ids=NAMES)


def values(outcome):
    return [t for t in (*outcome.output, outcome.input, outcome.weight, outcome.bias) if t is not None]


def assert_same(left, right):
    for a, b in zip(values(left), values(right), strict=True):
        assert torch.equal(a, b)


# --- Chance ---------------------------------------------------------------------------------------


@named(OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_runs_are_equal(loss, options, reduction):
    """On every dtype, sizes at which blocks and chunks come in numbers among them."""
    for dtype in loss.few(loss.dtypes):
        for rows, vocab in loss.few(SIZES["flce" if loss.fused else "ce"]):
            inputs = loss.inputs(rows, vocab, dtype=dtype, class_weight=bool(options))
            chunks = {"chunk_size": -(-rows // 3)} if loss.fused else {}
            first, *others = (loss.outcome(inputs, reduction=reduction, **options, **chunks) for _ in range(3))
            for other in others:
                assert_same(first, other)


# --- Other rows -----------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@named(OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_row_does_not_depend_on_the_others(ce, one_thread, options, reduction):
    """Its loss and its gradient: among others, in another order, alone."""
    if ce.row.backend == "torch" and ce.device != "cpu":
        pytest.skip("torch's reductions on a GPU are cut up by how many rows there are")
    rows = 5 if ce.interpreted else 37
    for dtype in ce.few(ce.dtypes):
        for vocab in ce.few([40, 1000, 33000]):
            inputs = ce.inputs(rows, vocab, dtype=dtype, class_weight=bool(options))
            whole = ce.outcome(inputs, reduction=reduction, **options)
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(ce.device)
            for index in (order, order[: rows // 2], order[:1]):
                part = ce.outcome(inputs.rows(index), reduction=reduction, **options)
                assert torch.equal(part.input, whole.input[index])
                if reduction == "none":
                    for got, expected in zip(part.output, whole.output, strict=True):
                        assert got is None or torch.equal(got, expected[index])


def test_a_row_of_a_mean_depends_on_the_count_alone(ce):
    """With the same number of items the gradients of other batches are the same."""
    inputs = replace(ce.inputs(6, 40), num_items=4)
    ce.needs(num_items=True)
    whole, part = (ce.outcome(given).input for given in (inputs, inputs.rows(torch.tensor([4, 1], device=ce.device))))
    assert torch.equal(part, whole[[4, 1]])


def test_a_row_of_the_fused_loss_does_not_depend_on_what_the_others_hold(flce):
    """The products' shapes decide their order of sums, the numbers in other rows do not. Other shapes: test/batch_rows.py."""
    inputs = flce.inputs(6, 40, ignored=0.0)
    others = inputs.input.clone()
    others[3:] = others[3:].flip(-1) * 2
    for reduction in ("sum", "none"):
        one, other = (flce.outcome(replace(inputs, input=x), reduction=reduction) for x in (inputs.input, others))
        assert torch.equal(one.input[:3], other.input[:3])
        if reduction == "none":
            assert torch.equal(one.output.loss[:3], other.output.loss[:3])


# --- Memory beside the tensors --------------------------------------------------------------------

GUARD = 64
"""Elements on either side, and at either end of every row: whole vectors of 16 bytes, so that addresses stay aligned."""


def guarded(tensor):
    """(a view with the tensor's values within a larger buffer, the buffer, where in it is guard). Rows are apart."""
    if tensor is None:
        return None, None, None
    rows = tensor if tensor.ndim == 2 else tensor[None]
    shape = (rows.shape[0] + 2, rows.shape[1] + 2 * GUARD)
    poison = torch.nan if tensor.is_floating_point() else -(2**30)
    columns = -(-shape[1] // GUARD) * GUARD
    buffer = torch.full((shape[0], columns), poison, dtype=tensor.dtype, device=tensor.device)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    there = (slice(1, -1), slice(GUARD, GUARD + rows.shape[1]))
    outside[there] = False
    buffer[there] = rows
    view = buffer[there]
    return (view if tensor.ndim == 2 else view[0]), buffer, outside


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@named(OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("vocab", [40, 1000])
def test_nothing_beside_the_tensors_is_read_or_written(loss, vocab, options, reduction):
    """NaN, or a target far outside, lies before, after and between the rows of all that is given: nobody notices."""
    if loss.interpreted and vocab > 40:
        vocab = 136
    for dtype in loss.few(loss.dtypes):
        inputs = loss.inputs(5, vocab, 16, dtype=dtype, bias=loss.fused, class_weight=True)
        names = ("input", "target", "weight", "bias", "class_weight")
        made = {name: guarded(getattr(inputs, name)) for name in names}
        kept = {name: buffer.clone() for name, (_, buffer, _) in made.items() if buffer is not None}
        views = {name: view for name, (view, _, _) in made.items()}
        leaves = Inputs(**{name: leaf(view) if name in ("input", "weight", "bias") else view for name, view in views.items()})
        upstream = guarded(torch.rand(5, device=loss.device))[0] if reduction == "none" else None
        expected_upstream = None if upstream is None else upstream.clone()
        expected = loss.outcome(copies(leaves), upstream=expected_upstream, reduction=reduction, **options)
        assert_same(collect(loss(leaves, reduction=reduction, **options), leaves, upstream), expected)
        for name, before in kept.items():
            _, buffer, outside = made[name]
            assert torch.equal(bits(buffer.detach())[outside], bits(before)[outside]), f"beside {name}"
            assert torch.equal(buffer[~outside], before[~outside]), f"{name} itself"


def leaf(view):
    return None if view is None else view.detach().requires_grad_()


def copies(inputs):
    """In rows of the same stride, so that addresses are as aligned, with nothing but zeros beside them."""

    def copy(tensor):
        if tensor is None:
            return None
        clean = tensor.new_zeros(tensor.untyped_storage().nbytes() // tensor.itemsize)
        view = clean.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view.copy_(tensor.detach())
        return view

    names = ("input", "target", "weight", "bias", "class_weight")
    return Inputs(**{name: copy(getattr(inputs, name)) for name in names})


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("vocab", [40, 1000])
def test_in_place_writes_to_the_logits_alone(ce, vocab, reduction):
    ce.needs(in_place=True)
    for dtype in ce.few(ce.dtypes):
        inputs = ce.inputs(5, vocab, dtype=dtype)
        view, buffer, outside = guarded(inputs.input)
        before = buffer.clone()
        root = view.requires_grad_()
        ce(replace(inputs, input=root.view_as(root)), in_place=True, reduction=reduction).sum().backward()
        assert torch.equal(bits(buffer.detach())[outside], bits(before)[outside])
