"""A vocabulary split over ranks: the same loss and gradients as on one, for every option, shape of the parts and group."""

import copy
import itertools
import pickle
import re
from dataclasses import replace

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankError, Split

from liger import DeviceInfo, LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, VocabParallel, explain
from liger.dispatch import Request
from liger.options import CrossEntropyOptions
from liger.testing import Inputs, Outcome, assert_matches, make_inputs

V = 37
BOUNDS = {
    "two": ((0, 20), (20, V)),
    "three": ((0, 5), (5, 6), (6, V)),
    "padded": ((0, 20), (20, 48)),  # the second part ends with padding
    "padding only": ((0, 37), (37, 40)),
    "reversed": ((20, V), (0, 20)),
    "empty": ((0, 0), (0, 30), (30, V)),
}


@pytest.fixture(autouse=True)
def _ranks_are_on_the_cpu(request):
    """What is parametrised over devices as well runs there once, in a test of its own."""
    subjects = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    if "gpus" not in request.fixturenames and any(getattr(subject, "device", "") == "cuda" for subject in subjects):
        pytest.skip("test_two_gpus has the GPUs' share")


def joined(outcomes, split: Split, vocab: int, fused: bool) -> Outcome:
    """The outcome of the whole from those of the ranks, which must agree on what all of them have."""
    first = outcomes[0]
    for other in outcomes[1:]:
        for ours, theirs in zip(first.output, other.output, strict=True):
            assert ours is None or torch.equal(ours, theirs), "ranks disagree"
    order = sorted(range(len(outcomes)), key=lambda rank: split.bounds[rank])

    def of_classes(name, dim):
        parts = []
        for rank in order:
            start, stop = split.bounds[rank]
            gradient, classes = getattr(outcomes[rank], name), max(0, min(stop, vocab) - start)
            if gradient is None:
                return None
            assert gradient.shape[dim] == stop - start
            assert not gradient.narrow(dim, classes, stop - start - classes).any(), "padding has a gradient"
            parts.append(gradient.narrow(dim, 0, classes))
        return torch.cat(parts, dim)

    if not fused:
        return replace(first, input=of_classes("input", first.input.ndim - 1))
    x = first.input
    if x is not None and split.flags.get("sequence_parallel"):
        x = torch.cat([other.input for other in outcomes])
    elif x is not None and split.flags.get("reduce_input_grad", True):
        assert all(torch.equal(x, other.input) for other in outcomes), "ranks disagree on the input's gradient"
    elif x is not None:
        x = torch.stack([other.input for other in outcomes]).sum(0)
    return Outcome(first.output, x, of_classes("weight", 0), of_classes("bias", 0))


def check(world, subject, group, inputs, split, *, upstream=None, frozen=(), **options) -> Outcome:
    """The outcome, after it was found within budget of the one-rank oracle's."""
    asked = options | {"backend": subject.row.backend}
    outcomes = world.run(group, ranks.outcome, group, inputs, split, asked, upstream, frozen)
    got = joined(outcomes, split, inputs.vocab, subject.fused)
    assert_matches(got, *subject.expected(inputs, upstream=upstream, **options))
    ignored = inputs.target.flatten() == options.get("ignore_index", -100)
    if got.input is not None:
        assert not got.input.reshape(-1, got.input.shape[-1])[ignored].any(), "an ignored row has a gradient"
    return got


EVERYTHING = {
    "label_smoothing": 0.1,
    "lse_square_scale": 0.01,
    "softcap": 5.0,
    "logit_scale": 0.7,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "everything": EVERYTHING,
    "everything, none": EVERYTHING | {"reduction": "none"},
}
FUSED_OPTIONS = {
    "chunks": {"chunk_size": 3},
    "token scaling": EVERYTHING | {"use_token_scaling": True, "chunk_size": 4},
    "token scaling, none": EVERYTHING | {"use_token_scaling": True, "reduction": "none", "chunk_size": 4},
}


def inputs_of(subject, rows=8, vocab=V, **kwargs):
    """On the CPU, as the ranks are sent them."""
    extra = {"bias": True} if subject.fused else {}
    return subject.inputs(rows, vocab, **extra, **({"dtype": torch.float32, "class_weight": True} | kwargs))


