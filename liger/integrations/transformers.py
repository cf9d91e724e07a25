"""Hugging Face Transformers: `patch(model)` trains a causal language model without its logits.

While a patched model in training mode runs with labels, its head returns `DeferredLogits`, to which the model does what it
does to logits; its loss function, set through the official `model.loss_function`, turns them into one fused call. Whatever a
fused call cannot repeat gets real logits and takes the model's own path. `report(model)` says what happened, and why.

Example:
    >>> handle = patch(model)
    >>> model.train()(input_ids, labels=labels).loss.backward()
    >>> print(report(model))
    >>> handle.remove()
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import INTEGER_DTYPES
from ..context import on_host
from ..dispatch.registry import check_backend
from ..errors import require
from ..options import FLOATING_DTYPES, is_real
from .deferred import THERE, DeferredLogits, Tally, defer, replaced

_active = threading.local()
"""`.handle`: whose model is running with labels in this thread."""
_handles: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
"""Of the models that are patched, whose methods keep their handles alive."""

_MISSING = object()
UNLABELLED = "called without labels: a loss that is computed from its logits is not fused"
SHARD_FIX = "leave the head in the root's group: call fully_shard on the layers and then on the whole model, not on the head"


@dataclass(frozen=True)
class Report:
    """What a patch does to a model's loss, and what it did."""

    status: Literal["fused", "materialised", "unused", "refused"]
    """fused: losses are computed without logits; materialised: the model's own path; unused: there was no loss yet that a
    patch is for; refused: there is no patch."""
    reason: str | None
    """Why no loss was fused, or none would be."""
    fused: int = 0
    """Losses computed without logits so far."""
    materialised: dict[str, int] = field(default_factory=dict)
    """Why logits were made in a training step, and how often so far."""

    def __str__(self) -> str:
        lines = [self.status if self.reason is None else f"{self.status}: {self.reason}"]
        lines += [f"  fused: {self.fused or 'none so far'}"]
        lines += [f"  materialised: {count} ({reason})" for reason, count in self.materialised.items()]
        return "\n".join(lines)


class Handle:
    """A patch of one model; a context manager that removes it at the end."""

    def __init__(self, model: nn.Module, head: nn.Module, backend: str | None, evaluate: bool) -> None:
        self.model, self.head, self.backend, self.evaluate = model, head, backend, evaluate
        self.tally = Tally()
        self.head_forward: Any = None
        """What stands for the head's forward; None where the head was no linear one."""
        self.before: dict[nn.Module, dict[str, Any]] = {}
        """What stood in the place of each attribute that the patch set."""
        self._undo: list[Callable[[], None]] = []
        self._active = False

    def remove(self) -> None:
        """Give the model its own methods back. What was wrapped around them since goes on working, without the patch."""
        self._active = False
        _handles.pop(self.model, None)
        while self._undo:
            self._undo.pop()()

    def __repr__(self) -> str:
        state = "patch" if self._active else "removed patch"
        return f"<{state} of {type(self.model).__name__}, {self.tally.fused} losses fused so far>"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch(model: nn.Module, *, backend: str | None = None, evaluate: bool = False) -> Handle:
    """Let a Transformers causal language model compute its training loss without its logits.

    Args:
        model: any model with a linear head, bare or inside PEFT, DDP, FSDP or torch.compile. It is changed in place;
            copies and pickles of it are not patched.
        backend: as in `liger_fused_linear_cross_entropy`.
        evaluate: do so in evaluation mode as well, which then has no `output.logits` where there are labels.

    Returns:
        A `Handle`; `handle.remove()`, or leaving it as a context, undoes the patch.

    Raises:
        ValueError: the model has no single output head or no loss function, or is patched already; or another argument is
            not what is allowed.

    Example:
        >>> with patch(model):
        ...     Trainer(model, arguments, train_dataset=dataset).train()
    """
    check_backend(backend)
    require(isinstance(evaluate, bool), "evaluate", evaluate, "True or False")
    model = _unwrapped(model)
    if _handle_of(model) is not None:
        raise ValueError("model must not be patched already: call remove() of its handle first")
    reason = _refusal(model)
    if reason is not None:
        raise ValueError(f"model must be a causal language model of transformers, got {type(model).__name__}: {reason}")
    handle = Handle(model, model.get_output_embeddings(), backend, evaluate)  # type: ignore[operator]
    _replace(handle, model, "forward", _model_forward(handle, model.forward))
    _replace(handle, model, "_loss_function", _Loss(handle, model.loss_function))  # type: ignore[arg-type]
    if _not_linear(handle.head) is None:
        handle.head_forward = _head_forward(handle, handle.head.forward)
        _replace(handle, handle.head, "forward", handle.head_forward)
    _replace(handle, model, "_replicate_for_data_parallel", _plain_replicas(model, handle))
    if handle.head_forward is not None:
        _replace(handle, handle.head, "_replicate_for_data_parallel", _plain_replicas(handle.head, handle))
    handle._active = True
    _handles[model] = weakref.ref(handle)
    return handle


