"""What only CUDA has. The tests of other files run on it as well: ``make test-cuda``."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

import deepcompile
from harness import DEVICE, NO_SERVICE, run_ranks

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: make test-cuda")


def test_without_a_gpu_the_package_says_why():
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    assert not deepcompile.cuda_available()
    from deepcompile.runtime.cuda_parts import require_cuda, why_no_cuda

    assert why_no_cuda() in (
        "this PyTorch was built without CUDA",
        "PyTorch sees no GPU (torch.cuda.is_available() is false)",
    )
    with pytest.raises(RuntimeError, match="cannot use CUDA here: "):
        require_cuda()


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 1))


def train(rank: int, world: int, steps: int, config: dict, seed: int = 0) -> list[float]:
    model = a_model()
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), config)
    generator = torch.Generator("cuda").manual_seed(seed + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert engine.sharding.runtime.device.type == "cuda"
    return torch.stack(losses).tolist()


EAGER = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5000}, "compile": {"mode": "off"}, "timeout": 30}


@needs_gpu
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_random_delays_of_the_streams_change_no_bit_of_two_hundred_steps(world: int, symmetric: bool):
    config = EAGER | {"symmetric_memory": symmetric}
    always = {"DEEPCOMPILE_SYMMETRIC_REDUCTIONS": "always"}
    calm = run_ranks(world, train, 200, config, environment=always)
    delayed = run_ranks(world, train, 200, config, environment=always | {"DEEPCOMPILE_STREAM_DELAY_US": "400"})
    assert calm == delayed
    assert calm[0][-1] < 0.5 * calm[0][0]


def gathers_into_registered_memory(rank: int, world: int) -> None:
    from deepcompile import dc
    from z3_fixture import GRAPH, shard_of

    runtime = dc.Runtime(None, {"timeout": 30, "registered_memory": True}, device="cuda")
    torch.manual_seed(3)
    # Whole numbers, so that sums are exact. The last two lie in NCCL's memory.
    wholes = [torch.randint(0, 1000, (size,)).float() for size in (5, 1 << 16, 3 << 20, (3 << 20) + 7)]
    shards = [shard_of(whole, rank, world) for whole in wholes]
    for index, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        runtime.register_z3_param(index, whole.shape, shard, None)
    runtime.register_graph_z3(GRAPH, list(range(len(wholes))))
    kept = []
    for turn in range(3):
        for shard in shards:
            shard += 1
        torch.ops.dc.prefetch_params_fused(GRAPH, shards[2:], [2, 3])
        for index, whole in enumerate(wholes):
            gathered = torch.ops.dc.allgather_param(shards[index], GRAPH, index)
            gathered = torch.ops.dc.wait_allgather(gathered, GRAPH, index)
            assert torch.equal(gathered, whole + (turn + 1)), (turn, index)
            if turn == 2:
                kept.append(gathered)
            else:
                torch.ops.dc.release_param(gathered, GRAPH, index, 1)
    assert runtime.stats()["buffers_taken"] == 3 * len(wholes)
    assert runtime.stats()["buffers_reused"] == 2 * len(wholes), "memory is to be used again, not made anew"
    runtime.cleanup()
    with pytest.raises(RuntimeError, match="is read after its gathered copy was invalidated"):
        kept[0] + 1


@needs_gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gathers_into_memory_that_is_registered_with_nccl_are_right_and_use_it_again(world: int):
    run_ranks(world, gathers_into_registered_memory)


def compiled_losses(rank: int, world: int, registered: bool) -> list[float]:
    import torch._inductor.config

    torch._inductor.config.deterministic = True  # else it chooses between kernels of other bits by measuring them
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 1024))
    config = {"timeout": 60, "registered_memory": registered}
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), config)
    generator = torch.Generator("cuda").manual_seed(rank)
    losses = []
    for _ in range(6):
        loss = engine(torch.randn(8, 1024, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@needs_gpu
def test_training_with_registered_memory_has_the_bits_of_training_without():
    assert run_ranks(2, compiled_losses, True) == run_ranks(2, compiled_losses, False)


@needs_gpu
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_like_one_process_with_both_batches(stage: int, symmetric: bool):
    clip = 0.01 if stage == 2 else 0.0
    config = EAGER | {"zero_optimization": {"stage": stage}, "gradient_clipping": clip, "symmetric_memory": symmetric}
    sharded = run_ranks(2, train, 20, config)
    (reference,) = run_ranks(1, both_batches, 20, clip)
    for step, (first, second, expected) in enumerate(zip(*sharded, reference, strict=True)):
        # The loss falls by four orders of magnitude; what the weights differ by does not.
        assert (first + second) / 2 == pytest.approx(expected, rel=2e-5, abs=1e-6 * reference[0]), step


def both_batches(rank: int, world: int, steps: int, clip: float) -> list[float]:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generators = [torch.Generator("cuda").manual_seed(rank) for rank in range(2)]
    losses = []
    for _ in range(steps):
        loss = sum(model(torch.randn(16, 64, generator=generator)).square().mean() for generator in generators) / 2
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sums_in_rank_order(rank: int, world: int, dtype: torch.dtype) -> None:
    from deepcompile import dc

    # Odd ones; as many as no launch takes; and one that takes several turns of the staging memory, in uneven pieces.
    sizes = [1, 7, 1000, 12_293, *range(64, 264), 40_000_001]
    runtime = dc.Runtime(None, {"timeout": 30, "symmetric_memory": True}, 100_000, device="cuda")
    shards, buffers = [], []
    for index, size in enumerate(sizes):
        own = -(-size // world)
        shards.append(runtime.empty((own,), dtype).zero_())
        buffers.append(torch.zeros(own, dtype=dtype))
        runtime.register_z3_param(index, [size], shards[index], buffers[index], name=f"w{index}")
    runtime.register_graph_z3(1, list(range(len(sizes))))

    def gradients(of_rank: int, turn: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(100 * turn + of_rank)
        return [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    for turn in range(3):
        runtime.start_backward(True)
        for index, gradient in enumerate(gradients(rank, turn)):
            if index % 2:
                torch.ops.dc.reduce_grad(gradient, 1, index)
            else:  # from where it lies
                torch.ops.dc.reduce_shard(gradient, shards[index], 1, True)
        torch.ops.dc.end_backward(1)
        total = [gradient.float() for gradient in gradients(0, turn)]
        for other in range(1, world):
            total = [a + b.float() for a, b in zip(total, gradients(other, turn), strict=True)]
        for size, buffer, summed in zip(sizes, buffers, total, strict=True):
            mine = (summed / world).to(dtype)[rank * buffer.numel() : (rank + 1) * buffer.numel()]
            assert torch.equal(buffer[: mine.numel()], mine), (turn, size)
    runtime.cleanup()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 4])
def test_reductions_through_symmetric_memory_have_the_bits_of_a_sum_in_rank_order(world: int, dtype: torch.dtype):
    always = {"DEEPCOMPILE_SYMMETRIC_REDUCTIONS": "always"}
    run_ranks(world, sums_in_rank_order, dtype, environment=always)


def reduces_either_way(rank: int, world: int) -> None:
    from deepcompile import dc

    runtime = dc.Runtime(None, {"timeout": 30, "symmetric_memory": True}, device="cuda")
    shard, buffer = runtime.empty((1 << 19,), torch.float32).zero_(), torch.zeros(1 << 19)
    runtime.register_z3_param(0, [1 << 20], shard, buffer)
    runtime.register_graph_z3(1, [0])
    runtime.start_backward(True)
    torch.ops.dc.reduce_grad(torch.full((1 << 20,), float(rank)), 1, 0)
    torch.ops.dc.end_backward(1)
    assert (buffer == (world - 1) / 2).all()
    runtime.cleanup()


@needs_gpu
@pytest.mark.parametrize("choice", ["auto", "never"])
def test_reductions_are_right_whichever_way_is_measured_or_set(choice: str):
    run_ranks(2, reduces_either_way, environment={"DEEPCOMPILE_SYMMETRIC_REDUCTIONS": choice})


def train_compiled(rank: int, world: int, graphs: bool) -> list[float]:
    import torch._inductor.config
    from torch._inductor.cudagraph_trees import get_manager

    torch._inductor.config.triton.cudagraphs = graphs
    losses = train(rank, world, 12, {"zero_optimization": {"stage": 3}, "timeout": 60})
    assert (get_manager(0, create_if_none_exists=False) is not None) == graphs
    return losses


@needs_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_compute_that_inductor_captures_in_cuda_graphs_trains_the_same(world: int):
    captured, expected = (run_ranks(world, train_compiled, graphs) for graphs in (True, False))
    for mine, theirs in zip(captured, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def steps_become_longer(rank: int, world: int, later_rows: int) -> tuple[list[tuple[float, float]], dict[str, str]]:
    model = a_model()
    settings = {"backend": "aot_eager", "profile_steps": 2, "replan_factor": 3.0, "replan_steps": 3}
    engine = deepcompile.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        {"zero_optimization": {"stage": 3}, "compile": settings, "timeout": 60},
    )
    for step in range(18):
        x = torch.randn(later_rows if step >= 7 else 16, 64)
        torch._dynamo.mark_dynamic(x, 0)
        engine.backward(engine(x).square().mean())
        engine.step()
    return engine.drift.history, dict(engine.explain().rows)


@needs_gpu
def test_steps_that_take_the_device_much_longer_are_measured_and_planned_again():
    (history, rows), (other, _) = run_ranks(2, steps_become_longer, 8 << 20)
    assert history and history == other
    expected, found = history[0]
    assert found > 3 * expected
    assert "when a step went from" in rows["planned again"]
    assert run_ranks(2, steps_become_longer, 16)[0][0] == []


@needs_gpu
def test_a_step_whose_gradients_are_not_finite_changes_nothing_and_is_counted():
    run_ranks(2, overflows)


def overflows(rank: int, world: int) -> None:
    model = a_model()
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), EAGER)
    x = torch.ones(4, 64)

    def step(factor: float) -> None:
        engine.backward(engine(x).square().mean() * factor)
        engine.step()

    step(1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    step(float("inf") if rank == 1 else 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(1.0)
    assert engine.skipped_steps == 1
    assert engine.steps == 2
    # A rank may hold nothing but padding of a bias.
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@needs_gpu
def test_a_rank_that_dies_becomes_an_error_that_names_it_within_the_deadline():
    seconds, message = run_ranks(2, loses_its_peer, may_die=(1,), timeout=60, environment=NO_SERVICE)[0]
    assert seconds < 15
    assert "failed: " in message
    assert "ranks [1] did not answer" in message


def loses_its_peer(rank: int, world: int) -> tuple[float, str]:
    model = a_model()
    config = EAGER | {"timeout": 5}
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    x = torch.ones(4, 64)
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
            torch.cuda.synchronize()
    return time.monotonic() - started, str(raised.value)


def surplus_on_one_rank(rank: int, world: int) -> str:
    from deepcompile import dc
    from z3_fixture import GRAPH, start

    _, buffers = start(rank, world, count=2, shape=(4,), config={"timeout": 5})
    ops = torch.ops.dc
    dc.start_backward(True)
    for index in (1, 0):
        ops.reduce_grad(torch.full((4,), 2.0), GRAPH, index)
    ops.end_backward(GRAPH)
    assert all(buffer.eq(2).all() for buffer in buffers)
    dc.start_backward(True)
    for index in (1, 0) if rank == 0 else (1, 0, 1):
        ops.reduce_grad(torch.full((4,), 2.0), GRAPH, index)
    if rank == 0:
        ops.end_backward(GRAPH)
        assert not all(buffer.isfinite().all() for buffer in buffers), "they lack what the other rank has more of"
        return ""
    with pytest.raises(RuntimeError) as raised:
        ops.end_backward(GRAPH)
        torch.cuda.synchronize()
    return str(raised.value)


@needs_gpu
def test_gradients_that_one_rank_alone_has_more_of_are_an_error_there_and_not_used_elsewhere():
    assert run_ranks(2, surplus_on_one_rank, timeout=60)[1]


def sums_squares(rank: int, world: int) -> None:
    from deepcompile.runtime.load import _C

    sizes = (1, 7, 255, 4096, 65536, 65537, 200_001)
    for dtypes in ((torch.float32,), (torch.bfloat16,), (torch.float16, torch.bfloat16, torch.float32)):
        # More than one launch takes, of which some begin where 16 bytes at a time cannot be read.
        tensors = [torch.randn(size + 1).to(dtypes[size % len(dtypes)])[1:] for size in sizes * 25]
        expected = sum(tensor.double().square().sum() for tensor in tensors)
        found = {_C.sum_of_squares(tensors, tensors[0].device).item() for _ in range(5)}
        assert len(found) == 1, "the order of the sum is not fixed"
        assert found.pop() == pytest.approx(expected.item(), rel=1e-6)
    assert _C.sum_of_squares([torch.tensor([1.0, float("nan")])], torch.device("cuda")).isnan()
    assert _C.sum_of_squares([torch.ones(3, dtype=torch.float64), torch.ones(2)], torch.device("cuda")).item() == 5


@needs_gpu
def test_the_sum_of_the_squares_of_many_tensors_is_right_and_has_the_same_bits_every_time():
    run_ranks(1, sums_squares)


def gives_memory_back_ahead_of_the_device(rank: int, world: int) -> None:
    from deepcompile import dc
    from z3_fixture import gather, release, start, whole_parameter

    shape = (1 << 18,)
    shards, _ = start(rank, world, count=4, shape=shape)
    dc._runtime().limit_idle_memory(0)
    gather(shards[0], 0)
    release(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    idle, copies = [], []
    for index, shard in enumerate(shards):
        copies.append(gather(shard, index) * 1)
        release(index)
        idle.append(dc.stats()["buffer_bytes_idle"])
    after = torch.cuda.Event()
    after.record()
    assert not after.query(), "the device is to be far behind the host here"
    assert idle == [0] * len(shards)
    for index, copy in enumerate(copies):
        assert torch.equal(copy, whole_parameter(index, shape)), "another gather wrote to the memory too early"


@needs_gpu
def test_memory_of_a_released_parameter_is_free_before_the_device_has_read_it():
    run_ranks(2, gives_memory_back_ahead_of_the_device)


def gathers_on_two_streams(rank: int, world: int) -> None:
    from z3_fixture import gather, release, start, whole_parameter

    shape = (1 << 18,)
    shards, _ = start(rank, world, count=2, shape=shape)
    side = torch.cuda.Stream()
    for index, shard in enumerate(shards):  # what is made at first use is made here
        gather(shard, index)
        release(index)
    torch.cuda.synchronize()
    whole = gather(shards[0], 0)
    torch.cuda._sleep(500_000_000)
    late = whole * 1
    del whole
    release(0)
    with torch.cuda.stream(side):
        beside = gather(shards[1], 1) * 1
        release(1)
    torch.cuda.synchronize()
    assert torch.equal(late, whole_parameter(0, shape)), (
        "the gather on the other stream wrote to memory that was being read"
    )
    assert torch.equal(beside, whole_parameter(1, shape))


@needs_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_memory_that_one_stream_still_reads_is_not_given_to_another(world: int):
    run_ranks(world, gathers_on_two_streams)


@needs_gpu
def test_the_host_does_not_wait_for_the_device_in_a_step():
    run_ranks(2, runs_ahead)


def runs_ahead(rank: int, world: int) -> None:
    model = a_model()
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), EAGER)
    x = torch.ones(4, 64)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # PyTorch's own calls that would wait are errors now
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    engine.backward(engine(x).square().mean())
    engine.optimizer.zero_grad()
    assert not busy.query(), "a forward and a backward were enqueued only after the device had caught up"
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
