"""A published config.json gives the shapes that the catalog lists, or an error names what it lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lengthwise import catalog
from lengthwise.catalog.huggingface import TESTED_TYPES, ConfigKeys
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in config.items() if value != "absent"}


def shapes(spec: ModelSpec) -> ModelSpec:
    """The spec without the fields that are of the catalog alone."""
    of_catalog = {"source": "", "aliases": (), "published_params": None, "mtp_modules": 0, "fp4_outputs": False}
    of_catalog |= {"int4_experts": False}
    return replace(spec, metadata=replace(spec.metadata, **of_catalog))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma-2-9b"])
def test_a_published_config_gives_the_catalogs_shapes(name):
    assert shapes(catalog.model(CONFIGS / f"{name}.json")) == shapes(catalog.model(name))


def test_a_checkpoint_saved_as_float32_differs_in_dtype_alone():
    read, as_list = catalog.model(CONFIGS / "gemma-2-9b.json"), catalog.model("gemma-2-9b")
    assert (read.dtype, as_list.dtype) == ("float32", "bfloat16")
    assert shapes(replace(read, metadata=replace(read.metadata, dtype="bfloat16"))) == shapes(as_list)


def test_a_type_that_no_test_covers_is_noted(tmp_path):
    read = {name: ConfigKeys(config_of(name), name).model_type for name in NAMES}
    assert {*read.values(), *(config["model_type"] for config in (GPT2, STARCODER))} == TESTED_TYPES
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("llama-3.1-8b", model_type="foo")))
    assert "no test covers a config.json of the type foo" in " ".join(catalog.approximations(catalog.model(path)))
    path.write_text(json.dumps(config_of("llama-3.1-8b")))
    assert not catalog.approximations(catalog.model(path))


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


@pytest.mark.parametrize(
    ("config", "published"), [(GPT2, 124_439_808), (STARCODER, 15_517_456_384)], ids=["gpt2", "starcoder"]
)
def test_families_outside_the_catalog_are_read_by_their_keys(config, published):
    spec = catalog.model_from_config(config, "other")
    assert catalog.parameters(spec) == pytest.approx(published, rel=0.002)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-4-scout", 109e9),
        ("llama-4-maverick", 400e9),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("qwen3-next-80b-a3b", 80e9),
        ("qwen3-coder-480b-a35b", 480_154_875_392),
        ("minimax-m2", 228_703_644_928),
        ("mistral-small-3.2", 23_572_403_200),
        ("phi-4", 14_659_507_200),
        ("glm-5", 744e9),
        ("qwen3.5-397b-a17b", 397e9),
    ],
)
def test_a_config_gives_the_published_count(name, published):
    spec = catalog.model_from_config(config_of(name), "read")
    assert catalog.parameters(spec) == pytest.approx(published, rel=0.005 if name != "llama-4-scout" else 0.012)


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [("gpt-oss-20b", {}, (128, 12)), ("smollm", {"no_rope_layers": [1, 1, 1, 0] * 8}, (None, 0))],
)
def test_a_layer_list_determines_which_layers_have_a_window(name, changes, window):
    base = name if name in NAMES else "llama-3.1-8b"
    attention = catalog.model_from_config(config_of(base, **changes), name).attention
    assert (attention.window_tokens, attention.windowed_layers) == window


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, 36),
        ({"no_rope_layers": [1, 1, 1, 0] * 12}, 36),
        ({"no_rope_layers": [1, 0] * 24}, 24),
        ({"layer_types": ["chunked_attention", "full_attention"] * 24}, 24),
        ({"attention_chunk_size": None}, 0),
        ({"max_position_embeddings": 8192}, 0),
    ],
)
def test_layers_of_chunks_are_those_with_rotary_positions(changes, windowed):
    config = config_of("llama-4-scout")
    config["text_config"] |= changes
    assert catalog.model_from_config(config, "llama").attention.windowed_layers == windowed


REFUSED = [
    ("llama-3.1-8b", {"mamba_d_state": 16, "attn_layer_period": 8}, "mamba_d_state = 16, attn_layer_period = 8"),
    ("llama-3.1-8b", {"ffn_dim_multiplier": 1.3}, r"ffn_dim_multiplier = 1\.3"),
    ("llama-3.1-8b", {"block_configs": [{"ffn": {"no_op": True}}]}, "block_configs = "),
    ("llama-3.1-8b", {"hybrid_override_pattern": "M-M*-"}, r"hybrid_override_pattern = 'M-M\*-'"),
    ("llama-3.1-8b", {"adapter": {"lora_rank": 64}}, r"adapter\.lora_rank = 64"),
    ("llama-3.1-8b", {"num_kv_shared_layers": 10}, "num_kv_shared_layers = 10"),
    ("qwen3-30b-a3b", {"cla_share_factor": 2}, "cla_share_factor = 2"),
    ("qwen3-8b", {"linear_num_value_heads": 32}, "linear_num_value_heads = 32"),
    ("qwen3-8b", {"q_lora_rank": 1536}, "q_lora_rank = 1536"),
    ("deepseek-v3", {"qk_head_dim": 200}, "qk_head_dim = 200"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED)
def test_an_unknown_key_that_looks_like_a_shape_refuses_the_model(name, changes, named):
    with pytest.raises(InputError, match=f"must be known; not known are {named}") as caught:
        catalog.model_from_config(config_of(name, **changes), "odd")
    assert "remove it from a copy of the file" in str(caught.value)


def test_an_unknown_shape_of_the_text_part_is_refused_and_one_of_the_images_is_not():
    config = config_of("gemma-3-4b")
    catalog.model_from_config({**config, "image_blocks": 12, "vision_config": {"mlp_ratio": 4}}, "sees")
    config["text_config"]["altup_num_inputs"] = 4
    with pytest.raises(InputError, match="altup_num_inputs = 4"):
        catalog.model_from_config(config, "odd")


def test_all_keys_of_an_older_familys_file_are_known():
    bloom = {
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "masked_softmax_fusion": True,
        "model_type": "bloom",
        "n_embed": 4096,
        "n_layer": 30,
        "num_attention_heads": 32,
        "offset_alibi": 100,
        "pretraining_tp": 4,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
        "vocab_size": 250880,
    }
    assert catalog.parameters(catalog.model_from_config(bloom, "bloom-7b1")) == pytest.approx(7_069_016_064, rel=1e-4)
    bart = {
        "activation_function": "gelu",
        "d_model": 1024,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "encoder_layers": 12,
        "is_encoder_decoder": True,
        "max_position_embeddings": 1024,
        "model_type": "bart",
        "normalize_embedding": True,
        "vocab_size": 50265,
    }
    assert catalog.model_from_config(bart, "bart").encoder_layers == 12
    with pytest.raises(InputError, match="encoder_ffn_dim = 2048"):
        catalog.model_from_config({**bart, "encoder_ffn_dim": 2048}, "bart")


def test_keys_that_change_no_shapes_are_passed_over():
    harmless = {
        "num_labels": 5,
        "max_length": 20,
        "unsloth_fixed": True,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 1,
        "attention_softmax_in_fp32": True,
        "pruned_heads": {},
        "num_memory_blocks": 0,
        "use_moe": False,
        "transformers_version": "4.57.1",
        "embedding_multiplier": 12,
        "task_specific_params": {"summary": {"num_layers": 2}},
    }
    assert shapes(catalog.model_from_config(config_of("llama-3.1-8b", **harmless), "llama-3.1-8b")) == shapes(
        catalog.model("llama-3.1-8b")
    )


@pytest.mark.parametrize(
    "changes", [{"layer_types": ["mamba", "full_attention"] * 16}, {"attn_type_list": [0, 1] * 16}]
)
def test_a_kind_of_layers_that_is_not_known_is_refused(changes):
    with pytest.raises(InputError, match="the layers of the config of odd must be of full_attention"):
        catalog.model_from_config(config_of("llama-3.1-8b", **changes), "odd")


def test_a_linear_attention_without_its_sizes_is_refused():
    with pytest.raises(InputError, match=r"lacks the heads of linear attention \(looked for linear_num_value_heads\)"):
        catalog.model_from_config(config_of("qwen3-next-80b-a3b", linear_num_value_heads="absent"), "odd")


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
    larger = {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 128, "hidden_size": 8192}
    grouped = catalog.model_from_config({**falcon, **larger}, "falcon-40b")
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
            {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 45},
            {"moe_layers": [*range(1, 48, 2)]},
            {"moe_layers": [*range(5, 48)]},
            {},
        )
    ]
    assert read == [3, 24, 1, 3, 24, 5, 0]


def test_an_unstated_embedding_tie_follows_the_class():
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


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
)
def test_a_size_of_zero_is_not_called_missing(key):
    with pytest.raises(InputError, match=rf"{key} must be a whole number of at least 1; it is 0"):
        catalog.model_from_config(config_of("llama-3.1-8b", **{key: 0}), "x")


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
        ("vocab_size", -1, "a whole number of at most 1,000,000,000"),
        ("vocab_size", 1e30, "a whole number of at most 1,000,000,000"),
        ("mlp_only_layers", 3, "a list"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(key, value, kind):
    config = config_of("qwen3-30b-a3b", **{key: value})
    with pytest.raises(
        InputError, match=f"the config of odd: {key} must be {kind}.*; it is {value!r}".replace("+", r"\+")
    ):
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


def test_kv_heads_that_do_not_divide_the_heads_are_refused():
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 5,
        "num_hidden_layers": 2, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    with pytest.raises(InputError, match="KV heads must divide the attention heads; they are 5 of 32"):
        catalog.model_from_config(config, "c")
