"""A Llama-shaped model as torchtitan's reference trains it: RMSNorm, rotary embedding, grouped queries, SwiGLU.

Built under `torch.device("meta")` it takes no memory at any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hold the sizes of a Llama."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    theta: float = 500_000.0


LLAMA_2_7B = Shape(layers=32, width=4096, heads=32, key_heads=32, hidden=11008, vocabulary=32000, theta=10_000.0)
LLAMA_2_13B = Shape(layers=40, width=5120, heads=40, key_heads=40, hidden=13824, vocabulary=32000, theta=10_000.0)
LLAMA_3_3B = Shape(layers=28, width=3072, heads=24, key_heads=8, hidden=8192, vocabulary=128256)
LLAMA_3_8B = Shape(layers=32, width=4096, heads=32, key_heads=8, hidden=14336, vocabulary=128256)
LLAMA_3_70B = Shape(layers=80, width=8192, heads=64, key_heads=8, hidden=28672, vocabulary=128256)


class Attention(nn.Module):
    """Causal attention; `repeat` copies keys and values to all heads as torchtitan did in 2024."""

    def __init__(self, shape: Shape, repeat: bool) -> None:
        super().__init__()
        self.shape, self.head, self.repeat = shape, shape.width // shape.heads, repeat
        self.wq = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Attend."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rotation), rotated(k, rotation)
        times = self.shape.heads // self.shape.key_heads
        if self.repeat and times > 1:
            k, v = (
                t[:, :, :, None, :].expand(-1, -1, -1, times, -1).reshape(batch, length, -1, self.head) for t in (k, v)
            )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat and times > 1)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[None, : x.shape[1], None, :]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate and project."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape, repeat: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape, repeat), FeedForward(shape)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.width, eps=1e-5), nn.RMSNorm(shape.width, eps=1e-5)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Add attention, then the feed-forward part."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, shape: Shape, *, length: int = 8192, repeat: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([Block(shape, repeat) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(length), shape.theta ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.output(self.norm(x))
