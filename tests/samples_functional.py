"""Samples of `shardwise.functional`."""

from functools import partial

from shardwise.functional import neighborhood_attention
from tests.samples import Sample, T

SAMPLES = [
    Sample(
        name="neighborhood_attention",
        function=partial(neighborhood_attention, kernel_size=3),
        inputs=(T("bxhd"), T("bxhd"), T("bxhe")),
        split="xbh",
        sizes={"b": 2, "d": 4, "h": 2},
        vary="b",
    ),
    Sample(
        name="neighborhood_attention dilated, even kernel, causal columns",
        function=partial(neighborhood_attention, kernel_size=(4, 2), dilation=(2, 1), is_causal=(False, True)),
        inputs=(T("bxyhd"), T("bxyhd"), T("bxyhd")),
        split="xy",
        sizes={"b": 1, "d": 2, "h": 1, "y": 5},
        vary="b",
    ),
]
