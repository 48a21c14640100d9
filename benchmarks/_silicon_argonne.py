"""Argonne's LLM-Inference-Bench: static batches of equal input and output on many GPUs, from the roofline alone.

No constant of the kernels was fitted on any of these rows. The engines are those of 2024, whose hosts delayed every
step by milliseconds: two constants per engine, each GPU's from the rows of the other NVIDIA GPUs. All requests of a
batch come at once under the engine's memory. Data: github.com/argonne-lcf/LLM-Inference-Bench.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _harness import RECORDED
from _intervals import by, summary

from lengthwise import EngineLimits, InputError, Workload, deploy, simulate
from lengthwise.cost.roofline_tables import HOST_SEQUENCE_S, HOST_STEP_S

ROOT = "data/profiles/argonne_llm_inference_bench"
FILE = f"{ROOT}/All_results.csv.gz"
FIRST_TOKENS = (f"{ROOT}/all_results_TTFT.csv", f"{ROOT}/all_results_TTFT_ITL.csv")
"""Seconds of one token after a prompt, and of as many as the prompt has; rows of the latter contain the former."""
GPUS, MODELS = (RECORDED["argonne"][key] for key in ("gpus", "models"))
ROCM = "MI300X"
"""Another software stack: predicted from the hosts of other stacks, whose predictions do not use it."""
ENGINES = ("vLLM", "TensorRT-LLM", "Deepspeed-MII")
STEPS_S = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
SEQUENCES_S = (0.0, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4)
EVERY = 10


@dataclass(frozen=True)
class Batch:
    """A measured batch with the engine's prediction: seconds without a host, steps, and sequences summed over steps."""

    model: str
    gpu: str
    engine: str
    measured_s: float
    kernels_s: float
    steps: float
    sequences: float

    def latency_s(self, host: tuple[float, float]) -> float:
        """Return the seconds to the last token with a host's seconds per step and per sequence in it."""
        return self.kernels_s + self.steps * host[0] + self.sequences * host[1]


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return medians by vendor of latency, throughput, TTFT and ITL, since a median of both describes neither."""
    import polars as pl

    rows = pl.read_csv(shared / FILE).unique(maintain_order=True).to_dicts()
    left, batches = Counter(filter(None, map(_reason, rows))), []
    for row in [row for row in rows if not _reason(row)][:: EVERY if quick else 1]:
        length = row["Input Output Length"]
        try:
            batches.append(predicted(row, length, length, row["Batch Size"], row["Latency"]))
        except InputError:
            left["does not fit at 16 bits"] += 1

    @cache
    def host(engine: str, gpu: str) -> tuple[float, float]:
        return host_of([b for b in batches if b.engine == engine and b.gpu not in (gpu, ROCM)])

    said_s = [batch.latency_s(host(batch.engine, batch.gpu)) for batch in batches]
    found = list(zip(batches, [batch.measured_s for batch in batches], said_s, strict=True))
    out = _by_vendor("latency", found, left)
    out |= _by_vendor("throughput", [(b, 1 / measured_s, 1 / s) for b, measured_s, s in found], left)
    left, ttft, itl = Counter(), [], []
    for row in first_rows(shared):
        if reason := _reason(row):
            left[reason] += 1
            continue
        # ``end`` is of a run of its own with as many tokens out as in, from which the ITL follows
        length, size, first_s = row["Input Length"], row["Batch Size"], row["first"]
        both = [predicted(row, length, outputs, size, first_s) for outputs in (1, length)]
        one_s, all_s = (batch.latency_s(host(batch.engine, batch.gpu)) for batch in both)
        ttft.append((both[0], first_s, one_s))
        if row["end"] and row["end"] > first_s:
            itl.append((both[0], (row["end"] - first_s) / (length - 1), (all_s - one_s) / (length - 1)))
    return out | _by_vendor("ttft", ttft, left) | _by_vendor("itl", itl, left)


def _reason(row: Mapping[str, Any]) -> str:
    """Return the reason to omit a row of either file, "" otherwise."""
    if row["Hardware"] not in GPUS:
        return "no data sheet of this accelerator in the catalog"
    if row["Framework"] not in ENGINES:
        return "llama.cpp, an engine of another kind"
    if row["Model"] not in MODELS:
        return "model not in the catalog"
    if "first" in row:
        return "" if row["first"] else "no time to first token"
    tokens = 2 * row["Input Output Length"] * row["Batch Size"]
    if not row["Latency"] or abs(tokens / row["Latency"] / row["Throughput"] - 1) > 0.05:
        return "latency and throughput contradict each other"
    return ""


def predicted(row: Mapping[str, Any], inputs: int, outputs: int, size: int, measured_s: float) -> Batch:
    """Simulate a static batch of ``size`` requests without a host; raise InputError if it does not fit at 16 bits."""
    model, gpu = MODELS[row["Model"]], GPUS[row["Hardware"]]
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=inputs + outputs + 1)
    deployment = deploy(model, gpu, tp=row["Num of Hardware"], limits=limits)
    bare = replace(deployment, cost=replace(deployment.cost, host_s=np.zeros_like(deployment.cost.host_s)))
    requests = Workload(np.zeros(size), np.full(size, inputs), np.full(size, outputs))
    done = simulate(requests, bare, max_log_steps=0)
    kernels_s, steps = float(np.max(done.requests.finished_s)), float(done.totals.steps.sum())
    return Batch(model, gpu, row["Framework"], measured_s, kernels_s, steps, float(size * outputs))


def host_of(batches: list[Batch]) -> tuple[float, float]:
    """Return the host (seconds a step, seconds a sequence) of the least median error; the roofline's without rows."""
    if not batches:
        return HOST_STEP_S, HOST_SEQUENCE_S
    columns = ("measured_s", "kernels_s", "steps", "sequences")
    measured, kernels, steps, sequences = (np.array([getattr(b, name) for b in batches]) for name in columns)

    def error(host: tuple[float, float]) -> float:
        return float(np.median(np.abs(np.log((kernels + steps * host[0] + sequences * host[1]) / measured))))

    return min(((step_s, sequence_s) for step_s in STEPS_S for sequence_s in SEQUENCES_S), key=error)


