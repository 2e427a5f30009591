"""The configuration of the runtime: a dict, or any object with these attributes, checked where it enters."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from deepcompile.runtime.load import _C


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    #: Gather and reduce through symmetric memory (CUDA only).
    symmetric_memory: bool = False
    #: Gather over NCCL into memory that it writes to directly, and that is used for nothing else (CUDA only).
    registered_memory: bool = False
    #: Fill one reduce bucket while the other is being reduced.
    double_buffer: bool = True
    #: Elements above which ``free_tensors`` frees an activation.
    free_activation_threshold: int = 10_000_000
    #: Wait for everything in flight before or after each reduction or gather: for finding the one at fault.
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    #: Divide gradients by the number of ranks before the sum instead of after it.
    pre_div_reduce: bool = True
    #: Seconds that any wait may take; ten times as long until the first step has ended.
    timeout: float = 300.0
    #: Bytes of host memory that offloaded tensors and parameters may take at once; 0: as many as there are.
    offload_limit: int = 0
    #: Find reads before the wait and after the release, unmatched reductions, and ranks that differ.
    debug: bool = False


_FIELDS = {field.name: field for field in dataclasses.fields(RuntimeConfig)}


def _as_mapping(config: Mapping[str, Any] | object | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, (str, bytes, int, float, list, tuple, set)):
        raise TypeError(f"config must be a dict or an object with attributes, not {type(config).__name__}")
    found = {key: getattr(config, key) for key in _FIELDS if hasattr(config, key)}  # of the instance or of its class
    unknown = {key: value for key, value in getattr(config, "__dict__", {}).items() if not key.startswith("_")}
    return unknown | found


def _checked(key: str, value: Any) -> Any:
    wanted = type(_FIELDS[key].default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise TypeError(f"config key '{key}' must be of type {wanted.__name__}, not {type(value).__name__} ({value!r})")
    return value


def make_config(config: Mapping[str, Any] | object | None) -> _C.Config:
    """The native configuration. A missing key takes its default; an unknown one is an error that names it."""
    native = _C.Config()
    for key, value in _as_mapping(config).items():
        if key not in _FIELDS:
            close = difflib.get_close_matches(str(key), _FIELDS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(_FIELDS)}"
            raise ValueError(f"unknown config key '{key}'{hint}")
        setattr(native, key, _checked(key, value))
    for key, field in _FIELDS.items():
        if key not in _as_mapping(config):
            setattr(native, key, field.default)
    if not 0 < native.timeout < 1e8:
        raise ValueError(f"config key 'timeout' is {native.timeout} seconds; it must be above 0 and below 1e8")
    if native.symmetric_memory and native.registered_memory:
        raise ValueError(
            "config keys 'symmetric_memory' and 'registered_memory' are both set: the former gathers without NCCL"
        )
    if native.offload_limit < 0:
        raise ValueError(f"config key 'offload_limit' is {native.offload_limit}; it counts bytes, and 0 means no limit")
    if native.free_activation_threshold < 0:
        raise ValueError(
            f"config key 'free_activation_threshold' is {native.free_activation_threshold}; it counts elements"
        )
    return native
