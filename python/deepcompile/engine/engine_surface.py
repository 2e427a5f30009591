"""What an engine offers around the loop: its model, counters, learning rates and checkpoints, by the names that users of
DeepSpeed know.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepcompile.config.config import Config
from deepcompile.safetensors import save_safetensors
from deepcompile.sharding.sharding import Sharding
from deepcompile.sharding.unsharded import state_dict_of_wholes


class EngineSurface:
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    config: Config
    sharding: Sharding
    steps: int
    skipped_steps: int

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients at the last step, before clipping; None before the first."""
        raise NotImplementedError

    # -- the model ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> EngineSurface:
        self.module.train(mode)
        return self

    def eval(self) -> EngineSurface:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The shards of this rank, to keep in memory: they cannot be pickled. ``deepcompile.full_state_dict(engine.module)``
        gives whole parameters.
        """
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Takes whole parameters, as an unsharded model saves them, or shards that :meth:`state_dict` gave here."""
        return self.module.load_state_dict(state_dict, strict=strict)

    # -- numbers -----------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Calls of :meth:`step` at the accumulation boundary, skipped steps included."""
        return self.steps + self.skipped_steps

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks over which the model is sharded."""
        return self.sharding.world

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps or 1

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """As configured; None where the configuration does not say."""
        batch, micro = self.config.train_batch_size, self.config.train_micro_batch_size_per_gpu
        if micro is None and batch is not None:
            return batch // (self.sharding.world * self.gradient_accumulation_steps())
        return micro

    def train_batch_size(self) -> int | None:
        """Samples of all ranks in one optimizer step; None where the configuration does not say."""
        micro = self.config.train_micro_batch_size_per_gpu
        if self.config.train_batch_size is None and micro is not None:
            return micro * self.sharding.world * self.gradient_accumulation_steps()
        return self.config.train_batch_size

    def get_global_grad_norm(self) -> float | None:
        """Over all ranks at the last step, before clipping; None before the first."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group of the optimizer."""
        return [group["lr"] for group in self._optimizer().param_groups]

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer; pass one to initialize, or config key 'optimizer'")
        return self.optimizer

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Any = None,
        *,
        keep: int | None = None,
    ) -> str:
        """Saves model, optimizer, loss scale, schedule, random state and ``client_state`` (anything that can be pickled)
        under ``folder`` and returns the path. Every rank calls it. If the job is killed meanwhile, the previous checkpoint
        stays the latest. ``tag``: the checkpoint's name; None: ``step-N``. ``keep``: how many checkpoints to keep, this one
        included; None: all.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; at least the checkpoint that is being saved stays")
        from deepcompile.engine import checkpoint  # here, because torch.distributed.checkpoint takes long to import

        return checkpoint.save_checkpoint(self, folder, tag, client_state, keep)  # type: ignore[arg-type]

    def load_checkpoint(self, folder: str | os.PathLike[str], tag: str | None = None) -> tuple[str, Any]:
        """Loads the latest checkpoint of ``folder`` (or the one called ``tag``), saved by any number of ranks under any
        stage, and returns where it is and its ``client_state``. Random states are restored when the number of ranks is the
        same.
        """
        from deepcompile.engine import checkpoint

        return checkpoint.load_checkpoint(self, folder, tag)  # type: ignore[arg-type]

    def save_16bit_model(self, folder: str | os.PathLike[str], filename: str = "model.safetensors") -> str:
        """Writes whole weights, in the dtype in which the model computes, to one file: as safetensors if ``filename`` ends
        so, else by ``torch.save``. Every rank calls it; rank 0 writes. Returns the path.
        """
        path = pathlib.Path(folder) / filename
        writes = self.sharding.rank == 0

        def in_the_file(value: torch.Tensor) -> torch.Tensor:
            dtype = self.config.compute_dtype if value.is_floating_point() else None
            return value.to("cpu", dtype or value.dtype)

        state = state_dict_of_wholes(self.module, lambda whole: in_the_file(whole) if writes else whole.new_empty(0))
        failure: Exception | None = None
        if writes:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                (save_safetensors if path.suffix == ".safetensors" else torch.save)(
                    {name: in_the_file(value) for name, value in state.items()},  # buffers as well
                    path,
                )
            except Exception as error:  # raised on all ranks below, since they wait for the file
                failure = error
        message = [f"{type(failure).__name__}: {failure}" if failure is not None else ""]
        dist.broadcast_object_list(message, dist.get_global_rank(self.sharding.group, 0), group=self.sharding.group)
        if message[0]:
            raise RuntimeError(f"save_16bit_model: rank 0 could not write {path}: {message[0]}") from failure
        return str(path)
