"""A small Llama: rotary positions, RMS norms, gated feed-forward layers. Plain PyTorch; its forward returns the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(size, size, bias=False)
        self.k = nn.Linear(size, size, bias=False)
        self.v = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = (linear(x).view(batch, length, self.heads, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, size))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, size: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = RMSNorm(size), RMSNorm(size)
        self.attention = Attention(size, heads)
        self.gate = nn.Linear(size, hidden, bias=False)
        self.up = nn.Linear(size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(
        self, layers: int = 4, size: int = 256, heads: int = 4, vocabulary: int = 1024, length: int = 128
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList([Block(size, heads, 8 * size // 3 // 32 * 32) for _ in range(layers)])
        self.norm = RMSNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        half = size // heads // 2
        angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        x = self.embed(inputs)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
