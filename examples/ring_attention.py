"""Attention over a split sequence, forward and backward: a ring of keys and values, or an exchange of heads (Ulysses).

python examples/ring_attention.py --length 4096 --causal --ranks 1 2 4 --plot ring.png
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scaling import error, main, seconds

from shardwise import DistributedManager
from shardwise.attention import ring_attention, ulysses_attention
from shardwise.spec.sequence import contiguous_order, even_sizes, zigzag_order
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--causal", action="store_true", help="rows are dealt out in a zigzag, so that all ranks do the same work")
    parser.add_argument("--ulysses", action="store_true")
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    ranks, rank = manager.world_size, manager.rank
    order = zigzag_order(args.length, ranks) if args.causal else contiguous_order(even_sizes(args.length, ranks))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, args.heads, args.length, args.width, generator=generator).to(manager.device) for _ in range(3)]
    rows = torch.cat([torch.arange(start, stop) for start, stop in order[rank]]).to(manager.device)
    local = [x[:, :, rows].clone().requires_grad_() for x in whole]
    attend = ulysses_attention if args.ulysses else ring_attention

    def step() -> torch.Tensor:
        out = attend(*local, q_spans=order, kv_spans=order, group=dist.group.WORLD, causal=args.causal)
        out.sum().backward()
        return out.detach()

    with count_communication() as sent:
        out = step()
    whole = [x.requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*whole, is_causal=args.causal)
    expected.sum().backward()
    pairs = [(out, expected.detach()), *((mine.grad, theirs.grad) for mine, theirs in zip(local, whole, strict=True))]
    wrong = max(error(mine, theirs[:, :, rows]) for mine, theirs in pairs)
    forward, backward = (sent.only(direction=d).bytes for d in ("forward", "backward"))
    return {"seconds": seconds(step), "bytes_forward": forward, "bytes_backward": backward, "error": wrong}


if __name__ == "__main__":
    main(run, options())
