from __future__ import annotations

import pytest

from shardwise.errors import ShardwiseError
from shardwise.spec import catalog
from shardwise.spec.catalog.tables import table


def test_every_gpu_and_link_can_be_used() -> None:
    for name in catalog.gpu_names():
        cluster = catalog.cluster(name, 16)
        assert cluster.gpu.memory > 2**34 and cluster.gpu.bandwidth > 8e11
        assert cluster.gpu.peak("bf16") <= cluster.gpu.peak("fp8-current") <= cluster.gpu.peak("nvfp4")
        assert cluster.gpu.source and cluster.intra.source and cluster.inter.source
    for name in catalog.link_names():
        assert catalog.link(name).bandwidth > 1e9


def test_promised_hardware_is_there() -> None:
    for name in ("A100-40GB", "A100-80GB", "H100-SXM", "H100-PCIe", "H100-NVL", "H200", "B200", "B300", "GB200", "GB300", "L40S"):
        assert catalog.gpu(name)
    for name in ("RTX4090", "rtx 5090", "MI300X", "H100-80GB-SXM", "A100-80GB-SXM"):
        assert catalog.gpu(name)
    for name in ("infiniband-100", "infiniband-800", "roce-400", "ethernet-100", "nvlink5"):
        assert catalog.link(name)


def test_domains() -> None:
    assert catalog.cluster("h100", 64).domain == 8
    assert catalog.cluster("h100", 64, gpus_per_node=4).domain == 4
    assert catalog.cluster("gb200", 144).domain == 72
    assert catalog.cluster("h100-nvl", 8).domain == 2  # bridged in pairs
    cluster = catalog.cluster("h100", 20, interconnect="infiniband-200", nics_per_gpu=2)
    assert (cluster.nodes, cluster.network_bandwidth) == (3, 50e9)


def test_peaks_fall_back_to_the_next_wider_precision() -> None:
    assert catalog.gpu("a100").peak("mxfp8") == catalog.gpu("a100").peak("bf16") == 312e12
    assert catalog.gpu("h100").peak("nvfp4") == catalog.gpu("h100").peak("fp8-current")


def test_every_model_is_described_with_a_source() -> None:
    for name in catalog.model_names():
        model = catalog.model(name)
        assert model.name == name and model.source
        assert 4e8 < model.active_params <= model.total_params
    partly = set(table("models")) - set(catalog.model_names())
    assert partly == {"llama-3.3-nemotron-super-49b", "llama-3.1-nemotron-ultra-253b"}
    for name in partly:
        with pytest.raises(ShardwiseError, match=r"path of its config.json"):
            catalog.model(name)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("llama-3.1-70b", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-405B", "llama-3.1-405b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("deepseek_v3", "deepseek-v3"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_names(given: str, name: str) -> None:
    assert catalog.find_model(given) == name


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ShardwiseError, match=r"llama-3.1-70b.*config.json works too"):
        catalog.model("lama-3.1-70b")
    with pytest.raises(ShardwiseError, match="h100-sxm"):
        catalog.gpu("h100sxm")
    with pytest.raises(ShardwiseError, match="infiniband-400"):
        catalog.link("infiniband-450")
    with pytest.raises(ShardwiseError, match="cannot read"):
        catalog.model("no/such/config.json")
