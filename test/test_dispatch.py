"""Which backend a call gets and what is said about the others: the decision tables, and the rules around them.

What a table row means is asked of fabricated devices, with packages that are said to be installed or not; nothing here
needs a GPU, nor the packages.
"""

import dataclasses
import inspect
import itertools
import logging
import re

import pytest
import torch
import torch.nn.functional as F

import liger
from liger import DeviceInfo, UnsupportedError, backends, explain
from liger.dispatch import Capability, Implementation, Package, Request, capability, explain_request, registry, table
from liger.functional import GIVEN_OPTIONS, GIVEN_TENSORS
from liger.options import CrossEntropyOptions

CE, FLCE = OPS = ("cross_entropy", "fused_linear_cross_entropy")
SHAPES = {CE: (8192, 128256), FLCE: (8192, 128256, 4096)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DEVICES = {
    "cuda 7.5": DeviceInfo("cuda", (7, 5)),
    "cuda 8.0": DeviceInfo("cuda", (8, 0)),
    "cuda 8.9": DeviceInfo("cuda", (8, 9)),
    "cuda 9.0": DeviceInfo("cuda", (9, 0)),
    "cuda 10.0": DeviceInfo("cuda", (10, 0)),
    "cuda 10.3": DeviceInfo("cuda", (10, 3)),
    "cuda 12.0": DeviceInfo("cuda", (12, 0)),
    "cuda 12.1": DeviceInfo("cuda", (12, 1)),
    "cuda ?": DeviceInfo("cuda"),  # a capability nobody knows fits nothing that asks for one
    "rocm": DeviceInfo("rocm"),
    "xpu": DeviceInfo("xpu"),
    "cpu": DeviceInfo("cpu"),
}
INSTALLED = {"triton": "3.7.1", "nvidia-cutlass-dsl": "4.8.1"}

# The decision tables. "-" is nothing: UnsupportedError.

AUTO = """
            cross_entropy                 fused_linear_cross_entropy
            bf16    fp16    fp32    fp64  bf16    fp16    fp32    fp64
cuda 7.5    torch   torch   torch   torch torch   torch   torch   torch
cuda 8.0    triton  triton  triton  torch triton  triton  triton  torch
cuda 8.9    triton  triton  triton  torch triton  triton  triton  torch
cuda 9.0    cutedsl cutedsl cutedsl torch cutedsl cutedsl cutedsl torch
cuda 10.0   cutedsl cutedsl cutedsl torch cutedsl cutedsl cutedsl torch
cuda 10.3   cutedsl cutedsl cutedsl torch cutedsl cutedsl cutedsl torch
cuda 12.0   triton  triton  triton  torch triton  triton  triton  torch
cuda 12.1   triton  triton  triton  torch triton  triton  triton  torch
cuda ?      torch   torch   torch   torch torch   torch   torch   torch
rocm        triton  triton  triton  torch triton  triton  triton  torch
xpu         torch   torch   torch   torch torch   torch   torch   torch
cpu         torch   torch   torch   torch torch   torch   torch   torch
"""
"""A plain call with every package installed."""

INTERPRETED = {"cpu": "triton  triton  triton  torch triton  triton  triton  torch"}
"""The lines of AUTO that TRITON_INTERPRET=1 changes."""

OPTIONS = [
    # op, options,                        dtype,  {device: backend}
    (CE, {"in_place": True}, "bf16", {"cuda 9.0": "triton", "rocm": "triton", "cuda 7.5": "-", "xpu": "-", "cpu": "-"}),
    (CE, {"in_place": True}, "fp64", {"cuda 9.0": "-", "rocm": "-", "cpu": "-"}),
    (CE, {"loss_dtype": torch.float32}, "bf16", {"cuda 10.0": "triton", "rocm": "triton", "cuda 7.5": "-", "cpu": "-"}),
    (CE, {"loss_dtype": torch.float32, "in_place": True}, "fp16", {"cuda 12.1": "triton", "cuda ?": "-", "cpu": "-"}),
    (CE, {"chunk_size": 16}, "bf16", {"cuda 9.0": "-", "cpu": "-"}),
    (CE, {"accum_dtype": torch.float32}, "bf16", {"cuda 9.0": "-", "cpu": "-"}),
    (CE, {"use_token_scaling": True}, "bf16", {"cuda 9.0": "-", "cpu": "-"}),
    (CE, {"weight": True, "softcap": 30.0, "reduction": "none"}, "bf16", {"cuda 10.3": "cutedsl", "cpu": "torch"}),
    (FLCE, {"in_place": True}, "bf16", {"cuda 9.0": "-", "rocm": "-", "cpu": "-"}),
    (FLCE, {"loss_dtype": torch.float32}, "bf16", {"cuda 9.0": "-", "rocm": "-", "cpu": "-"}),
    (FLCE, {"bias": True, "ce_weight": True, "chunk_size": 16}, "bf16", {"cuda 10.0": "cutedsl", "cpu": "torch"}),
    (FLCE, {"use_token_scaling": True, "reduction": "sum"}, "fp64", {"cuda 9.0": "torch", "cpu": "torch"}),
    (FLCE, {"accum_dtype": torch.float32, "label_smoothing": 0.1}, "bf16", {"cuda 8.9": "triton", "cuda 9.0": "cutedsl"}),
    (FLCE, {"logit_scale": 0.25, "num_items": True}, "bf16", {"cuda 10.0": "cutedsl", "rocm": "triton", "cpu": "torch"}),
    (CE, {"logit_scale": 0.25, "num_items": True}, "fp64", {"cuda 9.0": "torch", "cpu": "torch"}),
]

DSL, DSL_BASE = "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"

PACKAGES = [
    # installed,          what auto chooses on cuda 9.0 for bf16, a backend and what is said against it
    ({}, "torch", "triton", "package triton is not installed (needs 3.3 <= version < 4)"),
    ({"triton": "3.1.0"}, "torch", "triton", "package triton 3.1.0 is outside its window (3.3 <= version < 4)"),
    ({"triton": "4.0.0"}, "torch", "triton", "package triton 4.0.0 is outside its window (3.3 <= version < 4)"),
    ({"triton": "3.3"}, "triton", "triton", None),
    ({"triton": "3.7.1+git0123abc"}, "triton", "triton", None),
    ({"triton": "3.99.0rc1"}, "triton", "triton", None),
    ({}, "torch", "cutedsl", f"package {DSL} is not installed (needs 4.8 <= version < 5)"),
    ({DSL: "4.7.9"}, "torch", "cutedsl", f"package {DSL} 4.7.9 is outside its window (4.8 <= version < 5)"),
    ({DSL: "5.0.0"}, "torch", "cutedsl", f"package {DSL} 5.0.0 is outside its window (4.8 <= version < 5)"),
    ({DSL: "4.8.0"}, "cutedsl", "cutedsl", None),
    ({DSL: "4.8.1", DSL_BASE: "4.8.1"}, "cutedsl", "cutedsl", None),
    (
        {DSL: "4.8.1", DSL_BASE: "4.7.0", "triton": "3.7.1"},
        "triton",
        "cutedsl",
        f"package {DSL} 4.8.1 does not go with {DSL_BASE} 4.7.0: install them in one version",
    ),
]

NONDEFAULT = {
    "ignore_index": -1,
    "reduction": "sum",
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-4,
    "softcap": 30.0,
    "logit_scale": 0.5,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "loss_dtype": torch.float32,
    "in_place": True,
    "accum_dtype": torch.float32,
    "use_token_scaling": True,
    "chunk_size": 16,
    "vocab_parallel": 2,
    "weight": True,
    "bias": True,
    "ce_weight": True,
    "num_items": True,
}


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch):
    """The package's own table, with nothing loaded, remembered or reported, and no environment variable."""
    ask(CE, "cuda 9.0", "bf16")  # loads Triton's kernels, which read the environment only when they are defined
    for name in ("_table", "_loaded", "_memo", "_reported"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    for name in ("_loaded", "_memo", "_reported"):
        getattr(registry, name).clear()
    monkeypatch.delenv("LIGER_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def install(monkeypatch):
    """Pretend that these distributions are installed and no others, and that every backend's module loads."""

    def pretend(versions):
        monkeypatch.setattr(capability, "installed_version", versions.get)
        monkeypatch.setattr(capability, "_has_module", lambda module: True)
        monkeypatch.setattr(Implementation, "kernels", lambda row: None)
        registry._memo.clear()

    pretend(INSTALLED)
    return pretend


def make_request(op=CE, device="cuda 9.0", dtype="bf16", **options):
    return Request(op, DEVICES[device], DTYPES[dtype], SHAPES[op], tuple(options.items()))


def make_row(op=CE, backend="mine", module="no_such_module", *, options=frozenset(), **needs):
    needs.setdefault("devices", None)
    needs.setdefault("dtypes", frozenset(DTYPES.values()))
    return Implementation(op=op, backend=backend, module=module, capability=Capability(options=options, **needs))


def ask(op, device, dtype, backend=None, **options):
    if not set(options) <= {*GIVEN_OPTIONS[op], *GIVEN_TENSORS[op]}:  # no call has those, and no row may serve them either
        return explain_request(make_request(op, device, dtype, **options), backend)
    return explain(op, device=DEVICES[device], dtype=DTYPES[dtype], shape=SHAPES[op], backend=backend, **options)


def resolved(op, device, dtype, backend=None, **options):
    """What a call would get, by the way that calls take; it must be what `explain` says."""
    answer = ask(op, device, dtype, backend, **options)
    if answer.chosen is None:
        with pytest.raises(UnsupportedError) as caught:
            liger.dispatch.resolve(answer.request, backend)
        assert caught.value.reasons == answer.rows
        return "-"
    row = liger.dispatch.resolve(answer.request, backend)
    assert (row.backend, row.op) == (answer.chosen, op)
    return row.backend


def read(line):
    """(device, its eight verdicts) of a line of AUTO."""
    return line[:10].strip(), tuple(line[10:].split())


VERDICTS = dict(map(read, AUTO.strip("\n").splitlines()[2:]))
COLUMNS = tuple(itertools.product(OPS, DTYPES))
CELLS = [(op, device, dtype) for device in DEVICES for op, dtype in COLUMNS]


# What auto chooses.


def test_E8_table_covers_every_device():
    assert tuple(VERDICTS) == tuple(DEVICES)
    assert all(len(verdicts) == len(COLUMNS) for verdicts in VERDICTS.values())


@pytest.mark.parametrize(("op", "device", "dtype"), CELLS)
def test_E8_auto(install, op, device, dtype):
    assert resolved(op, device, dtype) == VERDICTS[device][COLUMNS.index((op, dtype))]


@pytest.mark.parametrize(("op", "device", "dtype"), CELLS)
def test_interpreter_adds_the_cpu_and_changes_nothing_else(install, monkeypatch, op, device, dtype):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    verdicts = INTERPRETED[device].split() if device in INTERPRETED else VERDICTS[device]
    assert resolved(op, device, dtype) == verdicts[COLUMNS.index((op, dtype))]


def test_interpreter_is_read_at_the_call(install, monkeypatch):
    for value, expected in (("0", "torch"), ("1", "triton"), ("0", "torch")):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert resolved(CE, "cpu", "fp32") == expected


@pytest.mark.parametrize(
    ("triton", "numpy", "reason"),
    [
        ("3.7.1", None, "TRITON_INTERPRET=1 needs the package numpy, which is not installed"),
        ("3.6.0", "2.4.0", "the interpreter of triton 3.6.0 fails with numpy 2.4.0: install triton >= 3.7 or numpy < 2.4"),
        ("3.6.0", "2.3.5", None),
        ("3.7.0", "2.4.0", None),
    ],
)
def test_E3_the_interpreter_needs_a_numpy_that_fits(install, monkeypatch, triton, numpy, reason):
    install(INSTALLED | {"triton": triton})
    monkeypatch.setattr(backends, "installed_version", {"numpy": numpy}.get)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    answer = explain(CE, device=DEVICES["cpu"], dtype=torch.float32, shape=(4, 16))
    assert dict(answer.rows)["triton"] == (() if reason is None else (reason,))
    monkeypatch.delenv("TRITON_INTERPRET")
    for device in ("cpu", "cuda 9.0"):  # nobody else is told about NumPy
        assert "numpy" not in str(explain(CE, device=DEVICES[device], dtype=torch.float32, shape=(4, 16)))


@pytest.mark.parametrize("value", ["", "0", "true"])
def test_interpreter_is_asked_for_with_1(install, monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert resolved(CE, "cpu", "fp32") == "torch"


@pytest.mark.parametrize(
    ("op", "options", "dtype", "device", "expected"),
    [(op, options, dtype, *verdict) for op, options, dtype, verdicts in OPTIONS for verdict in verdicts.items()],
)
def test_E7_options_steer_auto(install, op, options, dtype, device, expected):
    assert resolved(op, device, dtype, **options) == expected


@pytest.mark.parametrize(("versions", "expected", "backend", "reason"), PACKAGES)
@pytest.mark.parametrize("op", OPS)
def test_packages(install, op, versions, expected, backend, reason):
    install(versions)
    assert resolved(op, "cuda 9.0", "bf16") == expected
    assert dict(ask(op, "cuda 9.0", "bf16").rows)[backend] == (() if reason is None else (reason,))


def test_only_triton_has_in_place_so_without_it_nothing_fits(install):
    install({})
    assert resolved(CE, "cuda 9.0", "bf16", in_place=True) == "-"


def test_torch_is_the_last_row_and_serves_any_device(install):
    for op in OPS:
        assert [row.backend for row in table(op)].index("torch") == len(table(op)) - 1
        for device, dtype in itertools.product(DEVICES, DTYPES):
            assert resolved(op, device, dtype, backend="torch") == "torch"


# What a row says.


@pytest.mark.parametrize(
    ("device", "reasons"),
    [
        ("cuda 7.5", ("compute capability 7.5 (needs at least 8.0)",)),
        ("cuda ?", ("compute capability unknown (needs at least 8.0)",)),
        ("xpu", ("device xpu (supported: cuda, rocm)",)),
        ("cpu", ("device cpu (supported: cuda, rocm; cpu with TRITON_INTERPRET=1)",)),
        ("rocm", ()),
        ("cuda 9.0", ()),
    ],
)
def test_reasons_name_what_was_given_and_what_is_supported(install, device, reasons):
    assert dict(ask(CE, device, "bf16").rows)["triton"] == reasons


def test_every_reason_is_given_not_the_first(install):
    install({})
    assert dict(ask(CE, "xpu", "fp64", use_token_scaling=True, chunk_size=4).rows)["triton"] == (
        "device xpu (supported: cuda, rocm)",
        "dtype float64 (supported: bfloat16, float16, float32)",
        "use_token_scaling=True is not supported",
        "chunk_size=4 is not supported",
        "package triton is not installed (needs 3.3 <= version < 4)",
    )


@pytest.mark.parametrize("arch", [(7, 5), (8, 0), (9, 0), (9, 1), (10, 0), (10, 1), (10, 3), (12, 0), (12, 1), None])
def test_E8_architectures_are_exact(arch):
    exact = make_row(archs=frozenset({(9, 0), (10, 0), (10, 3)}), devices=frozenset({"cuda"})).capability
    reasons = exact.reasons(Request(CE, DeviceInfo("cuda", arch), torch.float32, (2, 3)))
    shown = "unknown" if arch is None else ".".join(map(str, arch))
    refused = (f"compute capability {shown} (supported: 9.0, 10.0, 10.3)",)
    assert reasons == (() if arch in exact.archs else refused)


def test_rocm_has_no_compute_capability(monkeypatch):
    """Its numbers mean something else: they are not even asked for."""
    monkeypatch.setattr(capability, "_device_infos", {})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked"))
    assert liger.dispatch.device_info(torch.device("cuda:0")) == DeviceInfo("rocm")


def test_the_tensors_device_is_asked_not_the_current_one(monkeypatch):
    monkeypatch.setattr(capability, "_device_infos", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 + device.index, 0))
    for index in (0, 1, 0):
        found = liger.dispatch.device_info(torch.device("cuda", index))
        assert found == DeviceInfo("cuda", (8 + index, 0))


@pytest.mark.parametrize("kind", [3, None, "", "cuda:0", "meta", "gpu", "CUDA", "H100", "cuda 9.0"])
def test_a_device_holds_values(kind):
    message = (
        f"type must be .rocm. or a kind of device that this torch knows and that holds values, got {re.escape(repr(kind))}$"
    )
    with pytest.raises(ValueError, match=message):
        DeviceInfo(kind)


def test_rule_is_one_more_reason():
    def even(request):
        return None if request.shape[1] % 2 == 0 else f"V={request.shape[1]} is odd"

    rule = make_row(rule=even).capability
    assert rule.reasons(Request(CE, DeviceInfo("cpu"), torch.float32, (2, 4))) == ()
    assert rule.reasons(Request(CE, DeviceInfo("cpu"), torch.float32, (2, 5))) == ("V=5 is odd",)


def test_a_rule_that_fails_is_a_reason():
    def broken(request):
        raise KeyError(request.op)

    reasons = make_row(rule=broken).capability.reasons(Request(CE, DeviceInfo("cpu"), torch.float32, (2, 4)))
    assert reasons == ("its rule raised KeyError: 'cross_entropy'",)


def test_nondefault_values_cover_every_option():
    fields = {field.name for field in dataclasses.fields(CrossEntropyOptions)}
    assert set(NONDEFAULT) == fields.union(*GIVEN_TENSORS.values())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", liger.dispatch.backends())
def test_E7_what_a_row_does_not_admit_it_refuses_by_name(install, op, backend):
    device = "cuda 9.0"
    for row in table(op):
        refused = set(NONDEFAULT) - row.capability.options if row.backend == backend else set()
        for name in refused:
            with pytest.raises(UnsupportedError, match=f"{backend}: .*{name}={NONDEFAULT[name]} is not supported"):
                liger.dispatch.resolve(make_request(op, device, **{name: NONDEFAULT[name]}), backend)


def test_E7_a_new_option_is_refused_by_every_row(install):
    for op in OPS:
        with pytest.raises(UnsupportedError) as caught:
            liger.dispatch.resolve(make_request(op, brand_new=7))
        assert [why for _, why in caught.value.reasons] == [("brand_new=7 is not supported",)] * len(table(op))


def test_missing_package_is_found_without_importing_anything(monkeypatch):
    absent = Package("no-such-distribution", "no_such_module.part", (1,), (2,))
    assert absent.reason() == "package no-such-distribution is not installed (needs 1 <= version < 2)"


# Where the choice comes from.


def test_E12_argument_then_environment_then_auto(install, monkeypatch):
    def chosen(backend=None):
        answer = ask(CE, "cuda 9.0", "bf16", backend)
        assert liger.dispatch.resolve(answer.request, backend).backend == answer.chosen
        return answer.chosen, answer.source

    assert chosen() == ("cutedsl", "auto")
    monkeypatch.setenv("LIGER_BACKEND", "torch")  # after import, after a call
    assert chosen() == ("torch", "environment")
    assert chosen("triton") == ("triton", "argument")
    assert chosen("auto") == ("torch", "environment")
    assert chosen("") == ("torch", "environment")
    monkeypatch.setenv("LIGER_BACKEND", "triton")
    assert chosen() == ("triton", "environment")
    for auto in ("", "auto"):
        monkeypatch.setenv("LIGER_BACKEND", auto)
        assert chosen() == ("cutedsl", "auto")
    monkeypatch.delenv("LIGER_BACKEND")
    assert chosen() == ("cutedsl", "auto")


def test_E12_a_real_call_reads_the_environment(monkeypatch):
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    monkeypatch.setenv("LIGER_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"LIGER_BACKEND must be one of .*nonsense"):
        liger.liger_cross_entropy(logits, target)
    liger.liger_cross_entropy(logits, target, backend="torch")
    monkeypatch.setenv("LIGER_BACKEND", "torch")
    liger.liger_cross_entropy(logits, target)


def test_unknown_names_list_the_known_ones(monkeypatch):
    known = "auto, cutedsl, triton, torch"
    request = make_request()
    for asking in (lambda name: liger.dispatch.resolve(request, name), lambda name: ask(CE, "cpu", "fp32", name)):
        with pytest.raises(ValueError, match=rf"^backend must be one of {known}, got 'cuda'$") as caught:
            asking("cuda")
        assert not isinstance(caught.value, UnsupportedError)
        monkeypatch.setenv("LIGER_BACKEND", "Triton")
        with pytest.raises(ValueError, match=rf"^\$LIGER_BACKEND must be one of {known}, got 'Triton'$"):
            asking(None)
        monkeypatch.delenv("LIGER_BACKEND")


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_E7_a_named_backend_never_becomes_another(install, monkeypatch, source):
    name = "triton"
    if source == "environment":
        monkeypatch.setenv("LIGER_BACKEND", name)
    backend = name if source == "argument" else None
    for device, dtype in (("cpu", "fp32"), ("cuda 7.5", "bf16"), ("cuda 9.0", "fp64"), ("xpu", "bf16")):
        assert resolved(CE, device, dtype, backend) == "-"
        with pytest.raises(UnsupportedError) as caught:
            liger.dispatch.resolve(make_request(CE, device, dtype), backend)
        assert [row for row, _ in caught.value.reasons] == [name]
        assert f"(backend from {source})" in str(caught.value)


def test_E7_a_real_call_with_a_named_backend_raises_and_changes_nothing():
    logits = torch.randn(4, 8)
    before = logits.clone()
    with pytest.raises(UnsupportedError, match=r"in_place=True is not supported"):
        liger.liger_cross_entropy(logits, torch.arange(4), in_place=True, backend="torch")
    with pytest.raises(UnsupportedError, match=r"loss_dtype=torch\.float32 is not supported"):
        liger.liger_cross_entropy(logits, torch.arange(4), loss_dtype=torch.float32, backend="torch")
    with pytest.raises(UnsupportedError, match="device cpu"):
        liger.liger_cross_entropy(logits, torch.arange(4), backend="triton")
    assert torch.equal(logits, before)


def test_unsupported_error_has_every_reason_of_every_row(install):
    request = make_request(CE, "cuda 7.5", "fp64", in_place=True, chunk_size=2)
    expected = (
        (
            "cutedsl",
            (
                "compute capability 7.5 (supported: 9.0, 10.0, 10.3)",
                "dtype float64 (supported: bfloat16, float16, float32)",
                "in_place=True is not supported",
                "chunk_size=2 is not supported",
            ),
        ),
        (
            "triton",
            (
                "compute capability 7.5 (needs at least 8.0)",
                "dtype float64 (supported: bfloat16, float16, float32)",
                "chunk_size=2 is not supported",
            ),
        ),
        ("torch", ("in_place=True is not supported", "chunk_size=2 is not supported")),
    )
    with pytest.raises(UnsupportedError) as caught:
        liger.dispatch.resolve(request)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.request == request
    assert error.reasons == expected
    message = str(error)
    assert str(request) in message
    assert "(backend from auto)" in message
    for backend, reasons in expected:
        assert f"  {backend}: {'; '.join(reasons)}" in message


# explain.


@pytest.mark.parametrize("op", OPS)
def test_explain_never_raises_for_nothing_fits(install, op):
    combinations = itertools.product(DEVICES, DTYPES, (None, *liger.dispatch.backends()), (False, True), (False, True))
    for device, dtype, backend, in_place, scaling in combinations:
        answer = ask(op, device, dtype, backend, in_place=in_place, use_token_scaling=scaling)
        fitting = [name for name, reasons in answer.rows if not reasons]
        assert answer.chosen == (fitting[0] if fitting else None)
        assert (answer.plan is not None) == (op == FLCE and bool(fitting))
        assert str(answer)


def test_explain_as_text(install):
    answer = ask(CE, "cpu", "fp32", in_place=True)
    text = str(answer)
    assert text.splitlines()[0] == "cross_entropy on cpu, float32, N=8192, V=128256, in_place=True"
    assert "no: in_place=True is not supported" in text
    assert text.splitlines()[-1].strip() == "-> nothing fits (auto)"
    chosen = str(ask(FLCE, "cuda 9.0", "bf16", "triton"))
    assert "triton  chosen" in chosen
    assert "-> triton (argument)" in chosen
    assert "plan: " in chosen


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("softmax", {}, "op must be one of cross_entropy, fused_linear_cross_entropy, got 'softmax'"),
        (CE, {"shape": (2, 3, 4)}, r"shape must be \(N, V\) of ints .*got \(2, 3, 4\)"),
        (CE, {"shape": (2, 0)}, r"shape must be .* all but N at least 1, got \(2, 0\)"),
        (CE, {"shape": (-1, 3)}, r"shape must be"),
        (CE, {"shape": (2, 3.5)}, r"shape must be"),
        (FLCE, {"shape": (2, 0, 4)}, r"shape must be \(N, V, H\)"),
        (FLCE, {"shape": (2, 3)}, r"shape must be \(N, V, H\)"),
        (CE, {"dtype": torch.int64}, "dtype must be one of torch.float16, .*got torch.int64"),
        (CE, {"softcap": -1.0}, r"softcap must be None or a number in \[1e-30, 1e\+30\], got -1.0"),
        (CE, {"bias": True, "softcap": 3.0}, "options of cross_entropy must be among .*, weight, num_items, got bias$"),
        (FLCE, {"accum_dtype": torch.bfloat16}, "accum_dtype must be None or float32 for a float32 weight, got bf"),
        (CE, {"num_items": True, "reduction": "sum"}, "num_items must be None with reduction='sum'"),
        (FLCE, {"weight": True}, "options of fused_linear_.* must be among .*, bias, ce_weight, num_items, got weight$"),
        (CE, {"accum_dtype": torch.float32}, "options of cross_entropy must be among .*, got accum_dtype$"),
        (CE, {"use_token_scaling": False}, "options of cross_entropy must be among .*, got use_token_scaling$"),
        (CE, {"chunk_size": 4, "softcap": 3.0}, "options of cross_entropy must be among .*, got chunk_size$"),
        (FLCE, {"in_place": True, "loss_dtype": None}, "options of fused_linear_.* must be among .* got in_place, loss_dtype$"),
        (CE, {"smoothing": 0.1}, "among ((?!accum_dtype|use_token_scaling|chunk_size|bias).)*, got smoothing$"),
        (FLCE, {"smoothing": 0.1}, "among ((?!loss_dtype|in_place| weight).)*, got smoothing$"),
    ],
)
def test_explain_refuses_what_is_no_question(op, change, message):
    question = {"device": DeviceInfo("cpu"), "dtype": torch.float32, "shape": SHAPES.get(op)} | change
    with pytest.raises(ValueError, match=message):
        explain(op, **question)


@pytest.mark.parametrize(("op", "call"), [(CE, liger.liger_cross_entropy), (FLCE, liger.liger_fused_linear_cross_entropy)])
def test_explain_takes_the_options_of_a_call(op, call):
    """Whatever the function has a default for, by its name; a tensor as True."""
    defaults = {name: one.default for name, one in inspect.signature(call).parameters.items() if one.default is not one.empty}
    assert set(defaults) == {*GIVEN_OPTIONS[op], *GIVEN_TENSORS[op], "backend"}
    defaults |= dict.fromkeys(GIVEN_TENSORS[op], True)
    assert explain(op, device=DeviceInfo("cpu"), dtype=torch.float32, shape=SHAPES[op], **defaults).chosen == "torch"


def test_every_option_is_one_of_some_call():
    assert set().union(*GIVEN_OPTIONS.values()) == {field.name for field in dataclasses.fields(CrossEntropyOptions)}


def test_explain_with_nothing_to_do():
    assert explain(FLCE, device=DeviceInfo("cpu"), dtype=torch.float32, shape=(0, 8, 4)).chosen == "torch"


# A module that does not load.


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A backend whose module raises, not an ImportError, when it is imported; preferred to all others."""
    counted = 'with open(f"{__file__}.tries", "a") as tries:\n    tries.write("x")\n'
    (tmp_path / "broken_backend_kernels.py").write_text(f"{counted}None.no_such_attribute\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    liger.register(make_row(backend="broken", module="broken_backend_kernels"), first=True)
    return "broken_backend_kernels failed to import: AttributeError: 'NoneType' object has no attribute 'no_such_attribute'"


def test_E3_broken_import_is_a_reason_and_auto_moves_on(broken):
    answer = ask(CE, "cpu", "fp32")
    assert answer.chosen == "torch"
    assert dict(answer.rows)["broken"] == (broken,)
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    torch.testing.assert_close(liger.liger_cross_entropy(logits, target), F.cross_entropy(logits, target))


def test_a_broken_import_is_not_tried_for_every_shape(broken, tmp_path):
    for rows in (2, 3, 4):
        assert dict(liger.explain(CE, device=torch.device("cpu"), dtype=torch.float32, shape=(rows, 8)).rows)["broken"] == (
            broken,
        )
    assert (tmp_path / "broken_backend_kernels.py.tries").read_text("utf-8") == "x"


def test_E3_broken_import_of_a_named_backend_raises_with_the_reason(broken):
    with pytest.raises(UnsupportedError) as caught:
        liger.liger_cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), backend="broken")
    assert caught.value.reasons == (("broken", (broken,)),)


def test_a_row_with_another_reason_is_not_imported():
    liger.register(make_row(devices=frozenset({"cuda"}), module="no_such_module"), first=True)
    assert dict(ask(CE, "cpu", "fp64").rows)["mine"] == ("device cpu (supported: cuda)",)


# What is logged.


def test_torch_for_a_gpu_tensor_is_logged_once_with_the_reasons(install, caplog):
    install({})
    with caplog.at_level(logging.DEBUG, "liger"):
        for n in (1, 2, 3):
            liger.dispatch.resolve(Request(CE, DEVICES["cuda 9.0"], torch.bfloat16, (n, 8)))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("liger", "WARNING")
    assert "cross_entropy on cuda 9.0" in record.getMessage()
    assert "triton: package triton is not installed (needs 3.3 <= version < 4)" in record.getMessage()


@pytest.mark.parametrize("device", ["cuda 7.5", "rocm"])
def test_the_log_is_for_gpus(install, caplog, device):
    install({})
    liger.dispatch.resolve(make_request(CE, device))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("device", "backend", "variable"),
    [("cpu", None, None), ("cuda 9.0", "torch", None), ("cuda 9.0", None, "torch")],
)
def test_what_was_asked_for_is_not_logged(install, caplog, monkeypatch, device, backend, variable):
    install({})
    if variable:
        monkeypatch.setenv("LIGER_BACKEND", variable)
    liger.dispatch.resolve(make_request(CE, device), backend)
    assert not caplog.records


# A backend from outside.

KERNELS = '''
"""Cross entropy without options, by torch's own log_softmax."""

import torch

calls = []


def rows(logits, inputs, results, grad):
    calls.append("rows")
    log_p, index, scale = _parts(logits, inputs)
    results.loss.copy_(-log_p.gather(1, index)[:, 0] * scale)
    if results.lse is not None:
        results.lse[0] = logits.amax(1)
        results.lse[1] = (logits - results.lse[0][:, None]).logsumexp(1)
    if grad is not None:
        grad.copy_(log_p.exp().scatter_add(1, index, -torch.ones_like(log_p[:, :1])) * scale[:, None])


def row_stats(logits, inputs):
    raise NotImplementedError


def row_grad(logits, inputs, lse, grad_loss, grad):
    calls.append("row_grad")
    log_p, index, scale = _parts(logits, inputs)
    scale = scale * grad_loss
    grad.copy_(log_p.exp().scatter_add(1, index, -torch.ones_like(log_p[:, :1])) * scale[:, None])


def scale_(tensor, factor):
    calls.append("scale_")
    tensor.mul_(factor)


def _parts(logits, inputs):
    valid = inputs.target != inputs.options.ignore_index
    divisor = 1 if inputs.divisors is None else inputs.divisors.core
    return logits.log_softmax(1), torch.where(valid, inputs.target, 0)[:, None], valid / divisor
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The rows of a backend that is one file; the file's module tells which kernels ran."""
    (tmp_path / "outside_kernels.py").write_text(KERNELS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    admitted = frozenset({"reduction", "ignore_index"})
    return [make_row(op, "outside", "outside_kernels", options=admitted) for op in OPS]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_backend_of_one_file_runs_both_losses_through_autograd(outside, reduction):
    for row in outside:
        liger.register(row, first=True)
    kernels = outside[0].kernels()
    kernels.calls.clear()
    torch.manual_seed(0)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, -100, 3, 3, 1])
    upstream = torch.randn(6, dtype=torch.float64) if reduction == "none" else torch.tensor(3.0, dtype=torch.float64)
    logits = hidden @ head.t()
    losses = (
        F.cross_entropy(logits, target, reduction=reduction),
        liger.liger_cross_entropy(logits, target, reduction=reduction),
        liger.liger_fused_linear_cross_entropy(hidden, head, target, reduction=reduction),
    )
    wanted, *found = (torch.autograd.grad(loss, (hidden, head), upstream, retain_graph=True) for loss in losses)
    for loss, grads in zip(losses[1:], found, strict=True):
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(grads, wanted)
    assert set(kernels.calls) == ({"rows", "row_grad"} if reduction == "none" else {"rows", "scale_"})


