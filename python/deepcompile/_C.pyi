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
        """Sums ``tensor`` over the ranks, in place; on a device the host does not block. Every rank calls it."""
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
        of the flattened averaged gradient; with an empty one this rank owns nothing. If no rank owns anything, the
        parameter is frozen.
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
        """Uninitialised memory for a shard, where gathers need the fewest copies (over shared memory: in the shared heap).
        Shards in other memory work, too.
        """
    def set_persistent(self, ds_id: int) -> None:
        """Marks the parameter persistent: a release no longer frees its copy. Does not change existing copies."""
    def set_grad_buffer(
        self, ds_id: int, grad_buffer: torch.Tensor | None, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """Makes a frozen ZeRO-3 parameter trainable or, with None, freezes a trainable one. Called between steps; the ranks
        compare at the next ``start_forward``.
        """
    def plan_reductions(self, graph_id: int, buckets: Sequence[Sequence[int]], in_flight: int) -> None:
        """Sets which gradients are reduced together: those of each list as soon as its last one has come, all others by the
        bucket size. When more than ``in_flight`` reductions run, the caller waits for the oldest and frees its gradients.
        Called between backwards, with the same arguments on all ranks.
        """
    def limit_idle_memory(self, bytes: int) -> None:
        """Limits the idle memory that the pool keeps for later gathers; memory above the limit is freed at once. By default
        the pool keeps as much as was in use at once. In backwards on a device the limit is at most 16 MiB.
        """
    def reset_gathered_peak(self) -> None:
        """Restarts the count of ``stats()["gathered_bytes_peak"]``, and of the peak up to which the pool keeps memory."""
    def start_forward(self) -> None: ...
    @staticmethod
    def refuse_direct_gradients(shard: torch.Tensor, message: str) -> None: ...
    def hold_shards(self, hold: bool) -> None:
        """The program's promise that no rank changes a shard from here until the backward before an update ends (or
        ``hold_shards(False)``), so that parameters may be read in place instead of copied. Every rank calls it after
        ``start_forward``, in each forward for which the promise holds.
        """
    def end_reads(self) -> None:
        """Returns when every rank has finished its reads in place; then shards may change. Every rank calls it."""
    def discard_gradients(self, ds_ids: Sequence[int]) -> None:
        """Discards the gradients accumulated since the last update; the caller must clear ``shard.grad`` itself. Every rank
        calls it, between backwards.
        """
    def set_outside_step(self, outside: bool) -> None: ...
    def timeout(self) -> float:
        """The deadline of a wait that begins now, in seconds."""
    def let_gradients_go(self) -> None:
        """Frees the memory of gradient buffers until the next backward. Called after an update, when ``grad`` is None."""
    def gather_small_together(self, together: bool) -> None:
        """In steps with :meth:`hold_shards`, gathers all small parameters that cannot be read in place together, at the
        step's first gather, and keeps them to its end. Called between steps, the same on all ranks.
        """
    def end_forward(self) -> None: ...
    def start_backward(self, update: bool, settle_later: bool = False) -> None:
        """``update``: an optimizer step follows this backward. ``settle_later``: if none follows, the backward ends without
        waiting for its reductions. They are waited for by :meth:`settle`, by the next backward and by reads of
        ``shard.grad``; gradient buffers must not be read before. The same on all ranks.
        """
    def settle(self) -> None:
        """Waits for the reductions that backwards have left running."""
    def enable_profiling(self, enable: bool) -> None:
        """While enabled, reductions and frees are skipped."""
    def is_profiling(self) -> bool: ...
    def reset(self) -> None: ...
    def invalidate_gathered_param(self, ds_id: int) -> None:
        """Makes the parameter's copies stale, so that its next read gathers again, persistent or not."""
    def clear_all_gathered_params(self) -> None: ...
    @property
    def states(self) -> StateOffload:
        """Moves an optimizer's states between the device and the host."""
    @property
    def trace(self) -> StepTrace:
        """The log of events and collectives, which ``TraceReader`` reads."""
    @property
    def host_is_apart(self) -> bool:
        """Whether moving states to the host frees memory of the device."""
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        """This rank's counters (docs/runtime.md lists them)."""
    def wait_seconds(self) -> float:
        """Total seconds that waits have blocked the host, as in :meth:`stats`."""

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
