"""Samples from files: every layout, bad input, and the split by prompt."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.predict import Prompts, Samples
from lengthwise.predict.sample_files import MIN_TEST_PROMPTS, near_duplicates, read, read_prompts, split
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import estimated_tokens

ROW = {"model": "m", "prompt": "Say hi", "output": "Hi there, you.", "output_tokens": 5, "finish_reason": "stop"}


def jsonl(path, rows):
    text = "\n".join(json.dumps(row) for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def samples_of(texts):
    n = len(texts)
    return Samples(Prompts(n, text=texts), np.ones(n, np.int64), np.zeros(n, bool))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
def test_every_layout_of_a_file_is_equivalent(tmp_path, name) -> None:
    path, rows = tmp_path / name, [ROW, {**ROW, "prompt": "x", "finish_reason": "length"}]
    if name.endswith("csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROW)
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith("parquet"):
        pl.DataFrame(rows).write_parquet(path)
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        jsonl(path, rows)
    found = read(path)
    assert list(found.prompts.text) == ["Say hi", "x"]
    assert found.output_tokens.tolist() == [5, 5]
    assert found.censored.tolist() == [False, True]
    assert list(found.prompts.model) == ["m", "m"]
    assert found.metadata["censored"] == 1


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
BODY = {
    "model": "qwen",
    "choices": [{"message": {"content": "Hi."}, "finish_reason": "length"}],
    "usage": {"completion_tokens": 7, "prompt_tokens": 9},
}


@pytest.mark.parametrize(
    ("row", "prompt", "tokens", "model", "cut"),
    [
        ({"instruction": "Do", "input": "it", "response": "ok", "generator": "g", "n": 1}, "Do\n\nit", 1, "g", False),
        ({"request": {"messages": CHAT}, "response": BODY}, "Be short.\n\nHello", 7, "qwen", True),
        (
            {"request": json.dumps({"messages": CHAT}), "response": json.dumps(BODY)},
            "Be short.\n\nHello", 7, "qwen", True,
        ),
        ({"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B c d"}]}, "A", 2, "", False),
        ({"messages": [*CHAT, {"role": "assistant", "content": "Yes"}]}, "Be short.\n\nHello", 1, "", False),
        ({"ContextTokens": 3, "GeneratedTokens": 44.0}, None, 44, "", False),
    ],
)  # fmt: skip
def test_rows_are_understood_by_their_names(tmp_path, row, prompt, tokens, model, cut) -> None:
    found = read(jsonl(tmp_path / "x.jsonl", [row]))
    assert (found.prompts.text[0] if prompt is not None else found.prompts.text) == prompt
    assert found.output_tokens[0] == tokens
    assert (found.prompts.model[0] if found.prompts.model else "") == model
    assert found.censored[0] == cut


def test_a_batch_of_openai_takes_prompts_from_its_input(tmp_path) -> None:
    requested = [{"custom_id": "a", "method": "POST", "url": "/v1", "body": {"model": "q", "messages": CHAT}}]
    answered = [{"custom_id": "a", "response": {"status_code": 200, "body": BODY}, "error": None}]
    files = [jsonl(tmp_path / "in.jsonl", requested), jsonl(tmp_path / "out.jsonl", answered)]
    for order in (files, files[::-1]):
        found = read(order)
        assert list(found.prompts.text) == ["Be short.\n\nHello"]
        assert found.output_tokens.tolist() == [7]


def test_a_result_of_a_benchmark_is_columns(tmp_path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps({"model_id": "o", "input_lens": [3, 4], "output_lens": [10, 20], "generated_texts": ["a", "b"]})
    )
    found = read(path)
    assert found.output_tokens.tolist() == [10, 20]
    assert found.prompts.prompt_tokens.tolist() == [3, 4]


def test_failed_and_empty_outputs_are_left_out_and_counted(tmp_path) -> None:
    rows = [ROW, {**ROW, "finish_reason": "error"}, {"prompt": "x", "output": ""}]
    found = read(jsonl(tmp_path / "x.jsonl", rows))
    assert len(found) == 1
    assert found.metadata["left_out"] == 2


@pytest.mark.parametrize(
    ("content", "states"),
    [
        ("", "is empty"),
        ('{"prompt": "a", "output": "b"}\n{"prompt": "a"', "row 2 must be JSON"),
        ('{"prompt": "a"}', "row 1 must have an output .*it has prompt"),
        ('{"prompt": "a", "output_tokens": -3}', "row 1: output_tokens must be a whole number"),
        ('{"prompt": "a", "output_tokens": "many"}', "row 1: output_tokens must be a whole number"),
        ('{"prompt": "a", "output": ""}\n{"prompt": "b", "output": "", "x": 1}', "all 2 outputs"),
        ("[1, 2]", "row 1 must be a JSON object"),
        ("[]", "there is none"),
    ],
)
def test_invalid_files_are_reported_with_cause_and_location(tmp_path, content, states) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=states):
        read(path)


def test_missing_damaged_and_no_files(tmp_path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="none was given"):
        read([])
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"x" * 9999)[:40])
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "x.gz")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="cut off or damaged"):
        read(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(InputError, match="UTF-8"):
        read(tmp_path / "x.jsonl")


def test_prompts_alone_are_read_too(tmp_path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\none\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two"]
    assert read_prompts(jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"question": "b"}])) == ["a", "b"]
    with pytest.raises(InputError, match="row 1 must have a prompt"):
        read_prompts(jsonl(tmp_path / "q.jsonl", [{"x": "a"}]))


@given(st.lists(st.text(max_size=8), min_size=2, max_size=60), st.floats(0.05, 0.95), st.integers(0, 5))
def test_no_prompt_stands_on_both_sides(texts, share, seed) -> None:
    distinct = {text.strip() for text in texts}
    if len(distinct) < 2:
        with pytest.raises(InputError, match="two different prompts"):
            split(samples_of(texts), share, seed)
        return
    parts = split(samples_of(texts), share, seed)
    sides = [{text.strip() for text in side.prompts.text} for side in (parts.train, parts.test)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == distinct
    assert len(parts.train) + len(parts.test) == len(texts)
    assert (parts.prompts, parts.repeated) == (len(distinct), len(texts) - len(distinct))


def test_a_prompt_is_on_the_same_side_whatever_other_prompts_there_are() -> None:
    texts = [f"prompt {i}" for i in range(400)]
    held_out = set(split(samples_of(texts), 0.25, 3).test.prompts.text)
    again = set(split(samples_of(texts[100:300]), 0.25, 3).test.prompts.text)
    assert again == held_out & set(texts[100:300])
    assert 60 < len(held_out) < 140


def similarity(one, other):
    """Jaccard of the sets of word bigrams, by its definition."""
    a, b = ({tuple(words[i : i + 2]) for i in range(max(1, len(words) - 1))} for words in (one.split(), other.split()))
    return len(a & b) / len(a | b)


LINE = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9).map(" ".join)


@given(
    st.lists(LINE, min_size=1, max_size=12), st.lists(LINE, min_size=1, max_size=12), st.sampled_from([0.3, 0.6, 1.0])
)
def test_near_duplicates_are_those_of_all_pairs(texts, others, at_least):
    found = near_duplicates(texts, others, at_least)
    expected = [any(similarity(text, other) >= at_least - 1e-9 for other in others) for text in texts]
    assert found.tolist() == expected


def test_near_duplicates_of_training_prompts_are_left_out_of_the_test():
    rng = np.random.default_rng(0)
    separate = [" ".join(f"w{number}" for number in rng.integers(0, 5000, 12)) for _ in range(200)]
    near = [f"{text} {end}" for text in separate[:60] for end in ("please", "now", "again", "thanks")]
    parts = split(samples_of(separate + near), 0.3, 1)
    assert parts.near_duplicates > 30
    assert not parts.includes_near_duplicates
    test, train = set(parts.test.prompts.text), set(parts.train.prompts.text)
    assert max(similarity(one, other) for one in test for other in train) < 0.6
    assert len(test) + len(train) + parts.near_duplicates == parts.prompts
    assert split(samples_of(separate), 0.3, 1).near_duplicates == 0
    few = split(samples_of([f"tell me a short story about {i}" for i in range(60)]), 0.3, 1)
    assert few.includes_near_duplicates
    assert few.near_duplicates == len(few.test) < MIN_TEST_PROMPTS + 20


@given(st.text(max_size=300))
def test_an_estimate_of_tokens_is_at_least_one_and_grows(text) -> None:
    assert 1 <= estimated_tokens(text) <= 2 + 2.5 * len(text)
    assert estimated_tokens(text + " word") >= estimated_tokens(text)


def test_the_estimate_is_near_a_tokenizer_that_counted(shared) -> None:
    path = shared("data/text/nc_alpaca_eval/outputs/vicuna-7b-v1.5.jsonl.gz")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    ratios = [estimated_tokens(r["output"]) / r["n_tok_tekken131k"] for r in rows if r["output"]]
    assert 0.97 < np.median(ratios) < 1.03
    assert np.quantile(np.abs(np.array(ratios) - 1), 0.9) < 0.12


@pytest.mark.parametrize("reason", ["MAX_TOKENS", "LENGTH", " Length ", "length", "Max_Output_Tokens"])
def test_a_reason_to_end_is_known_however_it_is_written(tmp_path, reason) -> None:
    rows = [{"prompt": "a", "output_tokens": 9, "finish_reason": reason}]
    assert read(jsonl(tmp_path / "x.jsonl", rows)).censored.tolist() == [True]
    failed = [{"prompt": "a", "output_tokens": 9}, {"prompt": "b", "output_tokens": 3, "finish_reason": "ABORT"}]
    assert len(read(jsonl(tmp_path / "y.jsonl", failed))) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"choices": [{"message": "hi"}]}', "message of a choice must be a table"),
        ('{"prompt": "a", "output_tokens": 1e300}', "output_tokens must be a whole number"),
        ('{"prompt": "a", "output_tokens": "many"}', "output_tokens must be a whole number .* 'many'"),
        ('{"prompt": "a", "output_tokens": 3, "prompt_tokens": [1]}', "prompt_tokens must be a whole number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_invalid_rows_are_reported_with_file_and_row(tmp_path, row, words) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n' + row + "\n")
    with pytest.raises(InputError, match=rf"x.jsonl, row 2.*{words}"):
        read(path)
