"""Memory that does not suffice: the fused loss takes smaller chunks, or says how many bytes it needs; nothing else changes.

On any device a mode stands for a GPU that is nearly full; the tests on a GPU fill it.
"""

import contextlib
import gc
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger.backends import linear, plan
from liger.call import Call, Needs, Recipe
from liger.options import CrossEntropyOptions
from liger.testing import collect

ROWS, V, H = 64, 40, 2
ROW_BYTES = V * 4  # float32, which a CPU projects in


class NoBlockBeyond(TorchDispatchMode):
    """An allocation of more than so many bytes fails, as a GPU's would."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.refused = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        held = {_storage(t) for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            size = tensor.untyped_storage().nbytes()
            if size > self.limit and _storage(tensor) not in held:
                self.refused.append(size)
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        return result


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(autouse=True)
def nothing_was_reported(monkeypatch):
    monkeypatch.setattr(plan, "_reported", set())


@pytest.fixture
def small_steps(monkeypatch):
    """Chunks of a handful of rows can be halved too."""
    monkeypatch.setattr(plan, "GEMM_ROW_TILE", 4)


def fp32_inputs(flce, **kwargs):
    if flce.interpreted:
        pytest.skip("the loop is the same for all backends, and dozens of rows take the interpreter long")
    return flce.inputs(ROWS, V, H, dtype=torch.float32, bias=True, **kwargs)


def outcome_within(limit, flce, inputs, **options):
    """(outcome, sizes refused in forward, in backward) where no block may be larger."""
    leaves = inputs.leaves()
    with NoBlockBeyond(limit) as forward:
        output = flce(leaves, **options)
    with NoBlockBeyond(limit) as backward:
        return collect(output, leaves), forward.refused, backward.refused


def same(left, right):
    parts = [(*outcome.output, outcome.input, outcome.weight, outcome.bias) for outcome in (left, right)]
    return all(torch.equal(a, b) for a, b in zip(*parts, strict=True) if a is not None)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize(("fitting", "chunk_size"), [(64, None), (63, 32), (31, 16), (15, 8), (8, 8), (5, 4)])
def test_smaller_chunks_where_memory_runs_out(flce, small_steps, fitting, chunk_size, ignored, reduction):
    """`fitting` rows of logits fit: the result is bit for bit that of a call with the chunk_size that is then taken."""
    inputs = fp32_inputs(flce, ignored=ignored)
    got, forward, backward = outcome_within(fitting * ROW_BYTES, flce, inputs, reduction=reduction)
    too_many = fitting < ROWS * (1 - ignored)
    assert bool(forward) == too_many
    assert bool(backward) == (too_many and reduction == "none"), "backward projects again, and has to find out again"
    assert same(got, flce.outcome(inputs, reduction=reduction, chunk_size=chunk_size if too_many else None))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_evaluation_takes_smaller_chunks_too(flce, small_steps, reduction):
    inputs = fp32_inputs(flce)
    with torch.no_grad(), NoBlockBeyond(20 * ROW_BYTES) as memory:
        loss = flce(inputs, reduction=reduction)
    assert memory.refused
    assert torch.equal(loss, flce(inputs, reduction=reduction, chunk_size=16))


def needs(message):
    """(bytes needed together, those listed)."""
    total, parts = re.search(r"needs (\d+) bytes beyond .*?: (.*)\. ", message).groups()
    return int(total), [int(part) for part in re.findall(r"(\d+) for ", parts)]


def said(error):
    """(rows of logits, bytes needed, those listed), in the words by which trainers know a lack of memory."""
    (message,) = error.args
    assert message.startswith("CUDA out of memory. Tried to allocate ")
    assert f"(N, V, H) = ({ROWS}, {V}, {H})" in message
    total, parts = needs(message)
    assert total == sum(parts)
    return int(re.search(r"the logits of (\d+) rows", message)[1]), parts


@pytest.mark.parametrize(("chunk_size", "rows"), [(None, 4), (16, 16)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_does_not_fit_is_said_in_bytes(flce, small_steps, chunk_size, rows, reduction, autocast):
    """A caller's chunk_size is kept."""
    if autocast and flce.device != "cpu":
        pytest.skip("a CPU's products are in fp32 under autocast too")
    inputs = fp32_inputs(flce, ignored=0.0)
    with pytest.raises(torch.OutOfMemoryError) as raised, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outcome_within((rows - 1) * ROW_BYTES, flce, inputs, reduction=reduction, chunk_size=chunk_size)
    gradients = [ROWS * H * 4, V * H * 4] if reduction == "mean" else []  # those of "none" are made in backward
    assert said(raised.value) == (rows, [rows * ROW_BYTES, *gradients])
    assert ("chunk_size" in str(raised.value)) == (chunk_size is not None)


