"""Options that several commands share, declared once."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

names: ContextVar[tuple[str, ...]] = ContextVar("names", default=())  # of the options of the command that runs

Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LAYOUT",
        show_default=False,
        help="words like tp=4 pp=2 ep=8 mbs=1 recompute=selective, long Megatron names, or a file "
        "(YAML, Megatron-LM arguments, Megatron Bridge overrides, torchtitan TOML, SLURM script)",
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="catalog name, Hugging Face id, or path to a config.json", show_default=False)]
Gpus = Annotated[int | None, typer.Option("--gpus", help="number of GPUs", show_default=False)]
GpuType = Annotated[str, typer.Option("--gpu", help="GPU type (shardwise hardware lists them)")]
PerNode = Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of one node [default: usual for the GPU]", show_default=False)]
Interconnect = Annotated[
    str | None, typer.Option("--interconnect", help="network between nodes [default: usual for the GPU]", show_default=False)
]
SeqLen = Annotated[int, typer.Option("--seq-len", help="tokens of one sample")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", help="samples of one step over all GPUs", show_default=False)]
Precision = Annotated[
    str | None, typer.Option("--precision", help="of matrix products: bf16, fp8-current, mxfp8, ... [default: bf16]", show_default=False)
]
Framework = Annotated[str, typer.Option("--framework", help="whose rules apply: megatron-core, bridge, torchtitan or shardwise")]
Html = Annotated[Path | None, typer.Option("--html", help="write a self-contained HTML report", show_default=False)]
Trace = Annotated[Path | None, typer.Option("--trace", help="write a Chrome trace of the pipeline schedule", show_default=False)]
