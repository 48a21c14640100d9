"""Vidur's profiling folder to cost tables: both estimators, the store, and every gap named."""

import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from lengthwise import catalog
from lengthwise.cost import vidur_profile, vidur_tables
from lengthwise.cost.vidur_format import ONCE_A_LAYER
from lengthwise.schema.cost_tables import MERGED, PER_REQUEST, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import MissingExtraError, ProfileError, UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelFacts, ModelSpec

LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=128)
MODEL = ModelSpec(
    "tiny", 4, 64, 1000, AttentionSpec(8, 2, 8), FfnSpec(128), 512, metadata=ModelFacts(aliases=("org/Tiny-hf",))
)
OPERATORS = [*ONCE_A_LAYER, "post_attention_layernorm"]


def mlp_rows(tp, operators=OPERATORS):
    tokens = np.arange(1, 257)
    shapes = {"n_head": 8, "n_kv_head": 2, "n_embd": 64, "n_expanded_embd": 128, "use_gated_mlp": True}
    times = {f"time_stats.{name}.median": 0.01 + 1e-4 * tokens / tp for name in operators}
    return pl.DataFrame({**times, "num_tokens": tokens, "num_tensor_parallel_workers": tp}).with_columns(
        **{name: pl.lit(value) for name, value in shapes.items()}
    )


def attention_rows(tp):
    prefill = [(1, c, k, 1e-6 * c * (k + c / 2) + 0.01, None) for c in (16, 32, 64, 128) for k in range(0, 513, 64)]
    decode = [(b, 0, k, None, 1e-5 * b * k + 0.01) for b in range(1, 9) for k in range(32, 513, 32)]
    names = ["batch_size", "prefill_chunk_size", "kv_cache_size"]
    names += ["time_stats.attn_prefill.median", "time_stats.attn_decode.median"]
    rows = pl.DataFrame(prefill + decode, schema=names, orient="row", infer_schema_length=None)
    return rows.with_columns(
        is_prefill=pl.col("prefill_chunk_size") > 0,
        n_embd=64,
        n_q_head=8,
        n_kv_head=2,
        block_size=16,
        num_tensor_parallel_workers=tp,
    )


def network_rows(name, workers, devices):
    size = 2 * 64 * np.arange(1, 257)
    return pl.DataFrame({f"time_stats.{name}.median": 0.005 + size * 1e-7, "size": size}).with_columns(
        num_workers=workers, devices_per_node=devices, max_devices_per_node=4
    )


@pytest.fixture
def few_trees(monkeypatch):
    monkeypatch.setattr("lengthwise.cost.regression.TREES", 40)
    monkeypatch.setattr("lengthwise.cost.regression.THREADS", 1)


@pytest.fixture
def folder(tmp_path):
    place, network = tmp_path / "compute/a100/org/Tiny-hf", tmp_path / "network/a100_dgx"
    place.mkdir(parents=True)
    network.mkdir(parents=True)
    pl.concat([mlp_rows(1), mlp_rows(2)]).write_csv(place / "mlp.csv")
    pl.concat([attention_rows(1), attention_rows(2)]).write_csv(place / "attention.csv")
    network_rows("all_reduce", 2, 2).write_csv(network / "all_reduce.csv")
    network_rows("send_recv", 2, 2).write_csv(network / "send_recv.csv")
    return tmp_path


def build(folder, model=MODEL, parallel=Parallelism(), limits=LIMITS, length=512, **more):  # noqa: B008
    more = {"cache": None} | more
    return vidur_profile(folder, model, "A100-80GB", parallel, limits, length, **more)


def test_monotone_tables_are_the_measurements(folder):
    tables, report = build(folder, parallel=Parallelism(2, 2))
    tokens = np.arange(1, 129)
    assert tables.rule.kind == PER_REQUEST
    assert tables.stage_layers.tolist() == [2, 2]
    assert tables.layer_s[1:] == pytest.approx(9 * (0.01 + 5e-5 * tokens) / 1e3)
    assert tables.comm_s[1:] == pytest.approx(2 * (0.025 + 128e-7 * tokens) / 1e3)
    assert tables.send_s[1:] == pytest.approx((0.005 + 128e-7 * tokens) / 1e3)
    assert not tables.host_s.any()
    assert not tables.head_s.any()
    chunk, context = (np.searchsorted(grid_axis(512), at) for at in (64, 256))
    assert tables.prefill_s[chunk, context] == pytest.approx((64 * (256 + 32) * 1e-6 + 0.01) / 1e3)
    assert tables.decode_s[4, np.searchsorted(grid_axis(4096), 1024)] == pytest.approx((1e-5 * 1024 + 0.01) / 1e3)
    assert {fit.name for fit in report.operators} == {
        *OPERATORS,
        "attn_prefill",
        "attn_decode",
        "all_reduce",
        "send_recv",
    }
    assert report.method == "5-fold"
    assert max(fit.median_error for fit in report.operators) < 0.01


