"""One model on one cluster: memory and step time of any layout."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from shardwise.planner import comm, memory, step_time
from shardwise.planner.activations import layer_input, weight_sizes
from shardwise.planner.flops import model_flops
from shardwise.planner.memory import CONTEXT, FSDP, GIB, MemoryEstimate
from shardwise.planner.pieces import Chunk, Pieces
from shardwise.planner.rates import DEFAULT_PROFILE, Profile
from shardwise.planner.step_time import TERMS, ZERO, Cost, StepTimeEstimate
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import DTYPE_BYTES, Layout, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.spec.stages import rank_of_stage

GATHERED = 3  # whole layers FSDP holds: in use, fetched ahead, not yet freed


class ChunkMemory(NamedTuple):
    """Bytes of one micro batch of a chunk: kept for backward, largest temporary, loss, one more layer of a micro batch that runs ahead.

    largest: parameters of its largest layer.
    """

    saved: float
    working: float
    loss: float
    ahead: float
    largest: int


class Estimator(Pieces):
    """Predicts memory and step time of layouts of a model on a cluster. Arguments are those of `Pieces`."""

    @cached_property
    def _chunks(self) -> dict[tuple[object, ...], ChunkMemory]:
        return {}

    @cached_property
    def _flops(self) -> float:
        return model_flops(self.model, self.seq_len)

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
            activations = sum(each.saved * count for each, count in zip(held, counts))
            if layout.overlap_moe and layout.microbatches > 1:
                activations += max(each.ahead for each in held)
            stages.append({**terms, "activations": activations})
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
        ends, transposes = float(self._root_params(layout, chunks)), memory.keeps_transposes(self.cluster.gpu)
        terms = memory.state_terms(layout, dense, expert, ends=ends, frozen=1.0 if layout.peft else 0.0, transposes=transposes)
        held = tuple(self._chunk_memory(layout, chunk) for chunk in chunks)
        working = max(each.working for each in held)
        terms["loss"] = max(0.0, max(each.loss for each in held) - working)
        terms["working_set"] = working
        terms["gathered"] = 0.0
        if layout.sharding in FSDP and layout.shard_size > 1:
            largest = max(each.largest for each in held)
            width = 1 if layout.param_dtype == "fp8" else 2
            terms["gathered"] = (GATHERED * width + DTYPE_BYTES[layout.grad_dtype]) * largest + 2.0 * self._root_params(layout, chunks)
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
        saved_bytes = working = loss = ahead = 0.0
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
            ahead = max(ahead, held + 2 * saved.exchanged)
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
        return ChunkMemory(saved=saved_bytes, working=working, loss=loss, ahead=ahead, largest=largest)

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
        flops = self._flops * tokens / seconds
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
