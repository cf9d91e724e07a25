"""The loop of fused linear cross entropy: its chunks, the rows it leaves out, and what it computes and holds."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from projecting import projected_ahead
from watch import Operators

from liger import explain
from liger.backends import ahead, linear
from liger.backends import torch as torch_rows
from liger.backends.plan import CPU_SLAB_BYTES, FEW_CHUNKS, GEMM_ROW_TILE, GPU_CHUNK_ROWS, PEAK_SHARE
from liger.testing import assert_matches

F32, BF16 = torch.float32, torch.bfloat16
V, H = 56, 16  # no other dimension here is equal to either
FEW = ["mean", "none"]


def with_ignored(flce, rows, ignored, **kwargs):
    """Inputs of which the first `ignored` rows are ignored."""
    inputs = flce.inputs(rows, V, H, ignored=0.0, **kwargs)
    inputs.target[:ignored] = -100
    return inputs


def products_of(flce, inputs, **options):
    """(seen in forward, seen in backward)."""
    leaves = inputs.leaves()
    with Operators() as forward:
        value = flce(leaves, **options).sum()
    with Operators() as backward:
        value.backward()
    return forward, backward


@pytest.mark.parametrize(("ignored", "products"), [(0, 3), (1, 3), (8, 2), (24, 1), (40, 0)])
def test_ignored_rows_leave_out_whole_products(flce, ignored, products):
    """ceil(labelled / chunk_size) logits products; the figures for 40 rows of which 8 and more are ignored."""
    inputs = with_ignored(flce, 40, ignored)
    forward, backward = products_of(flce, inputs, chunk_size=16)
    for found in (forward.logits_products, forward.input_products, forward.weight_products):
        assert len(found(V, H)) == products
    assert not backward.products
    assert sum(product.rows for product in forward.logits_products(V, H)) == (40 - ignored if ignored != 1 else 40)


def only_the_loop(flce):
    if flce.interpreted:
        pytest.skip("the loop is the same for all backends, and dozens of rows take the interpreter long")


@pytest.mark.parametrize(("ignored", "products"), [(0, 3), (8, 2), (24, 1), (40, 0)])
def test_recomputation_leaves_out_the_same(flce, ignored, products):
    only_the_loop(flce)
    forward, backward = products_of(flce, with_ignored(flce, 40, ignored), chunk_size=16, reduction="none")
    assert len(forward.logits_products(V, H)) == len(backward.logits_products(V, H)) == products
    assert not forward.input_products(V, H)
    assert len(backward.input_products(V, H)) == len(backward.weight_products(V, H)) == products


def test_M9_products_follow_the_labelled_rows(flce):
    """With 90 % ignored the products see a tenth of the rows, in a tenth of the chunks."""
    forward, _ = products_of(flce, with_ignored(flce, 50, 45), chunk_size=5)
    assert [product.rows for product in forward.logits_products(V, H)] == [5]


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize("reduction", FEW)
def test_where_skipping_does_not_pay_nothing_is_gathered(flce, monkeypatch, reduction, ignored):
    """Bit for bit the path that knows of no skipping; nothing is indexed."""
    only_the_loop(flce)
    inputs = with_ignored(flce, 40, ignored)
    forward, backward = products_of(flce, inputs, chunk_size=16, reduction=reduction)
    gathers = {"index_select", "index_copy_", "index_copy", "index"}
    assert not gathers & {*forward.names, *backward.names}
    got = flce.outcome(inputs, chunk_size=16, reduction=reduction)
    monkeypatch.setattr(linear, "labelled_rows", lambda call, plan: None)
    plain = flce.outcome(inputs, chunk_size=16, reduction=reduction)
    for value, expected in zip(_values(got), _values(plain), strict=True):
        assert torch.equal(value, expected)


def _values(outcome):
    return [t for t in (*outcome.output, outcome.input, outcome.weight, outcome.bias) if t is not None]


def test_the_last_label_of_each_sequence_is_not_worth_skipping(flce):
    """Next-token targets: one ignored label at the end of each sequence of 40."""
    only_the_loop(flce)
    inputs = with_ignored(flce, 80, 0)
    inputs.target[39::40] = -100
    forward, _ = products_of(flce, inputs, chunk_size=80)
    assert [product.rows for product in forward.logits_products(V, H)] == [80]
    assert "index_select" not in forward.names


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [2, 6, 10])
def test_skipped_rows_come_back_as_nothing(flce, ignored, reduction):
    inputs = with_ignored(flce, 10, ignored, bias=True, class_weight=True)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).to(flce.device)
    extras = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    got = flce.check(
        inputs.rows(order), chunk_size=4, reduction=reduction, lse_square_scale=0.01, label_smoothing=0.1, **extras
    )
    if reduction == "none":
        left_out = inputs.target[order] == -100
        assert not got.output.loss[left_out].any()
        assert not got.output.z_loss[left_out].any()
        assert not got.output.token_accuracy[left_out].any()
        assert (got.output.predicted_tokens[left_out] == -1).all()


@pytest.mark.parametrize("reduction", FEW)
def test_chunk_size_changes_nothing(flce, reduction):
    inputs = flce.inputs(7, V, H, dtype=flce.finest, bias=True)
    reference, yardstick = flce.expected(inputs, reduction=reduction)
    for size in flce.few([3, 7, 1, 2, 6, 1000], count=2):
        assert_matches(flce.outcome(inputs, chunk_size=size, reduction=reduction), reference, yardstick)


AHEAD = 6


LABELLED = {  # of 40 rows in chunks of 16: which have a label, and how many rows are projected altogether
    "all": (range(40), 40),
    "all but a late one": ([*range(30), *range(31, 40)], 40),
    "all but an early one": ([0, 1, *range(3, 40)], 40 + AHEAD),  # a row among the first ones is none of the first labelled
    "the second half": (range(20, 40), 20),
    "fewer than ahead": ([7, 20, 33], 3),
    "none": ([], 0),
}


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("input",)], ids=["all", "frozen head", "frozen input"])
@pytest.mark.parametrize("reduction", FEW)
@pytest.mark.parametrize("labelled", LABELLED)
def test_rows_projected_ahead_are_not_projected_again(flce, labelled, reduction, frozen):
    """While the host waits for the count the first labelled rows are projected; the rest of their chunk follows."""
    only_the_loop(flce)
    (rows, projected), options = LABELLED[labelled], {"chunk_size": 16, "reduction": reduction}
    inputs = flce.inputs(40, V, H, ignored=0.0, bias=True)
    ignored = [row for row in range(40) if row not in rows]
    inputs.target[ignored] = -100
    if len(rows) <= 20:
        inputs.input[ignored] = torch.nan
    with projected_ahead(AHEAD):
        forward, _ = products_of(flce, inputs, **options)
        assert sum(product.rows for product in forward.logits_products(V, H)) == projected
        got = flce.outcome(inputs, frozen=frozen, **options)
    inputs.input[ignored] = 0
    assert_matches(got, *flce.expected(inputs, reduction=reduction))


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["all", "frozen head"])
@pytest.mark.parametrize("labelled", [0, 1, 100, 3000, 4095, 4096])
def test_rows_ahead_of_a_large_call(flce, monkeypatch, labelled, frozen):
    """As many as the package chooses: the results are those of a call without."""
    if flce.device != "cuda":
        pytest.skip("too large for a CPU")
    inputs = flce.inputs(4096, 128256, 2048, dtype=BF16, ignored=0.0)
    inputs.target[labelled:] = -100
    chosen, seen = linear.rows_ahead, []
    for choose in (chosen, lambda *_: 0):
        monkeypatch.setattr(linear, "rows_ahead", lambda *call, choose=choose: seen.append(choose(*call)) or seen[-1])
        got = flce.outcome(inputs, frozen=frozen)
        if choose is chosen:
            first = got
    assert seen == [0 if flce.row.backend == "torch" else 640, 0]
    for value, expected in zip(_values(first), _values(got), strict=True):
        torch.testing.assert_close(value, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


def test_rows_ahead_are_few_and_only_where_the_kernel_runs(monkeypatch):
    """Half a chunk at most, so that small calls and small chunks go without."""
    weight = torch.empty(128256, 4096, device="meta", dtype=BF16)
    monkeypatch.setattr(ahead, "fits", lambda weight: True)
    beside = SimpleNamespace(ahead_by_triton=True)
    for runs, rows, kernels, expected in (
        (True, 4096, beside, 384),
        (True, 512, beside, 0),
        (True, 1024, beside, 384),
        (False, 4096, beside, 0),
        (True, 4096, torch_rows, 0),
        (True, 4096, None, 0),
    ):
        monkeypatch.setattr(ahead, "runs_on", lambda device, runs=runs: runs)
        assert linear.rows_ahead(weight, SimpleNamespace(chunk_rows=rows), kernels) == expected


@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        (torch.empty(64, 32, dtype=BF16), True),
        (torch.empty(64, 32, dtype=torch.float16), True),
        (torch.empty(64, 32), False),
        (torch.empty(63, 32, dtype=BF16), False),
        (torch.empty(64, 31, dtype=BF16), False),
        (torch.empty(32, 64, dtype=BF16).t(), False),
        (torch.empty(64, 64, dtype=BF16)[:, ::2], False),
        (torch.empty(64, 36, dtype=BF16)[:, :32], False),
        (torch.empty(64, 40, dtype=BF16)[:, :32], True),
        (torch.empty(64, 40, dtype=BF16)[:, 1:33], False),
    ],
)
def test_the_kernel_takes_heads_whose_rows_are_aligned(weight, fits):
    assert ahead.fits(weight) == fits


@pytest.mark.parametrize("reduction", FEW)
def test_M3_one_slab_of_logits_at_a_time(flce, reduction):
    """Chunks share one slab, overwritten by its gradient: nothing else of its size is allocated outside the kernels."""
    only_the_loop(flce)
    leaves = with_ignored(flce, 40, 0).leaves()
    allocated = []
    kernels = flce.row.kernels()
    with Operators() as seen, pytest.MonkeyPatch.context() as patch:
        for name in ("rows", "row_grad"):
            inside = getattr(kernels, name)

            def quiet(*args, inside=inside):
                before = len(seen.allocated)
                inside(*args)
                del seen.allocated[before:]

            patch.setattr(kernels, name, quiet)
        flce(leaves, chunk_size=16, reduction=reduction).sum().backward()
        allocated = [shape for shape in seen.allocated if len(shape) == 2 and shape[1] == V]
    slabs = 1 if reduction == "mean" else 2  # forward's, and backward's after it
    assert len(allocated) == slabs
    assert max(shape[0] for shape in allocated) <= 16


@pytest.mark.parametrize("reduction", FEW)
def test_M1_the_heads_gradient_is_the_only_buffer_of_its_size(flce, reduction):
    only_the_loop(flce)
    leaves = with_ignored(flce, 40, 8).leaves()
    with Operators() as seen:
        flce(leaves, chunk_size=16, reduction=reduction).sum().backward()
    assert seen.allocated.count((V, H)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", FEW)
def test_products_that_share_the_gpu_change_no_bit(flce, monkeypatch, reduction):
    """Chunks large enough for both products to be under way at once, several of them on one slab."""
    if flce.device == "cpu":
        pytest.skip("one stream")
    rows, vocab, hidden = 1024, 8192, 1024
    inputs = flce.inputs(rows, vocab, hidden, dtype=BF16, ignored=0.0)
    outcomes = []
    for least in (float("inf"), 0.0, 0.0, 0.0):
        monkeypatch.setattr(linear, "OVERLAPPED_FLOP", least)
        outcomes.append(flce.outcome(inputs, chunk_size=256, reduction=reduction))
    alone, *others = map(_values, outcomes)
    for values in others:
        assert all(torch.equal(value, expected) for value, expected in zip(values, alone, strict=True))


def test_ignored_rows_cost_an_index_and_one_chunk(flce):
    """The extra memory of skipping: the row index and one buffer of chunk x H."""
    only_the_loop(flce)
    leaves = with_ignored(flce, 40, 24).leaves("weight")
    with Operators() as seen:
        flce(leaves, chunk_size=8).backward()
    of_hidden = [shape for shape in seen.allocated if len(shape) == 2 and shape[1] == H]
    assert sorted(of_hidden) == [(8, H), (40, H)]  # the gathered chunk, x's gradient


def plan(**options):
    given = {"device": torch.device("cpu"), "dtype": F32, "shape": (40, V, H), "backend": "torch"} | options
    return explain("fused_linear_cross_entropy", **given).plan


@pytest.mark.parametrize("size", [1, 7, 16, 39, 40, 41, 1000])
def test_the_plan_keeps_the_callers_chunk_size(size):
    p = plan(chunk_size=size)
    assert p.chunk_rows == min(size, 40)
    assert p.chunks == -(-40 // p.chunk_rows)
    assert p.slab_bytes == p.chunk_rows * V * 4


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("size", [1, 3, 128, 129, 1000])
def test_spans_cover_every_row_once_in_few_chunks(rows, size):
    p = plan(shape=(max(rows, 1), V, H), chunk_size=size)
    spans = list(p.spans(rows))
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(rows))
    assert len(spans) == -(-rows // p.chunk_rows)
    assert all(span.stop - span.start <= p.chunk_rows for span in spans)


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_no_span_is_much_shorter_than_the_others(rows, size):
    """The products' speed is that of their rows: the shortest of several has half a chunk, but for rounding to tiles."""
    p = plan(shape=(rows, V, H), chunk_size=size)
    lengths = [span.stop - span.start for span in p.spans(rows)]
    assert len(lengths) == 1 or min(lengths) >= p.chunk_rows // 2 - GEMM_ROW_TILE


