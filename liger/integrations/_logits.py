"""What adapters share: a loss per token in the dtype it is computed in."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..context import autocast_dtype
from ..functional import liger_cross_entropy


def per_token_loss(logits: Tensor, target: Tensor, *, reduction: Any = "none", **options: Any) -> Tensor:
    """`liger_cross_entropy` with its loss in fp32, or fp64 of fp64 logits.

    Under autocast every backend's loss is: none rounds it to the logits' dtype, and none has to admit an option for it.
    """
    wide = logits.dtype in (torch.float32, torch.float64) or autocast_dtype(logits) is not None
    with contextlib.nullcontext() if wide else torch.autocast(logits.device.type):
        loss = liger_cross_entropy(logits, target, reduction=reduction, **options)
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected the loss alone, got {type(loss).__name__}")
    return loss
