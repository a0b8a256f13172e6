"""Samples of layers: embedding, convolution and attention. Their own tests go through many more settings."""

from functools import partial

import torch
import torch.nn.functional as F

from tests.samples import Sample, T

EMBEDDING = [
    Sample(name="embedding", function=F.embedding, inputs=(T("bs", "index", "v"), T("vc")), split="bs", plain=(1,), sizes={"v": 7}),
    Sample(name="embedding of a split table", function=F.embedding, inputs=(T("bs", "index", "v"), T("vc")), split="vcs", plain=(0,)),
    Sample(
        name="embedding with padding",
        function=partial(F.embedding, padding_idx=2),
        inputs=(T("bs", "index", "v"), T("vc")),
        split="bs",
        plain=(1,),
        sizes={"v": 7},
    ),
]

SIZES = {"b": 2, "c": 4, "o": 6, "k": 3, "w": 5, "g": 2}
CONVOLUTION = [
    Sample(name=f"{function.__name__} {name}", function=partial(function, **options), inputs=(T(x), T(weight), T("o")),
           split="".join(letter for letter in x if letter in "hwz"), plain=(1, 2), sizes=SIZES)
    for function, x, weight in [(F.conv1d, "bch", "ock"), (F.conv2d, "bchw", "ockk"), (F.conv3d, "bchwz", "ockkk")]
    for name, options in [("padded", {"padding": 1}), ("strided", {"stride": 2, "padding": 2, "dilation": 2})]
] + [
    Sample(name=f"{function.__name__} strided", function=partial(function, stride=2, padding=1, output_padding=1),
           inputs=(T(x), T(weight), T("o")), split="".join(letter for letter in x if letter in "hwz"), plain=(1, 2), sizes=SIZES)
    for function, x, weight in [
        (F.conv_transpose1d, "bch", "cok"), (F.conv_transpose2d, "bchw", "cokk"), (F.conv_transpose3d, "bchwz", "cokkk"),
    ]
] + [
    Sample(name="conv2d over the batch and grouped", function=partial(F.conv2d, groups=2, padding="same"),
           inputs=(T("bchw"), T("ogkk"), T("o")), split="bh", plain=(1, 2), sizes={**SIZES, "b": 12}),
    Sample(name="convolution", inputs=(T("bchw"), T("ockk"), T("o")), split="h", plain=(1, 2), sizes=SIZES,
           function=lambda x, w, b: torch.convolution(x, w, b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
]  # fmt: skip

ATTENTION = [
    Sample(name="attention", function=F.scaled_dot_product_attention, inputs=(T("bhsd"), T("bhsd"), T("bhsd")), split="sbh",
           sizes={"d": 8}),
    Sample(name="cross-attention", function=F.scaled_dot_product_attention, inputs=(T("bhqd"), T("bhsd"), T("bhsd")), split="qs",
           sizes={"d": 8}),
]  # fmt: skip

SAMPLES = [*EMBEDDING, *CONVOLUTION, *ATTENTION]
