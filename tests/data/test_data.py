"""Samples reach every domain group whole and once, whoever reads them, and the order does not depend on the layout."""

import builtins

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils.data import Dataset

from shardwise.data import DomainLoader, DomainSampler, RowReader, SourceReader, open_array, read_sharded
from shardwise.errors import InputError
from shardwise.testing import count_communication, ranks


class Fields(Dataset):
    """Sample i: a field of i in [2, 7, 3] and the label i; refuses to be read on other than the first rank of a domain group."""

    def __init__(self, allowed=True, broken=-1):
        self.allowed, self.broken = allowed, broken

    def __len__(self):
        return 12

    def __getitem__(self, i):
        assert self.allowed
        if i == self.broken:
            raise OSError("disk is gone")
        return torch.arange(42.0).view(2, 7, 3) + 100 * i, i


def _order(mesh, **options):
    sampler = DomainSampler(12, mesh, global_batch=4, **options)
    return list(sampler.batches()), sampler


@ranks(4)
def test_global_batches_are_the_same_samples_in_every_layout(world):
    import torch.distributed as dist

    seen = []
    for ddp in (1, 2, 4):
        for accumulate in (1, 4 // ddp):
            mesh = world.make_mesh((ddp, 4 // ddp), ("ddp", "domain"))
            batches, sampler = _order(mesh, accumulate=accumulate)
            assert len(sampler) == 3 * accumulate
            everyone = [None] * ddp
            dist.all_gather_object(everyone, batches, group=mesh.get_group("ddp"))
            steps = [{i for mine in everyone for b in mine[s * accumulate : (s + 1) * accumulate] for i in b} for s in range(3)]
            assert sorted(i for step in steps for i in step) == list(range(12))
            seen.append(steps)
    assert all(steps == seen[0] for steps in seen)
    assert list(_order(mesh, seed=1)[1].batches()) != list(_order(mesh)[1].batches())
    sampler = _order(mesh)[1]
    assert list(sampler.batches(epoch=1)) != list(sampler.batches(epoch=0))


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_first_rank_reads_and_scatters(world):
    source = world.mesh.get_local_rank("domain") == 0
    sampler = DomainSampler(12, world.mesh, global_batch=4, shuffle=False)
    loader = DomainLoader(SourceReader(Fields(allowed=source), world.mesh, (Shard(2), Replicate())), sampler)
    got = list(loader)
    assert (len(got), loader.state_dict()) == (3, {"epoch": 1, "position": 0})
    for step, (x, label) in enumerate(got):
        first = 4 * step + 2 * world.mesh.get_local_rank("ddp")
        assert x.shape == (2, 2, 7, 3) and x._local_tensor.shape[2] == (4 if source else 3)
        assert label.full_tensor().tolist() == [first, first + 1]
        whole = torch.stack([Fields()[i][0] for i in (first, first + 1)])
        assert torch.equal(x.full_tensor(), whole)
    again = DomainLoader(loader.reader, sampler)
    again.load_state_dict({"epoch": 0, "position": 2})
    assert [label.full_tensor().tolist() for _, label in again] == [got[2][1].full_tensor().tolist()]


@ranks(3)
def test_failure_to_read_is_raised_on_all_ranks(world):
    mesh = world.make_mesh((1, 3), ("ddp", "domain"))
    sampler = DomainSampler(12, mesh, global_batch=1, shuffle=False)
    loader = DomainLoader(SourceReader(Fields(broken=1), mesh, (Shard(2), Replicate())), sampler)
    with pytest.raises(RuntimeError, match="rank 0 could not read a batch: OSError: disk is gone"):
        list(loader)
    with pytest.raises(RuntimeError, match="a sample has 2 tensors"):
        list(DomainLoader(SourceReader(Fields(), mesh, Shard(2)), sampler))

    class Broken:
        shape = (12, 2, 7, 3)

        def __getitem__(self, index):
            if world.rank == 2:
                raise OSError("disk of rank 2 is gone")
            return np.zeros((1, 2, index[2].stop - index[2].start, 3))

    expected = "disk of rank 2" if world.rank == 2 else "another rank of the domain group could not read"
    with pytest.raises((OSError, RuntimeError), match=expected):
        list(DomainLoader(RowReader({"x": Broken()}, mesh, {"x": Shard(2)}), sampler))


def _save(path, values):
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        from safetensors.numpy import save_file

        save_file({"x": values}, path)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@ranks(3)
def test_every_rank_reads_its_own_rows(world, tmp_path, suffix):
    values = np.arange(4 * 2 * 7 * 3, dtype=np.float64).reshape(4, 2, 7, 3)
    path = tmp_path / f"x{world.rank}{suffix}"
    _save(path, values)

    class Watched:
        def __init__(self, array):
            self.array, self.shape, self.elements = array, array.shape, 0

        def __getitem__(self, index):
            part = self.array[index]
            self.elements += part.size if isinstance(part, np.ndarray) else part.numel()
            return part

    array = Watched(open_array(path))
    with count_communication() as sent:
        x = read_sharded(array, world.mesh, (Shard(2),))
    assert sent.calls == 0
    assert array.elements == x._local_tensor.numel() == 4 * 2 * (3, 3, 1)[world.rank] * 3
    assert x.dtype == torch.float64 and torch.equal(x.full_tensor(), torch.from_numpy(values))
    batch = read_sharded(array, world.mesh, (Shard(2),), samples=[3, 1], dtype=torch.float32)
    assert torch.equal(batch.full_tensor(), torch.from_numpy(values[[3, 1]]).float())
    sampler = DomainSampler(4, world.mesh, global_batch=2, shuffle=False)
    got = [b["x"].full_tensor() for b in DomainLoader(RowReader({"x": array}, world.mesh, {"x": Shard(2)}), sampler)]
    assert torch.equal(torch.cat(got), torch.from_numpy(values))


@ranks(2)
def test_what_cannot_be_read_is_refused(world, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        open_array(tmp_path / "nowhere.npy")
    (tmp_path / "x.txt").touch()
    with pytest.raises(InputError, match=r"\.txt is not a known kind"):
        open_array(tmp_path / "x.txt")
    with pytest.raises(InputError, match="dim 0 counts the samples"):
        read_sharded(np.zeros((4, 2)), world.mesh, (Shard(0),), samples=[0, 1])
    with pytest.raises(InputError, match="pending sum"):
        read_sharded(np.zeros((4, 2)), world.mesh, (Partial(),))
    with pytest.raises(ValueError, match="the same names"):
        RowReader({"x": np.zeros((4, 2))}, world.mesh, {"y": Shard(1)})


@pytest.mark.parametrize("module, suffix", [("h5py", ".h5"), ("zarr", ".zarr")])
def test_optional_formats(tmp_path, monkeypatch, module, suffix):
    """The reader opens the file through the optional package; here a stand-in for it, which keeps arrays in memory."""

    class Stand:
        @staticmethod
        def open(path, mode):
            return {"x": np.arange(6.0)}

        File = open

    path = tmp_path / f"field{suffix}"
    path.touch()
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *args, **kw: Stand if name == module else real(name, *args, **kw))
    assert open_array(path, "x").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(InputError, match=r"no such array\ntry: one of \['x'\]"):
        open_array(path, "y")


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_batch_rules_are_told_with_the_numbers(world):
    with pytest.raises(InputError) as error:
        DomainSampler(12, world.mesh, global_batch=5, accumulate=2)
    assert "global_batch=5 accumulate=2 over 2 domain groups, 12 samples" in str(error.value)
    assert "a multiple of 4" in str(error.value) and "try: global_batch=4" in str(error.value)
    with pytest.raises(InputError, match="has 3 samples, fewer than one global batch"):
        DomainSampler(3, world.mesh, global_batch=4)
    assert DomainSampler(12, world.mesh, global_batch=4).batch == 2
