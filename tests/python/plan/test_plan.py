"""The planner from Python: the binding and the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepcompile import plan

GRAPH = """
graph two
world 2
param a bytes=4MiB state=6MiB
param b bytes=4MiB state=6MiB
node f1 compute time=100us uses=a
node f2 compute time=100us uses=b
node b2 compute time=200us phase=backward uses=b grads=b
node b1 compute time=200us phase=backward uses=a grads=a
node u optimizer time=10us updates=a,b
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepcompile.plan", *arguments], capture_output=True, text=True, timeout=120
    )


def test_a_plan_is_proved_and_the_same_every_time():
    graph = plan.StepGraph(GRAPH)
    machine = plan.preset("8xh100")
    first = plan.plan(graph, machine, strategy="planned")
    second = plan.plan(plan.StepGraph(graph.text), machine, strategy="planned")
    assert first.hash == second.hash
    assert plan.verify(graph, first.text) is None
    assert first.lower_bound_ns <= first.step_ns
    assert first.peak_bytes <= first.budget == machine.budget
    computed = [graph.nodes[node] for kind, node, _, _ in first.instructions if kind == "compute"]
    assert computed == ["f1", "f2", "b2", "b1"]


def test_a_broken_plan_is_refused_with_the_reason():
    graph = plan.StepGraph(GRAPH)
    text = plan.plan(graph, plan.preset("8xh100"), strategy="on_demand").text
    broken = "\n".join(line for line in text.splitlines() if not line.startswith("gather g0"))
    with pytest.raises(plan.PlanError, match="g0"):
        plan.verify(graph, broken)
    late = text.replace("compute f2\nrelease b", "release b\ncompute f2")
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("compute f2"))
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    late = "\n".join(lines)
    found = plan.verify(graph, late)
    assert found is not None and found[0] == "kept until last use" and "f2" in found[2]


def test_a_saved_plan_can_be_loaded_and_simulated_again():
    graph = plan.StepGraph(GRAPH)
    machine = plan.preset("8xa100")
    made = plan.plan(graph, machine)
    again = plan.load_plan(graph, machine, made.text)
    assert (again.hash, again.step_ns) == (made.hash, made.step_ns)


def test_errors_say_where_and_why():
    with pytest.raises(plan.PlanError, match=r"step:2:21: unknown param 'weigth'; the nearest is 'weight'"):
        plan.StepGraph("param weight bytes=4\nnode n compute uses=weigth", "step")
    with pytest.raises(plan.BudgetError, match="at least"):
        plan.plan(plan.StepGraph(GRAPH), plan.preset("8xh100"), budget=1000)
    with pytest.raises(plan.PlanError, match="nearest is 'planned'"):
        plan.plan(plan.StepGraph(GRAPH), plan.preset("8xh100"), strategy="planed")


def test_every_strategy_plans_a_model():
    machine = plan.preset("2xcpu")
    graph = plan.make_model("tiny-llama", machine, world=2, sequence=64, accumulate=2)
    plans = {name: plan.plan(graph, machine, strategy=name) for name in plan.strategy_names()}
    steps = {name: one.step_ns for name, one in plans.items()}
    assert steps["planned"] <= min(steps["published"], steps["per_block"], steps["on_demand"])
    # Nearly as short a step, and less memory where that is all it costs.
    assert steps["auto"] <= 1.01 * steps["planned"]
    assert plans["auto"].peak_bytes <= plans["planned"].peak_bytes


def test_the_least_budget_is_enough_and_one_byte_less_is_not():
    machine = plan.Machine("machine mine like 2xcpu\noffload no\n")
    graph = plan.make_model("tiny-llama", machine, world=2, sequence=64)
    least = plan.least_budget(graph, machine)
    lean = plan.plan(graph, machine, budget=least)
    assert lean.peak_bytes <= least < plan.plan(graph, machine, strategy="planned").peak_bytes
    assert not any(kind in ("offload", "reload") for kind, _, _, _ in lean.instructions)
    with pytest.raises(plan.BudgetError, match=f"at least {least} bytes are needed"):
        plan.plan(graph, machine, budget=least - 1)


def test_the_command_plans_a_file_and_writes_a_trace(tmp_path: Path):
    graph = tmp_path / "step.graph"
    graph.write_text(GRAPH)
    trace = tmp_path / "trace.json"
    done = run("plan", str(graph), "--machine", "8xa100", "--trace", str(trace), "--explain")
    assert done.returncode == 0, done.stderr
    assert "no plan can take less than" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"f1", "f2", "b1", "b2", "u"}
    assert any(event["ph"] == "C" and event["name"] == "memory" for event in events)
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"compute", "gather channel", "reduce channel", "host to device", "device to host"}


def test_the_command_compares_the_strategies():
    done = run("simulate", "--model", "gpt2-small", "--machine", "8xa100", "--compare", "--json", "-")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row["strategy"] for row in table["strategies"]] == ["on_demand", "per_block", "published", "planned"]
    assert all(row["step_ns"] >= table["lower_bound_ns"] for row in table["strategies"])


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["simulate", "--model", "llama3-7b"], 3, "nearest is 'llama3-8b'"),
        (["simulate", "--modle", "llama3-8b"], 2, "unknown option 'modle'; the nearest is 'model'"),
        (["simulate", "--model", "llama3-8b", "--machine", "8xh10"], 2, "nearest is '8xh100'"),
        (["simulate", "--model", "llama3-8b", "--budget", "1GB"], 4, "at least"),
        (["simulate", "--model", "llama3-8b", "--batch", "-1"], 2, "expected a whole number"),
        (["plan", "/nonexistent"], 3, "cannot be read"),
        (["plna"], 2, "nearest is 'plan'"),
        ([], 2, "expected plan or simulate"),
    ],
)
def test_exit_codes_tell_what_went_wrong(arguments: list[str], status: int, text: str):
    done = run(*arguments)
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr


def test_malformed_files_are_named_with_line_and_column(tmp_path: Path):
    graph = tmp_path / "step.graph"
    graph.write_text("graph g\nparam a bytes=-1\n")
    done = run("plan", str(graph))
    assert done.returncode == 3
    assert f"{graph}:2:15: negative size '-1'" in done.stderr