def cases(subject, few):
    named = OPTIONS | (FUSED_OPTIONS if subject.fused else {})
    return {name: named[name] for name in (few if subject.interpreted else named) if name in named}


def test_every_option(loss, world):
    """Loss, dx, dW, db against the float64 oracle of one rank; NaN in the padding reaches nothing."""
    for group, bounds in (("two", "padded"), ("three", "three")):
        for options in cases(loss, ["everything", "token scaling, none"] if group == "two" else ["none"]).values():
            check(world, loss, group, inputs_of(loss, 5 if loss.interpreted else 8), Split(BOUNDS[bounds]), **options)


@pytest.mark.parametrize("shape", ["padding only", "reversed", "empty"])
def test_parts_of_any_size(loss, world, shape):
    group = "three" if shape == "empty" else "two"
    check(world, loss, group, inputs_of(loss, 4), Split(BOUNDS[shape]), **EVERYTHING)


def test_tokens_of_a_batch_where_a_rank_has_no_class(loss, world):
    """(B, T, V) logits are (B, T, 0) there."""
    inputs = inputs_of(loss, 4)
    batch = replace(inputs, input=inputs.input.unflatten(0, (2, 2)), target=inputs.target.unflatten(0, (2, 2)))
    check(world, loss, "three", batch, Split(BOUNDS["empty"]), label_smoothing=0.1)


def test_rows_in_several_blocks(ce, world):
    """The torch backend takes so many rows at a time that its temporaries stay small."""
    if ce.interpreted:
        pytest.skip("the blocks are the torch backend's")
    inputs = inputs_of(ce, 150, 40000)
    check(world, ce, "two", inputs, Split(((0, 20000), (20000, 40000))), **EVERYTHING)


def test_gpt2_vocabulary_over_two(loss, world):
    """50257 is odd."""
    if loss.interpreted:
        pytest.skip("50257 logits take the interpreter long")
    inputs = inputs_of(loss, 6, 50257)
    inputs.target[0], inputs.target[1] = 25128, 25129  # the last id of one, the first of the other
    check(world, loss, "two", inputs, Split(((0, 25129), (25129, 50257))), label_smoothing=0.1)


@settings(max_examples=40)
@given(data=st.data())
def _any_split(world, subject, data):
    vocab, rows = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 6))
    group = data.draw(st.sampled_from(["two", "three"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, vocab + 5), min_size=2, max_size=2)))
    edges = [0, cuts[0], vocab + 5 if group == "two" else cuts[1], vocab + 5]
    bounds = list(itertools.pairwise(edges))[: 2 if group == "two" else 3]
    split = Split(tuple(data.draw(st.permutations(bounds))))
    options = {
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.3])),
        "lse_square_scale": data.draw(st.sampled_from([0.0, 0.01])),
        "softcap": data.draw(st.sampled_from([None, 3.0])),
        "logit_scale": data.draw(st.sampled_from([1.0, 1.7])),
        "ignore_index": data.draw(st.sampled_from([-100, 0, vocab - 1, vocab])),
        "return_predicted_tokens": True,
    }
    if subject.fused:
        options |= {"chunk_size": data.draw(st.sampled_from([None, 2])), "use_token_scaling": data.draw(st.booleans())}
    seed, ignored = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    ignore = options["ignore_index"]
    weighted, items = data.draw(st.booleans()), data.draw(st.sampled_from([None, 7.0]))
    inputs = inputs_of(
        subject, rows, vocab, seed=seed, ignored=ignored, ignore_index=ignore, dtype=dtype, class_weight=weighted
    )
    if options["reduction"] == "mean":
        inputs = replace(inputs, num_items=items)
    check(world, subject, group, inputs, split, **options)


def test_any_split(loss, world):
    if loss.interpreted:
        pytest.skip("test_every_option has the interpreter's share")
    _any_split(world, loss)


