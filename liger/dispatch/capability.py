"""Capability as data: what a device is, what a call asks for, what an implementation needs, and every reason against."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch

from ..options import dtype_name

Op = Literal["cross_entropy", "fused_linear_cross_entropy"]
OPS: tuple[Op, ...] = ("cross_entropy", "fused_linear_cross_entropy")
SHAPE_LETTERS: dict[str, tuple[str, ...]] = {"cross_entropy": ("N", "V"), "fused_linear_cross_entropy": ("N", "V", "H")}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about a device that a decision may use. Build one by hand to ask about hardware you do not have.

    Example:
        >>> DeviceInfo("cuda", (10, 0)), DeviceInfo("rocm"), DeviceInfo("cpu")
    """

    type: str
    """"cuda" (NVIDIA), "rocm" (AMD), "cpu", "xpu", or any other device type of torch."""
    capability: tuple[int, int] | None = None
    """NVIDIA compute capability, such as (9, 0); None elsewhere."""

    def __post_init__(self) -> None:
        kind, version = cast("object", self.type), cast("object", self.capability)
        if not (isinstance(kind, str) and _holds_values(kind)):
            raise ValueError(
                f"type must be 'rocm' or a kind of device that this torch knows and that holds values, got {kind!r}"
            )
        if version is not None and not (isinstance(version, tuple) and [type(part) for part in version] == [int, int]):
            raise ValueError(f"capability must be None or a tuple of two ints such as (9, 0), got {version!r}")

    def __str__(self) -> str:
        return self.type if self.capability is None else f"{self.type} {_dotted(self.capability)}"


def _holds_values(kind: str) -> bool:
    """Whether this is "rocm", which torch calls cuda, or a device type of torch without an index."""
    if kind == "rocm":
        return True
    try:
        return kind != "meta" and torch.device(kind).type == kind
    except RuntimeError:  # no such type
        return False


_device_infos: dict[torch.device, DeviceInfo] = {}


def device_info(device: torch.device) -> DeviceInfo:
    """The facts about the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    info = _device_infos.get(device)
    if info is None:
        if device.type != "cuda":
            info = DeviceInfo(device.type)
        elif torch.version.hip is not None:  # ROCm builds also say "cuda"; their capability numbers mean something else
            info = DeviceInfo("rocm")
        else:
            info = DeviceInfo("cuda", torch.cuda.get_device_capability(device))
        _device_infos[device] = info
    return info


@dataclass(frozen=True, slots=True)
class Request:
    """One call without its tensors; hashable, so that a decision can be remembered."""

    op: Op
    device: DeviceInfo
    dtype: torch.dtype
    """Dtype of the logits; the autocast dtype where autocast decides it."""
    shape: tuple[int, ...]
    """(N, V) for cross_entropy, (N, V, H) for fused_linear_cross_entropy."""
    options: tuple[tuple[str, Any], ...] = ()
    """The non-default (name, value) pairs, and (name, True) for what is given: bias, weight, ce_weight, num_items."""
    aligned: bool = True
    """Whether every row of given logits starts at a multiple of 16 bytes and its elements are neighbours. Only tensors can
    tell: a described call is taken to have such rows."""

    def __str__(self) -> str:
        shape = ", ".join(f"{k}={v}" for k, v in zip(SHAPE_LETTERS[self.op], self.shape, strict=True))
        options = "".join(f", {name}={value}" for name, value in self.options)
        return f"{self.op} on {self.device}, {dtype_name(self.dtype)}, {shape}{options}"


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution that an implementation imports, and the versions it is known to work with: [minimum, below)."""

    name: str
    module: str
    minimum: tuple[int, ...]
    below: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names under which the same distribution ships."""
    parts: tuple[str, ...] = ()
    """Distributions that hold parts of it: one that is installed must be of the same version."""

    def version(self) -> str | None:
        """The version that is installed, under whichever name; None if absent."""
        versions = (installed_version(name) for name in (self.name, *self.aliases))
        return next((version for version in versions if version is not None), None)

    def reason(self) -> str | None:
        """Why this package cannot be used, without importing it; None if nothing is known against it."""
        version = self.version()
        window = f"{_dotted(self.minimum)} <= version < {_dotted(self.below)}"
        if version is None:
            return f"package {self.name} is not installed (needs {window})"
        if not _has_module(self.module):
            return f"package {self.name} {version} is installed, but its module {self.module} is not found"
        if not self.minimum <= release(version) < self.below:
            return f"package {self.name} {version} is outside its window ({window})"
        found = ((part, installed_version(part)) for part in self.parts)
        mixed = [f"{part} {other}" for part, other in found if other not in (None, version)]
        if mixed:
            return f"package {self.name} {version} does not go with {', '.join(mixed)}: install them in one version"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What an implementation can serve. Everything it does not name, it refuses."""

    devices: frozenset[str] | None
    """Device types; None is any."""
    dtypes: frozenset[torch.dtype]
    """Dtypes of the logits."""
    options: frozenset[str]
    """Names of the options honoured at values other than their default."""
    archs: frozenset[tuple[int, int]] | None = None
    """Exact NVIDIA compute capabilities, for kernels built on instructions of one architecture; None is any."""
    min_capability: tuple[int, int] | None = None
    """Lowest NVIDIA compute capability that portable kernels' compiler supports."""
    packages: tuple[Package, ...] = ()
    interpreter: str | None = None
    """Environment variable that, set to 1, makes the kernels run on CPU tensors as well."""
    rule: Callable[[Request], str | None] | None = None
    """What data cannot say: returns a reason against the request, or None."""

    def reasons(self, request: Request) -> tuple[str, ...]:
        """Every reason why this cannot serve `request`; empty means it can."""
        out: list[str] = []
        device = request.device
        interpreted = device.type == "cpu" and self.interpreter is not None and os.environ.get(self.interpreter) == "1"
        if self.devices is not None and device.type not in self.devices and not interpreted:
            hint = f"; cpu with {self.interpreter}=1" if self.interpreter and device.type == "cpu" else ""
            out.append(f"device {device.type} (supported: {', '.join(sorted(self.devices))}{hint})")
        elif device.type == "cuda":
            given = "unknown" if device.capability is None else _dotted(device.capability)
            if self.archs is not None and device.capability not in self.archs:
                out.append(f"compute capability {given} (supported: {', '.join(map(_dotted, sorted(self.archs)))})")
            if self.min_capability is not None and (device.capability or (0, 0)) < self.min_capability:
                out.append(f"compute capability {given} (needs at least {_dotted(self.min_capability)})")
        if request.dtype not in self.dtypes:
            out.append(f"dtype {dtype_name(request.dtype)} (supported: {', '.join(sorted(map(dtype_name, self.dtypes)))})")
        out += [f"{name}={value} is not supported" for name, value in request.options if name not in self.options]
        out += [reason for package in self.packages if (reason := package.reason()) is not None]
        if self.rule is not None and (reason := _outcome(self.rule, request)) is not None:
            out.append(reason)
        return tuple(out)


def _outcome(rule: Callable[[Request], str | None], request: Request) -> str | None:
    try:
        return rule(request)
    except Exception as error:  # a broken backend is a reason, whatever it raised
        return f"its rule raised {type(error).__name__}: {error}"


@lru_cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, read from its metadata (nothing is imported); None if absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache
def _has_module(module: str) -> bool:
    top = module.partition(".")[0]  # finding a submodule would import its parent
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):  # a finder refused, or it is in sys.modules without a __spec__
        return True  # importing it is what will tell


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.7.1+git" -> (3, 7, 1)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
