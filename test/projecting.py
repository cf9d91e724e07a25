"""Rows that are projected before it is known how many there are, where tests are too small for that or have no GPU."""

import contextlib

import pytest
import torch

from liger.backends import ahead, linear

_kernel = linear.project_ahead


def project(x, count, weight, bias, logits):
    """The GPU's kernel, or what stands for it where it does not run."""
    if x.is_cuda and ahead.fits(weight) and ahead.runs_on(x.device):
        _kernel(x, count, weight, bias, logits)
        return
    rows = min(x.shape[0], int(count))
    product = x[:rows].float() @ weight.t().float() if x.dtype != torch.float64 else x[:rows] @ weight.t()
    logits[:rows] = product if bias is None else product + bias


@contextlib.contextmanager
def projected_ahead(rows):
    """The fused loss projects up to so many rows ahead, half a chunk at most, as it does with large heads on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "rows_ahead", lambda weight, plan, kernels: min(rows, plan.chunk_rows // 2))
        patch.setattr(linear, "project_ahead", project)
        yield
