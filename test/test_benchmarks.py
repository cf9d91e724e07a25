"""The benchmarks run: on a CPU, with tiny shapes, with peers that are missing, broken or stood in for by torch."""

import csv
import dataclasses
import importlib
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from liger.backends import linear as loop
from liger.backends.plan import GPU_CHUNK_ROWS
from liger.testing import CASES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmark/ is not installed

common = importlib.import_module("benchmark.common")
providers = importlib.import_module("benchmark.providers")
cross_entropy = importlib.import_module("benchmark.benchmark_cross_entropy")
linear = importlib.import_module("benchmark.benchmark_fused_linear_cross_entropy")

PEERS = ("liger_kernel", "cut_cross_entropy", "quack")
QUICK = ("--rep-ms", "0", "--least", "1")
SMALL_CE = ("--bt", "3", "--vocab", "8", "--dtype", "float32", *QUICK)
SMALL_FLCE = ("--bt", "8", "--shapes", "4x8", "--dtype", "float32", "--backend", "torch", "--device", "cpu", *QUICK)


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    """As on a machine without them: importing one fails."""
    for name in PEERS:
        monkeypatch.setitem(sys.modules, name, None)


def run(module, tmp_path, *arguments):
    """The rows that a benchmark wrote."""
    path = tmp_path / "out.csv"
    module.main([*arguments, "--out", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert tuple(row) == common.COLUMNS
        assert row["device"] == ("cpu" if "cpu" in arguments else common.default_device().type)
        assert float(row["y_value_20"]) <= float(row["y_value_50"]) <= float(row["y_value_80"])
    return rows


def config(row):
    return json.loads(row["extra_benchmark_config_str"])


def test_cross_entropy(tmp_path, capsys):
    names = ("liger_triton", "liger_triton_in_place", "torch", "liger_kernel", "quack")
    chosen = ("--providers", *names, "--reduction", "none_mean", "none_strided", "mean")
    rows = run(cross_entropy, tmp_path, *SMALL_CE, *chosen)
    speed = {
        (row["kernel_provider"], row["kernel_operation_mode"], config(row)["usage"])
        for row in rows
        if row["metric_name"] == "speed"
    }
    for name in (*names[:3], "copy"):
        for mode in ("full", "backward"):
            assert {(name, mode, usage) for usage in ("none_mean", "none_strided", "mean")} <= speed
        assert (name, "no-grad-forward", "mean") in speed
        assert (name, "forward", "none_strided") not in speed, "a forward does not depend on the upstream gradient"
    assert not {name for name, _, _ in speed} & {"liger_kernel", "quack"}
    ratios = [row for row in rows if row["metric_name"] == "ratio_to_floor"]
    assert {row["kernel_provider"] for row in ratios} == set(names[:3])
    printed = capsys.readouterr().out
    assert "| none+mean |" in printed
    assert "not measured: quack" in printed
    assert "not measured: liger_kernel (BT=3 V=8 float32): ModuleNotFoundError" in printed


def test_errors_and_bits(tmp_path, capsys):
    arguments = ("--providers", "torch", "--mode", "memory", "--reduction", "mean", "--errors", "--bitwise")
    rows = run(cross_entropy, tmp_path, *SMALL_CE, *arguments)
    errors = {row["kernel_provider"]: float(row["y_value_50"]) for row in rows if row["metric_name"] == "loss_error"}
    assert set(errors) == {"torch", "liger_triton_fp32_loss"}
    assert max(errors.values()) < 1e-4
    printed = capsys.readouterr().out
    assert printed.count("| equal | yes |") == len(cross_entropy.BITWISE_USAGES) * len(cross_entropy.BITWISE_DTYPES)
    assert "DIFFERENT" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reduction", "none_sum", "mean", "sum"), "--in-place needs none_* reductions: the gradient of mean, sum"),
        (("--reduction", "none_sum", "--providers", "torch"), "providers that may overwrite the logits, not torch"),
    ],
)
def test_in_place_is_one_clear_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        cross_entropy.main([*SMALL_CE, "--in-place", *arguments])
    assert capsys.readouterr().err.count("error:") == 1
    top = cross_entropy.parser()
    with pytest.raises(SystemExit):
        cross_entropy.chosen_providers(top.parse_args(["--in-place", *arguments]), top)
    assert message in capsys.readouterr().err


