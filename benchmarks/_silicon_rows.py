"""Points of AIConfigurator's silicon samples that can be predicted, their loads, and why other rows cannot be.

The rules use the columns of a row and how it was measured, never a prediction. What the columns omit is in the
scripts of the benchmark that most rows come from (InferenceMAX, github.com/InferenceMAX/InferenceMAX, Apache-2.0):
``10 * concurrency`` prompts, lengths uniform in 0.8 to 1 of the nominal ones, a closed loop, FP8 KV cache, 8,192
tokens a step (vLLM), chunks of 32,768 and new requests looked for every 10 or 30 steps (SGLang).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

FILE = "data/profiles/aiconfigurator/silicon_sample.csv.gz"
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",  # the text part has the shapes of K2
}
DTYPES = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bfloat16"}
NODE_GPUS = 8
SAME = 0.02
"""Two rows of one deployment and load whose TTFT and TPOT are this close are one measurement, exported twice."""
PROMPTS_PER_CLIENT, SHORTEST = 10, 0.8


@dataclass(frozen=True)
class Point:
    """One measured deployment and load: ``dp`` ranks of attention, experts over ``ep`` groups of ``moe_tp`` GPUs."""

    id: str
    model: str
    gpu: str
    backend: str
    dtype: str
    source: str
    isl: int
    osl: int
    concurrency: int
    tp: int
    dp: int
    moe_tp: int
    ep: int
    measured: str
    ttft_s: float
    tpot_s: float

    @property
    def inferencemax(self) -> bool:
        """Return whether InferenceMAX measured it, whose client is known."""
        return self.source == "inferencemax"

    @property
    def pair(self) -> tuple[str, str]:
        """Return the model and the GPU."""
        return self.model, self.gpu

    @property
    def group(self) -> tuple[Any, ...]:
        """Return a key of points that share every operator."""
        return self.model, self.gpu, self.backend, self.dtype, self.tp, self.dp, self.moe_tp, self.ep

    @property
    def kv_dtype(self) -> str:
        """Return the data type of the KV cache: InferenceMAX sets FP8 for Llama and DeepSeek."""
        return "fp8" if self.inferencemax and self.model != "kimi-k2" else "bfloat16"


def read(shared: Path) -> tuple[list[Point], dict[str, int]]:
    """Return (points that the roofline can express, number of rows left out by reason).

    Raises:
        FileNotFoundError: The samples are not there.
    """
    import polars as pl

    if not (shared / FILE).exists():
        raise FileNotFoundError(f"{FILE} is not under {shared}")
    left: Counter[str] = Counter()
    unique: dict[tuple[Any, ...], list[Point]] = {}
    last: dict[tuple[Any, ...], str] = {}
    for row in pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts():
        if reason := next((reason for reason, holds in REASONS.items() if holds(row)), ""):
            left[reason] += 1
            continue
        point = _point(row)
        same = unique.setdefault((*point.group, point.isl, point.osl, point.concurrency), [])
        if any(abs(point.ttft_s / o.ttft_s - 1) <= SAME and abs(point.tpot_s / o.tpot_s - 1) <= SAME for o in same):
            left["the same measurement, exported twice"] += 1
            continue
        same.append(point)
        last[_load_key(point)] = max(last.get(_load_key(point), ""), point.measured)
    points = [point for same in unique.values() for point in same]
    newest = [point for point in points if point.measured == last[_load_key(point)]]
    left["measured again later with newer software"] = len(points) - len(newest)
    return newest, dict(left)


def _load_key(p: Point) -> tuple[Any, ...]:
    """Return a key of measurements of which only the last day's count, however experts were cut."""
    return p.model, p.gpu, p.backend, p.dtype, p.tp, p.dp, p.isl, p.osl, p.concurrency


def _may_speculate(row: dict[str, Any]) -> bool:
    """Return whether a row may have used multi-token prediction.

    InferenceMAX measures DeepSeek with and without since January 2026. Its database dump was read without such runs;
    the two CSV exports mix both and have no column for it.
    """
    source = row["silicon_data_source"]
    export = source.startswith(("source_file=2026-03-25.csv", "source_file=2026-04-06.csv"))
    return "DeepSeek" in row["model_path"] and export and "measured=2026" in source


def _is_consistent(row: dict[str, Any]) -> bool:
    tp, dp, moe_tp, ep = _cut(row)
    return tp * dp <= NODE_GPUS and ("Llama" in row["model_path"] or tp * dp == moe_tp * ep)


