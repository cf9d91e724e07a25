"""A vocabulary that is split over the ranks of a process group: who has which classes, and what the ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import require


@dataclass(frozen=True, slots=True)
class VocabParallel:
    r"""This rank's part of a vocabulary that is split over a process group, for `vocab_parallel=` of the losses.

    The parts may differ in size and their last columns may be padding. Made this way, it is a collective operation: the
    ranks tell each other their parts, once, and every rank raises if these do not fit together (over NCCL, set the current
    device first). `even`, `equal` and `from_dtensor` know all parts and send nothing.

    What a loss with `vocab_parallel=` takes and gives on a rank with w = stop - start classes:

    - logits (..., w), or head weight (w, H), bias (w,); class weights (w,): its own. Columns at and beyond `vocab_size` are
      padding: they carry no mass and their gradient is 0, whatever they hold.
    - targets: ids of the whole vocabulary, the same on every rank; and so are all options, and what requires grad.
    - the loss and every extra: the same on every rank, as if one had held the whole vocabulary.
    - gradients of logits, weight and bias: its own. Gradient of hidden states: summed over the group, unless told otherwise.

    Raises:
        ValueError: the group is not usable, or the parts do not make up the vocabulary.

    Example:
        >>> split = VocabParallel.even(128256, group=mesh["tp"].get_group())
        >>> head = full_head[split.start : split.stop].clone().requires_grad_()
        >>> loss = liger_fused_linear_cross_entropy(hidden, head, target, vocab_parallel=split)
    """

    group: Any
    """`torch.distributed.ProcessGroup`; None is the default group."""
    start: int
    """Id of this rank's first class."""
    stop: int
    """One past its last, padding included."""
    vocab_size: int
    """V, without padding."""
    sequence_parallel: bool = False
    """Fused loss: `input` holds this rank's share of the tokens, a slice of the first dimension, all of one size, in rank
    order; it is gathered, and its gradient scattered. Targets are those of all tokens."""
    reduce_input_grad: bool = True
    """Fused loss: whether the gradient of the hidden states is summed over the group, or left for the caller to sum."""
    bounds: tuple[tuple[int, int], ...] = ()
    """(start, stop) of every rank, in rank order; empty asks them."""

    def __post_init__(self) -> None:
        group = _usable(self.group)
        object.__setattr__(self, "group", group)
        require(_are_pairs(self.bounds), "bounds", self.bounds, "a tuple of (start, stop) for each rank")
        own = (self.start, self.stop, self.vocab_size, self.sequence_parallel, self.reduce_input_grad)
        told = [(*bound, *own[2:]) for bound in self.bounds] or everyones(own, group)
        object.__setattr__(self, "bounds", _checked(told, own, group))

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallel:
        return self  # a process group has no copies, and a module that holds this may be copied

    def __repr__(self) -> str:
        more = "".join(
            f", {name}={getattr(self, name)}"
            for name, default in (("sequence_parallel", False), ("reduce_input_grad", True))
            if getattr(self, name) != default
        )
        return f"<classes {self.start} to {self.stop} of {self.vocab_size}, over {self.ranks} ranks{more}>"

    @staticmethod
    def even(
        vocab_size: int,
        group: dist.ProcessGroup | None = None,
        *,
        padded_size: int | None = None,
        sequence_parallel: bool = False,
        reduce_input_grad: bool = True,
    ) -> VocabParallel:
        """Parts as `torch.chunk` makes them, of ceil(size / ranks) classes, the last ones shorter or empty.

        Args:
            vocab_size: V.
            group: None is the default group.
            padded_size: number of rows that the whole head has, where it was padded; None is V.
            sequence_parallel: as the field.
            reduce_input_grad: as the field.

        Example:
            >>> VocabParallel.even(50257, group, padded_size=50304)
        """
        require(_is_size(vocab_size) and vocab_size >= 1, "vocab_size", vocab_size, "an int >= 1")
        size = vocab_size if padded_size is None else padded_size
        require(_is_size(size) and size >= vocab_size, "padded_size", padded_size, f"None or an int >= {vocab_size}")
        ranks, rank = dist.get_world_size(_usable(group)), dist.get_rank(group)
        step = -(-size // ranks)
        bounds = tuple((min(r * step, size), min((r + 1) * step, size)) for r in range(ranks))
        return VocabParallel(group, *bounds[rank], vocab_size, sequence_parallel, reduce_input_grad, bounds)

    @staticmethod
    def equal(width: int, group: dist.ProcessGroup | None = None) -> VocabParallel:
        """Parts of `width` classes for every rank, all of them classes.

        Example:
            >>> VocabParallel.equal(logits.shape[-1], group)
        """
        require(_is_size(width) and width >= 1, "width", width, "an int >= 1")
        return VocabParallel.even(width * dist.get_world_size(_usable(group)), group)

    @staticmethod
    def from_dtensor(
        weight: Tensor,
        *,
        vocab_size: int | None = None,
        sequence_parallel: bool = False,
        reduce_input_grad: bool = True,
    ) -> VocabParallel:
        """Say that a DTensor head's `Shard(0)` is tensor parallelism: each rank projects all tokens on its own classes.

        Under FSDP the same placement means that ranks have different tokens: that needs `liger.integrations.fsdp`.

        Args:
            weight: (V, H) head, or (V,) bias, of placement `Shard(0)` on a one-dimensional mesh.
            vocab_size: V, where the last rows are padding; None is all rows.
            sequence_parallel: as the field.
            reduce_input_grad: as the field.

        Example:
            >>> split = VocabParallel.from_dtensor(model.lm_head.weight)
            >>> loss = liger_fused_linear_cross_entropy(hidden, model.lm_head.weight, target, vocab_parallel=split)
        """
        if not is_dtensor(weight):
            raise ValueError(f"weight must be a DTensor, got {type(weight).__name__}: use VocabParallel.even")
        mesh: Any = getattr(weight, "device_mesh")  # noqa: B009 - of a DTensor, whose class is not imported here
        _check_placement("weight", weight, 0)
        return VocabParallel.even(
            weight.shape[0] if vocab_size is None else vocab_size,
            mesh.get_group(),
            padded_size=weight.shape[0],
            sequence_parallel=sequence_parallel,
            reduce_input_grad=reduce_input_grad,
        )

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.bounds)

    @property
    def width(self) -> int:
        """Classes of this rank, padding included."""
        return self.stop - self.start

    @property
    def classes(self) -> int:
        """Classes of this rank that are none of the padding."""
        return _classes(self.start, self.stop, self.vocab_size)

    @property
    def has_empty_part(self) -> bool:
        """Whether some rank has no class."""
        return any(_classes(*bound, self.vocab_size) == 0 for bound in self.bounds)

    def local(self, name: str, tensor: Tensor, dim: int | None) -> Tensor:
        """This rank's part of a DTensor that is split along `dim` over the group (None: on all ranks alike); else itself."""
        if not is_dtensor(tensor):
            return tensor
        _check_placement(name, tensor, dim)
        dtensor: Any = tensor
        mesh = dtensor.device_mesh
        if dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(self.group):
            raise ValueError(f"{name} is a DTensor on {mesh}, whose ranks are not those of vocab_parallel's group")
        summed_later = name == "input" and dim is None and not self.reduce_input_grad
        local: Tensor = dtensor.to_local(grad_placements=_partial() if summed_later else None)
        return local

    def gather(self, tensor: Tensor) -> Tensor:
        """(ranks, ...) everyone's tensor of this shape."""
        out = tensor.new_empty(self.ranks * tensor.numel())
        _collective("all_gather_single", "all_gather_into_tensor")(out, tensor.reshape(-1), group=self.group)
        return out.view(self.ranks, *tensor.shape)

    def gather_classes(self, values: Tensor) -> Tensor:
        """(V, ...) from everyone's (width, ...), such as class weights or a head's rows; not differentiable."""
        widest = max(stop - start for start, stop in self.bounds)
        padded = values.new_zeros((widest, *values.shape[1:]))
        padded[: self.width] = values.detach()
        everyones = self.gather(padded)
        order = sorted(range(self.ranks), key=lambda rank: self.bounds[rank])
        return torch.cat([everyones[rank, : _classes(*self.bounds[rank], self.vocab_size)] for rank in order])

    def gather_tokens(self, tensor: Tensor) -> Tensor:
        """All tokens, (ranks * n, H), from everyone's (n, H)."""
        return self.gather(tensor).view(-1, tensor.shape[-1])

    def start_sum(self, partial: Tensor) -> Callable[[], Tensor]:
        """Begin to sum `partial` (N, H) over the group; the function returned gives the sum, this rank's tokens of it with
        sequence_parallel, to whatever the current stream does next.
        """
        if self.sequence_parallel:
            total = partial.new_empty((partial.shape[0] // self.ranks, *partial.shape[1:]))
            scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
            work = scatter(total, partial, group=self.group, async_op=True)
        else:
            total = partial
            work = dist.all_reduce(total, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return total

        return finish


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor, without importing that class."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


def everyones(own: tuple[Any, ...], group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
    """What every rank says, in rank order; a collective operation."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    return told


def _checked(told: list[tuple[Any, ...]], own: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[tuple[int, int], ...]:
    """The bounds, if they make up one vocabulary. All ranks look at all parts, so that all raise or none."""
    size = own[2]
    for start, stop, vocab_size, *flags in told:
        require(_is_size(vocab_size) and vocab_size >= 1, "vocab_size", vocab_size, "an int >= 1")
        for name, flag in zip(("sequence_parallel", "reduce_input_grad"), flags, strict=True):
            require(isinstance(flag, bool), name, flag, "True or False")
        require(_is_size(start), "start", start, "an int >= 0")
        require(_is_size(stop) and stop >= start, "stop", stop, f"an int >= start = {start}")
        require((vocab_size, *flags) == own[2:], "vocab_size and the flags", (vocab_size, *flags), f"{own[2:]} on every rank")
    require(own[4] or not own[3], "reduce_input_grad", own[4], "True with sequence_parallel, which scatters the sum")
    bounds = tuple((start, stop) for start, stop, *_ in told)
    require(len(bounds) == dist.get_world_size(group), "bounds", bounds, "one (start, stop) for each rank of the group")
    reached = 0
    for start, stop in sorted(bounds):
        require(start == reached, "the ranks' parts", list(bounds), f"adjoining ranges from 0 to at least {size}")
        reached = stop
    require(reached >= size, "the ranks' parts", list(bounds), f"adjoining ranges from 0 to at least {size}")
    require(bounds[dist.get_rank(group)] == own[:2], "bounds", bounds, "this rank's start and stop at its place")
    return bounds


def _usable(group: Any) -> dist.ProcessGroup:
    """A process group that this process is in; None is the default one."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "group is None, the default process group, but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first, or leave vocab_parallel out on a single device"
            )
        group = dist.group.WORLD
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be None or a ProcessGroup that this process is in, got {group!r}")
    return group


def _classes(start: int, stop: int, vocab_size: int) -> int:
    return max(0, min(stop, vocab_size) - start)


def _check_placement(name: str, tensor: Any, dim: int | None) -> None:
    """A DTensor must be split in this one way, over a mesh of one dimension."""
    from torch.distributed.tensor import Replicate, Shard

    if tensor.ndim == 0:
        raise ValueError(f"{name} must have dimensions, got a DTensor of shape ()")
    wanted = Replicate() if dim is None else Shard(dim % tensor.ndim)
    if tuple(tensor.placements) != (wanted,):
        raise ValueError(
            f"{name} must be a DTensor with placements ({wanted!r},) on a one-dimensional mesh, got {tuple(tensor.placements)} "
            f"on {tensor.device_mesh}: {name}.redistribute(placements=[{wanted!r}]) on such a mesh, or pass the local tensor"
        )


def _partial() -> list[Any]:
    from torch.distributed.tensor import Partial

    return [Partial()]


def _collective(name: str, older: str) -> Callable[..., Any]:
    """A collective under the name that this version of torch does not warn of."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


def _are_pairs(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
