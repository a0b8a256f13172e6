"""Lower bounds of step time and memory: what no way of cutting the pipeline into stages can beat.

The slowest stage is at least as slow as the average one, and holds at least L / p layers of the commonest kind, rounded up.
For memory, let a rank r with x_r layers of that kind need at least x_r c_r bytes, c_r = state + activations * micro batches
in flight. If no rank needs more than B, then sum_r floor(B / c_r) >= L; the smallest such B is the bound.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from shardwise.planner import memory, step_time
from shardwise.planner.activations import layer_input
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import FSDP
from shardwise.planner.space import Group, derive
from shardwise.spec.layout import Layout, Recompute

_ROUNDING = 1e-9


@lru_cache(maxsize=1 << 12)
def _least_flights(schedule: str, pp: int, vpp: int, group: int, microbatches: int) -> tuple[int, ...]:
    """Micro batches in flight on each rank, of the virtual stage that has the fewest."""
    return tuple(min(flights) for flights in memory.in_flight(schedule, pp, vpp, group, microbatches))


class Bounds:
    """Bounds for layouts of one estimator. Pieces that layouts share are computed once."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        model = estimator.model
        kinds = {layer: index for index, layer in enumerate(model.kinds)}
        self._counts = Counter(kinds[layer] for layer in model.layers)
        self._mtp = Counter(kinds[layer] for layer in model.mtp)
        self.common, self._count = self._counts.most_common(1)[0]
        self._activations: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._least: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._heaviest: dict[tuple[Any, ...], float] = {}
        self._totals: dict[tuple[Any, ...], float] = {}
        self._params: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}
        self._states: dict[tuple[Any, ...], tuple[float, float]] = {}

    def seconds(self, item: Group | Layout) -> float:
        """No way of cutting the layers into stages makes a step of the layout, or of any member of the group, shorter.

        A group is as fast as its fastest recompute choice, recomputing nothing, with the most virtual stages.
        """
        layout, vpp, several = item, 0, False
        if isinstance(item, Group):
            layout, vpp, several = item.layout, max(item.vpp), len(item.recompute) > 1
        assert isinstance(layout, Layout)
        if several:
            nothing = layout if layout.recompute.granularity == "none" else derive(layout, recompute=Recompute())
            return self._step(layout, self._micro_batch(nothing, gathered=False), vpp)
        forward, backward = self.estimator.layer_seconds(self.common, layout)
        return self._step(layout, self._micro_batch(layout), vpp or layout.vpp, sum(forward) + sum(backward))

    def bytes(self, item: Group | Layout) -> float:
        """No way of cutting the layers gives the layout, or any member of the group, a heaviest rank with less allocated memory.

        A group is as light as its lightest recompute choice with one stage per rank: with more, a rank has at least as many micro
        batches in flight.
        """
        if isinstance(item, Group):
            return self._bytes(item.layout, *self._least_held(item), 1, whole=len(item.recompute) == 1)
        return self._bytes(item, *self._held(item, item.recompute), item.vpp, whole=True)

    def _step(self, layout: Layout, all_stages: float, vpp: int, layer: float = 0.0) -> float:
        """``all_stages``: seconds of a micro batch over all ranks; ``layer``: of one layer of the commonest kind."""
        pp, micro = layout.pp, layout.microbatches
        average = all_stages / pp
        slowest = max(average, -(-self._count // pp) * layer)
        if layout.schedule not in ("1f1b", "gpipe"):
            ideal = micro * slowest
        elif vpp == 1:
            ideal = (micro - 1) * slowest + all_stages
        else:
            ideal = micro * slowest + (pp - 1) * average / vpp
        return ideal + self.estimator.rates(layout.precision).step

    def _micro_batch(self, layout: Layout, *, gathered: bool = True) -> float:
        """Seconds of one micro batch over all stages, forward and backward; without the gathers of FSDP unless ``gathered``."""
        fully = gathered and layout.sharding in FSDP
        recompute = layout.recompute
        key = (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, layout.cp_comm, layout.sharding if fully else "",
            layout.shard_size if fully else 0, recompute.granularity, recompute.modules,
        )  # fmt: skip
        found = self._totals.get(key)
        if found is None:
            priced = layout if fully else derive(layout, sharding="none")
            found = 0.0
            for kind, count in (*self._counts.items(), *self._mtp.items()):
                forward, backward = self.estimator.layer_seconds(kind, priced)
                found += count * (sum(forward) + sum(backward))
            rate = self.estimator.rates(layout.precision)
            head, lookup = self.estimator._end_work(layout)
            for work, times in ((head, 1 + sum(self._mtp.values())), (lookup, 1)):
                found += times * sum(sum(step_time.kernel_cost(part, rate)) for part in work)
            self._totals[key] = found
        return found

    def _bytes(self, layout: Layout, held: float, working: float, vpp: int, *, whole: bool) -> float:
        """``whole``: count whole layers (tighter, slower)."""
        state, total = self._state(layout)
        pp = layout.pp
        pipeline = (layout.schedule, pp, vpp, layout.vpp_group or pp, max(1, layout.microbatches))
        key = (state, held, pipeline, whole)  # layouts that communicate differently share it
        least = self._heaviest.get(key)
        if least is None:
            least = self._heaviest[key] = self._heaviest_rank(state, held, _least_flights(*pipeline), whole)
        return max(least + working, total / pp) + self.estimator.stack.workspace

    def _heaviest_rank(self, state: float, held: float, flights: tuple[int, ...], whole: bool) -> float:
        """Least bytes of the heaviest rank when all layers are of the commonest kind."""
        count = self._count
        costs = [state + held * flight for flight in flights]
        least = count / sum([1.0 / cost for cost in costs])
        while whole and sum([int(least / cost + _ROUNDING) for cost in costs]) < count:
            least = min([(int(least / cost + _ROUNDING) + 1) * cost for cost in costs])
        return least

    def _least_held(self, group: Group) -> tuple[float, float]:
        """`_held` of the recompute choice that keeps least. Groups with several choices all have those of the space."""
        layout = group.layout
        if len(group.recompute) == 1:
            return self._held(layout, group.recompute[0])
        key = (layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs)
        found = self._least.get(key)
        if found is None:
            held, working = zip(*(self._held(layout, each) for each in group.recompute))
            found = self._least[key] = (min(held), min(working))
        return found

    def _held(self, layout: Layout, recompute: Recompute) -> tuple[float, float]:
        """Bytes one layer of the commonest kind keeps per micro batch, and the temporary of its backward pass."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, recompute.granularity, recompute.modules, recompute.num_layers)
        found = self._activations.get(key)
        if found is None:
            saved = self.estimator.layer(self.common, layout)[1]
            whole_input = layer_input(self.estimator.model, self.estimator._shape(layout))
            held = memory.activation_bytes(derive(layout, recompute=recompute), saved, whole_input)
            found = self._activations[key] = (held, saved.working)
        return found

    def layer_bytes(self, kind: int, layout: Layout) -> tuple[float, float]:
        """State of one layer of a kind on one rank, and what it keeps per micro batch."""
        layer = self.estimator.model.kinds[kind]
        params = self.estimator.model.layer_params(layer, layout.tp, layout.ep, layout.etp)
        state = sum(self._terms(layout, params.dense, params.expert).values())
        saved = self.estimator.layer(kind, layout)[1]
        return state, memory.activation_bytes(layout, saved, layer_input(self.estimator.model, self.estimator._shape(layout)))

    def _terms(self, layout: Layout, dense: float, expert: float) -> dict[str, float]:
        transposes = memory.keeps_transposes(self.estimator.cluster.gpu)
        return memory.state_terms(layout, dense, expert, frozen=1.0 if layout.peft else 0.0, transposes=transposes)

    def _state(self, layout: Layout) -> tuple[float, float]:
        """Bytes of weights, gradients and optimizer: of one layer of the commonest kind, and of all stages together."""
        key = (layout.tp, layout.ep, layout.etp, layout.sharding, layout.shard_size, layout.expert_shard_size)
        found = self._states.get(key)
        if found is None:
            dense, expert, all_dense, all_expert = self._split_params(layout)
            one = sum(self._terms(layout, dense, expert).values())
            everything = sum(self._terms(layout, all_dense, all_expert).values())
            found = self._states[key] = (one, everything)
        return found

    def _split_params(self, layout: Layout) -> tuple[float, float, float, float]:
        degrees = (layout.tp, layout.ep, layout.etp)
        found = self._params.get(degrees)
        if found is None:
            model = self.estimator.model
            per_kind = [model.layer_params(kind, *degrees) for kind in model.kinds]
            one = per_kind[self.common]
            dense = sum(count * per_kind[kind].dense for kind, count in self._counts.items())
            expert = sum(count * per_kind[kind].expert for kind, count in self._counts.items())
            dense += model.embedding_params_on_rank(layout.tp) + (0 if model.tied else model.head_params_on_rank(layout.tp))
            found = self._params[degrees] = (one.dense, one.expert, dense, expert)
        return found
