"""The table of implementations, and the one place that picks a row of it."""

from __future__ import annotations

import importlib
import logging
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .capability import OPS, Capability, Op, Request

if TYPE_CHECKING:
    from ..backends import RowKernels
    from ..backends.plan import Plan

ENVIRONMENT_VARIABLE = "LIGER_BACKEND"
AUTO = ("", "auto")
MEMO_SIZE = 1024  # numbers of rows vary without bound

logger = logging.getLogger("liger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One op on one backend: a row of the table."""

    op: Op
    backend: str
    module: str
    """Dotted path of a module that provides `liger.backends.RowKernels`; imported when first chosen."""
    capability: Capability
    checks_target: bool = False
    """Whether target values are checked before the call (this reads them on the host). Otherwise bad rows become NaN."""
    consumes_saved: bool = True
    """Whether a backward with an upstream gradient other than 1 uses the saved gradient up, even in a retained graph."""

    def kernels(self) -> RowKernels:
        """The loaded module.

        Raises:
            Exception: whatever importing it raised.
        """
        module = _loaded.get(self.module)
        if module is None:
            module = _loaded[self.module] = cast("RowKernels", importlib.import_module(self.module))
        return module

    def reasons(self, request: Request) -> tuple[str, ...]:
        """Every reason against serving `request`, a module that fails to import included; empty means it can."""
        return self.capability.reasons(request) or self._import_failure()

    def _import_failure(self) -> tuple[str, ...]:
        if self.module not in _failed:
            try:
                self.kernels()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a broken package is a reason, whatever it raised: SystemExit too
                _failed[self.module] = f"{self.module} failed to import: {type(error).__name__}: {error}"
        return (_failed[self.module],) if self.module in _failed else ()


class UnsupportedError(ValueError):
    """No implementation that may be used can serve the call."""

    def __init__(self, request: Request, reasons: tuple[tuple[str, tuple[str, ...]], ...], source: str) -> None:
        self.request = request
        """The `Request` that was refused."""
        self.reasons = reasons
        """((backend, reasons), ...) in order of preference."""
        lines = [f"  {backend}: {'; '.join(why)}" for backend, why in reasons]
        self._source = source
        super().__init__(f"no backend can run {request} (backend from {source}):\n" + "\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:  # an error of a worker process has to reach its parent
        return UnsupportedError, (self.request, self.reasons, self._source)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which implementation a call would get, and why not the others. `str()` is a readable table."""

    request: Request
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """((backend, reasons), ...) in order of preference; empty reasons: it could run the call."""
    chosen: str | None
    """The backend that would run the call; None if nothing fits."""
    source: str
    """Where the choice came from: "argument", "environment" or "auto"."""
    plan: Plan | None = None
    """How the fused linear cross entropy would be cut into chunks; None for cross_entropy or when nothing fits."""

    def __str__(self) -> str:
        width = max(len(backend) for backend, _ in self.rows)
        lines = [str(self.request)]
        for backend, reasons in self.rows:
            if reasons:
                verdict = "no: " + "; ".join(reasons)
            else:
                verdict = "chosen" if backend == self.chosen else "yes"
            lines.append(
                textwrap.fill(verdict, 116, initial_indent=f"  {backend:{width}}  ", subsequent_indent=" " * (width + 8))
            )
        return "\n".join([*lines, *self.footer()])

    def footer(self) -> list[str]:
        """The decision and the plan, a line each."""
        plan = [] if self.plan is None else [f"  plan: {self.plan}"]
        return [f"  -> {self.chosen or 'nothing fits'} ({self.source})", *plan]


_table: list[Implementation] = []
_interpreters: list[str] = []
"""Environment variables that rows of the table look at."""
_loaded: dict[str, RowKernels] = {}
_failed: dict[str, str] = {}
"""Why a module could not be imported: not tried again for every shape of a call, until the table changes."""
_memo: dict[tuple[Any, ...], Implementation] = {}
_reported: set[tuple[Any, ...]] = set()


def register(implementation: Implementation, *, first: bool = False) -> Callable[[], None]:
    """Add a backend's implementation of an op to the table, at the end or, with `first`, before all others.

    Args:
        implementation: the row; its module is imported only when a call gets it.
        first: prefer it to every row present.

    Returns:
        A function that takes the row out again.

    Example:
        >>> remove = liger.register(Implementation(op="cross_entropy", backend="mine", module="my.kernels", capability=...))
    """
    if not isinstance(implementation, Implementation):
        raise ValueError(f"implementation must be a liger.dispatch.Implementation, got {implementation!r}")
    if implementation.op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {implementation.op!r}")
    if not implementation.backend.isidentifier() or implementation.backend in AUTO:
        raise ValueError(f"backend must be a name (letters, digits, _) other than auto, got {implementation.backend!r}")
    _table.insert(0 if first else len(_table), implementation)
    _forget()

    def remove() -> None:
        if implementation in _table:
            _table.remove(implementation)
            _forget()

    return remove


def _forget() -> None:
    _memo.clear()
    _failed.clear()
    _interpreters[:] = dict.fromkeys(row.capability.interpreter for row in _table if row.capability.interpreter)


def check_backend(name: object, where: str = "backend") -> None:
    """Raise ValueError, which names `where` it came from, unless this is None, "", "auto" or the name of a backend."""
    if name is not None and (not isinstance(name, str) or name not in (*AUTO, *backends())):
        raise ValueError(f"{where} must be one of {', '.join(('auto', *backends()))}, got {name!r}")


def table(op: Op) -> tuple[Implementation, ...]:
    """The implementations of an op in order of preference."""
    return tuple(row for row in _table if row.op == op)


def backends() -> tuple[str, ...]:
    """The names of all backends, most preferred first."""
    return tuple(dict.fromkeys(row.backend for row in _table))


def resolve(request: Request, backend: str | None = None) -> Implementation:
    """The implementation that serves `request`: the first row, in order of preference, with no reason against it.

    Args:
        request: the call.
        backend: a name restricts the table to its rows; None, "" and "auto" defer to `$LIGER_BACKEND`, then to the table.

    Raises:
        ValueError: no backend has that name.
        UnsupportedError: no row fits; it holds every row's every reason.
    """
    check_backend(backend)
    key = (request, backend, os.environ.get(ENVIRONMENT_VARIABLE), *(os.environ.get(name) for name in _interpreters))
    chosen = _memo.get(key)
    if chosen is None:
        name, source = _asked_for(backend)
        refused: list[tuple[str, tuple[str, ...]]] = []
        for row in _candidates(request.op, name):
            reasons = row.reasons(request)
            if not reasons:
                chosen = row
                break
            refused.append((row.backend, reasons))
        else:
            raise UnsupportedError(request, tuple(refused) or _absent(request.op, name), source)
        if source == "auto":
            _report_fallback(request, chosen, tuple(refused))
        if len(_memo) >= MEMO_SIZE:
            _memo.clear()
        _memo[key] = chosen
    return chosen


def explain_request(request: Request, backend: str | None = None) -> Explanation:
    """Every candidate row with its reasons, and which one `resolve` would return (without the plan)."""
    check_backend(backend)
    name, source = _asked_for(backend)
    verdicts = tuple((row.backend, row.reasons(request)) for row in _candidates(request.op, name))
    chosen = next((fitting for fitting, reasons in verdicts if not reasons), None)
    return Explanation(request, verdicts or _absent(request.op, name), chosen, source)


def _asked_for(backend: str | None) -> tuple[str, str]:
    """The name of a backend, or "auto", and where it came from."""
    if backend is not None and backend not in AUTO:
        return backend, "argument"
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    check_backend(name, f"${ENVIRONMENT_VARIABLE}")
    return ("auto", "auto") if name in AUTO else (name, "environment")


def _candidates(op: Op, name: str) -> tuple[Implementation, ...]:
    return tuple(row for row in table(op) if name in ("auto", row.backend))


def _absent(op: Op, name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What to say when there is no row to ask: a backend may serve the other op only."""
    return ((name, (f"it has no {op}",)),)


def _report_fallback(request: Request, chosen: Implementation, refused: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """Say once that a GPU tensor got the PyTorch backend, and why."""
    if chosen.backend != "torch" or request.device.type not in ("cuda", "rocm") or not refused:
        return
    key = (request.op, refused)
    if key not in _reported:
        _reported.add(key)
        reasons = "\n".join(f"  {backend}: {'; '.join(why)}" for backend, why in refused)
        logger.warning("%s runs on the torch backend:\n%s", request, reasons)
