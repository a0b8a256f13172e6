"""What each op does under each placement, seen by running the samples: `python -m tests.ops_seen` writes `debug/ops_seen.json`.

Each sample runs forward and backward on two ranks, with each of its letters split, with everything replicated, and with its first input
a pending sum. For every call of a registered op its arguments' placements and what it sent are kept:

    {"torch.conv2d": {"Shard(2), plain, plain": ["exchange"], ...}, ...}

    local       nothing was sent
    exchange    rows or blocks went to the ranks that need them, a split moved to another dim, or sizes were agreed
    reduce      numbers were summed or compared over ranks
    gather      at least one argument was completed on every rank
    refused     every rank raised one of `shardwise.errors`
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils._pytree import tree_leaves

from shardwise.debug.explain import op_name
from shardwise.errors import MissingShardPatch, UndeterminedShardingError
from shardwise.shard_tensor import ShardTensor, registry
from shardwise.testing import count_communication, ranks, shard
from tests.samples import Sample, all_samples, rows, split_inputs, whole_inputs

FILE = Path(__file__).parents[1] / "src" / "shardwise" / "debug" / "ops_seen.json"
REFUSALS = (MissingShardPatch, UndeterminedShardingError)
REDUCTIONS = ("all_reduce", "reduce_scatter")

Seen = dict[str, dict[str, set[str]]]


def placements(values) -> str:
    """`Shard(1), plain`: how each tensor argument lies; at most four are told."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    names = [str(x.placements[0]) if isinstance(x, ShardTensor) else "plain" for x in tensors[:4]]
    names = [name if name[:2] != "S(" else f"Shard({name[2:]}" for name in names]
    names = [{"R": "Replicate", "P(sum)": "Partial"}.get(name, name) for name in names]
    return ", ".join([*names, "..."] if len(tensors) > 4 else names)


def kinds(sent, values) -> set[str]:
    """What was sent, in a word or two. A gather sends the whole shard of an argument to every other rank."""
    shards = [x.to_local().numel() * x.element_size() for x in tree_leaves(values) if isinstance(x, ShardTensor) and x._spec.sharded_dims]
    found = set()
    for record in sent.records:
        if record.collective in REDUCTIONS:
            found.add("reduce")
        elif record.collective == "all_gather" and shards and record.bytes >= min(shards):
            found.add("gather")
        elif record.bytes:
            found.add("exchange")
    return found or {"local"}


@contextmanager
def watching(seen: Seen):
    """Keep what the handlers and rules do on rank 0 in `seen`."""

    def watched(op, handler, values_of):
        name = op_name(op)

        def run(*call):
            values = values_of(call)
            if torch.distributed.get_rank() or not any(isinstance(x, ShardTensor) for x in tree_leaves(values)):
                return handler(*call)
            where = placements(values)
            try:
                with count_communication() as sent:
                    result = handler(*call)
            except REFUSALS:
                seen[name][where].add("refused")
                raise
            seen[name][where] |= kinds(sent, values)
            return result

        return run

    functions, rules = dict(registry.functions), dict(registry.rules)
    registry.functions.update({f: watched(f, handler, lambda call: call[2:]) for f, handler in functions.items()})
    registry.rules.update(
        {
            op: watched(op, rule, lambda call: call[1:])
            for op, rule in rules.items()
            if isinstance(op, torch._ops.OpOverload) and op not in registry.found_rules
        }
    )
    try:
        yield
    finally:
        registry.functions.update(functions)
        for op in set(registry.rules) - set(rules):
            del registry.rules[op]
        registry.rules.update(rules)


@ranks(2, timeout=600)
def run(world, samples: list[Sample]):
    for sample in samples:
        mesh = world.make_mesh((2,), ("domain",))  # remembers nothing of the samples before
        tensors = whole_inputs(sample, sizes={letter: sample.size(letter) for letter in sample.letters}, dtype=sample.dtypes[0])
        for letter in sample.split + sample.refused:
            attempt(sample, split_inputs(sample, tensors, mesh, (letter,), {letter: rows("even", sample.size(letter), 2)}))
        for placement in (Replicate(), Partial()):
            inputs = [
                x
                if number in sample.plain or (placement.is_partial() and (number or t.kind != "normal"))
                else shard(x, mesh, placements=(placement,))
                for number, (t, x) in enumerate(zip(sample.inputs, tensors, strict=True))
            ]
            attempt(sample, inputs)


def attempt(sample: Sample, inputs) -> None:
    """Forward and, where the sample has gradients, backward, whose operators arrive at rules of their own."""
    leaves = [x.detach().requires_grad_(sample.grads and (x.is_floating_point() or x.is_complex())) for x in inputs]
    try:
        outputs = [x for x in tree_leaves(sample.function(*leaves)) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    except REFUSALS:
        pass


def see(samples: list[Sample]) -> dict[str, dict[str, list[str]]]:
    """What the ops of these samples do."""
    seen: Seen = defaultdict(lambda: defaultdict(set))
    with warnings.catch_warnings(), watching(seen):
        warnings.simplefilter("ignore")
        run(samples)
    return {name: {where: sorted(found) for where, found in sorted(table.items())} for name, table in sorted(seen.items())}


def main() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(table)}" for name, table in see(all_samples()).items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} ops written to {FILE}", file=sys.stderr)


if __name__ == "__main__":
    main()
