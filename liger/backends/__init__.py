"""THE TABLE: every implementation, what it needs, in order of preference. Reading this file tells what runs where.

A backend is a module that provides the row kernels below and nothing else: tensors are checked, chunked, reduced and
differentiated in one place for all of them. To add one: write the module, add (or `register`) a row.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

import torch
from torch import Tensor

from ..dispatch import Capability, Implementation, Op, Package, Request, register
from ..spec import RowInputs, RowResults, RowStats

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class RowKernels(Protocol):
    """What a backend's module defines. `logits` is (n, V), any row stride; nothing here waits for the device."""

    def rows(self, logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
        """Write every row's `results` and, if `grad` (n, V) is given (it may be `logits` itself), its gradient."""

    def row_stats(self, logits: Tensor, inputs: RowInputs) -> RowStats:
        """Statistics of rows over the vocabulary range that `logits` covers."""

    def row_grad(self, logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
        """Write the gradient into `grad` (it may be `logits` itself) from known `lse`, times `grad_loss` (n,) any stride."""

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply by a 0-D factor in place; a factor of exactly 1 changes no bit."""


LOSS = frozenset({"ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap"})
EXTRAS = frozenset({"return_z_loss", "return_token_accuracy", "return_predicted_tokens"})
CROSS_ENTROPY = LOSS | EXTRAS | {"weight"}
LINEAR = LOSS | EXTRAS | {"ce_weight", "bias", "accum_dtype", "use_token_scaling", "chunk_size"}

INTERPRETER = "TRITON_INTERPRET"
TRITON = Package("triton", "triton", minimum=(3, 2), below=(4,))


def _loaded_for_the_interpreter(request: Request) -> str | None:
    """On CPU tensors: kernels that were loaded before TRITON_INTERPRET was set are compiled ones."""
    module = sys.modules.get("liger.backends.triton")
    if request.device.type != "cpu" or module is None or module.IS_INTERPRETED or os.environ.get(INTERPRETER) != "1":
        return None
    return f"{INTERPRETER} was set after the kernels were loaded: set it before the first call"


def _triton(op: Op, options: frozenset[str]) -> Implementation:
    """Portable kernels for any GPU that Triton itself supports, and for CPU tensors under its interpreter."""
    capability = Capability(
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({F16, BF16, F32}),
        options=options,
        min_capability=(8, 0),
        packages=(TRITON,),
        interpreter=INTERPRETER,
        rule=_loaded_for_the_interpreter,
    )
    return Implementation(op=op, backend="triton", module="liger.backends.triton", capability=capability)


for implementation in (
    _triton("cross_entropy", CROSS_ENTROPY | {"loss_dtype", "in_place"}),
    _triton("fused_linear_cross_entropy", LINEAR),
    # The reference: any device, every dtype; checks target values and keeps saved gradients intact.
    Implementation(
        op="cross_entropy",
        backend="torch",
        module="liger.backends.torch",
        capability=Capability(devices=None, dtypes=frozenset({F16, BF16, F32, F64}), options=CROSS_ENTROPY),
        checks_target=True,
        consumes_saved=False,
    ),
    Implementation(
        op="fused_linear_cross_entropy",
        backend="torch",
        module="liger.backends.torch",
        capability=Capability(devices=None, dtypes=frozenset({F16, BF16, F32, F64}), options=LINEAR),
        checks_target=True,
        consumes_saved=False,
    ),
):
    register(implementation)
