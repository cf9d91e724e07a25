"""Megatron-Core's vocab-parallel cross entropies, by their names and signatures.

    megatron.core.tensor_parallel.vocab_parallel_cross_entropy = liger.integrations.megatron.vocab_parallel_cross_entropy

As there, equal parts, every column a class, and a loss per token in fp32. Otherwise: the logits are not overwritten, and of
fp64 ones the loss is fp64; one collective, or none, and not three; label smoothing spreads over the whole vocabulary and
not over each rank's part; targets of -100 give 0, and others outside of the vocabulary NaN, not a finite number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..vocab_parallel import VocabParallel
from ._logits import per_token_loss


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Cross entropy per token of logits that are split over tensor parallel ranks.

    Args:
        vocab_parallel_logits: (s, b, V / ranks).
        target: (s, b) ids of the whole vocabulary.
        label_smoothing: in [0, 1): mass that the V - 1 other classes share, so e = label_smoothing * V / (V - 1) in the
            equations of `liger.spec`.
        tp_group: the process group; None is Megatron-Core's tensor model parallel group.

    Returns:
        (s, b) fp32, or fp64 of fp64 logits.

    Raises:
        ValueError: an argument is out of range, or there is no group.

    Example:
        >>> loss = vocab_parallel_cross_entropy(logits, labels, tp_group=group)
    """
    split = _split(vocab_parallel_logits, tp_group)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing!r}")
    vocab = split.vocab_size
    e = label_smoothing * vocab / max(vocab - 1, 1)
    if e > min(vocab - 1, 1):  # of one class there are no others
        raise ValueError(f"label_smoothing must be at most (V - 1) / V for V = {vocab}, got {label_smoothing!r}")
    return per_token_loss(vocab_parallel_logits, target, vocab_parallel=split, label_smoothing=e)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """`vocab_parallel_cross_entropy` without label smoothing.

    Example:
        >>> loss = fused_vocab_parallel_cross_entropy(logits, labels, group)
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group)


def _split(logits: Tensor, group: Any) -> VocabParallel:
    if group is None:
        try:
            from megatron.core.parallel_state import (  # type: ignore[import-not-found, unused-ignore]
                get_tensor_model_parallel_group,
            )
        except ImportError as error:
            raise ValueError(f"tp_group must be given where Megatron-Core cannot be imported ({error})") from error
        group = get_tensor_model_parallel_group()
    return VocabParallel.equal(logits.shape[-1], group)