@pytest.mark.parametrize("where", ["edges", "one rank", "all"])
def test_ignored_rows_and_edges(loss, world, where):
    """Targets at the ends of the parts; all ignored but those of one rank; all ignored. ignore_index is a class as well."""
    inputs = inputs_of(loss, 6, class_weight=False)
    targets = {"edges": [0, 19, 20, 36, 7, 7], "one rank": [0, 19, 7, 7, 3, 7], "all": [7] * 6}
    inputs.target[:] = torch.tensor(targets[where])
    got = check(world, loss, "two", inputs, Split(BOUNDS["two"]), ignore_index=7, return_token_accuracy=True)
    if where == "all":
        assert got.output.loss == 0
        assert not got.input.any()


@pytest.mark.parametrize("low", [0, 1])
def test_one_rank_far_below(ce, world, low):
    """Its sum underflows in any common scale: no logarithm is taken of it, and smoothing still counts its classes."""
    inputs = inputs_of(ce, 4, class_weight=False, ignored=0.0)
    start, stop = BOUNDS["two"][low]
    inputs.input[:, start:stop] -= 1e4
    for smoothing in (0.0, 0.1):
        got = check(world, ce, "two", inputs, Split(BOUNDS["two"]), label_smoothing=smoothing)
        assert got.output.loss.isfinite()


def test_a_part_of_minus_infinities_has_no_mass(ce, world):
    inputs = inputs_of(ce, 4, class_weight=False, ignored=0.0)
    inputs.input[:, 20:] = -torch.inf
    inputs.target[:] = torch.tensor([0, 5, 19, 3])
    outcomes = world.run("two", ranks.outcome, "two", inputs, Split(BOUNDS["two"]), {"backend": ce.row.backend})
    alone = ce.outcome(replace(inputs, input=inputs.input[:, :20].contiguous()))
    torch.testing.assert_close(outcomes[0].output.loss, alone.output.loss)
    assert not outcomes[1].input.any()


def test_N2_a_common_offset_keeps_the_loss(ce, world):
    for k in (12, 23):
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]) + 2.0**k
        inputs = Inputs(logits, torch.tensor([1]))
        options = {"backend": ce.row.backend}
        for got in world.run("two", ranks.outcome, "two", inputs, Split(((0, 2), (2, 4))), options):
            assert abs(got.output.loss.item() - 2.440190) < 1e-6


def test_ties_go_to_the_lowest_id(ce, world):
    """Ids stay whole numbers beyond 2^24, where fp32 has none for odd ones; here they are small and ranks are reversed."""
    logits = torch.zeros(3, V)
    logits[0, [5, 25]] = 1.0
    logits[1, [20, 36]] = 1.0
    options = {"backend": ce.row.backend, "return_predicted_tokens": True}
    inputs = Inputs(logits, torch.tensor([1, 1, 1]))
    got = world.run("two", ranks.outcome, "two", inputs, Split(BOUNDS["reversed"]), options)[0]
    assert got.output.predicted_tokens.tolist() == [5, 20, 0]


