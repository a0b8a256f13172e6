"""The real training step on a fake cluster: shapes, storages and messages of one rank, without data."""
