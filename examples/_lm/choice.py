"""Which backend an example's loss gets, asked before anything is trained."""

from __future__ import annotations

import torch

import liger
from _lm.text import InputError
from liger.dispatch import Explanation


def one_line(error: Exception) -> str:
    """Join a message of several lines."""
    return " ".join(str(error).split())


def chosen_backend(
    what: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], backend: str | None
) -> Explanation:
    """The answer for fused linear cross entropy of a shape (N, V, H).

    Raises:
        InputError: no backend can run `what`, with the reasons of each; or there is none of the name.
    """
    try:
        answer = liger.explain("fused_linear_cross_entropy", device=device, dtype=dtype, shape=shape, backend=backend)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    if answer.chosen is None:
        reasons = " | ".join(f"{name}: {'; '.join(why)}" for name, why in answer.rows)
        raise InputError(f"no backend can run {what} on {device}: {reasons}")
    return answer
