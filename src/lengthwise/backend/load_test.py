"""The simulated requests against a real server: ``vllm bench serve`` and the trace that it replays.

The trace is vLLM's ``timed_trace``: arrival, prompt and output length of each request, told in
tokens (``vllm/benchmarks/datasets/datasets.py`` of https://github.com/vllm-project/vllm). The
client draws the prompts' token ids itself, so a prompt has the simulated length to the token, and
it forbids the end of sequence, so an output has too.
"""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.backend._checkpoint import published_checkpoint
from lengthwise.backend.launch import Launch, flags
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload

MOST_REQUESTS = 1000
"""Requests of a load test unless more are asked for."""


def load_test(
    deployment: Deployment,
    workload: Workload,
    *,
    trace: str,
    rate_rps: float,
    num_requests: int = MOST_REQUESTS,
    model: str | None = None,
    served_name: str | None = None,
    base_url: str = "http://127.0.0.1:8000",
) -> Launch:
    """The command that replays a trace of the workload and measures TTFT, TPOT, ITL and latency.

    Args:
        deployment: What is served; its model gives the tokenizer.
        workload: The requests as they were simulated, at ``rate_rps``.
        trace: Path of the file that ``write_trace`` wrote from the same workload.
        rate_rps: Requests a second that were simulated, for the record in the result.
        num_requests: How many to send at most, the first ones.
        model: The checkpoint that is served; None takes what the catalog knows.
        served_name: The name it is served under; None takes the model's in the catalog.
        base_url: Where the server, or the router before its replicas, listens.

    Raises:
        InputError: ``num_requests`` is below 1.
    """
    count = _count(workload, num_requests)
    known, _ = published_checkpoint(deployment.model)
    pairs = {
        "--backend": "openai",
        "--base-url": base_url,
        "--endpoint": "/v1/completions",
        "--model": model or known,
        "--served-model-name": served_name or deployment.model.name,
        "--dataset-name": "timed_trace",
        "--dataset-path": trace,
        "--timed-trace-chunk-hash-size": _longest(workload, count),
        "--num-prompts": count,
        "--max-concurrency": workload.concurrency,
        "--ignore-eos": True,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--ready-check-timeout-sec": 1800,
        "--save-result": True,
        "--result-filename": "measured.json",
    }
    environment = {"PYTHONHASHSEED": "0"}  # the client seeds the prompts' tokens by a string's hash
    command = ("vllm", "bench", "serve", *flags(pairs), "--metadata", f"simulated_rate_rps={rate_rps:g}")
    return Launch(command, environment, _notes(deployment, workload, count, rate_rps))


def write_trace(path: Path | str, workload: Workload, num_requests: int = MOST_REQUESTS) -> None:
    """A JSON-lines file of the first requests: seconds, prompt and output tokens, for ``load_test``.

    A request names one chunk of its own, as long as the longest prompt, so that no two share a prefix.

    Raises:
        InputError: ``num_requests`` is below 1.
        OutputError: The file cannot be written.
    """
    count = _count(workload, num_requests)
    columns = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens)
    rows = zip(*(column[:count].tolist() for column in columns), strict=True)
    write_whole(path, "".join(_line(i, *row) for i, row in enumerate(rows)).encode())


def _line(i: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> str:
    request = {
        "timestamp": round(arrival_s, 6),
        "input_length": prompt_tokens,
        "output_length": output_tokens,
        "hash_ids": [i],
    }
    return json.dumps(request) + "\n"


def _count(workload: Workload, num_requests: int) -> int:
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    return min(num_requests, len(workload))


def _longest(workload: Workload, count: int) -> int:
    return int(workload.prompt_tokens[:count].max())


def _notes(deployment: Deployment, workload: Workload, count: int, rate_rps: float) -> tuple[str, ...]:
    arrivals = (
        f"{workload.concurrency} requests are kept in the system, as simulated."
        if workload.concurrency
        else f"Requests leave at the simulated times, {rate_rps:g} a second on average."
    )
    made = [
        f"The first {count} of {len(workload)} requests are sent. {arrivals}",
        (
            "Prompts are random token ids of the simulated lengths; outputs run to the simulated lengths because the "
            "end of sequence is ignored."
        ),
    ]
    if workload.priority is not None or deployment.scheduler.rank not in ("fcfs", "fcfs_evicted_first"):
        made.append("vllm bench serve sends no `priority`: requests are served as they come.")
    return tuple(made)