def test_in_place_takes_those_that_overwrite():
    top = cross_entropy.parser()
    chosen = cross_entropy.chosen_providers(top.parse_args(["--in-place", "--reduction", "none_sum"]), top)
    assert [provider.name for provider in chosen] == ["liger_triton_in_place", "liger_kernel", "quack_in_place"]


def test_linear_cross_entropy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(linear.IGNORE_FRACTION_VARIABLE, "0.5, 1")
    chosen = ("--providers", "liger_torch", "torch", "cce", "--reduction", "mean", "none")
    rows = run(linear, tmp_path, *SMALL_FLCE, *chosen)
    speed = {
        (row["kernel_provider"], config(row)["ignored"], config(row)["reduction"])
        for row in rows
        if row["metric_name"] == "speed"
    }
    for reduction in ("mean", "none"):
        assert {("liger_torch", ignored, reduction) for ignored in (0.5, 1.0)} <= speed
        assert ("gemms", 0.5, reduction) in speed
        assert ("gemms", 1.0, reduction) not in speed, "nothing is labelled"
    assert ("torch", 1.0, "mean") not in speed, "torch's mean of nothing is NaN"
    printed = capsys.readouterr().out
    assert "| 4x8 BT=8 ignored=50% mean | 0.50 |" not in printed, "there is no time with all rows labelled"
    assert "not measured: cce (4x8 BT=8 ignored=50% and 1 more): ModuleNotFoundError" in printed
    assert "not measured: torch (4x8 BT=8 ignored=100% mean): ArithmeticError" in printed


def test_time_against_all_rows_labelled(tmp_path, capsys):
    run(linear, tmp_path, *SMALL_FLCE, "--providers", "liger_torch", "--ignore-fraction", "0", "0.25")
    assert "| 4x8 BT=8 ignored=25% mean | 0.75 |" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--frozen-head",), ("--no-grad",), ("--frozen-head", "--reduction", "none")])
def test_linear_settings(tmp_path, flags):
    rows = run(linear, tmp_path, *SMALL_FLCE, "--providers", "liger_torch", "torch", *flags)
    assert {row["kernel_provider"] for row in rows} == {"liger_torch", "torch", "gemms"}
    mode = "no-grad-forward" if "--no-grad" in flags else "full"
    assert {row["kernel_operation_mode"] for row in rows} == {mode}
    assert {config(row)["frozen_head"] for row in rows} == {"--frozen-head" in flags}


def test_chunk_sizes_errors_and_checks(tmp_path, capsys):
    sizes = ("--chunk-size", "4", "64", "--error-size", "16", "8", "4")
    rows = run(linear, tmp_path, *SMALL_FLCE, *sizes, "--checks", "--errors")
    timed = {row["kernel_provider"] for row in rows if row["metric_name"] == "speed"}
    assert timed == {"liger_torch", "liger_torch_chunk4", "gemms"}, "64 rows do not fit into 8"
    chunks = {
        float(row["x_value"]): float(row["y_value_50"])
        for row in rows
        if row["metric_name"] == "dW_error" and row["kernel_provider"] == "liger_torch accum float32"
    }
    assert set(chunks) == {1, 2, 4, 8, 16}
    assert max(chunks.values()) < 3e-3
    printed = capsys.readouterr().out
    assert "| 4x8 BT=8 ignored=0% | 4 |" in printed
    for check in ("last labels", "all ignored", "nan in ignored rows"):
        assert f"| {check} | ok |" in printed
    assert "FAILED" not in printed


def test_a_check_can_fail(monkeypatch):
    shape = linear.Shape("4x8", 4, 8, "")
    checks = linear.Checks(linear.Case(shape, 8, 0.0, torch.float32, torch.device("cpu")), "torch")
    monkeypatch.setattr(loop, "labelled_rows", lambda call, plan: None)
    assert checks.all_ignored()[0] == checks.nan_in_ignored_rows()[0] == "FAILED"


@pytest.mark.parametrize("text", ["4", "llama", "4x8x2"])
def test_unknown_shape(text, capsys):
    with pytest.raises(SystemExit):
        linear.main(["--shapes", text])
    assert "neither HxV" in capsys.readouterr().err


def test_show_can_leave_providers_out():
    """Chunk sizes, which are compared with each other, stay."""
    arguments = linear.parser().parse_args(["--show", "settings", "chunk sizes", "--providers", "liger_triton", "torch"])
    settings, chunks = linear.jobs(arguments)
    assert [provider.name for provider in settings.providers] == ["liger_triton", "torch"]
    assert [provider.name for provider in chunks.providers][:2] == ["liger_triton", "liger_triton_chunk2048"]


