"""Models for tests of the engine, their batches, and unsharded training of them as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness import DEVICE, where_ranks_run

VOCABULARY = 31


def seeded(seed: int = 0) -> torch.Generator:
    """Draws where tensors are made by default."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


class MLP(nn.Module):
    """Uneven shapes, a frozen layer, an empty parameter, a scalar, a buffer and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 5)])
        self.norm = nn.BatchNorm1d(13)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.layers[0](batch)))
        x = self.norm(self.layers[1](x))
        return (self.layers[2](x) * self.scale).square().mean() + self.empty.sum()

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 7, generator=generator)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for (batch, heads, sequence, size)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.gate = nn.Linear(size, 2 * size, bias=False)
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, size = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, sequence, size)))
        y = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, size: int = 16, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.blocks = nn.ModuleList([Block(size, 2, dropout) for _ in range(layers)])
        self.norm = RMSNorm(size)
        self.head = nn.Linear(size, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


class WithGraphBreak(Llama):
    """Compiles to a graph for each block, and more."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "llama": Llama}


@dataclass(frozen=True)
class Run:
    """One training run. ``config`` is the engine's."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    learning_rate: float = 0.02
    dtype: torch.dtype = torch.float32

    @property
    def accumulation(self) -> int:
        return self.config.get("gradient_accumulation_steps", 1)

    @property
    def clipping(self) -> float:
        return self.config.get("gradient_clipping", 0.0)

    def make(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            return MODELS[self.model](**self.options)

    def batch(self, rank: int, step: int, micro: int) -> torch.Tensor:
        return MODELS[self.model].batch(seeded(100_000 * step + 100 * micro + rank))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        # Plain momentum: Adam's division turns the last bit of a small gradient into the first of an update.
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=0.01)


@where_ranks_run
def train_unsharded(
    run: Run, world: int, forward: Callable[[nn.Module], Callable[..., torch.Tensor]] | None = None
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The losses of each rank and the parameters in the end: the ranks' batches in sequence, each with its rank's random
    numbers and buffers, gradients averaged in rank order.
    """
    model = run.make()
    call = forward(model) if forward else model
    optimizer = run.optimizer(model.parameters())
    random = torch.cuda if DEVICE == "cuda" else torch
    random_states = [seeded(1000 + rank).get_state() for rank in range(world)]
    buffers = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    trainable = [param for param in model.parameters() if param.requires_grad]
    for step in range(run.steps):
        for micro in range(run.accumulation):
            sums = [torch.zeros_like(param) for param in trainable]
            for rank in range(world):
                with torch.no_grad():
                    for name, value in model.named_buffers():
                        value.copy_(buffers[rank][name])
                random.set_rng_state(random_states[rank])
                loss = call(run.batch(rank, step, micro))
                gradients = torch.autograd.grad(loss / run.accumulation, trainable, allow_unused=True)
                random_states[rank] = random.get_rng_state()
                buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
                losses[rank].append(loss.item())
                for total, gradient in zip(sums, gradients, strict=True):
                    if gradient is not None:
                        total += gradient / world
            for param, total in zip(trainable, sums, strict=True):
                param.grad = total if param.grad is None else param.grad + total
        if run.clipping:
            torch.nn.utils.clip_grad_norm_(trainable, run.clipping)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def losses_with_engine(engine: Any, rank: int, run: Run) -> list[float]:
    losses = []
    for step in range(run.steps):
        for micro in range(run.accumulation):
            loss = engine(run.batch(rank, step, micro))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def train_with_engine(rank: int, world: int, run: Run) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    import deepcompile

    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    torch.manual_seed(1000 + rank)
    losses = losses_with_engine(engine, rank, run)
    state = deepcompile.full_state_dict(model)
    stats = engine.stats()
    engine.close()
    return losses, {name: value.clone() for name, value in state.items()}, stats


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    if expected.numel() == 0:
        return
    # Some parameters (the bias of a key projection) have no effect: what they hold is rounding.
    scale = expected.abs().max().clamp_min(1e-2)
    difference = ((found - expected).abs().max() / scale).item()
    assert difference <= tolerance, f"{what} differs by {difference:.2e} of {scale.item():.2e}"
