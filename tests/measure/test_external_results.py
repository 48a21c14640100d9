"""Other programs' results become records with the numbers that they report, and warnings of missing ones."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from lengthwise import metrics
from lengthwise.measure import read_external_results, read_records, write_records
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status

VLLM = {
    "date": "20260101-000000", "backend": "vllm", "model_id": "m", "num_prompts": 3, "request_rate": 2.0,
    "max_concurrency": None, "duration": 3.0, "completed": 2, "total_input_tokens": 30, "request_throughput": 1.0,
    "input_lens": [10, 20, 30], "output_lens": [3, 0, 5], "ttfts": [0.5, 0.0, 0.25],
    "itls": [[0.1, 0.2], [], [0.3, 0.3]], "start_times": [100.0, 100.5, 101.0],
    "errors": ["", "Traceback\naiohttp.client.ClientError: gone", ""], "generated_texts": ["", "", ""],
}  # fmt: skip


def written(tmp_path, text, name="r.json"):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")
    return path


def column(measured, name):
    return metrics.request_column(measured.records.requests, name)


def doubted(measured, words):
    return any(words in warning for warning in measured.warnings)


def test_vllm_bench_serve(tmp_path):
    measured = read_external_results(written(tmp_path, VLLM))
    r = measured.records.requests
    assert measured.source == "vllm bench serve"
    assert r.arrival_s.tolist() == [0.0, 0.5, 1.0]
    assert r.status.tolist() == [Status.FINISHED, Status.UNFINISHED, Status.FINISHED]
    assert column(measured, "ttft_s")[[0, 2]] == pytest.approx([0.5, 0.25])
    assert column(measured, "jct_s")[[0, 2]] == pytest.approx([0.8, 0.85])
    assert column(measured, "tpot_s")[[0, 2]] == pytest.approx([0.15, 0.15])
    assert measured.errors == {"ClientError": 1}
    gaps = measured.records.gaps
    assert np.repeat(gaps.gap_s, gaps.count) == pytest.approx([0.1, 0.2, 0.3, 0.3], abs=1e-9)
    assert measured.metadata["model_id"] == "m"
    assert doubted(measured, "when they were sent")
    assert doubted(measured, "in 1 of 2 answers chunks are not tokens")


def test_vllm_at_a_concurrency_is_a_closed_loop(tmp_path):
    measured = read_external_results(written(tmp_path, VLLM | {"request_rate": "inf", "max_concurrency": 2}))
    assert measured.workload.concurrency == 2
    assert measured.records.requests.arrival_s.tolist() == [0.0, 0.5, 1.0]


def test_vllm_without_start_times_has_no_arrivals_and_a_warning(tmp_path):
    reported = {key: value for key, value in VLLM.items() if key != "start_times"}
    measured = read_external_results(written(tmp_path, reported))
    assert doubted(measured, "arrivals are missing")
    assert column(measured, "ttft_s")[0] == pytest.approx(0.5)


def test_vllm_without_details_is_refused_with_the_remedy(tmp_path):
    reported = {key: value for key, value in VLLM.items() if not isinstance(value, list)}
    with pytest.raises(InputError, match="--save-detailed"):
        read_external_results(written(tmp_path, reported))


def guidellm_request(start, first, last, tokens=5, **more):
    timings = {"targeted_start": start, "request_start": start + 0.01, "first_token_iteration": first,
               "last_token_iteration": last, "request_end": last}  # fmt: skip
    return {"info": {"timings": timings}, "prompt_tokens": 7, "output_tokens": tokens} | more


def guidellm(strategy, **requests):
    return {"benchmarks": [{"config": {"strategy": strategy}, "requests": requests}], "metadata": {"v": 1}}


def test_guidellm_counts_from_when_a_request_was_due(tmp_path):
    body = guidellm(
        {"type_": "poisson", "rate": 3},
        successful=[guidellm_request(1e9 + 1, 1e9 + 1.5, 1e9 + 2), guidellm_request(1e9, 1e9 + 0.25, 1e9 + 1)],
        incomplete=[guidellm_request(1e9 + 3, None, None, 0)],
        errored=[guidellm_request(1e9 + 2, None, None, 0, error="HTTPStatusError: 500")],
    )
    measured = read_external_results(written(tmp_path, body))
    assert measured.source == "guidellm"
    assert measured.records.requests.arrival_s == pytest.approx([0, 1, 2, 3])
    assert column(measured, "ttft_s")[:2] == pytest.approx([0.25, 0.5])
    assert column(measured, "tpot_s")[:2] == pytest.approx([0.75 / 4, 0.5 / 4])
    assert measured.errors == {"HTTPStatusError": 1}
    assert not doubted(measured, "when they were sent")
    assert doubted(measured, "TBT is unknown")
    assert measured.workload.concurrency is None


def test_guidellm_of_the_old_form_and_a_closed_loop(tmp_path):
    request = {"start_time": 5.0, "first_token_time": 5.5, "last_token_time": 6.0, "end_time": 6.1,
               "prompt_tokens": 7, "output_tokens": 6}  # fmt: skip
    body = {"benchmarks": [{"args": {"strategy": {"type_": "concurrent", "streams": 4}},
                            "requests": {"successful": [request]}}]}  # fmt: skip
    measured = read_external_results(written(tmp_path, body))
    assert column(measured, "ttft_s").tolist() == [0.5]
    assert column(measured, "jct_s").tolist() == [1.0]
    assert measured.workload.concurrency == 4
    assert doubted(measured, "when they were sent")


def test_a_report_of_guidellm_without_a_benchmark_is_refused(tmp_path):
    body = guidellm({"type_": "poisson"}, successful=[guidellm_request(1.0, 2.0, 3.0)]) | {"benchmarks": []}
    with pytest.raises(InputError, match="must hold a benchmark; this one holds none"):
        read_external_results(written(tmp_path, body))


def test_several_benchmarks_of_guidellm_must_be_named(tmp_path):
    body = guidellm({"type_": "poisson"}, successful=[guidellm_request(1.0, 2.0, 3.0)])
    body["benchmarks"] *= 2
    path = written(tmp_path, body)
    with pytest.raises(InputError, match="holds 2 benchmarks; name one"):
        read_external_results(path)
    assert len(read_external_results(path, benchmark=1).workload) == 1
    with pytest.raises(InputError, match="there is no benchmark 2"):
        read_external_results(path, benchmark=2)


def aiperf_record(start_ns, *, issued_ns=None, error=None, cancelled=False, gaps=(10.0, 30.0)):
    metrics_ = {
        "input_sequence_length": {"value": 11, "unit": "tokens"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 290.0, "unit": "ms"},
        "inter_chunk_latency": {"value": list(gaps), "unit": "ms"},
    }
    meta = {"request_start_ns": start_ns, "request_end_ns": start_ns, "benchmark_phase": "profiling",
            "was_cancelled": cancelled, "credit_issued_ns": issued_ns}  # fmt: skip
    failed = {"error_isl": {"value": 11, "unit": "tokens"}}
    return json.dumps({"metadata": meta, "metrics": failed if error or cancelled else metrics_, "error": error})


def test_aiperf_keeps_nanoseconds_and_counts_from_the_credit(tmp_path):
    zero = 1759813207532900363
    lines = [
        aiperf_record(zero + 2_000_100, issued_ns=zero),
        aiperf_record(zero + 10**9, issued_ns=zero + 10**9, error={"code": 503, "type": "X", "message": ""}),
        aiperf_record(zero + 2 * 10**9, issued_ns=zero + 2 * 10**9, cancelled=True),
    ]
    measured = read_external_results(written(tmp_path, "\n".join(lines), "profile_export.jsonl"))
    assert measured.records.requests.arrival_s == pytest.approx([0, 1, 2], abs=1e-12)
    assert column(measured, "ttft_s")[0] == pytest.approx(0.2520001, abs=1e-9)
    assert column(measured, "jct_s")[0] == pytest.approx(0.2920001, abs=1e-9)
    assert measured.records.requests.status.tolist() == [0, Status.REJECTED, Status.UNFINISHED]
    assert measured.errors == {"http 503": 1}
    assert measured.tokens.tokens.tolist() == [1, 1, 1]
    assert measured.records.gaps.total == 2


def test_llmservingsims_recorded_runs(tmp_path, shared):
    path = shared("data/profiles/llmservingsim/measured_runs/RTXPRO6000/Llama-3.1-8B/vllm/requests.jsonl.gz")
    measured = read_external_results(path)
    raw = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    r = measured.records.requests
    assert len(measured.workload) == len(raw) == 300
    assert (r.status == Status.FINISHED).all()
    assert measured.workload.prompt_tokens.tolist() == [row["input_toks"] for row in raw]
    served = [row["last_token_ts"] - row["first_token_ts"] for row in raw]
    assert r.finished_s - r.first_token_s == pytest.approx(served, abs=1e-6)
    waited = [row["scheduled_ts"] - row["queued_ts"] for row in raw]
    assert r.scheduled_s - measured.workload.extra["queued_s"] == pytest.approx(waited, abs=1e-6)
    late = measured.workload.extra["queued_s"] - r.arrival_s
    assert late.min() == pytest.approx(0, abs=1e-6)
    assert np.all(late > -1e-6)
    assert doubted(measured, "another clock")
    write_records(measured, tmp_path / "r.parquet")
    assert read_records(tmp_path / "r.parquet").workload.extra["queued_s"] == pytest.approx(
        measured.workload.extra["queued_s"], abs=0
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "of a known format"),
        ("[1, 2]", "of a known format"),
        ('{"a": 1}\n{"a": ', "line 2 must be JSON"),
        ('{"benchmarks": []}', "holds none"),
        ('{"benchmarks": [{"requests": {}}]}', "at least one request"),
        ('{"input_toks": 1, "queued_ts": 1, "last_token_ts": 2}', "lacks output_toks"),
        ('{"metadata": {"request_start_ns": 1}, "metrics": {"time_to_first_token": {"value": "x"}}}', "cannot be used"),
    ],
)
def test_an_unknown_format_is_reported(tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        read_external_results(written(tmp_path, text))


def test_a_truncated_gzip_file_is_reported(tmp_path):
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(json.dumps(VLLM).encode())[:-20])
    with pytest.raises(InputError, match="complete text file"):
        read_external_results(path)
    with pytest.raises(InputError, match="there is no file of results"):
        read_external_results(tmp_path / "none.json")
