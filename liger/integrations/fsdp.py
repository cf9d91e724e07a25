"""A head that FSDP2 shards, used outside of its module: the whole weight, and a gradient that the ranks do average."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..vocab_parallel import is_dtensor


def gather_weight(weight: Tensor) -> Tensor:
    """The whole weight (or bias) of a head whose rows FSDP2 shards over ranks with different tokens.

    The gradient that reaches it is averaged over all ranks of the mesh and each keeps its shard, as FSDP does after a
    backward through the module. `weight.full_tensor()` alone takes every rank's gradient for that of the others, reduces
    nothing, and is silent about it.

    Saying this is saying that the sharding is FSDP. If it is tensor parallelism, where each rank projects all tokens on its
    own classes, use `liger.VocabParallel.from_dtensor`, which gathers nothing.

    Args:
        weight: DTensor (V, H) or (V,) of placement `Shard(0)`, or `Replicate(), Shard(0)` for HSDP, on a mesh whose ranks
            all have different tokens. Cast it first (`weight.bfloat16()`) to gather half the bytes.

    Returns:
        A plain tensor; its gradient has the sharding of `weight`.

    Raises:
        ValueError: it is no DTensor, or placed in another way.

    Example:
        >>> head = gather_weight(model.lm_head.weight)
        >>> liger_fused_linear_cross_entropy(hidden, head, target).backward()
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not is_dtensor(weight):
        raise ValueError(f"weight must be a DTensor, got {type(weight).__name__}: a plain tensor needs no gathering")
    dtensor: Any = weight
    placements = tuple(dtensor.placements)
    if placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise ValueError(
            f"weight must have placements (Shard(0),), or (Replicate(), Shard(0)) for HSDP, got {placements} on "
            f"{dtensor.device_mesh}: a head that FSDP shards over tensor parallel parts is read inside its module"
        )
    whole: Tensor = dtensor.full_tensor(grad_placements=[Partial() for _ in placements])
    ranks = dtensor.device_mesh.size()
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    return whole
