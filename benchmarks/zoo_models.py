"""Public models, unmodified, at small size: what `make zoo` and the tests run split over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model, its input and the dim to split.

    build: the module, in evaluation mode unless `train`. inputs: the tensors it takes, the first one is split along `dim`; integer
    inputs have no gradient. call: how the module is called, if not as `module(*inputs)`; it returns one tensor.
    """

    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    dim: int
    train: bool = False
    call: Callable[..., Tensor] | None = None

    def run(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        return module(*inputs) if self.call is None else self.call(module, *inputs)


def image(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def tokens(vocab: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(1)),)


def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch")


def monai_basic_unet() -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=(4, 4, 8, 8, 16, 4))


def monai_dense_net() -> nn.Module:
    from monai.networks.nets import DenseNet

    return DenseNet(spatial_dims=2, in_channels=1, out_channels=3, init_features=8, growth_rate=4, block_config=(2, 2))


def monai_swin() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), spatial_dims=2)


def diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=2, norm_num_groups=4, mid_block_add_attention=False,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(image_size=(36, 24), patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                              intermediate_size=32))  # fmt: skip


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    heads = [1, 1, 2, 2]
    config = SegformerConfig(num_channels=1, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=heads, decoder_hidden_size=16)
    return SegformerForSemanticSegmentation(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, tie_word_embeddings=True))  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32))


def x_transformer() -> nn.Module:
    from x_transformers import Encoder

    return Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, use_rmsnorm=True)


def graph_net() -> nn.Module:
    from torch_geometric.nn import GraphSAGE

    return GraphSAGE(4, 8, num_layers=2, out_channels=3)


def ring_graph() -> tuple[Tensor, ...]:
    here = torch.arange(24)
    edges = torch.stack([torch.cat([here, here]), torch.cat([(here + 1) % 24, (here + 5) % 24])])
    return (*image(24, 4)(), edges)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


ZOO: dict[str, Entry] = {
    "monai/unet_3d_train": Entry(package="monai", build=monai_unet, inputs=image(1, 1, 24, 8, 8), dim=2, train=True),
    "monai/basic_unet_2d": Entry(package="monai", build=monai_basic_unet, inputs=image(1, 1, 48, 33), dim=2),
    "monai/densenet_2d_train": Entry(package="monai", build=monai_dense_net, inputs=image(1, 1, 48, 32), dim=2, train=True),
    "monai/swin_unetr_2d": Entry(package="monai", build=monai_swin, inputs=image(1, 1, 64, 64), dim=2),
    "diffusers/unet_2d": Entry(
        package="diffusers", build=diffusers_unet, inputs=image(1, 1, 24, 16), dim=2, call=lambda m, x: m(x, 3).sample
    ),
    "diffusers/vae_decoder": Entry(
        package="diffusers", build=diffusers_vae, inputs=image(1, 2, 16, 8), dim=2, call=lambda m, x: m.decode(x).sample
    ),
    "transformers/vit": Entry(
        package="transformers", build=vit, inputs=image(1, 1, 36, 24), dim=2, call=lambda m, x: m(x).last_hidden_state
    ),
    "transformers/segformer": Entry(
        package="transformers", build=segformer, inputs=image(1, 1, 64, 64), dim=2, call=lambda m, x: m(x).logits
    ),
    "transformers/llama_tied": Entry(
        package="transformers", build=llama, inputs=tokens(50, 24), dim=1, call=lambda m, x: m(x, use_cache=False).logits
    ),
    "transformers/bert": Entry(package="transformers", build=bert, inputs=tokens(50, 24), dim=1, call=lambda m, x: m(x).last_hidden_state),
    "x_transformers/encoder": Entry(package="x_transformers", build=x_transformer, inputs=image(1, 24, 16), dim=1),
    "torch_geometric/graph_sage": Entry(package="torch_geometric", build=graph_net, inputs=ring_graph, dim=0),
    "torch/encoder_layer": Entry(package="torch", build=encoder_layer, inputs=image(1, 24, 16), dim=1),
}
