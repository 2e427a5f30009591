"""An uncompiled Llama on two ranks of one thread: replayed, gathered on demand, and under FSDP2.

The systems are those of train.py: each lives in processes of its own and they take turns. Exposed communication is what the
runtime's recorder saw the program spend in gathers, waits and reductions; the slower rank counts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from report import Report, arguments
from train import System

REPLAY, ON_DEMAND = "deepcompile replay ZeRO-3", "deepcompile on demand ZeRO-3"
PEERS = ("FSDP2 eager, gloo", "FSDP2 eager, shm")


def main() -> int:
    options = arguments(__doc__)
    report = Report("a step of an uncompiled Llama, 384 wide, batch 2 x 128, fp32, two ranks of one thread")
    turns = 5 if options.quick else 10
    exposed: dict[str, list[float]] = {REPLAY: [], ON_DEMAND: []}
    pairs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        systems = {name: System(name, folder, options.quick) for name in (REPLAY, ON_DEMAND, *PEERS)}
        for system in systems.values():
            system.ask("first")
        for turn in range(turns):
            for name, system in systems.items():
                answers = system.ask("turn")
                if turn < 2:  # in the first turns replay records and plans
                    continue
                system.times += [max(times) for times in zip(*answers, strict=True)]
                if name in exposed:
                    exposed[name] += [max(times) for times in zip(*system.ask("exposed"), strict=True)]
            if turn >= 2:
                by_rank = systems[ON_DEMAND].ask("recording_pairs")
                pairs += [statistics.mean(r / p for r, p in both) for both in zip(*by_rank, strict=True)]
        rows = systems[REPLAY].ask("more")[0]
        for system in systems.values():
            system.stop()
    medians = {name: statistics.median(system.times) * 1e3 for name, system in systems.items()}
    spent = {name: statistics.median(values) * 1e3 for name, values in exposed.items()}
    ours = medians[REPLAY]
    for name, ratio_bar in ((ON_DEMAND, None), (PEERS[0], 1.5), (PEERS[1], 1.0)):
        report.add("step replayed", ours, "ms", name, medians[name], ratio_bar=ratio_bar)
    report.add("communication exposed", spent[REPLAY], "ms", ON_DEMAND, spent[ON_DEMAND], ratio_bar=2.0)
    overhead = 100 * (statistics.median(pairs) - 1)
    report.add("recording costs", overhead, "% of a step", bar=2.0)
    status = report.finish(options)
    print("\n".join(f"{name:<24} {value}" for name, value in rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
