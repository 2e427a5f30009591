"""All operators on CUDA tensors of odd sizes, on one rank in this process: what ``make sanitize-cuda`` runs under
compute-sanitizer, which follows no forks. Checks what it computes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepcompile import _C, dc

SHAPES = [(1,), (3, 5), (1023,), (64, 33), (4097,), (2, 3, 7), (100_003,)]
GRAPH = 0


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in SHAPES]


def runs(dtype: torch.dtype, read: torch.dtype) -> None:
    runtime = dc.Runtime(dist.group.WORLD, {}, 4096, device=torch.device("cuda", 0))
    values = parameters(dtype)
    shards = [value.reshape(-1).clone() for value in values]
    buffers = [torch.zeros_like(shard) for shard in shards]
    for number, (value, shard) in enumerate(zip(values, shards, strict=True)):
        runtime.register_z3_param(number, value.shape, shard, buffers[number], False, name=f"p{number}")
    runtime.register_graph_z3(GRAPH, list(range(len(shards))))
    ops = torch.ops.dc
    runtime.start_forward()
    numbers = list(range(len(shards)))
    ops.prefetch_params_fused(GRAPH, shards[:4], numbers[:4], [read] * 4)
    for number, value in enumerate(values):
        gathered = ops.wait_allgather(ops.allgather_param(shards[number], GRAPH, number, read), GRAPH, number)
        assert torch.equal(gathered, value.to(read)), SHAPES[number]
        ops.release_param(gathered, GRAPH, number, 1)
    runtime.end_forward()
    for factor in (1, 2):  # the second one adds
        runtime.start_backward(factor == 2)
        for number, value in enumerate(values):
            ops.reduce_grad(value.float() * factor if dtype == torch.float32 else value * factor, GRAPH, number)
        ops.end_backward(GRAPH)
    for value, buffer in zip(values, buffers, strict=True):
        assert torch.allclose(buffer.reshape(value.shape), 3 * value, rtol=2e-2)
    squares = _C.sum_of_squares(buffers, torch.device("cuda", 0))
    assert torch.allclose(squares, sum(buffer.double().square().sum() for buffer in buffers), rtol=1e-3)
    for number, value in enumerate(values):
        away = ops.offload_tensor(value, GRAPH, 100 + number)
        ops.wait_offload(value, GRAPH, 100 + number)
        back = ops.reload_tensor(away, GRAPH, 100 + number)
        ops.wait_reload(back, GRAPH, 100 + number)
        assert torch.equal(back, value)
        ops.offload_parameter(shards[number], GRAPH, number)
        ops.reload_parameter(shards[number], GRAPH, number)
    torch.cuda.synchronize()
    assert all(torch.equal(s.reshape(v.shape), v) for s, v in zip(shards, values, strict=True))
    runtime.cleanup()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    for kept, wanted in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ):
        runs(kept, wanted)
    print("all operators gave what they should")
