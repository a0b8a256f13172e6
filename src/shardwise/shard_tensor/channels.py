"""The channels of a convolution: which part of the weight belongs to the input channels that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardwise.shard_tensor.halo import aligned, grown
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.spec.spans import spans_of


@dataclass(frozen=True, kw_only=True)
class Channels:
    """What one rank does when the channel dim `dim` of the input is sharded.

    One group: each rank has some of the summands of every output channel, and the result is a pending sum. Several groups: shards
    lie on borders of groups, each rank computes its own groups, and the output channels are sharded likewise.

    source: the layout that the input must have. groups: groups computed here. weight_dim, weight_span: this rank's part of the weight.
    out_sizes: output channels of each block, None for a pending sum. out_span: those of this rank. first: whether this rank adds the bias.
    inputs: input channels of the local call, at least those of one group.
    """

    source: ShardTensorSpec
    groups: int
    inputs: int
    weight_dim: int
    weight_span: tuple[int, int]
    out_sizes: tuple[int, ...] | None
    out_span: tuple[int, int]
    first: bool

    def local(self, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The operands of the local call."""
        x = grown(x, dim, self.inputs)
        start, stop = self.weight_span
        weight = weight.narrow(self.weight_dim, start, stop - start)
        if bias is not None and self.out_sizes is not None:
            bias = bias.narrow(0, self.out_span[0], self.out_span[1] - self.out_span[0])
        elif bias is not None and not self.first:
            bias = grown(bias.narrow(0, 0, 0), 0, bias.shape[0])  # zeros that keep the bias in the graph of every rank
        return x, weight, bias

    def layout(self, out: ShardTensorSpec, dim: int) -> ShardTensorSpec:
        """The layout `out` of the result once its channel dim is settled."""
        placements = out.placements
        if self.out_sizes is None:
            placements = tuple(Partial() if isinstance(p, Shard) and p.dim == dim else p for p in placements)
        sizes = (*out.sizes[:dim], self.out_sizes, *out.sizes[dim + 1 :])
        return ShardTensorSpec(out.mesh, placements, out.shape, sizes, out.dtype)


def split_channels(spec: ShardTensorSpec, dim: int, groups: int, outputs: int, *, transposed: bool) -> Channels:
    """How the input channels of `spec`, sharded in `dim`, meet a weight of `groups` groups that makes `outputs` channels.

    A weight has the shape (outputs, channels / groups, ...), a transposed one (channels, outputs / groups, ...).
    """
    block = spec.block_index(dim, spec.coordinate)
    if groups == 1:
        start, stop = spans_of(spec.sizes[dim])[block]
        if start == stop:  # no channel here: one of zeros, which adds nothing
            start, stop = 0, 1
        return Channels(
            source=spec,
            groups=1,
            inputs=stop - start,
            weight_dim=0 if transposed else 1,
            weight_span=(start, stop),
            out_sizes=None,
            out_span=(0, outputs),
            first=block == 0,
        )
    per_group, made = spec.shape[dim] // groups, outputs // groups
    spec = aligned(spec, dim, per_group)
    sizes = spec.sizes[dim]
    start, stop = (row // per_group for row in spans_of(sizes)[block])
    if start == stop:
        start, stop = 0, 1
    unit = per_group if transposed else made
    return Channels(
        source=spec,
        groups=stop - start,
        inputs=(stop - start) * per_group,
        weight_dim=0,
        weight_span=(start * unit, stop * unit),
        out_sizes=tuple(size // per_group * made for size in sizes),
        out_span=(start * made, stop * made),
        first=True,
    )
