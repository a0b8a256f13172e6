"""The account of storages, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import InputError
from shardwise.rehearse.ledger import Ledger


def test_forward_and_backward_of_two_products():
    rows, width, inner = 3, 8, 16
    with FakeTensorMode(), Ledger() as ledger:
        x = torch.ones(rows, width)
        first, second = (nn.Parameter(torch.ones(shape)) for shape in ((width, inner), (inner, width)))
        ledger.hold((first, second), "weights")
        ledger.forget_peaks()
        with ledger.pipeline():
            total = ((x @ first).relu() @ second).square().sum()
            total.backward()
        ledger.hold((first.grad, second.grad), "gradients")
    whole, hidden, matrix = 4 * rows * width, 4 * rows * inner, 4 * width * inner
    # the sum: hidden values after relu, the output and the loss are kept, the squares are not
    assert ledger.peak("forward").categories == {
        "weights": 2 * matrix, "gradients": 0, "optimizer": 0,
        "activations": hidden + whole + 4, "loss": 0, "temporaries": whole + whole,
    }  # fmt: skip
    # the last gradient: the hidden values' own is there, the loss and its gradient of one, and x, which the test holds
    assert ledger.peak("backward").categories == {
        "weights": 2 * matrix, "gradients": 2 * matrix, "optimizer": 0,
        "activations": 8, "loss": 0, "temporaries": hidden + whole,
    }  # fmt: skip


def test_what_is_read_from_tensors_must_be_known():
    with FakeTensorMode(), Ledger():
        labels = torch.zeros(3, 5, dtype=torch.int64)
        assert int((labels != -100).sum()) == 15
        assert torch.bincount(torch.empty(12, dtype=torch.int64), minlength=4).tolist() == [3, 3, 3, 3]
        with pytest.raises(InputError, match="do not divide evenly"):
            torch.bincount(torch.empty(13, dtype=torch.int64), minlength=4)
        labels.add_(torch.empty(3, 5, dtype=torch.int64))
        with pytest.raises(InputError, match="depend on the data"):
            int(labels.sum())
        with pytest.raises(InputError, match="depend on the data"):
            labels.nonzero()