def test_a_backward_that_did_not_fit_can_be_repeated(flce, small_steps):
    inputs = fp32_inputs(flce, ignored=0.0)
    leaves = inputs.leaves()
    loss = flce(leaves, reduction="none").sum()
    with NoBlockBeyond(3 * ROW_BYTES), pytest.raises(torch.OutOfMemoryError) as raised:
        loss.backward(retain_graph=True)
    assert said(raised.value) == (4, [4 * ROW_BYTES, ROWS * H * 4, V * H * 4])
    loss.backward()
    wanted = flce.outcome(inputs, reduction="none")
    assert torch.equal(leaves.input.grad, wanted.input)
    assert torch.equal(leaves.weight.grad, wanted.weight)


def test_a_lack_of_memory_changes_nothing(loss):
    """The caller's tensors have their values and no gradients, nothing is kept alive, and the next call is right."""
    inputs = loss.inputs(4, V, H, dtype=loss.finest)
    leaves = inputs.leaves()
    with NoBlockBeyond(4), pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\."):
        loss(leaves)
    for name in ("input", "target", "weight"):
        tensor, before = getattr(leaves, name), getattr(inputs, name)
        assert tensor is None or (torch.equal(tensor, before) and tensor.grad is None)
    loss.check(inputs)


def test_a_smaller_chunk_is_reported_once(flce, small_steps, caplog):
    inputs = fp32_inputs(flce)
    for _ in range(2):
        outcome_within(ROWS // 2 * ROW_BYTES, flce, inputs)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("liger", "WARNING")
    assert "chunks of 64 rows and goes on with 32; chunk_size=32 saves" in record.getMessage()


def test_nothing_of_a_failed_run_lives_on(flce, small_steps):
    """Neither while the next one runs nor in the error that the caller gets."""
    inputs, alive = fp32_inputs(flce), []

    class Sums(linear.GradientSums):
        def __init__(self, *args):
            gc.collect()
            alive.append(sum(reference() is not None for reference in made))
            super().__init__(*args)
            made.append(weakref.ref(self))

        def add(self, chunk):
            made.append(weakref.ref(chunk.logits))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "GradientSums", Sums)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            flce(inputs.leaves())
    assert len(made) == 2 * 5
    assert not any(alive)
    assert raised.value.__context__ is None
    assert not any(reference() for reference in made)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_are_gone_before_the_sum_is_cast(flce, reduction):
    """What `Plan.cast_bytes` counts on."""
    inputs = fp32_inputs(flce)
    made, alive, projection, sums = [], [], linear.Projection.__init__, linear.GradientSums.finish

    def noted(self, *args):
        projection(self, *args)
        made.append(weakref.ref(self))

    def finished(self):
        alive.append([reference() for reference in made if reference() is not None])
        return sums(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.Projection, "__init__", noted)
        patch.setattr(linear.GradientSums, "finish", finished)
        flce.outcome(inputs, reduction=reduction, chunk_size=16)
    assert len(made) == 1 + (reduction == "none")
    assert alive == [[]]