@pytest.mark.parametrize(
    ("shape", "chunk_rows"),
    [
        ((8192, 128256, 2048), 4096),
        ((8192, 262208, 2560), 4096),
        ((8192, 128256, 4096), 3072),
        ((65536, 128256, 4096), 4096),
        ((1024, 128256, 4096), 1024),
        ((8192, 1 << 20, 4096), 1280),
    ],
)
def test_the_plan_on_a_gpu_keeps_its_share_of_memory(shape, chunk_rows):
    from liger import DeviceInfo

    def on_a_gpu(**options):
        return plan(device=DeviceInfo("cuda", (9, 0)), dtype=BF16, shape=shape, backend=None, **options)

    chosen, whole = on_a_gpu(accum_dtype=BF16), on_a_gpu(accum_dtype=BF16, chunk_size=shape[0])
    assert chosen.chunk_rows == chunk_rows
    assert chosen.chunk_rows <= min(GPU_CHUNK_ROWS) or chosen.peak_bytes <= PEAK_SHARE * whole.peak_bytes


def test_the_plan_bounds_the_slab():
    for n in (1, 1000, 10**5, 10**7):
        p = plan(shape=(n, 128256, 4096))
        assert p.chunk_rows <= max(1, n)
        assert p.slab_bytes <= max(CPU_SLAB_BYTES, 128256 * 4)


def test_many_bf16_chunks_are_summed_in_fp32():
    """N7's contract, in the plan: the weight's dtype only while it costs about one rounding."""
    from liger import DeviceInfo

    gpu = {"device": DeviceInfo("cuda", (9, 0)), "dtype": BF16, "shape": (4096, V, H), "backend": None}
    assert plan(**gpu, chunk_size=4096 // FEW_CHUNKS).accum_dtype == BF16
    assert plan(**gpu, chunk_size=4096 // FEW_CHUNKS - 1).accum_dtype == F32
    assert plan(**gpu, chunk_size=1, accum_dtype=BF16).accum_dtype == BF16
    assert plan(**gpu, chunk_size=4096, accum_dtype=F32).accum_dtype == F32


def test_M10_no_gradients_no_gradient_buffers(flce):
    """Under no_grad nothing of the size of a gradient is allocated."""
    only_the_loop(flce)
    inputs = with_ignored(flce, 40, 0, bias=True)
    with Operators() as seen, torch.no_grad():
        flce(inputs.leaves(), chunk_size=16)
    assert not [shape for shape in seen.allocated if shape in ((40, H), (V, H), (V,))]
    assert len(seen.products) == 3
