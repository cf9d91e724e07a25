"""Cross entropy and fused linear cross entropy for training language models, on the backend that fits the call.

`explain` says which implementation a call would get and why; `python -m liger` says it for this machine.
"""

from .dispatch import DeviceInfo, UnsupportedError, register
from .functional import explain, liger_cross_entropy, liger_fused_linear_cross_entropy
from .modules import (
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
)
from .options import CrossEntropyOutput
from .vocab_parallel import VocabParallel

__version__ = "0.1.0"

__all__ = [
    "CrossEntropyOutput",
    "DeviceInfo",
    "LigerCrossEntropyFunction",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "UnsupportedError",
    "VocabParallel",
    "explain",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "register",
]
