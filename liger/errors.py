"""How a caller is told that a value cannot be used."""

from __future__ import annotations


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError that names the argument, what is allowed and what was given, unless it holds."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
