"""Logits that are not there yet: a head's input, and what was done to its output since.

A `DeferredLogits` is returned in place of a head's output. It records what a fused loss can repeat, a positive factor, a
soft cap, a cast, a selection of rows, and hands the rest to real logits, which it makes when they are first asked for. It is
no tensor: whatever meets it that is not listed here, an operator, a function of torch or an attribute, gets the real ones.
So a model is given what it asked for, and what may differ is only whether memory is saved, with two exceptions in fused
losses: a mean over targets that are all ignored is 0 and not NaN, and a target outside of the vocabulary gives NaN where a
GPU's kernels run, which do not stop for it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..context import autocast_dtype, is_traced, on_host, projected_dtype
from ..functional import liger_fused_linear_cross_entropy
from ..options import FLOATING_DTYPES, LARGEST, SMALLEST_FACTOR
from ..spec import compute_dtype

THERE = "the logits are there already"


@dataclass
class Tally:
    """What became of the logits that were deferred."""

    fused: int = 0
    """Losses that were computed without logits."""
    materialised: dict[str, int] = field(default_factory=dict)
    """Why logits were made after all, and how often."""

    def count(self, reason: str) -> None:
        """Once more for this reason."""
        self.materialised[reason] = self.materialised.get(reason, 0) + 1


@dataclass(frozen=True)
class _Mode:
    """The modes of torch under which a head was called."""

    grad: bool
    autocast: torch.dtype | None

    @staticmethod
    def of(tensor: Tensor) -> _Mode:
        return _Mode(torch.is_grad_enabled(), autocast_dtype(tensor))

    def restored(self, tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The same modes again: logits made under no_grad, for a metric, would have no gradient for the loss."""
        now = _Mode.of(tensor)
        if now == self:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if now.autocast != self.autocast:
            stack.enter_context(torch.autocast(tensor.device.type, dtype=self.autocast, enabled=self.autocast is not None))
        return stack