def test_show_covers_the_published_shapes():
    first, *_, few, many = linear.show_jobs("triton")
    assert [(shape.hidden, shape.vocab) for shape in first.shapes] == [
        (2048, 128256),
        (2048, 151936),
        (2560, 262208),
        (4096, 151936),
        (4096, 128256),
    ]
    assert all(provider.default for provider in first.providers)
    assert (min(few.rows), max(many.rows)) == (512, 65536)
    assert {provider.chunk_size for provider in many.providers} > {None, *GPU_CHUNK_ROWS[::2]}


def test_what_is_not_the_loss_is_not_timed(tmp_path, capsys, monkeypatch):
    known = cross_entropy.cross_entropy_providers()

    def double(logits, target, reduction):
        return 2 * F.cross_entropy(logits, target, reduction=reduction)

    known["double"] = providers.Provider("double", lambda: double)
    monkeypatch.setattr(cross_entropy, "cross_entropy_providers", lambda: known)
    rows = run(cross_entropy, tmp_path, *SMALL_CE, "--providers", "double", "torch", "--mode", "full")
    assert "double" not in {row["kernel_provider"] for row in rows}
    assert "ArithmeticError: the loss is off by 1 of its norm" in capsys.readouterr().out


def test_out_of_time_is_said(tmp_path, capsys):
    rows = run(cross_entropy, tmp_path, *SMALL_CE, "--providers", "torch", "--budget-s", "0")
    assert rows == []
    assert "not measured: everything (BT=3 V=8 float32 none_mean and 4 more): out of time" in capsys.readouterr().out


def test_a_step_that_fails_is_left_out():
    failed = {}
    calls = []

    def broken():
        raise RuntimeError("no")

    def breaks_later():
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("no more")

    steps = {"broken": lambda: broken, "breaks later": lambda: breaks_later, "works": lambda: lambda: None}
    sizing = common.Sizing(time_ms=1, least=6, most=6)
    times = common.device_ms(steps, torch.device("cpu"), sizing, failed.__setitem__)
    assert set(times) == {"works"}
    assert {name: str(error) for name, error in failed.items()} == {"broken": "no", "breaks later": "no more"}
    assert len(calls) == 4


def test_repeats():
    assert [common.Sizing(100, 5, 40).repeats(ms) for ms in (0.0, 1.0, 4.0, 1000.0)] == [40, 40, 25, 5]
    assert "".join(common.spread({"a": 4, "b": 2})) == "aabaab"
    assert common.spread({}) == []


def stand_in(name, **attributes):
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module


class LigerKernelCrossEntropy:
    """With the arguments of liger-kernel 0.8.5."""

    @staticmethod
    def apply(_input, target, weight, ignore_index, z, smoothing, reduction, softcap, rz, ra, rp):
        assert (weight, z, smoothing, softcap, rz, ra, rp) == (None, 0.0, 0.0, None, False, False, False)
        return F.cross_entropy(_input, target, ignore_index=ignore_index, reduction=reduction), None, None, None


class LigerKernelLinear:
    """With the arguments of liger-kernel 0.8.5."""

    @staticmethod
    def apply(
        _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
    ):  # fmt: skip
        assert (bias, ce_weight, lse_square_scale, label_smoothing, softcap) == (None, None, 0.0, 0.0, None)
        assert return_z_loss is False
        assert accum_dtype in (None, torch.float32)
        loss = F.cross_entropy(F.linear(_input, weight), target, ignore_index=ignore_index, reduction=reduction)
        return loss, None, None, None


def cce(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="auto", impl="cce"):
    """With the arguments of cut-cross-entropy 25.1.1."""
    return F.cross_entropy(F.linear(e, c), targets, ignore_index=ignore_index, reduction=reduction)


def quack_chunked(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True):
    """With the arguments of quack-kernels 0.6.5."""
    return F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index, reduction=reduction)


def quack(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    """With the arguments of quack-kernels 0.6.5."""
    return F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction)


