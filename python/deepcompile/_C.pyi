from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

class Config:
    symmetric_memory: bool
    registered_memory: bool
    double_buffer: bool
    free_activation_threshold: int
    offload_limit: int
    sync_before_reduce: bool
    sync_after_reduce: bool
    sync_before_allgather: bool
    sync_after_allgather: bool
    pre_div_reduce: bool
    timeout: float
    debug: bool
    def __init__(self) -> None: ...

class ShmGroup:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

def open_shm_group(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    *,
    slot_bytes: int | None = None,
    like: ShmGroup | None = None,
) -> ShmGroup | str: ...
def communicator_choice() -> str: ...
def direct_operators() -> list[str]: ...
def take_for_parameters(type: type) -> None: ...
def set_default_device_mode(mode: type) -> None: ...
def direct_call(name: str, general: Callable[..., Any]) -> Callable[..., Any]: ...
def call_instances_directly(type: type, function: Callable[..., Any]) -> None: ...

class Channel: ...

class StateOffload:
    def set(self, ds_id: int, tensors: list[torch.Tensor], name: str) -> None: ...
    def move(self, leave: list[int], free: list[int], fetch: list[int]) -> None: ...
    def require(self, ds_ids: list[int]) -> None: ...
    def allow_returns(self, allowed: bool) -> None: ...
    def settle(self) -> None: ...
    @property
    def bytes_away(self) -> int: ...
    @property
    def away(self) -> list[int]: ...