@pytest.mark.parametrize("estimator", ["monotone", "random_forest"])
def test_errors_are_of_rows_that_the_fit_has_not_seen(folder, estimator, few_trees):
    path = folder / "compute/a100/org/Tiny-hf/mlp.csv"
    steep = (pl.col("num_tokens") / 6).exp()  # both estimators meet every row that they have seen
    pl.read_csv(path).with_columns(steep.alias("time_stats.add.median")).write_csv(path)
    _, report = build(folder, estimator=estimator)
    errors = {fit.name: fit.median_error for fit in report.operators}
    assert errors["add"] > 0.01
    assert errors["attn_rope"] < 0.02


def test_forest_is_vidurs_rule_and_the_same_every_time(folder, few_trees):
    one, report = build(folder, estimator="random_forest", parallel=Parallelism(2))
    two, _ = build(folder, estimator="random_forest", parallel=Parallelism(2))
    assert one.rule.kind == MERGED
    assert one.rule.merge_factor == pytest.approx(1.1)
    assert one.prefill_s.shape == (4097, 65)
    assert np.array_equal(one.layer_s, two.layer_s)
    assert np.array_equal(one.prefill_s, two.prefill_s)
    assert one.layer_s[1] == one.layer_s[8] < one.layer_s[9]
    assert one.layer_s[64] == pytest.approx(9 * (0.01 + 5e-5 * 64) / 1e3, rel=0.01)
    assert one.layer_s[300] == one.layer_s[4096]
    assert one.decode_s[4, 4] == pytest.approx((1e-5 * 4 * 256 + 0.01) / 1e3, rel=0.1)
    assert one.prefill_s[64, 4] == pytest.approx((64 * (256 + 32) * 1e-6 + 0.01) / 1e3, rel=0.1)
    assert report.method == "out of bag"


def test_grid_search_takes_the_parameters_that_meet_rows_left_out_best(folder, monkeypatch, few_trees):
    grid = {"n_estimators": (40,), "max_depth": (1, 32), "min_samples_split": (2,)}  # depth 1 cannot meet a line
    for name, value in {"GRID": grid, "GRID_FOLDS": 2, "DEPTH": 1}.items():
        monkeypatch.setattr(f"lengthwise.cost.regression.{name}", value)
    forest, _ = build(folder, estimator="random_forest")
    searched, report = build(folder, estimator="random_forest_grid")
    monkeypatch.setattr("lengthwise.cost.regression.DEPTH", 32)
    deep, _ = build(folder, estimator="random_forest")
    assert report.estimator == "random_forest_grid"
    for name in ("layer_s", "prefill_s", "decode_s"):
        assert np.array_equal(getattr(searched, name), getattr(deep, name))
        assert not np.array_equal(getattr(searched, name), getattr(forest, name))


def test_second_call_reads_the_store_and_new_content_does_not(folder, tmp_path, monkeypatch):
    store = tmp_path / "store"
    first = build(folder, cache=store)
    with monkeypatch.context() as patch:
        patch.setattr("lengthwise.cost.vidur.read_samples", lambda *_: pytest.fail("built again"))
        second = build(folder, cache=store)
    assert second[1] == first[1]
    for name in ("layer_s", "prefill_s", "decode_s"):
        assert np.array_equal(getattr(second[0], name), getattr(first[0], name))
    path = folder / "compute/a100/org/Tiny-hf/mlp.csv"
    path.write_text(path.read_text().replace("0.0101", "0.0102"))
    changed = build(folder, cache=store)
    assert not np.array_equal(changed[0].layer_s, first[0].layer_s)
    assert len(list(store.iterdir())) == 2


def test_store_ignores_what_does_not_shape_the_tables(folder, tmp_path, few_trees):
    store = tmp_path / "store"
    for parallel, watermark in ((Parallelism(), 0.01), (Parallelism(replicas=3), 0.5)):
        build(folder, cache=store, parallel=parallel, limits=replace(LIMITS, watermark=watermark))
    assert len(list(store.iterdir())) == 1
    build(folder, cache=store, limits=replace(LIMITS, max_num_seqs=4))
    assert len(list(store.iterdir())) == 2
    for seqs in (4, 64):
        build(folder, cache=store, limits=replace(LIMITS, max_num_seqs=seqs), estimator="random_forest")
    assert len(list(store.iterdir())) == 3


def test_damaged_store_is_built_again_and_unwritable_one_is_no_error(folder, tmp_path):
    store = tmp_path / "store"
    first, _ = build(folder, cache=store)
    (retained,) = store.iterdir()
    retained.write_bytes(retained.read_bytes()[:100])
    again, _ = build(folder, cache=store)
    assert np.array_equal(again.layer_s, first.layer_s)
    (tmp_path / "file").write_text("no folder")
    build(folder, cache=tmp_path / "file" / "store")


