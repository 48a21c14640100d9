"""Parameters and bytes against published figures, closed forms and laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import catalog
from lengthwise.schema.errors import InputError, UnknownNameError

MODELS = catalog.models()
KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if spec.metadata.published_params])
def test_parameters_are_within_a_percent_of_the_published_count(name):
    spec = MODELS[name]
    assert catalog.parameters(spec) == pytest.approx(spec.metadata.published_params, rel=0.01)


def test_nearly_every_model_has_a_published_count():
    assert sum(spec.metadata.published_params is not None for spec in MODELS.values()) >= 0.9 * len(MODELS)


@pytest.mark.parametrize(
    ("name", "published", "digit"),
    [
        ("mixtral-8x7b", 12.9e9, 0.1e9),  # arXiv:2401.04088: "uses 13B active parameters"; blog: 12.9B
        ("qwen3-30b-a3b", 3.3e9, 0.1e9),  # model card
        ("qwen3-235b-a22b", 22e9, 1e9),  # model card
        ("deepseek-v3", 37e9, 1e9),  # arXiv:2412.19437
        ("llama-4-scout", 17e9, 0.5e9),  # model card
        ("llama-4-maverick", 17e9, 0.5e9),  # model card
        ("qwen3-coder-480b-a35b", 35e9, 0.5e9),  # model card
        ("kimi-k2", 32e9, 1e9),  # model card
        ("qwen3-next-80b-a3b", 3.9e9, 0.05e9),  # model card: 3B and 0.6B of tables and more
    ],
)
def test_active_parameters_are_the_published_ones_to_their_last_digit(name, published, digit):
    assert abs(catalog.active_parameters(MODELS[name]) - published) <= digit


@pytest.mark.parametrize(
    ("name", "published", "digit"),
    [
        ("deepseek-v3", 36.7e9, 0.1e9),  # README_WEIGHTS.md
        ("deepseek-v2-lite", 2.4e9, 0.1e9),  # model card
        ("gpt-oss-20b", 3.61e9, 0.005e9),  # model card, table 1
        ("gpt-oss-120b", 5.13e9, 0.005e9),  # model card, table 1
        ("mistral-large-3", 39e9, 0.5e9),  # model card
    ],
)
def test_a_count_of_active_parameters_that_leaves_the_embedding_out(name, published, digit):
    active = catalog.active_parameters(MODELS[name]) - catalog.embedding_parameters(MODELS[name])
    assert abs(active - published) <= digit


@pytest.mark.parametrize(
    ("name", "published", "digit"),
    [
        ("glm-4.5", 32e9, 0.5e9),  # arXiv:2508.06471
        ("glm-4.5-air", 12e9, 0.5e9),  # arXiv:2508.06471
        ("minimax-m2", 10e9, 0.5e9),  # model card
        ("qwen3-next-80b-a3b", 3e9, 0.5e9),  # model card
    ],
)
def test_a_count_of_active_parameters_that_leaves_both_tables_out(name, published, digit):
    spec = MODELS[name]
    tables = catalog.embedding_parameters(spec) + catalog.head_parameters(spec)
    assert abs(catalog.active_parameters(spec) - tables - published) <= digit


@pytest.mark.parametrize(("name", "published"), [("glm-4.5", 358_337_791_296), ("glm-4.5-air", 110_468_824_832)])
def test_a_checkpoint_with_multi_token_prediction_has_one_more_layer_and_tables(name, published):
    """The safetensors index counts a layer more, its projection, and a copy of embedding and head."""
    spec = MODELS[name]
    more = catalog.layer_parameters(spec, spec.layers - 1) + 2 * spec.hidden**2
    more += catalog.embedding_parameters(spec) + catalog.head_parameters(spec)
    assert catalog.parameters(spec) + more == pytest.approx(published, rel=1e-5)


def test_the_indexer_of_sparse_attention_is_what_the_checkpoints_differ_by():
    """DeepSeek-V3.2-Exp's index counts 865,535,376 more than V3's: 62 layers, 51,088 of them scales of FP8 blocks."""
    more = catalog.layer_parameters(MODELS["deepseek-v3.2"], 0) - catalog.layer_parameters(MODELS["deepseek-v3"], 0)
    assert 62 * more == pytest.approx(865_535_376 - 51_088, rel=1e-6)
    cached = [catalog.kv_bytes_per_token(MODELS[name]) for name in ("deepseek-v3.2", "deepseek-v3")]
    assert cached[0] - cached[1] == pytest.approx(61 * 132)


def test_layers_of_two_kinds_alternate_where_the_model_alternates_them():
    maverick, qwen = MODELS["llama-4-maverick"], MODELS["qwen3-next-80b-a3b"]
    sizes = [catalog.layer_parameters(maverick, index) for index in range(48)]
    assert len(set(sizes[0::2])) == len(set(sizes[1::2])) == 1
    assert sizes[1] > 10 * sizes[0]
    full = [catalog.layer_parameters(qwen, index) for index in range(48)]
    assert len({full[index] for index in range(3, 48, 4)}) == 1
    assert len({full[index] for index in range(48) if index % 4 != 3}) == 1
    assert full[3] < full[0]


def test_only_layers_that_cache_count_for_the_kv_cache():
    spec = MODELS["qwen3-next-80b-a3b"]
    assert catalog.kv_bytes_per_token(spec) == pytest.approx(12 * 2 * 2 * 256 * 2)
    # 36 layers of 32 heads with 128 x 128 numbers, and three columns of a convolution over 8,192 channels.
    assert catalog.state_bytes_per_sequence(spec) == pytest.approx(36 * 2 * (32 * 128 * 128 + 3 * 8192))
    assert catalog.state_bytes_per_sequence(MODELS["qwen3-30b-a3b"]) == pytest.approx(0)


def test_the_notes_describe_how_layers_are_simplified():
    def message(name):
        return " ".join(catalog.approximations(MODELS[name]))

    assert "12 of 24 layers have a window of 128 tokens" in message("gpt-oss-20b")
    assert "attention reads at most 2,048 of them" in message("deepseek-v3.2")
    assert "36 of 48 layers have linear attention" in message("qwen3-next-80b-a3b")
    assert not message("llama-3.1-8b")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_sum_of_its_parts(name):
    spec = MODELS[name]
    decoder = sum(catalog.layer_parameters(spec, index) for index in range(spec.layers))
    encoder = spec.encoder_layers * catalog.encoder_layer_parameters(spec)
    tables = catalog.embedding_parameters(spec) + catalog.head_parameters(spec)
    final_norms = catalog.parameters(spec) - decoder - encoder - tables
    assert 0 < final_norms <= 2 * 2 * spec.hidden
    assert catalog.active_parameters(spec) <= catalog.parameters(spec)
    assert (catalog.active_parameters(spec) == catalog.parameters(spec)) == (spec.ffn.experts == 0)


def test_visiting_every_expert_makes_all_parameters_active():
    spec = MODELS["deepseek-v3"]
    all_visited = replace(spec, ffn=replace(spec.ffn, experts_per_token=spec.ffn.experts))
    assert catalog.active_parameters(all_visited) == catalog.parameters(spec)


def test_the_first_layers_of_deepseek_are_dense():
    counts = [catalog.layer_parameters(MODELS["deepseek-v3"], index) for index in range(61)]
    assert len(set(counts[:3])) == len(set(counts[3:])) == 1
    assert counts[0] == pytest.approx(0.583e9, rel=0.01)  # 187M of MLA and 3 x 7168 x 18432
    assert counts[3] == pytest.approx(11.5e9, rel=0.01)  # README_WEIGHTS.md: the MTP layer of this structure


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-2-7b", 512 * KIB),  # 2 x 32 layers x 4096 x 2 bytes
        ("llama-2-70b", 320 * KIB),
        ("llama-3-8b", 128 * KIB),
        ("llama-3.1-405b", 504 * KIB),
        ("qwen-72b", 2.5 * MIB),
        ("opt-13b", 800 * KIB),  # vLLM (arXiv:2309.06180), section 3: 800 KB
        ("gpt-3-175b", 4.5 * MIB),
        ("gemma-2b", 18 * KIB),  # multi-query
        ("deepseek-v3", 70_272),  # 61 x (512 + 64) x 2; arXiv:2505.09343, table 1: 70.272 KB
        ("t5-11b", 1.5 * MIB),
    ],
)
def test_kv_bytes_of_a_token_at_16_bits(name, expected):
    assert catalog.kv_bytes_per_token(MODELS[name]) == expected
    assert catalog.kv_bytes_per_token(MODELS[name], "float16") == expected


def test_kv_bytes_follow_the_requested_dtype():
    spec = MODELS["llama-2-70b"]
    assert catalog.kv_bytes_per_token(spec, "fp8_e4m3") == 160 * KIB
    assert catalog.kv_bytes_per_token(spec, "fp32") == 640 * KIB


def test_narrow_weights_leave_the_cache_at_16_bits():
    spec = MODELS["llama-2-70b"]
    narrow = replace(spec, metadata=replace(spec.metadata, dtype="int4"))
    assert catalog.kv_bytes_per_token(narrow) == catalog.kv_bytes_per_token(spec)


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("llama-2-70b", None, 137.95e9),  # total_size of meta-llama/Llama-2-70b-hf
        ("llama-2-70b", "awq", 36.61e9),  # TheBloke/Llama-2-70B-AWQ: 36.61 GB
        ("deepseek-v3", None, 671.0e9 + 1.85e9),  # a byte a weight, two in both tables
    ],
)
def test_weight_bytes_are_those_of_published_checkpoints(name, dtype, published):
    assert catalog.weight_bytes(MODELS[name], dtype) == pytest.approx(published, rel=0.002)


def test_layers_and_tables_hold_all_bytes():
    spec = MODELS["llama-3.1-8b"]
    layers = sum(catalog.layer_weight_bytes(spec, index, "int4") for index in range(spec.layers))
    tables = 2 * (catalog.embedding_parameters(spec) + catalog.head_parameters(spec))
    assert catalog.weight_bytes(spec, "int4") == pytest.approx(layers + tables, rel=1e-5)


def test_an_unknown_dtype_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="no dtype named 'int5'"):
        catalog.weight_bytes(MODELS["llama-2-7b"], "int5")


@pytest.mark.parametrize("index", [-1, 32])
def test_an_out_of_range_layer_is_refused(index):
    with pytest.raises(InputError, match=rf"must be in 0\.\.31; it is {index}"):
        catalog.layer_parameters(MODELS["llama-2-7b"], index)


@given(st.integers(1, 200).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_stages_share_all_layers_to_within_one(cut):
    layers, pp = cut
    stages = catalog.stage_layers(replace(MODELS["llama-2-7b"], layers=layers), pp)
    assert len(stages) == pp
    assert sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert stages[-1] == min(stages)  # it also holds the head


@pytest.mark.parametrize(
    ("name", "pp", "expected"),
    [
        ("llama-2-70b", 4, [20, 20, 20, 20]),
        ("deepseek-v3", 4, [15, 15, 16, 15]),
        ("deepseek-v3", 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        ("gemma-2-27b", 4, [11, 12, 12, 11]),
        ("llama-2-7b", 3, [11, 11, 10]),
    ],
)
def test_the_rest_of_an_uneven_cut_goes_before_the_last_stage(name, pp, expected):
    assert catalog.stage_layers(MODELS[name], pp) == expected


def test_an_encoder_is_cut_on_its_own():
    spec = replace(MODELS["t5-11b"], encoder_layers=6)
    assert catalog.stage_layers(spec, 4, encoder=True) == [1, 2, 2, 1]
    assert catalog.stage_layers(spec, 4) == [6, 6, 6, 6]


@pytest.mark.parametrize("pp", [0, 33])
def test_a_cut_into_no_or_too_many_stages_is_refused(pp):
    with pytest.raises(InputError, match=rf"must be in 1\.\.32; it is {pp}"):
        catalog.stage_layers(MODELS["llama-2-7b"], pp)


@pytest.mark.parametrize("name", ["kimi-k2", "qwen3.5-397b-a17b", "deepseek-v3"])
def test_a_checkpoint_in_fp4_leaves_what_it_excludes_in_16_bits(name):
    spec = MODELS[name]
    at = spec.layers - 1
    routed = catalog.routed_weight_bytes(spec, at, "fp4")
    others = catalog.layer_parameters(spec, at) - routed / (0.5 + 1 / 16)
    outputs = 0
    if spec.metadata.fp4_outputs:  # output projection and shared expert
        outputs = spec.hidden * (spec.attention.heads * spec.attention.v_head_dim + 3 * spec.ffn.shared_intermediate)
    assert (outputs > 0) == (name == "deepseek-v3")
    expected = routed + 2 * (others - outputs) + (0.5 + 1 / 16) * outputs
    assert catalog.layer_weight_bytes(spec, at, "fp4") == pytest.approx(expected)
    layers = sum(catalog.layer_weight_bytes(spec, i, "fp4") for i in range(spec.layers))
    tables = 2 * (catalog.embedding_parameters(spec) + catalog.head_parameters(spec))
    assert catalog.weight_bytes(spec, "fp4") == pytest.approx(layers + tables, rel=1e-5)
    assert catalog.dense_dtype(spec, "fp8") == "fp8"


@pytest.mark.parametrize(("name", "dense"), [("qwen3-30b-a3b", "int4"), ("kimi-k2-thinking", "bfloat16")])
def test_int4_quantizes_all_layers_except_where_the_published_checkpoint_has_only_experts_in_it(name, dense):
    spec = MODELS[name]
    assert catalog.dense_dtype(spec, "awq") == dense
    at = spec.layers - 1
    routed = catalog.routed_weight_bytes(spec, at, "gptq")
    each = 0.5 + 2.5 / 128
    others = catalog.layer_parameters(spec, at) - routed / each
    assert catalog.layer_weight_bytes(spec, at, "gptq") == pytest.approx(
        routed + others * (each if dense == "int4" else 2)
    )
    assert catalog.dense_dtype(spec, "mxfp4") == catalog.dense_dtype(spec, "nvfp4") == "bfloat16"


def test_a_dense_model_in_fp4_has_all_layers_in_it():
    spec = MODELS["llama-3.1-70b"]
    assert catalog.dense_dtype(spec, "fp4") == "fp4"
    each = catalog.layer_weight_bytes(spec, 0, "fp4") / catalog.layer_parameters(spec, 0)
    assert each == pytest.approx(0.5 + 1 / 16)
