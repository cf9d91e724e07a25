"""What a caller asks for, as one frozen value: validated once, hashable, and the same on every backend."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .errors import require
from .vocab_parallel import VocabParallel

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """As messages, tables and the command line call it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


LARGEST, SMALLEST_FACTOR = 1e30, 1e-30
"""Beyond these, arithmetic in fp32 would overflow or vanish."""
# Written out here: a traced call may see module constants as symbols, which no message can hold.
SCALES, FACTORS = f"a number in [0, {LARGEST}]", f"a number in [{SMALLEST_FACTOR}, {LARGEST}]"
CAPS = f"None or {FACTORS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropyOptions:
    """Options of one loss call. Every value is checked here and nowhere else; the mathematics is in `liger.spec`.

    Raises:
        ValueError: naming the option, the value given and what is allowed.
    """

    ignore_index: int = -100
    """Rows whose target equals this contribute no loss and an exactly zero gradient."""
    reduction: Reduction = "mean"
    """"mean" divides by the weight (core term) or the number (z-loss) of the valid rows; "sum"; "none" keeps rows."""
    label_smoothing: float = 0.0
    """Probability mass in [0, 1] taken from the target and spread uniformly over the vocabulary."""
    lse_square_scale: float = 0.0
    """Z-loss coefficient (>= 0): adds `lse_square_scale * logsumexp(logits)**2` to each row's loss."""
    softcap: float | None = None
    """If given (> 0), logits become `softcap * tanh(logits / softcap)` before anything but `logit_scale`."""
    logit_scale: float = 1.0
    """Multiplies the logits before `softcap`. Positive: 0 would leave no gradient, and no model reverses its logits."""
    return_z_loss: bool = False
    """Also return the z-loss part of the loss (non-differentiable)."""
    return_token_accuracy: bool = False
    """Also return the accuracy of the arg max over valid rows, fp32 (non-differentiable)."""
    return_predicted_tokens: bool = False
    """Also return the arg max of each row, int64, -1 where ignored."""
    loss_dtype: torch.dtype | None = None
    """Dtype of the returned loss (cross_entropy only); None means the input's dtype, rounded once."""
    in_place: bool = False
    """Let the gradient take the logits' own storage (cross_entropy only); the graph becomes single-use."""
    accum_dtype: torch.dtype | None = None
    """Dtype in which the weight's gradient is summed over chunks (FLCE only); None lets the plan choose."""
    use_token_scaling: bool = False
    """Scale each row by the detached probability of its target (FLCE only)."""
    chunk_size: int | None = None
    """Rows of logits that exist at once (FLCE only, >= 1); None lets the plan choose."""
    vocab_parallel: VocabParallel | None = None
    """This rank's part of a vocabulary that is split over a process group; None: all of it is here."""

    def __post_init__(self) -> None:
        require(_is_int(self.ignore_index), "ignore_index", self.ignore_index, "an int of 64 bits")
        reduction: object = self.reduction
        known = isinstance(reduction, str) and reduction in REDUCTIONS
        require(known, "reduction", reduction, "'mean', 'sum' or 'none'")
        smoothing = self.label_smoothing
        require(is_real(smoothing) and 0 <= smoothing <= 1, "label_smoothing", smoothing, "a number in [0, 1]")
        z_scale = self.lse_square_scale
        require(is_real(z_scale) and z_scale >= 0, "lse_square_scale", z_scale, SCALES)
        cap = self.softcap
        require(cap is None or (is_real(cap) and cap >= SMALLEST_FACTOR), "softcap", cap, CAPS)
        factor = self.logit_scale
        require(is_real(factor) and factor >= SMALLEST_FACTOR, "logit_scale", factor, FACTORS)
        for name in _FLAGS:
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in ("loss_dtype", "accum_dtype"):
            dtype = getattr(self, name)
            floating = isinstance(dtype, torch.dtype) and dtype in FLOATING_DTYPES
            require(dtype is None or floating, name, dtype, "None or a floating-point torch.dtype")
        size = self.chunk_size
        require(size is None or (_is_int(size) and size >= 1), "chunk_size", size, "None or an int >= 1")
        split = self.vocab_parallel
        require(split is None or isinstance(split, VocabParallel), "vocab_parallel", split, "None or a VocabParallel")

    def nondefault(self) -> tuple[tuple[str, Any], ...]:
        """The (name, value) pairs that a backend has to admit: a new field is refused until a table row names it.

        Of `vocab_parallel` the number of ranks: what remembers a decision should not hold process groups.
        """
        pairs = [(name, value) for name, default in _DEFAULTS if (value := getattr(self, name)) != default]
        return tuple([(name, value.ranks if name == "vocab_parallel" else value) for name, value in pairs])

    @property
    def keeps_log_p(self) -> bool:
        """Whether the log probability of each row's target is kept: over a split vocabulary no rank alone finds it again."""
        return self.use_token_scaling and self.vocab_parallel is not None

    @property
    def wants_prediction(self) -> bool:
        """Whether the row's arg max is needed at all."""
        return self.return_token_accuracy or self.return_predicted_tokens

    @property
    def wants_extras(self) -> bool:
        """Whether the call returns a `CrossEntropyOutput` instead of the loss alone."""
        return self.return_z_loss or self.wants_prediction


_FLAGS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "in_place", "use_token_scaling")
_DEFAULTS = tuple((field.name, field.default) for field in fields(CrossEntropyOptions))


class CrossEntropyOutput(NamedTuple):
    """What a call with extras returns; what was not asked for is None. Only `loss` is differentiable."""

    loss: Tensor
    """() for mean and sum, the target's shape for none."""
    z_loss: Tensor | None = None
    """The z-loss part of the loss, in the loss's shape and dtype."""
    token_accuracy: Tensor | None = None
    """fp32: () the mean over valid rows, or the target's shape (0 or 1 per row) for none."""
    predicted_tokens: Tensor | None = None
    """int64, the target's shape; the lowest index wins ties, -1 where ignored."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_real(value: object) -> bool:
    """Whether this is a number that arithmetic in fp32 can hold; an int, one of 64 bits."""
    return _is_int(value) or (isinstance(value, float) and -LARGEST <= value <= LARGEST)
