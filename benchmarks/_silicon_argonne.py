"""Argonne's LLM-Inference-Bench: static batches of equal input and output on many GPUs, from the roofline alone.

No constant of the roofline was fitted on any of these rows. A batch is told as all requests at once under the
engine's memory, since most large ones do not fit at a time. Data: github.com/argonne-lcf/LLM-Inference-Bench.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

FILE = "data/profiles/argonne_llm_inference_bench/All_results.csv.gz"
GPUS = {"Nvidia A100 GPU": "A100-40GB", "Nvidia H100 GPU": "H100", "AMD MI300X GPU": "MI300X"}
ENGINES = ("vLLM", "TensorRT-LLM", "Deepspeed-MII")
MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
}


def rows(shared: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(rows that can be predicted, rows left out by reason).

    Raises:
        FileNotFoundError: The data are not there.
    """
    import polars as pl

    if not (shared / FILE).exists():
        raise FileNotFoundError(f"{FILE} is not under {shared}")
    left: dict[str, int] = {}
    kept: list[dict[str, Any]] = []
    for row in pl.read_csv(shared / FILE).unique(maintain_order=True).to_dicts():
        why = _why_not(row)
        if why:
            left[why] = left.get(why, 0) + 1
        else:
            kept.append(row)
    return kept, left


def _why_not(row: dict[str, Any]) -> str:
    tokens = 2 * row["Input Output Length"] * row["Batch Size"]
    tests = {
        "no data sheet of this accelerator in the catalog": row["Hardware"] not in GPUS,
        "llama.cpp, an engine of another kind": row["Framework"] not in ENGINES,
        "model not in the catalog": row["Model"] not in MODELS,
        "latency and throughput contradict each other": not row["Latency"]
        or abs(tokens / row["Latency"] / row["Throughput"] - 1) > 0.05,
    }
    return next((why for why, holds in tests.items() if holds), "")


def latency_s(row: dict[str, Any]) -> float:
    """Seconds from the start of a static batch to its last token."""
    length, batch = row["Input Output Length"], row["Batch Size"]
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2 * length + 1)
    cluster = {"tp": row["Num of Hardware"], "limits": limits}
    deployment = deploy(MODELS[row["Model"]], GPUS[row["Hardware"]], **cluster)
    lengths = np.full(batch, length)
    records = simulate(Workload(np.zeros(batch), lengths, lengths), deployment, keep_steps=0)
    return float(np.max(records.requests.finished_s))


def predicted(shared: Path, *, quick: bool) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(rows with ``predicted_s``, rows left out by reason)."""
    found, left = rows(shared)
    out = []
    for row in found[:: 10 if quick else 1]:
        try:
            out.append({**row, "predicted_s": latency_s(row)})
        except InputError:  # the model or its longest request does not fit these GPUs at 16 bits
            why = "does not fit at 16 bits"
            left[why] = left.get(why, 0) + 1
    return out, left
