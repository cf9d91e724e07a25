"""The source of the kernels against the mathematics, in Python: every option, layouts of several blocks, pipelines and
reads, with few threads and small rings.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from liger import spec
from liger.options import CrossEntropyOptions
from liger.testing import make_inputs

pytest.importorskip("cutlass")
pytest.importorskip("greenlet")

import interpreter

from liger.backends import cutedsl as backend
from liger.backends.cutedsl.kernels import Layout
from liger.backends.cutedsl.launch import Ready

CLUSTERS = 2
ROWS = 7
EVERYTHING = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-2,
    "logit_scale": 0.5,
    "softcap": 5.0,
    "return_z_loss": True,
    "return_predicted_tokens": True,
    "use_token_scaling": True,
}
ONE_BLOCK = Layout(cluster=1, pipelines=1, warps=1, vectors=1, slots=3)
LAYOUTS = {
    "one block": ONE_BLOCK,
    "two pipelines": Layout(cluster=1, pipelines=2, warps=1, vectors=2, slots=2),
    "two warps": Layout(cluster=1, pipelines=1, warps=2, vectors=1, slots=2),
    "two blocks": Layout(cluster=2, pipelines=1, warps=1, vectors=1, slots=2),
    "two blocks and pipelines": Layout(cluster=2, pipelines=2, warps=1, vectors=1, slots=3),
    "two teams": Layout(cluster=1, pipelines=1, warps=1, vectors=1, slots=3, teams=2),
    "two teams of two warps in two blocks": Layout(cluster=2, pipelines=1, warps=2, vectors=1, slots=2, teams=2),
    "two pipelines of two teams": Layout(cluster=1, pipelines=2, warps=1, vectors=1, slots=3, teams=2),
    "one slot less than a row": Layout(cluster=1, pipelines=1, warps=1, vectors=1, slots=2),
    "two blocks that read twice": Layout(cluster=2, pipelines=1, warps=1, vectors=1, slots=1),
}


@pytest.fixture(scope="module")
def kernels():
    return interpreter.load_kernels()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch, kernels):
    """The host code launches the interpreted kernels."""

    def rows_on(device, variant, layout):
        kernel = kernels.RowKernel(variant, layout)

        def run(arguments, clusters, stream):
            a = kernels.Arguments(*(kind(value) for kind, value in zip(kernels.ARGUMENT_TYPES, arguments, strict=True)))
            grid = clusters * layout.cluster
            interpreter.launch(kernel.kernel, a, grid=grid, threads=kernel.layout.threads, cluster=layout.cluster)

        return Ready(run, CLUSTERS)

    def scale_on(device, dtype, factor_dtype):
        kernel = kernels.ScaleKernel(dtype, factor_dtype)
        kernel.THREADS = 32

        def run(arguments, blocks, stream):
            interpreter.launch(kernel.kernel, kernels.ScaleArguments(*arguments), grid=blocks, threads=kernel.THREADS)

        return Ready(run, 1)

    monkeypatch.setattr(backend, "rows_on", rows_on)
    monkeypatch.setattr(backend, "scale_on", scale_on)
    monkeypatch.setattr(backend, "_on_device", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(backend, "_stream", lambda tensor: 0)
    monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: ONE_BLOCK)
    monkeypatch.setattr(backend, "one_pass_layout", lambda wide: ONE_BLOCK)


def _problem(vocab, dtype, options, *, weighted=False, target_dtype=torch.int64):
    made = make_inputs(ROWS, vocab, dtype=dtype, class_weight=weighted, ignored=2 / 7)
    target = made.target.clone()
    kept = (target >= 0).nonzero()[:, 0]
    target[kept[0]] = vocab + 3  # out of range
    target[kept[1]], target[kept[2]] = 0, vocab - 1  # the ends
    target = target.to(target_dtype)
    made.input[kept[3], vocab // 2] = made.input[kept[3], 5] = made.input.max() + 1  # a tie
    weight = made.class_weight
    weight_sum = weight.sum() if weighted and options.label_smoothing else None
    divisors = spec.divisors(target, weight, options, torch.float32)
    target_weight = None if weight is None else spec.target_weight(target, weight)
    return made.input, spec.RowInputs(target, options, divisors, weight, weight_sum, target_weight)


def _double(inputs):
    def wide(tensor):
        return None if tensor is None else tensor.double()

    divisors = None if inputs.divisors is None else spec.Divisors(*map(wide, inputs.divisors))
    names = ("class_weight", "class_weight_sum", "target_weight")
    return inputs._replace(divisors=divisors, **{name: wide(getattr(inputs, name)) for name in names})


def _close(got, wanted, dtype=torch.float32):
    """Within fp32's errors of a sum of a thousand terms, and one rounding to the dtype."""
    rtol = 1e-5 + (torch.finfo(dtype).eps * 0.502 if dtype != torch.float32 else 0)
    torch.testing.assert_close(got.double(), wanted.double(), rtol=rtol, atol=2e-6, equal_nan=True)


