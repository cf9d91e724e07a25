"""Statistics that kernels exchange among themselves: what a vocabulary on one rank gives, however the ranks are timed."""

import contextlib
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import ranks
import torch
from peers import forget, launched, of, share
from ranks import Split, World
from test_vocab_parallel import BOUNDS, inputs_of, joined

from liger import exchange
from liger.testing import assert_matches


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


def exchanged(rank, group, calls, split, options, launch=None):
    """(Outcome of each call, the rows that were exchanged in all of them, the collectives)"""
    known = of(rank, group)
    before = 0 if known is None else known.rows_sent
    with ranks.traffic() as collectives, contextlib.nullcontext() if launch is None else launched(*launch):
        outcomes = [ranks.outcome(rank, group, inputs, split, options) for inputs in calls]
    return outcomes, of(rank, group).rows_sent - before, [name for name, _ in collectives]


def check(world, subject, group, calls, split, launch=None, **options):
    """Every call is within budget of one rank's oracle and alike on all ranks; no collective gathered statistics."""
    asked = options | {"backend": subject.row.backend}
    answers = world.run(group, exchanged, group, calls, split, asked, launch)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(loss, world, shared, dtype):
    interpreted_only(loss)
    shared("two")
    check(world, loss, "two", [inputs_of(loss, 4, dtype=dtype, class_weight=False)], Split(BOUNDS["padded"]))


@pytest.mark.parametrize("lag", [0, 2, 9])
def test_a_row_is_finished_any_number_of_programs_after_it_was_sent(ce, world, shared, lag):
    """Also later than the last row is sent. Parts of 20 and 17 classes end within their second block of 16."""
    interpreted_only(ce)
    shared("two")
    inputs = inputs_of(ce, 5, class_weight=False)
    for reduction in ("mean", "none"):
        check(world, ce, "two", [inputs, inputs], Split(BOUNDS["two"]), (16, lag), reduction=reduction)


def test_other_options_that_need_no_collective(ce, world, shared):
    interpreted_only(ce)
    shared("two")
    options = {"lse_square_scale": 0.01, "softcap": 5.0, "logit_scale": 0.7, "return_z_loss": True}
    check(world, ce, "two", [inputs_of(ce, 5)], Split(BOUNDS["padded"]), **options)


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"return_predicted_tokens": True}, {"use_token_scaling": True}])
def test_what_collectives_are_for(loss, world, shared, option):
    """Options that need more than three numbers of a row, though the group could exchange those."""
    interpreted_only(loss)
    loss.needs(**option)
    shared("two")
    inputs, split = inputs_of(loss, 3, class_weight=False), Split(BOUNDS["two"])
    answers = world.run("two", exchanged, "two", [inputs], split, option | {"backend": loss.row.backend})
    got = joined([outcomes[0] for outcomes, _, _ in answers], split, inputs.vocab, loss.fused)
    assert_matches(got, *loss.expected(inputs, **option))
    for _, sent, collectives in answers:
        assert sent == 0
        assert "all_gather" in collectives


def test_a_rank_without_classes_takes_part_in_collectives(ce, world, shared):
    interpreted_only(ce)
    shared("three")
    inputs, split = inputs_of(ce, 3, class_weight=False), Split(BOUNDS["empty"])
    answers = world.run("three", exchanged, "three", [inputs], split, {"backend": ce.row.backend})
    got = joined([outcomes[0] for outcomes, _, _ in answers], split, inputs.vocab, False)
    assert_matches(got, *ce.expected(inputs))
    assert [(sent, collectives) for _, sent, collectives in answers] == [(0, ["all_gather"])] * 3


@pytest.mark.parametrize("low", [0, 1])
def test_one_rank_far_below(ce, world, shared, low):
    """Its sum underflows in any common scale, with the target on either rank."""
    interpreted_only(ce)
    shared("two")
    inputs = inputs_of(ce, 4, class_weight=False, ignored=0.0)
    start, stop = BOUNDS["two"][low]
    inputs.input[:, start:stop] -= 1e4
    inputs.target[:] = torch.tensor([0, 19, 20, 36])
    check(world, ce, "two", [inputs], Split(BOUNDS["two"]), reduction="none")