def test_adapters(tmp_path, monkeypatch, capsys):
    """Every peer is called with arguments it takes, and what it computes is the loss."""
    function = {"LigerCrossEntropyFunction": LigerKernelCrossEntropy}
    for module in (
        stand_in("liger_kernel"),
        stand_in("liger_kernel.ops", **function, LigerFusedLinearCrossEntropyFunction=LigerKernelLinear),
        stand_in("cut_cross_entropy", linear_cross_entropy=cce, __version__="25.1.1"),
        stand_in("quack"),
        stand_in("quack.cross_entropy", cross_entropy=quack),
        stand_in("quack.linear_cross_entropy", chunked_linear_cross_entropy=quack_chunked),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ("liger_kernel", "quack", "quack_in_place")
    rows = run(cross_entropy, tmp_path, *SMALL_CE, "--mode", "full", "--providers", *names)
    assert {row["kernel_provider"] for row in rows} == {*names, "copy"}
    names = ("liger_kernel", "liger_kernel_fp32", "cce", "cce_exact", "quack", "torch_chunked")
    rows = run(linear, tmp_path, *SMALL_FLCE, "--fresh", "--providers", *names)
    missing = set() if hasattr(torch.nn, "LinearCrossEntropyOptions") else {"torch_chunked"}
    assert {row["kernel_provider"] for row in rows} == {*names, "gemms"} - missing
    assert "cut-cross-entropy 25.1.1" in {config(row)["version"] for row in rows}
    assert ("not measured" in capsys.readouterr().out) == bool(missing)


@pytest.fixture
def tiny_models(monkeypatch):
    """The models of the training step with their kind of layers, but few and small."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    training_step = importlib.import_module("benchmark.benchmark_training_step")
    for name, setup in training_step.SETUPS.items():
        head = dataclasses.replace(setup.head, hidden=16, vocab=97)
        shared = {**setup.shared, "head_dim": 8, "num_key_value_heads": 1}
        small = dataclasses.replace(setup, head=head, shared=shared, intermediate=24, layers=2, heads=2)
        monkeypatch.setitem(training_step.SETUPS, name, small)
    return training_step


SMALL_STEP = ("--sequences", "2", "--length", "16", "--rounds", "1", "--device", "cpu")


def test_training_step(tiny_models, tmp_path, capsys):
    chosen = ("--models", "qwen3-0.6b", "llama-3.1-8b", "--shares", "100", "25")
    rows = run(tiny_models, tmp_path, *SMALL_STEP, *chosen)
    speed = {
        (config(row)["model"], float(row["x_value"]), row["kernel_provider"]) for row in rows if row["metric_name"] == "speed"
    }
    names = ("transformers", "liger", "liger_all_rows")
    assert speed == {(model, share, name) for model in (chosen[1], chosen[2]) for share in (100, 25) for name in names}
    host, whole = ([float(row["y_value_50"]) for row in rows if row["metric_name"] == metric] for metric in ("host", "speed"))
    assert all(0 < launched <= time for launched, time in zip(host, whole, strict=True))
    assert {config(row)["compiled"] for row in rows} == {False}
    through = {row["kernel_provider"]: config(row)["through"] for row in rows}
    assert through == {"transformers": "the model", "liger": "patch", "liger_all_rows": "patch"}
    for metric in ("loss", "gradient_norm"):
        by_case = {}
        for row in rows:
            if row["metric_name"] == metric:
                by_case.setdefault((config(row)["model"], row["x_value"]), []).append(float(row["y_value_50"]))
        assert len(by_case) == 4
        for values in by_case.values():
            assert len(values) == len(names)
            assert max(values) - min(values) <= 0.02 * max(values), (metric, values)
    assert {(float(row["x_value"]), config(row)["labelled"]) for row in rows} == {(100, 30), (25, 8)}
    assert "not measured: liger_kernel (qwen3-0.6b and 1 more): ModuleNotFoundError" in capsys.readouterr().out
    again = run(tiny_models, tmp_path, *SMALL_STEP, *chosen[:2], "--shares", "50", "25")
    assert len(again) == len(rows) * 5 // 4, "the share that was there is kept, the other one added"
    assert "qwen3-0.6b 25 %" not in capsys.readouterr().out


def test_hf_trainer(tiny_models, tmp_path, capsys):
    pytest.importorskip("accelerate")
    trainer = importlib.import_module("benchmark.benchmark_hf_trainer")
    small = ("--steps", "4", "--sequences", "2", "--length", "16", "--device", "cpu")
    rows = run(trainer, tmp_path, *small)
    found = {(row["kernel_provider"], row["metric_name"]): row for row in rows}
    assert set(found) == {(name, metric) for name in ("transformers", "liger") for metric in ("speed", "loss")}
    losses = [float(found[name, "loss"]["y_value_50"]) for name in ("transformers", "liger")]
    assert losses[0] == pytest.approx(losses[1], rel=2**-6)  # the model's own loss is of bfloat16 logits
    assert [config(found[name, "loss"])["fused"] for name in ("transformers", "liger")] == [0, 8]
    assert "losses differ by at most" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "lora"), [("qwen3-1.7b", False), ("qwen3-8b", True)])
def test_training_step_recomputes_and_skips(name, lora, tiny_models, monkeypatch):
    """Each layer runs twice; the head sees the labelled rows of the skipping loss, and all of the other's."""
    model = tiny_models.SETUPS[name].build(torch.device("cpu"))
    trained = [parameter for parameter, p in model.named_parameters() if p.requires_grad]
    assert lora == all("lora_" in parameter for parameter in trained)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    causal = model.get_base_model() if lora else model
    assert causal.config._attn_implementation == "sdpa"
    runs, projected, chunks = [], [], loop.Projection.chunks
    causal.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(None))

    def watched(projection, index):
        projected.append(projection.call.rows if index is None else len(index))
        return chunks(projection, index)

    monkeypatch.setattr(loop.Projection, "chunks", watched)
    batch = tiny_models.Batch.make(97, 25.0, 2, 16, torch.device("cpu"))
    for loss in ("liger", "liger_all_rows"):
        tiny_models.prepare(model, batch, tiny_models.LOSSES[loss]())()
    assert len(runs) == 4
    assert projected == [8, 32]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_compiled_layers_are_the_model_s(tiny_models, monkeypatch):
    """The layers run compiled, here by a compiler that only counts graphs, and the loss is the same."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile(module, backend=count))
    batch = tiny_models.Batch.make(97, 25.0, 2, 16, torch.device("cpu"))
    losses = {}
    for compiled in (False, True):
        model = tiny_models.SETUPS["qwen3-0.6b"].build(torch.device("cpu"), compiled=compiled)
        losses[compiled] = tiny_models.prepare(model, batch, tiny_models.own_loss)().item()
    assert graphs
    assert losses[True] == pytest.approx(losses[False], rel=tiny_models.NOISE)


def test_a_patch_that_fuses_nothing_is_not_timed(tiny_models, tmp_path, capsys, monkeypatch):
    """Instead of the model's own path under another name."""
    own = tiny_models.own_loss
    monkeypatch.setattr(tiny_models, "own_loss", lambda model, ids, labels: own(model.eval(), ids, labels))
    rows = run(tiny_models, tmp_path, *SMALL_STEP, "--models", "qwen3-0.6b", "--shares", "50", "--losses", "liger")
    assert rows == []
    assert "liger failed, RuntimeError: the loss was not fused: " in capsys.readouterr().out