def test_operator_of_a_parallel_block_is_not_needed(folder):
    path = folder / "compute/a100/org/Tiny-hf/mlp.csv"
    pl.read_csv(path).drop("time_stats.post_attention_layernorm.median").write_csv(path)
    tables, _ = build(folder)
    assert tables.layer_s[100] == pytest.approx(8 * (0.01 + 1e-2) / 1e3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f / "compute/a100/org"), "must hold a folder for tiny with mlp.csv; it holds none"),
        (lambda f: (f / "compute/a100").rename(f / "compute/h100"), "a folder for A100-80GB; it holds h100"),
        (
            lambda f: (f / "compute/a100/org/Tiny-hf/attention.csv").unlink(),
            "must hold attention.csv; it holds mlp.csv",
        ),
        (lambda f: shutil.rmtree(f / "network"), "must hold a folder for the node a100_pairwise_nvlink"),
        (
            lambda f: (f / "network/a100_dgx/all_reduce.csv").unlink(),
            "must hold all_reduce.csv; it holds send_recv.csv",
        ),
        (
            lambda f: network_rows("all_reduce", 4, 4).write_csv(f / "network/a100_dgx/all_reduce.csv"),
            r"of 2 GPUs in a node; it holds \[4\]",
        ),
        (
            lambda f: network_rows("send_recv", 2, 1).write_csv(f / "network/a100_dgx/send_recv.csv"),
            "send_recv rows inside a node",
        ),
        (
            lambda f: mlp_rows(2, OPERATORS[1:]).write_csv(f / "compute/a100/org/Tiny-hf/mlp.csv"),
            "must have time_stats.attn_pre_proj.median; its operators are add, attn_post_proj",
        ),
        (
            lambda f: mlp_rows(4).write_csv(f / "compute/a100/org/Tiny-hf/mlp.csv"),
            r"must hold rows of tp 2; it holds tp \[4\]",
        ),
        (
            lambda f: (f / "compute/a100/org/Tiny-hf/mlp.csv").write_text("a,b\n1,2\n"),
            "must have the column num_tensor_parallel_workers; it has a, b",
        ),
        (lambda f: (f / "compute/a100/org/Tiny-hf/mlp.csv").write_bytes(b""), r"mlp\.csv must be a readable CSV"),
    ],
)
def test_missing_parts_are_named_with_the_present_ones(folder, damage, message):
    damage(folder)
    with pytest.raises(ProfileError, match=message):
        build(folder, parallel=Parallelism(2, 2))


def test_other_shapes_estimators_and_folders_are_refused(folder, tmp_path):
    with pytest.raises(ProfileError, match=r"must hold rows with .*'n_embd': 96.*it holds .*64"):
        build(folder, model=replace(MODEL, hidden=96))
    with pytest.raises(UnknownNameError, match="no estimator named 'forest'"):
        build(folder, estimator="forest")
    with pytest.raises(ProfileError, match="must be a folder with compute/"):
        build(tmp_path / "nowhere")
    with pytest.raises(ProfileError, match="a folder for the node hgx-b200; it holds a100_dgx"):
        build(folder, parallel=Parallelism(2), node=catalog.node("hgx-b200"))
    build(folder, parallel=Parallelism(2), node=catalog.node("dgx-a100"))


def test_missing_forest_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.ensemble", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[profiles\]"):
        build(folder, estimator="random_forest")


def test_monotone_tables_agree_with_vidurs_own_predictions(shared):
    model = catalog.model("llama-2-70b")
    limits = EngineLimits(max_num_seqs=128, max_num_batched_tokens=4096)
    args = (shared("data/profiles/vidur"), model, "A100-80GB", Parallelism(2), limits, 4096)
    own, report = vidur_profile(*args, node=catalog.node("a100-pairwise-nvlink"), cache=None)
    other = vidur_tables(shared("golden/vidur/tables_Llama-2-70b-hf_tp2_pp1.npz"), model)
    assert np.median(np.abs(own.layer_s[1:4097] / other.layer_s[1:] - 1)) < 0.01
    assert np.median(np.abs(own.comm_s[1:4097] / other.comm_s[1:] - 1)) < 0.03
    axis = grid_axis(4096)
    chunks, contexts = axis[axis >= 64], axis[axis % 64 == 0]
    rows, columns = np.searchsorted(axis, chunks), np.searchsorted(axis, contexts)
    measured = np.add.outer(chunks, contexts) <= 4096
    error = np.abs(own.prefill_s[np.ix_(rows, columns)] / other.prefill_s[np.ix_(chunks, contexts // 64)] - 1)
    assert np.median(error[measured]) < 0.03
    fits = {fit.name: fit for fit in report.operators}
    assert fits["attn_prefill"].median_error < 0.03
    assert fits["attn_decode"].median_error < 0.03
    assert fits["mlp_up_proj"].p95_error < 0.10
