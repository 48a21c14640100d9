"""Every entry loads, is sourced and is sane; names, aliases and files of the user find theirs."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import replace

import pytest

from lengthwise import catalog
from lengthwise.catalog.store import normalized
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import DTYPE_BYTES, GIB

MODELS, GPUS, NODES, LINKS = catalog.models(), catalog.gpus(), catalog.nodes(), catalog.links()

ASKED_FOR_MODELS = (
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b"),
    *("llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b"),
    *("codellama-34b", "qwen-72b", "qwen2.5-0.5b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-30b-a3b"),
    *("qwen3-235b-a22b", "mistral-7b", "mixtral-8x7b", "deepseek-v3", "gemma-2b", "gemma-2-27b"),
    *("gemma-3-12b", "phi-2", "phi-3.5-mini", "internlm-20b", "opt-6.7b", "opt-13b", "vicuna-13b"),
    *("gpt-3-39b", "gpt-3-101b", "gpt-3-175b", "gpt-3-341b", "t5-11b"),
    *("llama-4-scout", "llama-4-maverick", "gpt-oss-20b", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3.2"),
    *("kimi-k2-0905", "glm-4.5", "glm-4.5-air", "glm-4.6", "minimax-m2", "mistral-small-3", "mistral-large-2"),
    *("mistral-large-3", "phi-4", "phi-4-mini", "qwen3-coder-480b-a35b", "qwen3.5-397b-a17b", "glm-5"),
    *("llama-13b", "pythia-12b", "mpt-7b", "chatglm3-6b", "stablelm-alpha-7b", "mistral-7b-v0.2"),
)


@pytest.mark.parametrize("name", ASKED_FOR_MODELS)
def test_commonly_used_models_are_in_the_catalog(name):
    assert catalog.model(name).name == name


@pytest.mark.parametrize("entries", [MODELS, GPUS, NODES], ids=["models", "gpus", "nodes"])
def test_entries_are_sorted_and_know_their_names(entries):
    assert list(entries) == sorted(entries)
    assert all(entry.name == name for name, entry in entries.items())


@pytest.mark.parametrize("entries", [MODELS, GPUS, NODES], ids=["models", "gpus", "nodes"])
def test_no_two_entries_answer_to_one_name(entries):
    def spellings(entry):
        aliases = entry.metadata.aliases if entry.name in MODELS else entry.aliases
        return {normalized(name) for name in (entry.name, *aliases)}

    spelt = Counter(spelling for entry in entries.values() for spelling in spellings(entry))
    assert [spelling for spelling, times in spelt.items() if times > 1] == []


def test_every_entry_names_its_source():
    sources = [spec.metadata.source for spec in MODELS.values()]
    sources += [entry.source for entries in (GPUS, NODES, LINKS) for entry in entries.values()]
    assert all(len(source) > 10 for source in sources)


@pytest.mark.parametrize("name", GPUS)
def test_a_price_has_a_date_or_is_called_an_estimate(name):
    gpu = GPUS[name]
    assert 0.1 < gpu.price_per_hour_usd < 20
    assert re.search(r"20\d\d-\d\d-\d\d", gpu.price_source)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_no_slower_in_narrower_formats(name):
    gpu = GPUS[name]
    by_width = sorted(gpu.peak_flops, key=lambda dtype: -DTYPE_BYTES[dtype])
    peaks = [gpu.peak_flops[dtype] for dtype in by_width]
    assert peaks == sorted(peaks)
    assert gpu.flops("bfloat16") == gpu.flops("int4"), "AWQ and GPTQ multiply in 16 bits"
    assert gpu.idle_w < gpu.tdp_w / 2


@pytest.mark.parametrize(
    ("name", "advertised_gb"),
    [
        *(("A100-40GB", 40), ("A100-80GB", 80), ("H100", 80), ("H200", 141), ("B200", 180), ("L4", 24)),
        *(("L40S", 48), ("A40", 48), ("RTX-4090", 24), ("RTX-PRO-6000", 96), ("MI300X", 192)),
        *(("B300", 288), ("GB200", 186), ("MI325X", 256), ("MI355X", 288), ("Gaudi-3", 128), ("TPU7x", 192)),
    ],
)
def test_memory_is_what_the_driver_offers(name, advertised_gb):
    """Vendors print GB for GiB on most parts; the driver keeps up to 7 % (ECC on GDDR) for itself."""
    assert 0.93 * advertised_gb <= GPUS[name].memory_bytes / GIB <= advertised_gb


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_no_faster_outside_than_inside(name):
    node = NODES[name]
    assert node.gpus % node.link_group == 0
    assert node.link.bandwidth_bytes_per_s >= node.fallback_link.bandwidth_bytes_per_s
    assert node.link.latency_s <= node.fallback_link.latency_s <= node.network.latency_s


def test_pairs_fall_back_to_pcie():
    node = catalog.node("a100_pairwise_nvlink")
    assert [node.link_for(gpus).name for gpus in (2, 4, 8)] == ["nvlink3-bridge", "pcie4", "ethernet-100"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "node"),
    [
        ("A100-80GB", 1, "dgx-a100"),
        ("A100-80GB", 8, "dgx-a100"),
        ("A100-80GB", 16, "dgx-a100"),
        ("H100", 4, "dgx-h100"),
        ("L40S", 4, "pcie4-4"),
        ("L40S", 5, "pcie4-8"),
        ("RTX-PRO-6000", 2, "pcie5-4"),
        ("RTX-4090", 2, "geforce-4"),
        ("GB200", 16, "gb200-nvl72"),
        ("TPU7x", 4, "tpu7x-4"),
        ("TPU7x", 5, "tpu7x-64"),
        ("TPU-v6e", 8, "tpu-v6e-8"),
        ("TPU-v6e", 16, "tpu-v6e-256"),
    ],
)
def test_the_default_node_is_the_smallest_usual_one(gpu, gpus, node):
    assert catalog.default_node(catalog.gpu(gpu), gpus).name == node


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_default_node(name):
    assert catalog.default_node(GPUS[name], 1).gpus >= 1


@pytest.mark.parametrize(("name", "host_gpus"), [("tpu7x-64", 4), ("tpu-v6e-256", 4), ("gb300-nvl72", 4)])
def test_one_link_joins_the_hosts_of_a_slice_or_rack(name, host_gpus):
    node = catalog.node(name)
    assert node.host_gpus == host_gpus
    assert node.link_for(node.gpus) == node.link
    assert node.link_for(node.gpus + 1) == node.network
    assert catalog.node("dgx-h100").host_gpus == 8


def test_the_gpus_of_a_host_divide_those_of_its_node(tmp_path):
    text = '[rack]\ngpus = 72\ngpus_per_host = %d\nlink_group = 72\nsource = "a test"\n' + "".join(
        f'{key} = "nvlink5-nvswitch"\n' for key in ("link", "fallback_link", "network")
    )
    path = tmp_path / "rack.toml"
    path.write_text(text % 8)
    assert catalog.node(path).host_gpus == 8
    for wrong in (0, 5, 144):
        path.write_text(text % wrong)
        with pytest.raises(InputError, match=f"gpus_per_host must divide gpus, 72; it is {wrong}"):
            catalog.node(path)


def test_a_node_of_no_gpus_is_refused():
    with pytest.raises(InputError, match="at least 1 GPU; it should hold 0"):
        catalog.default_node(GPUS["H100"], 0)


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("llama2-70b", "llama-2-70b"),
        ("LLAMA_2_70B", "llama-2-70b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("gpt3", "gpt-3-175b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("unsloth/gemma-2b-it", "gemma-2b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b"),
        ("neuralmagic/Qwen2.5-7B-Instruct-quantized.w8a8", "qwen2.5-7b"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b"),
        ("llama-3.3-70b-instruct-gptq-int4", "llama-3.3-70b"),
        ("qwen3_8b_base", "qwen3-8b"),
    ],
)
def test_a_model_answers_to_what_people_type(spelt, name):
    assert catalog.model(spelt).name == name


@pytest.mark.parametrize(
    ("spelt", "dtype"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8"),
        ("Qwen/Qwen3-32B-AWQ", "int4"),
        ("x/Llama-3.1-8B-Instruct-GPTQ-Int8", "int8"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "fp4"),
        ("deepseek-v3-bf16", "bfloat16"),
        ("x/Qwen3-32B-Instruct", "bfloat16"),
    ],
)
def test_a_quantised_checkpoint_has_the_shapes_of_its_model_and_its_own_dtype(spelt, dtype):
    spec = catalog.model(spelt)
    assert spec.dtype == dtype
    assert catalog.parameters(spec) == catalog.parameters(catalog.model(spec.name))
    served = catalog.served_model(f"/weights/{spelt}")
    assert (served.name, served.dtype) == (spec.name, dtype)


@pytest.mark.parametrize("name", ["x/y/qwen3-8b-fp8", "qwen3-8b-lora", "-fp8", "org/-it", "instruct", "qwen3-8b-"])
def test_a_name_with_another_suffix_is_unknown_and_a_config_is_the_way_out(name):
    with pytest.raises(UnknownNameError, match=r"Or give the path of its config\.json"):
        catalog.model(name)


def test_gpus_and_nodes_answer_to_what_people_type():
    assert catalog.gpu("a100-sxm").name == "A100-80GB"
    with pytest.raises(InputError, match="A100-40GB, A100-80GB, A100-80GB-PCIe"):
        catalog.gpu("a100")
    assert catalog.gpu("NVIDIA H100 80GB HBM3").name == "H100"
    assert catalog.gpu("rtx_4090").name == "RTX-4090"
    assert catalog.node("h100_dgx").name == "dgx-h100"


@pytest.mark.parametrize(
    ("find", "typed", "message"),
    [
        (catalog.model, "lama-2-70", r"no model named 'lama-2-70'. Did you mean: llama-2-70b"),
        (catalog.gpu, "H20", r"no GPU named 'H20'. Did you mean: H200.* Or give a .toml file with its data"),
        (catalog.node, "dgx-h10", r"no node named 'dgx-h10'. Did you mean: dgx-h100"),
    ],
)
def test_an_unknown_name_lists_the_nearest(find, typed, message):
    with pytest.raises(UnknownNameError, match=message):
        find(typed)


def test_the_door_gives_copies():
    catalog.models().clear()
    assert catalog.models() == MODELS


MY_GPU = """
[Mine]
peak_flops = { bf16 = 100e12, fp8 = 2e14 }
memory_bytes = 48_000_000_000
bandwidth_bytes_per_s = 1e12
tdp_w = 300
idle_w = 20
price_per_hour_usd = 1
price_source = "mine"
source = "measured"
"""
MY_NODE = """
[box]
gpus = 2
link = "pcie5"
link_group = 2
fallback_link = { name = "wire", bandwidth_bytes_per_s = 1e9, latency_s = 1e-3, source = "measured" }
network = "ethernet-100"
source = "mine"
"""


def test_a_gpu_of_the_users_own_comes_from_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(MY_GPU)
    gpu = catalog.gpu(tmp_path / "mine.toml")
    assert (gpu.name, gpu.flops("bfloat16"), gpu.flops("fp8")) == ("Mine", 100e12, 2e14)
    assert catalog.default_node(gpu, 8).name == "pcie4-8"


def test_a_file_with_the_name_of_a_gpu_of_the_catalog_changes_some_of_its_keys(tmp_path):
    (tmp_path / "cheap.toml").write_text("[H100]\nprice_per_hour_usd = 2.1\n")
    own, listed = catalog.gpu(tmp_path / "cheap.toml"), catalog.gpu("H100")
    assert (own.price_per_hour_usd, own.price_source) == (2.1, str(tmp_path / "cheap.toml"))
    assert replace(own, price_per_hour_usd=listed.price_per_hour_usd, price_source=listed.price_source) == listed


def test_a_node_of_the_users_own_mixes_known_and_own_links(tmp_path):
    (tmp_path / "box.toml").write_text(MY_NODE)
    node = catalog.node(str(tmp_path / "box.toml"))
    assert node.link == LINKS["pcie5"]
    assert (node.fallback_link.name, node.fallback_link.latency_s) == ("wire", 1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tdp_w = 300\nidle_w = 20\n", ""), r"GPU Mine must give tdp_w, idle_w; it gives name, peak_flops"),
        (("tdp_w", "tpd_w"), r"must give tdp_w"),
        (("[Mine]", "[Mine]\ncolour = 'red'"), r"has no key colour; its keys are name, peak_flops"),
        (("tdp_w = 300", "tdp_w = '300'"), r"tdp_w must be a number that is not negative; it is '300'"),
        (("tdp_w = 300", "tdp_w = -1"), r"tdp_w must be a number that is not negative; it is -1"),
        (("bf16 =", "bf17 ="), r"no dtype named 'bf17'"),
        (("bf16 = 100e12, fp8", "fp8"), r"peak_flops must hold bfloat16, float16 or float32; it holds \['fp8'\]"),
        (("'measured'", "'measured'\n[Yours]"), None),
        (("[Mine]", "[Mine"), r"must be TOML"),
    ],
)
def test_an_unusable_gpu_file_is_reported_with_the_reason(tmp_path, change, message):
    file = tmp_path / "mine.toml"
    file.write_text(MY_GPU.replace('"', "'").replace(*change))
    with pytest.raises(InputError, match=message or r"must hold one GPU as one table.*it holds Mine, Yours"):
        catalog.gpu(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("link_group = 2", "link_group = 3"), r"link_group must be in 1\.\.2 \(its gpus\); it is 3"),
        (('"pcie5"', '"pcie55"'), r"no link named 'pcie55'. Did you mean: pcie5"),
        (('"pcie5"', "5"), r"link must be the name of a link or a table; it is 5"),
        ((", latency_s = 1e-3", ""), r"fallback_link must give latency_s"),
        (("gpus = 2", "gpus = 2.5"), r"gpus must be a whole number that is not negative; it is 2.5"),
    ],
)
def test_an_unusable_node_file_is_reported_with_the_reason(tmp_path, change, message):
    file = tmp_path / "box.toml"
    file.write_text(MY_NODE.replace(*change))
    with pytest.raises(InputError, match=message):
        catalog.node(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none.toml: No such file"):
        catalog.gpu(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"cannot read .*none.json: No such file"):
        catalog.model(tmp_path / "none.json")


def test_a_gpu_is_refused_in_a_node_whose_link_it_lacks():
    with pytest.raises(
        InputError, match=r"node dgx-a100 joins its GPUs by nvlink3-nvswitch, which H100 does not have.*"
    ):
        catalog.require_node_of(catalog.gpu("H100"), catalog.node("dgx-a100"))
    for gpu in GPUS.values():
        catalog.require_node_of(gpu, catalog.default_node(gpu, 1))
    for gpu, node in (("H200", "dgx-h100"), ("A100-80GB", "a100-pairwise-nvlink"), ("L4", "pcie5-8")):
        catalog.require_node_of(catalog.gpu(gpu), catalog.node(node))
    own = dataclasses.replace(catalog.node("dgx-a100"), name="my node")
    catalog.require_node_of(catalog.gpu("H100"), own)
