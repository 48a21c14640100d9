"""``lengthwise predict``: what a newcomer sees, what is written, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from lengthwise import config, predict, workload
from lengthwise.cli import main
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.usecases import variants

REQUESTS = {"Name the capital of": 6, "Explain the history of": 150, "Write an essay about": 500}


def rows(models=("m",), seed=0):
    rng = np.random.default_rng(seed)
    for ask, n in REQUESTS.items():
        for i in range(24):
            for model in models:
                tokens = max(1, round(n * np.exp(0.2 * rng.normal())))
                yield {
                    "model": model,
                    "prompt": f"{ask} place {i}",
                    "output": "word " * tokens,
                    "output_tokens": tokens,
                }


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows()))
    return path


def run(*argv) -> int:
    return main([str(part) for part in ("predict", *argv)])


@pytest.mark.parametrize("kind", ["ecdf", "constant", "buckets"])
def test_every_kind_is_trained_evaluated_and_shown(log, tmp_path, capsys, kind) -> None:
    out = tmp_path / "mine.lwp"
    assert run("train", log, "--out", out, "--kind", kind) == 0
    learned = re.search(r"trained on ([\d,]+) samples, [\d,]+ held out", capsys.readouterr().out)
    assert learned is not None
    assert run("eval", out, log) == 0
    assert "mean absolute error" in capsys.readouterr().out
    assert run("show", out) == 0
    shown = capsys.readouterr().out
    assert "log.jsonl" in shown
    assert "on held-out prompts" in shown
    assert re.search(rf"^samples +{learned[1]} *$", shown, re.MULTILINE)  # without those held out


@pytest.mark.slow
def test_the_lexical_predictor_ranks_and_an_unfair_test_is_reported(log, tmp_path, capsys) -> None:
    out, page, data = tmp_path / "mine.lwp", tmp_path / "page.html", tmp_path / "scores.json"
    assert run("train", log, "--out", out, "--test-share", "0.3", "--seed", "1") == 0
    capsys.readouterr()
    assert run("eval", out, log, "--report", page, "--json", data) == 0
    message = capsys.readouterr().out
    assert "not a fair test" in message
    assert "Content-Security-Policy" in page.read_text()
    scores = json.loads(data.read_text())["evaluations"][0]["scores"]
    assert scores["tau"]["value"] > 0.6
    assert run("show", out, "--prompt", "Write an essay about place 3", "--model", "m") == 0
    assert "90 % interval" in capsys.readouterr().out
    assert run("show", out, "--prompt", "Write an essay about place 3", "--tokens-so-far", "200") == 0
    assert "given 200 generated" in capsys.readouterr().out


def test_windows_with_few_requests_or_no_use_are_warned_of(log, tmp_path, capsys) -> None:
    assert run("train", log, "--out", tmp_path / "mine.lwp") == 0
    message = capsys.readouterr().out
    assert "held-out prompts resemble a training prompt (bigram Jaccard of 0.6 or more)" in message
    assert run("eval", tmp_path / "mine.lwp", log) == 0
    message = capsys.readouterr().out
    assert "reads the output so far at" in message or "the first prediction given the tokens so far" in message
    assert "tokens so far, fewer than 100 requests run: scores are unreliable" in message
    assert "R2 among running requests is below 0 at" in message
    shown = [float(number) for line in message.splitlines() for number in line.split()[3:4] if line[:1] == " "]
    assert min(shown) >= -1


def test_mathematics_is_noted(tmp_path, capsys) -> None:
    requests = [f"Tom has {i} apples and eats {i // 2}. How many apples does he have?" for i in range(120)]
    lines = (json.dumps({"prompt": ask, "output_tokens": 30 + 7 * i % 90}) for i, ask in enumerate(requests))
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    assert run("eval", "default", tmp_path / "sums.jsonl") == 0
    assert "120 requests ask for mathematics; their order is hardly predicted" in capsys.readouterr().out
    assert run("show", "default", "--prompt", requests[9]) == 0
    assert "note: this prompt is mathematical" in capsys.readouterr().out
    assert run("show", "default", "--prompt", "Write an essay about rivers.") == 0
    assert "mathematics" not in capsys.readouterr().out


def test_two_files_are_scored_together_and_each(log, tmp_path, capsys) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps(row) for row in rows(("n",), 5)))
    run("train", log, "--out", tmp_path / "e.lwp", "--kind", "ecdf", "--test-share", "0")
    capsys.readouterr()
    assert run("eval", tmp_path / "e.lwp", log, other, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["evaluations"]] == ["all", "log.jsonl", "other.jsonl"]
    assert found["format"] == "lengthwise.prediction"


def test_lengths_without_prompts_train_too(tmp_path, capsys) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "\n".join(f"{i},{i * 2}" for i in range(1, 50)))
    assert run("train", path, "--out", tmp_path / "x.lwp", "--kind", "ecdf") == 0
    assert "without prompts" in capsys.readouterr().out
    assert run("eval", tmp_path / "x.lwp", path) == 0


@pytest.mark.parametrize(
    ("argv", "states"),
    [
        (["train", "LOG", "--out", "x.lwp", "--kind", "lexikal"], "Did you mean: lexical?"),
        (["train", "none.jsonl", "--out", "x.lwp"], "there is no file"),
        (["train", "LOG", "--out", "nowhere/x.lwp"], "does not exist"),
        (["train", "LOG", "--out", "LOG"], "also an input"),
        (["eval", "none.lwp", "LOG"], "there is no predictor file"),
        (["eval", "LOG", "LOG"], "must be a complete file"),
        (["show", "LOG"], "must be a complete file"),
        (["collect", "LOG", "--url", "ftp://x", "--model", "m", "--out", "y.jsonl"], "http"),
    ],
)
def test_unusable_input_is_reported_in_one_line(log, tmp_path, capsys, monkeypatch, argv, states) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*[log if part == "LOG" else part for part in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert states in error


def test_the_shipped_predictor_has_a_card_and_answers(capsys) -> None:
    assert run("show") == 0
    shown = capsys.readouterr().out
    assert "Apache-2.0" in shown
    assert "weaknesses" in shown
    assert run("show", "default", "--prompt", "Write a long essay about rivers.", "--model", "gpt-x") == 0
    assert "unknown to the predictor" in capsys.readouterr().out


def test_ambiguous_input_is_reported_before_the_scores(cli, tmp_path):
    rows = [{"pormpt": "a", "output": "b c", "finish_reason": "because"}, {"pormpt": "b", "output_tokens": 4}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = cli("predict", "train", tmp_path / "log.jsonl", "--out", tmp_path / "x.lwp", "--kind", "ecdf")
    assert out.code == 0, out.err
    for message in (
        "2 of 2 rows have no prompt",
        "pormpt (did you mean prompt?)",
        "treated as regular stops: because (1)",
        "1 of 2 rows were estimated",
        "2 samples are few",
    ):
        assert message in out.out
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "outptu": "b"}\n')
    assert ". Rename: outptu to output" in cli("predict", "eval", "default", tmp_path / "bad.jsonl").err
    assert "did you mean: default?" in cli("predict", "show", "defalt").err


def test_a_log_is_a_workload_to_look_at(cli, tmp_path):
    rows = [{"prompt": "cause", "output_tokens": n, "model": "m"} for n in (4, 8, 9)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "requests" in cli("workload", "show", tmp_path / "log.jsonl").out
    out = cli("theory", "queue", "--lengths", tmp_path / "log.jsonl", "--load", "0.5")
    assert out.code == 0, out.err


def test_a_trace_of_sessions_trains_a_predictor_of_later_turns(cli, tmp_path):
    rng = np.random.default_rng(0)
    own, n = rng.standard_normal(60), 240
    output = np.ceil(np.exp(4 + np.tile(own, 4) + 0.5 * rng.standard_normal(n))).astype(int)
    extra = {"session": np.tile(np.arange(60), 4), "turn": np.repeat(np.arange(4), 60)}
    trace, predictor = tmp_path / "t.parquet", tmp_path / "p.lwp"
    workload.write(Workload(np.arange(float(n)), np.full(n, 9), output, extra=extra), trace)
    done = cli("predict", "train", trace, "--kind", "in_session", "--out", predictor)
    assert done.code == 0, done.err
    assert "in_session: trained on" in done.out
    assert "on held-out sessions" in done.out
    done = cli("predict", "eval", predictor, trace)
    assert done.code == 0, done.err
    two = cli("predict", "train", trace, trace, "--kind", "in_session", "--out", tmp_path / "q.lwp")
    assert two.code == 2
    assert "learns from one trace; there are 2 files" in two.err


def test_a_predictor_of_sessions_finds_them_in_a_replayed_trace_and_refuses_one_without(cli, tmp_path):
    """Two chats of many turns: the first one's answers are short, the second one's are long."""
    n = 80
    output = np.where(np.arange(n) % 2, 400, 5)
    sizes = 1 + np.arange(n) // 2
    ids = [[1000 * (i % 2) + k for k in range(size)] for i, size in enumerate(sizes)]
    prefixes = SharedPrefixes(512, np.cumsum([0, *sizes]), np.concatenate(ids))
    chats = Workload(np.arange(float(n)), 512 * sizes + 1, output, prefixes=prefixes)
    plain = Workload(chats.arrival_s, chats.prompt_tokens, output)
    trained = predict.InSession(predict.Ecdf()).fit(predict.samples_of(workload.find_sessions(chats)))
    predict.save(trained, tmp_path / "p.lwp")
    for name, one in (("chats", chats), ("plain", plain)):
        workload.write(one, tmp_path / f"{name}.parquet")
    scenario = """
        [workload]
        trace = "NAME.parquet"
        [deployment]
        model = "llama-3.1-8b"
        gpu = "H100"
        [predictor]
        kind = "model"
        file = "p.lwp"
    """
    (tmp_path / "chats.toml").write_text(scenario.replace("NAME", "chats"))
    predicted = variants.build(config.load(tmp_path / "chats.toml"))[0].workload(0).predicted_tokens
    assert predicted[10::2].max() < predicted[11::2].min()
    (tmp_path / "plain.toml").write_text(scenario.replace("NAME", "plain"))
    refused = cli("simulate", tmp_path / "plain.toml")
    assert refused.code == 2
    assert "the workload has no sessions" in refused.err