def bf16_call(shape, *, weight=True, chunk_size=None, ranks=1):
    """Without memory behind it; its plan is a GPU's."""
    n, vocab, hidden = shape
    x, head = (torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta") for rows in (n, vocab))
    options = CrossEntropyOptions(chunk_size=chunk_size)
    if ranks > 1:
        object.__setattr__(options, "vocab_parallel", SimpleNamespace(ranks=ranks, vocab_size=vocab))
    recipe = Recipe(options, Needs(True, weight, False), x.dtype, torch.float32, False, None)
    return Call(x, torch.empty(n, dtype=torch.int64, device="meta"), head, None, None, recipe)


def out_of_memory(call):
    """(rows a chunk of one plan after the other, what is said), where memory never suffices."""
    rows = []

    def run(plan):
        rows.append(plan.chunk_rows)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        plan.within_memory(call, run, gradients=True)
    return rows, str(raised.value)


@pytest.mark.parametrize(
    ("shape", "options", "tried"),
    [
        # More than 4 chunks would be summed in fp32: 1 GiB more for the sum, and 1 GiB to return it in bf16.
        ((8192, 128256, 4096), {}, [3072, 2048]),
        ((8192, 128256, 4096), {"weight": False}, [3072, 2048, 1024, 512, 256, 128]),
        ((8192, 128256, 4096), {"chunk_size": 1000}, [1000]),
        # The sum is in fp32 anyway; below 1024 rows returning it in bf16 needs more than the logits.
        ((65536, 151936, 1024), {}, [4096, 2048, 1024]),
        ((100, 128256, 4096), {}, [100]),
        ((8192, 128256, 4096), {"ranks": 2}, [6144]),  # all ranks make the same chunks
    ],
)
def test_only_plans_that_need_less_are_tried(shape, options, tried):
    rows, _ = out_of_memory(bf16_call(shape, **options))
    assert rows == tried


@pytest.mark.parametrize(
    ("options", "rows", "advice"),
    [
        ({"chunk_size": 1000, "weight": False}, 512, "chunk_size=512 would need {}"),
        ({"ranks": 2}, 3072, "chunk_size=3072 on every rank would need {}"),
        ({"chunk_size": 1000}, None, "another chunk_size, or none, may need less"),
        ({}, None, "smaller chunks would not need less"),
    ],
    ids=["a chunk_size that was given", "ranks that have to agree", "a sum in fp32", "the plan's own"],
)
def test_what_would_need_less_is_said(options, rows, advice):
    """With the bytes, where the caller has to choose."""
    call = bf16_call((8192, 128256, 4096), **options)
    _, message = out_of_memory(call)
    needed = plan.plan_for(call, rows).needed_bytes(input=True, weight=options.get("weight", True))
    assert message.endswith(advice.format(needed))


@pytest.mark.parametrize(
    ("hidden", "ahead", "weight", "grows"), [(4096, 384, True, True), (4096, 384, False, False), (768, 1536, True, False)]
)
def test_two_slabs_are_alive_only_where_gradients_take_more(hidden, ahead, weight, grows):
    call = bf16_call((8192, 128256, hidden), weight=weight)
    projection = linear.Projection(call, plan.plan_for(call), SimpleNamespace(ahead_by_triton=False))
    projection.ahead = ahead
    assert projection._can_grow() == grows


# --- On a GPU that is nearly full -----------------------------------------------------------------

LARGE = (8192, 128256, 4096)
GIB, MIB = 1 << 30, 1 << 20
BESIDE = 256 * MIB
"""For what a plan does not count: the row kernels' temporaries, numbers per row, and the allocator's blocks of 20 MiB."""


@contextlib.contextmanager
def free(size):
    """The allocator may take so many bytes more than are in use."""
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.empty(gap, dtype=torch.uint8, device="cuda") for gap in gaps()]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del filled


