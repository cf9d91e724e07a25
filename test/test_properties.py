"""What holds for every input: the whole space of options against the oracle, and the symmetries of the loss.

In float64 where an implementation has it. The interpreter gets a handful of examples.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from projecting import projected_ahead

from liger.testing import Inputs, assert_matches, assert_within_budget, own_error

INTERPRETED_EXAMPLES = 4
REDUCTIONS = ("mean", "sum", "none")
EXTRAS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")


@dataclass(frozen=True)
class Drawn:
    """One call."""

    inputs: Inputs
    options: dict[str, Any]

    @property
    def ignored(self):
        return self.inputs.target == self.options.get("ignore_index", -100)


def for_all(subject, **strategies):
    """Runs the decorated check at once, on drawn arguments."""

    def run(check):
        few = settings(max_examples=INTERPRETED_EXAMPLES, phases=[Phase.generate])
        (few if subject.interpreted else settings())(given(**strategies)(check))()

    return run


def items_of(subject):
    """None, numbers, and tensors of one element."""
    numbers = st.sampled_from((0, 1, 1000)) | st.floats(0.5, 100)
    tensors = st.builds(
        lambda value, dtype, shape, device: torch.tensor(value, dtype=dtype, device=device).reshape(shape),
        st.integers(0, 100),
        st.sampled_from((torch.int64, torch.float32)),
        st.sampled_from(((), (1,))),
        st.sampled_from(sorted({"cpu", subject.device})),
    )
    return st.none() | numbers | tensors


@st.composite
def draws(draw, subject, *, dtype=None, without=(), **fixed):
    """A call with random tensors and any options that the implementation admits, but those named in `without`.

    `fixed` sets options, or arguments of `make_inputs`.
    """

    def choose(name, strategy):
        return fixed.pop(name) if name in fixed else draw(strategy, label=name)

    ignore_index = choose("ignore_index", st.sampled_from((-100, -1, 0, 7, 10**6)))
    classes = "ce_weight" if subject.fused else "weight"
    made = {
        "seed": draw(st.integers(0, 2**31), label="seed"),
        "scale": choose("scale", st.sampled_from((0.1, 1.0, 3.0, 20.0))),
        "ignored": choose("ignored", st.sampled_from((0.0, 0.2, 0.5, 1.0))),
        "class_weight": classes not in without and choose("class_weight", st.booleans()),
        "ignore_index": ignore_index,
    }
    rows, vocab = choose("rows", st.integers(1, 6)), choose("vocab", st.integers(1, 40))
    if subject.fused:
        made["bias"] = "bias" not in without and choose("bias", st.booleans())
    inputs = subject.inputs(rows, vocab, choose("hidden", st.integers(1, 9)), dtype=dtype or subject.finest, **made)
    values = {
        "reduction": st.sampled_from(REDUCTIONS),
        "label_smoothing": st.sampled_from((0.0, 0.1, 1.0)) | st.floats(0, 1),
        "lse_square_scale": st.sampled_from((0.0, 1e-4)) | st.floats(0, 1),
        "softcap": st.none() | st.sampled_from((30.0, 1.0)) | st.floats(0.1, 100),
        "logit_scale": st.sampled_from((1.0, 0.0625)) | st.floats(0.01, 4),
        "use_token_scaling": st.booleans(),
        "chunk_size": st.none() | st.integers(1, 7),
        **dict.fromkeys(EXTRAS, st.booleans()),
    }
    admitted = [name for name in values if name in subject.row.capability.options and name not in without]
    options = {name: choose(name, values[name]) for name in admitted}
    if options.get("reduction") == "mean" and "num_items" not in without:
        inputs = replace(inputs, num_items=choose("num_items", items_of(subject)))
    assert not fixed, f"nothing is called {fixed}"
    return Drawn(inputs, options | {"ignore_index": ignore_index})


@st.composite
def upstreams(draw, subject, drawn):
    """An upstream gradient in the loss's shape, of small integers, which add without rounding."""
    shape = drawn.inputs.target.shape if drawn.options["reduction"] == "none" else torch.Size()
    values = [draw(st.integers(-8, 8)) for _ in range(shape.numel())]
    return torch.tensor(values, dtype=torch.float64, device=subject.device).view(shape)


