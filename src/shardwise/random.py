"""Random numbers that do not depend on the split.

Dropout, `rand_like`, `normal_` and their like on a `ShardTensor` give the same global numbers on one rank and on many,
whatever dim is split and how. This is always on. Each element's number is a hash of a key, one for each op, and of the
element's place in the whole tensor, so a rank computes its own shard's numbers alone and keeps nothing but them.

**The key** of an op is one draw from torch's default CPU generator. So `torch.manual_seed` restarts the numbers, `torch.get_rng_state`
and `torch.random.fork_rng` save and restore them, and activation checkpointing repeats the masks of the forward pass.

**Agreement.** All ranks of a mesh must draw the same key. At the first random op on a mesh all its ranks take over the state
of the default generator of the mesh's first rank (one small broadcast), so ranks seeded differently agree from then on;
ranks of other meshes (data-parallel replicas, say) keep their own. `parallelize` does the same for the domain. Agreement is a matter
of the ranks, not of the mesh object: `mesh["domain"]` may be taken anew each time. Later ops send nothing; the ranks must go on drawing
alike, as they do when they run the same program. `scatter_tensor` also spreads the source's state, so that a data loader on
that rank alone does no harm. Whether the keys still agree is compared now and then: after 1, 2, 4, ..., 64 random ops on the
mesh and then every 64, by one all-reduce of four numbers. If not, all ranks raise RuntimeError together. `synchronize(mesh)`
spreads the state at any time. Call it once at the start where `parallelize` is not used, ranks are seeded differently and the first
random op lies in compiled code, which neither agrees nor compares, or inside an activation checkpoint, which keeps the state from before.

**Distributions** are those of torch, not its numbers: a plain tensor with the same seed gets others. Ops of which no
form is written out here (`multinomial`, `poisson`, ...) run on the whole tensor on every rank from a generator seeded with the key.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh

from shardwise.mesh.groups import axis_group, flat_group

Box = Sequence[tuple[int, int]]
COMPARE_EVERY = 64

# The 64-bit finalizer of SplitMix64 (Steele, Lea and Flood 2014, variant 13 of D. Stafford), as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_FACTOR_2 = 0x94D049BB133111EB - 2**64
PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements at a time: on a CPU they stay in its cache


class _Source(threading.local):
    generator: torch.Generator | None = None  # None: torch's default CPU generator


_source = _Source()


@contextmanager
def use_generator(generator: torch.Generator) -> Iterator[None]:
    """Draw keys from `generator`, a CPU one, in this thread, in place of torch's default generator. All ranks must do so alike."""
    before, _source.generator = _source.generator, generator
    try:
        yield
    finally:
        _source.generator = before


def current_generator() -> torch.Generator:
    """The generator from which keys are drawn in this thread."""
    return _source.generator or torch.default_generator


# ---------------------------------------------------------------------- keys


