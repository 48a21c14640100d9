"""Argonne's LLM-Inference-Bench: static batches of equal input and output on many GPUs, from the roofline alone.

No constant of the kernels was fitted on any of these rows. The engines are those of 2024, whose hosts held up every
step for milliseconds: two constants an engine, each GPU's from the rows of the other NVIDIA GPUs. A batch is told as
all requests at once under the engine's memory, since most large ones do not fit at a time. Data:
github.com/argonne-lcf/LLM-Inference-Bench.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.cost.roofline_tables import HOST_SEQUENCE_S, HOST_STEP_S
from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

ROOT = "data/profiles/argonne_llm_inference_bench"
FILE = f"{ROOT}/All_results.csv.gz"
FIRST_TOKENS = (f"{ROOT}/all_results_TTFT.csv", f"{ROOT}/all_results_TTFT_ITL.csv")
"""Seconds of one token after a prompt, and of as many as the prompt has: with the former also in the latter's rows."""

GPUS = {"Nvidia A100 GPU": "A100-40GB", "Nvidia H100 GPU": "H100", "AMD MI300X GPU": "MI300X"}
ROCM = "MI300X"
"""Another software stack: told from the hosts of the others, and none of theirs."""

ENGINES = ("vLLM", "TensorRT-LLM", "Deepspeed-MII")
MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
}

STEPS_S = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
SEQUENCES_S = (0.0, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4)


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


@dataclass(frozen=True)
class Batch:
    """A row with what the engine says of it: seconds without a host, steps, and sequences summed over steps."""

    model: str
    gpu: str
    engine: str
    measured_s: float
    kernels_s: float
    steps: float
    sequences: float

    def latency_s(self, step_s: float, sequence_s: float) -> float:
        """Seconds from the start to the last token with a host's constants."""
        return self.kernels_s + self.steps * step_s + self.sequences * sequence_s


def batch_of(row: dict[str, Any]) -> Batch:
    """What the engine says of a row.

    Raises:
        InputError: The model or its longest request does not fit these GPUs at 16 bits.
    """
    length, batch = row["Input Output Length"], row["Batch Size"]
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2 * length + 1)
    cluster = {"tp": row["Num of Hardware"], "limits": limits}
    deployment = deploy(MODELS[row["Model"]], GPUS[row["Hardware"]], **cluster)
    bare = replace(deployment, cost=replace(deployment.cost, host_s=np.zeros_like(deployment.cost.host_s)))
    lengths = np.full(batch, length)
    records = simulate(Workload(np.zeros(batch), lengths, lengths), bare, keep_steps=0)
    return Batch(
        model=MODELS[row["Model"]],
        gpu=GPUS[row["Hardware"]],
        engine=row["Framework"],
        measured_s=row["Latency"],
        kernels_s=float(np.max(records.requests.finished_s)),
        steps=float(records.totals.steps.sum()),
        sequences=float(batch * length),
    )


def host_of(batches: list[Batch]) -> tuple[float, float]:
    """(seconds a step, seconds a sequence in it) with the least median error; the roofline's without any rows."""
    if not batches:
        return HOST_STEP_S, HOST_SEQUENCE_S
    measured, kernels, steps, sequences = (
        np.array([getattr(batch, name) for batch in batches])
        for name in ("measured_s", "kernels_s", "steps", "sequences")
    )

    def error(step_s: float, sequence_s: float) -> float:
        said = kernels + steps * step_s + sequences * sequence_s
        return float(np.median(np.abs(np.log(said / measured))))

    grid = [(step_s, sequence_s) for step_s in STEPS_S for sequence_s in SEQUENCES_S]
    return min(grid, key=lambda host: error(*host))


