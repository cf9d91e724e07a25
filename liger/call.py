"""One call as a value: its tensors, and its `Recipe` of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import spec
from .dispatch import Op, Request, device_info
from .options import CrossEntropyOptions

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of (input, weight, bias); None where not wanted."""


Numbers = tuple[int, float, float, float | None, float, int | None]
NUMBERS = ("ignore_index", "label_smoothing", "lse_square_scale", "softcap", "logit_scale", "chunk_size")
"""The options that are numbers."""


class Needs(NamedTuple):
    """Which gradients the caller wants."""

    input: bool
    weight: bool
    bias: bool


def gradient_waits(options: CrossEntropyOptions, logits_dtype: torch.dtype) -> bool:
    """Whether gradients have to be made in backward.

    "none" has an upstream gradient per row; in fp16, probabilities, 1/D or small weights would underflow in a gradient without
    its loss scale.
    """
    return options.reduction == "none" or logits_dtype == torch.float16


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a call's tensors do not say; hashable, and a string where a traced graph has to carry it."""

    options: CrossEntropyOptions
    needs: Needs
    logits_dtype: torch.dtype
    """Dtype of the logits: the input's, or the one autocast projects in."""
    loss_dtype: torch.dtype
    gradient_in_backward: bool
    """Whether gradients wait for the upstream gradient and are made in backward."""
    backend: str | None

    @property
    def gradient_in_forward(self) -> bool:
        """Whether gradients are made together with the loss."""
        return any(self.needs) and not self.gradient_in_backward

    def encode(self) -> tuple[str, Numbers]:
        """The recipe as a text and numbers, which a graph carries apart: under dynamic shapes numbers may be symbols."""
        options = self.options
        words = [f"{name}={value}" for name, value in options.nondefault() if name not in NUMBERS]
        needs = "".join([str(int(need)) for need in self.needs])
        rest = [needs, str(self.logits_dtype), str(self.loss_dtype), str(self.gradient_in_backward), self.backend or ""]
        numbers: Any = tuple([getattr(options, name) for name in NUMBERS])
        return ";".join(rest + words), numbers

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str, *numbers: float | None) -> Recipe:
        """The recipe that `encode` wrote; without numbers, one whose numbers are the defaults."""
        needs, logits_dtype, loss_dtype, in_backward, backend, *words = text.split(";")
        options: dict[str, Any] = dict(zip(NUMBERS, numbers, strict=True)) if numbers else {}
        options |= {name: _value(value) for name, value in (word.split("=") for word in words)}
        return Recipe(
            options=CrossEntropyOptions(**options),
            needs=Needs(*[digit == "1" for digit in needs]),
            logits_dtype=_value(logits_dtype),
            loss_dtype=_value(loss_dtype),
            gradient_in_backward=_value(in_backward),
            backend=backend or None,
        )


def _value(text: str) -> Any:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return {"True": True, "False": False, "None": None}.get(text, text)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A checked call, flattened to rows. N rows, V vocabulary, H hidden."""

    input: Tensor
    """(N, V) logits, or (N, H) hidden states when `weight` is given. With `vocab_parallel`: logits, weight and bias have
    this rank's classes, and with `sequence_parallel` hidden states its tokens."""
    target: Tensor
    """(N,) int64 or int32."""
    weight: Tensor | None
    """(V, H) of the head, for fused linear cross entropy."""
    bias: Tensor | None
    """(V,) of the head."""
    class_weight: Tensor | None
    """(V,) of the whole vocabulary"""
    recipe: Recipe
    num_items: Tensor | None = None
    """() on the device of `input`: what the mean divides by; None is the valid rows."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """All tensors, in the order of the fields."""
        return self.input, self.target, self.weight, self.bias, self.class_weight, self.num_items

    @property
    def options(self) -> CrossEntropyOptions:
        """The caller's options."""
        return self.recipe.options

    @property
    def op(self) -> Op:
        """Which loss this is."""
        return "cross_entropy" if self.weight is None else "fused_linear_cross_entropy"

    @property
    def head(self) -> Tensor:
        """`weight`, of a fused call."""
        if self.weight is None:
            raise RuntimeError("cross_entropy has logits, and no head")
        return self.weight

    @property
    def rows(self) -> int:
        """N"""
        return self.target.shape[0]

    @property
    def vocab(self) -> int:
        """V, wherever its classes are."""
        if self.options.vocab_parallel is not None:
            return self.options.vocab_parallel.vocab_size
        return self.input.shape[1] if self.weight is None else self.weight.shape[0]

    def row_inputs(self, labelled: Tensor | None = None) -> spec.RowInputs:
        """What the row kernels need beside the logits. `labelled`: () number of labelled rows, if it has been counted."""
        weight, weight_sum, target_weight = self.class_weight, None, None
        dtype = spec.compute_dtype(self.recipe.logits_dtype)
        if weight is not None:
            weight = weight.detach().to(dtype).contiguous()
            weight_sum = weight.sum() if self.options.label_smoothing else None
            target_weight = spec.target_weight(self.target, weight)
        divisors = spec.divisors(self.target, weight, self.options, dtype, self.num_items, labelled)
        inputs = spec.RowInputs(self.target, self.options, divisors, weight, weight_sum, target_weight)
        split = self.options.vocab_parallel
        if split is None:
            return inputs
        own = None if weight is None else weight[split.start : split.start + split.classes]
        return inputs._replace(class_weight=own, start=split.start, vocab=split.vocab_size)

    def request(self) -> Request:
        """The call without its tensors."""
        given: tuple[tuple[str, Tensor | None], ...] = (("weight", self.class_weight),)
        if self.weight is not None:
            given = (("ce_weight", self.class_weight), ("bias", self.bias))
        given += (("num_items", self.num_items),)
        flags = tuple((name, True) for name, tensor in given if tensor is not None)
        shape = (self.rows, self.vocab) if self.weight is None else (self.rows, self.vocab, self.input.shape[1])
        options = self.options.nondefault() + flags
        aligned = self.weight is not None or _aligned(self.input)  # the fused loss's logits are a buffer of its own
        return Request(self.op, device_info(self.input.device), self.recipe.logits_dtype, shape, options, aligned)


def _aligned(logits: Tensor) -> bool:
    """As `Request.aligned` says."""
    (n, _), (row_stride, stride) = logits.shape, logits.stride()
    row_bytes = row_stride * logits.element_size() if n > 1 else 0
    try:
        address = logits.data_ptr()
    except RuntimeError:  # a function transform's tensor has none, and autograd is about to refuse it
        address = 0
    return stride == 1 and row_bytes % 16 == 0 and address % 16 == 0
