"""LSTM, GRU and RNN over a sharded batch or sequence.

A sharded batch is local. A sharded sequence moves its split to the batch if that has a sequence for every rank; else each rank runs its
own steps, one rank after the other, and hands the state on: memory is split, time is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.adopt import sharded
from shardwise.shard_tensor.halo import dim_group, grown
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import laid_as


def _handler(cell: Callable):
    """A handler for `cell(input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first)`; no packed sequences."""

    def handler(input: Tensor, hx, weights, has_biases=True, *options):
        if not isinstance(input, ShardTensor) or len(options) != 5 or input.ndim != 3 or isinstance(has_biases, list | tuple):
            return NotImplemented
        batch_first = options[4]
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        steps, batch = (1, 0) if batch_first else (0, 1)
        x = _with_whole_features(input, steps, batch)
        axes = x._spec.mesh_dims_of(steps)
        source = x._spec
        ranks = len(source.sizes[steps]) if axes else 1
        if axes and source.sizes[batch] is None and source.shape[batch] >= ranks:
            x = redistribute(x, source.with_placements([Shard(batch) if axis in axes else p for axis, p in enumerate(source.placements)]))
            axes = ()
        weights = [plain_operand(w, [x._spec]) for w in weights]
        if axes:
            output, finals = _step_by_step(cell, x, states, weights, has_biases, options, steps, batch)
        else:
            output, finals = _here(cell, x, states, weights, has_biases, options, batch)
        return (laid_as(output, source), *finals)

    handler.__doc__ = (
        "Communication: none for a sharded batch; for a sharded sequence two all-to-alls, or the state from rank to rank in each layer "
        "and direction; backward the same, and the gradients of the weights are summed."
    )
    return handler


def _with_whole_features(x: ShardTensor, steps: int, batch: int) -> ShardTensor:
    spec = x._spec.gradient()
    axes = spec.mesh_dims_of(2)
    if axes:
        host = batch if spec.shape[batch] > 1 else steps
        placements = [Shard(host) if axis in axes else p for axis, p in enumerate(spec.placements)]
        spec = spec.with_placements(placements)
    return redistribute(x, spec)


def _state_spec(spec: ShardTensorSpec, batch: int, state: Tensor) -> ShardTensorSpec:
    """The layout of a state (layers, batch, features) beside an input laid out as `spec`."""
    placements = tuple(Shard(1) if isinstance(p, Shard) and p.dim == batch else Replicate() for p in spec.placements)
    return ShardTensorSpec(spec.mesh, placements, tuple(state.shape), (None, spec.sizes[batch], None), state.dtype)


def _here(cell: Callable, x: ShardTensor, states, weights, has_biases, options, batch: int):
    """Every rank has whole sequences."""
    spec = x._spec
    rows = max(spec.local_shape[batch], 1)
    local = grown(to_local(x), batch, rows)
    state_specs = [_state_spec(spec, batch, state) for state in states]
    local_states = [grown(to_local(redistribute(sharded(s, [x]), own)), 1, rows) for s, own in zip(states, state_specs, strict=True)]
    output, *finals = cell(local, _as_state(cell, local_states), weights, has_biases, *options)
    count = spec.local_shape[batch]
    out = ShardTensorSpec(spec.mesh, spec.placements, (*spec.shape[:2], output.shape[2]), spec.sizes, output.dtype)
    output = from_local(output.narrow(batch, 0, count), out)
    return output, [from_local(f.narrow(1, 0, count), own) for f, own in zip(finals, state_specs, strict=True)]


def _as_state(cell: Callable, states: Sequence[Tensor]):
    return tuple(states) if cell in (torch.lstm, torch._VF.lstm) else states[0]


# ---------------------------------------------------------------------- rank after rank


def _step_by_step(cell: Callable, x: ShardTensor, states, weights, has_biases, options, steps: int, batch: int):
    layers, dropout, train, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    spec = x._spec
    group = dim_group(spec, spec.mesh_dims_of(steps))
    block = spec.block_index(steps, spec.coordinate)
    state_specs = [_state_spec(spec, batch, state) for state in states]
    rows = max(spec.local_shape[batch], 1)
    starts = []
    for state, own in zip(states, state_specs, strict=True):
        starts.append(grown(_used_by_one(to_local(redistribute(sharded(state, [x]), own)), group), 1, rows))
    local = grown(to_local(x), batch, rows)
    if batch_first:
        local = local.transpose(0, 1)
    each = len(weights) // (layers * directions)
    finals: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            start = [state[at : at + 1] for state in starts]
            run = _Run(cell=cell, has_biases=has_biases, group=group, block=block, reverse=direction == 1)
            output, *final = _Chain.apply(run, len(start), local, *start, *weights[at * each : (at + 1) * each])
            outputs.append(output)
            for kept, value in zip(finals, final, strict=True):
                kept.append(value)
        local = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        if dropout and train and layer < layers - 1:
            local = F.dropout(local, dropout, True)
    if batch_first:
        local = local.transpose(0, 1)
    count = spec.local_shape[batch]
    out = ShardTensorSpec(spec.mesh, spec.placements, (*spec.shape[:2], local.shape[2]), spec.sizes, local.dtype)
    results = [torch.cat(values).narrow(1, 0, count) for values in finals]
    return from_local(local.narrow(batch, 0, count), out), [from_local(r, own) for r, own in zip(results, state_specs, strict=True)]


def _used_by_one(state: Tensor, group) -> Tensor:
    """`state`, equal on the ranks of `group`, of which one uses it: its gradient is summed over them."""
    return comm.sum_gradient(state, group)


class _Run:
    """One layer in one direction over the ranks of `group`, of which this one is number `block`."""

    def __init__(self, *, cell: Callable, has_biases: bool, group, block: int, reverse: bool) -> None:
        self.cell, self.has_biases, self.group, self.reverse = cell, has_biases, group, reverse
        self.order = list(range(group.size()))
        if reverse:
            self.order.reverse()
        self.place = self.order.index(block)

    def local(self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not x.shape[0]:  # no steps here: the state passes through
            width = states[0].shape[2]
            return x.new_zeros((0, x.shape[1], width)) + (x * 0).sum() + 0 * sum(w.sum() for w in weights), *(s * 1 for s in states)
        x = x.flip(0) if self.reverse else x
        output, *finals = self.cell(x, _as_state(self.cell, states), list(weights), self.has_biases, 1, 0.0, False, False, False)
        return (output.flip(0) if self.reverse else output), *finals

    def hand_over(self, tensors: Sequence[Tensor], source: int, target: int) -> list[Tensor]:
        """The tensors of place `source`, at place `target`; others get their own back. Every rank calls."""
        me, ranks = self.place, self.group.size()
        flat = torch.cat([t.reshape(-1) for t in tensors])
        sent, received = [0] * ranks, [0] * ranks
        if me == source:
            sent[self.order[target]] = flat.numel()
        if me == target:
            received[self.order[source]] = flat.numel()
        came = comm.all_to_all(flat if me == source else flat.new_empty(0), sent, received, 0, self.group)
        if me != target:
            return list(tensors)
        return [part.view(t.shape) for part, t in zip(came.split([t.numel() for t in tensors]), tensors, strict=True)]


class _Chain(torch.autograd.Function):
    """One layer in one direction: this rank's steps, begun with the state of the rank before. Returns the output and the last state, which
    the last rank sends to all. Communication: one exchange from rank to rank and one broadcast; backward the same, the other way."""

    @staticmethod
    def forward(ctx, run: _Run, count: int, x: Tensor, *tensors: Tensor):
        states, weights = list(tensors[:count]), tensors[count:]
        last = run.group.size() - 1
        wants = any(ctx.needs_input_grad)
        for place in range(last + 1):
            if run.place == place:
                inputs = [t.detach().requires_grad_(wants) for t in (x, *states, *weights)]
                with torch.set_grad_enabled(wants):
                    results = run.local(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])
                mine = [r.detach() for r in results[1:]]
            if place < last:
                states = run.hand_over(mine if run.place == place else states, place, place + 1)
        ctx.run, ctx.count, ctx.inputs, ctx.results = run, count, inputs, results
        flat = comm.broadcast(torch.cat([s.reshape(-1) for s in mine]), run.order[last], run.group)
        finals = [part.view(s.shape) for part, s in zip(flat.split([s.numel() for s in mine]), mine, strict=True)]
        return results[0].detach(), *finals

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *state_grads: Tensor):
        run, count, inputs, results = ctx.run, ctx.count, ctx.inputs, ctx.results
        last = run.group.size() - 1
        passed = [g if run.place == last else torch.zeros_like(g) for g in state_grads]
        for place in reversed(range(last + 1)):
            if run.place == place:
                found = torch.autograd.grad(results, inputs, [grad, *passed], allow_unused=True)
                found = [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]
            if place:
                passed = run.hand_over(found[1 : 1 + count] if run.place == place else passed, place, place - 1)
        ctx.inputs = ctx.results = None
        if run.place:  # the state given at the start is used by the first rank
            found[1 : 1 + count] = [torch.zeros_like(g) for g in found[1 : 1 + count]]
        return None, None, *found


for _cell in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    shard_function(_cell)(_handler(_cell))
