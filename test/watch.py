"""Dispatch modes: what a call computes and allocates, seen below autograd and on any device."""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


@dataclass(frozen=True)
class Product:
    """One matrix product: (rows, inner) times (inner, columns)."""

    rows: int
    inner: int
    columns: int


class Operators(TorchDispatchMode):
    """Records the operators that run inside, their matrix products, and the shapes of what they allocate."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.products: list[Product] = []
        self.allocated: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        self.names.append(packet.__name__)
        if packet in (aten.mm, aten.addmm, aten.addmm_):
            left, right = args[:2] if packet is aten.mm else args[1:3]
            self.products.append(Product(left.shape[0], left.shape[1], right.shape[1]))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self.allocated += [tuple(t.shape) for t in _tensors(result) if _storage(t) not in known]
        return result

    def logits_products(self, vocab: int, hidden: int) -> list[Product]:
        return [product for product in self.products if (product.inner, product.columns) == (hidden, vocab)]

    def input_products(self, vocab: int, hidden: int) -> list[Product]:
        return [product for product in self.products if (product.inner, product.columns) == (vocab, hidden)]

    def weight_products(self, vocab: int, hidden: int) -> list[Product]:
        return [product for product in self.products if (product.rows, product.columns) == (vocab, hidden)]


class NothingIsZeroByChance(TorchDispatchMode):
    """Memory that is allocated without a value holds NaN, or the largest integer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in EMPTY:
            result.fill_(torch.nan if result.is_floating_point() else torch.iinfo(result.dtype).max)
        return result


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()
