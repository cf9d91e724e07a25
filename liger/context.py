"""What surrounds a call: autocast, tracing, the thread's device context, and whether the host may wait for the device."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "ipu", "xla"})
"""Asking about any other device type is an error in torch."""


SYNC_IS_AN_ERROR = 2
"""What `torch.cuda.get_sync_debug_mode` says after `set_sync_debug_mode("error")`."""


def is_traced(tensor: Tensor) -> bool:
    """Whether it has a shape and no values: a graph is being traced, or only sizes are wanted of what is run."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def holding(tensor: Tensor) -> Tensor:
    """A tensor of the same values in memory of its own, which is where kernels read: the given one, if its memory has them.

    That of a collective that has not been waited for has not, and that of a lazily negated tensor has their negatives.
    """
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:
        tensor = tensor.clone() if tensor.requires_grad else wait()  # waiting itself is not differentiable
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def may_wait(tensor: Tensor) -> bool:
    """Whether the host may wait for the tensor's device.

    It may not while a graph is being traced, or captured on that device, nor where `torch.cuda.set_sync_debug_mode("error")`
    says that waiting is a mistake.
    """
    if is_traced(tensor):
        return False
    if not tensor.is_cuda:
        return True
    return torch.cuda.get_sync_debug_mode() != SYNC_IS_AN_ERROR and not torch.cuda.is_current_stream_capturing()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def make_context_current(device: int) -> None:
    """See that this thread has the GPU's context, without which cuBLAS warns and no kernel can be loaded.

    Any use of the GPU makes it current; but backward runs on threads of autograd's own, where ours may be the first.
    """
    if device not in _thread.devices:
        torch.cuda.mem_get_info(device)
        _thread.devices.add(device)


def on_host(tensor: Tensor) -> bool:
    """Whether reading its value waits for nothing."""
    return tensor.is_cpu and not is_traced(tensor)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast projects in on the tensor's device; None where it is off."""
    device = tensor.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def projected_dtype(hidden: Tensor) -> torch.dtype:
    """What a linear head gives of these hidden states: autocast leaves float64 alone."""
    return hidden.dtype if hidden.dtype == torch.float64 else autocast_dtype(hidden) or hidden.dtype


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, every dtype is what the code says."""
    if autocast_dtype(tensor) is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def in_backward(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """What a backward pass with a tensor runs in: on a thread that has its GPU's context, and without autocast."""
    if tensor.is_cuda:
        make_context_current(tensor.get_device())
    return without_autocast(tensor)
