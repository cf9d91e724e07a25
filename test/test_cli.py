"""`python -m liger`: the table tells the truth about this machine, described calls get the answer of `explain`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger
from liger import DeviceInfo
from liger import __main__ as cli
from liger.dispatch import Capability, Implementation, registry
from liger.functional import GIVEN_OPTIONS, GIVEN_TENSORS
from liger.options import CrossEntropyOptions

CE, FLCE = OPS = ("cross_entropy", "fused_linear_cross_entropy")
H200 = ("--device", "cuda:9.0", "--dtype", "bfloat16")
LLAMA = ("--shape", "8192x128256x4096")
FLAGS = {
    # option: (flags, the value that explain gets)
    "ignore_index": (["--ignore-index", "-1"], -1),
    "reduction": (["--reduction", "none"], "none"),
    "label_smoothing": (["--label-smoothing", ".1"], 0.1),
    "lse_square_scale": (["--lse-square-scale", "1e-4"], 1e-4),
    "softcap": (["--softcap", "30"], 30.0),
    "logit_scale": (["--logit-scale", "0.5"], 0.5),
    "return_z_loss": (["--return-z-loss"], True),
    "return_token_accuracy": (["--return-token-accuracy"], True),
    "return_predicted_tokens": (["--return-predicted-tokens"], True),
    "loss_dtype": (["--loss-dtype", "float32"], torch.float32),
    "in_place": (["--in-place"], True),
    "accum_dtype": (["--accum-dtype", "float32"], torch.float32),
    "use_token_scaling": (["--use-token-scaling"], True),
    "chunk_size": (["--chunk-size", "1024"], 1024),
    "vocab_parallel": (["--vocab-parallel", "2"], 2),
    "weight": (["--weight"], True),
    "bias": (["--bias"], True),
    "ce_weight": (["--ce-weight"], True),
    "num_items": (["--num-items"], True),
}
DEVICES = {
    "cpu": DeviceInfo("cpu"),
    "xpu": DeviceInfo("xpu"),
    "rocm": DeviceInfo("rocm"),
    "cuda:7.5": DeviceInfo("cuda", (7, 5)),
    "cuda:9.0": DeviceInfo("cuda", (9, 0)),
    "cuda:10.3": DeviceInfo("cuda", (10, 3)),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """The package's own table, nothing remembered, and no environment variable."""
    # Loads Triton's kernels, which read the environment only when they are defined.
    liger.explain(CE, device=DEVICES["cuda:9.0"], dtype=torch.float32, shape=(8, 16))
    for name in ("_table", "_loaded", "_memo"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    monkeypatch.delenv("LIGER_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = cli.main(arguments)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def answer(run, *arguments):
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    return out


# This machine.


def test_table_says_what_auto_picks_and_what_is_installed(run):
    text = answer(run)
    for name, version in cli.versions().items():
        assert version is None or f"{name} {version}" in text
    assert f"liger {liger.__version__}, python " in text
    assert str(torch.__version__) in text
    assert f"cpu: {cli.device_name(torch.device('cpu'))}" in text
    for op in OPS:
        assert f"  {op} (N=8192, V=128256" in text
    assert "auto     -> torch" in text
    assert "cutedsl  no: device cpu" in text
    assert "triton   no: device cpu" in text
    assert "torch    available" in text


def test_table_as_json_has_these_keys(run):
    found = json.loads(answer(run, "--json"))
    assert list(found) == ["versions", "environment", "devices"]
    versions = ["liger", "python", "torch", "triton", "nvidia-cutlass-dsl", "cuda", "hip", "driver"]
    assert list(found["versions"]) == versions
    assert found["environment"] == {"LIGER_BACKEND": None, "TRITON_INTERPRET": None}
    assert [device["device"] for device in found["devices"]] == list(map(str, cli.devices()))
    for device in found["devices"]:
        assert list(device) == ["device", "name", "type", "capability", "table"]
        assert [support["op"] for support in device["table"]] == list(OPS)
        for support in device["table"]:
            assert list(support) == ["op", "shape", "backends", "auto"]
            assert set(support["auto"]) == {"bfloat16", "float16", "float32", "float64"}
            for row in support["backends"]:
                assert list(row) == ["backend", "module", "reasons"]
                assert set(row["reasons"]) == set(support["auto"])


def test_table_agrees_with_explain(run):
    for device in json.loads(answer(run, "--json"))["devices"]:
        info = DeviceInfo(device["type"], device["capability"] and tuple(device["capability"]))
        for support in device["table"]:
            for name, chosen in support["auto"].items():
                shape = tuple(support["shape"])
                said = liger.explain(support["op"], device=info, dtype=getattr(torch, name), shape=shape)
                assert said.chosen == chosen
                rows = tuple((row["backend"], tuple(row["reasons"][name])) for row in support["backends"])
                assert rows == said.rows


def test_table_tries_to_load_what_it_calls_available(run, tmp_path, monkeypatch):
    (tmp_path / "broken_cli_kernels.py").write_text("raise AttributeError('no such symbol')\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    capability = Capability(devices=None, dtypes=frozenset({torch.float32}), options=frozenset())
    row = Implementation(op=CE, backend="broken", module="broken_cli_kernels", capability=capability)
    liger.register(row, first=True)
    text = " ".join(answer(run).split())
    reason = "broken_cli_kernels failed to import: AttributeError: no such symbol"
    assert f"broken no: dtype float16 (supported: float32); dtype bfloat16 (supported: float32); {reason}" in text


def test_table_names_the_dtypes_where_they_matter(run, monkeypatch):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    pytest.importorskip("cutlass", reason="the cutedsl extra is not installed")
    monkeypatch.setattr(Implementation, "kernels", lambda row: None)
    monkeypatch.setattr(cli, "device_info", lambda device: DeviceInfo("cuda", (9, 0)))
    text = " ".join(answer(run).split())
    assert "triton available for float16, bfloat16, float32; otherwise no: dtype float64 (supported: bfloat16" in text
    assert "auto -> cutedsl for float16, bfloat16, float32; torch for float64" in text


def test_equal_devices_share_a_table(run, monkeypatch):
    machine = {"cpu": DeviceInfo("cpu"), "cuda:0": DeviceInfo("cuda", (9, 0)), "cuda:1": DeviceInfo("cuda", (9, 0))}
    monkeypatch.setattr(cli, "devices", lambda: tuple(map(torch.device, machine)))
    monkeypatch.setattr(cli, "device_info", lambda device: machine[str(device)])
    monkeypatch.setattr(cli, "device_name", lambda device: f"A {device.type}")
    monkeypatch.setattr(Implementation, "kernels", lambda row: None)
    text = answer(run)
    assert "\ncuda:0, cuda:1: A cuda, compute capability 9.0\n" in text
    assert text.count("  cross_entropy (") == 2
    found = json.loads(answer(run, "--json"))["devices"]
    assert [device["device"] for device in found] == list(machine)
    assert [device["capability"] for device in found] == [None, [9, 0], [9, 0]]


def test_table_shows_every_row_whatever_the_environment_says(run, monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "torch")
    text = answer(run)
    assert "LIGER_BACKEND=torch is used instead of auto" in text
    assert "triton   no: " in text
    monkeypatch.setenv("LIGER_BACKEND", "nonsense")
    assert "LIGER_BACKEND=nonsense is not one of auto, cutedsl, triton, torch" in answer(run)
    monkeypatch.setenv("LIGER_BACKEND", "auto")
    assert "instead of" not in answer(run)


# A described call.


def test_explain_prints_what_explain_says_with_the_plan(run):
    text = answer(run, "explain", "--op", FLCE, *H200, *LLAMA)
    said = liger.explain(FLCE, device=DEVICES["cuda:9.0"], dtype=torch.bfloat16, shape=(8192, 128256, 4096))
    assert text == f"{said}\n"
    assert "plan: " in text


@pytest.mark.parametrize("device", DEVICES)
def test_explain_answers_for_described_devices(run, device):
    arguments = ("explain", "--op", CE, "--device", device, "--dtype", "float16", "--shape", "8x16", "--json")
    found = json.loads(answer(run, *arguments))
    info = DEVICES[device]
    assert found["device"] == {"type": info.type, "capability": info.capability and list(info.capability)}
    said = liger.explain(CE, device=info, dtype=torch.float16, shape=(8, 16))
    assert found["chosen"] == said.chosen


def test_explain_knows_this_machines_devices(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cli, "device_info", lambda device: DeviceInfo("cuda", (8, device.index or 0)))
    for text, minor in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        found = json.loads(
            answer(run, "--json", "explain", "--op", CE, "--device", text, "--dtype", "float32", "--shape", "8x16")
        )
        assert found["device"] == {"type": "cuda", "capability": [8, minor]}
    status, _, err = run("explain", "--op", CE, "--device", "cuda:2", "--dtype", "float32", "--shape", "8x16")
    assert status == 2
    assert "cuda:2: this machine has 2 such devices" in err


@pytest.mark.parametrize("before", [True, False])
def test_explain_as_json_has_these_keys(run, before):
    arguments = ["explain", "--op", FLCE, *H200, *LLAMA, "--bias", "--accum-dtype", "float32", "--softcap", "30"]
    arguments = ["--json", *arguments] if before else [*arguments, "--json"]
    found = json.loads(answer(run, *arguments))
    keys = ["op", "device", "dtype", "shape", "options", "chosen", "source", "backends", "plan"]
    assert list(found) == keys
    assert found["op"] == FLCE
    assert found["dtype"] == "bfloat16"
    assert found["shape"] == [8192, 128256, 4096]
    assert found["options"] == {"softcap": 30.0, "accum_dtype": "float32", "bias": True}
    assert found["source"] == "auto"
    assert [list(row) for row in found["backends"]] == [["backend", "reasons"]] * len(found["backends"])
    assert set(found["plan"]) >= {"rows", "chunk_rows", "chunks", "gemm_dtype", "accum_dtype", "peak_bytes"}
    assert found["plan"]["accum_dtype"] == "float32"


def test_explain_that_nothing_fits_is_an_answer(run):
    options = ("--in-place", "--loss-dtype", "float32", "--backend", "torch")
    found = json.loads(answer(run, "--json", "explain", "--op", CE, *H200, "--shape", "8x16", *options))
    assert (found["chosen"], found["plan"]) == (None, None)
    for row in found["backends"]:
        assert row["reasons"] == ["loss_dtype=torch.float32 is not supported", "in_place=True is not supported"]


def test_every_option_has_a_flag():
    fields = {field.name for field in dataclasses.fields(CrossEntropyOptions)}
    assert set(FLAGS) == fields.union(*GIVEN_TENSORS.values())


@pytest.mark.parametrize("option", FLAGS)
@pytest.mark.parametrize("op", OPS)
def test_flags_are_the_options_of_a_call(run, op, option):
    flags, value = FLAGS[option]
    shape = {CE: "8x16", FLCE: "8x16x4"}[op]
    arguments = ("explain", "--op", op, *H200, "--shape", shape, "--json", *flags)
    taken = (*GIVEN_OPTIONS[op], *GIVEN_TENSORS[op])
    if option not in taken:
        status, _, err = run(*arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert err.endswith(f"must be among {', '.join(taken)}, got {option} (see python -m liger explain --help)\n")
        return
    shown = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    assert json.loads(answer(run, *arguments))["options"] == {option: shown}


def test_a_new_option_appears_by_itself(run, monkeypatch):
    new = [("new_number", float | None, None), ("new_flag", bool, False)]
    added = dataclasses.make_dataclass("Added", new, bases=(CrossEntropyOptions,), frozen=True)
    monkeypatch.setattr(cli, "CrossEntropyOptions", added)
    parsed = cli.parser().parse_args(["explain", "--op", CE, *H200, "--shape", "8x16", "--new-number", "2.5", "--new-flag"])
    assert (parsed.new_number, parsed.new_flag) == (2.5, True)


def test_backend_and_environment(run, monkeypatch):
    question = ("explain", "--op", CE, "--device", "cpu", "--dtype", "float32", "--shape", "8x16", "--json")
    assert json.loads(answer(run, *question, "--backend", "torch"))["source"] == "argument"
    monkeypatch.setenv("LIGER_BACKEND", "triton")
    found = json.loads(answer(run, *question))
    assert (found["source"], found["chosen"]) == ("environment", None)
    monkeypatch.setenv("LIGER_BACKEND", "nonsense")
    status, _, err = run(*question)
    assert status == 2
    assert "$LIGER_BACKEND must be one of auto, cutedsl, triton, torch, got 'nonsense'" in err


# What is no question.

GOOD = {"--op": CE, "--device": "cpu", "--dtype": "float32", "--shape": "8x16"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--op": "softmax"}, "argument --op: invalid choice: 'softmax'"),
        ({"--op": None}, "the following arguments are required: --op"),
        ({"--device": "gpu"}, "argument --device: 'gpu' is not a device: cpu, xpu, rocm, cuda:9.0, cuda:0, ..."),
        ({"--device": "cuda:nine"}, "argument --device: 'cuda:nine' is not a device"),
        ({"--device": "cuda:64"}, "argument --device: cuda:64: this machine has "),
        ({"--dtype": "bf16"}, "argument --dtype: 'bf16' is not one of float16, bfloat16, float32, float64"),
        ({"--dtype": "int64"}, "argument --dtype: 'int64' is not one of"),
        ({"--shape": "8,16"}, "argument --shape: '8,16' is not numbers with x between them, such as 8192x128256"),
        ({"--shape": "8x16x4"}, "shape must be (N, V) of ints for cross_entropy, all but N at least 1, got (8, 16, 4)"),
        ({"--shape": "8x0"}, "shape must be (N, V) of ints"),
        ({"--reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"--label-smoothing": "2"}, "label_smoothing must be a number in [0, 1], got 2.0"),
        ({"--softcap": "nan"}, "softcap must be None or a number in [1e-30, 1e+30], got nan"),
        ({"--softcap": "much"}, "argument --softcap: invalid float value: 'much'"),
        ({"--op": FLCE, "--shape": "8x16x4", "--chunk-size": "0"}, "chunk_size must be None or an int >= 1, got 0"),
        ({"--loss-dtype": "int32"}, "argument --loss-dtype: 'int32' is not one of float16"),
        ({"--backend": "cuda"}, "backend must be one of auto, cutedsl, triton, torch, got 'cuda'"),
        ({"--no-such-flag": "1"}, "unrecognized arguments: --no-such-flag 1"),
        ({"--soft": "30"}, "unrecognized arguments: --soft 30"),
    ],
)
def test_bad_arguments_get_one_line_and_status_2(run, change, message):
    flags = [word for flag, value in (GOOD | change).items() if value is not None for word in (flag, value)]
    status, out, err = run("explain", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert err.startswith("python -m liger")


@pytest.mark.parametrize("arguments", [("table",), ("--nonsense",), ("explain",), ("bench",)])
def test_bad_commands_get_one_line_and_status_2(run, arguments):
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("arguments", [("--help",), ("explain", "--help"), ("bench", "--help")])
def test_help(run, arguments):
    text = answer(run, *arguments)
    if arguments[0] == "explain":
        for line in ("rocm ", "cuda:9.0 ", "cuda, cuda:0 ", "--in-place", "--ce-weight"):
            assert line in text
        assert re.search(r"--in-place +of cross_entropy\n", text)
        assert re.search(r"--chunk-size INT\s+default: None; of\s+fused_linear_cross_entropy\n", text)


@pytest.mark.parametrize(
    ("shape", "status", "out", "err"),
    [("8x16x4", 0, "  plan: ", ""), ("8x16", 2, "", "python -m liger explain: error: shape must be (N, V, H)")],
)
def test_as_a_module(shape, status, out, err):
    """In a process of its own, from another directory."""
    environment = os.environ | {"PYTHONPATH": str(Path(liger.__file__).parent.parent), "LIGER_BACKEND": ""}
    command = [sys.executable, "-m", "liger", "explain", "--op", FLCE, *H200, "--shape", shape]
    told = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == status
    assert out in told.stdout
    assert told.stderr.startswith(err)
    assert told.stderr.count("\n") == bool(err)


# Timing.

HERE = {CE: ("--op", CE, "--shape", "6x40"), FLCE: ("--op", FLCE, "--shape", "6x40x8")}
QUICK = ("--device", "cpu", "--seconds", "0.001")


def timed(run, *arguments):
    """The answer, which progress on stderr is no part of."""
    status, out, err = run("bench", *arguments)
    assert status == 0
    assert not err or re.match(r"timing \w+ on .*: .*, at least 3 steps each\n", err)
    return out


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("options", [(), ("--reduction", "none", "--ignored", "0.5"), ("--label-smoothing", "0.1")])
def test_bench(run, op, options):
    found = json.loads(timed(run, *QUICK, *HERE[op], *options, "--json"))
    assert found["chosen"] == "torch"
    assert (found["plan"] is None) == (op == CE)
    assert found["ignored"] == (0.5 if "--ignored" in options else 0)
    lines = {line["name"]: line for line in found["measured"]}
    assert list(lines) == [*registry.backends(), "F.cross_entropy"]
    assert lines["triton"]["ms"] is None
    assert lines["triton"]["reasons"] == ["device cpu (supported: cuda, rocm; cpu with TRITON_INTERPRET=1)"]
    for name in ("torch", "F.cross_entropy"):
        assert lines[name]["ms"] > 0
        assert lines[name]["reasons"] == []
        assert (lines[name]["extra_mib"] is not None) == sys.platform.startswith("linux")


def test_bench_for_people(run):
    lines = timed(run, *QUICK, *HERE[FLCE], "--ignored", ".5").splitlines()
    assert lines[0] == f"{FLCE} on cpu, float32, N=6, V=40, H=8, 50 % ignored"
    ours, eager, decision, plan = lines[-4:]
    assert re.fullmatch(r"  torch +[\d.]+ +[\d.]+  chosen", ours)
    assert re.fullmatch(r"  F\.cross_entropy +[\d.]+ +[\d.]+", eager)
    assert decision == "  -> torch (auto)"
    assert plan.startswith("  plan: 1 chunk of up to 6 rows")


def test_bench_says_what_takes_long_before_it_does(run, monkeypatch, capsys):
    """On stderr, and at the time: a large shape takes minutes on a CPU. However few seconds, each runs three times."""
    heard = []

    def eager(inputs, **_):
        heard.append(capsys.readouterr().err.splitlines())
        return inputs.input.sum()

    monkeypatch.setattr("liger.bench._eager", eager)
    assert cli.main(["bench", *QUICK, *HERE[CE], "--seconds", "1e-9"]) == 0
    first, *_, last = heard
    assert first[0] == f"timing {CE} on cpu, float32, N=6, V=40: torch, F.cross_entropy, at least 3 steps each"
    assert [line.partition(":")[0] for line in first[1:]] == ["torch", "torch", "F.cross_entropy"]
    assert len(heard) == (3 if sys.platform.startswith("linux") else 2)  # the memory is told on Linux only
    assert last[-1:] == ["torch, F.cross_entropy: in turn for about 1e-09 s, a step each at least"]


def test_bench_counts_the_memory_of_the_logits(run):
    if not sys.platform.startswith("linux"):
        pytest.skip("memory of a process is measured on Linux only")
    found = json.loads(timed(run, *QUICK, "--op", CE, "--shape", "1024x16384", "--json"))
    eager = found["measured"][-1]
    logits_mib = 1024 * 16384 * 4 / 2**20
    # At most torch's log probabilities, their gradient and the logits' at once, and what pages and the allocator add.
    assert logits_mib * 0.9 < eager["extra_mib"] < logits_mib * 3.1


@pytest.mark.parametrize("flag", sorted(FLAGS.keys() - {"vocab_parallel"}))
def test_bench_takes_every_option_of_one_process(run, flag):
    """What nothing can serve is an answer; what PyTorch's functions do not have is said."""
    op = CE if flag in ("weight", "loss_dtype", "in_place") else FLCE
    words = [word if flag != "accum_dtype" else word.replace("bfloat16", "float32") for word in FLAGS[flag][0]]
    found = json.loads(timed(run, *QUICK, *HERE[op], "--json", *words))
    ours, eager = found["measured"][-2:]
    if flag in ("loss_dtype", "in_place"):
        assert ours["ms"] is None
        assert "is not supported" in ours["reasons"][0]
    else:
        assert ours["ms"] > 0
    shared = flag in ("ignore_index", "reduction", "label_smoothing", "weight", "ce_weight", "bias")
    assert eager["reasons"] == ([] if shared else [f"torch has no {flag}"])


def test_bench_of_a_backend_that_fails_is_a_line(run, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate\n2 GiB")

    monkeypatch.setattr("liger.bench.liger_cross_entropy", out_of_memory)
    found = json.loads(timed(run, *QUICK, *HERE[CE], "--json"))
    assert found["measured"][-2]["reasons"] == ["OutOfMemoryError: tried to allocate 2 GiB"]
    assert found["measured"][-1]["ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", CE, "--shape", "0x8"), "shape must have at least one row to be timed, got (0, 8)"),
        (("--op", CE, "--shape", "9999999x99999999"), "shape must be of tensors that fit into cpu, got (9999999, 99999999)"),
        (("--op", CE, "--shape", "99999999999999999999x2"), "shape must be of tensors that fit into cpu"),
        (("--op", CE, "--shape", "8x8x8"), "shape must be (N, V) of ints"),
        ((*HERE[CE], "--ignored", "2"), "ignored must be in [0, 1], the share of rows that are ignored, got 2.0"),
        ((*HERE[CE], "--seconds", "0"), "seconds must be a positive number, got 0.0"),
        ((*HERE[CE], "--seconds", "nan"), "seconds must be a positive number, got nan"),
        ((*HERE[CE], "--device", "cuda:9.0"), "'cuda:9.0' is not a device of this machine"),
        ((*HERE[CE], "--device", "xpu"), "xpu: this machine has cpu"),
        ((*HERE[CE], "--backend", "fast"), "backend must be one of auto, "),
        ((*HERE[CE], "--softcap", "-1"), "softcap must be None or a number"),
    ],
)
def test_bench_of_nonsense_gets_one_line_and_status_2(run, arguments, message):
    status, out, err = run("bench", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_reader_that_stops_is_no_error():
    """`python -m liger explain ... | head -0`, with an answer that fills the pipe."""
    environment = os.environ | {"PYTHONPATH": str(Path(liger.__file__).parent.parent), "PYTHONUNBUFFERED": "1"}
    question = [sys.executable, "-m", "liger", "explain", "--op", CE, *H200, "--shape", "8x16"]
    read, write = os.pipe()
    os.close(read)
    told = subprocess.run(question, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (told.returncode, told.stderr) == (141, "")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_bench_on_a_gpu(run, op):
    shape = {CE: "1024x32000", FLCE: "1024x32000x512"}[op]
    arguments = ("--seconds", "0.2", "--op", op, "--shape", shape, "--json")
    found = json.loads(timed(run, *arguments))
    lines = {line["name"]: line for line in found["measured"]}
    logits_mib = 1024 * 32000 * 2 / 2**20
    assert (found["dtype"], found["device"]["type"]) == ("bfloat16", "cuda")
    assert lines["triton"]["ms"] < 100
    assert logits_mib * 0.9 < lines["triton"]["extra_mib"] < lines["F.cross_entropy"]["extra_mib"]
