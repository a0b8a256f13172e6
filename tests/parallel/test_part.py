"""Parts of global tensors: taking them, their rectangles, rows of them."""

from __future__ import annotations

import torch

from shardwise.parallel.part import Part


def test_rectangles_of_a_part_put_together_are_the_part():
    full = torch.arange(60).view(10, 6)
    part = Part.whole((10, 6)).split(0, ((1, 3), (7, 9))).split(1, ((2, 5),))
    local = part.take(full)
    assert local.shape == part.local_shape == (4, 3)
    for box in part.boxes():
        here = local[tuple(slice(a, a + n) for a, n in zip(box.local, box.sizes, strict=True))]
        there = full[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        assert torch.equal(here, there)


def test_rows_of_a_part_are_its_local_rows():
    full = torch.arange(40).view(10, 4)
    part = Part.whole((10, 4)).split(0, ((1, 3), (7, 9)))
    assert torch.equal(part.rows((1, 3)).take(full), part.take(full)[1:3])
    assert part.rows((2, 2)).local_shape == (0, 4) and list(part.rows((2, 2)).boxes()) == []
