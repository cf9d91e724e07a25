"""What adapters of losses on given logits share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import liger_cross_entropy


def per_token_loss(logits: Tensor, target: Tensor, *, reduction: Any = "none", **options: Any) -> Tensor:
    """`liger_cross_entropy` with its loss in fp32; on a device whose backend rounds it, of logits in fp32."""
    if logits.dtype not in (torch.float16, torch.bfloat16):
        loss = liger_cross_entropy(logits, target, reduction=reduction, **options)
    elif logits.is_cuda:
        loss = liger_cross_entropy(logits, target, reduction=reduction, loss_dtype=torch.float32, **options)
    else:
        loss = liger_cross_entropy(logits.float(), target, reduction=reduction, **options)
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected the loss alone, got {type(loss).__name__}")
    return loss