def test_target_out_of_range(loss, world):
    """T3: NaN rows in a kernel, ValueError where values are checked; never another rank's finite number."""
    inputs = inputs_of(loss, 4, class_weight=False, ignored=0.0)
    inputs.target[1] = V  # a padding column of the second rank
    options = {"backend": loss.row.backend, "reduction": "none"}
    outcomes = world.outcomes("two", ranks.outcome, "two", inputs, Split(BOUNDS["padded"]), options)
    for returned, value in outcomes:
        assert returned != loss.row.checks_target
        if returned:
            assert value.output.loss.isnan().tolist() == [False, True, False, False]
        else:
            assert value[0] == "ValueError"
            assert f"target[1] is {V}" in value[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(loss, world, dtype):
    inputs = inputs_of(loss, 4, dtype=dtype)
    for options in cases(loss, ["everything"]).values():
        check(world, loss, "two", inputs, Split(BOUNDS["two"]), **options)


def test_per_token_upstream_gradients(loss, world):
    inputs = inputs_of(loss, 6)
    check(world, loss, "two", inputs, Split(BOUNDS["two"]), upstream=torch.arange(6.0), reduction="none")


def retained(rank, inputs, split, backend, reduction):
    """Gradients of the input from two backwards on one graph."""
    made = split.of(rank, "two", inputs.vocab)
    leaves = ranks.own_part(inputs, made).leaves()
    value = ranks.loss_of(leaves, made, backend=backend, reduction=reduction).sum()
    return [torch.autograd.grad(value, leaves.input, retain_graph=True)[0] for _ in range(2)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retained_graph(loss, world, reduction):
    for first, second in world.run("two", retained, inputs_of(loss, 4), Split(BOUNDS["two"]), loss.row.backend, reduction):
        assert torch.equal(first, second)
        assert first.any()


def by_module(rank, inputs, split, backend):
    """(loss by function, by module)"""
    made = split.of(rank, "two", inputs.vocab)
    own = ranks.own_part(inputs, made)
    kind = LigerCrossEntropyLoss if own.weight is None else LigerFusedLinearCrossEntropyLoss
    module = kind(own.class_weight, vocab_parallel=made, backend=backend)
    tensors = (own.input, own.target) if own.weight is None else (own.weight, own.input, own.target, own.bias)
    return ranks.loss_of(own, made, backend=backend), module(*tensors)


def test_modules(loss, world):
    for function, module in world.run("two", by_module, inputs_of(loss, 4), Split(BOUNDS["padded"]), loss.row.backend):
        assert torch.equal(function, module)


def test_default_group(loss, world):
    """group=None is the default process group, here of four."""
    bounds = ((0, 10), (10, 20), (20, 30), (30, V))
    check(world, loss, None, inputs_of(loss, 4), Split(bounds))


@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias")])
def test_frozen_tensors(flce, world, frozen):
    for options in ({}, {"reduction": "none"}) if not flce.interpreted else ({},):
        check(world, flce, "two", inputs_of(flce, 4), Split(BOUNDS["two"]), frozen=frozen, **options)


@pytest.mark.parametrize("skipped", [0.0, 0.7])
def test_sequence_parallel(flce, world, skipped):
    """Tokens gathered on the way in, their gradient scattered on the way out; with and without rows to leave out."""
    inputs = inputs_of(flce, 8, ignored=skipped)
    for options in cases(flce, ["chunks"]).values():
        check(world, flce, "two", inputs, Split(BOUNDS["two"], {"sequence_parallel": True}), **options)


def test_input_gradient_left_to_the_caller(flce, world):
    check(world, flce, "two", inputs_of(flce, 6), Split(BOUNDS["padded"], {"reduce_input_grad": False}))


def test_skipped_rows_are_the_same_on_every_rank(flce, world):
    """Rows that are left out hold NaN, and a part of one class needs as many chunks as one of 36."""
    inputs = inputs_of(flce, 12, ignored=0.0)
    inputs.target[4:] = -100
    inputs.input[4:] = torch.nan
    clean = replace(inputs, input=inputs.input.nan_to_num(0))
    split = Split(((0, 36), (36, 37)))
    outcomes = world.run("two", ranks.outcome, "two", inputs, split, {"backend": flce.row.backend, "chunk_size": 2})
    assert_matches(joined(outcomes, split, V, True), *flce.expected(clean))


def communicated(rank, inputs, split, options):
    made = split.of(rank, "two", inputs.vocab)
    leaves = ranks.own_part(inputs, made).leaves()
    with ranks.traffic() as forward:
        value = ranks.loss_of(leaves, made, **options).loss.sum()
    with ranks.traffic() as backward:
        value.backward()
    return forward, backward


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_collectives(loss, world, reduction):
    """One packed collective in forward (of every chunk); in backward none for cross entropy; one sum of dx."""
    inputs = inputs_of(loss, 6, class_weight=False, ignored=0.0)
    options = {"backend": loss.row.backend, "reduction": reduction, "return_predicted_tokens": True}
    gathered, summed = ("all_gather", 4 * 6 * 4), ("all_reduce", 6 * 16 * 4)
    for forward, backward in world.run("two", communicated, inputs, Split(BOUNDS["two"]), options):
        both = [forward, backward]
        if not loss.fused:
            assert both == [[gathered], []]
        else:
            assert both == ([[gathered, summed], []] if reduction == "mean" else [[gathered], [summed]])


def test_collectives_of_split_tokens(flce, world):
    """Half of a sum each way: tokens gathered before the statistics, their gradient scattered at the end."""
    inputs = inputs_of(flce, 6, class_weight=False, ignored=0.0)
    options, split = {"backend": flce.row.backend, "return_predicted_tokens": True}, {"sequence_parallel": True}
    for forward, backward in world.run("two", communicated, inputs, Split(BOUNDS["two"], split), options):
        assert forward == [("all_gather", 3 * 16 * 4), ("all_gather", 4 * 6 * 4), ("reduce_scatter", 6 * 16 * 4)]
        assert not backward


def in_place(rank, inputs, split, group):
    made = split.of(rank, group, inputs.vocab)
    leaves = ranks.own_part(inputs, made).leaves()
    logits = leaves.input * 1
    ranks.loss_of(leaves_with(leaves, logits), made, backend="triton", in_place=True).backward()
    return logits.detach(), leaves.input.grad


def leaves_with(leaves, logits):
    return replace(leaves, input=logits)


@pytest.mark.parametrize(("group", "bounds"), [("two", "padded"), ("three", "empty")])
def test_in_place(ce, world, group, bounds):
    if "in_place" not in ce.row.capability.options:
        pytest.skip(f"{ce} refuses in_place")
    inputs = inputs_of(ce, 4)
    for (storage, gradient), plain in zip(
        world.run(group, in_place, inputs, Split(BOUNDS[bounds]), group),
        world.run(group, ranks.outcome, group, inputs, Split(BOUNDS[bounds]), {"backend": "triton"}),
        strict=True,
    ):
        assert torch.equal(gradient, plain.input)
        assert torch.equal(storage, plain.input)


def fails_alone(rank, inputs, split):
    if rank.rank == 0:
        raise KeyError("out of memory, say")
    return ranks.outcome(rank, "fragile", inputs, split, {"backend": "torch"})


def test_a_lost_rank_is_an_error_on_the_others(world):
    """Within the group's timeout, which is 3 s here."""
    inputs = Inputs(torch.randn(4, V), torch.tensor([0, 1, 2, 3]))
    (first, lost), (second, waiting) = world.outcomes("fragile", fails_alone, inputs, Split(BOUNDS["two"]))
    assert not first
    assert lost[0] == "KeyError"
    assert not second
    assert waiting[0] in ("RuntimeError", "DistBackendError"), waiting


def refusal(rank, make, *args):
    """The ValueError's message."""
    try:
        make(rank, *args)
    except ValueError as error:
        return str(error)
    return None


def build(rank, bounds, vocab=V, **flags):
    group = rank.groups["two"]
    start, stop = bounds[dist.get_rank(group)]
    return VocabParallel(group, start, stop, vocab, **flags)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (((0, 20), (21, V)), "adjoining ranges from 0"),
        (((0, 20), (19, V)), "adjoining ranges from 0"),
        (((0, 20), (20, 30)), "to at least 37"),
        (((0, 20), (30, 20)), "stop must be an int >= start = 30, got 20"),
        (((0, 20), (-3, V)), "start must be an int >= 0, got -3"),
        (((0, 20), (20, 37.0)), "stop must be an int"),
    ],
)
def test_parts_that_do_not_fit_are_refused_on_every_rank(world, bounds, message):
    """The ranks tell each other their parts when the value is made."""
    for said in world.run("two", refusal, build, bounds):
        assert message in said