def predicted(shared: Path, *, fast: bool) -> tuple[list[Batch], list[float], dict[str, int]]:
    """(rows, their latency in seconds with the host of other GPUs, rows left out by reason)."""
    found, left = rows(shared)
    batches = []
    for row in found[:: 10 if fast else 1]:
        try:
            batches.append(batch_of(row))
        except InputError:
            why = "does not fit at 16 bits"
            left[why] = left.get(why, 0) + 1
    hosts = {
        (engine, gpu): host_of([b for b in batches if b.engine == engine and b.gpu not in (gpu, ROCM)])
        for engine in ENGINES
        for gpu in GPUS.values()
    }
    return batches, [b.latency_s(*hosts[b.engine, b.gpu]) for b in batches], left


@dataclass(frozen=True)
class FirstTokens:
    """A static batch's time to first token and mean time between tokens, measured and said."""

    batch: Batch
    metric: str
    measured_s: float
    said_s: float


def first_tokens(shared: Path, batches: list[Batch]) -> tuple[list[FirstTokens], dict[str, int]]:
    """(TTFT and ITL of batches of 16 prompts, rows left out by reason); hosts from other GPUs' latencies.

    ``end_latency`` is of a run of its own with as many tokens out as in, from which the ITL follows.
    """
    told: list[FirstTokens] = []
    left: dict[str, int] = {}
    for row in _first_rows(shared):
        why = _why_not_first(row)
        if why:
            left[why] = left.get(why, 0) + 1
            continue
        model, gpu, engine = MODELS[row["Model"]], GPUS[row["Hardware"]], row["Framework"]
        host = host_of([b for b in batches if b.engine == engine and b.gpu not in (gpu, ROCM)])
        told += _first_of(row, model, gpu, host)
    return told, left


def _first_rows(shared: Path) -> list[dict[str, Any]]:
    import polars as pl

    frames = [pl.read_csv(shared / file) for file in FIRST_TOKENS]
    one, both = (f.rename({name: name.strip() for name in f.columns}).drop_nulls("Hardware") for f in frames)
    keys = ["Hardware", "Num of Hardware", "Framework", "Model", "Input Length", "Batch Size"]
    one = one.select(*keys, first="Latency").unique(keys, keep="first", maintain_order=True)
    both = both.select(*keys, report="TTFT Latency", end="end_latency").unique(keys, keep="first", maintain_order=True)
    joined = one.join(both, on=keys, how="full", coalesce=True, maintain_order="left_right")
    return joined.with_columns(first=pl.coalesce("first", "report")).to_dicts()


def _why_not_first(row: dict[str, Any]) -> str:
    tests = {
        "no data sheet of this accelerator in the catalog": row["Hardware"] not in GPUS,
        "llama.cpp, an engine of another kind": row["Framework"] not in ENGINES,
        "model not in the catalog": row["Model"] not in MODELS,
        "no time to first token": not row["first"],
    }
    return next((why for why, holds in tests.items() if holds), "")


def _first_of(row: dict[str, Any], model: str, gpu: str, host: tuple[float, float]) -> list[FirstTokens]:
    """TTFT, and the ITL where the end of the run was measured too."""
    length, batch = row["Input Length"], row["Batch Size"]
    seconds = {}
    for outputs in (1, length):
        limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=length + outputs + 1)
        deployment = deploy(model, gpu, tp=row["Num of Hardware"], limits=limits)
        bare = replace(deployment, cost=replace(deployment.cost, host_s=np.zeros_like(deployment.cost.host_s)))
        asked = Workload(np.zeros(batch), np.full(batch, length), np.full(batch, outputs))
        done = simulate(asked, bare, keep_steps=0)
        kernels_s, steps = float(np.max(done.requests.finished_s)), float(done.totals.steps.sum())
        one = Batch(model, gpu, row["Framework"], row["first"], kernels_s, steps, float(batch * outputs))
        seconds[outputs] = one.latency_s(*host)
    told = [FirstTokens(one, "ttft", row["first"], seconds[1])]
    if row["end"] and row["end"] > row["first"]:
        measured_s = (row["end"] - row["first"]) / (length - 1)
        told.append(FirstTokens(one, "itl", measured_s, (seconds[length] - seconds[1]) / (length - 1)))
    return told
