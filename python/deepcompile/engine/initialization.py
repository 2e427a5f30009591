"""``deepcompile.initialize``: a model and its optimizer, checked, become an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepcompile.config.config import Config, ConfigError, OptimizerConfig, load_config
from deepcompile.engine.engine import Engine
from deepcompile.engine.engine_config import engine_config
from deepcompile.sharding.deferred import InitFunction
from deepcompile.sharding.optimizer_states import slice_whole_states
from deepcompile.sharding.shard import shard
from deepcompile.sharding.shard_aware_torch import refuse_whole_parameter_optimizer
from deepcompile.sharding.sharding import is_sharded, sharding_of

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any | None = None,
    process_group: dist.ProcessGroup | None = None,
    init_fn: InitFunction | None = None,
) -> Engine:
    """Shards ``model`` (unless :func:`deepcompile.shard` has) and returns its engine.

    ``optimizer``: an optimizer over the parameters of ``model``; a function that makes one from parameters; or None, for
    the one of ``config["optimizer"]`` if that is set. The latter two get ``model_parameters`` (parameters or groups of
    them), by default all trainable parameters. ``lr_scheduler``: a scheduler, or a function that makes one from the
    optimizer. ``config``: for a model that was sharded before, the configuration passed to ``shard`` or None; it may add
    keys that only engines read (clipping, the optimizer, how to compile). ``process_group`` and ``init_fn`` are as in
    :func:`deepcompile.shard`.
    """
    checked = load_config(config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(model, optimizer)
    if not is_sharded(model):
        if isinstance(optimizer, torch.optim.Optimizer) and any(param.is_meta for param in model.parameters()):
            raise ValueError(
                "the model's parameters have no data yet and are about to be made: pass a function that makes the optimizer"
            )
        shard(model, checked, process_group=process_group, init_fn=init_fn)
    elif process_group is not None and process_group is not sharding_of(model).group:
        raise ValueError("the model was sharded over another process_group; give it to deepcompile.shard alone")
    checked = engine_config(sharding_of(model), None if config is None else checked)
    made = _make_optimizer(model, optimizer, checked.optimizer, model_parameters)
    if made is not None:
        slice_whole_states(made, [sharding_of(model)])
    if isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step")):
        if made is None:
            raise ValueError("a function was passed to make the schedule, but there is no optimizer to make it for")
        lr_scheduler = lr_scheduler(made)
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a metric, which the engine does not have: do not pass it, and call its step(metric) in "
            "the training loop"
        )
    return Engine(model, made, checked, lr_scheduler)


def _make_optimizer(
    model: nn.Module,
    optimizer: OptimizerLike | None,
    config: OptimizerConfig | None,
    parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        if config is not None:
            raise ValueError("an optimizer was passed and config key 'optimizer' asks for another; give one of them")
        if parameters is not None:
            raise ValueError("an optimizer was passed and model_parameters for another; give one of them")
        return optimizer
    wanted = [param for param in model.parameters() if param.requires_grad] if parameters is None else list(parameters)
    if callable(optimizer):
        made = optimizer(wanted)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"the function that was to make the optimizer returned a {type(made).__name__}")
    elif optimizer is not None:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a function that makes one, not {type(optimizer).__name__}"
        )
    elif config is not None:
        made = _from_config(config, wanted)
    else:
        return None
    _check_optimizer(model, made)
    return made


def _from_config(config: OptimizerConfig, parameters: list[Any]) -> torch.optim.Optimizer:
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, config.type)(parameters, **config.params)
    except TypeError as error:
        raise ConfigError(
            f"config key 'optimizer.params' does not fit torch.optim.{config.type}: {error}. The keys are the arguments of "
            "that class (weight decay apart from the gradient is AdamW)"
        ) from error
    return made


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    refuse_whole_parameter_optimizer(optimizer)
    members = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in members:
                continue
            if hasattr(param, "full_shape"):
                raise ValueError(
                    f"the optimizer's group {index} holds a parameter of shape {list(param.full_shape)} that belongs to "
                    "another, already sharded model"
                )
            raise ValueError(
                f"the optimizer's group {index} holds a parameter of shape {list(param.shape)} that is not one of the "
                f"model's: make the optimizer from the parameters of the {type(model).__name__} that is passed"
            )
