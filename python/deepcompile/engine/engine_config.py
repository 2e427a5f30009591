"""The configuration of an engine whose model was sharded before it. The sharding owns the one configuration that counts;
what an engine is told may differ from it only in keys that nothing has been made from yet.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from deepcompile.config.config import Config, ConfigError, accumulation_steps
from deepcompile.sharding.sharding import Sharding

#: Keys, or whole sections, that engines alone read, each its own: a second engine of a model may have others.
_OF_EACH_ENGINE = (
    "compile.dynamic",
    "compile.enabled",
    "compile.fullgraph",
    "compile.mode",
    "compile.offload_opt_states",
    "compile.profile_steps",
    "compile.replan_factor",
    "compile.replan_steps",
    "fp16.hysteresis",
    "fp16.initial_scale_power",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "gradient_clipping",
    "optimizer",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization.offload_optimizer",
)
#: Those from which the planner is made, when an engine is or the model is compiled.
_OF_THE_PLANNER = ("compile.backend", "compile.strategy", "memory_budget")


def engine_config(sharding: Sharding, config: Config | None) -> Config:
    """The configuration that the sharding has from now on, with what ``config`` adds; as it is where that is None. An error
    that names the keys where the model was sharded, or is planned, by other values.
    """
    if config is None:
        return sharding.config
    told = copy.deepcopy(config)
    told.gradient_accumulation_steps = accumulation_steps(told, sharding.world)
    before, after = _values(sharding.config), _values(told)
    free = _OF_EACH_ENGINE if sharding.is_planned else _OF_EACH_ENGINE + _OF_THE_PLANNER
    differing = [key for key in before if before[key] != after[key]]
    fixed = [key for key in differing if not any(key == each or key.startswith(f"{each}.") for each in free)]
    if fixed:
        values = "; ".join(f"'{key}' was {before[key]!r} and is {after[key]!r} now" for key in fixed)
        raise ConfigError(
            f"the model was sharded with another configuration than initialize is given (rank {sharding.rank}): config key "
            f"{values}. Give initialize the configuration of deepcompile.shard, or none to go on with that one"
        )
    if differing:
        sharding.config = told
    return sharding.config


def _values(config: Config) -> dict[str, Any]:
    """Of every key, by its whole name. A section that may be missing is one value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "optimizer":
            found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
        else:
            found[field.name] = value
    return found
