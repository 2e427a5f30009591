"""Plan, prove, simulate and explain a sharded training step.

>>> from deepcompile import plan
>>> machine = plan.preset("8xh100")
>>> graph = plan.make_model("llama3-8b", machine, world=32, accumulate=4)
>>> step = plan.plan(graph, machine, strategy="planned")
>>> step.step_ns, step.lower_bound_ns, step.peak_bytes
>>> print(step.explain())
"""

from ._plan import (
    BudgetError,
    Machine,
    Plan,
    PlanError,
    StepGraph,
    StepGraphBuilder,
    command,
    least_budget,
    limit_prefetch,
    load_plan,
    make_model,
    model_names,
    plan,
    preset,
    preset_names,
    strategy_names,
    verify,
)

__all__ = [
    "BudgetError",
    "Machine",
    "Plan",
    "PlanError",
    "StepGraph",
    "StepGraphBuilder",
    "command",
    "least_budget",
    "limit_prefetch",
    "load_plan",
    "make_model",
    "model_names",
    "plan",
    "preset",
    "preset_names",
    "strategy_names",
    "verify",
]