def test_a_training_loss_that_is_another_is_not_timed(tiny_models, tmp_path, capsys, monkeypatch):
    own = tiny_models.LOSSES["transformers"]()
    monkeypatch.setitem(tiny_models.LOSSES, "liger", lambda: lambda *step: own(*step) * 1.01)
    chosen = ("--models", "qwen3-0.6b", "--shares", "50", "--losses", "transformers", "liger")
    rows = run(tiny_models, tmp_path, *SMALL_STEP, *chosen)
    assert {row["kernel_provider"] for row in rows} == {"transformers"}
    assert "liger failed, ArithmeticError: the loss is" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    """What is in the file is kept as it is; what was interrupted is not in it."""
    chosen = ("--providers", "torch", "--mode", "full", "--reduction")
    first = run(cross_entropy, tmp_path, *SMALL_CE, *chosen, "mean")
    measure = cross_entropy._measure_time

    def interrupted(ready, case, usage, *rest):
        measure(ready, case, usage, *rest)
        if usage == "sum":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cross_entropy, "_measure_time", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(cross_entropy, tmp_path, *SMALL_CE, *chosen, "mean", "none_mean", "sum")
    after = run(cross_entropy, tmp_path, *SMALL_CE, *chosen, "mean", "none_mean")
    assert "2 of 2 parts were in" in capsys.readouterr().out
    assert after[: len(first)] == first
    assert [config(row)["usage"] for row in after[len(first) :]] == ["none_mean"] * len(first)
    fresh = run(cross_entropy, tmp_path, *SMALL_CE, *chosen, "mean", "--fresh")
    assert len(fresh) == len(first)