def _cut(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (tp, dp, moe_tp, ep).

    Two exports multiply InferenceMAX' ``tp`` (all GPUs) and ``ep``: a node of 8 GPUs became 64 with experts cut
    8 by 8. The third writes the same measurements as experts over 8 GPUs, which is what ran.
    """
    tp, dp = row["tp_size"], row["attention_dp_size"] or 1
    moe_tp, ep = row["moe_tp_size"] or 1, row["moe_ep_size"] or 1
    gpus = moe_tp * ep
    if moe_tp == ep > 1 and (tp * dp == gpus > NODE_GPUS or (max(tp, dp) == gpus and _is_export(row))):
        return (1, moe_tp, 1, ep) if dp > 1 else (moe_tp, 1, 1, ep)
    if dp > 1 and tp == dp and gpus == tp * dp:
        return 1, dp, 1, tp
    return tp, dp, moe_tp, ep


def _is_export(row: dict[str, Any]) -> bool:
    return "config_id=" in row["silicon_data_source"] or "source_file=2026" in row["silicon_data_source"]


REASONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "prefill and decode on separate workers": lambda row: row["mode"] != "agg",
    "hybrid linear attention (Qwen3.5)": lambda row: "Qwen3.5" in row["model_path"],
    "sparse attention with an indexer (GLM-5)": lambda row: "GLM-5" in row["model_path"],
    "several nodes, GPUs of all workers in one number (GB200)": lambda row: row["system"] not in GPUS,
    "no concurrency recorded": lambda row: "silicon_concurrency" not in row["silicon_data_source"],
    "speculative decoding not recorded (DeepSeek exports since 2026)": _may_speculate,
    "a router of several workers in front (Dynamo)": lambda row: "ai-dynamo" in row["silicon_data_source"],
    "GPUs of attention and of experts do not agree": lambda row: not _is_consistent(row),
}
"""Why a row is left out, the first that holds."""


def _point(row: dict[str, Any]) -> Point:
    source = row["silicon_data_source"]
    return Point(
        row["id"],
        MODELS[row["model_path"]],
        GPUS[row["system"]],
        row["backend"],
        DTYPES[row["gemm_quant_mode"] or ""],
        "inferencemax" if _is_export(row) or "gap-analysis" in source else "sweep",
        row["isl"],
        row["osl"],
        int(source.split("silicon_concurrency=")[1].split(";")[0]),
        *_cut(row),
        measured=source.split("measured=")[1][:10] if "measured=" in source else "",
        ttft_s=row["silicon_ttft_ms"] / 1e3,
        tpot_s=row["silicon_tpot_ms"] / 1e3,
    )


@dataclass(frozen=True)
class Loop:
    """The load and the engine of a point: a closed loop of one rank's share of the clients; tokens as (least, most)."""

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    budget: int
    mixed: bool
    wait_steps: float

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, and one."""
        return self.prompt[1] + self.output[1] + 1

    def workload(self, seed: int = 0) -> Workload:
        """Return ten requests per client, all waiting from the start."""
        rng, n = np.random.default_rng(seed), PROMPTS_PER_CLIENT * self.clients
        prompt, output = (rng.integers(*of, size=n, endpoint=True) for of in (self.prompt, self.output))
        return Workload(np.zeros(n), prompt, output, concurrency=self.clients)


def loop_of(point: Point) -> Loop:
    """Return the load of a point: InferenceMAX draws lengths, a sweep has fixed ones."""
    low = SHORTEST if point.inferencemax else 1.0
    return Loop(
        clients=max(1, math.ceil(point.concurrency / point.dp)),
        prompt=(max(1, int(low * point.isl)), point.isl),
        output=(max(1, int(low * point.osl)), point.osl),
        budget=max(8192, point.isl + point.osl if point.backend == "trtllm" else 0),
        mixed=point.backend != "sglang",
        wait_steps=_wait_steps(point) if point.inferencemax else 0.0,
    )


def _wait_steps(point: Point) -> float:
    """Return the steps for which a new request waits by the engine's settings, on average.

    SGLang is set to look for requests every 10 (below 16 clients) or 30 steps on B200. TensorRT-LLM is set to gather
    prompts for up to 20 steps with 1,024 tokens in and out on fewer than 8 GPUs (Llama), 40 (DeepSeek FP8, 64 to 255
    clients).
    """
    if point.backend == "sglang" and point.gpu == "B200":
        return (10 if point.concurrency < 16 else 30) / 2
    if point.backend == "trtllm" and (point.isl, point.osl) == (1024, 1024):
        if point.model.startswith("llama"):
            return 20.0 if point.tp < 8 else 0.0
        return 40.0 if point.dtype == "fp8" and 64 <= point.concurrency < 256 else 0.0
    return 0.0


def means(records: Records) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) of all requests in seconds."""
    r = records.requests
    several = r.output_tokens > 1
    tpot_s = (r.finished_s - r.first_token_s)[several] / (r.output_tokens[several] - 1)
    return float(np.mean(r.first_token_s - r.arrival_s)), float(np.mean(tpot_s))
