"""The CuTe DSL kernels beyond what every backend's tests cover: without a GPU, that every variant compiles for every
architecture, that layouts fit, and that what is launched is what is compiled; on one, what no other backend has.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

import liger
from liger import spec
from liger.dispatch import table
from liger.options import CrossEntropyOptions
from liger.testing import make_inputs

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, Int64

from liger.backends import cutedsl as backend
from liger.backends.cutedsl import launch
from liger.backends.cutedsl.kernels import HANDED, VECTOR_BYTES, WARP, Layout, Variant

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
SHARED_BYTES, MOST_THREADS, REGISTERS = 227 << 10, 1024, 64 << 10  # of a block, on all of them
KERNELS = {"rows with gradient", "rows", "row_stats", "row_grad", "scale_"}
EVERYTHING = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-4,
    "logit_scale": 0.5,
    "softcap": 30.0,
    "return_z_loss": True,
    "return_predicted_tokens": True,
    "use_token_scaling": True,
}
ONE_BY_ONE = [{"label_smoothing": 0.1}, {"class_weight": True}, {"softcap": 30.0}, {"return_predicted_tokens": True}]


class Launch(NamedTuple):
    """One launch that the host code made."""

    key: tuple[Any, ...]
    arguments: tuple[float, ...]
    size: int


@pytest.fixture
def launches(monkeypatch):
    """What the host code launches, on CPU tensors: kernels are replaced by recorders."""
    made: list[Launch] = []

    def ready(device, *key):
        return launch.Ready(lambda arguments, size, stream: made.append(Launch(key, arguments, size)), 66)

    monkeypatch.setattr(backend, "rows_on", ready)
    monkeypatch.setattr(backend, "scale_on", ready)
    monkeypatch.setattr(backend, "_on_device", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(backend, "_stream", lambda tensor: 0)
    return made


def run_every_kernel(dtype, vocab, options, *, rows=2, weighted=False, target_dtype=torch.int64, grad_dtype=None):
    """Call every row kernel once on rows of this kind."""
    logits = torch.zeros(rows, vocab, dtype=dtype)
    target = torch.zeros(rows, dtype=target_dtype)
    weight = torch.ones(vocab) if weighted else None
    divisors = spec.divisors(target, weight, options, torch.float32)
    inputs = spec.RowInputs(target, options, divisors)
    if weight is not None:
        target_weight = spec.target_weight(target, weight)
        inputs = inputs._replace(class_weight=weight, class_weight_sum=weight.sum(), target_weight=target_weight)
    results = spec.RowResults.empty(rows, logits, options, keep_lse=True)
    backend.rows(logits, inputs, results, torch.empty_like(logits))
    backend.rows(logits, inputs, results, None)
    backend.row_stats(logits, inputs)
    backend.row_grad(logits, inputs, torch.zeros(2, rows), torch.ones(rows, dtype=grad_dtype or dtype), logits)
    backend.scale_(logits, torch.ones((), dtype=dtype))


def check_code(key: tuple[Any, ...], arch: str, folder: Path) -> None:
    """Compile what the host code would launch: there is machine code, and no thread keeps anything in local memory."""
    compiled = launch.compiled_rows if isinstance(key[0], Variant) else launch.compiled_scale
    function = compiled.__wrapped__(*key, arch, f"--keep-ptx --keep-cubin --dump-dir={folder}")
    assert len(function.__cubin__) > 1000
    assert ".local" not in function.__ptx__
    triton = pytest.importorskip("triton", reason="its package carries the tool that reads register counts")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(function.__cubin__)
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    assert " STACK:0 " in told, told
    assert " LOCAL:0 " in told, told


# What compiles.


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "vocab", "options", "given"),
    [
        (torch.bfloat16, 128256, {}, {}),
        (torch.float16, 32000, EVERYTHING, {"weighted": True, "target_dtype": torch.int32}),
    ],
    ids=["plain", "everything"],
)
def test_every_kernel_compiles(launches, tmp_path, arch, dtype, vocab, options, given):
    if options and arch == "sm_103a":
        pytest.skip("of one family with sm_100a, which compiles this")
    run_every_kernel(dtype, vocab, CrossEntropyOptions(**options), **given)
    assert len({launched.key for launched in launches}) == len(KERNELS)
    for launched in launches:
        check_code(launched.key, arch, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        (torch.float32, 1000),  # short rows: many pipelines
        (torch.float32, 128256),  # a cluster of 4
        (torch.float16, 262144),
        (torch.float32, 1_000_000),  # more than a cluster of 8 holds: read twice
    ],
)
def test_every_layout_compiles_with_everything(launches, tmp_path, dtype, vocab):
    run_every_kernel(dtype, vocab, CrossEntropyOptions(**EVERYTHING), weighted=True)
    check_code(launches[0].key, "sm_90a", tmp_path)


@pytest.mark.parametrize("options", ONE_BY_ONE, ids=lambda options: ",".join(options) or "plain")
def test_each_option_alone_compiles(launches, tmp_path, options):
    given = dict(options)
    weighted = given.pop("class_weight", False)
    run_every_kernel(torch.bfloat16, 4096, CrossEntropyOptions(**given), weighted=weighted)
    check_code(launches[0].key, "sm_90a", tmp_path)


def test_C6_one_compilation_for_every_number_of_rows_and_classes(launches):
    for rows in (1, 2, 3, 17, 64):
        for vocab in (4096, 8192):
            run_every_kernel(torch.bfloat16, vocab, CrossEntropyOptions(reduction="mean"), rows=rows)
    assert len({launched.key for launched in launches}) == len(KERNELS)


def test_every_value_of_an_option_is_served_by_one_compilation(launches):
    for value in (0.1, 0.2):
        options = CrossEntropyOptions(label_smoothing=value, softcap=value, logit_scale=value, lse_square_scale=value)
        run_every_kernel(torch.bfloat16, 64, options)
    assert len({launched.key for launched in launches}) == len(KERNELS)
    first, second = (made.arguments[-4:] for made in (launches[0], launches[len(KERNELS)]))
    assert (first, second) == ((0.1,) * 4, (0.2,) * 4)


def test_no_rows_launch_nothing(launches):
    run_every_kernel(torch.bfloat16, 64, CrossEntropyOptions(), rows=0)
    assert launches == []


def test_a_grid_has_no_more_clusters_than_run_at_once_or_than_there_are_rows(launches):
    for rows in (1, 65, 66, 67, 8192):
        run_every_kernel(torch.float32, 4, CrossEntropyOptions(), rows=rows)
        sizes = {launched.size for launched in launches if isinstance(launched.key[0], Variant)}
        assert sizes == {min(rows, 66)}
        launches.clear()


# How rows are laid out.

ROW_BYTES = sorted({16, 128, 1 << 20, 4 << 20} | {2 * v for v in (4096, 24576, 32000, 50304, 128256, 151936, 262144)})


@pytest.mark.parametrize("layout", sorted({*map(launch.rows_layout, ROW_BYTES), launch.ONE_PASS, launch.WIDE_PASS}), ids=str)
def test_layouts_fit_the_machine(layout):
    entries = layout.pipelines * 2 * layout.cluster * layout.warps * 8 * 4
    barriers = layout.pipelines * (layout.slots * (8 + 8 + 4) + 2 * 8)
    handed = layout.pipelines * layout.slots * (4 * HANDED + 8)
    assert layout.ring_bytes + entries + barriers + handed <= SHARED_BYTES
    assert layout.threads <= MOST_THREADS
    assert layout.cluster in (1, 2, 4, 8)  # larger ones are not portable
    assert layout.slots >= 2  # one arrives while another is read
    assert layout.piece_vectors * VECTOR_BYTES < 1 << 20  # what a barrier can count
    assert REGISTERS // layout.threads >= 64


def test_one_pass_is_made_by_single_blocks():
    """The gradient from known statistics reads a target's logit that only its own block may overwrite."""
    assert launch.one_pass_layout().cluster == launch.one_pass_layout(wide=True).cluster == 1


