"""Every collective of the backend ``shm`` on random shapes, types and views, against what each rank works out by itself."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import harness
import shm_fixture as fixture
from harness import only_on_cpu

pytestmark = only_on_cpu("shared memory of processes")

WORLDS = [1, 2, 3, 4]


class Case:
    """One random call. All ranks draw the same numbers, except for the layout of their own tensors."""

    def __init__(self, seed: int, rank: int, world: int, dtypes: list[torch.dtype]) -> None:
        self.draw = random.Random(seed)
        self.rank, self.world = rank, world
        self.seed = seed
        self.dtype = self.draw.choice(dtypes)
        self.shape = self.draw.choice([[7], [1], [0], [3, 5], [2, 3, 4], [64, 33], [129, 65], [70_001], [2, 40_000]])
        self.root = self.draw.randrange(world)
        self._layouts = random.Random(seed * 31 + rank)

    def whole(self, rank: int, part: int = 0, shape: list[int] | None = None) -> torch.Tensor:
        """What `rank` gives as its part number `part`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank * 16 + part)
        return fixture.values(self.shape if shape is None else shape, self.dtype, generator)

    def mine(self, part: int = 0, shape: list[int] | None = None) -> torch.Tensor:
        return fixture.laid_out(self.whole(self.rank, part, shape), self._layouts.randrange(4))

    def room(self, shape: list[int] | None = None) -> torch.Tensor:
        zeros = torch.zeros(self.shape if shape is None else shape, dtype=torch.uint8).to(self.dtype)
        return fixture.laid_out(zeros, self._layouts.randrange(4))

    def equal(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        same = actual.shape == expected.shape and torch.equal(fixture.bits(actual), fixture.bits(expected))
        assert same, f"seed {self.seed}, {what}, {self.dtype}, {self.shape}, strides {actual.stride()}"


REDUCTIONS = {
    dist.ReduceOp.SUM: lambda a, b: a + b,
    dist.ReduceOp.PRODUCT: lambda a, b: a * b,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def reduced(case: Case, op: dist.ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float64 if case.dtype.is_floating_point else case.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = REDUCTIONS[op](total, part.to(wide))
    return total.to(case.dtype)


def reduction(case: Case) -> dist.ReduceOp:
    ops = list(REDUCTIONS)
    return case.draw.choice(ops[:4] if case.dtype.is_floating_point else ops)


def reductions_agree(rank: int, world: int, count: int) -> None:
    group = fixture.shm_group()
    for seed in range(count):
        case = Case(seed, rank, world, fixture.REDUCED)
        op = reduction(case)
        expected = reduced(case, op, [case.whole(r) for r in range(world)])
        tensor = case.mine()
        dist.all_reduce(tensor, op, group)
        case.equal(tensor, expected, "all_reduce")
        if seed % 8 == 0:
            assert fixture.same_everywhere(tensor)
        if seed % 4 == 0 and case.dtype in (torch.float32, torch.int64) and op != dist.ReduceOp.BXOR:
            beside = case.whole(rank)
            dist.all_reduce(beside, op)  # gloo
            case.equal(tensor, beside, "all_reduce of gloo")

        tensor = case.mine()
        dist.reduce(tensor, case.root, op, group)
        case.equal(tensor, expected if rank == case.root else case.whole(rank), "reduce")

        uneven = [[case.draw.randrange(5), 3] for _ in range(world)]
        output = case.room(uneven[rank])
        dist.reduce_scatter(output, [case.mine(r, uneven[r]) for r in range(world)], op, group)
        parts = [case.whole(r, rank, uneven[rank]) for r in range(world)]
        case.equal(output, reduced(case, op, parts), "reduce_scatter")

        output = case.room()
        dist.reduce_scatter_tensor(output, case.mine(0, [world, *case.shape]), op, group)
        parts = [case.whole(r, 0, [world, *case.shape])[rank] for r in range(world)]
        case.equal(output, reduced(case, op, parts), "reduce_scatter_tensor")


def averages_agree(rank: int, world: int) -> None:
    group = fixture.shm_group()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch.full((1001,), float(world * (rank + 1)), dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
        assert torch.equal(tensor, torch.full_like(tensor, world * (world + 1) / 2))
    number = torch.full((3, 5), complex(rank, 1), dtype=torch.complex64)
    dist.all_reduce(number, group=group)
    assert torch.equal(number, torch.full_like(number, complex(world * (world - 1) / 2, world)))
    # Halves are added in fp32 and rounded once: 2048 + 1 + 1 is 2050 in fp16 only that way.
    half = torch.full((33,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    dist.all_reduce(half, group=group)
    assert half[0].item() == float(torch.tensor(2048.0 + world - 1).half())


def moves_agree(rank: int, world: int, count: int) -> None:
    group = fixture.shm_group()
    ranks = range(world)
    for seed in range(1000, 1000 + count):
        case = Case(seed, rank, world, fixture.MOVED)
        tensor = case.mine() if rank == case.root else case.room()
        dist.broadcast(tensor, case.root, group)
        case.equal(tensor, case.whole(case.root), "broadcast")

        outputs = [case.room() for _ in ranks]
        dist.all_gather(outputs, case.mine(), group)
        for r in ranks:
            case.equal(outputs[r], case.whole(r), "all_gather")

        output = case.room([world, *case.shape])
        dist.all_gather_into_tensor(output, case.mine(), group)
        case.equal(output, torch.stack([case.whole(r) for r in ranks]), "all_gather_into_tensor")

        outputs = [case.room() for _ in ranks] if rank == case.root else None
        dist.gather(case.mine(), outputs, case.root, group)
        for r in ranks if rank == case.root else ():
            case.equal(outputs[r], case.whole(r), "gather")

        output = case.room()
        dist.scatter(output, [case.mine(r) for r in ranks] if rank == case.root else None, case.root, group)
        case.equal(output, case.whole(case.root, rank), "scatter")

        # Rank a sends rows[a][b] rows to rank b.
        rows = [[case.draw.randrange(4) for _ in ranks] for _ in ranks]
        sent = [case.whole(r, 1, [sum(rows[r]), 3]).split(rows[r]) for r in ranks]
        received = [rows[r][rank] for r in ranks]
        expected = torch.cat([sent[r][rank] for r in ranks])
        output = case.room([sum(received), 3])
        dist.all_to_all_single(output, case.mine(1, [sum(rows[rank]), 3]), received, rows[rank], group)
        case.equal(output, expected, "all_to_all_single, uneven")

        outputs = [case.room([n, 3]) for n in received]
        dist.all_to_all(outputs, [part.clone() for part in sent[rank]], group)
        case.equal(torch.cat(outputs), expected, "all_to_all")

        output = case.room([world, *case.shape])
        dist.all_to_all_single(output, case.mine(2, [world, *case.shape]), group=group)
        even = [case.whole(r, 2, [world, *case.shape])[rank] for r in ranks]
        case.equal(output, torch.stack(even), "all_to_all_single, even")


def coalesced_agree(rank: int, world: int) -> None:
    group = fixture.shm_group()
    sizes = [(3,), (0,), (5, 4), (20_000,)]
    with dist._coalescing_manager(group):
        reduced = [torch.full(size, rank + 1.0) for size in sizes]
        for tensor in reduced:
            dist.all_reduce(tensor, group=group)
    assert all(torch.equal(t, torch.full_like(t, world * (world + 1) / 2)) for t in reduced)

    with dist._coalescing_manager(group, async_ops=True) as manager:
        gathered = [torch.empty(world, *size) for size in sizes]
        for tensor, size in zip(gathered, sizes, strict=True):
            dist.all_gather_into_tensor(tensor, torch.full(size, float(rank)), group)
    manager.wait()
    assert all(torch.equal(t[r], torch.full_like(t[r], float(r))) for t in gathered for r in range(world))

    with dist._coalescing_manager(group):
        scattered = [torch.empty(size) for size in sizes]
        for tensor in scattered:
            dist.reduce_scatter_tensor(tensor, torch.full((world, *tensor.shape), rank + 1.0), group=group)
    assert all(torch.equal(t, torch.full_like(t, world * (world + 1) / 2)) for t in scattered)

    # Collectives that have no coalesced form become one work.
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        one, two = torch.full((7,), float(rank)), torch.full((2, 3), float(rank))
        dist.broadcast(one, 0, group, async_op=True)
        dist.broadcast(two, world - 1, group, async_op=True)
    manager.wait()
    assert torch.equal(one, torch.zeros(7)) and torch.equal(two, torch.full((2, 3), world - 1.0))

    inputs = [torch.full((3,), float(rank)), torch.full((2, 2), float(rank))]
    lists = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(world)]
    dist.all_gather_coalesced(lists, inputs, group)
    assert all((tensor == r).all() for r in range(world) for tensor in lists[r])


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_of_any_shape_type_and_view_give_every_rank_the_same_right_bits(world):
    harness.run_ranks(world, reductions_agree, 120)


@pytest.mark.parametrize("world", [1, 3])
def test_averages_complex_sums_and_the_single_rounding_of_halves(world):
    harness.run_ranks(world, averages_agree)


@pytest.mark.parametrize("world", WORLDS)
def test_moves_carry_any_type_and_view(world):
    harness.run_ranks(world, moves_agree, 60)


@pytest.mark.parametrize("world", [1, 3])
def test_coalesced_forms(world):
    harness.run_ranks(world, coalesced_agree)
