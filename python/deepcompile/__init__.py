"""deepcompile: ZeRO-1, 2 and 3 for PyTorch, with every collective scheduled by a planner that has seen the whole step."""

from __future__ import annotations

import os

from deepcompile import _backend as _backend  # torch.compile(backend="deepcompile")
from deepcompile import _compile as _compile  # teaches torch.compile about the operators
from deepcompile import _load as _load  # loads the native library and registers torch.ops.dc and torch.ops.deepspeed
from deepcompile import _shm_backend as _shm_backend  # registers the backend "shm" of torch.distributed
from deepcompile import comm, dc, shm
from deepcompile._cuda_parts import cuda_available
from deepcompile._version import __version__
from deepcompile.comm import init_distributed
from deepcompile.compiled_graph import CompiledGraph
from deepcompile.config import Config, ConfigError
from deepcompile.deferred import init_sharded
from deepcompile.engine import Engine
from deepcompile.full import full_params, full_state_dict
from deepcompile.initialization import initialize
from deepcompile.optimizer_states import full_optimizer_state_dict
from deepcompile.parity import check_parity
from deepcompile.recorded_ops import RecordedOps
from deepcompile.recording import get_recorded_ops, record
from deepcompile.replay import compile
from deepcompile.sharding import shard, update_trainable

#: For CMAKE_PREFIX_PATH, so that ``find_package(deepcompile)`` finds the C++ library of this package.
cmake_prefix_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "share", "cmake")

__all__ = [
    "CompiledGraph",
    "Config",
    "ConfigError",
    "Engine",
    "RecordedOps",
    "__version__",
    "check_parity",
    "cmake_prefix_path",
    "comm",
    "compile",
    "cuda_available",
    "dc",
    "full_optimizer_state_dict",
    "full_params",
    "full_state_dict",
    "get_recorded_ops",
    "init_distributed",
    "init_sharded",
    "initialize",
    "record",
    "shard",
    "shm",
    "update_trainable",
]
