"""A profile becomes tables that say what they rest on, how good they are, and how far they go."""

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import FACTORS, GPU, LAYER, LIMITS, LONGEST, MODEL, NODE, OPERATORS, planted, profile, target

from lengthwise import catalog
from lengthwise.cost import load, roofline, save
from lengthwise.cost.estimators import Target, fit_profile, profile_tables
from lengthwise.cost.profiles import import_llmservingsim, read_profile, write_profile
from lengthwise.cost.provenance import read_npz, write_npz
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import NOT_MEASURED, CostEvidence, PartError, Reach, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.profile import MADE_UP
from lengthwise.schema.specs import DTYPE_BYTES
from lengthwise.schema.workload import Workload


def fitted(rows, tp=1, model=MODEL, gpu=GPU, estimator="auto", limits=LIMITS):
    return fit_profile(rows, Target(model, gpu, NODE, Parallelism(tp), limits, LONGEST), estimator=estimator)


def truth(tp=1):
    """[T + 1] planted seconds of a layer."""
    tokens = np.arange(1, LIMITS.max_num_batched_tokens + 1)
    return sum(planted(operator, tp, tokens=tokens).seconds for operator in LAYER)


@pytest.fixture(scope="module")
def measured():
    return profile((1, 2), noise=0.01)


@pytest.fixture(scope="module")
def one(measured):
    return fitted(measured)


def test_tables_are_the_sum_of_the_planted_operators(one):
    tables, _ = one
    assert tables.layer_s[1:] == pytest.approx(truth(), rel=0.03)
    columns = {"chunk": np.array([grid_axis(2048)[40]]), "context": np.array([grid_axis(2048)[50]])}
    from lengthwise.cost.estimators.points import combined, shard_points

    place = shard_points("prefill attention", columns, target())
    assert tables.prefill_s[40, 50] == pytest.approx(combined(place.parts, FACTORS)[0], rel=0.05)


def test_tables_of_a_cpu_whose_kernels_have_no_tiles_are_numbers(measured):
    """A chunk of 0 tokens then has neither work nor padding."""
    tables, _ = fitted(measured, gpu=replace(GPU, is_cpu=True))
    assert np.isfinite(tables.prefill_s).all()
    assert (np.diff(tables.prefill_s[1:, 0]) >= 0).all()


def test_the_roofline_supplies_what_the_profile_lacks_and_is_named(one):
    tables, report = one
    plain = roofline(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST)
    assert np.array_equal(tables.host_s, plain.host_s)
    assert "from the roofline: send: send; host: host" in tables.evidence.source
    assert "host: host" in report.filled


def test_without_an_operator_its_roofline_time_is_used(one):
    rows = profile(operators=tuple(o for o in OPERATORS if o != "mlp up"), noise=0.01)
    tables, report = fitted(rows)
    assert "layer: mlp up" in report.filled
    assert abs(tables.layer_s[64] - one[0].layer_s[64]) > 1e-6
    layer = next(e.log_sd for e in tables.evidence.errors if e.part == "layer")
    assert layer > 2 * next(e.log_sd for e in one[0].evidence.errors if e.part == "layer")


def test_an_error_of_a_part_is_the_spread_of_its_held_out_points(one):
    errors = {error.part: error.log_sd for error in one[0].evidence.errors}
    assert 0.005 < errors["layer"] < 0.03
    assert 0.005 < errors["decode"] < 0.04
    assert errors["host"] == 0.5


def test_an_unknown_error_is_left_out_and_the_rooflines_counts(tmp_path, one):
    few = profile(operators=("mlp up",))
    few = few.where(np.arange(len(few)) < 2)
    tables, report = fitted(few)
    plain = {
        error.part: error.log_sd for error in roofline(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST).evidence.errors
    }
    assert (tables.evidence.fit, report.operators) == ((), ())
    assert all(error.log_sd == pytest.approx(plain[error.part]) for error in tables.evidence.errors)
    assert {"layer", "decode"} < {error.part for error in tables.evidence.errors}
    assert "too few points to estimate an error of mlp up" in tables.evidence.source
    write_profile(few, tmp_path / "few.parquet")
    place = (f"{tmp_path / 'few.parquet'}", MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST)
    assert [profile_tables(*place, cache=tmp_path)[1] for _ in range(2)] == [report, report]