def report(model: nn.Module) -> Report:
    """What became of a model's losses, and why; of one that is not patched, whether it can be.

    Args:
        model: as for `patch`.
    """
    model = _unwrapped(model)
    handle = _handle_of(model)
    if handle is None:
        reason = _refusal(model)
        return Report("refused", "the model is not patched, but can be" if reason is None else reason)
    tally = handle.tally
    if tally.fused:
        return Report("fused", None, tally.fused, dict(tally.materialised))
    reason = next(iter(tally.materialised), None) or _why_materialised(handle)
    if reason is None:
        return Report("unused", "it was not called with labels" + ("" if handle.evaluate else " in training mode"))
    return Report("materialised", reason, materialised=dict(tally.materialised))


# What a model and its head have to be.


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers inside what trainers wrap around it."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and not hasattr(type(model), "get_output_embeddings"):  # FSDP looks as if it had what its module has
            inner = getattr(model, "module", None)  # DDP, FSDP
        if inner is None and hasattr(model, "get_base_model"):  # PEFT
            inner = model.get_base_model()  # type: ignore[operator]
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def _handle_of(model: nn.Module) -> Handle | None:
    known = _handles.get(model)
    return None if known is None else known()


def _refusal(model: nn.Module) -> str | None:
    if not hasattr(type(model), "loss_function"):
        return "it has no loss_function"
    if not hasattr(model, "get_output_embeddings"):
        return "it has no get_output_embeddings"
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return "its get_output_embeddings() is None"
    if not isinstance(head, nn.Module) or isinstance(head, (nn.ModuleList, nn.ModuleDict)):
        return f"its get_output_embeddings() is no single module but {type(head).__name__}"
    return None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("torch.nn.modules.linear.")


def _not_linear(head: nn.Module) -> str | None:
    """Why a head's output is not `linear` of its input, weight and bias; None: it is."""
    own = head.__dict__.get("forward")
    if type(head).forward is not nn.Linear.forward:
        return f"the head is a {_name(type(head))}"
    if own is not None and not _moves_only(head):
        return "the head's forward was replaced"
    return None


def _moves_only(head: nn.Module) -> bool:
    """Whether what accelerate put around a forward, for a device_map, only moves its input to the head's device."""
    hook: Any = getattr(head, "_hf_hook", None)
    inner = getattr(head, "_old_forward", None)
    plain = getattr(inner, "__func__", None) is nn.Linear.forward
    return plain and type(hook).__name__ == "AlignDevicesHook" and not (hook.offload or hook.no_grad)


def _is_sharded(head: nn.Module) -> bool:
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(head).__mro__)


def _why_materialised(handle: Handle) -> str | None:
    """Why the head, as it is now, has to give real logits."""
    head = handle.head
    now = handle.model.get_output_embeddings()  # type: ignore[operator]
    if _is_sharded(now):
        return f"the head is sharded on its own, so its weight is gone when the loss needs it: {SHARD_FIX}"
    if now is not head:
        return f"the head is wrapped in a {_name(type(now))}"
    if type(head).forward is not nn.Linear.forward:
        return f"the head is a {_name(type(head))}"
    own = (head.__dict__.get("forward"), getattr(head, "_old_forward", None))  # the latter inside accelerate's
    if handle.head_forward is None or handle.head_forward not in own:
        return "the head's forward was replaced"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(head, name) for name in hooks):
        return "the head has hooks"
    hook = getattr(head, "_hf_hook", None)
    if hook is not None and getattr(hook, "offload", True):
        return "the head is offloaded"
    for name in ("weight", "bias"):
        tensor = getattr(head, name, None)
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor):
            return f"the head's {name} is a {_name(type(tensor))}"
        if tensor is not None and (tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "ds_id")):
            return f"the head's {name} is not there as a whole"
    if head.weight.ndim != 2:
        return f"the head's weight has shape {tuple(head.weight.shape)}: {SHARD_FIX}"
    return None


# What is put in place of a model's methods.


