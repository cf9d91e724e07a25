"""Host time of small calls: what a step pays before any kernel runs. `python -m benchmark.host_overhead` on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from liger import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, spec
from liger.autograd import LossFunction, losses
from liger.call import Call, Needs, Recipe
from liger.checks import check_tensors
from liger.dispatch import resolve
from liger.operators import loss
from liger.options import CrossEntropyOptions


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


def parts(logits: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The steps of one forward, each alone."""
    options = CrossEntropyOptions()
    recipe = Recipe(options, Needs(True, False, False), logits.dtype, logits.dtype, False, "triton")
    call = Call(logits, target, None, None, None, recipe)
    request = call.request()
    implementation = resolve(request, "triton")
    kernels = implementation.kernels()
    inputs = call.row_inputs()
    results = spec.RowResults.empty(call.rows, logits, options, keep_lse=False)
    grad = torch.empty_like(logits)
    text, numbers = recipe.encode()
    encoded = (text, *numbers)
    return {
        "check": lambda: check_tensors("cross_entropy", logits, target, options, None, None, None),
        "call + request": lambda: Call(logits, target, None, None, None, recipe).request(),
        "resolve": lambda: resolve(request, "triton"),
        "divisors": call.row_inputs,
        "results": lambda: spec.RowResults.empty(call.rows, logits, options, keep_lse=False),
        "gradient buffer": lambda: torch.empty_like(logits),
        "rows kernel": lambda: kernels.rows(logits, inputs, results, grad),
        "reduce": lambda: spec.reduce(results, target, options, torch.bfloat16),
        "losses": lambda: losses(call, kernels),
        "autograd": lambda: LossFunction.apply(logits, None, None, call, implementation),
        "one torch op": lambda: target != 0,
        "losses through the opaque operator": lambda: loss(*call.tensors, *encoded),
    }


def main() -> None:
    logits = torch.randn(128, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32000, (128,), device="cuda")
    hidden = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for backend in ("cutedsl", "triton", "torch"):
        for reduction in ("mean", "none"):
            loss = LigerCrossEntropyLoss(reduction=reduction, backend=backend)
            forward = host_us(lambda loss=loss: loss(logits, target))
            full = host_us(lambda loss=loss: torch.autograd.grad(loss(logits, target).sum(), logits))
            with torch.no_grad():
                plain = host_us(lambda loss=loss: loss(logits, target))
            print(f"{backend} {reduction}: forward {forward:.1f} us, forward + backward {full:.1f} us, no-grad {plain:.1f} us")
        fused = LigerFusedLinearCrossEntropyLoss(backend=backend)
        print(f"{backend} fused forward {host_us(lambda fused=fused: fused(weight, hidden, target)):.1f} us")
    with torch.no_grad():
        for name, part in parts(logits.detach(), target).items():
            print(f"  of which {name}: {host_us(part):.1f} us")
    print(f"F.cross_entropy forward {host_us(lambda: F.cross_entropy(logits, target)):.1f} us")


if __name__ == "__main__":
    main()
