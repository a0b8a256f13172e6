"""Commands run in this process, and words that several tests give them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.cli import main

RUNS = (
    "id,source,model_name,arch,num_layers,hidden,ffn_hidden,num_heads,num_kv_heads,head_dim,vocab,num_experts,top_k,moe_ffn_hidden,"
    "shared_expert_ffn,moe_layer_freq_or_dense_first,tie_embeddings,seq_len,gpus,gpu_type,precision,tp,pp,vpp,cp,ep,etp,sp,dp_kind,mbs,gbs,"
    "recompute,offload,tokens_per_s_per_gpu,tflops_per_gpu,mfu,step_time_s,peak_mem_gib,notes\n"
    "own-1,own,Llama-3-8B,dense,32,4096,14336,32,8,128,128256,,,,,,no,8192,8,H100-80GB-SXM,bf16,1,1,,1,1,1,False,fsdp,1,64,none,,"
    "9000,,,7.2,60,\n"
    "own-2,own,unknown,dense,,,,,,,,,,,,,,8192,8,H100-80GB-SXM,bf16,1,1,,1,1,1,False,fsdp,1,64,none,,9000,,,7.2,60,\n"
)
LLAMA_70B = ["--model", "llama-3.1-70b", "--gpus", "64", "--gpu", "h100-sxm", "--seq-len", "8192"]
GOOD = ["tp=8", "pp=4", "mbs=1", "gbs=128", "sp=true", "recompute=full"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)