def test_the_whole_space_of_options(loss):
    @for_all(loss, data=st.data(), ahead=st.integers(0, 3 * loss.fused))
    def check(data, ahead):
        drawn = data.draw(draws(loss))
        upstream = data.draw(st.none() | upstreams(loss, drawn))
        with projected_ahead(ahead):
            loss.check(drawn.inputs, upstream=upstream, **drawn.options)


def test_the_whole_space_of_options_in_half_precision(loss):
    @for_all(loss, data=st.data(), dtype=st.sampled_from((torch.bfloat16, torch.float16)), ahead=st.integers(0, 3 * loss.fused))
    def check(data, dtype, ahead):
        drawn = data.draw(draws(loss, dtype=dtype))
        with projected_ahead(ahead):
            loss.check(drawn.inputs, **drawn.options)


def test_a_common_shift_changes_nothing(loss):
    """Of the logits, or for the fused loss of the bias: p and lse - s_y do not depend on it."""

    @for_all(loss, shift=st.integers(-64, 64), data=st.data())
    def check(shift, data):
        extra = {"bias": True} if loss.fused else {}
        drawn = data.draw(draws(loss, without=("softcap", "lse_square_scale", *EXTRAS), scale=1.0, **extra))
        inputs = drawn.inputs
        if loss.fused:
            shifted = replace(inputs, bias=inputs.bias + shift)
        else:
            exact = (inputs.input * 1024).round() / 1024  # so that adding the shift rounds nothing
            inputs = replace(inputs, input=exact)
            shifted = replace(inputs, input=exact + shift)
        truth, _ = loss.expected(inputs, **drawn.options)
        known, own = loss.expected(shifted, **drawn.options)
        same = replace(truth, magnitudes=known.magnitudes, row_magnitudes=known.row_magnitudes)
        assert_matches(loss.outcome(shifted, **drawn.options), same, own)


def test_rows_of_the_gradient_sum_to_zero(loss):
    """Without softcap and z-loss. For the fused loss the bias's gradient, a sum of such rows, shows it."""

    @for_all(loss, data=st.data())
    def check(data):
        extra = {"bias": True} if loss.fused else {}
        drawn = data.draw(draws(loss, without=("softcap", "lse_square_scale", *EXTRAS), **extra))
        got = loss.outcome(drawn.inputs, **drawn.options)
        truth, own = loss.expected(drawn.inputs, **drawn.options)
        name = "bias" if loss.fused else "input"
        grad, exact, measure, magnitude = (getattr(part, name) for part in (got, truth.outcome, own.outcome, truth.magnitudes))
        # The sum of the elements' budgets.
        allowed = 2 * own_error(exact, measure, magnitude, loss.finest) * magnitude.sum(-1)
        allowed += torch.finfo(loss.finest).eps * exact.abs().sum(-1)
        assert (grad.double().sum(-1).abs() <= allowed).all()


def test_permuting_the_vocabulary_permutes_the_gradient(loss):
    @for_all(loss, data=st.data())
    def check(data):
        drawn = data.draw(draws(loss, without=("return_predicted_tokens",), ignore_index=-100))
        inputs = drawn.inputs
        order = torch.tensor(data.draw(st.permutations(range(inputs.vocab))), device=loss.device)
        place = order.argsort()

        def permuted(tensor, axis=0):
            return None if tensor is None else tensor.index_select(axis, order)

        moved = Inputs(
            inputs.input if loss.fused else permuted(inputs.input, -1),
            torch.where(inputs.target >= 0, place[inputs.target.clamp(min=0)], inputs.target),
            permuted(inputs.weight),
            permuted(inputs.bias),
            permuted(inputs.class_weight),
            inputs.num_items,
        )
        got = loss.outcome(moved, **drawn.options)

        def back(tensor, axis=0):
            return None if tensor is None else tensor.index_select(axis, place)

        returned = replace(
            got,
            input=got.input if loss.fused else back(got.input, -1),
            weight=back(got.weight),
            bias=back(got.bias),
        )
        assert_matches(returned, *loss.expected(inputs, **drawn.options))