@dataclass(frozen=True)
class _Head:
    """One call of a linear head."""

    forward: Callable[[Tensor], Tensor]
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    mode: _Mode
    backend: str | None
    tally: Tally
    versions: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the logits can no longer be what they were when the head was called."""
        if self.versions != _versions(self.tensors):
            raise RuntimeError(
                "the head's input or weight was changed in place between the head and the loss, which had deferred the "
                "logits: change it after the loss, or remove the patch"
            )


def _versions(tensors: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
    """How often each was changed in place, and where it lies, which `.data =` alone changes; nothing where nobody counts."""
    if any(is_traced(tensor) or tensor.is_inference() for tensor in tensors):
        return ()
    return tuple([(tensor._version, tensor.data_ptr()) for tensor in tensors])


def defer(
    forward: Callable[[Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    backend: str | None,
    tally: Tally,
) -> DeferredLogits:
    """Stand-in for `forward(hidden)`, which is `linear(hidden, weight, bias)`."""
    mode = _Mode.of(hidden)
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    head = _Head(forward, hidden, weight, bias, mode, backend, tally, _versions(tensors))
    return DeferredLogits(head, hidden, projected_dtype(hidden), weight.device, 1.0, None, None, None)


class DeferredLogits:
    """Logits (..., V): `cap * tanh(scale * linear(hidden))`, or without a cap `scale * linear(hidden)`."""

    __slots__ = ("_after", "_device", "_dtype", "_head", "_hidden", "_parent", "_real", "_repeat", "_scale", "_version")

    def __init__(
        self,
        head: _Head,
        hidden: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
        after: float | None,
        parent: DeferredLogits | None,
        repeat: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._head = head
        self._hidden = hidden
        """The rows of the head's input that these logits belong to."""
        self._dtype = dtype
        self._device = device
        """Where the logits would be, and a loss of them is."""
        self._scale = scale
        """What multiplies the head's output, before a tanh."""
        self._after = after
        """What multiplies the tanh; None: there is none."""
        self._parent, self._repeat = parent, repeat
        """What these logits are made from, and how; None for the head's own output."""
        self._real: Tensor | None = None
        self._version: tuple[tuple[int, int], ...] = ()
        """Of the real logits when they were made."""

    # What a tensor says of itself without its values.

    @property
    def shape(self) -> torch.Size:
        """(..., V)"""
        return torch.Size((*self._hidden.shape[:-1], self._head.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """As the logits would have it."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """As the logits would have it."""
        return self._device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._hidden.ndim

    @property
    def requires_grad(self) -> bool:
        """Whether the logits would have a gradient."""
        return self._head.mode.grad and any(tensor.requires_grad for tensor in self._head.tensors)

    @property
    def is_cuda(self) -> bool:
        """As the logits would have it."""
        return self.device.type == "cuda"

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def numel(self) -> int:
        """As of a tensor."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # What a fused loss can repeat.

    def _then(self, repeat: Callable[[Tensor], Tensor], **changed: Any) -> Any:
        if self._is_made():  # what is real may be changed in place, which only real logits can follow
            return repeat(self.made(THERE))
        head = self._head
        if head.mode.grad and not torch.is_grad_enabled():
            head = replace(head, mode=replace(head.mode, grad=False))
        state: dict[str, Any] = {"hidden": self._hidden, "dtype": self._dtype, "device": self._device}
        state |= {"scale": self._scale, "after": self._after, "parent": self, "repeat": repeat}
        return DeferredLogits(head, **(state | changed))

    def _times(self, factor: Any, apply: Callable[[Any, Any], Any], inverse: bool) -> Any:
        number = _number(factor)
        if number is None or number == 0:
            return apply(self.made("a factor of 0" if number == 0 else "a factor that is no number"), factor)
        before = self._scale if self._after is None else self._after
        value = before / number if inverse else before * number
        changed = {"scale": value} if self._after is None else {"after": value}
        dtype = self._dtype if not isinstance(factor, Tensor) else torch.result_type(self._like(), factor)
        return self._then(lambda real: apply(real, factor), dtype=dtype, **changed)

    def _like(self) -> Tensor:
        return torch.empty((0,) * self.ndim, dtype=self._dtype, device="cpu")

    def __mul__(self, factor: Any) -> Any:
        return self._times(factor, operator.mul, False)

    def __rmul__(self, factor: Any) -> Any:
        return self._times(factor, operator.mul, False)

    def __truediv__(self, factor: Any) -> Any:
        return self._times(factor, operator.truediv, True)

    def mul(self, other: Any) -> Any:
        """As of a tensor."""
        return self * other

    def div(self, other: Any, **options: Any) -> Any:
        """As of a tensor."""
        return self.made("div").div(other, **options) if options else self / other

    def tanh(self) -> Any:
        """As of a tensor."""
        return self.made("a second tanh").tanh() if self._after is not None else self._then(torch.tanh, after=1.0)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of a tensor: a move, and a cast among floating-point dtypes, are repeated."""
        dtype, device, known = self._dtype, self._device, not set(kwargs) - {"dtype", "device", "non_blocking", "copy"}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.device):
                device = value
            elif isinstance(value, str):
                device = torch.device(value)
            elif value is not None and not isinstance(value, bool):
                known = False
        if not known or dtype not in FLOATING_DTYPES:
            return self.made("to").to(*args, **kwargs)
        if device.type == self._device.type and device.index is None:
            device = self._device
        return self._then(lambda real: real.to(*args, **kwargs), dtype=dtype, device=device)

    def type_as(self, other: Any) -> Any:
        """As of a tensor."""
        return self.to(other.device, other.dtype)

    def contiguous(self, **options: Any) -> Any:
        """As of a tensor."""
        return self.made("contiguous").contiguous(**options) if options else self._then(Tensor.contiguous)

    def view(self, *sizes: Any, size: Any = None, dtype: Any = None) -> Any:
        """As of a tensor, where the vocabulary stays the last dimension."""
        given = [value for value in (size, dtype) if value is not None]
        return self._reshaped("view", (*sizes, *given))

    def reshape(self, *sizes: Any, shape: Any = None) -> Any:
        """As of a tensor, where the vocabulary stays the last dimension."""
        return self._reshaped("reshape", sizes if shape is None else (*sizes, shape))

    def _reshaped(self, method: str, shape: tuple[Any, ...]) -> Any:
        def repeat(real: Tensor) -> Any:
            return getattr(real, method)(*shape)

        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        rows, vocab = self._hidden.shape[:-1].numel(), self.shape[-1]
        keeps = len(sizes) > 1 and all(isinstance(size, int) for size in sizes) and sizes[-1] == vocab
        lead = sizes[:-1]
        known = 1
        for size in lead if keeps else ():
            known *= 1 if size == -1 else size
        open_sizes = sum(size == -1 for size in lead) if keeps else 0
        fits = keeps and min(lead) >= -1 and (known == rows if open_sizes == 0 else open_sizes == 1 and known > 0)
        if not fits or (open_sizes and rows % known):
            return repeat(self.made(method))
        lead = tuple([rows // known if size == -1 else size for size in lead])
        return self._then(repeat, hidden=self._hidden.reshape(*lead, self._hidden.shape[-1]))

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if all(isinstance(entry, slice) or entry is Ellipsis for entry in entries) and entries.count(Ellipsis) <= 1:
            missing = self.ndim - (len(entries) - entries.count(Ellipsis))
            full: list[Any] = []
            for entry in (*entries, *(() if Ellipsis in entries else (Ellipsis,))):
                full += [slice(None)] * missing if entry is Ellipsis else [entry]
            if len(full) == self.ndim and full[-1] == slice(None):
                return self._then(lambda real: real[index], hidden=self._hidden[tuple(full)])
        return self.made("an index")[index]

    # What becomes of the rest.

    def _is_made(self) -> bool:
        """Whether these logits, or any that they are made from, are there."""
        return self._real is not None or (self._parent is not None and self._parent._is_made())

    def _is_changed(self) -> bool:
        """Whether these logits, or any that they are made from, were changed in place since; also where nobody counts."""
        if self._real is not None and (not self._version or _versions((self._real,)) != self._version):
            return True
        return self._parent is not None and self._parent._is_changed()

    def _materialised(self) -> Tensor:
        if self._real is None:
            self._head.check_unchanged()
            if self._parent is None or self._repeat is None:
                self._real = self._from_head()
            else:
                late, parent = self._parent._is_made(), self._parent._materialised()
                with self._head.mode.restored(self._head.hidden):
                    self._real = self._repeat(parent)
                # A view has its parent's changes; a copy was taken before them, when nothing was there to be changed.
                if late and self._parent._is_changed() and not self._is_view(self._real, parent):
                    self._real = self._from_head()
            self._version = _versions((self._real,))
        return self._real

    def _is_view(self, own: Tensor, parent: Tensor) -> bool:
        if not is_traced(own):
            return own.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr()
        source = self._parent  # a trace has no storage: what changes no value is taken to be a view
        return source is not None and (source._dtype, source._scale, source._after) == (self._dtype, self._scale, self._after)

    def _from_head(self) -> Tensor:
        """The logits as they are without a change in place."""
        with self._head.mode.restored(self._head.hidden):
            if self._parent is None or self._repeat is None:
                return self._head.forward(self._head.hidden)
            return self._repeat(self._parent._from_head())

    def made(self, reason: str) -> Tensor:
        """The real logits, for this reason."""
        if self._real is None:
            self._head.tally.count(reason)
        return self._materialised()

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):  # whoever only asks whether it is something else is not given logits for it
            raise AttributeError(f"logits have no attribute {name!r}")
        return getattr(self.made(name.strip("_")), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        repeat = REPEATED.get(function)
        if repeat is not None and args and isinstance(args[0], DeferredLogits) and not kwargs:
            return repeat(*args)
        if function in PRODUCTS and len(args) == 2 and not kwargs and not isinstance(args[0], DeferredLogits):
            return args[1]._times(args[0], operator.mul, False)  # by its operator a tracer would be here again
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        reason = getattr(function, "__name__", str(function))
        return function(*real(args, reason), **{name: real(value, reason) for name, value in kwargs.items()})

    # The loss.

    def transform(self) -> tuple[float, float | None] | None:
        """(logit_scale, softcap) that make these logits of the head's output; None if none do."""
        scale, cap = self._scale, self._after
        if cap is not None:
            scale *= cap
        if abs(scale - 1) < 1e-12:  # x / 30 * 30
            scale = 1.0
        known = all(SMALLEST_FACTOR <= value <= LARGEST for value in (scale, 1.0 if cap is None else cap))
        return (scale, cap) if known else None

    def why_not(self, target: Any) -> str | None:
        """Why these logits and these targets, one per row, cannot become one fused call; None: they can."""
        head = self._head
        if self._is_made():
            return THERE
        if self.transform() is None:
            return "a factor that is not positive"
        if head.hidden.dtype not in FLOATING_DTYPES or head.weight.dtype not in FLOATING_DTYPES:
            return f"a head of {head.weight.dtype}"
        dtypes = {tensor.dtype for tensor in head.tensors}
        if len(dtypes) > 1 and (head.mode.autocast is None or torch.float64 in dtypes):  # which autocast leaves alone
            return "a head of mixed dtypes"
        if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
            return "targets that are no class ids"
        if target.shape != self._hidden.shape[:-1]:
            return f"targets of shape {tuple(target.shape)}"
        return None

    def fused(self, target: Tensor, **options: Any) -> Tensor:
        """The loss, in the dtype that the logits' own would have; `why_not` has been asked."""
        head, transform = self._head, self.transform()
        scale, cap = (1.0, None) if transform is None else transform
        head.check_unchanged()
        grad = torch.is_grad_enabled()
        with head.mode.restored(head.hidden), torch.set_grad_enabled(head.mode.grad and grad):
            loss = liger_fused_linear_cross_entropy(
                self._hidden,
                head.weight,
                target.to(head.weight.device),
                head.bias,
                logit_scale=scale,
                softcap=cap,
                backend=head.backend,
                **options,
            )
            if not isinstance(loss, Tensor):
                raise TypeError("a fused loss returns one tensor")
        head.tally.fused += 1
        return loss.to(self._device, self._dtype if autocast_dtype(loss) is None else compute_dtype(self._dtype))


def replaced(value: Any, change: Callable[[DeferredLogits], Any]) -> Any:
    """The same with every deferred part changed, inside tuples, lists and dicts too; a field that becomes None is left out."""
    if isinstance(value, DeferredLogits):
        return change(value)
    if isinstance(value, dict):
        parts = {name: replaced(part, change) for name, part in value.items()}
        if all(parts[name] is part for name, part in value.items()):
            return value
        kept = {name: part for name, part in parts.items() if part is not None or value[name] is None}
        kind, has_fields = type(value), is_dataclass(value)
        return kind(**kept) if has_fields else kind(kept)
    if isinstance(value, (tuple, list)):
        items = [replaced(part, change) for part in value]
        if all(item is part for item, part in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def real(value: Any, reason: str) -> Any:
    """The same with every deferred part made."""
    return replaced(value, lambda logits: logits.made(reason))


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of deferred logits, for models and losses that call it themselves."""
    plain = weight is None and size_average is None and reduce is None
    if isinstance(input, DeferredLogits):
        if plain and input.ndim == 2:
            reason = input.why_not(target)
        else:
            reason = "cross_entropy with class weights or of more than a matrix"
        if reason is None:
            options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
            return input.fused(target, label_smoothing=label_smoothing, **options)
        input = input.made(reason)
    target = real(target, "cross_entropy")
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing=label_smoothing
    )


def _number(value: Any) -> float | None:
    """A factor's value, if the host has it and nobody wants its gradient."""
    if isinstance(value, Tensor):
        plain = value.ndim == 0 and not value.requires_grad and not value.is_meta and type(value) is Tensor
        value = value.item() if plain and on_host(value) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


REPEATED: dict[Any, Callable[..., Any]] = {
    torch.tanh: DeferredLogits.tanh,
    F.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.mul,
    torch.multiply: DeferredLogits.mul,
    torch.div: DeferredLogits.div,
    torch.divide: DeferredLogits.div,
    torch.reshape: DeferredLogits.reshape,
}


PRODUCTS = (Tensor.mul, torch.mul, torch.multiply)
"""Whose left operand torch asks first, and passes the question on."""


def _of_real(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.made(name.strip("_")), name)(*real(args, name.strip("_")))

    return method


# Python looks these up on the type, past __getattr__. In-place operators are among them: they have to change the logits
# that others hold too.
for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul"),
    *("neg", "pos", "abs", "invert", "and", "or", "xor", "rand", "ror", "rxor", "lt", "le", "gt", "ge", "eq", "ne"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem", "iter", "contains"),
    *("reversed", "array", "float", "int", "bool", "complex", "index", "dlpack", "deepcopy", "reduce_ex"),
):
    setattr(DeferredLogits, f"__{_name}__", _of_real(f"__{_name}__"))
DeferredLogits.float = lambda self, **options: self.to(torch.float32, **options)  # type: ignore[attr-defined]  # a type inside
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]  # as a tensor's: __eq__ is elementwise
