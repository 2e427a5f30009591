"""The runtime of one process group: register sharded parameters and graphs, then call the operators ``torch.ops.dc.*``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepcompile.runtime import compile_cache, cuda_parts, saved_tensors
from deepcompile.runtime.channels import default_device, open_channels, ranks_on_this_host, resolve_group
from deepcompile.runtime.load import _C
from deepcompile.runtime.runtime_config import make_config

DEFAULT_BUCKET_SIZE = 50_000_000

open_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """One runtime per process group. ``config`` is a dict or an object with the attributes of
    :class:`deepcompile.runtime.runtime_config.RuntimeConfig`; ``initial_reduce_bucket_size`` counts elements. Parameters
    live on ``device``: unless given, the current GPU where the group has NCCL or PyTorch makes tensors there, else the CPU.

    Making one is a collective: every rank of ``process_group`` does it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: Mapping[str, Any] | object | None = None,
        initial_reduce_bucket_size: int = DEFAULT_BUCKET_SIZE,
        device: torch.device | str | None = None,
    ) -> None:
        native_config = make_config(config)
        if isinstance(initial_reduce_bucket_size, bool) or not isinstance(initial_reduce_bucket_size, int):
            raise TypeError(
                f"initial_reduce_bucket_size must be a number of elements, not {initial_reduce_bucket_size!r}"
            )
        if initial_reduce_bucket_size < 1:
            raise ValueError(
                f"initial_reduce_bucket_size is {initial_reduce_bucket_size} elements; it must be at least 1"
            )
        group = resolve_group(process_group)
        self.device = _checked_device(group, device)
        channels = open_channels(group, self.device, native_config)
        self._native = _C.Runtime(
            group,
            native_config,
            initial_reduce_bucket_size,
            channels.gather,
            channels.reduce,
            channels.control,
            local_ranks=ranks_on_this_host(group),
            device=self.device,
            store=channels.store,
        )
        self._shapes = compile_cache.RegisteredShapes()
        #: False after :meth:`cleanup`.
        self.is_open = True
        open_runtimes.add(self)

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
        self._native.register_param(
            ds_id, list(ds_shape), ds_tensor, grad_buffer, offset, name=name, reduce_dtype=reduce_dtype
        )

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
    ) -> None:
        """Registers this rank's shard of a parameter for ZeRO-3: ``ceil(numel / ranks)`` elements of the flattened
        parameter, padded at the end. An empty ``grad_buffer``, or None, marks a frozen parameter.
        """
        self._native.register_z3_param(
            ds_id, list(ds_shape), ds_tensor, grad_buffer, persistent, name=name, reduce_dtype=reduce_dtype
        )
        self._shapes.add(ds_id, tuple(ds_shape), ds_tensor.dtype)

    def register_graph_z1(self, graph_id: int, ds_ids: Sequence[int]) -> None:
        self._native.register_graph_z1(graph_id, list(ds_ids))

    def register_graph_z2(self, graph_id: int, ds_ids: Sequence[int]) -> None:
        self._native.register_graph_z2(graph_id, list(ds_ids))

    def register_graph_z3(self, graph_id: int, ds_ids: Sequence[int], *, reduce_at_update: bool = False) -> None:
        """``ds_ids`` in the order of their use in the forward: the first backward reduces in the reverse order. With
        ``reduce_at_update`` gradients add up on each rank and travel only in the backward before an update.
        """
        self._native.register_graph_z3(graph_id, list(ds_ids), reduce_at_update=reduce_at_update)
        self._shapes.publish()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for a shard: where gathers move it with the fewest copies (over shared memory, in the heap
        that the ranks share). Shards that lie elsewhere travel as well.
        """
        return self._native.empty(list(shape), dtype)

    def set_persistent(self, ds_id: int) -> None:
        """Keeps the gathered parameter when it is released. What is gathered already stays as it is."""
        self._native.set_persistent(ds_id)

    def set_grad_buffer(
        self, ds_id: int, grad_buffer: torch.Tensor | None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """Between steps: a frozen ZeRO-3 parameter is trained from now on, or (None) a trained one is frozen. The ranks
        agree on it at the next ``start_forward``.
        """
        self._native.set_grad_buffer(ds_id, grad_buffer, reduce_dtype)

    def plan_reductions(self, graph_id: int, buckets: Sequence[Sequence[int]], in_flight: int = 2) -> None:
        """Reduces the gradients of each list together, as soon as its last one is there; the rest by the bucket size. A
        reduction beyond ``in_flight`` waits for the oldest, whose gradients then go. The same on all ranks, between
        backwards.
        """
        self._native.plan_reductions(graph_id, [list(bucket) for bucket in buckets], in_flight)

    def limit_idle_memory(self, bytes: int) -> None:
        """So much memory of gathered parameters is kept for the next ones while nobody uses it. What is beyond is given back
        at once, for whatever else needs some meanwhile. By default it is as much as was in use at once; in the backwards of
        a device 16 MiB at most, whatever was said here.
        """
        self._native.limit_idle_memory(bytes)

    def reset_gathered_peak(self) -> None:
        """``stats()["gathered_bytes_peak"]`` counts from now on, and with it the memory that is kept for gathers."""
        self._native.reset_gathered_peak()

    def start_forward(self) -> None:
        """The first call proves, in one collective, that all ranks have registered the same."""
        self._native.start_forward()
        saved_tensors.switch_on()

    def start_compiled_forward(self) -> None:
        """The same where the forward is compiled: what autograd saves is looked at only from the first gather in eager code
        on, so that compiled code meets no hooks.
        """
        self._native.start_forward()

    def hold_shards(self, hold: bool = True) -> None:
        """No rank changes a shard from here until the backward before an update ends (or ``hold_shards(False)``), so
        parameters may be read where their shards lie and need not be copied. All ranks, before each forward for which it
        holds, after ``start_forward``.
        """
        self._native.hold_shards(hold)

    def end_reads(self) -> None:
        """Shards may change when this returns: every rank has done with what it read of them in place. All ranks."""
        self._native.end_reads()

    @contextlib.contextmanager
    def outside_step(self) -> Iterator[None]:
        """Waits inside belong to no step: none has the longer deadline of the first one. The same on all ranks."""
        self._native.set_outside_step(True)
        try:
            yield
        finally:
            self._native.set_outside_step(False)

    def timeout(self) -> float:
        """Seconds that a wait may take now."""
        return self._native.timeout()

    def end_forward(self) -> None:
        saved_tensors.switch_off()
        self._native.end_forward()

    def start_backward(self, update: bool, *, settle_later: bool = False) -> None:
        """``update`` says that an optimizer step follows this backward. With ``settle_later`` one that no update follows
        ends without a wait for its reductions: gradient buffers must not be read before :meth:`settle`, the next backward
        or a read of ``shard.grad``, which wait. The same on all ranks.
        """
        self._native.start_backward(update, settle_later)

    def settle(self) -> None:
        """Waits for the reductions that backwards have left running."""
        self._native.settle()

    def enable_profiling(self, enable: bool) -> None:
        """While enabled, reductions and frees are skipped."""
        self._native.enable_profiling(enable)

    def is_profiling(self) -> bool:
        return self._native.is_profiling()

    def reset(self) -> None:
        """Forgets all graphs and gathered parameters. The registered parameters stay."""
        saved_tensors.switch_off()
        self._native.reset()

    def invalidate_gathered_param(self, ds_id: int) -> None:
        """The next gather of the parameter travels again, persistent or not."""
        self._native.invalidate_gathered_param(ds_id)

    def clear_all_gathered_params(self) -> None:
        self._native.clear_all_gathered_params()

    def gather_small_together(self, together: bool) -> None:
        """Within a known step (:meth:`hold_shards`) small parameters that cannot be read in place are gathered at its first
        gather, in one collective, and stay to its end. The same on all ranks, between steps.
        """
        self._native.gather_small_together(together)

    def discard_gradients(self, ds_ids: Sequence[int]) -> None:
        """Between backwards: what was accumulated of these parameters since the last update is thrown away. ``shard.grad``
        is the caller's to clear. Every rank calls it.
        """
        self._native.discard_gradients(list(ds_ids))

    def let_gradients_go(self) -> None:
        """After an update, when ``grad`` of the shards is None: gradient buffers take no memory until the next backward."""
        self._native.let_gradients_go()

    def sum_over_ranks(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor``, in place, over the ranks; on a device without stopping the host. Every rank calls it."""
        self._native.sum_over_ranks(tensor)

    def record_timeline(self, on: bool) -> None:
        """While on, :meth:`take_timeline` tells what happened when."""
        self._native.record_timeline(on)

    def take_timeline(self) -> list[tuple[str, int, int, int, int]]:
        """(kind, id, bytes, start, end) since the last call, in nanoseconds of the steady clock. Kinds: ``take`` and
        ``grad`` are calls of the program, ``gather`` and ``reduce`` are collectives on their channels.
        """
        return self._native.take_timeline()

    def stats(self) -> dict[str, Any]:
        """What this rank did, in numbers (docs/runtime.md lists them)."""
        return self._native.stats()

    def wait_seconds(self) -> float:
        """Of :meth:`stats`: how long the host was blocked in waits so far."""
        return self._native.wait_seconds()

    @property
    def states(self) -> _C.StateOffload:
        """An optimizer's states, between the device and the host."""
        return self._native.states

    @property
    def host_is_apart(self) -> bool:
        """Whether what moves to the host leaves the device's memory."""
        return self._native.host_is_apart

    def cleanup(self) -> None:
        """Waits for what is in flight and lets go of everything. The runtime cannot be used afterwards."""
        saved_tensors.switch_off()
        self._native.close()
        self.is_open = False
        self._shapes.withdraw()
        open_runtimes.discard(self)


def _checked_device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    chosen = default_device(group) if device is None else torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {chosen}; parameters can live on cpu and cuda")
    if chosen.type == "cuda":
        cuda_parts.require_cuda()
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