def test_removing_ignored_rows_changes_nothing(loss):
    @for_all(loss, data=st.data())
    def check(data):
        drawn = data.draw(draws(loss, without=EXTRAS))
        kept = ~drawn.ignored
        got = loss.outcome(drawn.inputs, **drawn.options)
        if drawn.options["reduction"] == "none":
            got = replace(got, output=got.output._replace(loss=got.output.loss[kept]))
        assert_matches(replace(got, input=got.input[kept]), *loss.expected(drawn.inputs.rows(kept), **drawn.options))


def test_chunk_size_changes_nothing(flce):
    @for_all(flce, data=st.data(), sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)))
    def check(data, sizes):
        drawn = data.draw(draws(flce, without=("chunk_size",)))
        expected = flce.expected(drawn.inputs, **drawn.options)
        for size in sizes:
            assert_matches(flce.outcome(drawn.inputs, chunk_size=size, **drawn.options), *expected)


def test_nothing_valid_is_exactly_zero(loss):
    @for_all(loss, data=st.data())
    def check(data):
        drawn = data.draw(draws(loss, ignored=1.0))
        if drawn.ignored.all():  # an ignored share of one row may round to none of them
            got = loss.outcome(drawn.inputs, **drawn.options)
            out = got.output
            for part in (out.loss, out.z_loss, out.token_accuracy, got.input, got.weight, got.bias):
                assert part is None or not part.any()


def test_linear_in_the_upstream_gradient(loss):
    @for_all(loss, data=st.data())
    def check(data):
        drawn = data.draw(draws(loss, without=EXTRAS))
        u, v = data.draw(upstreams(loss, drawn)), data.draw(upstreams(loss, drawn))
        got = loss.outcome(drawn.inputs, upstream=u + v, **drawn.options)
        (of_u, own_u), (of_v, own_v) = (loss.expected(drawn.inputs, upstream=t, **drawn.options) for t in (u, v))
        for name in ("input", "weight", "bias"):
            grad = getattr(got, name)
            if grad is not None:

                def total(left, right, name=name):
                    return getattr(left, name) + getattr(right, name)

                assert_within_budget(
                    grad,
                    total(of_u.outcome, of_v.outcome),
                    total(own_u.outcome, own_v.outcome),
                    grad.dtype,
                    magnitude=total(of_u.magnitudes, of_v.magnitudes),
                    what=name,
                )


def test_the_class_weighted_mean_is_its_formula(loss):
    """sum of w_y (lse - s_y) over valid rows, divided by the sum of w_y."""

    @for_all(loss, data=st.data())
    def check(data):
        drawn = data.draw(draws(loss, reduction="mean", class_weight=True, ignored=0.2, rows=5, without=(*EXTRAS, "num_items")))
        plain = ("label_smoothing", "lse_square_scale", "softcap", "logit_scale", "use_token_scaling")
        options = {name: value for name, value in drawn.options.items() if name not in plain}

        def formula(dtype):
            x = drawn.inputs.input.to(dtype)
            if loss.fused:
                x = x @ drawn.inputs.weight.to(dtype).t()
                x = x if drawn.inputs.bias is None else x + drawn.inputs.bias.to(dtype)
            kept = ~drawn.ignored
            y = drawn.inputs.target[kept]
            nll = -x[kept].log_softmax(-1).gather(1, y[:, None])[:, 0]
            w = drawn.inputs.class_weight.to(dtype)[y]
            return (w * nll).sum() / w.sum()

        if not drawn.ignored.all():
            magnitude = loss.expected(drawn.inputs, **options)[0].row_magnitudes.loss.sum()
            value = loss(drawn.inputs, **options)
            truth, own = formula(torch.float64), formula(torch.float32).double()
            assert_within_budget(value, truth, own, value.dtype, magnitude=magnitude)
