"""What is built on torch.distributed runs unchanged on the backend ``shm``, with the losses of gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import harness
import shm_fixture as fixture
from harness import only_on_cpu

pytestmark = only_on_cpu("shared memory of processes")


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 3))


def train(wrapped: nn.Module, rank: int, steps: int = 4) -> list[float]:
    """The losses of this rank; the data differ between ranks."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs, targets = torch.randn(8, 24, generator=generator), torch.randn(8, 3, generator=generator)
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp_losses(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    shm = fixture.shm_group()
    gloo = dist.group.WORLD
    expected = train(DistributedDataParallel(model(), process_group=gloo, bucket_cap_mb=0.002), rank)
    assert train(DistributedDataParallel(model(), process_group=shm, bucket_cap_mb=0.002), rank) == expected

    def hooked(group: dist.ProcessGroup) -> list[float]:
        wrapped = DistributedDataParallel(model(), process_group=group)
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return train(wrapped, rank)

    torch.testing.assert_close(hooked(shm), hooked(gloo), rtol=1e-3, atol=1e-3)

    # A hook whose callbacks call collectives and wait for them.
    wrapped = DistributedDataParallel(model(), process_group=shm)
    state = powerSGD_hook.PowerSGDState(shm, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    assert all(loss < 100 for loss in train(wrapped, rank, steps=6))


def fsdp_losses(rank: int, world: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(allocate: bool = False) -> list[float]:
        mesh = init_device_mesh("cpu", (world,))
        sharded = model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        if allocate:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
        return train(sharded, rank)

    expected = run()
    fixture.become_shm(rank, world, store)
    torch.testing.assert_close(run(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run(allocate=True), expected, rtol=1e-6, atol=1e-6)
    dist.destroy_process_group()


def tensors_and_functions(rank: int, world: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    fixture.become_shm(rank, world, store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    left, right = torch.randn(13, 6), torch.randn(6, 9)
    product = distribute_tensor(left, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        right, mesh, [Replicate(), Shard(1)]
    )
    torch.testing.assert_close(product.full_tensor(), left @ right)
    inner = distribute_tensor(left, mesh, [Replicate(), Shard(1)]) @ distribute_tensor(
        right, mesh, [Replicate(), Shard(0)]
    )
    torch.testing.assert_close(inner.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), left @ right)

    group = dist.group.WORLD
    total = funcol.all_reduce(torch.full((4, 3), rank + 1.0), "sum", group)
    assert torch.equal(total + 0, torch.full((4, 3), 10.0))
    gathered = funcol.all_gather_tensor(torch.full((2, 3), float(rank)), 0, group)
    assert torch.equal(gathered[::2, 0] + 0, torch.arange(4.0))
    scattered = funcol.reduce_scatter_tensor(torch.ones(8, 2), "avg", 0, group)
    assert torch.equal(scattered + 0, torch.ones(2, 2))
    exchanged = funcol.all_to_all_single(torch.arange(4.0) + 10 * rank, None, None, group)
    assert torch.equal(exchanged + 0, torch.arange(4.0) * 10 + rank)
    several = funcol.all_reduce_coalesced([torch.ones(3), torch.ones(2, 2)], "sum", group)
    assert all((tensor == 4).all() for tensor in several)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 9.0))
    dist.destroy_process_group()


def mixed_backends(rank: int, world: int, folder: str) -> None:
    """`shm` named for the CPU alone, as programs that use a GPU beside it do."""
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:shm", store=dist.FileStore(os.path.join(folder, "store"), world), rank=rank, world_size=world
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == world
    assert dist.get_backend_config() == "cpu:shm"
    dist.destroy_process_group()


def detail(rank: int, world: int, store: str) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL every call is checked by PyTorch's wrapper first."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    fixture.become_shm(rank, world, store)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor[0] == 3
    dist.destroy_process_group()


def test_ddp_has_the_losses_of_gloo_and_its_hooks_work():
    harness.run_ranks(2, ddp_losses)


def test_fsdp_has_the_losses_of_gloo(tmp_path):
    harness.run_ranks(3, fsdp_losses, str(tmp_path / "store"))


def test_dtensor_device_mesh_and_functional_collectives(tmp_path):
    harness.run_ranks(4, tensors_and_functions, str(tmp_path / "store"))


def test_named_for_one_device(tmp_path):
    harness.run_ranks(2, mixed_backends, str(tmp_path))


def test_with_the_debug_wrapper(tmp_path):
    harness.run_ranks(2, detail, str(tmp_path / "store"))