def check_rows_that_are_not_finite(world, subject):
    inputs = ranks.to("cpu", inputs_of(subject, 8, class_weight=False, ignored=0.0))
    x, y = inputs.input, inputs.target
    x[0, 3] = x[1, 30] = torch.nan
    x[2, :20], y[2] = -torch.inf, 30
    x[3, 20:], y[3] = -torch.inf, 5
    x[4] = -torch.inf
    x[5, 7] = torch.inf
    x[6, 25], y[6] = -torch.inf, 25
    options = {"reduction": "none", "backend": subject.row.backend}
    (first, *_), (second, sent, _) = world.run("two", exchanged, "two", [inputs], Split(BOUNDS["two"]), options)
    assert sent == 8
    loss, gradient = first[0].output.loss, torch.cat([first[0].input, second[0].input], 1)
    torch.testing.assert_close(loss, second[0].output.loss, rtol=0, atol=0, equal_nan=True)
    logits = x.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    assert truth.isnan().tolist() == [True, True, False, False, True, True, False, False]
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6, equal_nan=True)
    wanted = torch.autograd.grad(truth.sum(), logits)[0]
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_that_are_not_finite(ce, world, shared):
    """A NaN on any rank is one on all; minus infinity takes a class away, a part, and all of a row."""
    interpreted_only(ce)
    shared("two")
    check_rows_that_are_not_finite(world, ce)


def test_a_target_that_names_no_class(ce, world, shared):
    """Not even a column of padding: NaN, and no rank reads it."""
    interpreted_only(ce)
    shared("two")
    inputs = inputs_of(ce, 4, class_weight=False, ignored=0.0)
    inputs.target[1:3] = torch.tensor([inputs.vocab, -1])
    options = {"reduction": "none", "backend": ce.row.backend}
    for outcomes, sent, _ in world.run("two", exchanged, "two", [inputs], Split(BOUNDS["padded"]), options):
        assert outcomes[0].output.loss.isnan().tolist() == [False, True, True, False]
        assert sent == 4


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


def after_the_last_tag(rank, inputs, split):
    """(Losses of calls around that of the last tag, tags after each)"""
    options, losses, tags = {"backend": "triton"}, [], []
    for _ in range(6):
        losses.append(ranks.outcome(rank, "two", inputs, split, options).output.loss)
        peers = of(rank, "two")
        if not tags:
            peers.tag = exchange.LAST_TAG - 2
        tags.append(peers.tag)
    return losses, tags


def test_tags_begin_anew(ce, world, shared):
    """In new buffers, where no word is that has one of them."""
    interpreted_only(ce)
    shared("two")
    inputs = inputs_of(ce, 2, class_weight=False, ignored=0.0)
    wanted = ce.outcome(inputs).output.loss
    for losses, tags in world.run("two", after_the_last_tag, inputs, Split(BOUNDS["two"])):
        assert tags == [2**31 - 3, 2**31 - 2, 2**31 - 1, 2, 3, 4]
        for loss in losses:
            torch.testing.assert_close(loss, wanted)


def late(rank, calls, split):
    """Losses of calls in which one rank is done in no time and the other late, and late to read what came for it."""
    fast, options = rank.rank == 2, {"backend": "triton", "reduction": "none"}
    if not fast:
        time.sleep(1)
    with launched(16, 0 if fast else 9):
        return [ranks.outcome(rank, "two", inputs, split, options).output.loss for inputs in calls]


def test_a_rank_that_is_late(ce, world, shared):
    """What the other sends in the next call must not take the place of words that are still to be read, nor may it take
    those of the call before the last for the ones to come.
    """
    interpreted_only(ce)
    shared("two")
    calls = [inputs_of(ce, 4, 600, class_weight=False, ignored=0.0, seed=seed) for seed in (1, 2, 3)]
    calls.insert(1, replace(calls[0], target=torch.full_like(calls[0].target, -100)))
    first, second = world.run("two", late, calls, Split(((0, 10), (10, 600))))
    for inputs, ours, theirs in zip(calls, first, second, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, ce.outcome(inputs, reduction="none").output.loss)


@contextlib.contextmanager
def logged():
    """What the package logs inside."""
    said, handler, logger = [], logging.Handler(), logging.getLogger("liger")
    handler.emit = lambda record: said.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def without_more_memory(rank, calls, split):
    """(Outcomes, rows exchanged, what was logged) where a second buffer cannot be had."""

    def fail(words):
        raise exchange.Unusable("rank 1: too few bytes")

    peers, outcomes = of(rank, "two"), []
    with logged() as said:
        for inputs in calls:
            outcomes.append(ranks.outcome(rank, "two", inputs, split, {"backend": "triton"}))
            peers._allocate = fail
    return outcomes, peers.rows_sent, said


