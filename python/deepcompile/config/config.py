"""The engine's configuration: a dict, a JSON file or a dataclass, checked by :func:`load_config`.

It has the shape of DeepSpeed's. DeepSpeed's keys with the same meaning are accepted, keys that are known but not supported
are errors that say so, and other keys are errors with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import torch

from deepcompile.config.deepspeed_keys import SYNONYMS, UNSUPPORTED, WITHOUT_EFFECT, leaf_names, switched_off

CompileMode = Literal["compile", "replay", "off"]
CompileBackend = Literal["inductor", "aot_eager"]
DTypeName = Literal["fp32", "fp16", "bf16"]
LEAST: Literal["least"] = "least"

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ConfigError(ValueError):
    """A key or a value that cannot be used; the message says which, and what to write instead."""


@dataclasses.dataclass
class OffloadConfig:
    #: "cpu": on the host except during the update.
    device: Literal["none", "cpu"] = "none"


@dataclasses.dataclass
class ZeroConfig:
    #: 1 shards optimizer states, 2 gradients too, 3 parameters too.
    stage: int = 3
    #: Elements of a bucket of gradients. None: an eighth of the model, so that most reductions overlap the backward.
    reduce_bucket_size: int | None = None
    #: Elements up to which a ZeRO-3 parameter stays gathered from update to update.
    param_persistence_threshold: int = 0
    #: With one rank, gather and reduce as with several. Otherwise modules read the parameters directly.
    gather_at_one_rank: bool = False
    #: Class or module names whose parameters every rank gathers at entry, whatever the routing.
    leaf_modules: list[str] = dataclasses.field(default_factory=list)
    #: Where optimizer states are kept. They are updated on the device, a part at a time.
    offload_optimizer: OffloadConfig | None = None


@dataclasses.dataclass
class CompileConfig:
    #: Same as ``mode`` "compile" or "off".
    enabled: bool = True
    mode: CompileMode = "compile"
    backend: CompileBackend = "inductor"
    #: Strategy of the planner: auto, planned, published, per_block or on_demand.
    strategy: str = "auto"
    #: Iterations that are measured before the plan is made from measurements; 0 keeps the plan made from estimates.
    profile_steps: int = 3
    #: Steps that become longer or shorter by this factor are measured and planned again; 0: never.
    replan_factor: float = 1.5
    #: Steps whose median is compared.
    replan_steps: int = 20
    #: The planner moves as many of the optimizer's states to host memory, for as long, as ``memory_budget`` asks for.
    offload_opt_states: bool = False
    dynamic: bool | None = None
    fullgraph: bool = False


@dataclasses.dataclass
class BF16Config:
    enabled: bool = False


@dataclasses.dataclass
class FP16Config:
    enabled: bool = False
    #: 0: dynamic, from ``2 ** initial_scale_power``.
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    #: Steps without overflow after which a dynamic scale doubles.
    loss_scale_window: int = 1000
    #: A dynamic scale is halved from this overflow on, counted since it was last doubled.
    hysteresis: int = 1
    min_loss_scale: float = 1.0


@dataclasses.dataclass
class OptimizerConfig:
    #: The name of a class in torch.optim.
    type: str = "AdamW"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Config:
    zero_optimization: ZeroConfig = dataclasses.field(default_factory=ZeroConfig)
    compile: CompileConfig = dataclasses.field(default_factory=CompileConfig)
    bf16: BF16Config = dataclasses.field(default_factory=BF16Config)
    fp16: FP16Config = dataclasses.field(default_factory=FP16Config)
    optimizer: OptimizerConfig | None = None
    #: None: 1, or what the two batch sizes below ask for.
    gradient_accumulation_steps: int | None = None
    #: Samples of all ranks in one optimizer step, and of one rank in one forward: with both the number of accumulation
    #: steps follows; with all three they must fit. The data loader still makes the batches.
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    #: Largest global norm of the gradients; 0 does not clip.
    gradient_clipping: float = 0.0
    #: Divide gradients by the number of ranks before the sum instead of after it.
    prescale_gradients: bool = True
    #: The dtype of gradients in reductions. None: that of the gradient buffer, which is fp32 for 16-bit parameters with
    #: gradient accumulation, else the parameter's own.
    communication_data_type: DTypeName | None = None
    #: Bytes that parameters, gradients, states and activations of a rank may take together. "least": the least that a step
    #: needs. None: the free memory of the device or host, divided by the ranks that share it.
    memory_budget: int | Literal["least"] | None = None
    #: Gather and reduce through symmetric memory (CUDA only): ranks read each other's shards and gradients directly.
    symmetric_memory: bool = False
    #: Gather over NCCL into registered memory, which it writes to directly (CUDA only). Faster for large parameters, but the
    #: memory is not available to activations.
    registered_memory: bool = False
    #: Seconds that any wait may take; ten times as long for waits of the first step, in which ranks compile.
    timeout: float = 300.0
    #: Switches on the runtime's debug mode: more checks, less speed.
    debug: bool = False

    @property
    def stage(self) -> int:
        return self.zero_optimization.stage

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What gathers cast to; None: the parameters' own dtype."""
        return torch.bfloat16 if self.bf16.enabled else torch.float16 if self.fp16.enabled else None

    @property
    def offloads_states(self) -> bool:
        return self.offloads_all_states or self.compile.offload_opt_states

    @property
    def offloads_all_states(self) -> bool:
        section = self.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return None if self.communication_data_type is None else DTYPES[self.communication_data_type]


