"""Figure 10: recorded lengths; planned from a tenth of each list, held against the other nine tenths."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from _exegpt_figures import gains
from _exegpt_scenarios import BOUNDS, GPT39, OPT, as_deployed, chosen, estimator, faster_transformer, planner, seen

from lengthwise.schedule import TaskLengths
from lengthwise.schedule.length_drift import moments
from lengthwise.schema.workload import estimated_tokens

PLANNED_SHARE, SPLITS, MARGIN = 0.1, 3, 0.1
LONGEST_TOKENS = 2048
"""What both models take. Requests are left out whose prompt, or whose output, is beyond its share of that."""
Lengths = tuple[np.ndarray, np.ndarray]


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """A row a model and list; the mean gain over FasterTransformer."""
    lists = {name: fitting(load(shared / "data" / path), most) for name, (path, load, most) in LISTS.items()}
    asked = [(served, name) for served in ([OPT] if fast else [OPT, GPT39]) for name in lists]
    splits = [{pair: scenario(*pair, lists[pair[1]], seed) for pair in asked} for seed in range(1 if fast else SPLITS)]
    rows = {
        f"exegpt.real.{served.name}.{name}": {
            "value": fmean(gains(cells)) if gains(cells) else math.nan,
            "unit": "times",
            "lengths": about(name, *lists[name]),
            "cells": cells,
        }
        for (served, name), cells in splits[0].items()
    }
    return rows | {"exegpt.gain_real": total([list(chain.from_iterable(split.values())) for split in splits])}


def total(splits: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The mean over every cell of every split, and its range over the splits."""
    means = [fmean(gains(cells)) for cells in splits]
    every = [cell for cells in splits for cell in cells]
    met = [cell for cell in every if cell["gain"]]
    return {
        "value": fmean(gains(every)),
        "unit": "times",
        "ci": (min(means), max(means)),
        "least": min(gains(every)),
        "most": max(gains(every)),
        "cells": len(every),
        "nothing_met": len(every) - len(met),
        "broke_its_bound": sum(not cell["is_satisfied"] for cell in met),
        "ft_broke_its_bound": sum(not cell["ft"]["is_satisfied"] for cell in every),
        "with_margin": fmean(gains([cell["with_margin"] for cell in every])),
        "with_margin_broke": sum(not cell["with_margin"]["is_satisfied"] for cell in every),
        "margin": MARGIN,
        "splits": len(splits),
    }


def scenario(served, name: str, lengths: Lengths, seed: int) -> list[dict[str, Any]]:
    """Each bound's cell; bounds are of FasterTransformer on the tenth."""
    prompt, output = lengths
    order = np.random.default_rng(seed).permutation(len(prompt))
    first, rest = np.split(order, [max(int(PLANNED_SHARE * len(order)), 1)])
    known, unseen = (
        estimator(served, TaskLengths.from_samples(prompt[part], output[part], name)) for part in (first, rest)
    )
    plan, ft_known, ft = planner(known), faster_transformer(known), faster_transformer(unseen)
    bounds = zip(BOUNDS, ft_known.bounds_s(), strict=False)
    return [cell(bound, bound_s, plan, unseen, ft_known, ft) for bound, bound_s in bounds]


def about(name: str, prompt: np.ndarray, output: np.ndarray) -> dict[str, Any]:
    """What a list is like."""
    mean, sd, skewness = moments(TaskLengths.from_samples(prompt, output, name).output_pmf)
    return {
        "requests": len(prompt),
        "prompt_mean": float(prompt.mean()),
        "prompt_sd": float(prompt.std()),
        "output_mean": mean,
        "output_sd": sd,
        "output_skewness": skewness,
        "output_p99": float(np.quantile(output, 0.99)),
        "output_max": int(output.max()),
        "correlation": float(np.corrcoef(prompt, output)[0, 1]),
    }


def cell(bound: str, bound_s: float, plan, unseen, ft_known, ft) -> dict[str, Any]:
    """One bound: what was planned, on the lengths that it did not see, over FasterTransformer's batch likewise."""
    theirs = ft_known.best(bound_s)
    at = min(int(np.searchsorted(ft.static.batch, theirs[1].encode_batch)), len(ft.rps) - 1)
    told = {"bound": bound, "bound_s": bound_s if math.isfinite(bound_s) else None}
    told |= {"ft": {"rps": float(ft.rps[at]), "batch": theirs[1].encode_batch}}
    told["ft"]["is_satisfied"] = bool(ft.static.latency_s[at] <= bound_s)
    with_margin = on_unseen(chosen(plan, bound_s * (1 - MARGIN)), unseen, bound_s)
    told["with_margin"] = {"gain": with_margin["rps"] / told["ft"]["rps"], "is_satisfied": with_margin["is_satisfied"]}
    mine = on_unseen(chosen(plan, bound_s), unseen, bound_s)
    return told | mine | {"gain": mine["rps"] / told["ft"]["rps"]}


def on_unseen(choice, unseen, bound_s: float) -> dict[str, Any]:
    """A choice on other lengths, its batch of encoding lowered until memory holds it."""
    row = choice.row if choice else None
    while row and row.encode_batch and not as_deployed(unseen, row).feasible[0]:
        row = replace(row, encode_batch=row.encode_batch - 1) if row.encode_batch > 1 else None
    if row is None:
        return {"won": None, "choice": seen(choice.row) if choice else None, "rps": 0.0, "is_satisfied": True}
    got = as_deployed(unseen, row)
    held_s = float(got.latency_high_s[0])
    told = {"won": row.strategy, "choice": seen(choice.row), "rps": float(got.throughput_rps[0])}
    return told | {"lowered_to": row.encode_batch, "constrained_latency_s": held_s, "is_satisfied": held_s <= bound_s}


def fitting(lengths: Lengths, most_output: int) -> Lengths:
    """Requests that both models take, so that any prompt of them goes with any output."""
    prompt, output = lengths
    good = (prompt >= 1) & (output >= 1) & (prompt <= LONGEST_TOKENS - most_output) & (output <= most_output)
    return prompt[good], output[good]


def counted(prompt: str, output: str) -> Callable[[Path], Lengths]:
    """Reads two columns of token counts."""

    def load(path: Path) -> Lengths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            pairs = [(int(row[prompt]), int(row[output])) for row in csv.DictReader(file)]
        return tuple(np.array(pairs).T)

    return load


def texts(path: Path) -> Lengths:
    """Token counts of instructions with their inputs, and of answers, as estimated from the text."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    prompts = [estimated_tokens(f"{row['instruction']}\n{row.get('input', '')}") for row in rows]
    answers = [estimated_tokens(row["output"]) for row in rows]
    return np.array(prompts, dtype=np.int64), np.array(answers, dtype=np.int64)


TOKENS = counted("num_prefill_tokens", "num_decode_tokens")
LISTS: dict[str, tuple[str, Callable[[Path], Lengths], int]] = {  # name: file, reader, longest output
    "alpaca": ("text/llamafactory_demo/alpaca_en_demo.jsonl.gz", texts, 1024),
    "arxiv": ("traces/lengths_arxiv_summarization_llama2tok.csv.gz", TOKENS, 512),
    "sharegpt": ("traces/lengths_sharegpt_8k_llama2tok.csv.gz", TOKENS, 1024),
    "azure-conv": ("traces/azure_llm_2023_conv.csv.gz", counted("ContextTokens", "GeneratedTokens"), 1024),
}
