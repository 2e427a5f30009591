"""The operators under torch.compile: schemas that tell the truth, no graph breaks, effects kept and in order."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from deepcompile import dc
from harness import DEVICE, run_ranks
from z3_fixture import GRAPH, gather, release, start, whole_parameter

ops = torch.ops.dc
BACKENDS = ("aot_eager", "inductor")


KINDS = ("test_schema", "test_autograd_registration", "test_faketensor")
#: On a device test_aot_dispatch would read what is still being copied.
KINDS_OF_MOVES = (*KINDS, "test_aot_dispatch_dynamic") if DEVICE == "cpu" else KINDS


def passes_opcheck(rank: int, world: int) -> None:
    shards, _ = start(rank, world, config={"sync_after_allgather": True, "free_activation_threshold": 1000})
    check = torch.library.opcheck
    shard = shards[0]
    check(ops.allgather_param.default, (shard, GRAPH, 0))
    check(ops.allgather_param.default, (shard, GRAPH, 0, torch.bfloat16))
    check(ops.prefetch_params_fused.default, (GRAPH, [torch.empty(0)] * 2, [0, 1]))
    check(ops.prefetch_params_fused.default, (GRAPH, shards[:2], [0, 1], [torch.float16, torch.bfloat16]))
    gathered = ops.allgather_param(shard, GRAPH, 0)
    check(ops.wait_allgather.default, (gathered, GRAPH, 0))
    check(ops.release_param.default, (torch.randn(3), GRAPH, 1, 1))
    check(ops.release_param_traced.default, (torch.randn(3), GRAPH, 1, 1))
    check(ops.reduce_grad.default, (torch.randn(5, 3), GRAPH, 0))
    check(ops.free_tensors.default, ([torch.randn(3), torch.randn(2, 2)],))
    check(ops.offload_tensor.default, (torch.randn(4, 3), GRAPH, 7), test_utils=KINDS_OF_MOVES)
    host = ops.offload_tensor(torch.randn(4, 3), GRAPH, 8)
    check(ops.wait_offload.default, (host, GRAPH, 8))
    check(ops.reload_tensor.default, (host, GRAPH, 8), test_utils=KINDS_OF_MOVES)
    back = ops.reload_tensor(host, GRAPH, 8)
    check(ops.wait_reload.default, (back, GRAPH, 8))
    check(ops.offload_parameter.default, (torch.empty(0), GRAPH, 2))
    check(ops.reload_parameter.default, (torch.empty(0), GRAPH, 2))
    check(ops.end_backward.default, (GRAPH,))


@pytest.mark.parametrize("world", [1, 2])
def test_every_operator_passes_opcheck(world: int) -> None:
    run_ranks(world, passes_opcheck)


def differentiable_operators_pass_opcheck(rank: int, world: int) -> None:
    shards, _ = start(rank, world, config={"sync_after_allgather": True}, requires_grad=True)
    check = torch.library.opcheck
    # Not test_aot_dispatch: it compares returned gradients, and a gather's gradient is reduced instead (contract).
    check(ops.allgather_param.default, (shards[0], GRAPH, 0), test_utils=KINDS)
    x = torch.randn(4, requires_grad=True)
    host = ops.offload_tensor(x, GRAPH, 1)
    check(ops.offload_tensor.default, (x, GRAPH, 1), test_utils=KINDS_OF_MOVES)
    check(ops.reload_tensor.default, (host, GRAPH, 1), test_utils=KINDS_OF_MOVES)
    check(ops.release_param.default, (x, GRAPH, 0, 1), test_utils=KINDS)


def test_operators_of_a_forward_are_registered_with_autograd() -> None:
    run_ranks(2, differentiable_operators_pass_opcheck)


def traces_everything(rank: int, world: int, backend: str) -> None:
    shards, buffers = start(rank, world, config={"free_activation_threshold": 1000})

    def everything(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        ops.prefetch_params_fused(GRAPH, [torch.empty(0), torch.empty(0)], [0, 1])
        w = ops.wait_allgather(ops.allgather_param(shard, GRAPH, 0), GRAPH, 0)
        host = ops.wait_offload(ops.offload_tensor(x, GRAPH, 5), GRAPH, 5)
        ops.offload_parameter(torch.empty(0), GRAPH, 2)
        y = x @ w.t()
        ops.free_tensors([y])
        ops.release_param(torch.empty(0), GRAPH, 0, 1)
        ops.release_param(torch.empty(0), GRAPH, 1, 1)
        x = ops.wait_reload(ops.reload_tensor(host, GRAPH, 5), GRAPH, 5)
        ops.reload_parameter(torch.empty(0), GRAPH, 2)
        ops.reduce_grad(y.t() @ x, GRAPH, 0)
        ops.end_backward(GRAPH)
        return y * 2

    x = torch.randn(4, 3)
    dc.start_backward(True)
    found = torch.compile(everything, backend=backend, fullgraph=True)(x, shards[0])
    assert torch.allclose(found, 2 * x @ whole_parameter(0).t(), atol=1e-6)
    stats = dc.stats()
    assert stats["gathers_fused"] == 2
    assert stats["gathered_bytes_live"] == 0
    assert stats["gradients_reduced"] == 1
    assert buffers[0].any()
    assert stats["bytes_offloaded"] > 0 and stats["bytes_reloaded"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_every_operator_traces_as_one_graph_and_does_its_work_there(world: int, backend: str) -> None:
    run_ranks(world, traces_everything, backend)


def runs_the_documented_example(rank: int, world: int, backend: str, requires_grad: bool) -> None:
    shards, _ = start(rank, world, requires_grad=True)

    @torch.compile(backend=backend, fullgraph=True)
    def forward_with_allgather(x, param_shard, graph_id, param_id):
        param = torch.ops.dc.allgather_param(param_shard, graph_id, param_id, dtype=torch.float16)
        param = torch.ops.dc.wait_allgather(param, graph_id, param_id)
        output = torch.matmul(x, param.T)
        dummy = torch.empty(0)
        dummy = torch.ops.dc.release_param(dummy, graph_id, param_id, n_users=1)
        return output

    x = torch.full((2, 3), rank + 1.0, dtype=torch.float16, requires_grad=requires_grad)
    for _ in range(2):
        shards[0].grad = x.grad = None
        dc.start_forward()
        output = forward_with_allgather(x, shards[0], GRAPH, 0)
        dc.end_forward()
        assert torch.allclose(output, x @ whole_parameter(0).half().T)
        assert dc.stats()["gathered_bytes_live"] == 0
        dc.start_backward(update=True)
        output.sum().backward()
        torch.ops.dc.end_backward(graph_id=GRAPH)
        mean = sum(range(1, world + 1)) / world
        size = shards[0].numel()
        expected = torch.full((15,), 2 * mean)[rank * size : (rank + 1) * size]
        assert torch.allclose(shards[0].grad[: expected.numel()], expected)
        if requires_grad:
            assert torch.allclose(x.grad, whole_parameter(0).half().sum(0).expand(2, 3))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_documented_compiled_example_trains(backend: str, requires_grad: bool) -> None:
    run_ranks(2, runs_the_documented_example, backend, requires_grad)


def code_of_a_layer(rank: int, world: int) -> list[str]:
    """Several readers of the parameter, fused and not, before a release that depends on none of them."""
    shards, _ = start(rank, world)

    def layer(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        w = ops.wait_allgather(ops.allgather_param(shard, GRAPH, 0), GRAPH, 0)
        y = torch.relu(x @ w.t()) + w.sum() * 2
        z = (w * 3).sum(0) + x[0]
        ops.release_param(torch.empty(0), GRAPH, 0, 1)
        v = ops.wait_allgather(ops.allgather_param(shard, GRAPH, 1), GRAPH, 1)
        out = y.sum() + z.sum() + (v * v).sum()
        ops.release_param(torch.empty(0), GRAPH, 1, 1)
        return out

    x = torch.randn(4, 3)
    w, v = whole_parameter(0), whole_parameter(1)
    expected = (torch.relu(x @ w.t()) + w.sum() * 2).sum() + ((w * 3).sum(0) + x[0]).sum() + (v * v).sum()
    found, codes = run_and_get_code(torch.compile(layer, fullgraph=True), x, shards[0])
    assert torch.allclose(found, expected)
    assert dc.stats()["gathered_bytes_live"] == 0
    return codes


def test_in_generated_code_a_release_comes_after_every_reader_and_collectives_keep_their_order() -> None:
    codes = run_ranks(2, code_of_a_layer)[0]
    body = codes[0][codes[0].index("def call") :].splitlines()
    calls = [line for line in body if "torch.ops.dc." in line and "#" not in line and "assert" not in line]
    names = [re.search(r"torch\.ops\.dc\.(\w+)", line).group(1) for line in calls]
    assert names == ["allgather_param", "wait_allgather", "release_param_traced"] * 2

    waited = re.match(r"\s*(\w+) = ", calls[1]).group(1)
    aliases = {waited}
    for line in body:  # "buf5 = buf4"
        renamed = re.match(r"\s*(\w+) = (\w+)(;|$)", line)
        if renamed and renamed.group(2) in aliases:
            aliases.add(renamed.group(1))
    release_at = body.index(calls[2])
    readers = [
        number
        for number, line in enumerate(body)
        if re.search(r"\b(cpp_fused\w*|triton_\w+\.run|extern_kernels\.\w+)\(", line)
        and any(re.search(rf"\b{a}\b", line) for a in aliases)
    ]
    assert readers, "no reader found: the test looks at the wrong names"
    assert max(readers) < release_at


def compiles_with_shape(rank: int, world: int, shape: tuple[int, ...]) -> None:
    shards, _ = start(rank, world, shape=shape)

    @torch.compile(fullgraph=True)
    def double(shard: torch.Tensor) -> torch.Tensor:
        return ops.wait_allgather(ops.allgather_param(shard, GRAPH, 0), GRAPH, 0) * 2

    assert torch.equal(double(shards[0]), 2 * whole_parameter(0, shape))


def test_kernels_cached_on_disk_for_one_shape_are_not_used_for_another(tmp_path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for shape in ((5, 3), (3, 5), (15,)):  # the same shard, the same graph text
        run_ranks(1, compiles_with_shape, shape, environment=cache)


def counts_compilations(rank: int, world: int) -> int:
    shards, _ = start(rank, world, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        y = x @ gather(shard, 0).t()
        release(0)
        return y.sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for _ in range(4):
        dc.start_forward()
        loss = compiled(torch.randn(2, 3), shards[0])
        dc.end_forward()
        dc.start_backward(True)
        loss.backward()
        ops.end_backward(GRAPH)
        with torch.no_grad():
            shards[0] -= 0.1 * shards[0].grad
            shards[0].grad = None
    return counter.frame_count


def test_training_steps_do_not_recompile() -> None:
    assert run_ranks(2, counts_compilations) == [1, 1]


def forward_effects_stay_out_of_the_backward(rank: int, world: int) -> None:
    from torch._dynamo.backends.common import aot_autograd

    shards, _ = start(rank, world, requires_grad=True)
    graphs: list[list[str]] = []

    def record(module: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append([str(node.target) for node in module.graph.nodes if "dc." in str(node.target)])
        return module

    def step(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        ops.prefetch_params_fused(GRAPH, [torch.empty(0)], [0])
        y = torch.relu(x @ gather(shard, 0).t())
        release(0)
        return y.sum()

    dc.start_forward()
    loss = torch.compile(step, backend=aot_autograd(fw_compiler=record), fullgraph=True)(
        torch.randn(2, 3, requires_grad=True), shards[0]
    )
    dc.end_forward()
    dc.start_backward(True)
    loss.backward()
    ops.end_backward(GRAPH)
    forward, backward = graphs
    assert forward == [
        f"dc.{name}.default"
        for name in (
            "prefetch_params_fused",
            "allgather_param",
            "wait_allgather",
            "release_param_traced",
        )
    ]
    assert backward == ["dc.reduce_grad.default"]


def test_effects_without_data_stay_in_the_pass_they_were_called_in() -> None:
    run_ranks(2, forward_effects_stay_out_of_the_backward)


def releases_late(rank: int, world: int) -> None:
    """Two matrix products read the parameter, each before one of two releases that depend on neither."""
    shards, _ = start(rank, world)

    def step(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        w = gather(shard, 0)
        a = x @ w.t()
        release(0, n_users=2)
        b = x.sin() @ w.t()
        release(0, n_users=2)
        return a.sum() + b.sum()

    x = torch.randn(4, 3)
    w = whole_parameter(0)
    found = torch.compile(step, fullgraph=True)(x, shards[0])
    assert torch.allclose(found, (x @ w.t()).sum() + (x.sin() @ w.t()).sum(), rtol=1e-4)
    assert dc.stats()["gathered_bytes_live"] == 0


def test_matrix_products_come_before_the_release_of_what_they_read() -> None:
    run_ranks(2, releases_late)


def frees_late(rank: int, world: int) -> None:
    start(rank, world, config={"free_activation_threshold": 10})

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        z = y * 2
        ops.free_tensors([y])
        return z + 1

    x = torch.randn(8, 8)
    assert torch.allclose(torch.compile(step, fullgraph=True)(x), 2 * x @ x + 1, atol=1e-5)
    assert dc.stats()["activations_freed"] == 1


def test_an_activation_is_freed_after_its_readers() -> None:
    run_ranks(1, frees_late)


def gathers_twice(rank: int, world: int, backend: str) -> None:
    shards, _ = start(rank, world, requires_grad=True)

    def step(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        y = x @ gather(shard, 0).t()
        release(0)
        z = y.sin().sum() + (gather(shard, 0) * 2).sum()
        release(0)
        return z

    x = torch.ones(2, 3)
    dc.start_forward()
    loss = torch.compile(step, backend=backend, fullgraph=True)(x, shards[0])
    dc.end_forward()
    w = whole_parameter(0).requires_grad_()
    reference = (x @ w.t()).sin().sum() + (w * 2).sum()
    assert torch.allclose(loss, reference)
    assert dc.stats()["gathered_bytes_live"] == 0
    dc.start_backward(True)
    loss.backward()
    ops.end_backward(GRAPH)
    reference.backward()
    size = shards[0].numel()
    expected = torch.nn.functional.pad(w.grad.reshape(-1), (0, size * world - 15))[rank * size : (rank + 1) * size]
    assert torch.allclose(shards[0].grad, expected, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_gathers_with_a_release_between_them_stay_two(backend: str) -> None:
    run_ranks(2, gathers_twice, backend)


def reduces_in_forward_order(rank: int, world: int) -> None:
    _, buffers = start(rank, world, count=3, shape=(4, 4))

    @torch.compile(fullgraph=True)
    def step(x: torch.Tensor, one: torch.Tensor) -> None:
        for index, activation in enumerate((x.sin(), x.cos(), x)):
            ops.reduce_grad(activation @ one, GRAPH, index)
        ops.end_backward(GRAPH)

    x, one = torch.randn(4, 4), torch.ones(4, 4)
    dist.broadcast(x, 0)
    dc.start_backward(True)
    step(x, one)
    for buffer, activation in zip(buffers, (x.sin(), x.cos(), x), strict=True):
        expected = (activation @ one).reshape(-1)[8 * rank : 8 * rank + 8]
        assert torch.allclose(buffer, expected, atol=1e-5)


def test_gradients_that_wait_are_safe_from_the_compilers_reuse_of_memory() -> None:
    run_ranks(2, reduces_in_forward_order)


def registers_the_graph_first(rank: int, world: int, shape: tuple[int, ...]) -> None:
    dc.init(None, {}, 100)
    dc.register_graph_z3(GRAPH, [0])
    shard = whole_parameter(0, shape).reshape(-1)
    dc.register_z3_param(0, shape, shard, None)

    @torch.compile(fullgraph=True)
    def double(shard: torch.Tensor) -> torch.Tensor:
        return ops.wait_allgather(ops.allgather_param(shard, GRAPH, 0), GRAPH, 0) * 2

    assert torch.equal(double(shard), 2 * whole_parameter(0, shape))


def test_caches_are_kept_apart_also_when_the_graph_is_registered_first(tmp_path) -> None:
    for shape in ((5, 3), (3, 5)):
        run_ranks(1, registers_the_graph_first, shape, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
