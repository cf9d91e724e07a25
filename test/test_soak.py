"""The soak (test/soak.py) in small, and that it notices what grows."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import soak

ROOT = Path(__file__).resolve().parent.parent
# Few combinations, so that what is planted shows soon.
PLANTED = """
import sys
sys.path.insert(0, "test")
import soak, torch
from liger import autograd
soak.PROFILES, soak.CHECKPOINTS, soak.ROWS, soak.LATER_ROWS = soak.PROFILES[:1], 2, (2, 3, 4), (2, 3, 4, 5)
losses, kept = autograd.losses, []

def leaking(call, kernels):
    if call.options.reduction == "sum":
        kept.append(call.target.clone())
    return losses(call, kernels)

autograd.losses = leaking
torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.automatic_dynamic_shapes = False
sys.exit(soak.main(["--calls", "200", "--device", "cpu"]))
"""


def run(*command):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_nothing_grows(tmp_path):
    out = tmp_path / "soak.csv"
    done = run("test/soak.py", "--calls", "1000", "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(csv.DictReader(out.read_text("utf-8").splitlines()))
    assert [int(line["calls"]) for line in lines] == [50 * i for i in range(1, 21)]
    assert int(lines[-1]["graphs"]) > 2
    assert int(lines[-1]["resident"]) > 1 << 20


def test_planted_leaks_are_noticed():
    done = run("-c", PLANTED)
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("tensors", "graphs"):
        assert f"\n{name} grew from " in done.stdout, done.stdout


@pytest.mark.parametrize("name", soak.WATCHED)
def test_whatever_grows_is_named(name):
    """What it is by in every tenth call, and in the warm-up alone it may."""
    each = {"resident": 30 << 10, "allocated": 512, "reserved": 2 << 20}.get(name, 1)
    zero = soak.Sample(0, *[0] * len(soak.WATCHED))
    steady = [zero._replace(calls=1000 * i, **{name: each * min(i, 5) * 1000}) for i in range(1, 21)]
    assert soak.growths(steady) == []
    leaking = [zero._replace(calls=1000 * i, **{name: each * i * 250}) for i in range(1, 21)]
    (found,) = soak.growths(leaking)
    assert found.startswith(f"{name} grew from ")