def _check_rows(vocab, dtype, options, *, in_place=False, **given):
    logits, inputs = _problem(vocab, dtype, options, **given)
    double = _double(inputs)
    stats = spec.row_stats(logits.double(), double)
    truth = spec.row_loss(stats, vocab, double)
    wanted = spec.row_grad(logits.double(), double, stats.lse)
    valid = inputs.target != options.ignore_index
    in_range = valid & (inputs.target < vocab)
    for with_grad in (True, False):
        results = spec.RowResults.empty(ROWS, logits, options, keep_lse=True)
        for part in results:
            if part is not None:
                part.fill_(77)
        held = logits.clone()
        grad = (held if in_place else torch.full_like(logits, math.nan)) if with_grad else None
        backend.rows(held, inputs, results, grad)
        _close(results.loss, truth.loss)
        _close(results.lse, stats.lse * valid)
        if results.z_loss is not None:
            _close(results.z_loss[in_range], truth.z_loss[in_range])
            assert not results.z_loss[~valid].any()
        if results.predicted is not None:
            assert torch.equal(results.predicted, truth.predicted)
        if grad is not None:
            _close(grad, wanted, dtype)
            assert not grad[~valid].any()
        if not (with_grad and in_place):
            assert torch.equal(held, logits)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout(monkeypatch, layout):
    monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: layout)
    _check_rows(600, torch.bfloat16, CrossEntropyOptions(**EVERYTHING), weighted=True)


def test_more_warps_than_a_warp_has_lanes(monkeypatch):
    """Then a lane combines the statistics of two warps, whose maxima differ; those of the first and the 33rd tie."""
    layout = Layout(cluster=2, pipelines=1, warps=17, vectors=1, slots=1)
    monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: layout)
    per_warp = 32 * 8
    logits = torch.randn(1, 2 * layout.warps * per_warp).bfloat16()
    logits[0, [5, 32 * per_warp]] = 9.0
    logits[0, per_warp] = 8.0  # and the second's is larger than that of the 34th
    options = CrossEntropyOptions(reduction="sum", label_smoothing=0.1, return_predicted_tokens=True)
    inputs = spec.RowInputs(torch.tensor([7]), options)
    results = spec.RowResults.empty(1, logits, options, keep_lse=True)
    grad = torch.empty_like(logits)
    backend.rows(logits, inputs, results, grad)
    stats = spec.row_stats(logits.double(), inputs)
    _close(results.lse, stats.lse)
    _close(results.loss, spec.row_loss(stats, logits.shape[1], inputs).loss)
    _close(grad, spec.row_grad(logits.double(), inputs, stats.lse), torch.bfloat16)
    assert results.predicted.tolist() == [5]