def test_fused_units_are_recognised(tmp_path, capsys):
    chosen = ("--providers", "liger_torch", "--ignore-fraction", "0", "0.5", "--frozen-head")
    first = run(linear, tmp_path, *SMALL_FLCE, *chosen, "--reduction", "mean")
    again = run(linear, tmp_path, *SMALL_FLCE, *chosen, "--reduction", "mean", "sum")
    assert again[: len(first)] == first
    assert len(again) == 2 * len(first)
    assert "2 of 4 parts were in" in capsys.readouterr().out


def test_another_machines_file_is_not_added_to(tmp_path):
    path, device = tmp_path / "out.csv", torch.device("cpu")
    row = common.Measurement("k", "p", "full", "speed", "ms", "x", "x", 1, common.Quantiles(1, 1, 1))
    common.write_csv(path, [row], device)
    report = common.Report(path, device, 1.0, resume=True)
    assert not report.due("there", kernel_provider="p", x_value=1)
    assert report.due("not there", kernel_provider="p", x_value=2)
    path.write_text(path.read_text().replace(torch.__version__, "1.0"))
    with pytest.raises(SystemExit, match=r"measured with torch 1\.0 \(here .*--fresh"):
        common.Report(path, device, 1.0, resume=True)
    assert common.Report(path, device, 1.0).kept == []


def test_one_command(tmp_path, capsys, monkeypatch):
    """Each suite gets arguments that it takes; the two losses run here, with less of everything."""
    everything = importlib.import_module("benchmark.__main__")
    training_step = importlib.import_module("benchmark.benchmark_training_step")
    for module in (cross_entropy, linear, training_step):
        suite = everything.SUITES[module.__name__.removeprefix("benchmark.benchmark_")]
        for arguments in (suite.on_gpu, suite.on_cpu):
            module.parser().parse_args(arguments or ())
    tiny = {"cross_entropy": SMALL_CE, "fused_linear_cross_entropy": SMALL_FLCE}
    for name, arguments in tiny.items():
        suite = dataclasses.replace(everything.SUITES[name], on_cpu=(*arguments, "--providers", "torch"))
        monkeypatch.setitem(everything.SUITES, name, suite)
    everything.main(["--device", "cpu", "--data", str(tmp_path)])
    printed = capsys.readouterr().out
    for distribution in ("liger-kernel", "cut-cross-entropy", "quack-kernels"):
        assert re.search(rf"^{distribution} +missing$", printed, re.MULTILINE)
    assert "training step\n\nleft out: it needs a GPU" in printed
    written = sorted(path.name for path in tmp_path.iterdir())
    device = everything.slug(common.device_name(torch.device("cpu")))
    assert written == [f"{name}_{device}.csv" for name in tiny]
    everything.main(["--device", "cpu", "--data", str(tmp_path), "--suites", "cross_entropy"])
    assert "5 of 5 parts were in" in capsys.readouterr().out


def test_one_list_of_shapes():
    """What is measured by default is in the list that the tests use."""
    training_step = importlib.import_module("benchmark.benchmark_training_step")
    assert set(cross_entropy.VOCABS) <= {case.vocab for case in CASES}
    assert set(linear.USUAL_SHAPES) <= {case.name for case in CASES}
    assert {setup.head for setup in training_step.SETUPS.values()} <= set(CASES)


def test_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(cross_entropy, tmp_path, *SMALL_CE, "--providers", "torch", "--reduction", "mean", "--mode", "full")
    assert "1/1" in capsys.readouterr().out


def split_benchmark(rank, path):
    """In one of several processes, over gloo; the interpreter would take minutes."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    module = importlib.import_module("benchmark.benchmark_vocab_parallel")
    small = ["--rows", "8", "--vocab", "40", "--hidden", "4", "--dtype", "float32", "--repeats", "2", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGER_BACKEND", "torch")
        return module.main([*small, "--out", path])


def test_split_vocabulary(world, tmp_path):
    """It checks results and predicted bytes itself, on four ranks."""
    path = tmp_path / "out.csv"
    assert world.run(None, split_benchmark, str(path)) == [0] * 4
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {row["kernel_provider"] for row in rows if row["metric_name"] == "speed"}
    sent = {row["kernel_provider"]: float(row["y_value_50"]) for row in rows if row["metric_name"] == "sent"}
    assert {"linear, one GPU", "linear, split", "logits, one GPU", "logits, split"} <= steps
    assert sent["logits, split"] == 3 * 4 * 8 * 3  # three statistics of 4 bytes for 8 rows, to three others
    assert sent["linear, split"] == sent["logits, split"] + 2 * 3 / 4 * 8 * 4 * 4
