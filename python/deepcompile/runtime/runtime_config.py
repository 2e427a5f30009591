"""The configuration of the runtime: a dict, or any object with these attributes, checked by :func:`make_config`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from deepcompile.runtime.load import _C

#: Every key with its default (src/runtime/config.h, docs/runtime.md).
_DEFAULTS = {key: getattr(_C.Config(), key) for key in dir(_C.Config) if not key.startswith("_")}


def _as_mapping(config: Mapping[str, Any] | object | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, (str, bytes, int, float, list, tuple, set)):
        raise TypeError(f"config must be a dict or an object with attributes, not {type(config).__name__}")
    found = {key: getattr(config, key) for key in _DEFAULTS if hasattr(config, key)}  # of the instance or of its class
    unknown = {key: value for key, value in getattr(config, "__dict__", {}).items() if not key.startswith("_")}
    return unknown | found


def _checked(key: str, value: Any) -> Any:
    wanted = type(_DEFAULTS[key])
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise TypeError(f"config key '{key}' must be of type {wanted.__name__}, not {type(value).__name__} ({value!r})")
    return value


def make_config(config: Mapping[str, Any] | object | None) -> _C.Config:
    """The native configuration. A missing key takes its default; an unknown one is an error that names it."""
    native = _C.Config()
    for key, value in _as_mapping(config).items():
        if key not in _DEFAULTS:
            close = difflib.get_close_matches(str(key), _DEFAULTS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(_DEFAULTS)}"
            raise ValueError(f"unknown config key '{key}'{hint}")
        setattr(native, key, _checked(key, value))
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
