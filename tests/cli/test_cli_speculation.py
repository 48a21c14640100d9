"""lengthwise speculation as a user sees it."""

from __future__ import annotations

import json

import pytest

SCENARIO = """
[workload]
prompt = 200
output = 60
request_rate = 2
[deployment]
model = "llama-3.1-8b"
gpu = "H100"
host = "vllm"
[deployment.speculation]
method = "ngram"
num_speculative_tokens = 2
acceptance = %s
[engine]
max_num_seqs = 32
max_model_len = 1024
[search]
seeds = 2
precision = 0.1
limits = { "ttft.p90" = "1s" }
[run]
model_draws = 10
"""


@pytest.fixture
def scenario(tmp_path):
    def written(acceptance):
        path = tmp_path / "chat.toml"
        path.write_text(SCENARIO % acceptance)
        return path

    return written


WORDS = ("--loads", "0.1,0.8", "--requests", "300")


def test_the_answer_has_table_report_and_json(cli, scenario, tmp_path):
    out, page = tmp_path / "speculation.json", tmp_path / "speculation.html"
    done = cli("speculation", scenario("0.9"), *WORDS, "--tokens", "2", "--json", out, "--report", page)
    assert done.code == 0, done.err
    assert "N-gram with 2 tokens shortens the mean JCT at every load up to 80 %" in done.out
    text = page.read_text()
    assert "Does speculative decoding help at your load?" in text
    assert text.index('<dl class="numbers">') < text.index("<figure")
    written = json.loads(out.read_text())
    assert written["format"] == "lengthwise.speculation"
    without, with_two = written["lengths"]
    assert (without["tokens"], with_two["tokens"]) == (0, 2)
    assert with_two["tpot_speedup"][0]["value"] > 1.8
    assert with_two["tpot_speedup"][0]["model_low"] <= with_two["tpot_speedup"][0]["value"]
    assert with_two["capacity_rps"]["value"] > without["capacity_rps"]["value"]
    assert with_two["tokens_per_step"][0]["value"] == pytest.approx(1 + 0.9 + 0.81, rel=0.1)
    assert written["stops_at_load"]["2"] is None


def test_drafts_that_are_never_accepted_only_cost(cli, scenario):
    done = cli("speculation", scenario("0.0"), *WORDS, "--tokens", "2", "--json", "-")
    written = json.loads(done.out)
    assert written["stops_at_load"]["2"] == 0
    assert any("lengthens the mean JCT even at 10 % load" in answer for answer in written["answers"])


def test_mistakes_are_one_sentence(cli, scenario):
    plain = scenario("[0.5, 0.5]")
    for words, message in (
        (("--tokens", "3"), "must be from 1 to 2"),
        (("--tokens", "two"), "--tokens takes whole numbers"),
        (("--loads", "0"), "loads must be above 0"),
        (("--requests", "100000000"), "requests must be from 100 to"),
    ):
        done = cli("speculation", plain, *words)
        assert done.code == 2
        assert message in done.err.replace("\n", " ")
    plain.write_text(plain.read_text().partition("[deployment.speculation]")[0])
    done = cli("speculation", plain)
    assert done.code == 2
    assert "needs a table [deployment.speculation]" in done.err.replace("\n", " ")
