"""Fourier transforms: what travels, and libraries that look their functions up by a tensor's module."""

import torch
from torch.distributed.tensor.placement_types import Shard

import shardwise
from shardwise import fallback
from shardwise.shard_tensor import array_functions
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard


@ranks(4)
def test_a_transform_and_its_inverse_cost_two_all_to_alls(world):
    x = shard(world.randn(8, 16, 6), world.mesh, dim=1, sizes=(5, 3, 6, 2))
    with count_communication() as counted, fallback("error"):
        spectrum = torch.fft.rfft2(x, dim=(1, 2))
        modes = spectrum[:, :4, :3] * 2
        back = torch.fft.irfft2(spectrum, s=(16, 6), dim=(1, 2))
    assert [(record.collective, record.calls) for record in counted.records] == [("all_to_all", 2)]
    assert spectrum.placements == modes.placements == (Shard(0),)
    assert back._spec.sizes == x._spec.sizes


@ranks(4)
def test_the_real_part_of_a_spectrum_lies_as_the_input(world):
    x = shard(world.randn(2, 16, 6), world.mesh, dim=1, sizes=(6, 0, 7, 3))
    mixed = torch.fft.fft(torch.fft.fft(x, dim=2), dim=1).real
    assert mixed._spec.sizes == x._spec.sizes


@ranks(3)
def test_conjugation_is_not_lost_by_ops_on_shards(world):
    z = shard(torch.complex(world.randn(7, 3), world.randn(7, 3)), world.mesh, dim=0)
    whole = z.full_tensor()
    torch.testing.assert_close(z.conj().sum(0).full_tensor(), whole.conj().sum(0))
    torch.testing.assert_close((z.mH @ z).full_tensor(), whole.mH @ whole)
    torch.testing.assert_close(z.conj().imag.full_tensor(), whole.conj().imag)
    lazy = shardwise.ShardTensor.from_local(z.to_local().conj(), world.mesh, (Shard(0),))
    torch.testing.assert_close(lazy.sum(0).full_tensor(), whole.conj().sum(0))


@ranks(2)
def test_functions_found_by_module_name(world):
    assert shardwise.einsum is array_functions.einsum
    x, y = shard(world.randn(6, 4), world.mesh, dim=0), world.randn(4, 3)
    assert_same_as_unsharded(lambda a, b: shardwise.einsum("\u00e0b,bc->c\u00e0", a, b), x, y)
    assert_same_as_unsharded(lambda a, b: shardwise.tensordot(a, b, axes=([1], [0])), x, y)
    assert_same_as_unsharded(lambda a: shardwise.transpose(a, (1, 0)), x)
