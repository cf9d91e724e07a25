"""The fine-tuning example: its data, its errors, and a whole run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the transformers extra is not installed")
pytest.importorskip("accelerate", reason="the transformers extra is not installed")
pytest.importorskip("tokenizers", reason="the transformers extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import finetune_hf  # noqa: E402
from finetune_hf import Example, InputError, Instructions, collate, make_examples, read_examples  # noqa: E402

GOOD = '{"prompt": "Say hi", "response": "hi"}'


def encode(text):
    return list(text.encode())


def test_only_the_response_is_labelled():
    data = Instructions([Example("ab", "cd"), Example("a" * 6, "bc"), Example("a" * 7, "b")], encode, 256, 8)
    assert len(data) == 2  # nothing is labelled in the last one's 8 tokens
    assert data[0] == {"input_ids": [*b"ab\ncd", 256], "labels": [-100, -100, -100, *b"cd", 256]}
    assert data[1] == {"input_ids": [*b"aaaaaa\nb"], "labels": [-100] * 7 + [*b"b"]}
    batch = collate([data[0], data[1]], pad=257)
    assert batch["input_ids"].tolist() == [[*b"ab\ncd", 256, 257, 257], [*b"aaaaaa\nb"]]
    assert batch["labels"][0].tolist() == [-100, -100, -100, *b"cd", 256, -100, -100]
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    with pytest.raises(InputError, match="no response begins within --length 4 tokens"):
        Instructions([Example("abcdef", "g")], encode, 256, 4)


def test_made_up_examples_are_the_same_for_a_seed():
    assert make_examples(20, 1) == make_examples(20, 1) != make_examples(20, 2)
    assert all(example.prompt and example.response for example in make_examples(20, 1))


def test_lines_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{GOOD}\n\n{{"prompt": "", "response": "é", "more": 1}}\n', "utf-8")
    assert read_examples(path) == [Example("Say hi", "hi"), Example("", "é")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}\nnonsense", r"data\.jsonl:2: not JSON: Expecting value at column 1"),
        (f"{GOOD}\n\n[1]", r"data\.jsonl:3: must be an object with prompt and response, got list"),
        ('{"prompt": "a"}', r"data\.jsonl:1: response is missing"),
        ('{"prompt": 3, "response": "a"}', r"data\.jsonl:1: prompt must be a text, got int"),
        ('{"prompt": "a", "response": ""}', r"data\.jsonl:1: response is empty"),
        ("\n", r"data\.jsonl: there is no example in it"),
    ],
)
def test_bad_lines_are_named(tmp_path, capsys, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text, "utf-8")
    assert finetune_hf.main(["--data", str(path)]) == 2
    assert re.search(f"^error: .*{message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "no/such.jsonl"), "No such file"),
        (("--model", "no/such/model"), "--model no/such/model: "),
        (("--steps", "0"), "must be a whole number of at least 1, got '0'"),
        (("--lr", "nan"), "must be a number above 0, got 'nan'"),
        (("--backend", "cuda"), "invalid choice: 'cuda'"),
        (("--backend", "triton", "--device", "cpu"), "no backend can run the fused loss on cpu: triton: device cpu"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("LIGER_BACKEND", raising=False)
    try:
        code = finetune_hf.main(arguments)
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_backend_of_the_environment_is_checked_too(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "nope")
    assert finetune_hf.main(["--device", "cpu"]) == 2
    assert re.fullmatch(r"error: \$LIGER_BACKEND must be one of .*\n", capsys.readouterr().err)


def test_a_whole_run_with_the_users_data_and_model(tmp_path):
    """In a process of its own: equal losses, and less memory."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD, f'{{"prompt": "{"Count " * 15}", "response": "one two three"}}'] * 8), "utf-8")
    script = Path(finetune_hf.__file__)
    options = ["--data", str(path), "--steps", "3", "--batch", "4", "--vocab", "16384", "--device", "cpu", "--backend", "torch"]
    environment = os.environ | {"PYTHONPATH": str(script.resolve().parents[1])}
    command = [sys.executable, script, *options]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "16 examples" in run.stdout
    assert float(re.search(r"largest difference: (\S+) of the loss; the patch says: fused", run.stdout)[1]) < 1e-5
    plain, fused = map(int, re.search(r"(\d+) MiB unfused, (\d+) MiB fused", run.stdout).groups())
    assert fused < plain / 2
    assert list(tmp_path.iterdir()) == [path]
