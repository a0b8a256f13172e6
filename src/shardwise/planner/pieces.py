"""Pieces that layouts share, computed once: the work, seconds and saved bytes of a layer for given degrees, the layers of each stage.

The search asks for many thousands of layouts; with these in dictionaries one more layout costs arithmetic on a few numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.planner import comm, step_time
from shardwise.planner.activations import Saved, saved_by_layer
from shardwise.planner.kernels import Work
from shardwise.planner.layer_work import LayerWork, Shape, embedding_work, head_work, layer_work, shape_of
from shardwise.planner.memory import FSDP
from shardwise.planner.rates import DEFAULT_PROFILE, Profile, Rates, profile, rates
from shardwise.planner.step_time import TERMS, Cost
from shardwise.spec.blocks import Params
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.stages import split, stage_params

# Recomputed modules and the parts of `LayerWork` that run again.
RECOMPUTED_WORK = {
    "core_attn": ("core_attn",),
    "attn": ("qkv", "rope", "qk_norm", "core_attn", "mla_down_proj", "mla_up_proj"),
    "layernorm": ("layernorm",),
    "mlp": ("mlp", "mlp_act"),
    "moe_act": ("moe_act",),
    "moe": ("router", "moe_permute", "moe", "moe_act", "latent", "shared_experts"),
    "shared_experts": ("shared_experts",),
    "mla_up_proj": ("mla_up_proj",),
    # torchtitan: every second matrix product and all elementwise work; every second layer
    "op": ("layernorm", "residual", "rope", "mlp_act", "moe_act", "moe_permute", "half_products"),
    "layer": ("half_layer",),
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A virtual stage on a rank: how many layers of each kind, and what else it holds."""

    layers: tuple[tuple[int, int], ...]
    mtp: tuple[tuple[int, int], ...]
    embedding: bool
    head: bool
    params: Params

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What activations depend on."""
        return (self.layers, self.mtp, self.embedding, self.head)


class Pieces:
    """What layouts of ``model`` on ``cluster`` at ``seq_len`` tokens a sample are made of.

    stack: software profile (`rates.Profile` or its name). imbalance: tokens of the hottest expert rank over the mean.
    document: tokens of one document where samples are packed from several; attention does not look beyond it.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        *,
        seq_len: int,
        stack: Profile | str = DEFAULT_PROFILE,
        imbalance: float = 1.0,
        document: int | None = None,
    ) -> None:
        self.document = document
        self.model, self.cluster, self.seq_len, self.imbalance = model, cluster, seq_len, imbalance
        self.stack = profile(stack) if isinstance(stack, str) else stack
        kinds = {layer: index for index, layer in enumerate(model.kinds)}
        self._layer_kinds = [kinds[layer] for layer in model.layers]
        self._mtp_kinds = [kinds[layer] for layer in model.mtp]
        self._rates: dict[str, Rates] = {}
        self._work: dict[tuple[object, ...], tuple[LayerWork, Saved]] = {}
        self._costs: dict[tuple[object, ...], tuple[Cost, Cost]] = {}
        self._ends: dict[tuple[object, ...], tuple[Work, Work]] = {}
        self._splits: dict[tuple[object, ...], tuple[tuple[Chunk, ...], ...]] = {}
        self._params: dict[tuple[object, ...], Params] = {}

    def rates(self, precision: str) -> Rates:
        if precision not in self._rates:
            self._rates[precision] = rates(self.cluster, precision, self.stack)
        return self._rates[precision]

    def reprice(self, table: dict[str, Rates]) -> None:
        """Use these rates per precision from now on (fitting)."""
        self._rates = table
        self._costs.clear()

    def _shape_key(self, layout: Layout) -> tuple[object, ...]:
        return (
            layout.mbs,
            layout.tp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.sp,
            layout.precision,
            layout.attention,
            layout.capacity_factor,
            layout.dispatcher,
            layout.grad_dtype,
        )

    def _shape(self, layout: Layout) -> Shape:
        return shape_of(layout, self.seq_len, self.cluster.gpu.sms, document=self.document)

    def layer(self, kind: int, layout: Layout) -> tuple[LayerWork, Saved]:
        """Work and saved bytes of layer kind ``kind`` (an index into ``model.kinds``)."""
        key = (kind, *self._shape_key(layout))
        found = self._work.get(key)
        if found is None:
            shape, layer = self._shape(layout), self.model.kinds[kind]
            found = self._work[key] = (
                layer_work(self.model, layer, shape),
                saved_by_layer(self.model, layer, shape, imbalance=self.imbalance),
            )
        return found

    def _recomputed(self, layout: Layout) -> tuple[str, ...] | None:
        recompute = layout.recompute
        if recompute.granularity == "full":
            return None
        if recompute.granularity == "none":
            return ()
        return tuple(part for name in recompute.modules for part in RECOMPUTED_WORK.get(name, ()))

    def _cost_key(self, layout: Layout) -> tuple[object, ...]:
        """What the seconds of a layer depend on."""
        recompute = layout.recompute
        return (
            *self._shape_key(layout),
            recompute.granularity,
            recompute.modules,
            layout.cp_comm,
            layout.overlap_tp,
            layout.overlap_moe,
            layout.peft,
            layout.sharding if layout.sharding in FSDP else "",
            layout.shard_size if layout.sharding in FSDP else 0,
            layout.reshard_after_forward,
            layout.cuda_graphs,
        )

    def layer_seconds(self, kind: int, layout: Layout) -> tuple[Cost, Cost]:
        """Forward and backward seconds of one layer, by term."""
        key = (kind, *self._cost_key(layout))
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._price_layer(kind, layout)
        return found

    def _price_layer(self, kind: int, layout: Layout) -> tuple[Cost, Cost]:
        found, rate = self.layer(kind, layout)[0], self.rates(layout.precision)
        domain = self.cluster.domain
        forward, backward = step_time.layer_costs(found, layout, domain, rate, self._recomputed(layout), layout.peft is not None)
        if layout.sharding in FSDP and layout.shard_size > 1:
            forward, backward = self._gathered(kind, layout, forward, backward, rate)
        return forward, backward

    def _gathered(self, kind: int, layout: Layout, forward: Cost, backward: Cost, rate: Rates) -> tuple[Cost, Cost]:
        """Adds what gathering weights and scattering gradients of a fully sharded layer leaves exposed."""
        params = self.layer_params(kind, layout)
        domain, size = self.cluster.domain, layout.shard_size

        def seconds(width: float) -> float:
            dense = comm.gather_seconds(width * params.dense, size, layout.tp, domain, rate.links)
            return dense + comm.gather_seconds(width * params.expert, layout.expert_shard_size, layout.ep * layout.etp, domain, rate.links)

        gather = seconds(2.0)
        width = 4.0 if layout.grad_dtype == "fp32" else 2.0
        scatter = seconds(width)
        copies = layout.dp * layout.cp // size
        if copies > 1:  # HSDP: shards are summed over the copies
            scatter += comm.reduce_seconds(width * params.total / size, copies, layout.tp * size, domain, rate.links)
        again = gather if layout.reshard_after_forward else 0.0
        hidden_forward, hidden_backward = sum(forward) * rate.hidden_dp, sum(backward) * rate.hidden_dp
        ahead = max(0.0, gather - hidden_forward, gather * (1 - rate.hidden_dp) * 0.2)
        behind = max(0.0, again + scatter - hidden_backward, (again + scatter) * (1 - rate.hidden_dp) * 0.2)
        index = TERMS.index("fsdp")
        forward = tuple(value + (ahead if i == index else 0.0) for i, value in enumerate(forward))
        backward = tuple(value + (behind if i == index else 0.0) for i, value in enumerate(backward))
        return forward, backward

    def _end_work(self, layout: Layout) -> tuple[tuple[Work, Work], tuple[Work, Work]]:
        key = (*self._shape_key(layout), layout.cross_entropy)
        head = self._ends.get(key)
        if head is None:
            head = self._ends[key] = head_work(self.model, self._shape(layout), fused_loss=layout.cross_entropy != "unfused")
        lookup = self._ends.get((*key, "embedding"))
        if lookup is None:
            lookup = self._ends[(*key, "embedding")] = embedding_work(self.model, self._shape(layout))
        return head, lookup

    def layer_params(self, kind: int, layout: Layout) -> Params:
        """Parameters of one layer of a kind on one rank."""
        key = (kind, layout.tp, layout.ep, layout.etp)
        found = self._params.get(key)
        if found is None:
            found = self._params[key] = self.model.layer_params(self.model.kinds[kind], layout.tp, layout.ep, layout.etp)
        return found

    def stages(self, layout: Layout) -> tuple[tuple[Chunk, ...], ...]:
        """Virtual stages of each pipeline rank."""
        key = (
            layout.pp,
            layout.vpp,
            layout.schedule,
            layout.first_stage_layers,
            layout.last_stage_layers,
            layout.account_for_embedding,
            layout.account_for_loss,
            layout.pipeline_layout,
            layout.tp,
            layout.ep,
            layout.etp,
        )
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = self._split(layout)
        return found

    def _split(self, layout: Layout) -> tuple[tuple[Chunk, ...], ...]:
        ranks: list[list[Chunk]] = [[] for _ in range(layout.pp)]
        for stage in split(layout, self.model.num_layers, len(self.model.mtp)):
            first = 0 if stage.mtp else len(self._mtp_kinds)
            layers = tuple(Counter(self._layer_kinds[stage.layers.start : stage.layers.stop]).items())
            params = stage_params(self.model, layout, replace(stage, layers=range(0)))
            for kind, count in layers:
                each = self.layer_params(kind, layout)
                params = Params(params.dense + count * each.dense, params.expert + count * each.expert)
            chunk = Chunk(
                layers=layers,
                mtp=tuple(Counter(self._mtp_kinds[first : first + stage.mtp]).items()),
                embedding=stage.embedding,
                head=stage.head,
                params=params,
            )
            ranks[stage.rank].append(chunk)
            if layout.schedule == "dualpipe":
                ranks[layout.pp - 1 - stage.rank].append(chunk)
        same: dict[tuple[Chunk, ...], tuple[Chunk, ...]] = {}
        return tuple(same.setdefault(tuple(chunks), tuple(chunks)) for chunks in ranks)
