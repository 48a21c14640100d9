"""Rows of AIConfigurator's silicon samples: which can be predicted, as what deployment, and why others cannot.

The rules look at the columns of a row and at how it was measured, never at a prediction. What the columns leave
out is in the scripts of the benchmark that most rows come from (InferenceMAX, github.com/InferenceMAX/InferenceMAX,
Apache-2.0): ``10 * concurrency`` prompts, lengths uniform in 0.8 to 1 of the nominal ones, a closed loop, FP8 KV
cache, 8,192 tokens a step (vLLM), chunks of 32,768 and new requests looked for every 10 or 30 steps (SGLang).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
"""Two rows of one deployment and load whose TTFT and TPOT are this near are one measurement, exported twice."""


@dataclass(frozen=True)
class Point:
    """One measured deployment and load. ``dp`` ranks of attention, experts over ``ep`` groups of ``moe_tp``."""

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
        """Whether InferenceMAX measured it, whose client is known."""
        return self.source == "inferencemax"

    @property
    def pair(self) -> tuple[str, str]:
        """The model and the GPU."""
        return self.model, self.gpu

    @property
    def group(self) -> tuple[Any, ...]:
        """Points that share every operator."""
        return self.model, self.gpu, self.backend, self.dtype, self.tp, self.dp, self.moe_tp, self.ep


def read(shared: Path) -> tuple[list[Point], dict[str, int]]:
    """(points that the roofline can express, rows left out by reason).

    Raises:
        FileNotFoundError: The samples are not there.
    """
    import polars as pl

    if not (shared / FILE).exists():
        raise FileNotFoundError(f"{FILE} is not under {shared}")
    rows = pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts()
    left: dict[str, int] = {}
    points: list[Point] = []
    for row in rows:
        why = _why_not(row)
        if why:
            left[why] = left.get(why, 0) + 1
        else:
            points.append(_point(row))
    kept = _unique(points)
    newest = _newest(kept)
    left["the same measurement, exported twice"] = len(points) - len(kept)
    left["measured again later with newer software"] = len(kept) - len(newest)
    return newest, left


def decode_workers(shared: Path) -> list[Point]:
    """Decode workers of at most a node, prefill elsewhere: ``concurrency`` is of one worker.

    Of InferenceMAX' database dump alone, which holds no speculative decoding.
    """
    import polars as pl

    out = []
    for row in pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts():
        if row["mode"] != "disagg" or row["system"] not in GPUS or "config_id=" not in row["silicon_data_source"]:
            continue
        names = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
        point = row | {name: row[f"decode_{name}"] for name in names}
        if _is_consistent(point) and point["model_path"] in MODELS:
            whole = _point(point)
            clients = max(1, round(whole.concurrency / (row["decode_num_workers"] or 1)))
            out.append(replace(whole, concurrency=clients))
    return out


def _why_not(row: dict[str, Any]) -> str:
    return next((why for why, holds in _REASONS.items() if holds(row)), "")


def _may_speculate(row: dict[str, Any]) -> bool:
    """InferenceMAX measures DeepSeek with and without multi-token prediction since January 2026.

    Its database dump was read without such runs; the two CSV exports mix both and have no column for it.
    """
    source = row["silicon_data_source"]
    export = source.startswith(("source_file=2026-03-25.csv", "source_file=2026-04-06.csv"))
    return "DeepSeek" in row["model_path"] and export and "measured=2026" in source


def _is_consistent(row: dict[str, Any]) -> bool:
    tp, dp, moe_tp, ep = _cut(row)
    is_moe = "Llama" not in row["model_path"]
    return tp * dp <= NODE_GPUS and (not is_moe or tp * dp == moe_tp * ep)


def _cut(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """(tp, dp, moe_tp, ep).

    Two exports multiply InferenceMAX' ``tp`` (all GPUs) and ``ep``: a node of 8 GPUs became 64 with experts cut
    8 by 8. The third writes the same measurements as experts over 8 GPUs, which is what ran.
    """
    tp, dp = row["tp_size"], row["attention_dp_size"] or 1
    moe_tp, ep = row["moe_tp_size"] or 1, row["moe_ep_size"] or 1
    if moe_tp == ep > 1 and tp * dp == moe_tp * ep > NODE_GPUS:
        return (1, moe_tp, 1, ep) if dp > 1 else (moe_tp, 1, 1, ep)
    if moe_tp == ep > 1 and max(tp, dp) == moe_tp * ep > ep and _is_export(row):
        return (1, moe_tp, 1, ep) if dp > 1 else (moe_tp, 1, 1, ep)
    if dp > 1 and tp == dp and moe_tp * ep == tp * dp:
        return 1, dp, 1, tp
    return tp, dp, moe_tp, ep


def _is_export(row: dict[str, Any]) -> bool:
    return "config_id=" in row["silicon_data_source"] or "source_file=2026" in row["silicon_data_source"]


_REASONS: dict[str, Callable[[dict[str, Any]], bool]] = {
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
    tp, dp, moe_tp, ep = _cut(row)
    return Point(
        id=row["id"],
        model=MODELS[row["model_path"]],
        gpu=GPUS[row["system"]],
        backend=row["backend"],
        dtype=DTYPES[row["gemm_quant_mode"] or ""],
        source="inferencemax" if _is_export(row) or "gap-analysis" in source else "sweep",
        isl=row["isl"],
        osl=row["osl"],
        concurrency=int(source.split("silicon_concurrency=")[1].split(";")[0]),
        tp=tp,
        dp=dp,
        moe_tp=moe_tp,
        ep=ep,
        measured=source.split("measured=")[1][:10] if "measured=" in source else "",
        ttft_s=row["silicon_ttft_ms"] / 1e3,
        tpot_s=row["silicon_tpot_ms"] / 1e3,
    )


def _newest(points: list[Point]) -> list[Point]:
    """Of the measurements of a model, engine, GPUs and load those of the last day, however experts were cut."""

    def key(p: Point) -> tuple[Any, ...]:
        return p.model, p.gpu, p.backend, p.dtype, p.tp, p.dp, p.isl, p.osl, p.concurrency

    last: dict[tuple[Any, ...], str] = {}
    for point in points:
        last[key(point)] = max(last.get(key(point), ""), point.measured)
    return [point for point in points if point.measured == last[key(point)]]


def _unique(points: list[Point]) -> list[Point]:
    kept: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        same = kept.setdefault((*point.group, point.isl, point.osl, point.concurrency), [])
        if not any(_is_same(point, other) for other in same):
            same.append(point)
    return [point for same in kept.values() for point in same]


def _is_same(a: Point, b: Point) -> bool:
    pairs = ((a.ttft_s, b.ttft_s), (a.tpot_s, b.tpot_s))
    return all(abs(x / y - 1) <= SAME for x, y in pairs)