def load_config(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """The checked configuration from a dict, the path of a JSON file, a :class:`Config`, or nothing (all defaults)."""
    if isinstance(config, (str, os.PathLike)):
        config = _read_json(pathlib.Path(config))
    if config is None:
        config = {}
    if isinstance(config, Config):
        loaded: Config = _from_mapping(Config, dataclasses.asdict(config), ())
    elif isinstance(config, Mapping):
        loaded = _from_mapping(Config, config, ())
    else:
        raise ConfigError(
            f"config must be a dict, the path of a JSON file or a deepcompile.Config, not {type(config).__name__}"
        )
    _check_values(loaded)
    return loaded


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config file {path}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config file {path}: holds a {type(found).__name__} instead of an object with keys")
    return found


def _from_mapping(cls: type[Any], values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    kinds = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for written, value in values.items():
        if not isinstance(written, str):
            raise ConfigError(f"config key {written!r}{' in ' + repr('.'.join(path)) if path else ''} is not a string")
        key = SYNONYMS.get((*path, written), written)
        place = (*path, key)
        if place == ("zero_optimization", "leaf_modules"):
            value = leaf_names(value)
        if key in kinds:
            if key in found:
                raise ConfigError(f"config key '{'.'.join(place)}' is given twice, once as '{written}'")
            found[key] = _convert(kinds[key], value, place)
        elif place in UNSUPPORTED:
            if not switched_off(place, value):
                raise ConfigError(f"config key '{'.'.join(place)}' is not supported: {UNSUPPORTED[place]}")
        elif place not in WITHOUT_EFFECT:
            raise ConfigError(f"unknown config key '{'.'.join(place)}'{_nearest(str(key), path, kinds)}")
    return cls(**found)


def _nearest(key: str, path: tuple[str, ...], kinds: Mapping[str, Any]) -> str:
    elsewhere = {
        field.name: f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        if (inner := _section(typing.get_type_hints(Config)[section.name])) is not None
        for field in dataclasses.fields(inner)
    }
    here = {name: ".".join((*path, name)) for name in kinds}
    names = elsewhere | here if not path else here | {k: v for k, v in elsewhere.items() if k not in here}
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{names[close[0]]}'?"
    return f"; known keys{' there' if path else ''}: {', '.join(kinds)}"


def _section(kind: Any) -> type[Any] | None:
    for option in (kind, *get_args(kind)):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def _convert(kind: Any, value: Any, path: tuple[str, ...]) -> Any:
    name = ".".join(path)
    section = _section(kind)
    if section is not None:
        if value is None and type(None) in get_args(kind):
            return None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if section is CompileConfig and isinstance(value, bool):
            value = {"enabled": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config key '{name}' is a section with keys, not {type(value).__name__} ({value!r})")
        return _from_mapping(section, value, path)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            options = ", ".join(repr(option) for option in get_args(kind))
            raise ConfigError(f"config key '{name}' is {value!r}; it must be one of {options}")
        return value
    if get_origin(kind) in (types.UnionType, typing.Union):
        if value is None and type(None) in get_args(kind):
            return None
        words = [word for option in get_args(kind) if get_origin(option) is Literal for word in get_args(option)]
        kinds = [option for option in get_args(kind) if option is not type(None)]
        if len(kinds) > 1:
            kinds = [option for option in kinds if get_origin(option) is not Literal]
            if value in words:
                return value
            if isinstance(value, str):
                raise ConfigError(f"config key '{name}' is {value!r}; it is a number or {', '.join(map(repr, words))}")
        return _convert(kinds[0], value, path)
    plain = get_origin(kind) or kind
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if plain is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON files write 5e8 for a number of elements
    if type(value) is not plain:
        raise ConfigError(
            f"config key '{name}' must be of type {plain.__name__}, not {type(value).__name__} ({value!r})"
        )
    return list(value) if plain is list else dict(value) if plain is dict else value


def _check_values(config: Config) -> None:
    def require(ok: bool, key: str, value: object, rule: str) -> None:
        if not ok:
            raise ConfigError(f"config key '{key}' is {value!r}; {rule}")

    zero, fp16 = config.zero_optimization, config.fp16
    require(zero.stage in (1, 2, 3), "zero_optimization.stage", zero.stage, "it must be 1, 2 or 3")
    require(
        zero.reduce_bucket_size is None or zero.reduce_bucket_size >= 1,
        "zero_optimization.reduce_bucket_size",
        zero.reduce_bucket_size,
        "it counts elements and must be at least 1",
    )
    require(
        zero.param_persistence_threshold >= 0,
        "zero_optimization.param_persistence_threshold",
        zero.param_persistence_threshold,
        "it counts elements",
    )
    for key in ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"):
        count = getattr(config, key)
        require(count is None or count >= 1, key, count, "it must be at least 1")
    clip = config.gradient_clipping
    require(0 <= clip < float("inf"), "gradient_clipping", clip, "it is a norm, or 0 for no clipping")
    require(0 < config.timeout < 1e8, "timeout", config.timeout, "it counts seconds, above 0 and below 1e8")
    budget = config.memory_budget
    require(
        budget is None or budget == LEAST or budget > 0, "memory_budget", budget, "it counts bytes and must be above 0"
    )
    require(fp16.loss_scale >= 0, "fp16.loss_scale", fp16.loss_scale, "it must be above 0, or 0 for a dynamic scale")
    require(0 <= fp16.initial_scale_power <= 126, "fp16.initial_scale_power", fp16.initial_scale_power, "0 to 126")
    require(fp16.loss_scale_window >= 1, "fp16.loss_scale_window", fp16.loss_scale_window, "it counts steps")
    require(fp16.hysteresis >= 1, "fp16.hysteresis", fp16.hysteresis, "it counts overflows, from 1")
    require(fp16.min_loss_scale > 0, "fp16.min_loss_scale", fp16.min_loss_scale, "it must be above 0")
    if config.registered_memory and budget is not None:
        raise ConfigError(
            "config keys 'registered_memory' and 'memory_budget' are both set: registered memory stays with gathered "
            "parameters, and a budget counts on its being free for others"
        )
    if config.bf16.enabled and fp16.enabled:
        raise ConfigError("config keys 'bf16.enabled' and 'fp16.enabled' are both true; choose one")
    strategies = ("auto", "planned", "published", "per_block", "on_demand")
    strategy = config.compile.strategy
    require(strategy in strategies, "compile.strategy", strategy, f"it must be one of {', '.join(strategies)}")
    profile = config.compile.profile_steps
    require(profile >= 0, "compile.profile_steps", profile, "it counts iterations")
    factor, steps = config.compile.replan_factor, config.compile.replan_steps
    require(
        factor == 0 or 1 < factor < float("inf"), "compile.replan_factor", factor, "it must be above 1, or 0 for never"
    )
    require(steps >= 1, "compile.replan_steps", steps, "it counts steps")
    if config.optimizer is not None and config.optimizer.type not in _optimizers():
        close = difflib.get_close_matches(config.optimizer.type, _optimizers(), n=1, cutoff=0.4)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"config key 'optimizer.type' is {config.optimizer.type!r}, not a class of torch.optim{hint}")
    if not config.compile.enabled:
        config.compile.mode = "off"
    if config.compile.mode == "replay":
        require(profile >= 1, "compile.profile_steps", profile, "replay records at least one iteration")


def _optimizers() -> list[str]:
    base = torch.optim.Optimizer
    return [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and base in kind.__mro__[1:]]


def accumulation_steps(config: Config, world: int) -> int:
    """Backwards in one optimizer step: as configured, or as the batch sizes ask for on ``world`` ranks."""
    steps, batch, micro = (
        config.gradient_accumulation_steps,
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
    )
    if batch is None or (micro is None and steps is None):
        steps = steps or 1
        if batch is not None and batch % world:
            raise ConfigError(f"config key 'train_batch_size' is {batch}, which {world} ranks cannot share evenly")
        return steps
    known = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    chosen = {key: value for key, value in known.items() if value is not None}
    product = math.prod(chosen.values()) * world
    if batch % product or (len(chosen) == 2 and batch != product):
        factors = " x ".join(f"{key} ({value})" for key, value in chosen.items())
        raise ConfigError(
            f"config key 'train_batch_size' is {batch}, which is not {factors} x {world} ranks"
            f"{' = ' + str(product) if len(chosen) == 2 else ' times a whole number'}"
        )
    return steps or batch // product