def first_rows(shared: Path) -> list[dict[str, Any]]:
    """Return the rows of both files of first tokens, joined by deployment."""
    import polars as pl

    frames = [pl.read_csv(shared / file) for file in FIRST_TOKENS]
    one, both = (f.rename({name: name.strip() for name in f.columns}).drop_nulls("Hardware") for f in frames)
    keys = ["Hardware", "Num of Hardware", "Framework", "Model", "Input Length", "Batch Size"]
    one = one.select(*keys, first="Latency").unique(keys, keep="first", maintain_order=True)
    both = both.select(*keys, other="TTFT Latency", end="end_latency").unique(keys, keep="first", maintain_order=True)
    joined = one.join(both, on=keys, how="full", coalesce=True, maintain_order="left_right")
    return joined.with_columns(first=pl.coalesce("first", "other")).to_dicts()


def _by_vendor(name: str, found: list[tuple[Batch, float, float]], left: Counter[str]) -> dict[str, Any]:
    """Return a figure per vendor of (batch, measured, predicted); common details are with NVIDIA's."""
    error = np.array([predicted / measured - 1 for _, measured, predicted in found])
    amd = np.array([batch.gpu == ROCM for batch, _, _ in found])
    details = {"left_out": dict(left), "by_model": by([batch.model for batch, _, _ in found], error)}
    details["by_gpu"] = by([f"{batch.engine} on {batch.gpu}" for batch, _, _ in found], error)
    out: dict[str, Any] = {}
    for vendor, of_vendor in (("nvidia", ~amd), ("amd", amd)):
        if of_vendor.any():
            clusters = [(batch.model, batch.gpu) for (batch, _, _), own in zip(found, of_vendor, strict=True) if own]
            row = summary(error[of_vendor], clusters) | {"unit": "relative", "better": "lower"}
            out[f"fidelity.argonne.{vendor}.{name}_median_ape"] = row | (details if vendor == "nvidia" else {})
    return out
