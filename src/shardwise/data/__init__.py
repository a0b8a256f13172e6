"""Data for domain parallelism: every domain group sees one batch, of which each rank has its rows.

sampler = DomainSampler(len(dataset), mesh, global_batch=8)
loader = DomainLoader(SourceReader(dataset, mesh, (Shard(2), Replicate())), sampler)    # one rank reads and scatters
loader = DomainLoader(RowReader({"x": open_array("x.npy")}, mesh, {"x": Shard(2)}), sampler)    # each rank reads its own rows
"""

from shardwise.data.arrays import open_array, read_sharded
from shardwise.data.loader import DomainLoader, RowReader, SourceReader
from shardwise.data.sampler import DomainSampler

__all__ = ["DomainLoader", "DomainSampler", "RowReader", "SourceReader", "open_array", "read_sharded"]
