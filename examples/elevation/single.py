"""A UNet that learns to remove noise from a measured elevation field: an ordinary script for one process."""

import torch
import torch.nn.functional as F

from shardwise.recipes.elevation import build

torch.set_num_threads(1)
model, x, y = build("unet")
model, x, y = model.float(), x.float(), y.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}")
