"""deepcompile: ZeRO-1, 2 and 3 for PyTorch, with every collective scheduled by a planner that has seen the whole step."""

from __future__ import annotations

import os

from deepcompile import comm, dc, shm
from deepcompile._version import __version__
from deepcompile.comm import init_distributed
from deepcompile.compiler import backend as _backend  # noqa: F401 - torch.compile(backend="deepcompile")
from deepcompile.compiler import operators as _operators  # noqa: F401 - teaches torch.compile about them
from deepcompile.config.config import Config, ConfigError
from deepcompile.engine.engine import Engine
from deepcompile.engine.initialization import initialize
from deepcompile.engine.parity import check_parity
from deepcompile.integrations import shm_backend as _shm_backend  # noqa: F401 - init_process_group("shm")
from deepcompile.replay.compiled_graph import CompiledGraph
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.replay.recording import get_recorded_ops, record
from deepcompile.replay.replay import compile
from deepcompile.runtime import load as _load  # noqa: F401 - registers torch.ops.dc and torch.ops.deepspeed
from deepcompile.runtime.cuda_parts import cuda_available
from deepcompile.sharding.deferred import init_sharded
from deepcompile.sharding.optimizer_states import full_optimizer_state_dict
from deepcompile.sharding.shard import shard
from deepcompile.sharding.sharding import update_trainable
from deepcompile.sharding.unsharded import full_params, full_state_dict

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
