"""The CUDA kernels against torch's operator schemas, on tensors without data: arguments and shapes, not numbers."""

import pytest
import torch

from shardwise.attention.cuda_kernels import CUDA_KERNELS
from shardwise.attention.kernels import Kernel, Terms


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kv_heads", "width", "v_width", "rows", "columns"), [(2, 64, 64, 96, 96), (4, 20, 12, 37, 50)])
@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_calls_fit_the_operators(kernel: Kernel, kv_heads: int, width: int, v_width: int, rows: int, columns: int, masked: bool) -> None:
    if masked and not kernel.masked:
        return
    with torch.device("meta"):
        q = torch.empty(2, 4, rows, width, dtype=torch.bfloat16)
        k = torch.empty(2, kv_heads, columns, width, dtype=torch.bfloat16)
        v = torch.empty(2, kv_heads, columns, v_width, dtype=torch.bfloat16)
        allowed = torch.ones(1, 1, rows, columns, dtype=torch.bool) if masked else None
    terms = Terms(scale=0.3, causal=rows == columns and not masked, allowed=allowed)
    result = kernel.forward(q, k, v, terms)
    assert result.out.shape == (2, 4, rows, v_width)
    assert result.maximum.shape == result.total.shape == (2, 4, rows)
    assert result.maximum.dtype == torch.float32
    grads = kernel.backward(torch.empty_like(result.out), q, k, v, result, terms)
    assert (grads.q.shape, grads.k.shape, grads.v.shape) == (q.shape, k.shape, v.shape)