def test_rows_of_published_models_stay_on_chip():
    for vocab in (32000, 50304, 128256, 151936, 262208):
        for itemsize in (2, 4):
            assert launch.rows_layout(vocab * itemsize).holds(vocab * itemsize)
    assert not launch.rows_layout(4_000_000).holds(4_000_000)


def test_a_row_is_held_when_each_blocks_slice_fits_its_ring():
    layout = Layout(cluster=2, pipelines=1, warps=1, vectors=1, slots=3)
    most = 2 * 3 * WARP * VECTOR_BYTES
    assert layout.holds(most)
    assert not layout.holds(most + VECTOR_BYTES)


# How they are launched.


class Compiled:
    """Stands for a compiled host function and keeps what it finds at the addresses that it is called with."""

    def __init__(self, types):
        self.types, self.seen = types, []

    def to(self, device):
        return self

    def run_compiled_program(self, addresses):
        kinds = {Int64: ctypes.c_int64, Int32: ctypes.c_int32, Float32: ctypes.c_float}
        self.seen.append([kinds[kind].from_address(at).value for kind, at in zip(self.types, addresses, strict=True)])


def test_a_launcher_packs_every_kind_of_number():
    types = (Int64, Int32, Float32)
    function = Compiled((*types, Int32, Int64))
    launcher = launch.Launcher(function, types)
    launcher((-(2**63), -100, 0.5), 66, 2**47)
    launcher((2**63 - 1, 2**31 - 1, -1.5), 1, 0)
    assert function.seen == [[-(2**63), -100, 0.5, 66, 2**47], [2**63 - 1, 2**31 - 1, -1.5, 1, 0]]