def test_parts_that_fit_are_known_everywhere(world):
    for made in world.run("two", known, BOUNDS["padded"]):
        assert made == (BOUNDS["padded"], 2)


def known(rank, bounds):
    made = build(rank, bounds)
    return made.bounds, made.ranks


def even_bounds(rank, size, padded):
    made = VocabParallel.even(size, rank.groups["three"], padded_size=padded)
    return made.bounds, (made.start, made.stop), made.classes, repr(made), repr(copy.deepcopy(made))


def test_even_parts(world):
    """As torch.chunk; and a module that holds one may be copied."""
    for size, padded in ((50257, None), (50257, 50304), (2, None), (4, None)):
        rows = torch.arange(padded or size)
        chunks = [len(chunk) for chunk in rows.chunk(3)] + [0, 0]
        for place, (bounds, own, classes, text, copied) in enumerate(world.run("three", even_bounds, size, padded)):
            assert [stop - start for start, stop in bounds] == chunks[:3]
            assert own == bounds[place]
            assert classes == max(0, min(own[1], size) - own[0])
            assert text == copied == f"<classes {own[0]} to {own[1]} of {size}, over 3 ranks>"


def wrong_call(rank, op, change, backend):
    inputs = make_inputs(4, V, 16 if op == "flce" else None)
    split = Split(BOUNDS["two"], change.pop("flags", {}))
    made = split.of(rank, "two", V)
    own = ranks.own_part(inputs, made)
    if "whole" in change:
        own = replace(own, **{name: getattr(inputs, name) for name in change.pop("whole")})
    return ranks.loss_of(own, made, backend=backend, **change)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("ce", {"whole": ["input"]}, "input's last dimension must be this rank's stop - start = .*has been gathered"),
        ("flce", {"whole": ["weight"]}, "weight's first dimension must be this rank's stop - start = .*has been gathered"),
        ("ce", {"flags": {"sequence_parallel": True}}, "sequence_parallel must be False for cross_entropy"),
        ("flce", {"flags": {"sequence_parallel": True}, "whole": ["input"]}, r"2 times as many tokens, \(8,\), got \(4,\)"),
        ("flce", {"flags": {"sequence_parallel": True, "reduce_input_grad": False}}, "reduce_input_grad must be True"),
    ],
)
def test_wrong_calls_are_refused(world, op, change, message):
    for said in world.run("two", refusal, wrong_call, op, change, "torch"):
        assert re.search(message, said), said


