"""The table [predictor]: which predictor is used, what policies get from it, and that it runs."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise import config, engine, predict
from lengthwise import workload as w
from lengthwise.config.sections import PARAMETERS
from lengthwise.schema.errors import InputError, ScenarioError
from lengthwise.schema.records import Status
from lengthwise.usecases import variants
from lengthwise.usecases.requests import search_load

WORKLOAD = """
[workload]
isl = { kind = "uniform", low = 10, high = 900 }
osl = { kind = "lognormal", median = 90, p90 = 300 }
correlation = 0.6
num_requests = 120
request_rate = 20
max_output_tokens = 1500
"""
DEPLOYMENT = '[deployment]\nmodel = "llama-3-8b"\ngpu = "H100"\n'
KINDS = {
    "oracle": "",
    "constant": "",
    "ecdf": "",
    "bucket_ecdf": "",
    "lognormal_error": "sigma = 0.4",
    "bin_neighbour": "boundaries = 8\np = 0.2",
    "confusion": "boundaries = [0, 100, 2000]\nmatrix = [[0.8, 0.2], [0.4, 0.6]]",
    "quantised": "boundaries = 4",
    "same": "tokens = 70.0",
    "reversed": "",
}


def requested(kind, keys="", workload=WORKLOAD, rest="", folder="."):
    table = f'[predictor]\nkind = "{kind}"\n{keys}\n' if kind else ""
    return config.loads(f"{workload}\n{DEPLOYMENT}{table}{rest}", folder=folder)


def requests(*args, seed=0, **kwargs):
    return variants.build(requested(*args, **kwargs))[0].workload(seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_predicts_every_request_at_every_window(kind):
    got, plain = requests(kind, KINDS[kind]), requests("")
    assert plain.predicted_tokens is None
    assert plain.predictions is None
    np.testing.assert_array_equal(got.output_tokens, plain.output_tokens)
    np.testing.assert_array_equal(np.diff(got.predictions.start), -(-got.output_tokens // 50))
    np.testing.assert_array_equal(got.predicted_tokens, got.predictions.first_tokens)


def test_all_kinds_are_tested():
    assert set(PARAMETERS) == set(KINDS) | {"none", "model", "default"}


def mean_jct_s(kind, keys=""):
    """Of thirty requests that come at once, four at a time, shortest remaining first."""
    few = WORKLOAD.replace("120", "30").replace("request_rate = 20", 'arrivals = "all_at_once"')
    complete = requested(kind, keys, few, '[scheduler]\nrank = "srtf"\n[engine]\nmax_num_seqs = 4\n')
    variant = variants.build(complete)[0]
    records = engine.simulate(variant.workload(0), variant.deployment, engine="reference")
    assert (records.requests.status == Status.FINISHED).all()
    return float(np.mean(records.requests.finished_s - records.requests.arrival_s))


def test_length_aware_ranks_run_and_knowing_is_better_than_being_misled():
    jct_s = {kind: mean_jct_s(kind, keys) for kind, keys in KINDS.items()}
    assert jct_s["oracle"] == min(jct_s.values())
    assert jct_s["reversed"] == max(jct_s.values())
    assert jct_s["oracle"] < jct_s["lognormal_error"] < jct_s["same"]


def test_the_oracle_is_right_and_the_errors_are_of_the_seed():
    got = requests("oracle")
    np.testing.assert_array_equal(got.predicted_tokens, got.output_tokens)
    one, again, other = (requests("lognormal_error", "sigma = 0.4", seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(one.predictions.total_tokens, again.predictions.total_tokens)
    wrong = [np.log(x.predicted_tokens / x.output_tokens) for x in (one, other)]
    assert not np.allclose(wrong[0], wrong[1])


def test_what_learns_learns_from_other_requests_of_the_distribution():
    got = requests("constant")
    assert len(set(got.predicted_tokens)) == 1
    assert got.predicted_tokens[0] != pytest.approx(got.output_tokens.mean(), rel=1e-6)
    assert got.predicted_tokens[0] == pytest.approx(got.output_tokens.mean(), rel=0.35)
    assert requests("constant", seed=1).predicted_tokens[0] == got.predicted_tokens[0]


def test_buckets_follow_the_prompt_length():
    got = requests("bucket_ecdf")
    assert np.corrcoef(got.predicted_tokens, got.prompt_tokens)[0, 1] > 0.8


def test_a_trained_model_from_a_file(tmp_path):
    n = 50
    samples = predict.Samples(predict.Prompts(n), np.full(n, 77), np.zeros(n, bool))
    predict.save(predict.Ecdf().fit(samples), tmp_path / "x.lwp")
    complete = requested("model", 'file = "x.lwp"\nupdate_predictions = false', folder=tmp_path)
    got = variants.build(complete)[0].workload(0)
    np.testing.assert_allclose(got.predicted_tokens, 77)
    assert len(got.predictions.total_tokens) == 120
    assert tmp_path / "x.lwp" in complete.files
    with pytest.raises(InputError, match=r"there is no predictor file"):
        requests("model", 'file = "y.lwp"', folder=tmp_path)


def test_window_statistic_and_conditional_are_handed_on():
    got = requests("ecdf", 'window_tokens = 20\nstatistic = "q0.9"\nconditional = true')
    assert got.predictions.window_tokens == 20
    assert got.predicted_tokens[0] > requests("ecdf").predicted_tokens[0]


@pytest.fixture
def trace(tmp_path):
    complete = w.generate(30, w.Joint(w.Uniform(5, 500), w.Uniform(5, 500)), w.Poisson(2.0), seed=3)
    w.write(complete, tmp_path / "trace.csv", "vidur")
    return '[workload]\ntrace = "trace.csv"'


def test_a_replayed_trace_is_predicted_but_never_trained_on(trace, tmp_path):
    got = requests("lognormal_error", "sigma = 0.3", workload=trace, folder=tmp_path)
    assert len(got.predictions) == 30
    with pytest.raises(InputError, match=r"learns from other requests .* replayed"):
        requests("ecdf", workload=trace, folder=tmp_path)
    drawn = requests("ecdf", workload=f"{trace}\nrequest_rate = 3", folder=tmp_path)
    assert drawn.predicted_tokens is not None


def test_seeds_matter_to_a_replay_only_where_errors_are_drawn(trace, tmp_path):
    chance = {
        kind: variants.build(requested(kind, KINDS[kind], workload=trace, folder=tmp_path))[0].is_random
        for kind in ("oracle", "lognormal_error", "same")
    }
    assert chance == {"oracle": False, "lognormal_error": True, "same": False}


def test_variants_and_short_forms():
    rest = """
    [[variants]]
    name = "knows"
    predictor = "oracle"
    [[variants]]
    name = "guesses"
    predictor.sigma = 0.9
    """
    complete = requested("lognormal_error", "sigma = 0.2", rest=rest)
    knows, guesses = variants.build(complete)
    assert (knows.scenario.predictor.kind, guesses.scenario.predictor.kind) == ("oracle", "lognormal_error")
    assert guesses.scenario.predictor.sigma == 0.9
    np.testing.assert_array_equal(knows.workload(0).output_tokens, guesses.workload(0).output_tokens)
    short = config.loads(f'predictor = "oracle"\n{WORKLOAD}\n{DEPLOYMENT}', overrides=["predictor.window=10"])
    assert (short.predictor.kind, short.predictor.window_tokens) == ("oracle", 10)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_loads_to_the_same(kind):
    complete = requested(kind, KINDS[kind])
    assert config.loads(complete.to_toml()).predictor == complete.predictor


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("orcale", "", "oracle"),
        ("oracle", "sigma = 0.3", "sigma is not of kind oracle"),
        ("ecdf", "p = 0.3", "which takes conditional"),
        ("lognormal_error", "", "needs sigma"),
        ("lognormal_error", "sigma = -1", "at least 0"),
        ("bin_neighbour", "p = 0.1", "needs boundaries"),
        ("bin_neighbour", "boundaries = [5, 5]\np = 0.1", "at least two increasing lengths"),
        ("confusion", "boundaries = 2\nmatrix = [[1, 0], [0.5, 0.4]]", "sum to 1"),
        ("confusion", "boundaries = 2\nmatrix = [[1, 0], [1]]", "rows of one length"),
        ("model", "", "needs file"),
        ("oracle", 'statistic = "most"', "tail_inflated"),
        ("oracle", "window_tokens = 0", "at least 1"),
        ("oracle", "wndow_tokens = 10", "window_tokens"),
    ],
)
def test_unusable_settings_are_reported(kind, keys, message):
    with pytest.raises(ScenarioError, match=message):
        requested(kind, keys)


def test_lengths_between_classes_do_where_they_are_one_fewer_than_the_classes():
    matrix = "matrix = [[0.8, 0.2], [0.3, 0.7]]"
    inner = requested("confusion", f"boundaries = [100]\n{matrix}").predictor.build()
    assert inner.boundaries == [0.0, 100.0, 200.0]
    assert requested("confusion", f"boundaries = [0, 100, 900]\n{matrix}").predictor.build().boundaries[2] == 900
    assert requested("quantised", "boundaries = [100]").predictor.build().class_of([100, 101]).tolist() == [0, 1]


def test_one_word_on_predictions():
    with pytest.raises(ScenarioError, match="both predict"):
        requested("oracle", workload=f'{WORKLOAD}predicted = "mean"\n')
    assert requests("", workload=f'{WORKLOAD}predicted = "oracle"\n').predicted_tokens is not None


def test_a_search_sees_predictions_too():
    complete = requested("lognormal_error", "sigma = 0.4")
    load = search_load(complete)
    at = load.at(0, 60, 5.0)
    assert len(at.predictions) == 60
    plain = search_load(requested("none")).at(0, 60, 5.0)
    np.testing.assert_array_equal(at.output_tokens, plain.output_tokens)


@pytest.mark.parametrize("keys", ["", "conditional = true"])
def test_a_predictor_that_reads_prompts_needs_some(keys):
    if getattr(predict, "default", None) is None:
        pytest.skip("no default predictor in this build")
    with pytest.raises(InputError, match="this predictor reads prompts and the workload has none"):
        requests("default", keys)