def _rows_of_every_size(vocab):
    """Far from 0, masked with the lowest numbers, and astride of the size from which on the factor is not log2 e."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(14, vocab, generator=generator)
    lowest = torch.finfo(torch.float32).min
    rows[0] += 30001.0
    rows[1] -= 30001.0
    rows[2] = lowest
    rows[3, ::2] = lowest
    rows[4] = lowest / 2
    rows[4, 1::2] = lowest
    rows[5, ::2], rows[5, 1::2] = -math.inf, 1.0
    for row, size in enumerate((2.0**30, -(2.0**30), 2.0**29.9, -(2.0**29.9), 1e37, -1e37), 6):
        rows[row] = size * torch.tensor([1.0, 1.02]).repeat(vocab // 2)
    rows[12, : vocab // 2], rows[12, vocab // 2 :] = -1.05 * 2.0**30, -0.95 * 2.0**30  # no thread sees both
    rows[13] = -rows[12]
    return rows


@pytest.mark.parametrize("layout", ["two warps", "two teams of two warps in two blocks"])
def test_numbers_of_every_size(monkeypatch, layout):
    monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: LAYOUTS[layout])
    logits = _rows_of_every_size(600)
    inputs = spec.RowInputs(torch.arange(1, 15), CrossEntropyOptions(reduction="sum"))
    results = spec.RowResults.empty(14, logits, inputs.options, keep_lse=True)
    grad = torch.empty_like(logits)
    backend.rows(logits, inputs, results, grad)
    stats = spec.row_stats(logits.double(), inputs)
    _close(results.lse, stats.lse)
    _close(grad, spec.row_grad(logits.double(), inputs, stats.lse))
    truth = spec.row_loss(stats, 600, inputs).loss.float()
    torch.testing.assert_close(results.loss, truth, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [None, "reduction", *EVERYTHING])
def test_each_option(name):
    chosen = {} if name is None else {name: (EVERYTHING | {"reduction": "sum"})[name]}
    _check_rows(264, torch.float32, CrossEntropyOptions(**chosen), weighted=name == "label_smoothing")


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float16, 8), (torch.bfloat16, 256), (torch.float32, 132)])
def test_each_dtype_in_place(dtype, vocab):
    _check_rows(vocab, dtype, CrossEntropyOptions(label_smoothing=0.2), in_place=True, weighted=True, target_dtype=torch.int32)


def test_a_last_block_with_less_than_the_others(monkeypatch):
    """129 vectors in slices of 33, the last of 30: two pieces, of which the last block has less than one."""
    layout = Layout(cluster=4, pipelines=1, warps=1, vectors=1, slots=2)
    monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: layout)
    _check_rows(8 * 129, torch.bfloat16, CrossEntropyOptions(**EVERYTHING))


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(("layout", "in_place"), [("one block", False), ("two pipelines", True), ("two warps", True)])
def test_gradient_from_known_statistics(monkeypatch, options, layout, in_place):
    monkeypatch.setattr(backend, "one_pass_layout", lambda wide: LAYOUTS[layout])
    logits, inputs = _problem(600, torch.bfloat16, CrossEntropyOptions(**options), weighted=True)
    double = _double(inputs)
    lse = spec.row_stats(logits.double(), double).lse
    upstream = torch.randn(2 * ROWS).bfloat16()[::2]
    wanted = spec.row_grad(logits.double(), double, lse, upstream.double())
    grad = logits.clone() if in_place else torch.full_like(logits, math.nan)
    backend.row_grad(grad if in_place else logits, inputs, lse.float(), upstream, grad)
    _close(grad, wanted, torch.bfloat16)


@pytest.mark.parametrize("weighted", [False, True])
def test_statistics(monkeypatch, weighted):
    monkeypatch.setattr(backend, "one_pass_layout", lambda wide: LAYOUTS["two pipelines"])
    logits, inputs = _problem(600, torch.float32, CrossEntropyOptions(**EVERYTHING), weighted=weighted)
    wanted = spec.row_stats(logits.double(), _double(inputs))
    for got, truth in zip(backend.row_stats(logits, inputs), wanted, strict=True):
        torch.testing.assert_close(got.double(), truth.double(), rtol=2e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("part", [slice(0, 128), slice(128, 600)], ids=["first", "last"])
def test_a_part_of_the_vocabulary(part):
    """Statistics of a range of classes, and its gradient from those of all; targets are classes of the whole."""
    logits, inputs = _problem(600, torch.float32, CrossEntropyOptions(label_smoothing=0.1, reduction="sum"), weighted=True)
    whole = _double(inputs)
    lse = spec.row_stats(logits.double(), whole).lse
    own = {"class_weight": inputs.class_weight[part].contiguous(), "start": part.start, "vocab": 600}
    there, here = inputs._replace(**own), logits[:, part]
    for got, truth in zip(backend.row_stats(here, there), spec.row_stats(here.double(), _double(there)), strict=True):
        if got is not None:
            torch.testing.assert_close(got.double(), truth.double(), rtol=2e-5, atol=1e-5, equal_nan=True)
    grad = torch.empty(ROWS, part.stop - part.start)
    backend.row_grad(here, there, lse.float(), torch.ones(ROWS), grad)
    _close(grad, spec.row_grad(logits.double(), whole, lse)[:, part])


@pytest.mark.parametrize("row", ["nan", "-inf", "inf", "a masked class"])
def test_rows_that_are_no_numbers(row):
    """As on every backend: a NaN or an infinity makes its own row NaN, and no other; -inf at a class is a masked class."""
    logits = torch.randn(3, 264)
    if row == "-inf":
        logits[1] = -math.inf
    elif row == "a masked class":
        logits[1, 7] = -math.inf
    else:
        logits[1, 7] = float(row)
    options = CrossEntropyOptions(reduction="sum", return_predicted_tokens=True)
    inputs = spec.RowInputs(torch.tensor([1, 2, 3]), options)
    results = spec.RowResults.empty(3, logits, options, keep_lse=False)
    grad = torch.empty_like(logits)
    backend.rows(logits, inputs, results, grad)
    stats = spec.row_stats(logits.double(), inputs)
    wanted = spec.row_grad(logits.double(), inputs, stats.lse)
    kept = [0, 1, 2] if row == "a masked class" else [0, 2]
    _close(grad[kept], wanted[kept])
    _close(results.loss[kept], spec.row_loss(stats, 264, inputs).loss[kept])
    if row != "a masked class":
        assert not results.loss[1].isfinite()
        assert not grad[1].isfinite().all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1), (torch.bfloat16, 300), (torch.float32, 7), (torch.float32, 8)])
def test_scaling(dtype, size):
    for factor_dtype in (torch.float32, dtype):
        tensor = torch.randn(size).to(dtype)
        factor = torch.tensor(1 / 7, dtype=factor_dtype)
        expected = (tensor.float() * factor.float()).to(dtype)
        backend.scale_(tensor, factor)
        assert torch.equal(tensor, expected)
        backend.scale_(tensor, torch.ones((), dtype=factor_dtype))
        assert torch.equal(tensor, expected)