def test_without_a_process_group():
    with pytest.raises(ValueError, match="torch\\.distributed is not initialised"):
        VocabParallel(None, 0, V, V)
    with pytest.raises(ValueError, match="group must be None or a ProcessGroup"):
        VocabParallel.even(V, group="tp")
    with pytest.raises(ValueError, match="vocab_parallel must be None or a VocabParallel, got 2"):
        ranks.loss_of(make_inputs(4, V), 2)


def test_a_request_holds_no_process_group(world):
    assert world.run("two", label) == [(("vocab_parallel", 2),)] * 2


def label(rank):
    options = CrossEntropyOptions(vocab_parallel=build(rank, BOUNDS["two"]))
    assert pickle.dumps(options.nondefault())
    return options.nondefault()


def plans(rank):
    """Of a part of 1 class and of one of 100000, by explain."""
    made = build(rank, ((0, 1), (1, 100001)), 100001)
    device = DeviceInfo("cuda", (9, 0))
    shape = (8192, 100001, 4096)
    about = {"device": device, "dtype": torch.bfloat16, "shape": shape, "backend": "torch"}
    return str(explain("fused_linear_cross_entropy", **about, vocab_parallel=made))


def test_ranks_agree_on_the_chunks(world):
    first, second = world.run("two", plans)
    assert first == second
    assert "vocab_parallel=2" in first
    assert "input gradient summed over 2 ranks in bfloat16" in first
    about = {"device": DeviceInfo("cuda", (9, 0)), "dtype": torch.bfloat16, "shape": (8192, 100001, 4096), "backend": "torch"}
    assert first == str(explain("fused_linear_cross_entropy", **about, vocab_parallel=2))


