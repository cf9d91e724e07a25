"""The implementations that the GPU benchmarks compare: ours by backend, PyTorch's, and other packages where installed.

A provider is loaded when it is first needed, so that a package that is missing or broken is one more line of the report
and not an error. Adapters only translate arguments: each peer runs with its own defaults, and all ignore -100.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger import __version__ as liger_version
from liger import liger_cross_entropy, liger_fused_linear_cross_entropy
from liger.dispatch import Op, table
from liger.dispatch.capability import installed_version

from .common import Report

CrossEntropy = Callable[[Tensor, Tensor, str], Tensor]
"""(logits (N, V), target (N,), reduction) -> loss"""
LinearCrossEntropy = Callable[[Tensor, Tensor, Tensor, str], Tensor]
"""(input (N, H), weight (V, H), target (N,), reduction) -> loss"""

SMALL_CHUNK = 448  # so that its logits and gradients take at most 15 % more than liger-kernel's, at every shape
PEERS = {
    "liger_kernel": ("liger-kernel", "liger_kernel"),
    "cce": ("cut-cross-entropy", "cut_cross_entropy"),
    "quack": ("quack-kernels", "quack"),
    "transformers": ("transformers", "transformers"),
}
"""What a provider's name begins with, and the distribution and module behind it."""


@dataclass(frozen=True)
class Provider:
    """One implementation under its name in reports."""

    name: str
    load: Callable[[], Callable[..., Tensor]]
    """Imports what it needs and returns a `CrossEntropy` or a `LinearCrossEntropy`; may raise anything."""
    default: bool = True
    """Whether it runs when no providers are named."""
    overwrites: bool = False
    """Whether it may leave its gradient in the logits, so that every run needs fresh ones."""
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    """What it can do at all."""
    chunk_size: int | None = None
    """The caller's choice, where this compares chunk sizes."""


def cross_entropy_providers() -> dict[str, Provider]:
    """By name, ours first."""
    listed = [
        Provider(f"liger_{backend}", _ours(backend), default=backend != "torch") for backend in _backends("cross_entropy")
    ]
    listed += [
        Provider("liger_triton_in_place", _ours("triton", in_place=True), overwrites=True),
        Provider("liger_triton_fp32_loss", _ours("triton", loss_dtype=torch.float32), default=False),
        Provider("torch", lambda: _torch_cross_entropy),
        Provider("torch_compile", lambda: _compiled(_torch_cross_entropy)),
        Provider("liger_kernel", _liger_kernel, overwrites=True),
        Provider("quack", _quack()),
        Provider("quack_in_place", _quack(inplace_backward=True), default=False, overwrites=True),
    ]
    return {provider.name: provider for provider in listed}


def linear_cross_entropy_providers() -> dict[str, Provider]:
    """By name, ours first."""
    listed = [
        Provider(f"liger_{backend}", _ours_linear(backend), default=backend != "torch")
        for backend in _backends("fused_linear_cross_entropy")
    ]
    small = {"chunk_size": SMALL_CHUNK, "accum_dtype": torch.bfloat16}
    listed += [
        Provider("liger_triton_fp32", _ours_linear("triton", accum_dtype=torch.float32)),
        Provider("liger_triton_small", _ours_linear("triton", **small)),
        Provider("torch", lambda: _torch_linear),
        Provider("torch_compile", lambda: _compiled(_torch_linear)),
        Provider("torch_chunked", _torch_chunked),
        Provider("liger_kernel", _liger_kernel_linear()),
        Provider("liger_kernel_fp32", _liger_kernel_linear(torch.float32)),
        Provider("cce", _cce(exact=False)),
        Provider("cce_exact", _cce(exact=True)),
        Provider("quack", _quack_linear, reductions=("mean", "sum")),
    ]
    return {provider.name: provider for provider in listed}


def chunked_provider(backend: str, chunk_size: int, accum_dtype: torch.dtype | None = None) -> Provider:
    """Our fused loss with a chunk size of the caller's."""
    load = _ours_linear(backend, chunk_size=chunk_size, accum_dtype=accum_dtype)
    return Provider(f"liger_{backend}_chunk{chunk_size}", load, chunk_size=chunk_size)


