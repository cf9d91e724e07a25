"""The Triton kernels beyond what every backend's tests cover: all targets compile, launches follow their rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liger import spec
from liger.options import CrossEntropyOptions

pytest.importorskip("triton")

from liger.backends import triton as backend
from liger.backends.ahead import project_ahead
from liger.backends.triton.launch import exchanged_rows_launch, row_grad_launch, rows_launch

TARGETS = [("cuda", arch, "32") for arch in ("80", "86", "89", "90", "100", "103", "120")] + [("hip", "gfx942", "64")]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_every_kernel_compiles(target: tuple[str, str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = str(root)
    script = [sys.executable, "test/compile_kernels.py", *target]
    done = subprocess.run(script, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    exchanging = 4 if target[0] == "cuda" else 0
    assert done.stdout.count("exchanged_rows_kernel") == exchanging
    projecting = 2 if target[1] in ("90", "100", "103") else 0
    assert done.stdout.count("projection_kernel") == projecting
    assert done.stdout.count(" bytes") == 25 + exchanging + projecting


@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 4096, 32000, 128256, 1000003])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_launches_fit_the_row_and_the_machine(vocab: int, itemsize: int) -> None:
    launches = [rows_launch(vocab, itemsize, with_grad, False) for with_grad in (False, True)]
    for with_grad in (False, True):
        launch, lag = exchanged_rows_launch(vocab, itemsize, with_grad, 132)
        assert lag >= 0
        launches.append(launch)
    for launch in launches:
        assert launch.block & (launch.block - 1) == 0
        assert launch.held % launch.block == 0
        assert launch.block < 2 * vocab
        assert launch.num_warps * 32 <= 1024
        assert launch.block % launch.width(itemsize) == 0


def test_amd_waves_are_twice_as_wide() -> None:
    for launch in (lambda hip: rows_launch(128256, 2, True, hip), lambda hip: row_grad_launch(128256, 2, hip)):
        assert launch(True).num_warps * 64 == launch(False).num_warps * 32
        assert launch(True).block == launch(False).block


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("offset", [0.0, 2.0**20])
def test_row_stats_match_the_spec_and_combine_over_a_split_vocabulary(weighted, softcap, offset) -> None:
    """What a head split over memory or GPUs builds on: statistics of the parts give those of the whole."""
    device = _device()
    generator = torch.Generator().manual_seed(0)
    n, vocab, cut = 5, 300, 112
    logits = (torch.randn(n, vocab, generator=generator) * 3 + offset).to(device)
    target = torch.randint(vocab, (n,), generator=generator).to(device)
    weight = torch.rand(vocab, generator=generator).to(device) if weighted else None
    options = CrossEntropyOptions(label_smoothing=0.1, softcap=softcap, return_predicted_tokens=True)

    def inputs(part: slice) -> spec.RowInputs:
        w = None if weight is None else weight[part].contiguous()
        return spec.RowInputs(target, options, None, w, None if weight is None else weight.sum(), start=part.start, vocab=vocab)

    parts = [slice(0, cut), slice(cut, vocab)]
    got = [backend.row_stats(logits[:, part], inputs(part)) for part in parts]
    for part, stats in zip(parts, got, strict=True):
        double = inputs(part)._replace(class_weight=None if weight is None else weight[part].double())
        wanted = spec.row_stats(logits[:, part].double(), double)
        for ours, theirs in zip(stats, wanted, strict=True):
            # Sums of up to 188 terms in fp32: relative error below their number times one rounding.
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=188 * 2**-24, atol=1e-3 * 2**-10, equal_nan=True)
    maximum = torch.maximum(got[0].maximum, got[1].maximum)
    total = sum(stats.sum_exp * (stats.maximum - maximum).exp() for stats in got)
    whole = spec.row_stats(logits.double(), spec.RowInputs(target, options, None, None if weight is None else weight.double()))
    torch.testing.assert_close(total.double(), whole.sum_exp, rtol=300 * 2**-24, atol=0)


def test_a_factor_of_one_leaves_every_bit() -> None:
    tensor = torch.randn(7, 33, device=_device()).bfloat16()
    before = tensor.clone()
    backend.scale_(tensor, torch.ones((), device=tensor.device))
    assert torch.equal(tensor, before)


def test_scaling_happens_in_fp32_and_rounds_once() -> None:
    device = _device()
    tensor = torch.full((3, 5), 1.0, dtype=torch.bfloat16, device=device)[:, ::2]
    backend.scale_(tensor, torch.tensor(1 / 7, device=device))
    ulp = 2.0**-10  # of bf16 near 1/7; the interpreter truncates, the hardware rounds
    assert ((tensor.double() - 1 / 7).abs() < ulp).all()


def test_the_interpreter_cannot_be_switched_on_after_the_kernels_were_loaded() -> None:
    script = """
import os, torch, triton, liger
os.environ["TRITON_INTERPRET"] = "1"
question = {"device": torch.device("cpu"), "dtype": torch.float32, "shape": (2, 8)}
answer = liger.explain("cross_entropy", **question)
assert answer.chosen == "torch" and "was set after triton was imported" in str(answer), answer
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 130, 140, 1000])
def test_a_projection_of_as_many_rows_as_the_device_says(count, bias) -> None:
    """Whole blocks of rows, and none if there is none; a head that ends within a block of classes, rows that begin anywhere."""
    projection = pytest.importorskip("liger.backends.triton.projection")
    device, generator = _device(), torch.Generator().manual_seed(0)
    n, vocab, hidden = 140, 296, 72
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter's dot takes bfloat16 for integers

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    x, weight, added = normal(n, hidden + 1)[:, 1:], normal(vocab, hidden), normal(2 * vocab)[::2] if bias else None
    logits = torch.full((n, vocab), 7.0, device=device, dtype=dtype)
    project_ahead(x, torch.tensor(count, device=device), weight, added, logits)
    rows = min(n, count)
    right = x.double() @ weight.double().t() + (0 if added is None else added.double())
    torch.testing.assert_close(logits[:rows].double(), right[:rows], rtol=2**-8, atol=2**-8)
    written = -(-rows // projection.BLOCK_ROWS) * projection.BLOCK_ROWS
    assert (logits[written:] == 7).all()
