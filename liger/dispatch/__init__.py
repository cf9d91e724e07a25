"""Which implementation runs a call, and why. Importing this touches no kernel, no DSL and no device."""

from .capability import OPS, SHAPE_LETTERS, Capability, DeviceInfo, Op, Package, Request, device_info
from .registry import Explanation, Implementation, UnsupportedError, backends, explain_request, register, resolve, table

__all__ = [
    "OPS",
    "SHAPE_LETTERS",
    "Capability",
    "DeviceInfo",
    "Explanation",
    "Implementation",
    "Op",
    "Package",
    "Request",
    "UnsupportedError",
    "backends",
    "device_info",
    "explain_request",
    "register",
    "resolve",
    "table",
]