def _replace(handle: Handle, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of this module alone, and remember how to undo that if nobody has set another since."""
    before = module.__dict__.get(name, _MISSING)
    handle.before.setdefault(module, {})[name] = before
    module.__dict__[name] = value

    def undo() -> None:
        if module.__dict__.get(name) is value:
            if before is _MISSING:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before

    handle._undo.append(undo)


def _bound(handle: Handle, module: nn.Module, before: Callable[..., Any], instead: Callable[..., Any]) -> Any:
    """A method of `module` that is `instead`, and `before` in a copy of the module or after the patch's removal.

    Being a bound method with the name of the one it stands for, it is copied and pickled as that one.
    """
    function = getattr(before, "__func__", None)

    @functools.wraps(before)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:  # a copy
            return function(self, *args, **kwargs) if function else type(self).forward(self, *args, **kwargs)
        return instead(*args, **kwargs) if handle._active else before(*args, **kwargs)

    if function is not None:
        method.__wrapped__ = function  # as a method has it: trainers read the signature, and drop the first argument
    else:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = _with_first(inspect.signature(before), own)  # type: ignore[attr-defined]
    return types.MethodType(method, module)


def _with_first(signature: inspect.Signature, parameter: inspect.Parameter) -> inspect.Signature:
    return signature.replace(parameters=[parameter, *signature.parameters.values()])


def _plain_replicas(module: nn.Module, handle: Handle) -> Any:
    """What DataParallel asks for a replica, whose methods would be bound to `module`; its replicas are not patched."""

    def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
        replica: nn.Module = type(self)._replicate_for_data_parallel(self)  # type: ignore[no-untyped-call]
        for name, before in handle.before[module].items() if self is module else ():
            if before is _MISSING:
                replica.__dict__.pop(name, None)
            else:
                replica.__dict__[name] = before
        return replica

    return types.MethodType(_replicate_for_data_parallel, module)


def _model_forward(handle: Handle, before: Callable[..., Any]) -> Any:
    parameters = list(inspect.signature(before).parameters)
    places = [parameters.index(name) for name in ("labels", "shift_labels") if name in parameters]

    def forward(*args: Any, **kwargs: Any) -> Any:
        model = handle.model
        given = [args[place] for place in places if place < len(args)]
        labelled = any(value is not None for value in (*given, kwargs.get("labels"), kwargs.get("shift_labels")))
        if not labelled or not (model.training or handle.evaluate):
            output = before(*args, **kwargs)
            # In a graph, a count that grows would be compiled again.
            if not labelled and model.training and not torch.compiler.is_compiling() and _trains_logits(output):
                handle.tally.count(UNLABELLED)
            return output
        fused, outer = handle.tally.fused, getattr(_active, "handle", None)
        _active.handle = handle
        try:
            output = before(*args, **kwargs)
        finally:
            _active.handle = outer
        return _without_deferred(output, drop=handle.tally.fused > fused)

    return _bound(handle, handle.model, before, forward)


def _trains_logits(output: Any) -> bool:
    """Whether a model's output has logits with a gradient: without one it generates or scores."""
    logits = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", None)
    return isinstance(logits, Tensor) and logits.requires_grad


def _head_forward(handle: Handle, before: Callable[..., Any]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        head = handle.head
        if getattr(_active, "handle", None) is not handle:
            return before(*args, **kwargs)
        reason = _why_materialised(handle)
        if reason is None and (len(args) != 1 or kwargs or not _is_rows(args[0])):
            reason = "the head was called with something else than rows"
        weight, bias = head.weight, head.bias
        if reason is None and args[0].device != weight.device and not hasattr(head, "_hf_hook"):
            reason = "the head is on another device than its input"
        if reason is not None:
            handle.tally.count(reason)
            return before(*args, **kwargs)
        hidden = args[0].to(weight.device)
        return defer(before, hidden, weight, bias, backend=handle.backend, tally=handle.tally)  # type: ignore[arg-type]

    return _bound(handle, handle.head, before, forward)


def _is_rows(hidden: Any) -> bool:
    return type(hidden) in (Tensor, nn.Parameter) and hidden.ndim >= 2


class _Loss:
    """The model's loss function, which fuses what `transformers.loss.loss_utils.ForCausalLMLoss` would compute."""

    def __init__(self, handle: Handle, before: Callable[..., Any]) -> None:
        from transformers.loss.loss_utils import ForCausalLMLoss

        self.handle, self.before = handle, before
        self.is_causal = before is ForCausalLMLoss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._causal(*args, **kwargs) if self.is_causal else self.before(*args, **kwargs)

    def _causal(
        self,
        logits: Any,
        labels: Any,
        vocab_size: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(logits, DeferredLogits):
            return self.before(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        target = shift_labels
        if target is None:
            target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows = logits.reshape(-1, logits.shape[-1])
        target = target.reshape(-1) if isinstance(target, Tensor) else target
        reason = rows.why_not(target) if isinstance(rows, DeferredLogits) else THERE
        if vocab_size != logits.shape[-1]:
            reason = f"the loss takes the vocabulary to be {vocab_size}, the head has {logits.shape[-1]}"
        if not _divides(num_items_in_batch):
            reason = "num_items_in_batch is no number of items"
        if reason is not None:
            made = logits.made(reason)
            return self.before(made, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        loss = rows.float().fused(target, ignore_index=ignore_index, num_items=num_items_in_batch)
        return loss.reshape(num_items_in_batch.shape) if isinstance(num_items_in_batch, Tensor) else loss

    def __reduce__(self) -> tuple[Any, ...]:  # a copy or a pickle of the model has its own loss function
        return _same, (self.before,)


def _same(value: Any) -> Any:
    return value


def _divides(num_items: Any) -> bool:
    """Whether a fused loss divides by this as the model's own would."""
    if num_items is None:
        return True
    if isinstance(num_items, Tensor):
        is_number = num_items.dtype in FLOATING_DTYPES + INTEGER_DTYPES and type(num_items) is Tensor
        if num_items.numel() != 1 or not is_number or num_items.requires_grad:
            return False
        return not on_host(num_items) or _divides(num_items.item())
    return is_real(num_items) and num_items > 0


def _without_deferred(output: Any, *, drop: bool) -> Any:
    """A model's output with no deferred logits in it: None where the loss did without them, else made."""
    return replaced(output, lambda logits: None if drop else logits.made("no loss asked for them"))
