"""A published config.json gives the shapes that the catalog lists, or says what it lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lengthwise import catalog
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in config.items() if value != "absent"}


def shapes(spec: ModelSpec) -> ModelSpec:
    """The spec without what no config says."""
    return replace(spec, metadata=replace(spec.metadata, source="", aliases=(), published_params=None))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma-2-9b"])
def test_a_published_config_gives_the_catalogs_shapes(name):
    assert shapes(catalog.model(CONFIGS / f"{name}.json")) == shapes(catalog.model(name))


def test_a_checkpoint_saved_as_float32_differs_in_dtype_alone():
    read, as_list = catalog.model(CONFIGS / "gemma-2-9b.json"), catalog.model("gemma-2-9b")
    assert (read.dtype, as_list.dtype) == ("float32", "bfloat16")
    assert shapes(replace(read, metadata=replace(read.metadata, dtype="bfloat16"))) == shapes(as_list)


def test_a_folder_gives_its_config_under_its_own_name(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    spec = catalog.model(folder)
    assert spec.name == "my-llama"
    assert spec == catalog.model(folder / "config.json")
    assert spec.metadata.source == str(folder / "config.json")


GPT2 = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
STARCODER = {
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt_bigcode",
    "multi_query": True,
    "n_embd": 6144,
    "n_head": 48,
    "n_inner": 24576,
    "n_layer": 40,
    "n_positions": 8192,
    "torch_dtype": "float32",
    "vocab_size": 49152,
}
GPT_OSS = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [(GPT2, 124_439_808), (STARCODER, 15_517_456_384), (GPT_OSS, 20.9e9)],
    ids=["gpt2", "starcoder", "gpt-oss-20b"],
)
def test_families_outside_the_catalog_are_read_by_their_keys(config, published):
    spec = catalog.model_from_config(config, "other")
    assert catalog.parameters(spec) == pytest.approx(published, rel=0.002)


def test_a_layer_list_says_which_layers_have_a_window():
    attention = catalog.model_from_config(GPT_OSS, "gpt-oss-20b").attention
    assert (attention.window_tokens, attention.windowed_layers) == (128, 12)


def test_multi_query_shares_one_head_whatever_the_listed_number():
    falcon = {
        "alibi": False,
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "num_kv_heads": 71,
        "vocab_size": 65024,
    }
    spec = catalog.model_from_config(falcon, "falcon-7b")
    assert spec.attention.kv_heads == 1
    assert spec.ffn.intermediate == 4 * 4544
    grouped = catalog.model_from_config({**falcon, "new_decoder_architecture": True, "num_kv_heads": 8}, "falcon-40b")
    assert grouped.attention.kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}, (4096, 7)),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, (None, 0)),
        ({"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 0}, (None, 0)),
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}, (None, 0)),
    ],
)
def test_a_window_holds_where_it_is_used_and_shorter_than_the_context(changes, expected):
    attention = catalog.model_from_config(config_of("qwen2.5-7b", **changes), "qwen").attention
    assert (attention.window_tokens, attention.windowed_layers) == expected


def test_dense_layers_of_a_moe_are_counted_where_a_config_lists_them():
    read = [
        catalog.model_from_config(config_of("qwen3-30b-a3b", **changes), "moe").ffn.dense_layers
        for changes in (
            {"mlp_only_layers": [0, 1, 5]},
            {"decoder_sparse_step": 2},
            {"moe_layer_freq": [0] + [1] * 47},
            {},
        )
    ]
    assert read == [3, 24, 1, 0]


def test_a_tie_that_is_not_said_follows_the_class():
    llama = config_of("llama-2-70b", tie_word_embeddings="absent")
    opt = config_of("opt-13b")
    assert not catalog.model_from_config(llama, "llama").tied_embeddings
    assert catalog.model_from_config(opt, "opt").tied_embeddings


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "mxfp4"}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
    ],
)
def test_quantised_weights_have_the_dtype_they_are_stored_in(quantised, dtype):
    config = config_of("llama-3.1-8b", quantization_config=quantised)
    assert catalog.model_from_config(config, "quantised").dtype == dtype


def test_an_unknown_way_of_quantising_is_refused():
    config = config_of("llama-3.1-8b", quantization_config={"quant_method": "hqq"})
    with pytest.raises(InputError, match=r"quantization_config must be fp8, awq.*'hqq'"):
        catalog.model_from_config(config, "odd")


@pytest.mark.parametrize(("message", "dtype"), [("torch.float16", "float16"), ("auto", "bfloat16")])
def test_a_dtype_is_spelt_our_way(message, dtype):
    assert catalog.model_from_config(config_of("llama-3.1-8b", torch_dtype=message), "x").dtype == dtype


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="there is no dtype named 'float13'"):
        catalog.model_from_config(config_of("llama-3.1-8b", torch_dtype="float13"), "x")


def test_all_missing_keys_are_reported_at_once_with_what_was_looked_for():
    with pytest.raises(InputError) as caught:
        catalog.model_from_config({"model_type": "mamba", "d_model": 2560, "n_layer": 64}, "mamba-2.8b")
    message = str(caught.value)
    assert message.startswith("the config of mamba-2.8b must give the shapes of a model; it lacks")
    assert "the attention heads (looked for num_attention_heads, n_head," in message
    assert "the vocabulary (looked for vocab_size, padded_vocab_size)" in message
    assert "the hidden size" not in message
    assert message.endswith("Its keys are d_model, model_type, n_layer")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("num_key_value_heads", "eight", "a whole number"),
        ("num_key_value_heads", True, "a whole number"),
        ("head_dim", 128.5, "a whole number"),
        ("head_dim", float("nan"), "a whole number"),
        ("vocab_size", -1, "a whole number"),
        ("mlp_only_layers", 3, "a list"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(key, value, kind):
    config = config_of("qwen3-30b-a3b", **{key: value})
    with pytest.raises(InputError, match=f"the config of odd: {key} must be {kind}; it is {value!r}"):
        catalog.model_from_config(config, "odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "must be JSON"), ("[]", "must hold a JSON object; it holds a list"), (None, "cannot read")],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        catalog.model(file)
    assert str(file) in str(caught.value)
