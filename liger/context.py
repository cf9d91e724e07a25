"""What surrounds a call: autocast, and graphs being captured or traced."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "ipu", "xla"})
"""Asking about any other device type is an error in torch."""


def recording(tensor: Tensor) -> bool:
    """Whether a graph that cannot wait for the host is being made: traced, or captured on the tensor's device."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def on_host(tensor: Tensor) -> bool:
    """Whether reading its value waits for nothing."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast projects in on the tensor's device; None where it is off."""
    device = tensor.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, every dtype is what the code says."""
    if autocast_dtype(tensor) is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)
