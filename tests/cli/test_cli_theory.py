"""lengthwise theory as a user sees it."""

from __future__ import annotations

import json
import re

import pytest

FAST = ("--requests", "2000", "--seeds", "3")


def test_bins_of_uniform_times(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, page = tmp_path / "bins.json", tmp_path / "bins.html"
    finished = cli("theory", "multibin", "--batch", 8, "--bins", "1,4", "--uniform", 1, 20, "--target", 0.95,
                "--rate", 0.3, "--json", out, "--report", page, *FAST)  # fmt: skip
    assert finished.code == 0, finished.err
    assert "14 bins with known lengths reach 95 % of the capacity" in finished.out
    assert "5.75 10.5 15.25" in finished.out
    reported = json.loads(out.read_text())
    assert reported["rows"][1]["throughput_rps"] == pytest.approx(0.647919, rel=1e-5)
    assert reported["rows"][1]["simulated_rps"]["value"] == pytest.approx(0.647919, rel=0.03)
    assert "What bins are worth" in page.read_text()


def test_bins_of_exponential_times_go_by_the_recursion(cli):
    finished = cli("theory", "multibin", "--exponential", 0.5, "--bins", "2", "--requests", 0, "--json", "-")
    assert finished.code == 0, finished.err
    (row,) = json.loads(finished.out)["rows"]
    assert row["cuts_s"] == pytest.approx([1.99969], rel=1e-4)
    assert row["simulated_rps"]["value"] is None


def test_lengths_of_files_and_presets(cli, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n200\n300\n400\n")
    finished = cli("theory", "multibin", "--lengths", path, "--batch", 2, "--bins", "1,2", *FAST)
    assert finished.code == 0, finished.err
    assert "4 lengths of" in finished.out
    finished = cli("theory", "multibin", "--lengths", "chat-1m", "--bins", "1,2", "--requests", 0, "--quiet")
    assert (finished.code, finished.out) == (0, "")


def test_predictors_of_a_given_accuracy_gain_less(cli):
    def gained(*more):
        finished = cli("theory", "multibin", "--uniform", 1, 20, "--bins", "4", "--requests", 0, "--json", "-", *more)
        assert finished.code == 0, finished.err
        return json.loads(finished.out)["rows"][0]

    right, wrong = gained(), gained("--accuracy", "4=0.6297")
    assert wrong["throughput_rps"] < right["throughput_rps"]
    assert wrong["accuracy"] == pytest.approx(0.6297)
    assert gained("--error", 0.2)["accuracy"] == pytest.approx(1 - 0.2 * 6 / 4)


def test_no_latency_is_reported_where_one_server_cannot_keep_up(cli):
    finished = cli("theory", "multibin", "--uniform", 1, 20, "--bins", "1,8", "--rate", 0.6, "--requests", 0)
    assert finished.code == 0, finished.err
    one, eight = (line for line in finished.out.splitlines() if re.match(r"\s+[18]  ", line))
    assert "latency s" in finished.out
    assert "queue)" in finished.out
    assert ("\N{EN DASH}" in one, "\N{EN DASH}" in eight) == (True, False)


def test_queue(cli, tmp_path):
    page = tmp_path / "queue.html"
    finished = cli("theory", "queue", "--exponential", 1, "--load", "0.05,0.9", "--slots", 4, "--report", page)
    assert finished.code == 0, finished.err
    assert "At a load of 0.9, known lengths would reduce the mean time" in finished.out
    assert "not worth it" in finished.out
    assert page.stat().st_size > 10_000


def test_queue_takes_a_range_and_a_predictors_own_answers(cli, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("100, 120\n200, 150\n300, 500\n50, 60\n")
    finished = cli("theory", "queue", "--pairs", path, "--load", "0.5..0.9", "--json", "-")
    assert finished.code == 0, finished.err
    reported = json.loads(finished.out)
    assert len(reported["loads"]) == 10
    assert reported["orders"]["srpt"][-1]["mean_s"] < reported["orders"]["sprpt"][-1]["mean_s"]


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["multibin"], "one of --uniform"),
        (["multibin", "--uniform", 1, 2, "--exponential", 1], "--uniform and --exponential"),
        (["multibin", "--uniform", 5, 1], "low < high"),
        (["multibin", "--uniform", "nan", 1], "low < high"),
        (["multibin", "--exponential", 0], "above 0"),
        (["multibin", "--uniform", 1, 2, "--batch", 0], "batch must be"),
        (["multibin", "--uniform", 1, 2, "--bins", "0"], "bins must be"),
        (["multibin", "--uniform", 1, 2, "--bins", "1,100000", "--requests", 0], "at most 1,024"),
        (["multibin", "--uniform", 1, 2, "--bins", "2,4", "--accuracy", "8=0.5"], "given for 8 bins"),
        (["multibin", "--uniform", 1, 2, "--bins", "two"], "whole numbers between commas"),
        (["multibin", "--uniform", 1, 2, "--target", 1.2], "a share below 1"),
        (["multibin", "--uniform", 1, 2, "--rate", -1], "rate"),
        (["multibin", "--uniform", 1, 2, "--error", 0.7], "together at most 1"),
        (["multibin", "--uniform", 1, 2, "--accuracy", "much"], "K=SHARE"),
        (["multibin", "--uniform", 1, 2, "--boundaries", "best"], "optimal, equal, learned"),
        (["multibin", "--lengths", "chat-1x"], "chat-1m"),
        (["multibin", "--lengths", "nowhere.txt"], "nowhere.txt"),
        (["multibin", "--lengths", "chat-1m", "--token-time", 0], "--token-time"),
        (["queue", "--exponential", 1, "--load", "1.5"], "between 0 and 1"),
        (["queue", "--exponential", 1, "--load", "high"], "--load takes"),
        (["queue", "--exponential", 1, "--slots", 0], "slots must be a whole number of at least 1"),
        (["queue", "--exponential", 1, "--error", -1], "at least 0"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(cli, words, states):
    finished = cli("theory", *words)
    assert finished.code == 2, (finished.out, finished.err)
    assert states in finished.err


def test_files_of_numbers_that_cannot_be_read(cli, tmp_path):
    for text, states in (
        ("", "no numbers"),
        ("1\nx\n", "numbers"),
        ("1 2\n\n3\n", "line 3 has 1: '3'"),
        ("1\nnan\n", "finite"),
    ):
        path = tmp_path / "lengths.txt"
        path.write_text(text)
        finished = cli("theory", "multibin", "--lengths", path)
        assert (finished.code, states in finished.err) == (2, True), (text, finished.err)
    path.write_text("1 2 3\n")
    assert "two numbers a line" in cli("theory", "queue", "--pairs", path).err