def test_threads_do_not_share_a_launchers_buffer():
    function = Compiled((Int64, Int32, Int64))
    launcher = launch.Launcher(function, (Int64,))
    addresses = []
    launcher.run = addresses.append
    workers = [threading.Thread(target=launcher, args=((i,), 1, 0)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({places[0] for places in addresses}) == 2


def test_the_numbers_of_a_call_arrive_under_their_names(launches):
    options = CrossEntropyOptions(ignore_index=-7, label_smoothing=0.25, lse_square_scale=0.5, softcap=8.0, logit_scale=2.0)
    logits = torch.zeros(6, 64)[::2]
    target = torch.zeros(6, dtype=torch.int64)[::2]
    inputs = spec.RowInputs(target, options)
    results = spec.RowResults.empty(3, logits, options, keep_lse=True)
    grad = torch.empty(3, 64)
    backend.rows(logits, inputs, results, grad)
    fields = launch.ARGUMENT_TYPES._fields
    got = dict(zip(fields, launches[0].arguments, strict=True))
    assert got == dict.fromkeys(fields, 0) | {
        "logits": logits.data_ptr(),
        "logits_stride": 128,
        "grad": grad.data_ptr(),
        "grad_stride": 64,
        "target": target.data_ptr(),
        "target_stride": 2,
        "loss": results.loss.data_ptr(),
        "lse": results.lse.data_ptr(),
        "lse_stride": 3,
        "ignore_index": -7,
        "rows": 3,
        "vocab": 64,
        "total": 64,
        "label_smoothing": 0.25,
        "lse_square_scale": 0.5,
        "logit_scale": 2.0,
        "softcap": 8.0,
    }


# What is refused, by the table and not by a kernel.


def _asked(op, vocab=32000, dtype=torch.bfloat16, **options):
    shape = (8, vocab) if op == "cross_entropy" else (8, vocab, 64)
    answer = liger.explain(op, device=liger.DeviceInfo("cuda", (9, 0)), dtype=dtype, shape=shape, **options)
    return answer.chosen, dict(answer.rows)["cutedsl"]


@pytest.mark.parametrize("option", [{"in_place": True}, {"loss_dtype": torch.float32}], ids=lambda option: next(iter(option)))
def test_what_only_triton_has_goes_there_and_is_an_error_by_name(option):
    ((name, value),) = option.items()
    assert _asked("cross_entropy", **option) == ("triton", (f"{name}={value} is not supported",))
    request = liger.explain(
        "cross_entropy", device=liger.DeviceInfo("cuda", (9, 0)), dtype=torch.bfloat16, shape=(8, 64), **option
    ).request
    with pytest.raises(ValueError, match=f"{name}={value} is not supported"):
        liger.dispatch.resolve(request, "cutedsl")


@pytest.mark.parametrize("op", ["cross_entropy", "fused_linear_cross_entropy"])
@pytest.mark.parametrize(("vocab", "dtype"), [(50257, torch.bfloat16), (32004, torch.float16), (129, torch.float32)])
def test_rows_that_are_no_whole_vectors_long(op, vocab, dtype):
    reason = f"a row of V={vocab} has {vocab * dtype.itemsize} bytes, which is no multiple of 16"
    assert _asked(op, vocab, dtype) == ("triton", (reason,))


@pytest.mark.parametrize(
    ("change", "aligned"),
    [
        (lambda z: z, True),
        (lambda z: z[::3], True),
        (lambda z: z[:, :-8], True),
        (lambda z: z[:1, :40], True),
        (lambda z: z[:, 8:], True),
        (lambda z: z[:1].expand(5, -1), True),
        (lambda z: z[:, 1:57], False),  # begins between two vectors
        (lambda z: z[:, ::2], False),
        (lambda z: z.t().contiguous().t(), False),
        (lambda z: torch.zeros(6, 57, dtype=z.dtype)[:, :56], False),  # the second row does
    ],
)
def test_a_call_says_whether_its_rows_are_aligned(change, aligned, monkeypatch):
    logits = change(torch.zeros(6, 64, dtype=torch.bfloat16))
    asked = []
    monkeypatch.setattr(liger.dispatch, "resolve", lambda request, backend: asked.append(request) or table(request.op)[-1])
    liger.liger_cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
    (request,) = asked
    assert request.aligned == aligned
    reason = next(row for row in table("cross_entropy") if row.backend == "cutedsl").capability.rule(request)
    assert (reason is None) == (aligned and logits.shape[1] % 8 == 0)


def test_the_logits_of_the_fused_loss_are_a_buffer_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(liger.dispatch, "resolve", lambda request, backend: asked.append(request) or table(request.op)[-1])
    x = torch.zeros(4, 9)[:, 1:]
    liger.liger_fused_linear_cross_entropy(x, torch.zeros(64, 8), torch.zeros(4, dtype=torch.int64))
    assert asked[0].aligned


# On a GPU.

needs_gpu = pytest.mark.gpu


def _ran(vocab, dtype, options, *, rows=40, layout=None, monkeypatch=None, module=backend):
    """(results, gradient) of `rows` on random logits, with a target out of range and some ignored."""
    made = make_inputs(rows, vocab, dtype=dtype, device="cuda", class_weight=True)
    target = made.target.clone()
    target[3] = vocab + 7
    weight_sum = made.class_weight.sum()
    divisors = spec.divisors(target, made.class_weight, options, torch.float32)
    target_weight = spec.target_weight(target, made.class_weight)
    inputs = spec.RowInputs(target, options, divisors, made.class_weight, weight_sum, target_weight)
    results = spec.RowResults.empty(rows, made.input, options, keep_lse=True)
    grad = torch.full_like(made.input, 77)
    if layout is not None:
        monkeypatch.setattr(backend, "rows_layout", lambda row_bytes: layout)
    module.rows(made.input, inputs, results, grad)
    return made.input, inputs, results, grad


@needs_gpu
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (8, torch.bfloat16),
        (1000, torch.float32),
        (32000, torch.bfloat16),
        (50304, torch.float16),
        (128256, torch.bfloat16),
        (128256, torch.float32),
        (262144, torch.bfloat16),
        (1_000_000, torch.float32),
    ],
)
def test_agrees_with_triton_within_one_rounding(vocab, dtype, options):
    triton = pytest.importorskip("liger.backends.triton")
    checked = CrossEntropyOptions(**options)
    _, inputs, ours, grad = _ran(vocab, dtype, checked)
    _, _, theirs, other = _ran(vocab, dtype, checked, module=triton)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=2e-5, atol=1e-6, equal_nan=True)
    if ours.predicted is not None:
        assert torch.equal(ours.predicted, theirs.predicted)
    # Two roundings of numbers that are equal but for fp32's errors.
    one = torch.finfo(dtype).eps
    torch.testing.assert_close(
        grad.float(), other.float(), rtol=1.01 * one + 1e-5, atol=torch.finfo(dtype).tiny + 1e-8, equal_nan=True
    )
    assert grad[3].isnan().all()
    assert not grad[inputs.target == -100].any()


