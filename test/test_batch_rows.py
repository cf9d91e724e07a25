"""The report of test/batch_rows.py, and the tables that the documentation makes of such files."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path

import batch_rows
import pytest
import records
import sanitize
import soak
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    found = importlib.import_module("results")
    monkeypatch.setattr(found, "NOTED", tmp_path)
    return found


def note(path, columns, *rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((columns, *rows))


def test_rows_are_compared(tmp_path, results):
    """On a CPU with one thread given logits give all rows the same bits; the report is what the docs read."""
    out = tmp_path / "batch_rows_h200.csv"
    command = (sys.executable, "test/batch_rows.py", "--device", "cpu", "--out", str(out))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = list(csv.DictReader(out.read_text("utf-8").splitlines()))
    assert len(found) == 2 * len(batch_rows.SIZES["cpu"])
    for line in found[: len(found) // 2]:
        assert line["op"] == "cross_entropy"
        assert line["rows"] == line["equal_losses"] == line["equal_gradients"]
    assert "| `cross_entropy` | torch | 1000 | all | all | all | all |" in results.batch_rows()


def test_differences_are_shown(tmp_path, results):
    columns = (*batch_rows.Line._fields, "gpu", "torch", "triton", "nvidia-cutlass-dsl", "date")
    line = batch_rows.Line("cross_entropy", "torch", "bfloat16", 9, 5, 8, 4, 3, 2, 1e-6, 2e-3)
    note(tmp_path / "batch_rows_h200.csv", columns, (*line, "GPU", "2", "3", "", "today"))
    text = results.batch_rows()
    assert text.startswith("*GPU, torch 2, triton 3, today.*\n")
    assert "| 5 × 9 | 3 losses (1.0e-06), 2 gradients (2.0e-03) |" in text


def test_tables_of_the_soak_and_the_sanitizer(tmp_path, results):
    columns = (*soak.Sample._fields, "gpu", "torch", "triton", "nvidia-cutlass-dsl", "date")
    samples = [(calls, *range(calls, calls + len(soak.WATCHED)), "GPU", "2", "", "", "today") for calls in (10, 20, 80)]
    note(tmp_path / "soak_h200.csv", columns, *samples)
    assert results.WATCHED.keys() == set(soak.WATCHED)
    assert "after 20 calls | after 80 calls" in results.soak()
    assert "| threads | 25 | 85 |" in results.soak()
    line = ("memcheck", 9, 0, 0, 2, "gemv 2", 30, "2026.1", "GPU", "2", "today")
    note(tmp_path / "sanitizer_h200.csv", sanitize.COLUMNS, line)
    assert "*compute-sanitizer 2026.1, GPU, torch 2, today.*" in results.sanitizer()
    assert "| memcheck | 9 | 0 | 0 | 2 | gemv 2 |" in results.sanitizer()


@pytest.mark.parametrize("part", ["soak", "sanitizer", "batch_rows"])
def test_without_a_file_there_is_no_table(results, part):
    assert getattr(results, part)() == results.NOTHING


def test_no_column_is_there_twice(tmp_path):
    with pytest.raises(ValueError, match=r"columns \['triton'\]"):
        records.write(tmp_path / "any.csv", ("calls", "triton"), [], torch.device("cpu"))
    for columns in (soak.Sample._fields, batch_rows.Line._fields):
        records.write(tmp_path / "any.csv", columns, [], torch.device("cpu"))
