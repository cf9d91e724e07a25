"""A small decoder-only transformer: rotary positions, RMSNorm, SwiGLU, a head whose weight the loss layer applies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model."""

    vocabulary: int
    dim: int
    """Hidden size H; a multiple of 2 * heads, since rotary positions turn pairs of channels."""
    layers: int
    heads: int
    max_length: int
    tied: bool
    """The head's weight is the embedding's."""


def rotary_angles(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each (length, head_dim / 2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + head_dim / 2) of (batch, heads, length, head_dim) by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, 2020) with the usual 8/3 expansion."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = 8 * dim // 3
        self.gate_up = nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = SwiGLU(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Transformer(nn.Module):
    """Token ids (batch, length) to hidden states (batch, length, H); `head_weight` (V, H) turns those into logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.embedding_norm = nn.RMSNorm(config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.dim)
        embedded = self.embedding.weight
        self.head_weight = embedded if config.tied else nn.Parameter(torch.empty_like(embedded))
        cos, sin = rotary_angles(config.max_length, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        """Normal(0.02) as in GPT-2, the projections back into the residual stream smaller by sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            is_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x: Tensor = self.embedding_norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        x = self.final_norm(x)
        return x