def test_memory_that_cannot_grow(ce, world, shared):
    """From then on statistics go through a collective, which is said once."""
    interpreted_only(ce)
    world.run("two", small_buffers)
    shared("two")
    calls, split = [inputs_of(ce, rows, class_weight=False) for rows in (3, 5, 2)], Split(BOUNDS["two"])
    answers = world.run("two", without_more_memory, calls, split)
    for i, inputs in enumerate(calls):
        assert_matches(joined([outcomes[i] for outcomes, _, _ in answers], split, inputs.vocab, False), *ce.expected(inputs))
    for _, sent, said in answers:
        assert sent == 3
        assert said == ["vocab_parallel: row statistics go through a collective, because rank 1: too few bytes"]


def asked(rank, gpus, hosts):
    """(What `peer_rows` says, twice, of GPUs with these ids in these hosts, and logs)"""
    group = rank.groups["two"]
    exchange.KNOWN.pop(group, None)
    properties = SimpleNamespace(uuid=gpus[rank.rank])
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(exchange, "_host", lambda: hosts[rank.rank])
        found = [exchange.peer_rows(group, torch.device("cuda", 0), 5) for _ in range(2)]
    exchange.KNOWN.pop(group)
    return found, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about GPUs that are not there")
@pytest.mark.parametrize(
    ("gpus", "hosts", "reason"),
    [
        ("abcc", "hhhh", "the ranks do not have a GPU each of one host"),  # two could wait for each other for ever
        ("abcd", "hhhi", "the ranks do not have a GPU each of one host"),
        ("abcd", "hhhh", "rank 0: "),
    ],
)
def test_all_ranks_are_told_why_not(world, gpus, hosts, reason):
    for found, said in world.run("two", asked, gpus, hosts):
        assert found == [None, None]
        assert len(said) == 1
        assert said[0].startswith(f"vocab_parallel: row statistics go through a collective, because {reason}")


def mapped(rank, loser):
    """(Addresses less those at which this rank sees buffers, what is said, whether it came to a rendezvous)

    Buffers lie 64 bytes, and 128, into what symmetric memory tells the addresses of. The `loser` has no memory for one.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    group, met = rank.groups["two"], []
    place = torch.distributed.get_rank(group)
    own = torch.full((40,), 7, dtype=torch.int64)
    seen = [own.data_ptr() - 64 * (place + 1) if r == place else 4096 * r for r in range(2)]

    def allocated(*_):
        if place == loser:
            raise RuntimeError("no\nroom")
        return own

    def met_at(tensor, group):
        met.append(tensor)
        return SimpleNamespace(buffer_ptrs=seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(_SymmetricMemory, "empty_strided_p2p", allocated)
        patch.setattr("torch.distributed._symmetric_memory.rendezvous", met_at)
        try:
            made, addresses = exchange._symmetric(group, rank.device, 40)
        except exchange.Unusable as error:
            return None, str(error), bool(met)
    assert made is own
    assert not made.any()
    return [address - start for address, start in zip(addresses.tolist(), seen, strict=True)], None, bool(met)


def test_symmetric_memory(world):
    """Every rank knows where in the others' memory their buffers are; and nobody waits for one that has none."""
    assert world.run("two", mapped, None) == [([64, 128], None, True)] * 2
    assert world.run("two", mapped, 1) == [(None, "rank 1: RuntimeError: no room", False)] * 2


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


@pytest.mark.gpu
@pytest.mark.parametrize("lag", [0, 1, 50, 5000])
def test_two_gpus_agree_to_the_bit(ce, gpus, lag):
    """Whoever waits for words and whoever finds them there."""
    gpus_only(ce)
    inputs = [ranks.to("cpu", ce.inputs(3000, 3000, dtype=torch.float32, seed=seed)) for seed in (1, 2, 3)]
    for reduction in ("none", "mean"):
        check(gpus, ce, "two", inputs, Split(((0, 1100), (1100, 3000))), (1024, lag), reduction=reduction)


@pytest.mark.gpu
def test_two_gpus_and_rows_that_are_not_finite(ce, gpus):
    gpus_only(ce)
    check_rows_that_are_not_finite(gpus, ce)


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
