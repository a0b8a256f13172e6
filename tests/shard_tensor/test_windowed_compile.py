"""Windowed ops inside `torch.compile`: one graph, the same numbers, no second compilation."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.testing import ranks, shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(4, 4, 4, 2, 1)

    def forward(self, x):
        y = F.max_pool2d(self.up(F.relu(self.down(x))), 3, 1, 1)
        y = F.avg_pool2d(F.pixel_shuffle(y, 2), 3, 2, 1)
        y = F.interpolate(F.interpolate(y, scale_factor=2.0), size=(17, 9), mode="bilinear")
        return F.adaptive_avg_pool2d(y, (1, 3)) + F.adaptive_max_pool2d(y, (1, 3))


@ranks(2, processes=True, timeout=120)
def test_compiled_equals_eager(world):
    net, whole = world.same(lambda: Net().double()), world.randn(1, 2, 12, 8)
    results = []
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", dynamic=False, fullgraph=True)
    for run in (net, compiled, compiled):
        with torch._dynamo.config.patch(error_on_recompile=len(results) == 2):
            y = run(shard(whole, world.mesh, dim=2)).full_tensor()
        results.append((y.detach(), *torch.autograd.grad((y * y).sum(), tuple(net.parameters()))))
    for other in results[1:]:
        for ours, theirs in zip(other, results[0]):
            assert torch.allclose(ours, theirs, atol=1e-10, rtol=1e-10)