class _Stream:
    """What one rank knows of the random ops on the ranks of a mesh since they last agreed."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0


_streams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Stream]] = weakref.WeakKeyDictionary()


def _agreed() -> dict[tuple[int, ...], _Stream]:
    """By their ranks, the meshes of this world on which the ranks have agreed."""
    return _streams.setdefault(dist.group.WORLD, {})


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def draw_key(mesh: DeviceMesh, generator: torch.Generator | None = None) -> Tensor:
    """The key of the next random op on `mesh`: an int64 CPU tensor of no dims, the same on every rank of the mesh.

    generator: what the user passed to the op, if anything. Call it on all ranks of the mesh.
    Communication: none, but a broadcast of the generator's state at the first call, and now and then a comparison (see the module).
    """
    source = generator if generator is not None else _source.generator
    stream = None if torch.compiler.is_compiling() else mesh.__dict__.get("_shardwise_random")
    if stream is None and not torch.compiler.is_compiling() and detect_fake_mode() is None:
        stream = mesh._shardwise_random = _agreed().get(_ranks(mesh)) or synchronize(mesh)
    key = torch.randint(2**62, (), dtype=torch.int64, generator=source, device="cpu" if source is None else source.device)
    if stream is None or type(key) is not Tensor or torch.compiler.is_compiling():  # traced, or on a fake cluster
        return key
    key = key.cpu()
    stream.count += 1
    stream.digest = (stream.digest * 31 + int(key)) % 2**61
    if stream.count % COMPARE_EVERY == 0 or (stream.count < COMPARE_EVERY and stream.count & (stream.count - 1) == 0):
        _compare(mesh, stream)
    return key


def synchronize(mesh: DeviceMesh, source: int | None = None) -> _Stream:
    """Give every rank of `mesh` the default generator's state of one of them. Communication: one broadcast of 5 kB.

    source: its global rank; by default the mesh's first. Call it on all ranks of the mesh.
    """
    generator = current_generator()
    ranks = _ranks(mesh)
    if len(ranks) > 1:
        state = generator.get_state().to(_device(mesh))
        dist.broadcast(state, src=ranks[0] if source is None else source, group=_group(mesh))
        generator.set_state(state.cpu())
    stream = _agreed().setdefault(ranks, _Stream())
    stream.count = stream.digest = 0
    return stream


def follow_source(mesh: DeviceMesh, source: int) -> None:
    """`synchronize`, if the ranks of `mesh` have agreed before: for what one rank has prepared alone."""
    if _ranks(mesh) in _agreed():
        synchronize(mesh, source)


def _compare(mesh: DeviceMesh, stream: _Stream) -> None:
    if mesh.size() == 1:
        return
    mine = torch.tensor([stream.count, -stream.count, stream.digest, -stream.digest], device=_device(mesh))
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=_group(mesh))
    most, least, high, low = mine.tolist()
    if most != -least or high != -low:
        raise RuntimeError(
            f"the ranks of {mesh} draw different random numbers: since they were last compared, one of them has seeded torch's default "
            "generator differently or drawn from it alone, so dropout masks of the last ops may not fit together. Seed and draw alike on "
            "all ranks of the mesh, give a data loader that only some ranks run a generator of its own, or call "
            "shardwise.random.synchronize(mesh) on all ranks after whatever only some of them do"
        )


def _group(mesh: DeviceMesh):
    return axis_group(mesh, 0) if mesh.ndim == 1 else flat_group(mesh, tuple(range(mesh.ndim)))


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)


# ---------------------------------------------------------------------- numbers


def random_values(
    make: Callable[[Tensor], Tensor], key: Tensor, box: Box, shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """`make(bits)` for each element of a part of a tensor. It is called on pieces, so that the bits of all are never there at once.

    make: 64 random bits to a value, by element. box, shape: as for `random_bits`.
    """
    pieces = [tuple(box)]
    if not torch.compiler.is_compiling():
        pieces = list(_pieces(tuple(box), PIECE.get(torch.device(device).type, PIECE["cuda"])))
    if len(pieces) == 1:
        return make(random_bits(key, box, shape, device))
    result = None
    for piece in pieces:
        values = make(random_bits(key, piece, shape, device))
        if result is None:
            result = values.new_empty([stop - start for start, stop in box])
        result[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(piece, box, strict=True))] = values
    return result


def _pieces(box: tuple[tuple[int, int], ...], limit: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The box in pieces of at most about `limit` elements, cut along the first dims."""
    if math.prod(stop - start for start, stop in box) <= limit:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    inner = math.prod(b - a for a, b in box[dim + 1 :])
    rows = max(1, limit // inner)
    for row in range(start, stop, rows):
        yield from _pieces((*box[:dim], (row, min(row + rows, stop)), *box[dim + 1 :]), limit)


def random_bits(key: Tensor, box: Box, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """64 random bits, as int64, for each element of a part of a tensor.

    box: rows (start, stop) of each dim that the part has. shape: of the whole tensor. Equal elements get equal bits in every part.
    """
    extent = tuple(stop - start for start, stop in box)
    state: Tensor = key.to(device)
    step = _GAMMA
    for dim in range(len(shape) - 1, -1, -1):
        if extent[dim] == 1 and dim:
            state = state + _wrapped(box[dim][0] * step)
        else:
            places = torch.arange(box[dim][0], box[dim][1], dtype=torch.int64, device=device) * step
            state = places.view(-1, *(1,) * (len(shape) - 1 - dim)) + state
        step = _wrapped(step * shape[dim])
    return _mixed(state.expand(extent).contiguous())


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _mixed(bits: Tensor) -> Tensor:
    """Mix each number in place; a shift to the right must bring zeros in."""
    bits ^= (bits >> 30) & (2**34 - 1)
    bits *= _FACTOR_1
    bits ^= (bits >> 27) & (2**37 - 1)
    bits *= _FACTOR_2
    bits ^= (bits >> 31) & (2**33 - 1)
    return bits


def keep_mask(bits: Tensor, probability: float) -> Tensor:
    """True with this probability."""
    return ((bits >> 11) & (2**53 - 1)) < round(probability * 2**53)


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1), with as many digits as `dtype` has below 1."""
    digits = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (((bits >> (64 - digits)) & (2**digits - 1)).to(wide) * 2.0**-digits).to(dtype)


def open_uniform(bits: Tensor) -> Tensor:
    """Uniform in (0, 1), float64."""
    return (((bits >> 12) & (2**52 - 1)).to(torch.float64) + 0.5) * 2.0**-52


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (Box and Muller 1958), from one half of the bits the radius and from the other the angle."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    first = (((bits >> 32) & (2**32 - 1)) + 1).to(wide) * 2.0**-32
    second = (bits & (2**32 - 1)).to(wide) * 2.0**-32
    return ((-2 * first.log()).sqrt() * (2 * math.pi * second).cos()).to(dtype)


def integers(bits: Tensor, low: int, high: int) -> Tensor:
    """Integers from `low` to below `high`."""
    return (bits & (2**63 - 1)) % (high - low) + low
