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


class Runtime(_C.Runtime):
    """One runtime per process group. ``config`` is a dict or an object with attributes (keys: docs/runtime.md);
    ``initial_reduce_bucket_size`` counts elements. Parameters live on ``device``: unless given, the current GPU where the
    group has NCCL or PyTorch makes tensors there, else the CPU.

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
        super().__init__(
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
        super().register_z3_param(
            ds_id, list(ds_shape), ds_tensor, grad_buffer, persistent, name=name, reduce_dtype=reduce_dtype
        )
        self._shapes.add(ds_id, tuple(ds_shape), ds_tensor.dtype)

    def register_graph_z3(self, graph_id: int, ds_ids: Sequence[int], *, reduce_at_update: bool = False) -> None:
        """``ds_ids`` in the order of their use in the forward: the first backward reduces in the reverse order. With
        ``reduce_at_update`` gradients add up on each rank and travel only in the backward before an update.
        """
        super().register_graph_z3(graph_id, list(ds_ids), reduce_at_update=reduce_at_update)
        self._shapes.publish()

    def start_forward(self) -> None:
        """The first call proves, in one collective, that all ranks have registered the same."""
        super().start_forward()
        saved_tensors.switch_on()

    def start_compiled_forward(self) -> None:
        """``start_forward`` for compiled models: saved-tensor hooks are installed only at the first gather in eager code, so
        that compiled code runs without hooks.
        """
        super().start_forward()

    @contextlib.contextmanager
    def outside_step(self) -> Iterator[None]:
        """Waits inside have the normal deadline, not the longer one of the first step. The same on all ranks."""
        self.set_outside_step(True)
        try:
            yield
        finally:
            self.set_outside_step(False)

    def end_forward(self) -> None:
        saved_tensors.switch_off()
        super().end_forward()

    def reset(self) -> None:
        """Forgets all graphs and gathered parameters. The registered parameters stay."""
        saved_tensors.switch_off()
        super().reset()

    def cleanup(self) -> None:
        """Waits for work in flight and frees everything. The runtime cannot be used afterwards."""
        saved_tensors.switch_off()
        self.close()
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
