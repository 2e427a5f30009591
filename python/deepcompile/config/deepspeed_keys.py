"""Keys of DeepSpeed's configuration that are renamed, ignored or refused here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]

#: Keys that have the meaning of one of ours, and our name.
SYNONYMS: dict[Path, str] = {
    ("zero_optimization", "stage3_param_persistence_threshold"): "param_persistence_threshold",
    ("zero_optimization", "leaf_module"): "leaf_modules",
    ("compile", "deepcompile"): "enabled",
    ("bfloat16",): "bf16",
}

#: Keys that change nothing here, with the reason. Accepted silently.
WITHOUT_EFFECT: dict[Path, str] = {
    ("zero_optimization", "overlap_comm"): "reductions always overlap",
    ("zero_optimization", "contiguous_gradients"): "gradients always are",
    ("zero_optimization", "reduce_scatter"): "reductions always go to the owners",
    ("zero_optimization", "use_multi_rank_bucket_allreduce"): "reductions always go to the owners",
    ("zero_optimization", "allgather_bucket_size"): "the planner decides",
    ("zero_optimization", "allgather_partitions"): "the planner decides",
    ("zero_optimization", "stage3_prefetch_bucket_size"): "the planner decides",
    ("zero_optimization", "stage3_max_live_parameters"): "the planner decides, within memory_budget",
    ("zero_optimization", "stage3_max_reuse_distance"): "the planner decides, within memory_budget",
    ("zero_optimization", "stage3_model_persistence_threshold"): "the planner decides, within memory_budget",
    ("zero_optimization", "stage3_module_granularity_threshold"): "the planner decides",
    ("zero_optimization", "stage3_use_all_reduce_for_fetch_params"): "the planner decides",
    ("zero_optimization", "stage3_allgather_sequential"): "the planner decides",
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): "engine.save_16bit_model always gathers",
    ("zero_optimization", "sub_group_size"): "the update is cut up only where states are offloaded, by their size",
    ("zero_optimization", "offload_optimizer", "nvme_path"): "states are moved to host memory",
    ("zero_optimization", "offload_optimizer", "pin_memory"): "host memory for states is always pinned",
    ("zero_optimization", "offload_optimizer", "buffer_count"): "three parts of the states are on the device at a time",
    ("zero_optimization", "offload_optimizer", "fast_init"): "states are made by the optimizer",
    ("zero_optimization", "offload_optimizer", "pipeline_read"): "copies always run beside updates",
    ("zero_optimization", "offload_optimizer", "pipeline_write"): "copies always run beside updates",
    ("zero_optimization", "round_robin_gradients"): "every parameter is spread over all ranks",
    ("zero_optimization", "ignore_unused_parameters"): "parameters without a gradient are always allowed",
    ("zero_optimization", "memory_efficient_linear"): "weights are gathered again and never saved",
    ("zero_optimization", "load_from_fp32_weights"): "checkpoints hold the fp32 weights",
    ("zero_optimization", "elastic_checkpoint"): "checkpoints load into any number of ranks",
    ("zero_optimization", "log_trace_cache_warnings"): "there is no such cache",
    ("zero_optimization", "enable_sanity_checks"): "config key 'debug' does that",
    ("compile", "double_buffer"): "buckets are double-buffered",
    ("compile", "debug_log"): "engine.explain() and engine.trace() show the plan",
    ("compile", "free_activation"): "activations go with their last use",
    ("compile", "free_activation_threshold"): "activations go with their last use",
    ("compile", "keep_int_input_tensors"): "no inputs are kept",
    ("compile", "keep_all_input_tensors"): "no inputs are kept",
    ("steps_per_print",): "",
    ("wall_clock_breakdown",): "engine.explain() has it",
    ("memory_breakdown",): "engine.explain() has it",
    ("dump_state",): "",
    ("zero_allow_untested_optimizer",): "optimizers that cannot work on shards are refused",
}

#: Keys that are understood and not supported, with what to do instead.
UNSUPPORTED: dict[Path, str] = {
    ("zero_optimization", "offload_param"): "parameters stay on the device in this version",
    ("zero_optimization", "cpu_offload"): 'write "offload_optimizer": {"device": "cpu"}',
    ("zero_optimization", "offload_optimizer", "ratio"): "all states are moved; compile.offload_opt_states moves some",
    ("zero_optimization", "offload_optimizer", "super_offload"): "states are updated on the device",
    ("zero_optimization", "cpu_offload_param"): "parameters stay on the device in this version",
    ("zero_optimization", "zero_hpz_partition_size"): "secondary partitions are not part of this version",
    ("zero_optimization", "zero_quantized_weights"): "gathers are not quantized in this version",
    ("zero_optimization", "zero_quantized_nontrainable_weights"): "parameters are not quantized in this version",
    ("zero_optimization", "zero_quantized_gradients"): "reductions are not quantized in this version",
    (
        "zero_optimization",
        "mics_shard_size",
    ): "sharding over part of the ranks is not part of this version; pass a group",
    ("zero_optimization", "zenflow"): "states are updated on the device",
    ("compile", "offload_activation"): "activations stay on the device in this version",
    ("compile", "offload_parameters"): "parameters stay on the device in this version",
    ("compile", "symmetric_memory"): "it needs a CUDA build",
    ("compile", "passes"): "the planner decides; config key 'compile.strategy' chooses among its strategies",
    ("activation_checkpointing",): "use torch.utils.checkpoint in the model; it works under every stage",
    ("scheduler",): "pass a torch.optim.lr_scheduler to initialize(..., lr_scheduler=...)",
    ("amp",): "use bf16 or fp16, or torch.autocast in the model",
    ("sparse_attention",): "the model decides",
    ("sparse_gradients",): "gradients are reduced dense",
    ("pipeline",): "pipeline parallelism is not part of deepcompile",
    ("tensor_parallel",): "tensor parallelism is not part of deepcompile",
    ("flops_profiler",): "engine.explain() and engine.trace() show measured times",
    ("comms_logger",): "engine.stats() and engine.trace() show the collectives",
    ("tensorboard",): "log engine.stats() and engine.grad_norm from the training loop",
    ("wandb",): "log engine.stats() and engine.grad_norm from the training loop",
    ("csv_monitor",): "log engine.stats() and engine.grad_norm from the training loop",
    ("elasticity",): "checkpoints load into any number of ranks: start again with another world size",
    ("autotuning",): "the planner measures and decides",
    ("gradient_predivide_factor",): "use prescale_gradients: before the sum (true) or after it (false)",
    ("fp16", "consecutive_hysteresis"): "overflows are counted until the scale is doubled again",
    ("fp16", "auto_cast"): "floating-point inputs of engine(...) are always cast",
    ("fp16", "fp16_master_weights_and_grads"): "master weights are fp32",
    ("data_types",): "use communication_data_type; gradients add up in the dtype of the master weights",
}

#: Values with which an unsupported key has no effect in DeepSpeed either; these are accepted.
_NEUTRAL: dict[Path, Any] = {
    ("zero_optimization", "zero_hpz_partition_size"): 1,
    ("zero_optimization", "mics_shard_size"): -1,
    ("gradient_predivide_factor",): 1.0,
    ("zero_optimization", "offload_optimizer", "ratio"): 1.0,
}


def switched_off(path: Path, value: Any) -> bool:
    """True if this value switches the unsupported feature off."""
    if path in _NEUTRAL and value == _NEUTRAL[path]:
        return True
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    return value in (None, False, [])


def leaf_names(value: Any) -> Any:
    """The classes and names of DeepSpeed's section ``leaf_module`` as one list."""
    if (
        isinstance(value, Mapping)
        and set(value) <= {"classes", "names", "name_suffixes"}
        and not value.get("name_suffixes")
    ):
        return [*(value.get("classes") or []), *(value.get("names") or [])]
    return value
