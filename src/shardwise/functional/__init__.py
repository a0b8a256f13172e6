"""Functions that torch lacks, in plain torch, with sharded forms: neighbourhoods of grids, points and surfaces."""

from shardwise.functional.neighborhood import neighborhood_attention

__all__ = ["neighborhood_attention"]
