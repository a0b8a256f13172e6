"""Every legal layout of 2, 4 and 8 ranks against one process, for seven families: `make parity`.

Losses of 5 steps, gradients of the first and weights after the last must agree within 1e-5 relative in float32 with `transformers`' own
model in one process. Layouts are all legal combinations of tp, sp, pp, vpp, cp, ep, etp, dp and FSDP2; `--share` runs every n-th of each
family instead, always at least `--least` in all.

    python -m benchmarks.parity                      # a spanning selection of 168 layouts
    python -m benchmarks.parity --share 1            # all of them
    python -m benchmarks.parity --ranks 2 --families llama --share 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from shardwise.planner.rules import check_layout, is_legal
from shardwise.spec import hf
from shardwise.spec.layout import Layout

FAMILIES = ("llama", "qwen3", "gemma", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
SHARES = {2: 5, 4: 20, 8: 150}  # ranks: every n-th layout is run
PER_LAUNCH = 12  # layouts that one set of processes runs: each makes process groups, which live as long as they do
LENGTH, BATCH, STEPS, VOCAB = 16, 8, 5, 61
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 8},
    "gemma": {"model_type": "gemma", **_SIZES, "head_dim": 8, "num_key_value_heads": 1},
    "mixtral": {"model_type": "mixtral", **_SIZES, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_SIZES, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "olmoe": {"model_type": "olmoe", **_SIZES, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **_SIZES, **_MLA},
}  # fmt: skip


def layouts(family: str, world: int) -> Iterator[Layout]:
    """All legal layouts of `world` ranks."""
    spec = hf.from_config(MODELS[family], family)
    sizes = [size for size in (1, 2, 4, 8) if size <= world]
    mixture = family in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
    few = sizes if mixture else [1]
    for tp, pp, cp, ep, etp in product(sizes, sizes, sizes, few, few):
        if tp * pp * cp > world or world % (tp * pp * cp):
            continue
        for sp, (vpp, schedule), sharding in product(
            (False, True),
            ((1, "1f1b"), (2, "1f1b"), (1, "gpipe"), (1, "zb-h1"), (2, "zbv")),
            ("distributed_optimizer", "fsdp2", "none"),
        ):
            if (sp and tp == 1) or (pp == 1 and (vpp, schedule) != (1, "1f1b")) or pp * vpp > 4:
                continue
            layout = Layout(
                tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sp=sp, vpp=vpp, schedule=schedule, sharding=sharding, mbs=1, gbs=BATCH,
                precision="fp32", param_dtype="fp32", master_dtype=None,
            ).with_world(world)  # fmt: skip
            if is_legal(check_layout(spec, layout, None, seq_len=LENGTH)):
                yield layout


def chosen(families: list[str], world: int, share: int) -> list[tuple[str, Layout]]:
    """Every `share`-th layout of each family, each family beginning at another one."""
    return [(family, layout) for i, family in enumerate(families) for layout in list(layouts(family, world))[i % share :: share]]


def words(layout: Layout) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    degrees = " ".join(f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) > 1)
    return f"{degrees}{' sp' if layout.sp else ''} {layout.schedule} {layout.sharding}"


def run_ranks(families: list[str], share: int, start: int, out: Path) -> None:
    """On the ranks of a launched world: compare every chosen layout; rank 0 prints and writes."""
    import torch
    import torch.distributed as dist

    from shardwise.mesh.process import DistributedManager
    from shardwise.train.batches import simple_samples
    from shardwise.train.model import transformers_config
    from shardwise.train.verify import Reference, Rules, compare, reference

    torch.set_num_threads(1)
    DistributedManager.initialize()
    rank, world = dist.get_rank(), dist.get_world_size()
    rules = Rules(mbs=1)
    steps = [
        simple_samples(torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))) for step in range(STEPS)
    ]
    known: dict[str, Reference] = {}
    for family, layout in chosen(families, world, share)[start : start + PER_LAUNCH]:
        config = transformers_config(MODELS[family])
        if rank == 0 and family not in known:
            known[family] = reference(config, steps, rules)
        begun = time.perf_counter()
        parity = compare(config, layout, steps, rules, known.get(family))
        if rank == 0:
            row = {
                "family": family, "ranks": world, "layout": words(layout), "equal": parity.equal, "loss": parity.loss, "norm": parity.norm,
                "gradient": parity.gradient, "weight": parity.weight, "seconds": time.perf_counter() - begun,
            }  # fmt: skip
            with out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            mark = "equal" if parity.equal else "DIFFERS"
            print(
                f"{mark:8}{family:12}{world} ranks  {words(layout):60} loss {parity.loss:.0e} norm {parity.norm:.0e} "
                f"gradient {parity.gradient:.0e} weight {parity.weight:.0e}",
                flush=True,
            )
    DistributedManager.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SHARES), choices=SHARES)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--share", type=int, help=f"run every n-th layout (1: all) [default by ranks: {SHARES}]")
    parser.add_argument("--out", type=Path, default=Path("out/parity.jsonl"))
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help="say how many layouts there are, run none")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_ranks(given.families, given.share, given.begin, given.out)
        return 0
    shares = {world: given.share or SHARES[world] for world in given.ranks}
    for world, share in shares.items():
        count, of = len(chosen(given.families, world, share)), len(chosen(given.families, world, 1))
        print(f"{world} ranks: {count} of {of} layouts", flush=True)
    if given.count:
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.unlink(missing_ok=True)
    for world, share in shares.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "benchmarks.parity"]
        options = ["--share", str(share), "--out", str(given.out), "--families", *given.families]
        for start in range(0, len(chosen(given.families, world, share)), PER_LAUNCH):
            code = subprocess.call([*command, *options, "--begin", str(start)], env={"OMP_NUM_THREADS": "1", **os.environ})
            if code:
                return code
    rows = [json.loads(line) for line in given.out.read_text().splitlines()]
    wrong = [row for row in rows if not row["equal"]]
    worst = max(rows, key=lambda row: row["weight"])
    print(f"{len(rows) - len(wrong)} of {len(rows)} layouts equal one process")
    print(f"largest weight difference {worst['weight']:.1e}: {worst['family']} {worst['layout']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
