"""What the ranks of each candidate run. A team is a set of processes of its own: two libraries that register the same
operators, or that wait in different ways, never share one. An entry of ``TEAMS`` is constructed in every rank, after the
rank's environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``) is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed is not to look for another
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist

FLOORS = ("memcpy", "no-op")  # interfaces that reach no other rank


class Case(NamedTuple):
    """One cell of a table: ``bytes`` is what an all-reduce reduces, an all-gather yields and a reduce-scatter is given."""

    collective: str
    interface: str  # by what it is called: "operator", "c10d", ...
    memory: str  # where the tensors lie: "ordinary" or "shared"
    dtype: str
    bytes: int


class Call(NamedTuple):
    """``run()`` does the work once, from ``source`` to ``target`` (the same tensor when it is in place)."""

    run: Callable[[], Any]
    source: torch.Tensor
    target: torch.Tensor


class Team:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def empty(self, case: Case, parts: int = 1) -> torch.Tensor:
        """A tensor of the case's bytes (a few less if the ranks do not divide them), or of one of ``parts`` of it."""
        dtype = getattr(torch, case.dtype)
        return torch.empty(case.bytes // dtype.itemsize // self.world * self.world // parts, dtype=dtype)

    def in_place(self, case: Case, function: Callable[[torch.Tensor], Any]) -> Call:
        tensor = self.empty(case)
        return Call(partial(function, tensor), tensor, tensor)

    def call(self, case: Case) -> Call:
        raise NotImplementedError


class Bounds(Team):
    """The floors. ``resolve_conj`` of a real tensor is a C++ operator that returns its one argument."""

    def call(self, case: Case) -> Call:
        if case.interface == "no-op":
            return self.in_place(case, torch.ops.aten.resolve_conj.default)
        source, target = self.empty(case), self.empty(case)
        return Call(partial(target.copy_, source), source, target)


class C10d(Team):
    """torch.distributed with the backend of that name."""

    backend: str

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        dist.init_process_group(self.backend)  # rank, size and address from the environment

    def call(self, case: Case) -> Call:
        if case.collective == "all-reduce":
            return self.in_place(case, dist.all_reduce)
        whole, part = self.empty(case), self.empty(case, self.world)
        if case.collective == "all-gather":
            return Call(partial(dist.all_gather_into_tensor, whole, part), part, whole)
        return Call(partial(dist.reduce_scatter_tensor, part, whole), whole, part)


class Gloo(C10d):
    backend = "gloo"


class DeepCompile(C10d):
    backend = "shm"

    def __init__(self, rank: int, world: int) -> None:
        import deepcompile

        self.library = deepcompile
        for path in ("shm.empty", "dc.initialize"):  # before any rank waits for another
            found: Any = deepcompile
            for name in path.split("."):
                found = getattr(found, name)
        super().__init__(rank, world)
        deepcompile.dc.initialize(world, rank)

    def empty(self, case: Case, parts: int = 1) -> torch.Tensor:
        ordinary = super().empty(case, parts)
        if case.memory == "ordinary":
            return ordinary
        return self.library.shm.empty(*ordinary.shape, dtype=ordinary.dtype)

    def call(self, case: Case) -> Call:
        if case.interface == "operator":
            return self.in_place(case, torch.ops.deepspeed.inference_all_reduce_.default)
        if case.interface == "call":
            return self.in_place(case, self.library.comm.inference_all_reduce)
        return super().call(case)


class DeepSpeed(Team):
    """Its library is compiled at first use, which takes a minute."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False).initialize(world, rank)

    def call(self, case: Case) -> Call:
        return self.in_place(case, torch.ops.deepspeed.inference_all_reduce_.default)


class OpenMpi(Team):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        from mpi4py import MPI

        self.mpi = MPI
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (rank, world):
            raise RuntimeError("mpi4py was built for another MPI than the mpirun in PATH")

    def call(self, case: Case) -> Call:
        tensor = self.empty(case)
        buffer = [tensor.numpy(), tensor.numel(), self.mpi.FLOAT]  # quicker than to let mpi4py look at an array
        return Call(partial(self.mpi.COMM_WORLD.Allreduce, self.mpi.IN_PLACE, buffer), tensor, tensor)


TEAMS: dict[str, type[Team]] = {
    "deepcompile": DeepCompile,
    "gloo": Gloo,
    "deepspeed": DeepSpeed,
    "openmpi": OpenMpi,
    "bounds": Bounds,
}


def check(case: Case, call: Call, rank: int, world: int) -> None:
    """Runs the call once and looks at what it did; leaves zeros, which any number of further calls keeps."""
    call.target.zero_()
    call.source.fill_(rank + 1)
    call.run()
    parts = call.target.chunk(world)
    if case.interface in FLOORS:
        expected = [rank + 1] * world
    elif case.collective == "all-gather":
        expected = list(range(1, world + 1))
    else:
        expected = [world * (world + 1) // 2] * world
    right = all(bool((part == value).all()) for part, value in zip(parts, expected, strict=False))
    if not right:
        raise RuntimeError(f"wrong result: {case}")
    call.source.zero_()
    call.target.zero_()
