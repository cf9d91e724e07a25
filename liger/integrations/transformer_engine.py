"""Transformer Engine's `parallel_cross_entropy`, by its name and signature.

    transformer_engine.pytorch.parallel_cross_entropy = liger.integrations.transformer_engine.parallel_cross_entropy

As there: equal parts, a loss per token or their mean over the tokens that are not ignored, in fp32. Otherwise: `inp` is not
overwritten, and may be fp64, which gives fp64.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..spec import compute_dtype
from ..vocab_parallel import VocabParallel
from ._logits import per_token_loss


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    z_loss_weight: float = 0.0,
    *,
    _input: Tensor | None = None,
    return_log_sum_exp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of logits whose vocabulary may be split over a process group.

    Args:
        inp: (b, s, V / ranks) or (s, b, V / ranks).
        target: (b, s) or (s, b) ids of the whole vocabulary.
        label_smoothing: in [0, 1], spread uniformly over the whole vocabulary.
        reduce_loss: return the sum over the tokens divided by the number of those that are not ignored.
        dist_process_group: None is one device with the whole vocabulary.
        ignore_idx: tokens with this target give 0.
        is_cg_capturable: any call is; nothing to choose.
        z_loss_weight: adds `z_loss_weight * logsumexp(logits)**2`.
        _input: the older name of `inp`, used in place of what is given as `inp`, which has to be there as well.
        return_log_sum_exp: also return the logsumexp per token, which torch computes from a copy of the logits in fp32.

    Returns:
        (b, s) or (s, b) fp32, or fp64 of fp64 logits; () with `reduce_loss`. With `return_log_sum_exp` a pair with
        (b, s) or (s, b) of the same dtype, not differentiable and 0 for ignored tokens.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> loss = parallel_cross_entropy(logits, labels, reduce_loss=True, dist_process_group=group)
    """
    if _input is not None:
        warnings.warn("_input is deprecated: use inp", FutureWarning, stacklevel=2)
        inp = _input
    split = None if dist_process_group is None else VocabParallel.equal(inp.shape[-1], dist_process_group)
    loss = per_token_loss(
        inp,
        target,
        vocab_parallel=split,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
        ignore_index=ignore_idx,
        lse_square_scale=z_loss_weight,
    )
    if not return_log_sum_exp:
        return loss
    lse = torch.logsumexp(inp.detach().to(compute_dtype(inp.dtype)), -1)
    if split is not None:
        lse = torch.logsumexp(split.gather(lse), 0)
    return loss, lse.masked_fill(target == ignore_idx, 0)
