"""Builds the planner's step graph from cut graphs: parameters, saved values, nodes, and the pieces of the update.

The nodes of a step graph are numbered in program order: for each micro-batch the segments of the forward and those of the
backward, then the pieces of the update. Code that reads a plan uses these numbers; node names are for messages only.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from deepcompile import plan as planner
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segment, Segments
from deepcompile.compiler.step_outline import Saved


@dataclasses.dataclass(frozen=True)
class ParamMetadata:
    """What the planner needs of a parameter besides what the graph contains."""

    shard_bytes: int
    grad_bytes: int  # of the whole gradient, in the dtype in which it is reduced; 0: frozen
    state_bytes: int  # of the optimizer's state on this rank
    stays: bool  # gathered from update to update, whatever the plan
    sum_bytes: int = 0  # of this rank's gradient buffer
    cast_bytes: int = 0  # of the gradient before the cast, if it must be cast to be reduced; else 0
    id: int = -1  # the runtime's


def first_nodes(graphs: Mapping[str, Segments]) -> dict[str, int]:
    """The number of each phase's first node, in the first micro-batch."""
    found: dict[str, int] = {}
    count = 0
    for phase, segments in graphs.items():
        found[phase] = count
        count += len(segments.segments)
    return found


def step_graph(
    name: str,
    graphs: Mapping[str, Segments],
    metadata: Mapping[str, ParamMetadata],
    world: int,
    seconds: Mapping[str, list[float]],
    saved: Sequence[Saved],
    update_seconds: float = 1e-6,
    *,
    micro_batches: int = 1,
    kept: Iterable[str] = (),
    late_gradients: bool = False,
    pieces: Sequence[Sequence[str]] = (),
    piece_workspace: Sequence[int] = (),
) -> planner.StepGraph:
    """``seconds``: of each segment, by phase; ``update_seconds``: of the optimizer; ``kept``: parameters that stay gathered
    all the time; ``late_gradients``: gradient buffers are allocated in the first backward and freed by the update;
    ``pieces``: the parameters of each piece of the update (empty: one piece); ``piece_workspace``: the bytes of each piece.
    """
    builder = planner.StepGraphBuilder(name, world=world)
    shown = {param.name: param for segments in graphs.values() for param in segments.params.values()}
    stays = {param for param in shown if metadata[param].stays} | set(kept)
    backward = graphs[BACKWARD].segments if BACKWARD in graphs else []
    made = {grad for segment in backward for grad in segment.grads}
    updated = [param for param in shown if param in made and metadata[param].grad_bytes]
    late = set(updated) if late_gradients else set()
    params: dict[str, int] = {}
    for param, own in ((param, metadata[param]) for param in shown):
        trained = own.grad_bytes > 0
        params[param] = builder.param(
            param,
            bytes=shown[param].bytes,
            shard=own.shard_bytes,
            grad=own.grad_bytes,
            accum=0 if not trained or param in late else own.sum_bytes,
            state=own.state_bytes if trained else 0,
            persistent=param in stays,
            frozen=not trained,
        )
    sums = {
        p: builder.buffer(f"gradient:{p}", bytes=metadata[p].sum_bytes, gradient=True) for p in updated if p in late
    }
    # A gradient is reduced when its node has run, so its buffer is allocated from the next node on.
    to_come, reduced = set(sums), list[int]()
    made_in, read_in = (
        defaultdict[int, list[int]](list),
        defaultdict[int, list[int]](list),
    )  # segment -> places in `saved`
    for place, one in enumerate(saved):
        made_in[one.made_in].append(place)
        read_in[one.read_in].append(place)
    for micro in range(micro_batches):
        buffers = [
            builder.buffer(f"saved:f{one.made_in}-b{one.read_in}{_suffix(micro)}", bytes=one.bytes) for one in saved
        ]
        for phase, segments in graphs.items():
            for index, segment in enumerate(segments.segments):
                grads = [grad for grad in segment.grads if grad in metadata and metadata[grad].grad_bytes]
                makes = [buffers[place] for place in made_in.get(index, ())] if phase == FORWARD else []
                reads = [buffers[place] for place in read_in.get(index, ())] if phase == BACKWARD else []
                builder.node(
                    f"{phase[0]}{index}{_suffix(micro)}",
                    phase=phase,
                    time=_nanoseconds(seconds[phase][index]),
                    block=index,
                    micro=micro,
                    workspace=_workspace(segment, grads, metadata),
                    uses=[params[param] for param in segment.uses],
                    grads=[params[param] for param in grads],
                    makes=makes + reduced,
                    reads=reads,
                )
                reduced = [sums[grad] for grad in grads if grad in to_come]
                to_come -= set(grads)
    cut_up = [[param for param in piece if param in sums or param in updated] for piece in pieces] or [updated]
    everything = sum(metadata[param].shard_bytes for param in updated) or 1
    for index, piece in enumerate(cut_up if updated else ()):
        share = sum(metadata[param].shard_bytes for param in piece) / everything
        is_last = index == len(cut_up) - 1  # gradient buffers are freed when all parameters are updated
        builder.node(
            f"update{index}" if len(cut_up) > 1 else "update",
            phase="update",
            time=_nanoseconds(update_seconds * share),
            workspace=piece_workspace[index] if piece_workspace else 0,
            updates=[params[param] for param in piece],
            makes=reduced if index == 0 else [],
            reads=[b for b in sums.values() if index > 0 or b not in reduced] if is_last else [],
        )
    return builder.build()


def _workspace(segment: Segment, grads: Sequence[str], metadata: Mapping[str, ParamMetadata]) -> int:
    return segment.workspace + max((metadata[grad].cast_bytes for grad in grads), default=0)


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _suffix(micro: int) -> str:
    return f"@{micro}" if micro else ""
