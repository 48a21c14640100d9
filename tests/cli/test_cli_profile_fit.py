"""profile fit prints errors by estimator and region, and writes tables that simulations take."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))

from made_profiles import profile

from lengthwise.cost import load
from lengthwise.cost.profiles import write_profile

REQUESTED = ("--model", "llama-3.1-8b", "--gpu", "H100", "--max-num-seqs", 32, "--max-model-len", 2048)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.cost.tables.cache_folder", lambda _: tmp_path / "cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("profile") / "h100.parquet"
    operators = ("mlp up", "mlp down", "decode attention")
    write_profile(profile((1, 2), operators=operators, noise=0.01), file)
    return file


def test_errors_by_estimator_and_what_was_taken(cli, path):
    done = cli("profile", "fit", path, *REQUESTED)
    assert done.code == 0, done.err
    assert "* physics" in done.out
    assert "from the roofline: layer: norms, qkv projection" in done.out
    assert "measured up to: 2,048 tokens, 128 seqs" in done.out


def test_a_file_of_tables_for_each_degree(cli, path, tmp_path):
    done = cli("profile", "fit", path, *REQUESTED, "--tp", 1, "--tp", 4, "--out", tmp_path / "t.npz", "--json")
    assert done.code == 0, done.err
    one, four = json.loads(done.out)["fits"]
    assert (one["tp"], four["tp"]) == (1, 4)
    assert any("carried to TP 4 by physics" in note for note in four["notes"])
    assert four["errors"]["layer"] > one["errors"]["layer"]
    assert load(tmp_path / "t-tp4.npz").evidence.source == four["source"]


@pytest.fixture(scope="module")
def one_operator(tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("one"), profile(operators=("mlp up",))
    for n in (1, 2, len(rows)):
        write_profile(rows.where(np.arange(len(rows)) < n), folder / f"{n}.parquet")
    return folder, len(rows)


def test_one_operator_is_shown_and_fitted(cli, one_operator):
    folder, n = one_operator
    shown = cli("profile", "show", folder / f"{n}.parquet")
    assert (shown.code, shown.out.count("mlp up")) == (0, 2)
    done = cli("profile", "fit", folder / f"{n}.parquet", *REQUESTED)
    assert done.code == 0, done.err
    assert "fitted to the profile: mlp up (" in done.out
    assert "from the roofline: decode: decode attention" in done.out
    assert "without the edges" in done.out


@pytest.mark.parametrize("n", [1, 2])
def test_one_operator_of_few_points_is_reported_without_an_error_estimate(cli, one_operator, n):
    folder, _ = one_operator
    assert cli("profile", "show", folder / f"{n}.parquet").code == 0
    done = cli("profile", "fit", folder / f"{n}.parquet", *REQUESTED)
    assert done.code == 0, done.err
    assert "TP 1: too few points to hold any out" in done.out
    assert "too few points to estimate an error of mlp up" in done.out
    assert "nan" not in done.out


def test_few_points_simulate_without_an_error_that_is_no_number(cli, one_operator, scenario_file, tmp_path):
    folder, _ = one_operator
    requested = ("simulate", scenario_file, "--set", "deployment.model=llama-3.1-8b", "--cost")
    done = cli(*requested, f"profile:{folder / '2.parquet'}", "--json", tmp_path / "f.json")
    assert done.code == 0, done.err
    assert "too few points to estimate an error of mlp up" in done.out
    assert "nan" not in done.out
    json.loads((tmp_path / "f.json").read_text(), parse_constant=lambda _: pytest.fail("not JSON"))


def test_errors_of_another_gpu_are_called_so(cli, path, scenario_file):
    done = cli("profile", "fit", path, "--model", "llama-3.1-8b", "--gpu", "A100-80GB")
    assert "of the GPU they were measured on" in done.out
    requested = (
        "simulate",
        scenario_file,
        "--set",
        "deployment.model=llama-3.1-8b",
        "--set",
        "deployment.gpu=A100-80GB",
    )
    done = cli(*requested, "--cost", f"profile:{path}")
    assert done.code == 0, done.err
    assert "measured on H100, carried to A100-80GB" in done.out
    assert "cross-validated" not in done.out


def test_an_unknown_backend_is_reported_in_one_sentence(cli, path):
    done = cli("profile", "fit", path, *REQUESTED, "--backend", "flashinfer")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no rows of the backend flashinfer; its backends are: none with a name" in done.err


def test_an_unfittable_profile_is_reported_in_one_sentence(cli, path, tmp_path):
    done = cli("profile", "fit", path, *REQUESTED, "--weight-dtype", "fp8")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "use a profile of fp8" in done.err
    assert cli("profile", "fit", path, *REQUESTED, "--estimator", "oracle").code == 2
    assert cli("profile", "fit", tmp_path / "none.parquet", *REQUESTED).code == 2
