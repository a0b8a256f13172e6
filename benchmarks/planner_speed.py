"""Microseconds to predict memory and step time of one layout, for Llama-3.1-405B and DeepSeek-V3.

python benchmarks/planner_speed.py
"""

from __future__ import annotations

import time
from itertools import product

from shardwise.planner.estimator import Estimator
from shardwise.spec.catalog import cluster
from shardwise.spec.catalog.models import model
from shardwise.spec.layout import Layout, Recompute

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def layouts(world: int, *, moe: bool) -> list[Layout]:
    found = []
    for tp, pp, cp, mbs, vpp, recompute in product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2), (1, 2, 4), (1, 2, 3), (Recompute(), FULL)):
        dp = world // (tp * pp * cp)
        experts = (8, 32) if moe else (1,)
        for ep in experts:
            if world % (pp * ep) == 0 and dp:
                vp = vpp if pp > 1 else 1
                found.append(Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sp=tp > 1, vpp=vp, mbs=mbs, gbs=4 * world, recompute=recompute))
    return found


def main() -> None:
    for name, gpu, world in (("llama-3.1-405b", "h100-sxm", 1024), ("deepseek-v3", "h100-sxm", 2048)):
        spec = model(name)
        todo = layouts(world, moe=spec.moe is not None)
        estimator = Estimator(spec, cluster(gpu, world), seq_len=8192)
        for label in ("first time", "again"):
            start = time.process_time()
            for layout in todo:
                estimator.memory(layout)
            middle = time.process_time()
            for layout in todo:
                estimator.step_time(layout)
            end = time.process_time()
            memory, seconds = (middle - start) / len(todo) * 1e6, (end - middle) / len(todo) * 1e6
            print(f"{name}: {len(todo)} layouts, {label}: memory {memory:.0f} us, step time {seconds:.0f} us each")


if __name__ == "__main__":
    main()