def test_errors_are_not_reported_for_another_deployment(measured):
    assert fitted(measured)[0].evidence.fit
    assert fitted(measured, tp=4)[0].evidence.fit == ()
    tables, report = fitted(measured, gpu=catalog.gpu("A100-80GB"))
    assert (tables.evidence.fit, report.operators) == ((), ())
    assert "no errors are reported for" in tables.evidence.source


def test_reach_is_what_was_measured(one):
    known = {"tokens": 2048, "seqs": 128, "chunk": 2048, "kv_tokens": 128 * 8192}
    assert one[0].evidence.reach == Reach(**known, context=2048 + 8192, prefix=8192)


@pytest.mark.parametrize(
    ("left", "report"),
    [
        (("prefill", "decode"), {"context": 8192, "chunk": 2048, "prefix": 0}),
        (("prefill",), {"context": 2048, "chunk": 2048, "prefix": 0}),
        (("decode",), {"context": 8192, "chunk": None, "prefix": None}),
        ((), {"context": None, "chunk": None, "prefix": None}),
    ],
)
def test_prompts_measured_without_prefix_bound_the_prefix_alone(left, report):
    parts = [f"{part} attention" for part in left]
    rows = profile(operators=(*LAYER, *parts))
    complete = rows.where((rows["operator"] != "prefill attention") | (rows["context"] == 0))
    reach = fitted(complete)[0].evidence.reach
    assert {name: getattr(reach, name) for name in report} == report


def test_another_degree_is_predicted_by_physics_with_a_larger_error(measured, one):
    tables, report = fitted(measured, tp=4)
    assert tables.layer_s[1:] == pytest.approx(truth(4), rel=0.06)
    assert {estimator for _, estimator in report.picked} == {"physics"}
    assert "measured at TP 1, 2, carried to TP 4 by physics" in tables.evidence.source
    assert all(
        far.log_sd > near.log_sd
        for far, near in zip(tables.evidence.errors[:1], one[0].evidence.errors[:1], strict=True)
    )
    with pytest.raises(ProfileError, match="only the estimator physics"):
        fitted(measured, tp=4, estimator="monotone")


def test_another_gpu_or_model_is_named(measured):
    tables, _ = fitted(measured, gpu=catalog.gpu("H200"))
    assert "measured on H100, carried to H200" in tables.evidence.source
    other = catalog.model("qwen3-32b")
    assert "measured for llama-3.1-8b, carried to qwen3-32b" in fitted(measured, model=other)[0].evidence.source


def test_profiles_that_do_not_apply_to_a_deployment_are_refused(measured):
    with pytest.raises(ProfileError, match=r"has fp8 weights, and .* measured with bfloat16"):
        fitted(measured, limits=replace(LIMITS, weight_dtype="fp8"))
    with pytest.raises(ProfileError, match="is of Abacus 9"):
        fitted(profile(operators=LAYER, gpu="Abacus 9"))
    with pytest.raises(ProfileError, match="is of the model nobody-1b"):
        fitted(profile(operators=LAYER, model="nobody-1b"))
    with pytest.raises(UnknownNameError, match="estimator"):
        fitted(measured, estimator="oracle")