def test_register_last_first_and_removal(outside):
    def preference():
        return [row.backend for row in table(CE)]

    before = preference()
    remove_last = liger.register(outside[0])
    assert preference() == [*before, "outside"]
    assert ask(CE, "cpu", "fp64").chosen == "torch"
    assert ask(CE, "cpu", "fp64", "outside").chosen == "outside"
    remove_first = liger.register(dataclasses.replace(outside[0], backend="front"), first=True)
    assert preference() == ["front", *before, "outside"]
    assert ask(CE, "cpu", "fp64").chosen == "front"
    assert [row.backend for row in table(FLCE)] == before
    remove_first()
    remove_last()
    assert preference() == before
    with pytest.raises(ValueError, match="must be one of auto, cutedsl, triton, torch, got 'outside'"):
        ask(CE, "cpu", "fp64", "outside")


def test_a_backend_without_the_op_is_known_but_has_no_row(outside):
    liger.register(outside[0])
    answer = ask(FLCE, "cpu", "fp64", "outside")
    assert (answer.rows, answer.chosen) == ((("outside", ("it has no fused_linear_cross_entropy",)),), None)
    assert "nothing fits" in str(answer)
    with pytest.raises(UnsupportedError, match="outside: it has no fused_linear_cross_entropy"):
        liger.dispatch.resolve(answer.request, "outside")


