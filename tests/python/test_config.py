"""The engine's configuration: what is accepted, and what each mistake is told."""

from __future__ import annotations

import json

import pytest
import torch

from deepcompile.config.config import CompileConfig, Config, ConfigError, ZeroConfig, load_config
from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")

DEEPSPEED_STYLE = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1000,
    },
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1,
    "compile": {"enabled": True, "backend": "aot_eager"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def test_a_deepspeed_configuration_is_understood() -> None:
    config = load_config(DEEPSPEED_STYLE)
    assert config.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.param_persistence_threshold == 1000
    assert config.compute_dtype is torch.bfloat16
    assert config.gradient_clipping == 1.0
    assert config.optimizer is not None and config.optimizer.params == {"lr": 1e-3}


def test_dict_file_and_dataclass_give_the_same(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSPEED_STYLE))
    from_dict = load_config(DEEPSPEED_STYLE)
    assert load_config(path) == load_config(str(path)) == from_dict == load_config(from_dict)
    assert load_config(None) == Config()
    assert load_config({"compile": False}).compile.mode == "off"
    assert load_config({"zero_optimization": ZeroConfig(stage=1)}).stage == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {}}, "unknown config key 'zero_optimisation'; did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stge": 3}}, "'zero_optimization.stge'; did you mean 'zero_optimization.stage'?"),
        ({"stage": 3}, "unknown config key 'stage'; did you mean 'zero_optimization.stage'?"),
        ({"zero_optimization": {"stage": 4}}, "'zero_optimization.stage' is 4; it must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, "must be of type int, not str ('3')"),
        ({"zero_optimization": {"stage": True}}, "must be of type int, not bool"),
        ({"zero_optimization": 3}, "'zero_optimization' is a section with keys, not int (3)"),
        ({"gradient_accumulation_steps": 0}, "'gradient_accumulation_steps' is 0; it must be at least 1"),
        ({"gradient_clipping": float("nan")}, "'gradient_clipping' is nan"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true; choose one"),
        ({"registered_memory": True, "memory_budget": "least"}, "'registered_memory' and 'memory_budget' are both set"),
        ({"compile": {"backend": "inductr"}}, "it must be one of 'inductor', 'aot_eager'"),
        ({"compile": {"mode": "replay", "profile_steps": 0}}, "replay records at least one iteration"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "offload_param' is not supported: parameters stay",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "it must be one of 'none', 'cpu'"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "compile.offload_opt_states moves some"),
        ({"zero_optimization": {"cpu_offload": True}}, 'not supported: write "offload_optimizer"'),
        ({"activation_checkpointing": {"cpu": True}}, "not supported: use torch.utils.checkpoint"),
        ({"optimizer": {"type": "AdamWW"}}, "not a class of torch.optim; did you mean 'AdamW'?"),
        ({"communication_data_type": "int8"}, "it must be one of 'fp32', 'fp16', 'bf16'"),
        ({"stage3_param_persistence_threshold": 3}, "did you mean 'zero_optimization.param_persistence_threshold'?"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "'bf16' is given twice, once as 'bfloat16'"),
        (7, "config must be a dict, the path of a JSON file or a deepcompile.Config, not int"),
        ("/nowhere/config.json", "config file /nowhere/config.json: No such file or directory"),
    ],
)
def test_a_mistake_is_named_with_what_to_write_instead(config, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert message in str(caught.value)


def test_an_unsupported_section_that_is_switched_off_is_accepted() -> None:
    load_config({"zero_optimization": {"offload_param": {"device": "none"}}, "amp": {"enabled": False}})


def test_where_states_lie_is_said_as_deepspeed_says_it() -> None:
    section = {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": False, "ratio": 1.0}
    loaded = load_config({"zero_optimization": {"offload_optimizer": section}})
    assert loaded.offloads_states and loaded.offloads_all_states
    assert load_config(loaded).offloads_all_states
    for nothing in ({"device": "none"}, None, {}):
        assert not load_config({"zero_optimization": {"offload_optimizer": nothing}}).offloads_states
    planned = load_config({"compile": {"offload_opt_states": True}})
    assert planned.offloads_states and not planned.offloads_all_states


def test_a_broken_file_is_named_with_line_and_column(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "zero_optimization": {"stage" 3}\n}')
    with pytest.raises(ConfigError, match=r"config.json: line 2, column 33"):
        load_config(path)


def test_a_dataclass_is_checked_like_a_dict() -> None:
    with pytest.raises(ConfigError, match="it must be one of"):
        load_config(Config(compile=CompileConfig(backend="none")))  # type: ignore[arg-type]


def test_a_memory_budget_is_a_number_of_bytes_or_the_least() -> None:
    assert load_config({"memory_budget": 2e9}).memory_budget == 2_000_000_000
    assert load_config({"memory_budget": "least"}).memory_budget == "least"
    assert load_config(load_config({"memory_budget": "least"})).memory_budget == "least"
    with pytest.raises(ConfigError, match="memory_budget' is 'lest'; it is a number or 'least'"):
        load_config({"memory_budget": "lest"})
    with pytest.raises(ConfigError, match="memory_budget' is 0; it counts bytes"):
        load_config({"memory_budget": 0})
