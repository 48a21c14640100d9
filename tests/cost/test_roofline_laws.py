"""Laws of the roofline: never less time for more work, and a breakdown that adds up to the tables."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise import catalog
from lengthwise.cost import HostOverhead, operators, roofline
from lengthwise.cost.tables import check
from lengthwise.schema.cost_tables import grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import FfnSpec

LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=512)
MODELS = st.sampled_from(sorted(catalog.models()))
GPUS = st.sampled_from(sorted(catalog.gpus()))
DTYPES = st.sampled_from([None, "fp8", "int4"])
TABLES = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")


def tables_of(model, gpu, parallel, limits=LIMITS, length=2048, **more):
    return roofline(model, gpu, catalog.default_node(gpu, parallel.tp * parallel.pp), parallel, limits, length, **more)


@settings(max_examples=40, deadline=None)
@given(model=MODELS, gpu=GPUS, tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]), dtype=DTYPES)
def test_tables_are_sound_and_never_fall(model, gpu, tp, pp, dtype):
    model, gpu = catalog.model(model), catalog.gpu(gpu)
    if model.attention.heads % tp:
        return
    tables = tables_of(model, gpu, Parallelism(tp, pp), replace(LIMITS, weight_dtype=dtype))
    check(tables, "roofline")
    assert tables.stage_layers.sum() == model.layers
    for name in TABLES:
        table = getattr(tables, name)
        for axis in range(table.ndim):
            step = np.diff(table, axis=axis)
            assert (step >= -1e-12 * table.max()).all(), (name, axis)
    assert (tables.comm_s[1:] > 0).all() == (tp > 1)


@settings(max_examples=25, deadline=None)
@given(model=MODELS, gpu=GPUS, dtype=DTYPES)
def test_more_gpus_never_compute_longer(model, gpu, dtype):
    model, gpu = catalog.model(model), catalog.gpu(gpu)
    limits = replace(LIMITS, weight_dtype=dtype)
    degrees = [tp for tp in (1, 2, 4, 8) if model.attention.heads % tp == 0]
    several = [tables_of(model, gpu, Parallelism(tp), limits) for tp in degrees]
    for few, many in pairwise(several):
        for name in ("layer_s", "prefill_s", "decode_s"):
            assert (getattr(many, name) <= getattr(few, name) * (1 + 1e-12)).all(), name


@settings(max_examples=30, deadline=None)
@given(
    model=MODELS,
    gpu=GPUS,
    cut=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    seqs_and_kv=st.tuples(st.integers(0, 31), st.sampled_from(grid_axis(60_000).tolist())),
    prompts=st.lists(
        st.tuples(st.sampled_from(grid_axis(250).tolist()[1:-1]), st.sampled_from(grid_axis(2000).tolist()[:-1])),
        max_size=2,
    ),
)
def test_operators_add_up_to_the_tables(model, gpu, cut, seqs_and_kv, prompts):
    (tp, pp), (seqs, kv) = cut, seqs_and_kv
    model, gpu, parallel = catalog.model(model), catalog.gpu(gpu), Parallelism(tp, pp)
    if model.attention.heads % tp or not (seqs or prompts):
        return
    node = catalog.default_node(gpu, tp * pp)
    tables = roofline(model, gpu, node, parallel, LIMITS, 2048)
    rows = operators(model, gpu, node, parallel, LIMITS, decode_seqs=seqs, kv_tokens=kv, prefill=prompts)
    chunks, contexts = grid_axis(2048), grid_axis(2048)
    tokens, size = seqs + sum(c for c, _ in prompts), seqs + len(prompts)
    attention = sum(tables.prefill_s[np.searchsorted(chunks, c), np.searchsorted(contexts, x)] for c, x in prompts)
    if seqs:
        attention += tables.decode_s[seqs, np.searchsorted(grid_axis(64 * 2048), kv)]
    layer = tables.layer_s[tokens] + tables.comm_s[tokens] + attention
    expected = model.layers * layer + tables.embedding_s[tokens] + tables.head_s[size] + tables.host_s[size]
    expected += (pp - 1) * tables.send_s[tokens]
    assert sum(row.seconds for row in rows) == pytest.approx(expected, rel=1e-9)
    assert {row.bound for row in rows} <= {"compute", "memory", "network", "latency"}
    assert len({row.name for row in rows}) == len(rows)


def test_a_layer_more_adds_its_time():
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("H100")
    more = replace(model, layers=model.layers + 1)
    step = {"decode_seqs": 8, "kv_tokens": 8000, "prefill": [(100, 50)]}
    node = catalog.default_node(gpu, 1)
    few = operators(model, gpu, node, Parallelism(), LIMITS, **step)
    many = operators(more, gpu, node, Parallelism(), LIMITS, **step)
    layer = sum(row.seconds for row in few if row.part in ("layer", "prefill", "decode")) / model.layers
    added = sum(row.seconds for row in many) - sum(row.seconds for row in few)
    assert added == pytest.approx(layer, rel=1e-9)


def test_decode_reads_every_weight_once_and_multiplies_two_flops_each():
    model, gpu = catalog.model("llama-2-70b"), catalog.gpu("A100-80GB")
    rows = operators(model, gpu, catalog.node("dgx-a100"), Parallelism(4), LIMITS, decode_seqs=1, kv_tokens=0)
    gemms = [row for row in rows if "projection" in row.name or row.name.startswith(("mlp", "lm head"))]
    matrices = catalog.parameters(model) - catalog.embedding_parameters(model)
    assert sum(row.flops for row in gemms) == pytest.approx(2 * matrices / 4, rel=1e-3)
    assert sum(row.bytes for row in gemms) == pytest.approx(2 * matrices / 4, rel=1e-3)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (4, 27.7), (64, 124.1), (4096, 128)])
def test_tokens_read_the_experts_they_are_expected_to_hit(tokens, experts):
    model, gpu = catalog.model("qwen3-30b-a3b"), catalog.gpu("H100")  # 8 of 128
    node = catalog.default_node(gpu, 1)
    rows = operators(model, gpu, node, Parallelism(), LIMITS, prefill=[(tokens, 0)])
    up = next(row for row in rows if row.name == "experts up")
    width = 2 * model.ffn.expert_intermediate
    moved = 2 * 8 * tokens * (width + model.hidden)
    hit = (up.bytes / model.layers - moved) / (2 * width * model.hidden)
    assert hit == pytest.approx(experts, rel=0.01)


def test_mla_decode_reads_the_latent_once_and_prefill_expands_the_context():
    model, gpu = catalog.model("deepseek-v3"), catalog.gpu("H200")
    node = catalog.default_node(gpu, 8)
    decode = operators(model, gpu, node, Parallelism(8), LIMITS, decode_seqs=4, kv_tokens=40_000)
    read = next(row for row in decode if row.name == "decode attention").bytes / model.layers
    assert read == pytest.approx(40_000 * (512 + 64) * 2, rel=0.05)
    first = operators(model, gpu, node, Parallelism(8), LIMITS, prefill=[(128, 0)])
    later = operators(model, gpu, node, Parallelism(8), LIMITS, prefill=[(128, 4096)])
    expand = {"context up-projection"}
    assert sum(r.seconds for r in first if r.name in expand) == 0
    assert sum(r.flops for r in later if r.name in expand) == pytest.approx(
        2 * 4096 * 512 * 16 * (128 + 128) * model.layers
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "opt-13b", "qwen2.5-7b"])
def test_a_token_is_multiplied_with_every_weight_of_a_dense_layer(name):
    model, gpu = catalog.model(name), catalog.gpu("H200")
    model = replace(model, ffn=FfnSpec(4096, gated=model.ffn.gated))
    rows = operators(model, gpu, catalog.node("hgx-h200"), Parallelism(), LIMITS, prefill=[(1, 0)])
    flops = sum(row.flops for row in rows if row.part == "layer")
    assert flops == pytest.approx(2 * catalog.layer_parameters(model, 0) * model.layers, rel=1e-3)


def test_a_window_stops_the_growth_of_its_layers():
    model, gpu = catalog.model("gemma-3-27b"), catalog.gpu("H100")
    attention = model.attention
    assert 0 < attention.windowed_layers < model.layers
    tables = tables_of(model, gpu, Parallelism(), length=32768)
    plain = replace(model, attention=replace(attention, window_tokens=None, windowed_layers=0))
    full = tables_of(plain, gpu, Parallelism(), length=32768)
    share = 1 - attention.windowed_layers / model.layers
    grown, complete = np.diff(tables.decode_s[8, -2:]), np.diff(full.decode_s[8, -2:])
    assert grown == pytest.approx(share * complete, rel=1e-6)
    assert (tables.prefill_s <= full.prefill_s * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_sparse_attention_reads_the_chosen_tokens_and_its_indexer_scores_all(name):
    sparse, gpu = catalog.model(name), catalog.gpu("H200")
    dense = replace(sparse, attention=replace(sparse.attention, index_heads=0, index_head_dim=0))
    node, scored = catalog.default_node(gpu, 8), sparse.attention.index_heads * sparse.attention.index_head_dim

    def decode(context):
        return {"decode_seqs": 4, "kv_tokens": 4 * context}

    def prefill(context):
        return {"prefill": [(128, context)]}

    for phase, step in (("decode", decode), ("prefill", prefill)):
        attention, indexer = f"{phase} attention", f"{phase} indexer"
        by_context = {tokens: rows_of(sparse, gpu, node, step(tokens)) for tokens in (1024, 4096, 8192)}
        few, some, many = by_context.values()
        assert few[attention].flops == pytest.approx(rows_of(dense, gpu, node, step(1024))[attention].flops)
        assert few[attention].flops < some[attention].flops
        assert some[attention].flops == pytest.approx(many[attention].flops)
        pairs = 4 * 4096 if phase == "decode" else 128 * 4096 + 128 * 129 / 2
        assert some[indexer].flops == pytest.approx(2 * scored * pairs * sparse.layers)
        assert many[indexer].bytes > some[indexer].bytes > few[indexer].bytes
        assert indexer not in rows_of(dense, gpu, node, step(4096))
    assert "indexer projection" in by_context[1024]


def rows_of(model, gpu, node, step):
    return {row.name: row for row in operators(model, gpu, node, Parallelism(8), LIMITS, **step)}


def test_an_encoder_decoder_pays_for_cross_attention():
    model, gpu = catalog.model("t5-11b"), catalog.gpu("A100-80GB")
    rows = operators(model, gpu, catalog.default_node(gpu, 2), Parallelism(2), LIMITS, decode_seqs=2, kv_tokens=100)
    names = {row.name for row in rows}
    assert {"cross projection in", "cross projection out"} <= names
    flops = sum(row.flops for row in rows if row.part == "layer") * 2
    layer = catalog.layer_parameters(model, 0)
    cross_kv = 2 * model.hidden * model.attention.heads * model.attention.head_dim
    assert flops == pytest.approx(2 * 2 * model.layers * (layer - cross_kv), rel=1e-3)


def test_narrow_weights_run_narrow_only_where_the_gpu_can():
    model = catalog.model("llama-3.1-8b")

    def up(gpu, dtype):
        gpu, limits = catalog.gpu(gpu), replace(LIMITS, weight_dtype=dtype)
        rows = operators(model, gpu, catalog.default_node(gpu, 1), Parallelism(), limits, prefill=[(4096, 0)])
        return next(row.seconds for row in rows if row.name == "mlp up")

    assert up("H100", "fp8") < 0.75 * up("H100", None)
    assert up("A100-80GB", "fp8") == pytest.approx(up("A100-80GB", None), rel=0.05)
    assert up("H100", "int4") == pytest.approx(up("H100", None), rel=0.05)


def test_host_overhead_is_a_line_and_can_be_set():
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("H100")
    assert tables_of(model, gpu, Parallelism()).host_s[[0, 10]] == pytest.approx([126e-6, 170e-6])
    none = tables_of(model, gpu, Parallelism(), host=HostOverhead(0, 0))
    assert not none.host_s.any()


@pytest.mark.parametrize("step", [{}, {"decode_seqs": -1}, {"prefill": [(0, 5)]}, {"decode_seqs": 1, "kv_tokens": -3}])
def test_an_impossible_step_is_refused(step):
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("H100")
    with pytest.raises(InputError, match="a step must hold"):
        operators(model, gpu, catalog.default_node(gpu, 1), Parallelism(), LIMITS, **step)


def test_an_impossible_cut_is_refused():
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("H100")
    with pytest.raises(InputError, match="tp must divide the 32 attention heads"):
        tables_of(model, gpu, Parallelism(3))
    with pytest.raises(InputError, match="pipeline stages"):
        tables_of(model, gpu, Parallelism(1, 99))