@needs_gpu
@pytest.mark.parametrize("first", ["rows", "scale_"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_thread_may_use_the_gpu_for_the_first_time(first, loaded):
    """As backward's does: the kernel, loaded there or elsewhere, is all that it ever calls."""
    logits = torch.randn(8, 1000, device="cuda")
    target = torch.arange(8, device="cuda")
    options = CrossEntropyOptions(reduction="sum")
    results, factor = spec.RowResults.empty(8, logits, options, keep_lse=True), torch.tensor(3.0, device="cuda")
    before, grad = logits.clone(), torch.empty_like(logits)

    def call():
        if first == "scale_":
            backend.scale_(logits, factor)
        else:
            backend.rows(logits, spec.RowInputs(target, options), results, grad)

    for cache in (launch.rows_on, launch.scale_on):
        cache.cache_clear()
    if loaded:
        call()
    logits.copy_(before)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(call).result()
    if first == "scale_":
        assert torch.equal(logits, before * 3)
    else:
        torch.testing.assert_close(results.loss, F.cross_entropy(logits, target, reduction="none"))


@needs_gpu
def test_two_reads_give_what_one_read_gives(monkeypatch):
    options = CrossEntropyOptions(**EVERYTHING)
    _, _, once, grad = _ran(128256, torch.bfloat16, options)
    few_slots = launch.rows_layout(128256 * 2)._replace(slots=3)
    assert not few_slots.holds(128256 * 2)
    _, _, twice, other = _ran(128256, torch.bfloat16, options, layout=few_slots, monkeypatch=monkeypatch)
    for part, same in zip((*once, grad), (*twice, other), strict=True):
        torch.testing.assert_close(part, same, rtol=0, atol=0, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("split", [{"slots": 13}, {"slots": 5}])
def test_a_last_block_with_less_than_the_others(monkeypatch, split):
    """1025 vectors a slice but for the last, which has one piece less than the others."""
    layout = Layout(cluster=4, pipelines=1, warps=16, vectors=2, **split)
    vocab = 8 * (3 * 1025 + 1020)
    options = CrossEntropyOptions(**EVERYTHING)
    _, _, one, grad = _ran(vocab, torch.bfloat16, options)
    _, _, cluster, other = _ran(vocab, torch.bfloat16, options, layout=layout, monkeypatch=monkeypatch)
    torch.testing.assert_close(one.loss, cluster.loss, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(grad.float(), other.float(), rtol=2**-7, atol=1e-8, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("offset", [0.0, 2.0**20])
def test_row_stats_match_the_spec(weighted, softcap, offset):
    vocab = 1000
    logits = torch.randn(50, vocab, device="cuda") * 3 + offset
    target = torch.randint(vocab, (50,), device="cuda")
    target[3] = vocab
    weight = torch.rand(vocab, device="cuda") if weighted else None
    options = CrossEntropyOptions(label_smoothing=0.1, softcap=softcap, return_predicted_tokens=True)
    inputs = spec.RowInputs(target, options, None, weight, None if weight is None else weight.sum())
    got = backend.row_stats(logits, inputs)
    double = inputs._replace(class_weight=None if weight is None else weight.double())
    for ours, theirs in zip(got, spec.row_stats(logits.double(), double), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=vocab * 2**-24, atol=1e-3 * 2**-10, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 8, 4099, 1 << 20])
def test_scaling_happens_in_fp32_and_rounds_once(dtype, size):
    for factor_dtype in (torch.float32, dtype):
        tensor = torch.randn(size, device="cuda").to(dtype)
        factor = torch.tensor(1 / 7, device="cuda", dtype=factor_dtype)
        expected = (tensor.float() * factor.float()).to(dtype)
        backend.scale_(tensor, factor)
        assert torch.equal(tensor, expected)
        backend.scale_(tensor, torch.ones((), device="cuda", dtype=factor_dtype))
        assert torch.equal(tensor, expected)


@needs_gpu
@pytest.mark.parametrize("vocab", [4096, 32000, 64128, 128256])
@pytest.mark.parametrize("with_grad", [True, False], ids=["rows", "loss"])
def test_repeats_change_no_bit(vocab, with_grad):
    """Of many launches: a copy that overtakes a read shows in about one launch of a hundred."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(2112, vocab, generator=generator, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(vocab, (2112,), generator=generator, device="cuda")
    target[2::256] = -100
    options = CrossEntropyOptions()
    inputs = spec.RowInputs(target, options, spec.divisors(target, None, options, torch.float32))
    results = spec.RowResults.empty(2112, logits, options, keep_lse=True)
    grad = torch.empty_like(logits) if with_grad else None
    backend.rows(logits, inputs, results, grad)
    first, losses = None if grad is None else grad.clone(), results.loss.clone()
    changed = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(600):
        backend.rows(logits, inputs, results, grad)
        changed += (results.loss != losses).any()
        if grad is not None:
            changed += (grad != first).any()
    assert changed == 0
