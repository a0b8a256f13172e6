"""One model on one cluster: memory and step time of any layout, from pieces that are computed once.

The search asks for many thousands of layouts; what they share (the work and the saved bytes of a layer for given degrees,
the layers of each stage) is kept in dictionaries of the estimator, so one more layout costs arithmetic on a few numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.planner import comm, memory, step_time
from shardwise.planner.activations import Saved, layer_input, saved_by_layer, weight_sizes
from shardwise.planner.kernels import Work
from shardwise.planner.layer_work import LayerWork, Shape, embedding_work, head_work, layer_work, shape_of
from shardwise.planner.memory import CONTEXT, FSDP, GIB, MemoryEstimate
from shardwise.planner.rates import DEFAULT_PROFILE, Profile, Rates, profile, rates
from shardwise.planner.step_time import TERMS, ZERO, Cost, StepTimeEstimate
from shardwise.spec.blocks import Mla, Params
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.spec.stages import rank_of_stage, split, stage_params

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
    "op": ("layernorm", "residual", "rope", "mlp_act", "moe_act", "moe_permute", "half_products"),
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


class ChunkMemory(NamedTuple):
    """Bytes of one micro batch of a chunk: kept for backward, largest temporary, loss; and parameters of its largest layer."""

    saved: float
    working: float
    loss: float
    largest: int


class Estimator:
    """Predicts memory and step time of layouts of ``model`` on ``cluster`` at ``seq_len`` tokens a sample.

    stack: software profile (`rates.Profile` or its name). imbalance: tokens of the hottest expert rank over the mean.
    """

    def __init__(
        self, model: ModelSpec, cluster: Cluster, *, seq_len: int, stack: Profile | str = DEFAULT_PROFILE, imbalance: float = 1.0
    ) -> None:
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
        self._chunks: dict[tuple[object, ...], ChunkMemory] = {}
        self._flops: dict[int, float] = {}

    # pieces -----------------------------------------------------------------------------------------------------------

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
        return shape_of(layout, self.seq_len, self.cluster.gpu.sms)

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

    # memory -----------------------------------------------------------------------------------------------------------

    def memory(self, layout: Layout) -> MemoryEstimate:
        """Peak memory of the heaviest rank."""
        group = layout.vpp_group or layout.pp
        kept = memory.in_flight(layout.schedule, layout.pp, layout.vpp, group, max(1, layout.microbatches))
        fixed: dict[int, tuple[dict[str, float], tuple[ChunkMemory, ...]]] = {}
        stages = []
        for chunks, flight in zip(self.stages(layout), kept):
            found = fixed.get(id(chunks))
            if found is None:
                found = fixed[id(chunks)] = self._stage_memory(layout, chunks)
            terms, held = found
            counts = flight if len(flight) == len(held) else flight * len(held)
            stages.append({**terms, "activations": sum(each.saved * count for each, count in zip(held, counts))})
        totals = [sum(terms.values()) for terms in stages]
        stage = max(range(layout.pp), key=totals.__getitem__)
        allocated = totals[stage]
        capacity = self.cluster.gpu.memory
        fits = memory.needed(allocated) <= capacity
        reserved = allocated * self.stack.fragmentation
        if fits:  # the allocator gives unused blocks back before it fails
            reserved = min(reserved, capacity - CONTEXT)
        return MemoryEstimate(
            stage=stage,
            terms=stages[stage],
            stages=tuple(stages),
            allocated_gib=allocated / GIB,
            reserved_gib=reserved / GIB,
            capacity_gib=capacity / GIB,
            fits=fits,
        )

    def _stage_memory(self, layout: Layout, chunks: tuple[Chunk, ...]) -> tuple[dict[str, float], tuple[ChunkMemory, ...]]:
        """Terms of a rank that do not depend on the micro batches in flight, and its chunks."""
        dense = sum(chunk.params.dense for chunk in chunks)
        expert = sum(chunk.params.expert for chunk in chunks)
        terms = memory.state_terms(layout, dense, expert, frozen=1.0 if layout.peft else 0.0)
        held = tuple(self._chunk_memory(layout, chunk) for chunk in chunks)
        working = max(each.working for each in held)
        terms["loss"] = max(0.0, max(each.loss for each in held) - working)
        terms["working_set"] = working
        terms["gathered"] = 0.0
        if layout.sharding in FSDP and layout.shard_size > 1:
            largest = max(each.largest for each in held)
            terms["gathered"] = 10.0 * largest + 2.0 * self._root_params(layout, chunks)
        elif self.stack.weight_gradients and layout.peft is None:
            terms["weight_gradient_buffers"] = 2.0 * self._weight_shapes(layout, chunks)
        terms["framework"] = self.stack.workspace
        return terms, held

    def _chunk_memory(self, layout: Layout, chunk: Chunk) -> ChunkMemory:
        key = (chunk.key, *self._shape_key(layout), layout.recompute, layout.offload, layout.cross_entropy, layout.vpp > 1)
        found = self._chunks.get(key)
        if found is None:
            found = self._chunks[key] = self._hold_chunk(layout, chunk)
        return found

    def _hold_chunk(self, layout: Layout, chunk: Chunk) -> ChunkMemory:
        model, shape, recompute = self.model, self._shape(layout), layout.recompute
        full = recompute.granularity == "full"
        whole_input = layer_input(model, shape)
        saved_bytes = working = loss = 0.0
        largest = 0
        block = recompute.num_layers or 0 if full and recompute.method == "block" else 0
        for kind, count in (*chunk.layers, *chunk.mtp):
            saved = self.layer(kind, layout)[1]
            held = memory.activation_bytes(layout, saved, whole_input)
            dropped = min(block, count)
            block -= dropped
            saved_bytes += dropped * whole_input + (count - dropped) * held
            extra = saved.total * max(1, recompute.num_layers or 1) if full else saved.total - held
            if layout.offload.activation_modules:  # one layer each being computed, sent and fetched
                extra += 2 * (saved.total - saved.after(Recompute(), layout.offload.activation_modules))
            working = max(working, saved.working + extra)
            largest = max(largest, self.layer_params(kind, layout).total)
        if chunk.embedding:
            saved_bytes += (2.0 + bool(model.dropout)) * model.hidden * shape.split_tokens
        if chunk.head:
            depth = sum(count for _, count in chunk.mtp)
            vocab = model.padded_vocab(layout.tp) / layout.tp
            loss = memory.loss_bytes(layout, shape.tokens, vocab, self.stack.logit_bytes)
            saved_bytes += 2 * whole_input + depth * (4 * whole_input + 2.0 * shape.tokens * vocab)
        if layout.offload.activation_layers:
            saved_bytes *= max(0.0, 1 - layout.offload.activation_layers / max(1, model.num_layers))
        return ChunkMemory(saved=saved_bytes, working=working, loss=loss, largest=largest)

    def _root_params(self, layout: Layout, chunks: tuple[Chunk, ...]) -> int:
        """Parameters of embedding and head, which FSDP gathers as one group."""
        model = self.model
        ends = sum(chunk.embedding * model.embedding_params_on_rank(layout.tp) for chunk in chunks)
        return ends + sum(chunk.head * (not (model.tied and chunk.embedding)) * model.head_params_on_rank(layout.tp) for chunk in chunks)

    def _weight_shapes(self, layout: Layout, chunks: tuple[Chunk, ...]) -> float:
        """Elements of the distinct weight shapes of a rank's layers (one expert stands for all)."""
        sizes: set[int] = set()
        for kind in {kind for chunk in chunks for kind, _ in (*chunk.layers, *chunk.mtp)}:
            sizes.update(weight_sizes(self.model, self.model.kinds[kind], layout.tp, layout.etp))
        return float(sum(sizes))

    # time -------------------------------------------------------------------------------------------------------------

    def step_time(self, layout: Layout) -> StepTimeEstimate:
        """Seconds of one step and what they are spent on."""
        rate = self.rates(layout.precision)
        ranks = self.stages(layout)
        same = {id(chunks): chunks for chunks in ranks}
        shared = (*self._cost_key(layout), layout.cross_entropy)
        cost_of = {key: self._stage_cost(layout, chunks, shared) for key, chunks in same.items()}
        pair_of = {key: (sum(forward), sum(backward)) for key, (forward, backward) in cost_of.items()}
        pairs = tuple(pair_of[id(chunks)] for chunks in ranks)
        boundary = 2.0 * self.model.hidden * self._shape(layout).split_tokens
        stride = layout.tp * layout.cp * layout.dp
        send = comm.send_seconds(boundary, stride, self.cluster.domain, rate.links) * rate.exposed_pp if layout.pp > 1 else 0.0
        if layout.schedule in ("1f1b", "gpipe") or layout.pp == 1:
            busy, bubble, exposed_send = step_time.pipeline_seconds(layout, pairs, send)
        else:
            busy = max(1, layout.microbatches) * max(sum(pair) for pair in pairs)
            busy /= 2 if layout.schedule == "dualpipe" else 1  # a rank runs each of its two stages for half of the micro batches
            order = self._in_token_order(layout, ranks, shared)
            busy, bubble, exposed_send = step_time.scheduled_seconds(layout, order, busy, send)
        critical = max(same, key=lambda key: sum(pair_of[key]))
        micro = max(1, layout.microbatches)
        terms = {name: (ahead + behind) * micro for name, ahead, behind in zip(TERMS, *cost_of[critical])}
        if layout.schedule == "dualpipe" and layout.pp > 1:
            terms = {name: value / 2 for name, value in terms.items()}
        terms["bubble"] = bubble
        terms["pp"] = exposed_send
        tail = optimizer = 0.0
        for key, chunks in same.items():
            dense = sum(chunk.params.dense for chunk in chunks)
            expert = sum(chunk.params.expert for chunk in chunks)
            if layout.peft:
                dense, expert = dense // 100, 0  # adapters
            window = pair_of[key][1] * (1 + min(1.0, (micro - 1) / max(1, layout.pp)))
            exposed = step_time.data_parallel_seconds(layout, dense, expert, self.cluster.domain, rate, window)
            tail = max(tail, exposed)
            optimizer = max(optimizer, step_time.optimizer_bytes(layout, dense, expert) / rate.optimizer)
        terms["dp"] = tail
        terms["optimizer"] = optimizer
        terms["fixed"] = rate.step
        seconds = busy + bubble + exposed_send + tail + optimizer + rate.step
        tokens = layout.gbs * self.seq_len / max(1, layout.world)
        flops = self.model_flops_per_token() * tokens / seconds
        return StepTimeEstimate(
            seconds=seconds,
            terms=terms,
            stages=pairs,
            tokens_per_s_per_gpu=tokens / seconds,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / self.cluster.gpu.peak(layout.precision),
        )

    def _in_token_order(self, layout: Layout, ranks: tuple[tuple[Chunk, ...], ...], shared: tuple[object, ...]) -> list[tuple[Cost, Cost]]:
        """Costs of the virtual stages as a token meets them."""
        used = [0] * layout.pp
        costs = []
        for stage in range(layout.stages):
            rank = rank_of_stage(layout, stage)
            mirrored = layout.schedule == "dualpipe" and 2 * stage >= layout.pp  # the rank lists the stage it mirrors first
            costs.append(self._chunk_cost(layout, ranks[rank][used[rank] + mirrored], shared))
            used[rank] += 1
        return costs

    def _stage_cost(self, layout: Layout, chunks: tuple[Chunk, ...], shared: tuple[object, ...]) -> tuple[Cost, Cost]:
        """Forward and backward seconds of one micro batch on a rank; ``shared`` is what all its chunks depend on."""
        if len(chunks) == 1:
            return self._chunk_cost(layout, chunks[0], shared)
        costs = [self._chunk_cost(layout, chunk, shared) for chunk in chunks]
        return tuple(map(sum, zip(*(ahead for ahead, _ in costs)))), tuple(map(sum, zip(*(behind for _, behind in costs))))

    def _chunk_cost(self, layout: Layout, chunk: Chunk, shared: tuple[object, ...]) -> tuple[Cost, Cost]:
        key = (chunk.key, shared)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._price_chunk(layout, chunk)
        return found

    def _price_chunk(self, layout: Layout, chunk: Chunk) -> tuple[Cost, Cost]:
        forward, backward = ZERO, ZERO
        for kind, count in (*chunk.layers, *chunk.mtp):
            ahead, behind = self.layer_seconds(kind, layout)
            forward, backward = step_time.add(forward, ahead, count), step_time.add(backward, behind, count)
        rate = self.rates(layout.precision)
        head, lookup = self._end_work(layout)
        heads = chunk.head + sum(count for _, count in chunk.mtp)
        for work, times in ((head, heads), (lookup, int(chunk.embedding))):
            if times:
                forward = step_time.add(forward, step_time.kernel_cost(work[0], rate), times)
                backward = step_time.add(backward, step_time.kernel_cost(work[1], rate), times)
        return forward, backward

    def model_flops_per_token(self) -> float:
        """Training FLOPs of one token: 6 per active parameter of the matrix products (embedding left out) plus causal attention."""
        if 0 not in self._flops:
            model, total = self.model, 0.0
            for layer, count in (*model.runs, *((layer, 1) for layer in model.mtp)):
                mixer = layer.mixer
                params = model.layer_params(layer).total
                if layer.is_moe and model.moe:
                    moe = layer.mlp
                    params -= (moe.experts - moe.top_k) * moe.expert_params(model.hidden)  # type: ignore[union-attr]
                total += 6.0 * params * count
                heads = getattr(mixer, "heads", 0)
                if heads and hasattr(mixer, "v_dim"):
                    window = getattr(mixer, "window", None) if not isinstance(mixer, Mla) else None
                    keys = self.seq_len / 2 if window is None else min(self.seq_len / 2, window)
                    total += 6.0 * keys * heads * (mixer.head_dim + mixer.v_dim) * count  # type: ignore[union-attr]
            total += 6.0 * model.vocab * model.hidden * (1 + len(model.mtp))
            self._flops[0] = total
        return self._flops[0]


def estimate_memory(
    model: ModelSpec, layout: Layout, cluster: Cluster, *, seq_len: int, profile: Profile | str = DEFAULT_PROFILE, imbalance: float = 1.0
) -> MemoryEstimate:
    """Peak memory of the heaviest rank of ``layout``."""
    return Estimator(model, cluster, seq_len=seq_len, stack=profile, imbalance=imbalance).memory(layout)


def estimate_step_time(
    model: ModelSpec, layout: Layout, cluster: Cluster, *, seq_len: int, profile: Profile | str = DEFAULT_PROFILE
) -> StepTimeEstimate:
    """Step time of ``layout``."""
    return Estimator(model, cluster, seq_len=seq_len, stack=profile).step_time(layout)
