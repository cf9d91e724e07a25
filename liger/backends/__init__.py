"""THE TABLE: every implementation, what it needs, in order of preference. Reading this file tells what runs where.

A backend is a module that provides the row kernels below and nothing else: tensors are checked, chunked, reduced and
differentiated in one place for all of them. To add one: write the module, add (or `register`) a row.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol, runtime_checkable

from torch import Tensor, bfloat16, cuda, float16, float32, float64  # the name torch is a backend's here

from ..dispatch import Capability, Implementation, Op, Package, Request, register
from ..dispatch.capability import installed_version, release
from ..exchange import Turn
from ..spec import RowInputs, RowResults, RowStats

F16, BF16, F32, F64 = float16, bfloat16, float32, float64


class RowKernels(Protocol):
    """What a backend's module defines. `logits` is (n, V), any row stride; its gradient has its shape and dtype.

    Nothing here waits for the device.
    """

    def rows(self, logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None) -> None:
        """Write every row's `results` and, if `grad` (n, V) is given (it may be `logits` itself), its gradient."""

    def row_stats(self, logits: Tensor, inputs: RowInputs) -> RowStats:
        """Statistics of rows over the vocabulary range that `logits` covers."""

    def row_grad(self, logits: Tensor, inputs: RowInputs, lse: Tensor, grad_loss: Tensor, grad: Tensor) -> None:
        """Write the gradient into `grad` (it may be `logits` itself) from known `lse`, times `grad_loss` (n,) any stride."""

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply by a 0-D factor in place; a factor of exactly 1 changes no bit."""


@runtime_checkable
class ExchangingKernels(RowKernels, Protocol):
    """Row kernels that need no collective between statistics and gradient where GPUs reach each other's memory."""

    def exchanged_rows(self, logits: Tensor, inputs: RowInputs, results: RowResults, grad: Tensor | None, turn: Turn) -> None:
        """As `rows`, of a part of the vocabulary: `results` are over the whole, exchanged with the other ranks meanwhile.

        Every rank calls it with as many rows, and at least one class; there is no smoothing, token scaling or prediction.
        """


LOSS = frozenset({"ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap", "logit_scale", "num_items"})
EXTRAS = frozenset({"return_z_loss", "return_token_accuracy", "return_predicted_tokens"})
CROSS_ENTROPY = LOSS | EXTRAS | {"weight"}
LINEAR = LOSS | EXTRAS | {"ce_weight", "bias", "accum_dtype", "use_token_scaling", "chunk_size"}
SPLIT = frozenset({"vocab_parallel"})
"""Of rows whose `row_stats` and `row_grad` take a part of the vocabulary: the inputs' `start`, `vocab`, `target_weight`."""

INTERPRETER = "TRITON_INTERPRET"
TRITON = Package("triton", "triton", minimum=(3, 3), below=(4,), aliases=("pytorch-triton-rocm",))
CUTEDSL = Package(
    "nvidia-cutlass-dsl",
    "cutlass",
    minimum=(4, 8),
    below=(5,),
    parts=tuple(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
)
BULK_COPY_BYTES = 16


def _interpreter_fits(request: Request) -> str | None:
    """TRITON_INTERPRET takes effect when triton is imported: a later change is none. The interpreter needs NumPy."""
    asked = request.device.type == "cpu" and os.environ.get(INTERPRETER) == "1"
    if asked and (reason := _numpy_reason()) is not None:
        return reason
    language = sys.modules.get("triton.language")
    if language is None:
        return None
    interprets = type(language.max).__name__ == "InterpretedFunction"
    if asked and not interprets:
        return f"{INTERPRETER} was set after triton was imported: set it before"
    if request.device.type != "cpu" and interprets and cuda.is_available():
        return f"triton was imported with {INTERPRETER}=1, so its kernels run on the CPU only in this process"
    return None


def _numpy_reason() -> str | None:
    """Why the installed NumPy, which GPUs do not need, rules the interpreter out (seen by test/installations.py)."""
    numpy, triton = installed_version("numpy"), TRITON.version()
    if numpy is None:
        return f"{INTERPRETER}=1 needs the package numpy, which is not installed"
    if triton is not None and release(triton) < (3, 7) and release(numpy) >= (2, 4):
        return f"the interpreter of triton {triton} fails with numpy {numpy}: install triton >= 3.7 or numpy < 2.4"
    return None


def _bulk_copies(request: Request) -> str | None:
    """Rows start at multiples of 16 bytes and are such multiples long: they are copied in bulk."""
    vocab = request.shape[1]
    row_bytes = vocab * request.dtype.itemsize
    if row_bytes % BULK_COPY_BYTES:
        return f"a row of V={vocab} has {row_bytes} bytes, which is no multiple of {BULK_COPY_BYTES}"
    if not request.aligned:
        return f"the logits' rows do not all start at multiples of {BULK_COPY_BYTES} bytes with neighbouring elements"
    return None


def _cutedsl(op: Op, options: frozenset[str]) -> Implementation:
    """Kernels for the architectures whose bulk copies, clusters and barriers they use."""
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({F16, BF16, F32}),
        options=options,
        archs=frozenset({(9, 0), (10, 0), (10, 3)}),
        packages=(CUTEDSL,),
        rule=_bulk_copies,
    )
    return Implementation(op=op, backend="cutedsl", module="liger.backends.cutedsl", capability=capability)


def _triton(op: Op, options: frozenset[str]) -> Implementation:
    """Portable kernels for any GPU that Triton itself supports, and for CPU tensors under its interpreter."""
    capability = Capability(
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({F16, BF16, F32}),
        options=options,
        min_capability=(8, 0),
        packages=(TRITON,),
        interpreter=INTERPRETER,
        rule=_interpreter_fits,
    )
    return Implementation(op=op, backend="triton", module="liger.backends.triton", capability=capability)


for implementation in (
    # CuTe DSL comes first: a row is held on chip and device memory read once, whatever the L2 does. On (9, 0) it measured
    # faster: forward and backward of a mean took 1.08 times the floor at V = 128256 and 151936, Triton's 1.23 and 1.24; 1.19
    # against 1.18 at V = 32000; alike for "none" (H200, 2026-11-30, benchmark/data/cross_entropy_h200.csv). It is compiled for
    # (10, 0) and (10, 3), and was not run there. Not SPLIT: a rank's part of a vocabulary may end within a vector, which no
    # request tells.
    _cutedsl("cross_entropy", CROSS_ENTROPY),
    _cutedsl("fused_linear_cross_entropy", LINEAR),
    _triton("cross_entropy", CROSS_ENTROPY | SPLIT | {"loss_dtype", "in_place"}),
    _triton("fused_linear_cross_entropy", LINEAR | SPLIT),
    # The reference: any device, every dtype; checks target values and keeps saved gradients intact.
    Implementation(
        op="cross_entropy",
        backend="torch",
        module="liger.backends.torch",
        capability=Capability(devices=None, dtypes=frozenset({F16, BF16, F32, F64}), options=CROSS_ENTROPY | SPLIT),
        checks_target=True,
        consumes_saved=False,
    ),
    Implementation(
        op="fused_linear_cross_entropy",
        backend="torch",
        module="liger.backends.torch",
        capability=Capability(devices=None, dtypes=frozenset({F16, BF16, F32, F64}), options=LINEAR | SPLIT),
        checks_target=True,
        consumes_saved=False,
    ),
):
    register(implementation)
