"""Statistics that kernels exchange among themselves: what a vocabulary on one rank gives, however the ranks are timed."""

import time
from dataclasses import replace

import pytest
import ranks
import torch
from peers import forget, of, share
from ranks import Split, World
from test_vocab_parallel import BOUNDS, inputs_of, joined

from liger import exchange
from liger.testing import assert_matches

pytest.importorskip("triton")


@pytest.fixture
def shared(world, tmp_path):
    """Lets the ranks of a group exchange through files."""
    groups = []

    def begin(group, timeout_s=60.0):
        world.run(group, share, group, str(tmp_path / str(len(groups))), timeout_s)
        groups.append(group)

    yield begin
    for group in groups:
        world.run(group, forget, group)


def exchanged(rank, group, calls, split, options):
    """(Outcome of each call, the rows that were exchanged in all of them, the collectives)"""
    known = of(rank, group)
    before = 0 if known is None else known.rows_sent
    with ranks.traffic() as collectives:
        outcomes = [ranks.outcome(rank, group, inputs, split, options) for inputs in calls]
    return outcomes, of(rank, group).rows_sent - before, [name for name, _ in collectives]


def check(world, subject, group, calls, split, **options):
    """Every call is within budget of one rank's oracle and alike on all ranks; no collective gathered statistics."""
    asked = options | {"backend": subject.row.backend}
    answers = world.run(group, exchanged, group, calls, split, asked)
    for i, inputs in enumerate(calls):
        got = joined([outcomes[i] for outcomes, _, _ in answers], split, inputs.vocab, subject.fused)
        assert_matches(got, *subject.expected(inputs, **options))
    weights = sum(inputs.class_weight is not None for inputs in calls)
    for _, sent, collectives in answers:
        rows = sum(inputs.target.numel() for inputs in calls)
        assert 0 < sent <= rows if subject.fused else sent == rows  # the fused loss may leave ignored rows out
        assert collectives.count("all_gather") == weights


def interpreted_only(subject):
    if not subject.interpreted:
        pytest.skip("this is for Triton's interpreter")


@pytest.mark.parametrize("bounds", ["two", "three", "padded", "reversed"])
def test_parity(loss, world, shared, bounds):
    """Loss and gradients with the exchange; the loss is the same on every rank to the bit."""
    interpreted_only(loss)
    group = "three" if bounds == "three" else "two"
    shared(group)
    inputs = inputs_of(loss, 5, class_weight=False)
    inputs.target[:2] = torch.tensor([4, 5] if group == "three" else [19, 20])  # a part's last class, the next one's first
    for options in ({}, {"reduction": "none"}) if not loss.fused else ({"chunk_size": 3},):
        check(world, loss, group, [inputs], Split(BOUNDS[bounds]), **options)


def test_other_options_that_need_no_collective(ce, world, shared):
    interpreted_only(ce)
    shared("two")
    options = {"lse_square_scale": 0.01, "softcap": 5.0, "logit_scale": 0.7, "return_z_loss": True}
    check(world, ce, "two", [inputs_of(ce, 5)], Split(BOUNDS["padded"]), **options)


def test_calls_of_any_size_follow_each_other(ce, world, shared):
    """Both halves of the buffers are used again; ignored rows send nothing; more rows than there was room for."""
    interpreted_only(ce)
    world.run("two", small_buffers)
    shared("two")
    calls = [
        inputs_of(ce, rows, class_weight=False, ignored=ignored)
        for rows, ignored in ((3, 0.3), (1, 1.0), (4, 1.0), (9, 0.2), (2, 0.0), (9, 0.5))
    ]
    check(world, ce, "two", calls, Split(BOUNDS["two"]), reduction="none")


def small_buffers(rank):
    exchange.LEAST_ROWS = 4


def late_after_ignored_rows(rank, inputs, ignored, split):
    """The first of the ranks reads the first call's words late: it has slept since it sent its own."""
    options = {"backend": "triton", "reduction": "none"}
    if rank.rank == 2:
        time.sleep(1)
    return [ranks.outcome(rank, "two", each, split, options).output.loss for each in (inputs, ignored, ignored, inputs)]


def test_a_rank_that_is_late(ce, world, shared):
    interpreted_only(ce)
    shared("two")
    inputs = inputs_of(ce, 3, class_weight=False)
    ignored = replace(inputs, target=torch.full_like(inputs.target, -100))
    first, second = world.run("two", late_after_ignored_rows, inputs, ignored, Split(BOUNDS["two"]))
    wanted = ce.outcome(inputs, reduction="none").output.loss
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(first[0], wanted)
    assert torch.equal(first[0], first[3])


