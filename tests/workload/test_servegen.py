from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise.schema.errors import InputError, TraceError
from lengthwise.workload import describe, read

HEADER = "client,timestamp,rate,cv,pattern,arg1,arg2\n"
RATES = HEADER + (
    "0,0,0.5,1,Gamma,1.0,2\n0,600,0.1,2,Weibull,0.6,2\n1,0,0.25,1,Gamma,1.0,2\n2,600,0.05,9,Gamma,1e-300,2\n"
)


def histogram(client, window, prompt, output):
    return {"client": client, "window": window, "input_tokens": prompt, "output_tokens": output}


PMFS = [
    histogram(0, 0, [[10, 20], [0.25, 0.75]], [[5], [1.0]]),
    histogram(0, 600, [[30], [1.0]], [[6], [1.0]]),
    histogram(2, 0, [[40], [1.0]], [[7], [1.0]]),
]


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "toy_rates.csv").write_text(RATES)
    (tmp_path / "toy_length_pmfs.jsonl").write_text("\n".join(map(json.dumps, PMFS)))
    return tmp_path


def test_counts_lengths_and_clients_are_those_measured(pair):
    got = read(pair / "toy_rates.csv")
    # 300 and 60 of client 0, 30 of client 2; the 150 of client 1 have no lengths.
    assert np.bincount(got.extra["session"]).tolist() == [360, 0, 30]
    assert got.name == "servegen toy (72% of the requests: clients with lengths)"
    assert (np.diff(got.arrival_s) >= 0).all()
    first = (got.extra["session"] == 0) & np.isin(got.prompt_tokens, [10, 20])
    assert first.sum() == 300
    assert set(got.output_tokens[first]) == {5}
    assert np.mean(got.prompt_tokens[first] == 20) == pytest.approx(0.75, abs=0.1)
    assert got.arrival_s[first].max() < 600
    assert set(got.prompt_tokens[got.extra["session"] == 2]) == {40}


def test_either_file_and_the_seed_give_the_same_requests(pair):
    one, other = read(pair / "toy_rates.csv"), read(pair / "toy_length_pmfs.jsonl")
    assert one.arrival_s.tobytes() == other.arrival_s.tobytes()
    assert read(pair / "toy_rates.csv", seed=1).arrival_s.tobytes() != one.arrival_s.tobytes()


def test_a_window_starts_at_zero_and_ends_in_time(pair):
    got = read(pair / "toy_rates.csv", window_s=(300, 700))
    assert got.arrival_s[0] == 0
    assert got.arrival_s[-1] <= 400
    assert 100 < len(got) < 250
    scaled = read(pair / "toy_rates.csv", window_s=(300, 700), time_scale=0.5, max_requests=50)
    np.testing.assert_allclose(scaled.arrival_s, got.arrival_s[:50] / 2)


def test_the_folder_of_servegen_is_read_too(pair, tmp_path):
    folder = tmp_path / "m-toy"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,0.5,1,Gamma,1.0,2\n600,0.1,2,Weibull,0.6,2\n1200,0,,,,\n")
    windows = {
        "0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{5: 1.0}"},
        "600": {"input_tokens": "{30: 1.0}", "output_tokens": "{6: 1.0}"},
        "1200": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    (folder / "chunk-0-dataset.json").write_text(json.dumps(windows))
    got = read(folder)
    flat = read(pair / "toy_rates.csv")
    own = flat.extra["session"] == 0
    np.testing.assert_allclose(got.arrival_s, flat.arrival_s[own] - flat.arrival_s[own][0])
    assert got.prompt_tokens.tolist() == flat.prompt_tokens[own].tolist()
    assert got.name == "servegen m-toy"


@pytest.mark.parametrize(
    ("rates", "pmfs", "message"),
    [
        (HEADER + "0,0,x,1,Gamma,1,2\n", None, r"toy_rates\.csv, line 2: needs client, .*'0,0,x,1,Gamma,1,2'"),
        (HEADER + "0,0,-1,1,Gamma,1,2\n", None, "line 2: needs client"),
        (HEADER + "0,0,1,1,Pareto,1,2\n", None, "line 2: needs client"),
        (HEADER + "0,0,1,1,Gamma,1,2\n0,600,1", None, "line 3: needs client"),
        (RATES, '{"client": 0}', r"pmfs\.jsonl, line 1: must name client and window"),
        (RATES, '{"client": 0, "window": 0}', "line 1: must hold histograms named"),
        (RATES, '{"client": 0, "window": 0, "input_tokens": 3, "output_tokens": [[1], [1]]}', "line 1: must hold"),
        (RATES, '{"client": 0, "window": 0, "text_tokens": [[1], [1]]}', "line 1: multimodal"),
        (RATES, '{"client": 0, "wi', "line 1: not a JSON object, or cut off"),
        (HEADER + "0,9000,1,1,Gamma,1,2\n", None, "no request between 0 and 3600 s"),
    ],
)
def test_bad_files_are_named(pair, rates, pmfs, message):
    (pair / "toy_rates.csv").write_text(rates)
    if pmfs is not None:
        (pair / "toy_length_pmfs.jsonl").write_text(pmfs)
    with pytest.raises(TraceError, match=message):
        read(pair / "toy_rates.csv")


def test_a_missing_file_is_named(pair, tmp_path):
    (pair / "toy_length_pmfs.jsonl").unlink()
    with pytest.raises(TraceError, match=r"toy_length_pmfs\.jsonl: cannot be read"):
        read(pair / "toy_rates.csv")
    (tmp_path / "other.csv").write_text(RATES)
    with pytest.raises(TraceError, match="come as a pair"):
        read(tmp_path / "other.csv")
    (tmp_path / "none").mkdir()
    with pytest.raises(TraceError, match="is a folder; give a file, or a ServeGen folder"):
        read(tmp_path / "none")
    with pytest.raises(InputError, match="window_s"):
        read(pair / "toy_rates.csv", window_s=(5, 5))


def test_recorded_servegen(shared):
    path = shared("data/traces/servegen/reason_deepseekr1_rates.csv.gz")
    got = describe(read(path, window_s=(36_000, 36_600)))
    assert got.name == "servegen reason_deepseekr1"
    # The rates of the window at 36,000 s, all clients, sum to so many requests.
    import polars as pl

    rates = pl.read_csv(path).filter(pl.col("timestamp") == 36_000)["rate"]
    assert got.requests == (rates * 600).round().sum()
    assert got.duration_s == pytest.approx(600, rel=0.01)
