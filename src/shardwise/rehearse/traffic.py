"""What the planner says a rank sends in a step, by collective and mesh axis: the volumes behind its communication terms.

Bytes are those of `collectives.counter`: what leaves the rank. Small messages that the planner leaves out (gradients of replicated norms,
statistics of the split loss, token counts and expert numbers of a dispatch) are not in it.
"""

from __future__ import annotations

from collections import defaultdict

from shardwise.planner.estimator import Estimator
from shardwise.planner.pieces import Chunk
from shardwise.spec.layout import DTYPE_BYTES, Layout
from shardwise.spec.stages import rank_of_stage

Volumes = dict[tuple[str, str], float]  # (collective, axis): bytes
_CP = {"p2p": "ring_shift", "a2a": "all_to_all", "a2a+p2p": "ring_shift", "all_gather": "all_gather"}


def predicted_volumes(estimator: Estimator, layout: Layout, pp_rank: int) -> Volumes:
    """Bytes that a rank of this pipeline rank sends in one step. Not for fully sharded data parallelism."""
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    for chunk in estimator.stages(layout)[pp_rank]:
        for key, size in (*_layers(estimator, layout, chunk), *_ends(estimator, layout, chunk)):
            total[key] += size * layout.microbatches
    total["send", "pp"] += _messages(layout, pp_rank) * _boundary(estimator, layout) / (layout.tp if layout.sp else 1)
    for key, size in _data_parallel(estimator, layout, pp_rank):
        total[key] += size
    return {key: size for key, size in total.items() if size}


def _boundary(estimator: Estimator, layout: Layout) -> float:
    """Activations between two blocks, of all tensor parallel ranks together."""
    return 2.0 * estimator.model.hidden * layout.mbs * estimator.seq_len / layout.cp


def _part(size: int) -> float:
    return (size - 1) / size


def _tensor_parallel(layout: Layout, forward: float, backward: float, regathered: float) -> list[tuple[tuple[str, str], float]]:
    """Gathers and scatters (sequence parallel) or all-reduces of these volumes."""
    part = _part(layout.tp)
    if layout.sp:
        gathered, scattered = forward + backward + regathered, forward + backward
        return [(("all_gather", "tp"), part * gathered), (("reduce_scatter", "tp"), part * scattered)]
    return [(("all_reduce", "tp"), 2 * part * (forward + backward))]


def _layers(estimator: Estimator, layout: Layout, chunk: Chunk) -> list[tuple[tuple[str, str], float]]:
    found = []
    again = 2 if layout.recompute.granularity == "full" else 1
    for kind, count in chunk.layers:
        work = estimator.layer(kind, layout)[0]
        volumes = _tensor_parallel(layout, work.tp_bytes * again, work.tp_bytes, work.tp_regathers)
        passes = 2 * (1 + again)  # dispatch and combine, forward and backward
        volumes.append((("all_to_all", "ep"), passes * _part(layout.ep) * work.ep_bytes))
        for name in ("all_gather", "reduce_scatter"):
            volumes.append(((name, "expt_tp"), (1 + again) * _part(layout.etp) * work.etp_bytes))
        if layout.cp > 1:
            each = _part(layout.cp) * (work.cp_bytes + work.cp_query_bytes if layout.cp_comm == "a2a" else work.cp_bytes * layout.cp)
            volumes.append(((_CP[layout.cp_comm], "cp"), (2 + again) * each))
        found += [(key, count * size) for key, size in volumes]
    return found


def _ends(estimator: Estimator, layout: Layout, chunk: Chunk) -> list[tuple[tuple[str, str], float]]:
    """The embedding leaves its block, the head enters one."""
    whole = _boundary(estimator, layout)
    if layout.sp:
        return _tensor_parallel(layout, chunk.embedding * whole / 2, chunk.embedding * whole / 2, 0.0) + _tensor_parallel(
            layout, chunk.head * whole / 2, chunk.head * whole / 2, chunk.head * whole
        )
    return _tensor_parallel(layout, chunk.embedding * whole, chunk.head * whole, 0.0)


def _messages(layout: Layout, pp_rank: int) -> int:
    """Messages to other pipeline ranks, forward and backward."""
    own = [stage for stage in range(layout.stages) if rank_of_stage(layout, stage) == pp_rank]
    other = [near for stage in own for near in (stage - 1, stage + 1) if 0 <= near < layout.stages]
    return layout.microbatches * sum(rank_of_stage(layout, near) != pp_rank for near in other)


def _data_parallel(estimator: Estimator, layout: Layout, pp_rank: int) -> list[tuple[tuple[str, str], float]]:
    chunks = estimator.stages(layout)[pp_rank]
    gradient, weight = DTYPE_BYTES[layout.grad_dtype], DTYPE_BYTES[layout.param_dtype]
    found = []
    for axis, size, count in (
        ("dp" if layout.cp == 1 else "dp_cp", layout.dp * layout.cp, sum(chunk.params.dense for chunk in chunks)),
        ("expt_dp", layout.edp, sum(chunk.params.expert for chunk in chunks)),
    ):
        if layout.sharding == "none":
            found.append((("all_reduce", axis), 2 * _part(size) * gradient * count))
        else:
            found.append((("reduce_scatter", axis), _part(size) * gradient * count))
            found.append((("all_gather", axis), _part(size) * weight * count))
    return found