def test_kernels_of_no_model_give_tables_of_any_model():
    rows = []
    bandwidth, peak = GPU.bandwidth_bytes_per_s * 0.5, GPU.flops("bfloat16") * 0.4
    for m in (1, 16, 128, 1024, 4096):
        for n in (1024, 4096, 8192, 32768):
            for k in (1024, 4096, 16384):
                seconds = max(2 * m * n * k / peak, DTYPE_BYTES["bfloat16"] * n * k / bandwidth) + 5e-6
                rows.append({"operator": "gemm", "dtype": "bfloat16", "tokens": m, "n": n, "k": k, "seconds": seconds})
    tables, report = fitted(profile(operators=(), more=tuple(rows), model=""))
    assert dict(report.picked) == {"gemm": "tables"}
    assert "prefill: prefill attention" in report.filled
    slower = tables.layer_s[1] / roofline(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST).layer_s[1]
    assert slower == pytest.approx(0.8 / 0.5, rel=0.12)


def test_decodes_next_to_prompts_take_their_measured_time():
    rows = []
    for chunk in (64, 256, 1024):
        for seqs in (4, 16, 64):
            for mean in (256, 1024, 4096):
                prompt = _alone("prefill attention", {"chunk": [chunk], "context": [0]})
                decode = _alone("decode attention", {"seqs": [seqs], "kv_tokens": [seqs * mean]})
                rows.append(
                    {"operator": "mixed attention", "tp": 1, "dtype": "bfloat16", "seconds": prompt + 1.7 * decode}
                    | {"chunk": chunk, "seqs": seqs, "kv_tokens": seqs * mean}
                )
    tables, report = fitted(profile(more=tuple(rows)))
    assert tables.beside_prompts[20, 100] == pytest.approx(1.7, rel=0.1)
    assert any("their sum is off by" in note for note in report.notes)


def _alone(operator, columns):
    from lengthwise.cost.estimators.points import combined, shard_points

    place = shard_points(operator, {name: np.array(c) for name, c in columns.items()}, target())
    return float(combined(place.parts, FACTORS)[0])


def test_both_engines_read_decodes_next_to_prompts_alike():
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)
    made = deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=200)
    factor = np.full(made.cost.decode_s.shape, 1.5)
    slow = replace(made, cost=replace(made.cost, beside_prompts=factor))
    requests = Workload(np.arange(12) * 0.01, np.full(12, 100), np.full(12, 20))
    fast, a, b = (simulate(requests, made), simulate(requests, slow), simulate(requests, slow, engine="reference"))
    assert np.array_equal(a.requests.finished_s, b.requests.finished_s)
    assert a.end_s > fast.end_s


def test_errors_reach_and_fit_survive_a_file_and_older_files_load(tmp_path, one):
    tables = replace(one[0], beside_prompts=np.full(one[0].decode_s.shape, 1.25))
    save(tables, tmp_path / "new.npz")
    back = load(tmp_path / "new.npz")
    assert back.evidence == tables.evidence
    assert np.array_equal(back.beside_prompts, tables.beside_prompts)
    newer = ("error_", "fit_", "reach", "beside_prompts")
    arrays = {n: a for n, a in read_npz(tmp_path / "new.npz").items() if not n.startswith(newer)}
    write_npz(tmp_path / "old.npz", arrays)
    old = load(tmp_path / "old.npz")
    assert (old.evidence, old.beside_prompts) == (CostEvidence(tables.evidence.source), None)
    write_npz(tmp_path / "bad.npz", {**arrays, "error_part": ["layer"]})
    with pytest.raises(ProfileError, match="error_log_sd"):
        load(tmp_path / "bad.npz")


def test_a_bound_that_is_not_known_stays_unknown_in_a_file(tmp_path, one):
    known = replace(one[0], evidence=CostEvidence(errors=(PartError("step", 0.1),), reach=Reach(tokens=7)))
    save(known, tmp_path / "t.npz")
    assert load(tmp_path / "t.npz").evidence.reach == Reach(tokens=7)


