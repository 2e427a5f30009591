"""The configuration of an engine whose model was sharded before. A model has one configuration, which its sharding owns. The
one passed to ``initialize`` may differ only in keys that nothing has been built from yet.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from deepcompile.config.config import Config, ConfigError, accumulation_steps
from deepcompile.sharding.sharding import Sharding

#: Keys and sections that only engines read. A second engine of the same model may have other values.
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
#: Keys that the planner is built from, when an engine is made or the model is compiled.
_OF_THE_PLANNER = ("compile.backend", "compile.strategy", "memory_budget")


def engine_config(sharding: Sharding, config: Config | None) -> Config:
    """Merges ``config`` (None: nothing) into the sharding's configuration and returns it. Raises an error that names the
    keys in which the model was already sharded or planned with other values.
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
    """The value of every key by its dotted name. A section that may be None counts as one value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "optimizer":
            found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
        else:
            found[field.name] = value
    return found