def gaps():
    """Sizes of what is unused beside tensors that keep their segment from being given back."""
    stream = torch.cuda.current_stream().cuda_stream
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["stream"] == stream]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return [block["size"] for block in blocks if block["state"] == "inactive" and block["size"] > MIB]


def large_inputs(subject):
    """After a first call, so that kernels are loaded and products have their workspaces, on both streams."""
    if subject.device != "cuda":
        pytest.skip("fills a GPU")
    gc.collect()  # an earlier test's error holds its frames
    n, vocab, hidden = LARGE
    inputs = subject.inputs(n, vocab, hidden, dtype=torch.bfloat16, ignored=0.1)
    subject.outcome(inputs.rows(torch.arange(4096, device="cuda")), reduction="none")
    return inputs


def outcome_and_rows(flce, inputs, **options):
    """(outcome, rows a chunk in each pass that ran through)"""
    leaves, chunks, rows = inputs.leaves(*options.pop("frozen", ())), linear.Projection.chunks, []

    def watched(projection, index):
        made = chunks(projection, index)

        def counted():
            yield from made
            rows.append(projection.plan.chunk_rows)

        return counted()

    size = options.pop("free")
    with pytest.MonkeyPatch.context() as patch, free(size):
        patch.setattr(linear.Projection, "chunks", watched)
        return collect(flce(leaves, **options), leaves), rows


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", [GIB, GIB // 2])
def test_a_frozen_head_on_a_nearly_full_gpu(flce, size, reduction):
    inputs = large_inputs(flce)
    got, rows = outcome_and_rows(flce, inputs, free=size, frozen=("weight",), reduction=reduction)
    assert rows[-1] == 3072 if size == GIB else rows[-1] < 2048
    wanted = flce.outcome(inputs, frozen=("weight",), reduction=reduction, chunk_size=rows[0])
    assert torch.equal(got.output.loss, wanted.output.loss)
    if len(set(rows)) == 1:  # forward of "none" makes no gradient, and may take more rows than backward
        assert same(got, wanted)


@pytest.mark.gpu
def test_a_trained_head_on_a_nearly_full_gpu(flce):
    """Its gradient alone is 1 GiB: the bytes that are said are those that it takes."""
    inputs = large_inputs(flce)
    leaves = inputs.leaves()
    used = torch.cuda.memory_allocated()
    with free(GIB), pytest.raises(torch.OutOfMemoryError) as raised:
        flce(leaves)
    total, _ = needs(str(raised.value))
    assert GIB < total < 2 * GIB
    assert torch.cuda.memory_allocated() == used
    assert torch.equal(leaves.input, inputs.input)
    assert torch.equal(leaves.weight, inputs.weight)
    assert leaves.input.grad is None
    del leaves
    with pytest.raises(torch.OutOfMemoryError):
        outcome_and_rows(flce, inputs, free=total - 64 * MIB)
    got, rows = outcome_and_rows(flce, inputs, free=total + BESIDE)
    assert rows == [2048]
    assert same(got, flce.outcome(inputs, chunk_size=2048))
    flce.check(flce.inputs(8, 64))


@pytest.mark.gpu
def test_given_logits_on_a_nearly_full_gpu(ce):
    """Their gradient is as large as they are; in place it needs nothing."""
    if ce.device != "cuda":
        pytest.skip("fills a GPU")
    inputs = ce.inputs(4096, 128256, dtype=torch.bfloat16)
    leaves = inputs.leaves()
    ce.outcome(inputs)
    gc.collect()  # an earlier test's error holds its frames
    used = torch.cuda.memory_allocated()
    with free(GIB // 2), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        ce(leaves)
    gc.collect()  # the error's frames
    assert torch.cuda.memory_allocated() == used
    assert torch.equal(leaves.input, inputs.input)
    ce.check(ce.inputs(8, 64))
    if not ce.reasons(in_place=True):
        given = leaves.input * 1
        with free(64 * MIB):
            loss = ce(replace(leaves, input=given), in_place=True)
        assert torch.equal(loss, ce(inputs))
