"""What is trained: `ModelSpec` for transformers, `GridModel` for models whose inputs are split over a domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from shardwise.spec.blocks import Attention, CompressedAttention, Layer, Mla, Mlp, Moe, Params


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer (or hybrid), exact to the parameter. Widths are numbers of features, counts are numbers of parameters."""

    name: str
    hidden: int
    vocab: int  # rows the model has, before padding for tensor parallelism
    layers: tuple[Layer, ...]
    tied: bool = False  # output head shares the embedding weight
    mtp: tuple[Layer, ...] = ()  # multi-token prediction layers, one per depth
    norm_bias: bool = False  # norms have a bias (LayerNorm)
    positions: int = 0  # rows of a learned position embedding
    embedding_norm: bool = False
    input_vocab: int = 0  # rows of the table with the embeddings that layers of `input_width` have of their own
    final_norm: bool = True
    other_params: int = 0  # parameters outside layers, embedding and head not covered above, exact; on the last stage
    max_positions: int | None = None  # longest sequence the positions allow
    vocab_divisor: int = 128  # vocabulary is padded to a multiple of vocab_divisor * tp (Megatron `make_vocab_size_divisible_by`)
    dropout: float = 0.0
    source: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def runs(self) -> tuple[tuple[Layer, int], ...]:
        """Layers as runs of equal ones: (layer, count)."""
        return tuple((layer, len(list(group))) for layer, group in groupby(self.layers))

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """Distinct layers in order of first use, MTP layers included."""
        return tuple(dict.fromkeys((*self.layers, *self.mtp)))

    @cached_property
    def moe(self) -> Moe | None:
        """The first mixture-of-experts block, or None for a dense model."""
        return next((layer.mlp for layer in self.kinds if isinstance(layer.mlp, Moe)), None)

    @cached_property
    def attentions(self) -> tuple[Attention | Mla | CompressedAttention, ...]:
        """Distinct softmax attention blocks."""
        found = (layer.mixer for layer in self.kinds if isinstance(layer.mixer, (Attention, Mla, CompressedAttention)))
        return tuple(dict.fromkeys(found))

    @cached_property
    def dense_mlps(self) -> tuple[Mlp, ...]:
        return tuple(dict.fromkeys(layer.mlp for layer in self.kinds if isinstance(layer.mlp, Mlp)))

    def padded_vocab(self, tp: int = 1) -> int:
        """Vocabulary padded to a multiple of `vocab_divisor * tp`."""
        step = self.vocab_divisor * tp
        return -(-self.vocab // step) * step

    @property
    def norm_params(self) -> int:
        """Parameters of one norm as wide as the hidden size."""
        return self.hidden * (2 if self.norm_bias else 1)

    def layer_params(self, layer: Layer, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        """Parameters of one layer held by one rank."""
        count = Params(layer.norms * self.norm_params + 2 * self.hidden * layer.input_width + layer.other_params)
        for block in (layer.mixer, layer.mlp):
            if block is not None:
                count = count.plus(block.params(self.hidden, tp, ep, etp))
        return count

    def layers_params(self, layers: Sequence[int], tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        """Parameters of the layers with these indices held by one rank."""
        count = Params(0)
        for index in layers:
            count = count.plus(self.layer_params(self.layers[index], tp, ep, etp))
        return count

    def mtp_params(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        """Parameters of the MTP layers on one rank: each is a layer, a projection of 2 hidden to hidden, and three norms."""
        count = Params(0)
        for layer in self.mtp:
            count = count.plus(self.layer_params(layer, tp, ep, etp))
            count = count.plus(Params(-(-2 * self.hidden * self.hidden // tp) + 3 * self.norm_params))
        return count

    @cached_property
    def input_widths(self) -> int:
        """Features of the embeddings of all layers together."""
        return sum(layer.input_width * count for layer, count in self.runs)

    def layer_inputs_params(self, tp: int = 1) -> int:
        """Embeddings of the layers on one rank: their table, the token embedding projected to as many features, and a norm of that."""
        norm = max((layer.input_width for layer, _ in self.runs), default=0)
        return (-(-self.input_vocab // tp) + -(-self.hidden // tp)) * self.input_widths + norm

    @property
    def embedding_params(self) -> int:
        """Token embedding, learned positions, embedding norm and embeddings of the layers, vocabulary not padded."""
        return (self.vocab + self.positions) * self.hidden + self.norm_params * self.embedding_norm + self.layer_inputs_params()

    @property
    def head_params(self) -> int:
        """Output head, also when tied, vocabulary not padded."""
        return self.vocab * self.hidden

    def embedding_params_on_rank(self, tp: int) -> int:
        rows = self.padded_vocab(tp) // tp
        return (rows + self.positions) * self.hidden + self.norm_params * self.embedding_norm + self.layer_inputs_params(tp)

    def head_params_on_rank(self, tp: int) -> int:
        return self.padded_vocab(tp) // tp * self.hidden

    @cached_property
    def total_params(self) -> int:
        """All parameters, MTP layers left out (as Hugging Face counts them)."""
        layers = sum(self.layer_params(layer).total * count for layer, count in self.runs)
        head = 0 if self.tied else self.head_params
        return self.embedding_params + layers + self.final_norm * self.norm_params + head + self.other_params

    @cached_property
    def active_params(self) -> int:
        """Parameters one token uses: all but the experts it is not routed to."""
        idle = 0
        for layer, count in self.runs:
            if isinstance(layer.mlp, Moe):
                idle += count * (layer.mlp.experts - layer.mlp.top_k) * layer.mlp.expert_params(self.hidden)
        return self.total_params - idle

    def replace(self, **changes: Any) -> ModelSpec:
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class GridModel:
    """A model over a grid (image, volume, field, sequence), measured or traced once; sized for domain parallelism.

    Activation memory scales with the rows of `grid` a rank holds; `halo_bytes` are received per sample and step at each cut.
    """

    name: str
    grid: tuple[int, ...]
    params: int
    saved_bytes_per_sample: int  # activations kept for backward, one sample, whole grid
    flops_per_sample: float  # forward and backward
    param_dtype: str = "fp32"
    halo_bytes: int = 0
    peak_bytes_per_sample: int = 0  # largest temporary on top of the saved activations, whole grid
