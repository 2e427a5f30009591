#!/usr/bin/env python3
"""How good the planner's plans are, and how fast it makes them.

Every scenario of planner_scenarios.txt is planned by all strategies, proved by the verifier and simulated. The bars:
- `planned` is never slower than `published`, `per_block` or `on_demand`;
- at budgets that leave 10 % of free memory its geometric mean is within 5 % of the lower bound;
- at least half of the scenarios are bound by communication: with the traffic of per-block prefetching the links need
  longer than all compute;
- 100,000 nodes are planned and verified in less than 2 seconds of one core;
- the time per node at 300,000 nodes is at most twice the least of the smaller graphs.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from report import Report, arguments

from deepcompile import plan

SCENARIOS = Path(__file__).with_name("planner_scenarios.txt")


def scenarios() -> list[dict[str, str]]:
    keys = ["model", "machine", "nodes", "batch", "seq", "accumulate", "checkpoint", "stage", "budget"]
    lines = [line.split() for line in SCENARIOS.read_text().splitlines() if line and not line.startswith("#")]
    return [dict(zip(keys, line, strict=True)) for line in lines]


def compare(scenario: dict[str, str]) -> dict[str, Any]:
    words = ["simulate", "--compare", "--json", "-"]
    for key, value in scenario.items():
        if key != "checkpoint":
            words += [f"--{key}", value]
        elif value == "no":
            words.append("--no-checkpoint")
    status, out, error = plan.command(words, "deepcompile")
    if status != 0:
        raise SystemExit(f"{scenario}: {error}")
    compared: dict[str, Any] = json.loads(out)
    return compared


def quality(report: Report, chosen: list[dict[str, str]]) -> None:
    logs = []
    bound_by_links = 0
    print(f"{'scenario':66} {'on_demand':>9} {'per_block':>9} {'published':>9} {'planned':>9}  x lower bound")
    for scenario in chosen:
        result = compare(scenario)
        bound = result["lower_bound_ns"]
        steps = {entry["strategy"]: entry.get("step_ns") for entry in result["strategies"]}
        links = next(entry["links_ns"] for entry in result["strategies"] if entry["strategy"] == "per_block")
        communication = links > result["compute_ns"]
        bound_by_links += communication
        name = (
            f"{scenario['model']} {scenario['nodes']}x{scenario['machine']} b{scenario['batch']} s{scenario['seq']} "
            f"a{scenario['accumulate']} ckpt={scenario['checkpoint']} z{scenario['stage']} {scenario['budget']}"
        )
        peers = {peer: step for peer, step in steps.items() if peer != "planned" and step is not None}
        best = min(peers, key=lambda peer: peers[peer])
        report.add(name, steps["planned"] / 1e6, "ms", best, peers[best] / 1e6, ratio_bar=1.0)
        if scenario["budget"] == "10%":
            logs.append(math.log(steps["planned"] / bound))
        factors = " ".join(f"{'-' if step is None else f'{step / bound:.3f}':>9}" for step in steps.values())
        print(f"{name:66} {factors}  {'communication' if communication else 'compute'}", flush=True)
    mean = math.exp(sum(logs) / len(logs))
    report.add(f"geometric mean over the lower bound, {len(logs)} scenarios at 10 % free memory", mean, "x", bar=1.05)
    name = f"bound by communication, of {len(chosen)} scenarios"
    report.add(name, bound_by_links, "scenarios", better="higher", bar=len(chosen) / 2)
    print(f"geometric mean at 10 % free: {mean:.4f}; bound by communication: {bound_by_links} of {len(chosen)}\n")


def speed(report: Report, quick: bool) -> None:
    machine = plan.preset("8xh100")
    per_node = {}
    print(f"{'nodes':>9} {'seconds of one core':>20} {'us per node':>12}   (plan, prove, simulate)")
    for accumulate in [1, 8, 25, 83] if quick else [1, 3, 8, 25, 83, 166, 248]:
        graph = plan.make_model("llama3-70b", machine, world=32, accumulate=accumulate)
        times = []
        for _ in range(1 if quick else 3):
            start = time.process_time()
            plan.plan(graph, machine, strategy="planned")
            times.append(time.process_time() - start)
        taken = sorted(times)[len(times) // 2]
        per_node[len(graph)] = taken / len(graph) * 1e6
        print(f"{len(graph):9} {taken:20.3f} {per_node[len(graph)]:12.2f}", flush=True)
        if accumulate == 83:
            report.add(f"plan and prove {len(graph)} nodes, one core", taken, "s", bar=2.0)
    largest = max(per_node)
    least = min(value for nodes, value in per_node.items() if nodes != largest)
    name = f"time per node at {largest} nodes"
    report.add(name, per_node[largest], "us", "the least of the smaller graphs", least, ratio_bar=0.5)


def main() -> int:
    options = arguments(__doc__)
    report = Report("Plans and the time to make them (quality in simulated time)")
    quality(report, scenarios()[::4] if options.quick else scenarios())
    speed(report, options.quick)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