def test_more_ranks_make_longer_chunks_and_sum_in_fp32():
    """The slab stays; and what many ranks sum in bf16 would lose digits, as many chunks do (N7)."""
    about = {"device": DeviceInfo("cuda", (9, 0)), "dtype": torch.bfloat16, "shape": (65536, 128256, 4096), "backend": "torch"}
    one, *more = (explain("fused_linear_cross_entropy", **about, vocab_parallel=k).plan for k in (1, 2, 4, 8))
    for ranks_, plan in zip((2, 4, 8), more, strict=True):
        assert plan.chunk_rows == ranks_ * one.chunk_rows
        assert plan.slab_bytes == one.slab_bytes
        assert plan.sum_dtype == (torch.float32 if ranks_ > 4 else torch.bfloat16)
    for wrong in (0, 2.0, True, "2"):
        with pytest.raises(ValueError, match="vocab_parallel must be None, a VocabParallel or a number of ranks"):
            explain("fused_linear_cross_entropy", **about, vocab_parallel=wrong)


def traced(rank, inputs, split, fullgraph):
    """What is said, or (loss, eager loss, number of graphs)."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    made = split.of(rank, "two", inputs.vocab)
    own = ranks.own_part(inputs, made)

    def loss(x):
        return ranks.loss_of(replace(own, input=x), made, backend="torch")

    try:
        compiled = torch.compile(loss, fullgraph=fullgraph, backend=count)(own.input)
    except Exception as error:  # noqa: BLE001 - dynamo may wrap it
        return str(error)
    return compiled, loss(own.input), len(graphs)


def test_tracing_is_refused(world):
    """Where a graph may break it does, and the call runs eagerly, with nothing in it traced."""
    arguments = make_inputs(4, V), Split(BOUNDS["two"])
    for said in world.run("two", traced, *arguments, True):
        assert "vocab_parallel must be None under torch.compile" in said
    for compiled, eager, graphs in world.run("two", traced, *arguments, False):
        assert torch.equal(compiled, eager)
        assert graphs == 0


def test_a_row_without_it_refuses(ce):
    row = replace(ce.row, capability=replace(ce.row.capability, options=ce.row.capability.options - {"vocab_parallel"}))
    request = Request("cross_entropy", DeviceInfo("cpu"), torch.float32, (4, V))
    request = replace(request, options=(("vocab_parallel", 2),))
    assert "vocab_parallel=2 is not supported" in row.capability.reasons(request)


@pytest.mark.gpu
def test_two_gpus(loss, gpus):
    """Everything once over NCCL."""
    if loss.device == "cpu":
        pytest.skip("this is for GPUs")
    loss.needs(vocab_parallel=2)
    for dtype in (torch.float32, torch.bfloat16):
        extra = {"bias": True} if loss.fused else {}
        inputs = loss.inputs(64, 1000, 16, dtype=dtype, class_weight=True, **extra)
        inputs = ranks.to("cpu", inputs)
        for options in cases(loss, []).values():
            check(gpus, loss, "two", inputs, Split(((0, 600), (600, 1040))), **options)


def test_an_error_in_a_rank_reaches_the_test(world):
    with pytest.raises(RankError, match="KeyError"):
        world.run("two", broken)


def broken(rank):
    raise KeyError(rank.rank)


def wrong_parts(rank, make, arguments):
    return make(rank, **arguments)


def build_even(rank, **arguments):
    VocabParallel.even(group=rank.groups["two"], **arguments)


def build_bounds(rank, **arguments):
    VocabParallel(rank.groups["two"], 0, 5, 5, **arguments)


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (build_even, {"vocab_size": "5"}, "vocab_size must be an int >= 1, got '5'"),
        (build_even, {"vocab_size": 5, "reduce_input_grad": 3}, "reduce_input_grad must be True or False, got 3"),
        (build_even, {"vocab_size": -1}, "vocab_size must be an int >= 1, got -1"),
        (build_even, {"vocab_size": 5, "padded_size": 4}, "padded_size must be None or an int >= 5, got 4"),
        (build_bounds, {"bounds": 5}, "bounds must be a tuple of (start, stop) for each rank, got 5"),
        (build_bounds, {"bounds": ((0,),)}, "bounds must be a tuple of (start, stop) for each rank, got ((0,),)"),
    ],
)
def test_what_is_wrong_about_parts_is_named(world, build, arguments, message):
    for said in world.run("two", refusal, wrong_parts, build, arguments):
        assert said.startswith(message)
