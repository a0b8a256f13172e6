"""`shardwise models` and `shardwise hardware`: what is known, with sources."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.render import Footnotes, note, print_json, print_lines, print_table
from shardwise.spec import catalog

Filter = Annotated[str | None, typer.Argument(metavar="[WORD]", help="show names that contain WORD", show_default=False)]


def models(word: Filter = None, as_json: opt.Json = False) -> int:
    """List the models of the catalog: parameters, layers, experts, source of the numbers."""
    found = []
    for name in catalog.model_names():
        _, hf_id, source = catalog.model_entry(name)
        if word is None or word.lower() in f"{name} {hf_id}".lower():
            found.append((name, hf_id, source, catalog.model(name)))
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "hf_id": hf_id,
                    "parameters": model.total_params,
                    "active_parameters": model.active_params,
                    "layers": model.num_layers,
                    "hidden": model.hidden,
                    "experts": model.moe.experts if model.moe else 0,
                    "top_k": model.moe.top_k if model.moe else 0,
                    "vocab": model.vocab,
                    "source": source,
                }
                for name, hf_id, source, model in found
            ]
        )
    else:
        notes = Footnotes()
        rows = [
            (
                name,
                f"{model.total_params / 1e9:.2f}",
                f"{model.active_params / 1e9:.2f}",
                model.num_layers,
                f"{model.moe.top_k}/{model.moe.experts}" if model.moe else "",
                notes.mark(source),
            )
            for name, _, source, model in found
        ]
        print_table(f"{len(rows)} models", ("name", "B", "active", "layers", "experts", "source"), rows)
        print_lines(notes.lines())
    if not found:
        note(f"no model has {word!r} in its name; shardwise models lists all")
    return OK if found else FINDING


def hardware(word: Filter = None, as_json: opt.Json = False) -> int:
    """List the GPUs and links of the catalog: memory, peaks, bandwidths, source of the numbers."""
    chosen = [catalog.gpu(name) for name in catalog.gpu_names() if word is None or word.lower() in name]
    links = [catalog.link(name) for name in catalog.link_names() if word is None or word.lower() in name]
    if as_json:
        print_json(
            {
                "gpus": [
                    {
                        "name": gpu.name,
                        "memory_gib": gpu.memory / 2**30,
                        "bandwidth_gbs": gpu.bandwidth / 1e9,
                        "bf16_tflops": (gpu.bf16_flops or 0) / 1e12,
                        "fp8_tflops": gpu.fp8_flops / 1e12 if gpu.fp8_flops else None,
                        "power_w": gpu.power,
                        "link": gpu.link,
                        "source": gpu.source,
                    }
                    for gpu in chosen
                ],
                "links": [
                    {"name": link.name, "gbs": link.bandwidth / 1e9, "latency_us": link.latency * 1e6, "source": link.source}
                    for link in links
                ],
            }
        )
    else:
        notes = Footnotes()
        rows = [
            (
                gpu.name,
                f"{gpu.memory / 2**30:.0f}",
                f"{gpu.bandwidth / 1e9:.0f}",
                f"{(gpu.bf16_flops or 0) / 1e12:.0f}",
                f"{gpu.fp8_flops / 1e12:.0f}" if gpu.fp8_flops else "",
                gpu.link,
                notes.mark(gpu.source),
            )
            for gpu in chosen
        ]
        head = ("GPU", "GiB", "GB/s", "bf16 TF", "fp8 TF", "link", "source")
        print_table("GPUs (dense peaks)", head, rows, text=(0, 5))
        rows = [(link.name, f"{link.bandwidth / 1e9:.4g}", f"{link.latency * 1e6:.1f}", notes.mark(link.source)) for link in links]
        print_table("Links, one direction", ("link", "GB/s", "us", "source"), rows)
        print_lines(notes.lines())
    if not chosen and not links:
        note(f"no GPU or link has {word!r} in its name; shardwise hardware lists all")
    return OK if chosen or links else FINDING
