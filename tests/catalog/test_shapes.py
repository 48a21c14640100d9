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
    ],
)
def test_active_parameters_are_the_published_ones_to_their_last_digit(name, published, digit):
    assert abs(catalog.active_parameters(MODELS[name]) - published) <= digit


@pytest.mark.parametrize(("name", "published"), [("deepseek-v3", 36.7e9), ("deepseek-v2-lite", 2.4e9)])
def test_deepseeks_own_count_of_active_parameters_leaves_one_table_out(name, published):
    active = catalog.active_parameters(MODELS[name]) - catalog.embedding_parameters(MODELS[name])
    assert abs(active - published) <= 0.1e9  # README_WEIGHTS.md; model card


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


def test_kv_bytes_follow_the_dtype_that_is_asked_for():
    spec = MODELS["llama-2-70b"]
    assert catalog.kv_bytes_per_token(spec, "fp8_e4m3") == 160 * KIB
    assert catalog.kv_bytes_per_token(spec, "fp32") == 640 * KIB


def test_narrow_weights_leave_the_cache_at_16_bits():
    spec = MODELS["llama-2-70b"]
    narrow = replace(spec, metadata=replace(spec.metadata, dtype="int4"))
    assert catalog.kv_bytes_per_token(narrow) == catalog.kv_bytes_per_token(spec)


def test_cross_attention_holds_the_encoders_tokens_in_every_decoder_layer():
    assert catalog.cross_kv_bytes_per_token(MODELS["t5-11b"]) == 2 * 24 * 128 * 128 * 2
    assert catalog.cross_kv_bytes_per_token(MODELS["llama-2-7b"]) == 0
    assert catalog.encoder_layer_parameters(MODELS["llama-2-7b"]) == 0


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
def test_a_layer_that_is_not_there_is_refused(index):
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