@pytest.mark.parametrize(
    ("saved", "reach"),
    [
        ([7, -1, 5, 0, 9], Reach(tokens=7, chunk=5, kv_tokens=9, prefix=0)),
        ([7, -1, 5, 8, 9], Reach(tokens=7, chunk=5, context=8, kv_tokens=9)),
    ],
)
def test_files_from_before_prefixes_are_read(tmp_path, one, saved, reach):
    save(one[0], tmp_path / "t.npz")
    write_npz(tmp_path / "t.npz", read_npz(tmp_path / "t.npz") | {"reach": np.array(saved)})
    assert load(tmp_path / "t.npz").evidence.reach == reach


def test_deployments_take_a_profile_and_cache_its_tables(tmp_path, measured, one, monkeypatch):
    monkeypatch.setattr("lengthwise.cost.tables.cache_folder", lambda _: tmp_path / "cache")
    path = tmp_path / "h100.parquet"
    write_profile(measured, path)
    limits = replace(LIMITS, max_model_len=LONGEST)
    made = deploy("llama-3.1-8b", "H100", limits=limits, cost=f"profile:{path}")
    assert made.cost.layer_s == pytest.approx(one[0].layer_s)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    place = (MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST)
    first, second = (profile_tables(f"{path}#physics", *place, cache=tmp_path / "own") for _ in range(2))
    assert first[1] == second[1]
    assert np.array_equal(first[0].decode_s, second[0].decode_s)
    linear = deploy("llama-3.1-8b", "H100", limits=limits, cost=f"profile:{path}#linear")
    assert linear.cost.layer_s != pytest.approx(made.cost.layer_s), "SamuLLM's by its name"
    with pytest.raises(UnknownNameError, match="oracle"):
        deploy("llama-3.1-8b", "H100", cost=f"profile:{path}#oracle")
    with pytest.raises(ProfileError, match="there is no file"):
        deploy("llama-3.1-8b", "H100", cost="profile:nowhere.parquet")


@pytest.mark.slow
def test_kernels_of_vllm_on_a_real_gpu_are_predicted_within_two_percent(shared):
    root = shared("data/profiles/llmservingsim/v1/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16")
    gpu = catalog.gpu("RTX-PRO-6000")
    place = (MODEL, gpu, catalog.default_node(gpu, 2), Parallelism(1), LIMITS, LONGEST)
    tables, report = fit_profile(import_llmservingsim(root), Target(*place), estimator="tables")
    errors = {fit.name: fit.median_error for fit in report.operators}
    assert max(errors.values()) < 0.02
    assert all(error.log_sd < 0.1 for error in tables.evidence.errors if error.part in ("layer", "prefill", "decode"))
    assert 1.2 < np.median(tables.beside_prompts[20:, 100:]) < 2.5


def test_made_up_rows_have_no_error_and_are_named_wherever_the_tables_go(tmp_path, measured, one):
    """Errors of made-up points against each other would claim an unsurpassable accuracy."""
    names = ["prefill attention", "decode attention"]
    invented = replace(measured, metadata=replace(measured.metadata, machine={MADE_UP: {name: [1] for name in names}}))
    write_profile(invented, tmp_path / "p.parquet")
    tables, report = fitted(read_profile(tmp_path / "p.parquet"))
    assert not {fit.operator for fit in tables.evidence.fit} & set(names)
    assert not {fit.operator for fit in report.compared} & set(names)
    assert any(NOT_MEASURED in note and "decode attention at TP 1" in note for note in report.notes)
    assert NOT_MEASURED in tables.evidence.source
    assert not any("too few points" in note for note in report.notes)
    widened, known = ({e.part: e.log_sd for e in of.evidence.errors} for of in (tables, one[0]))
    plain = {e.part: e.log_sd for e in roofline(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST).evidence.errors}
    for part in ("prefill", "decode"):
        assert widened[part] >= plain[part] > known[part]
    assert widened["layer"] == known["layer"]
    save(tables, tmp_path / "t.npz")
    assert NOT_MEASURED in load(tmp_path / "t.npz").evidence.source
    assert NOT_MEASURED not in fitted(invented, tp=2)[0].evidence.source