def load_providers(providers: Iterable[Provider], where: str, report: Report) -> list[tuple[Provider, Callable[..., Tensor]]]:
    """Those that load, with what they loaded; the report is told of the others."""
    loaded = []
    for provider in providers:
        try:
            loaded.append((provider, provider.load()))
        except Exception as error:  # noqa: BLE001 - a package that breaks on import is missing, whatever it raised
            report.failed(provider.name, where, error)
    return loaded


def peers() -> dict[str, str | None]:
    """The packages that ours is compared with, and their versions; None for one that is missing or does not import."""
    found: dict[str, str | None] = {}
    for distribution, module in PEERS.values():
        try:
            found[distribution] = installed_version(distribution) or importlib.import_module(module).__version__
        except Exception:  # noqa: BLE001 - whatever it raised; a benchmark that needs it tells
            found[distribution] = None
    return found


def provider_version(name: str) -> str:
    """The version of what a provider runs; a package that was not installed but put on the path tells it itself."""
    for prefix, (distribution, module) in PEERS.items():
        if name.startswith(prefix):
            version = installed_version(distribution) or getattr(sys.modules.get(module), "__version__", "unknown")
            return f"{distribution} {version}"
    return f"liger {liger_version}" if name.startswith("liger") else f"torch {torch.__version__}"


def _backends(op: Op) -> list[str]:
    return list(dict.fromkeys(row.backend for row in table(op)))


def _ours(backend: str, **options: Any) -> Callable[[], CrossEntropy]:
    def loss(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return liger_cross_entropy(logits, target, reduction=reduction, backend=backend, **options)

    return lambda: loss


def _ours_linear(backend: str, **options: Any) -> Callable[[], LinearCrossEntropy]:
    def loss(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return liger_fused_linear_cross_entropy(x, weight, target, reduction=reduction, backend=backend, **options)

    return lambda: loss


def _torch_cross_entropy(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits, target, reduction=reduction)


def _torch_linear(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, reduction=reduction)


def _torch_chunked() -> LinearCrossEntropy:
    if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"F.linear_cross_entropy has a chunked path from torch 2.13 on, this is {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.linear_cross_entropy(x, weight, target, reduction=reduction, options=options)

    return loss


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled anew for each case: past Dynamo's limit of recompilations it would run eagerly without a word."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _liger_kernel() -> CrossEntropy:
    function = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction

    def loss(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return function.apply(logits, target, None, -100, 0.0, 0.0, reduction, None, False, False, False)[0]

    return loss


def _liger_kernel_linear(accum_dtype: torch.dtype | None = None) -> Callable[[], LinearCrossEntropy]:
    def load() -> LinearCrossEntropy:
        function = importlib.import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

        def loss(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
            options = (None, None, -100, 0.0, 0.0, reduction, None, False, accum_dtype)
            return function.apply(x, weight, target, *options)[0]

        return loss

    return load


def _cce(*, exact: bool) -> Callable[[], LinearCrossEntropy]:
    """Apple's cut cross entropy. Exact: no gradient is filtered and, where the version can, accumulators are fp32."""

    def load() -> LinearCrossEntropy:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        options: dict[str, Any] = {}
        if exact:
            try:
                importlib.import_module("cut_cross_entropy.cce_utils")
                options = {"impl": "cce_exact"}
            except ModuleNotFoundError:  # before 25.3 the filter is all there is to turn off
                options = {"filter_eps": None}

        def loss(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
            return function(x, weight, target, reduction=reduction, **options)

        return loss

    return load


def _quack(**options: Any) -> Callable[[], CrossEntropy]:
    def load() -> CrossEntropy:
        function = importlib.import_module("quack.cross_entropy").cross_entropy

        def loss(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
            return function(logits, target, reduction=reduction, **options)

        return loss

    return load


def _quack_linear() -> LinearCrossEntropy:
    """Not tuned: where its own kernels do not take the vocabulary, tuning the GEMMs would take minutes."""
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def loss(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return function(x, weight, target, reduction=reduction, tuned=False)

    return loss
