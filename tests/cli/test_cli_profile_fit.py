"""profile fit prints errors by estimator and region, and writes tables that simulations take."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))

from made_profiles import profile

from lengthwise.cost import load
from lengthwise.cost.profiles import write_profile

ASKED = ("--model", "llama-3.1-8b", "--gpu", "H100", "--max-num-seqs", 32, "--max-model-len", 2048)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("profile") / "h100.parquet"
    operators = ("mlp up", "mlp down", "decode attention")
    write_profile(profile((1, 2), operators=operators, noise=0.01), file)
    return file


def test_errors_by_estimator_and_what_was_taken(cli, path):
    done = cli("profile", "fit", path, *ASKED)
    assert done.code == 0, done.err
    assert "* physics" in done.out
    assert "from the roofline: layer: norms, qkv projection" in done.out
    assert "measured up to: 2,048 tokens, 128 seqs" in done.out


def test_a_file_of_tables_for_each_degree(cli, path, tmp_path):
    done = cli("profile", "fit", path, *ASKED, "--tp", 1, "--tp", 4, "--out", tmp_path / "t.npz", "--json")
    assert done.code == 0, done.err
    one, four = json.loads(done.out)["fits"]
    assert (one["tp"], four["tp"]) == (1, 4)
    assert any("carried to TP 4 by physics" in note for note in four["notes"])
    assert four["errors"]["layer"] > one["errors"]["layer"]
    assert load(tmp_path / "t-tp4.npz").source == four["source"]


def test_what_cannot_be_fitted_is_said_in_a_sentence(cli, path, tmp_path):
    done = cli("profile", "fit", path, *ASKED, "--weight-dtype", "fp8")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "use a profile of fp8" in done.err
    assert cli("profile", "fit", path, *ASKED, "--estimator", "oracle").code == 2
    assert cli("profile", "fit", tmp_path / "none.parquet", *ASKED).code == 2
