"""A small model with every awkward kind of parameter, trained through the operators under each stage, and unsharded.

The unsharded reference runs the ranks' batches in sequence and averages their gradients in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepcompile import dc
from models import seeded

GRAPH = 0
LEARNING_RATE = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True)
class Setup:
    stage: int
    accumulation: int = 1
    steps: int = 5
    double_buffer: bool = True
    bucket_size: int = 64
    dtype: torch.dtype = torch.float32
    pre_div_reduce: bool = True
    debug: bool = False


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Uneven shapes, an empty one, a scalar, a frozen one, a tied one (``embed``, used twice) and one of another dtype."""
    generator = seeded(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    parameters = {
        "embed": random(11, 7),
        "scale": random(1),
        "empty": random(0, 3),
        "hidden": random(5, 7),
        "bias": random(5),
        "frozen": random(7, 5),
        "shift": random(7),
    }
    parameters["double"] = random(3, 7).double() if dtype == torch.float32 else random(3, 7).float()
    return parameters


FROZEN = ("frozen",)


def loss_of(read, tokens: torch.Tensor) -> torch.Tensor:
    """``read(name)`` gives the whole parameter; ``embed`` is read twice, at the input and at the output."""
    x = read("embed")[tokens] * read("scale") + read("shift")
    h = torch.tanh(x @ read("hidden").t() + read("bias"))
    y = h @ read("frozen").t()
    y = y + read("empty").sum()
    extra = (y.to(read_dtype(read)) @ read("double").t()).sum()
    logits = y @ read("embed").t()
    return logits.float().logsumexp(-1).mean() + extra.float() * 0.01


def read_dtype(read) -> torch.dtype:
    return read("double").dtype


def batch(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = seeded(1000 * step + 10 * micro + rank)
    return torch.randint(0, 11, (4,), generator=generator)


def update(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor) -> None:
    """SGD with momentum: elementwise, so a slice of it is the slice of the whole."""
    momentum.mul_(MOMENTUM).add_(gradient.to(momentum.dtype))
    parameter.sub_((momentum * LEARNING_RATE).to(parameter.dtype))


def train_unsharded(setup: Setup, world: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    parameters = make_parameters(setup.dtype)
    leaves = {name: value.clone().requires_grad_(name not in FROZEN) for name, value in parameters.items()}
    buffer_dtype = {name: gradient_dtype(value, setup) for name, value in leaves.items()}
    momenta = {name: torch.zeros_like(value, dtype=buffer_dtype[name]) for name, value in leaves.items()}
    losses = []
    for step in range(setup.steps):
        total = {name: torch.zeros_like(value, dtype=buffer_dtype[name]) for name, value in leaves.items()}
        for micro in range(setup.accumulation):
            means = {name: torch.zeros_like(value) for name, value in total.items()}
            for rank in range(world):
                loss = loss_of(lambda name: leaves[name], batch(rank, step, micro))
                names = [name for name in leaves if name not in FROZEN]
                grads = torch.autograd.grad(loss, [leaves[name] for name in names])
                for name, grad in zip(names, grads, strict=True):
                    means[name] += grad.to(buffer_dtype[name]) / world
                if rank == 0:
                    losses.append(loss.item())
            for name in total:
                total[name] += means[name]
        with torch.no_grad():
            for name, value in leaves.items():
                if name not in FROZEN:
                    update(value, total[name], momenta[name])
    return {name: value.detach() for name, value in leaves.items()}, losses


def gradient_dtype(parameter: torch.Tensor, setup: Setup) -> torch.dtype:
    """16-bit parameters keep their gradients in fp32."""
    return torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype


def config_of(setup: Setup) -> dict[str, object]:
    return {
        "double_buffer": setup.double_buffer,
        "pre_div_reduce": setup.pre_div_reduce,
        "timeout": 20,
        "debug": setup.debug,
    }


def train_sharded(rank: int, world: int, setup: Setup) -> tuple[dict[str, torch.Tensor], list[float], dict]:
    runtime = dc.init(dist.group.WORLD, config_of(setup), setup.bucket_size)
    trainer = _Stage3(rank, world, setup) if setup.stage == 3 else _Stage12(rank, world, setup)
    losses = []
    for step in range(setup.steps):
        for micro in range(setup.accumulation):
            losses.append(trainer.backward(batch(rank, step, micro), update=micro == setup.accumulation - 1))
        trainer.step()
    stats = runtime.stats()
    parameters = trainer.gather()
    dc.cleanup()
    return parameters, losses, stats


class _Stage3:
    def __init__(self, rank: int, world: int, setup: Setup) -> None:
        self.ids, self.shards, self.momenta, self.shapes = {}, {}, {}, {}
        self.world = world
        for index, (name, value) in enumerate(make_parameters(setup.dtype).items()):
            size = -(-value.numel() // world)
            padded = torch.zeros(size * world, dtype=value.dtype)
            padded[: value.numel()] = value.reshape(-1)
            shard = padded[rank * size : (rank + 1) * size].clone().requires_grad_(name not in FROZEN)
            buffer = torch.zeros(size, dtype=gradient_dtype(value, setup)) if name not in FROZEN else None
            dc.register_z3_param(index, value.shape, shard, buffer, name=name)
            self.ids[name], self.shards[name], self.shapes[name] = index, shard, value.shape
            self.momenta[name] = torch.zeros(size, dtype=gradient_dtype(value, setup))
        dc.register_graph_z3(GRAPH, list(self.ids.values()))

    def read(self, name: str) -> torch.Tensor:
        index = self.ids[name]
        gathered = torch.ops.dc.allgather_param(self.shards[name], GRAPH, index)
        return torch.ops.dc.wait_allgather(gathered, GRAPH, index)

    def backward(self, tokens: torch.Tensor, update: bool) -> float:
        dc.start_forward()
        torch.ops.dc.prefetch_params_fused(GRAPH, [torch.empty(0)] * 3, [0, 1, 3])
        loss = loss_of(self.read, tokens)
        for index in self.ids.values():
            torch.ops.dc.release_param(torch.empty(0), GRAPH, index, 1)
        dc.end_forward()
        assert dc.stats()["gathered_bytes_live"] == 0
        dc.start_backward(update)
        loss.backward()
        torch.ops.dc.end_backward(GRAPH)
        return loss.item()

    def step(self) -> None:
        with torch.no_grad():
            for name, shard in self.shards.items():
                if name not in FROZEN:
                    update(shard, shard.grad, self.momenta[name])
                    shard.grad = None

    def gather(self) -> dict[str, torch.Tensor]:
        whole = {}
        for name, shard in self.shards.items():
            parts = [torch.empty_like(shard) for _ in range(self.world)]
            dist.all_gather(parts, shard.detach())
            numel = self.shapes[name].numel()
            whole[name] = torch.cat(parts)[:numel].reshape(self.shapes[name])
        return whole


class _Stage12:
    """The flattened model is cut into equal contiguous parts, so boundaries fall inside parameters."""

    def __init__(self, rank: int, world: int, setup: Setup) -> None:
        self.parameters = {
            name: value.clone().requires_grad_(name not in FROZEN)
            for name, value in make_parameters(setup.dtype).items()
        }
        self.world, self.rank = world, rank
        trainable = [name for name in self.parameters if name not in FROZEN]
        total = sum(self.parameters[name].numel() for name in trainable)
        self.cuts = [total * r // world for r in range(world + 1)]
        self.ids, self.slices, self.buffers, self.momenta = {}, {}, {}, {}
        begin = 0
        for index, (name, value) in enumerate(self.parameters.items()):
            self.ids[name] = index
            if name in FROZEN:
                dc.register_param(index, value.shape, value, None, 0, name=name)
                continue
            owned = []
            for r in range(world):
                low = max(self.cuts[r], begin) - begin
                high = min(self.cuts[r + 1], begin + value.numel()) - begin
                owned.append((low, high) if high > low else (0, 0))
            begin += value.numel()
            low, high = owned[rank]
            buffer = torch.zeros(high - low, dtype=gradient_dtype(value, setup))
            dc.register_param(index, value.shape, value, buffer, low, name=name)
            self.slices[name], self.buffers[name] = owned, buffer
            self.momenta[name] = torch.zeros_like(buffer)
        register = dc.register_graph_z1 if setup.stage == 1 else dc.register_graph_z2
        register(GRAPH, list(self.ids.values()))

    def backward(self, tokens: torch.Tensor, update: bool) -> float:
        dc.start_forward()
        loss = loss_of(lambda name: self.parameters[name], tokens)
        dc.end_forward()
        names = list(self.slices)
        grads = torch.autograd.grad(loss, [self.parameters[name] for name in names])
        dc.start_backward(update)
        for name, grad in reversed(list(zip(names, grads, strict=True))):
            result = torch.ops.dc.reduce_grad(grad, GRAPH, self.ids[name])
            assert result.numel() == 0
        torch.ops.dc.end_backward(GRAPH)
        return loss.item()

    def step(self) -> None:
        with torch.no_grad():
            for name, owned in self.slices.items():
                flat = self.parameters[name].view(-1)
                low, high = owned[self.rank]
                update(flat[low:high], self.buffers[name], self.momenta[name])
                for r, (low, high) in enumerate(owned):
                    if high > low:
                        dist.broadcast(flat[low:high], r)

    def gather(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}