# What is remembered.


def test_selection_is_remembered_until_register(outside, monkeypatch):
    request = make_request(CE, "cpu", "fp64")
    assert liger.dispatch.resolve(request).backend == "torch"
    judged = []
    reasons = Implementation.reasons
    monkeypatch.setattr(Implementation, "reasons", lambda row, asked: judged.append(row) or reasons(row, asked))
    assert liger.dispatch.resolve(request).backend == "torch"
    assert not judged
    remove = liger.register(outside[0], first=True)
    assert liger.dispatch.resolve(request).backend == "outside"
    assert judged
    remove()
    assert liger.dispatch.resolve(request).backend == "torch"


def test_what_is_remembered_is_bounded(install):
    for n in range(registry.MEMO_SIZE + 10):
        liger.dispatch.resolve(Request(CE, DEVICES["cpu"], torch.float32, (n, 8)))
    assert len(registry._memo) <= registry.MEMO_SIZE


@pytest.mark.parametrize("shape", [8, None, {8: 1, 100: 2}, (8,), (8, 0), (8.0, 16)], ids=repr)
def test_explain_of_no_shape(shape):
    with pytest.raises(ValueError, match=r"^shape must be \(N, V\) of ints for cross_entropy"):
        explain(CE, device=DeviceInfo("cpu"), dtype=torch.float32, shape=shape)
