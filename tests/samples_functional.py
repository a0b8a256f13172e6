"""Samples of `shardwise.functional`."""

from functools import partial

from shardwise.functional import distance_to_triangles, knn, neighborhood_attention, radius_search
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
    Sample(name="knn", function=partial(knn, k=3), inputs=(T("nd"), T("qd")), split="nq", vary="q"),
    Sample(
        name="radius_search, all pairs",
        function=partial(radius_search, radius=1.5, return_dists=True, return_points=True),
        inputs=(T("nd"), T("qd")),
        split="nq",
    ),
    Sample(
        name="radius_search",
        function=partial(radius_search, radius=1.5, max_points=4, return_dists=True),
        inputs=(T("nd"), T("qd")),
        split="nq",
    ),
    Sample(
        name="distance_to_triangles",
        function=distance_to_triangles,
        inputs=(T("tcd"), T("pd")),
        split="tp",
    ),
]