class Runtime:
    def __init__(
        self,
        process_group: dist.ProcessGroup,
        config: Config,
        initial_reduce_bucket_size: int,
        gather: Backend | ShmGroup | Channel,
        reduce: Backend | ShmGroup | Channel,
        control: Backend | ShmGroup | Channel,
        local_ranks: int,
        device: torch.device,
        store: Store,
    ) -> None: ...
    def sum_over_ranks(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor``, in place, over the ranks; on a device without stopping the host. Every rank calls it."""
    def register_param(
        self,
        ds_id: int,
        ds_shape: Sequence[int],
        ds_tensor: torch.Tensor,
        grad_buffer: torch.Tensor | None,
        offset: int,
        *,
        name: str = "",
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Registers a whole parameter for ZeRO-1 or 2. ``grad_buffer`` receives elements ``[offset, offset + its numel)``
        of the flattened averaged gradient; an empty one owns nothing. Where no rank owns anything the parameter is frozen.
        """
    def register_z3_param(
        self,
        ds_id: int,
        ds_shape: Sequence[int],
        ds_tensor: torch.Tensor,
        grad_buffer: torch.Tensor | None,
        persistent: bool = False,
        *,
        name: str = "",
        reduce_dtype: torch.dtype | None = None,
    ) -> None: ...
    def register_graph_z1(self, graph_id: int, ds_ids: Sequence[int]) -> None: ...
    def register_graph_z2(self, graph_id: int, ds_ids: Sequence[int]) -> None: ...
    def register_graph_z3(self, graph_id: int, ds_ids: Sequence[int], *, reduce_at_update: bool = False) -> None: ...
    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for a shard: where gathers move it with the fewest copies (over shared memory, in the heap
        that the ranks share). Shards that lie elsewhere travel as well.
        """
    def set_persistent(self, ds_id: int) -> None:
        """Keeps the gathered parameter when it is released. What is gathered already stays as it is."""
    def set_grad_buffer(
        self, ds_id: int, grad_buffer: torch.Tensor | None, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """Between steps: a frozen ZeRO-3 parameter is trained from now on, or (None) a trained one is frozen. The ranks
        agree on it at the next ``start_forward``.
        """
    def plan_reductions(self, graph_id: int, buckets: Sequence[Sequence[int]], in_flight: int) -> None:
        """Reduces the gradients of each list together, as soon as its last one is there; the rest by the bucket size. A
        reduction beyond ``in_flight`` waits for the oldest, whose gradients then go. The same on all ranks, between
        backwards.
        """
    def limit_idle_memory(self, bytes: int) -> None:
        """So much memory of gathered parameters is kept for the next ones while nobody uses it. What is beyond is given back
        at once, for whatever else needs some meanwhile. By default it is as much as was in use at once; in the backwards of
        a device 16 MiB at most, whatever was said here.
        """
    def reset_gathered_peak(self) -> None:
        """``stats()["gathered_bytes_peak"]`` counts from now on, and with it the memory that is kept for gathers."""
    def start_forward(self) -> None: ...
    @staticmethod
    def refuse_direct_gradients(shard: torch.Tensor, message: str) -> None: ...
    def hold_shards(self, hold: bool) -> None:
        """No rank changes a shard from here until the backward before an update ends (or ``hold_shards(False)``), so
        parameters may be read where their shards lie and need not be copied. All ranks, before each forward for which it
        holds, after ``start_forward``.
        """
    def end_reads(self) -> None:
        """Shards may change when this returns: every rank has done with what it read of them in place. All ranks."""
    def discard_gradients(self, ds_ids: Sequence[int]) -> None:
        """Between backwards: what was accumulated of these parameters since the last update is thrown away. ``shard.grad``
        is the caller's to clear. Every rank calls it.
        """
    def set_outside_step(self, outside: bool) -> None: ...
    def timeout(self) -> float:
        """Seconds that a wait may take now."""
    def let_gradients_go(self) -> None:
        """After an update, when ``grad`` of the shards is None: gradient buffers take no memory until the next backward."""
    def gather_small_together(self, together: bool) -> None:
        """Within a known step (:meth:`hold_shards`) small parameters that cannot be read in place are gathered at its first
        gather, in one collective, and stay to its end. The same on all ranks, between steps.
        """
    def end_forward(self) -> None: ...
    def start_backward(self, update: bool, settle_later: bool = False) -> None:
        """``update`` says that an optimizer step follows this backward. With ``settle_later`` one that no update follows
        ends without a wait for its reductions: gradient buffers must not be read before :meth:`settle`, the next backward
        or a read of ``shard.grad``, which wait. The same on all ranks.
        """
    def settle(self) -> None:
        """Waits for the reductions that backwards have left running."""
    def enable_profiling(self, enable: bool) -> None:
        """While enabled, reductions and frees are skipped."""
    def is_profiling(self) -> bool: ...
    def reset(self) -> None: ...
    def invalidate_gathered_param(self, ds_id: int) -> None:
        """The next gather of the parameter travels again, persistent or not."""
    def clear_all_gathered_params(self) -> None: ...
    @property
    def states(self) -> StateOffload:
        """An optimizer's states, between the device and the host."""
    @property
    def trace(self) -> StepTrace:
        """The log of what happens; ``TraceReader`` reads it."""
    @property
    def host_is_apart(self) -> bool:
        """Whether what moves to the host leaves the device's memory."""
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        """What this rank did, in numbers (docs/runtime.md lists them)."""
    def wait_seconds(self) -> float:
        """Of :meth:`stats`: how long the host was blocked in waits so far."""

class StepTrace:
    def start(self, releases: bool = False) -> int: ...
    def stop(self, reader: int) -> tuple[list[tuple[Any, ...]], int, bool]: ...
    def drop(self, reader: int) -> None: ...
    @property
    def on(self) -> bool:
        """Whether somebody reads."""
    def begin_graph(self, backward: bool) -> None: ...

class SavedParameter: ...

def sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor: ...
def graph_ids() -> list[int]: ...
def default_runtime() -> Runtime | None: ...
def set_default_runtime(runtime: Runtime | None) -> None: ...
def pack_parameter(tensor: torch.Tensor) -> SavedParameter | None: ...
def set_saved_tensor_hooks(pack: Any, unpack: Any) -> None: ...
def keep_gathered_as_ids() -> None: ...
def stop_keeping_gathered_as_ids() -> None: ...
def unpack_parameter(saved: SavedParameter) -> torch.Tensor: ...
def make_shm_backend(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int]
) -> Backend: ...
def close_shm_backends(grace: timedelta) -> None: ...
def empty_shared(sizes: list[int], dtype: torch.dtype) -> torch.Tensor: ...
def is_shared(tensor: torch.Tensor) -> bool: ...
def trim_shared() -> None: ...
def set_inference_group(
    store: Store, rank: int, size: int, timeout: timedelta, process_group: dist.ProcessGroup | None
) -> None: ...
def reset_inference_group() -> None: ...
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor: ...
def set_inference_fallback(otherwise: Callable[..., torch.Tensor], holder: object, attribute: str) -> None: ...
def set_inference_owner(owner: dist.ProcessGroup | None) -> None: ...
def clear_inference_owner() -> None: ...
def inference_ranks_apart() -> str | None: ...

_Event = tuple[int, torch.dtype, str, bool]
_Ids = tuple[int, ...]
_Scheduled = tuple[_Event, bool, list[list[tuple[int, torch.dtype]]], tuple[_Ids, _Ids, _Ids]]

class StepSchedule:
    def __init__(self, events: list[_Scheduled]) -> None: ...
    def __len__(self) -> int: ...

class ScheduleFollower:
    def __init__(
        self,
        schedules: list[list[_Scheduled]],
        leaves: set[int],
        persistent: set[int],
        agree: Any,
        names: dict[int, str],
    ) -> None: ...
    def add_schedule(self, events: list[_Scheduled]) -> None: ...
    @property
    def in_cycle(self) -> bool: ...
    @property
    def cycles(self) -> int: ...
    @property
    def divergences(self) -> int: ...
    @property
    def switches(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def take_divergences(self) -> list[tuple[str, list[_Event]]]: ...

def graph_device(graph_id: int) -> torch.device: ...
def begin_graph(graph_id: int, schedule: StepSchedule | None, shards: list[torch.Tensor]) -> None: ...
def follow(graph_id: int, follower: ScheduleFollower | None) -> None: ...
def end_cycle(graph_id: int) -> None: ...
