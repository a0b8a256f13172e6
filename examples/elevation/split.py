"""The same script with the rows of the field split over ranks: torchrun --nproc-per-node 4 examples/elevation/split.py"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardwise import DistributedManager, parallelize, scatter_tensor
from shardwise.recipes.elevation import build

DistributedManager.initialize()
manager = DistributedManager()
mesh = manager.initialize_mesh((1, -1), ["ddp", "domain"])
torch.set_num_threads(1)
model, x, y = build("unet")
model, x, y = model.float(), x.float(), y.float()
model = parallelize(model, mesh)
x, y = (scatter_tensor(t, 0, mesh["domain"], (Shard(2),)) for t in (x, y))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}")
DistributedManager.cleanup()
