"""Devices other than the current one, streams, threads, and tensors past 32-bit indices."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from projecting import projected_ahead

import liger

ROOT = Path(__file__).parent.parent

OTHER_DEVICE = """
import sys, torch, liger
sys.path.insert(0, "test")
from projecting import projected_ahead
assert torch.cuda.current_device() == 0
x = torch.randn(64, 96, device="cuda:1", requires_grad=True)
weight = torch.randn(304, 96, device="cuda:1", requires_grad=True)
target = torch.randint(304, (64,), device="cuda:1")
for backend in BACKENDS:
    with projected_ahead(8):
        loss = liger.liger_fused_linear_cross_entropy(x, weight, target, backend=backend)
        half = [tensor.detach().bfloat16() for tensor in (x, weight)]
        in_half = liger.liger_fused_linear_cross_entropy(*half, target, backend=backend)
    (loss * 3).backward()
    logits = (x @ weight.T).detach().requires_grad_()
    for reduction in ("mean", "none"):
        liger.liger_cross_entropy(logits, target, reduction=reduction, backend=backend).sum().backward()
    wanted = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, target)
    assert abs(loss.double() - wanted) < 1e-4, (backend, loss, wanted)
    assert abs(in_half.double() - wanted) < 1e-2 * wanted, (backend, in_half, wanted)
    assert torch.isfinite(x.grad).all() and x.grad.any() and logits.grad.any()
assert torch.cuda.current_device() == 0
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_E1_tensors_on_another_device_than_the_current_one_in_a_fresh_process():
    script = OTHER_DEVICE.replace("BACKENDS", repr(("triton", "torch")))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# It ends without an interpreter's end: torch may abort where that comes while backward's thread still lets go of the graph
# (pytorch/pytorch#38230), which is not what is tested.
FIRST_ON_ITS_THREAD = """
import os, sys, torch, liger
x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (16, 128))
loss = liger.liger_fused_linear_cross_entropy(x, weight, torch.arange(16, device="cuda"), reduction="none", backend=sys.argv[1])
torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
torch.cuda.synchronize()
os._exit(0)
"""


@pytest.mark.gpu
def test_backward_may_be_the_first_on_its_thread(flce):
    """Which begins with a product there; a warning would be an error."""
    if flce.device != "cuda":
        pytest.skip("a CPU needs no context")
    command = [sys.executable, "-W", "error:Attempting to run cuBLAS:UserWarning", "-c", FIRST_ON_ITS_THREAD, flce.row.backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_E1_side_streams(loss):
    """The work lands on the caller's stream: a long kernel before it on that stream is waited for."""
    loss.needs()
    inputs, late = (loss.inputs(64, 304, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    with projected_ahead(8):
        wanted = loss.outcome(inputs).output.loss
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.input.copy_(inputs.input)
        if loss.fused:
            late.weight.copy_(inputs.weight)
        late.target.copy_(inputs.target)
        with projected_ahead(8):
            got = loss.outcome(late).output.loss
    side.synchronize()
    assert torch.equal(got, wanted)


def test_several_threads(loss):
    loss.needs()
    inputs = loss.inputs(6, 37)
    wanted = loss.outcome(inputs)
    results = {}

    def work(thread: int) -> None:
        results[thread] = loss.outcome(inputs)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1 if loss.interpreted else 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(threads)
    for result in results.values():
        assert torch.equal(result.output.loss, wanted.output.loss)
        assert torch.equal(result.input, wanted.input)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65536, 131072])  # of 50257: past 2^31 and past 2^32 elements
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_S1_more_elements_than_32_bits_count(rows, reduction):
    vocab = 50257
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    target = torch.full((rows,), -100, device="cuda")
    target[-8:] = torch.arange(8, device="cuda") * 7001
    loss = liger.liger_cross_entropy(logits, target, reduction=reduction, backend="triton")
    few = logits[-8:].detach().clone().requires_grad_()
    alone = liger.liger_cross_entropy(few, target[-8:], reduction=reduction, backend="triton")
    assert torch.equal(loss[-8:] if reduction == "none" else loss, alone)
    loss.sum().backward()
    alone.sum().backward()
    assert torch.equal(logits.grad[-8:], few.grad)
    assert not logits.grad[:8].any()
