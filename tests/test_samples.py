"""Every sample equals one process, in values and gradients, on even, uneven, one-row and empty shards; every registered op has one."""

import pytest
import torch

from shardwise.errors import MissingShardPatch, UndeterminedShardingError
from shardwise.shard_tensor import registry, tensor
from shardwise.testing import assert_same_as_unsharded, ranks
from tests.samples import all_samples, rows, split_inputs, whole_inputs

SAMPLES = all_samples()
REGISTERED = {**registry.functions, **registry.rules}  # before any op has run: lookups remember what they found
EACH_SAMPLE = pytest.mark.parametrize("sample", SAMPLES, ids=str)

# Registered for what they are, not for what they compute; tested in tests/shard_tensor.
PROTOCOL = {
    "__array__", "__set__", "backward", "data_ptr", "grad", "numpy", "requires_grad_", "storage", "tolist", "untyped_storage",
    "aten._local_scalar_dense.default", "aten.equal.default", "aten.is_pinned.default", "aten.is_same_size.default",
    "aten.lift_fresh.default", "aten.new_empty.default", "aten.new_empty_strided.default", "aten.empty_like.default",
    "aten.batch_norm_stats.default",
}  # fmt: skip


ALIASES = {"truediv": "div", "radd": "add", "rmul": "mul", "rmatmul": "matmul", "rsub": "sub"}  # operators that arrive as the function


def check(world, sample, axes, kind):
    """One case: each mesh axis splits the letter that `axes` names."""
    blocks = {}
    for letter in set(axes) - {None}:
        count = 1
        for axis, other in enumerate(axes):
            count *= world.mesh.size(axis) if other == letter else 1
        blocks[letter] = rows(kind, sample.size(letter), count)
    tensors = whole_inputs(sample, sizes={letter: sample.size(letter) for letter in sample.letters}, dtype=sample.dtypes[0])
    inputs = split_inputs(sample, tensors, world.mesh, axes, blocks)
    try:
        if set(axes) & set(sample.refused):
            with pytest.raises((MissingShardPatch, UndeterminedShardingError)):
                sample.function(*inputs)
        else:
            assert_same_as_unsharded(sample.function, *inputs, grads=sample.grads)
    except BaseException as error:
        error.add_note(f"{sample.name}: {kind} shards {blocks}, axes split {axes}")
        raise


def check_line(world, sample):
    for number, letter in enumerate(sample.split + sample.refused):
        for kind in ("even", "uneven", "one-row", "empty") if number == 0 else ("uneven", "empty"):
            check(world, sample, (letter,), kind)


@EACH_SAMPLE
@ranks(2)
def test_two_ranks_equal_one_process(world, sample):
    check_line(world, sample)


@EACH_SAMPLE
@ranks(3)
def test_three_ranks_equal_one_process(world, sample):
    check_line(world, sample)


@EACH_SAMPLE
@ranks(4)
def test_four_ranks_equal_one_process(world, sample):
    check_line(world, sample)


@EACH_SAMPLE
@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_mesh_of_two_axes_equals_one_process(world, sample):
    first, *others = sample.split
    second = others[0] if others else None
    for axes in [(first, first), (first, second), (second, first)]:
        for kind in ("uneven", "empty"):
            check(world, sample, axes, kind)


class Recording(dict):
    """A registry that remembers which of its entries were used."""

    def __init__(self, entries, used):
        super().__init__(entries)
        self.used = used

    def get(self, key, default=None):
        self.used.add(key)
        return super().get(key, default)


@ranks(2)
def run_all_samples(world):
    for sample in SAMPLES:
        for letter in sample.split:
            check(world, sample, (letter,), "even")


def short_name(op):
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    if op.__name__ in PROTOCOL:
        return op.__name__
    name = op.__name__.removeprefix("__").removesuffix("__")
    return ALIASES.get(name, name)


def test_every_registered_op_has_a_sample(monkeypatch):
    used = set()
    for name in ("functions", "rules"):
        recording = Recording(getattr(registry, name), used)
        for module in (registry, tensor):
            monkeypatch.setattr(module, name, recording)
    run_all_samples()
    reached = {short_name(op) for op in used if op in REGISTERED}
    missing = {short_name(op) for op in REGISTERED} - reached - PROTOCOL
    assert not missing, f"add samples that reach {' '.join(sorted(missing))}"