def second_fails(rank, inputs, split):
    """After a call that works, the second rank makes no other."""
    made = split.of(rank, "two", inputs.vocab)
    ranks.outcome(rank, "two", inputs, split, {"backend": "triton"})
    if made.start:
        raise KeyError("out of memory, say")
    ranks.outcome(rank, "two", inputs, split, {"backend": "triton"})


def test_a_lost_rank_is_an_error_on_the_others(ce, world, shared):
    interpreted_only(ce)
    shared("two", 1.0)
    (waiting, said), (second, lost) = world.outcomes(
        "two", second_fails, inputs_of(ce, 3, class_weight=False), Split(BOUNDS["two"])
    )
    assert not second
    assert lost[0] == "KeyError"
    assert not waiting
    assert "did not come within the timeout of the process group" in said[1], said


def gpus_only(subject):
    if subject.device != "cuda" or subject.row.backend != "triton":
        pytest.skip("this is for Triton's kernels on GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"lse_square_scale": 0.01, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_gpus(loss, gpus, dtype, options):
    """Several calls, the last one with more rows than the buffers had room for."""
    gpus_only(loss)
    sizes = [(64, 1000), (3, 50257), (500, 4000), (9000, 200)]
    for rows, vocab in sizes:
        cut = vocab * 3 // 5
        inputs = [ranks.to("cpu", loss.inputs(rows, vocab, 16, dtype=dtype, seed=seed)) for seed in (1, 2)]
        check(gpus, loss, "two", inputs, Split(((0, cut), (cut, vocab + 7))), **options)


def on_streams(rank, inputs, split):
    """Losses of calls on two streams in turn, and with collectives."""
    made = split.of(rank, "two", inputs.vocab)
    own = ranks.own_part(ranks.to(rank.device, inputs), made)
    streams = [torch.cuda.Stream(rank.device) for _ in range(2)]
    losses = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            losses.append(ranks.loss_of(own, made, backend="triton"))
    torch.cuda.synchronize()
    known = exchange.KNOWN[made.group]
    exchanging, known[rank.device] = known[rank.device], None
    wanted = ranks.loss_of(own, made, backend="triton").cpu()
    known[rank.device] = exchanging
    return torch.stack(losses).cpu(), wanted, exchanging.rows_sent


@pytest.mark.gpu
def test_calls_on_two_streams(ce, gpus):
    gpus_only(ce)
    inputs = ranks.to("cpu", ce.inputs(2000, 8000, dtype=torch.float32))
    for losses, wanted, rows in gpus.run("two", on_streams, inputs, Split(((0, 4000), (4000, 8000)))):
        torch.testing.assert_close(losses, wanted.expand(40), rtol=1e-6, atol=0)
        assert losses.unique().numel() == 1
        assert rows >= 40 * 2000


def captured(rank, inputs, split):
    """(loss, gradient) of a graph's second replay, of the eager call, and the rows that were exchanged while capturing."""
    made = split.of(rank, "two", inputs.vocab)
    leaves = ranks.own_part(ranks.to(rank.device, inputs), made).leaves()

    def step():
        value = ranks.loss_of(leaves, made, backend="triton")
        return value.detach(), *torch.autograd.grad(value, leaves.input)

    eager = step()
    known = exchange.KNOWN[made.group]
    exchanging, known[rank.device] = known[rank.device], None
    step()  # compiles what the graph will have
    known[rank.device] = exchanging
    torch.cuda.synchronize()
    before, graph = exchanging.rows_sent, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return [t.cpu() for t in replayed], [t.cpu() for t in eager], exchanging.rows_sent - before


@pytest.mark.gpu
def test_a_graph_has_collectives(ce, gpus):
    """A call's tag would be every replay's."""
    gpus_only(ce)
    inputs = ranks.to("cpu", ce.inputs(64, 1000, dtype=torch.float32))
    for replayed, eager, rows in gpus.run("two", captured, inputs, Split(((0, 600), (600, 1000)))):
        assert rows == 0
        torch.testing.assert_close(replayed, eager)


@pytest.mark.gpu
def test_a_lost_rank_is_an_error_on_the_other_gpu(ce):
    """Within the group's timeout."""
    gpus_only(ce)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    alone = World(2, {"two": ([0, 1], 5)}, "cuda")
    inputs = ranks.to("cpu", ce.inputs(64, 1000, dtype=torch.float32))
    try:
        (waiting, said), (second, lost) = alone.outcomes("two", second_fails, inputs, Split(((0, 600), (600, 1000))))
    finally:
        alone.close()
    assert not second
    assert lost[0] == "KeyError"
    assert not waiting
    assert said[0] in ("AcceleratorError", "RuntimeError"), said
