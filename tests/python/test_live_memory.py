"""What the planner is told of the memory that a graph takes while it runs."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deepcompile.compiler.live_memory import live_bytes
from harness import only_on_cpu

pytestmark = only_on_cpu("host memory")


def most(function: object, *inputs: torch.Tensor, fuses: bool = True) -> int:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return max(live_bytes(module.graph, [], fuses).values())


TABLE = 4 * 1000 * 64  # bytes


def sums_rows(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(1000, 64)
    return torch.ops.aten.index_put.default(table, [index], rows, True).sum()


def test_a_compiler_writes_rows_into_the_table_that_nobody_else_reads() -> None:
    index, rows = torch.zeros(8, dtype=torch.long), torch.ones(8, 64)
    assert TABLE <= most(sums_rows, index, rows) < TABLE + 1000
    assert most(sums_rows, index, rows, fuses=False) >= 2 * TABLE


def test_a_table_that_is_read_later_is_copied_before_rows_are_written() -> None:
    def reads_both(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(1000, 64)
        filled = torch.ops.aten.index_put.default(table, [index], rows, True)
        return torch.ops.aten.mm.default(filled.t(), table)

    index, rows = torch.zeros(8, dtype=torch.long), torch.ones(8, 64)
    assert most(reads_both, index, rows) >= 2 * TABLE


def test_a_table_whose_own_rows_are_written_is_copied_first() -> None:
    def writes_itself(index: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(1000, 64)
        return torch.ops.aten.index_put.default(table, [index], table, True).sum()

    assert most(writes_itself, torch.zeros(1000, dtype=torch.long)) >= 2 * TABLE


def test_an_input_is_not_written_over() -> None:
    def writes(table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put.default(table, [index], rows, True).sum()

    assert most(writes, torch.zeros(1000, 64), torch.zeros(8, dtype=torch.long), torch.ones(8, 64)) >= TABLE
