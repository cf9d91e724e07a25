"""Host time of small calls, and of the first ones: what a step pays before any kernel runs.

    python -m benchmark.host_overhead [--out docs/data/host_time_h200.csv]

On a GPU. Cross entropy of 128 rows and a vocabulary of 32000, and the fused loss of hidden states of 512, in bfloat16, forward
and backward. What is measured of a process that has run nothing yet is measured in one of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from liger import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, UnsupportedError, spec
from liger.autograd import LossFunction, losses
from liger.call import Call, Needs, Recipe
from liger.checks import check_tensors
from liger.dispatch import backends, resolve
from liger.operators import loss
from liger.options import CrossEntropyOptions

from .common import describe

ROWS, VOCAB, HIDDEN = 128, 32000, 512
FIRST_CALLS = """
import json, sys, time
start = time.perf_counter()
import torch
import liger
loss = liger.LigerCrossEntropyLoss(backend=sys.argv[1])
logits = torch.randn({rows}, {vocab}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
target = torch.randint({vocab}, ({rows},), device="cuda")
torch.cuda.synchronize()
took = {{"torch and liger imported, tensors made": time.perf_counter() - start}}
for name in ("first step", "second step"):
    start = time.perf_counter()
    loss(logits, target).backward()
    torch.cuda.synchronize()
    took[name] = time.perf_counter() - start
print(json.dumps(took))
"""
"""The first step loads a backend's packages and kernels, which CuTe DSL compiles anew in each process."""


def host_us(run: Callable[[], object], repeats: int = 300) -> float:
    """Mean host time of a call, the device kept from falling behind."""
    for _ in range(20):
        run()
    total = 0.0
    for _ in range(repeats // 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run()
        total += time.perf_counter() - start
    return total / repeats * 1e6


def parts(backend: str, logits: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The steps of one forward, each alone."""
    options = CrossEntropyOptions()
    recipe = Recipe(options, Needs(True, False, False), logits.dtype, logits.dtype, False, backend)
    call = Call(logits, target, None, None, None, recipe)
    request = call.request()
    implementation = resolve(request, backend)
    kernels = implementation.kernels()
    inputs = call.row_inputs()
    results = spec.RowResults.empty(call.rows, logits, options, keep_lse=False)
    grad = torch.empty_like(logits)
    text, numbers = recipe.encode()
    encoded = (text, *numbers)
    return {
        "forward without autograd and module, as eager calls run it": lambda: losses(call, kernels),
        "the same through the opaque operator that `torch.compile` needs": lambda: loss(*call.tensors, *encoded),
        "of it: autograd": lambda: LossFunction.apply(logits, None, None, call, implementation),
        "of it: the arguments checked": lambda: check_tensors("cross_entropy", logits, target, options, None, None, None),
        "of it: the request built": lambda: Call(logits, target, None, None, None, recipe).request(),
        "of it: the backend resolved": lambda: resolve(request, backend),
        "of it: the divisors counted": call.row_inputs,
        "of it: the results' storage": lambda: spec.RowResults.empty(call.rows, logits, options, keep_lse=False),
        "of it: the gradient's storage": lambda: torch.empty_like(logits),
        "of it: the rows kernel launched": lambda: kernels.rows(logits, inputs, results, grad),
        "of it: the rows reduced": lambda: spec.reduce(results, target, options, torch.bfloat16),
    }


def measured(backend: str, logits: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[str, float]]:
    """(what, us) of a backend."""
    for reduction in ("mean", "none"):
        module = LigerCrossEntropyLoss(reduction=reduction, backend=backend)
        name = f"`LigerCrossEntropyLoss`, {reduction}, "
        yield name + "forward", host_us(lambda module=module: module(logits, target))
        yield (
            name + "forward and backward",
            host_us(lambda module=module: torch.autograd.grad(module(logits, target).sum(), logits)),
        )
        with torch.no_grad():
            yield name + "without gradients", host_us(lambda module=module: module(logits, target))
    fused = LigerFusedLinearCrossEntropyLoss(backend=backend)
    hidden, weight = (torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (ROWS, VOCAB))
    yield "`LigerFusedLinearCrossEntropyLoss`, mean, forward", host_us(lambda: fused(weight, hidden, target))
    with torch.no_grad():
        for name, part in parts(backend, logits.detach(), target).items():
            yield name, host_us(part)


def first_calls(backend: str) -> Iterator[tuple[str, float]]:
    """(what, us) in a process that has run nothing yet."""
    script = FIRST_CALLS.format(rows=ROWS, vocab=VOCAB)
    answer = subprocess.run([sys.executable, "-c", script, backend], capture_output=True, text=True, check=True)
    for name, seconds in json.loads(answer.stdout.splitlines()[-1]).items():
        yield f"a new process: {name}", seconds * 1e6


def main() -> None:
    """Measure, print and write."""
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("--out", type=Path, help="a CSV file to write")
    arguments = top.parse_args()
    device = torch.device("cuda")
    logits = torch.randn(ROWS, VOCAB, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCAB, (ROWS,), device=device)
    found = [
        ("torch", "`F.cross_entropy`, forward", host_us(lambda: F.cross_entropy(logits, target))),
        ("torch", "one elementwise operation of torch", host_us(lambda: target != 0)),
    ]
    for backend in backends():
        try:
            found += [(backend, *line) for line in (*measured(backend, logits, target), *first_calls(backend))]
        except UnsupportedError as refused:
            print(refused)
    made_on = describe(device)
    for backend, what, us in found:
        print(f"{backend:8s} {what}: {us:.1f} us")
    if arguments.out:
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("backend", "what", "us", "made_on"))
            writer.writerows((backend, what, f"{us:.1f}", made_on) for backend, what, us in found)
    print(made_on)


if __name__ == "__main__":
    main()
