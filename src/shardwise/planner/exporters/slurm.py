"""A SLURM batch script that starts one torchrun per node, written and read."""

from __future__ import annotations

import re

from shardwise.errors import InputError
from shardwise.planner.exporters import bridge
from shardwise.planner.exporters.megatron_lm import describe
from shardwise.spec.layout import Layout

_TEMPLATE = """#!/bin/bash
# {about}
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
set -euo pipefail

NODES={nodes}
GPUS_PER_NODE={per_node}
WORLD={world}
if (( SLURM_JOB_NUM_NODES * GPUS_PER_NODE != WORLD )); then
  echo "this layout needs $WORLD GPUs ($NODES nodes of $GPUS_PER_NODE), the job has $SLURM_JOB_NUM_NODES nodes" >&2
  exit 2
fi

# the first host of the job, not the host that submitted it
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# what torchrun starts; Megatron Bridge's run_recipe.py takes the same overrides
PROGRAM=(-m shardwise.train --recipe "${{RECIPE:?set RECIPE to the name of a recipe}}")
OVERRIDES=(
{overrides}
)

srun --kill-on-bad-exit=1 torchrun \\
  --nnodes="$NODES" --nproc-per-node="$GPUS_PER_NODE" \\
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${{PORT:-29500}}" --rdzv-id="$SLURM_JOB_ID" \\
  "${{PROGRAM[@]}}" "${{OVERRIDES[@]}}" "$@"
"""


def write(layout: Layout, *, gpus_per_node: int = 8, job: str = "shardwise") -> str:
    """The script. Nodes times GPUs per node is the world of the layout, or the layout is refused."""
    per_node = min(gpus_per_node, layout.world)
    if layout.world % per_node:
        raise InputError(
            given=f"{layout.world} GPUs, {gpus_per_node} per node",
            why="the world does not fill whole nodes",
            try_=f"a world that is a multiple of {gpus_per_node}, or another --gpus-per-node",
        )
    return _TEMPLATE.format(
        about=describe(layout),
        job=job,
        nodes=layout.world // per_node,
        per_node=per_node,
        world=layout.world,
        overrides="\n".join(f"  {word}" for word in bridge.overrides(layout)),
    )


def read(text: str, world: int | None = None) -> Layout:
    """Read the layout of a script of `write` back; ``world`` wins over the script's."""
    block = re.search(r"^OVERRIDES=\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    size = re.search(r"^WORLD=(\d+)$", text, re.MULTILINE)
    if not block or not size:
        raise InputError(
            given="SLURM script", why="it has no OVERRIDES=( ... ) block or no WORLD", try_="a script of `shardwise export --to slurm`"
        )
    return bridge.read(block[1], world if world is not None else int(size[1]))
