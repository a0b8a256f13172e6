"""Functions that torch lacks, in plain torch, with sharded forms: neighbourhoods of grids, points and surfaces."""

from shardwise.functional.neighborhood import neighborhood_attention
from shardwise.functional.points import knn, radius_search
from shardwise.functional.surface import distance_to_triangles, signed_distance

__all__ = ["distance_to_triangles", "knn", "neighborhood_attention", "radius_search", "signed_distance"]
