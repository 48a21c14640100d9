"""ELIS' evaluation (Table 5, Figures 5 and 6) asked again in simulation, and how much more can be had.

Five models on one A100-80GB, batches of 1, 2 and 4, 1x, 3x and 5x the rate of one request after the other, Gamma
arrivals of shape 0.73, 200 prompts in three shuffles. Prompts are AlpacaEval's (non-commercial: evaluated
on, never trained on), outputs those of the same model or its nearest relative there (``MODELS``). Which policy is
"ours" is chosen on 200 other prompts of the set.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import _blend
import _texts
import numpy as np

from lengthwise import engine, policy, predict, search, workload
from lengthwise.lab import Contestant, Question, lab
from lengthwise.schema.deployment import Deployment, EngineLimits, Scheduler
from lengthwise.schema.lab import LabTable, LoadUnit
from lengthwise.schema.workload import Workload

FOLDER = "data/text/nc_alpaca_eval"
MODELS = {  # name in the paper: (catalog, whose outputs)
    "opt6.7": ("opt-6.7b", "alpaca-7b"),
    "opt13": ("opt-13b", "falcon-7b-instruct"),
    "lam7": ("llama-2-7b", "llama-2-7b-chat-hf"),
    "lam13": ("llama-2-13b", "llama-2-70b-chat-hf"),
    "vic": ("vicuna-13b", "vicuna-13b-v1.3"),
}
LOADS, BATCHES = (1.0, 3.0, 5.0), (1, 2, 4)
PROMPTS, SHUFFLES, SHAPE = 200, 3, 0.73
GPU = "A100-80GB"
OURS = "own"
RETAINED, SEATS = "ours (seats kept)", "ours (seats change hands)"
IMPROVEMENT = "worth(factor=1)"
OTHERS = {"ELIS ISRTF": "elis", "SRTF": "srtf", "Gittins": "gittins", "HRRN": "hrrn"}
HEADLINE = "blend"
R2S = (0.4, 0.85)
WAITS = (0.9, 1.0, 1.2, 1.4, 2.0)
"""Bounds on waiting, in 99th percentiles of JCT under FCFS at the same load."""
AGES = (5.0,)
"""Tokens by which a second of age makes a request shorter."""
PAPER = (  # Table 5, batch 4: FCFS, ISRTF, SJF
    (77.83, 73.57, 20.35), (116.46, 98.74, 43.63), (118.13, 118.11, 43.63), (45.08, 50.52, 13.21),
    (83.42, 72.33, 24.62), (73.93, 74.41, 31.91), (93.42, 73.43, 32.34), (134.96, 118.22, 58.39),
    (144.23, 131.38, 60.98), (240.25, 212.60, 70.55), (350.55, 352.53, 133.11), (451.59, 377.29, 125.59),
    (91.28, 130.71, 37.02), (229.64, 200.34, 59.37), (251.66, 234.08, 89.64),
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A prompt and what a model answered."""

    prompt: str
    prompt_tokens: int
    output: str
    output_tokens: int


@lru_cache(maxsize=16)
def texts(shared: Path, outputs: str, *, tuning: bool = False) -> list[Text]:
    """The sampled prompts of one model, the same for every shuffle; for tuning others, on which nobody is judged."""
    asked, told = _requested(shared), _told_by(shared, outputs)
    rows = _evaluated(told)
    if tuning:
        judged = {r["idx"] for _, name in MODELS.values() for r in _evaluated(_told_by(shared, name))}
        left = [r for r in told if r["idx"] not in judged]
        rows = [left[i] for i in np.random.default_rng(1).choice(len(left), PROMPTS, replace=False)]
    return [
        Text(asked[r["idx"]]["instruction"], asked[r["idx"]]["n_tok_tekken131k"], r["output"], r["n_tok_tekken131k"])
        for r in rows
    ]


def _evaluated(report: list[dict]) -> list[dict]:
    return [report[i] for i in np.random.default_rng(0).choice(len(report), PROMPTS, replace=False)]


@lru_cache(maxsize=1)
def _requested(shared: Path) -> dict[Any, dict]:
    return {row["idx"]: row for row in _lines(shared / FOLDER / "instructions.jsonl.gz")}


@lru_cache(maxsize=8)
def _told_by(shared: Path, outputs: str) -> list[dict]:
    rows = _lines(shared / FOLDER / "outputs" / f"{outputs}.jsonl.gz")
    return [row for row in rows if row["n_tok_tekken131k"] > 0]


def _lines(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def shuffled(of: list[Text], model: str, seed: int, max_tokens: int) -> Workload:
    """The prompts in a random order, with Gamma arrivals; the rate is for the laboratory to set."""
    rng = np.random.default_rng([seed, 0xE115])
    order = [of[i] for i in rng.permutation(len(of))]
    prompt = np.array([text.prompt_tokens for text in order], np.int64)
    output = np.array([text.output_tokens for text in order], np.int64)
    columns = {
        "prompt": [text.prompt for text in order],
        "output": [text.output for text in order],
        "model": [model] * len(order),
    }
    return Workload(
        workload.Gamma(1.0, SHAPE**-0.5).sample(len(order), rng),
        prompt,
        np.minimum(output, max_tokens - prompt),
        extra={name: np.array(column, object) for name, column in columns.items()},
        name=model,
    )


@dataclass(frozen=True)
class Bench:
    """One model's part of the laboratory.

    Attributes:
        shared: The folder of recorded data.
        model: By the paper's name.
        predictors: What predicts, by name; a tuple adds arguments of ``predict.attach``.
        tuning: Other prompts and shuffles than those that are judged.
    """

    shared: Path
    model: str
    predictors: dict[str, Any]
    tuning: bool = False

    def requests(self, seed: int, predictor: str) -> Workload:
        """The prompts in the order of a shuffle, with what is predicted of them."""
        outputs = MODELS[self.model][1]
        seed += SHUFFLES * self.tuning
        most = self.deployment(Scheduler(), max(BATCHES)).max_model_len
        made = shuffled(texts(self.shared, outputs, tuning=self.tuning), outputs, seed, most)
        if not predictor:
            return made
        which, options = self.predictors[predictor]
        return predict.attach(made, which, seed=seed, **options)

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        """The model on one GPU."""
        return replace(_deployed(MODELS[self.model][0], batch), scheduler=scheduler)


@lru_cache(maxsize=32)
def _deployed(model: str, batch: int) -> Deployment:
    return engine.deploy(model, GPU, limits=EngineLimits(max_num_seqs=batch))


def predictors(shared: Path, model: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Who predicts, by name, and what policies are told of the distribution (see ``predict.attach``)."""
    text, outputs = shared / "data" / "text", MODELS[model][1]
    learnt = _texts.oasst(text)
    spread = float(np.std(np.log([t.output_tokens for t in texts(shared, outputs)])))
    lexical = predict.default()
    made = {
        "oracle": (predict.Oracle(), {}),
        "constant": (predict.Same(float(learnt.output_tokens.mean())), {}),
        "ecdf, survival": (predict.Conditional(predict.Ecdf().fit(learnt)), {}),
        "default": (lexical, {}),
        "default, median": (lexical, {"statistic": "median"}),
        HEADLINE: (_blend.trained(text), {"statistic": "median"}),
    }
    for r2 in R2S:  # of the logarithm; the oracle's words times a log-normal factor, said once
        error = predict.LogNormalError(spread * math.sqrt((1 - r2) / r2))
        made[f"oracle, R2 {r2:g}"] = (error, {"statistic": "median", "update_predictions": False})
    if path := os.environ.get("LENGTHWISE_ENCODER_PREDICTOR"):
        made["encoder"] = (predict.load(Path(path)), {"statistic": "median"})
    return made


def _unbounded(name: str) -> Scheduler:
    """A named scheduler without the bound on waiting that it has by itself."""
    return replace(policy.scheduler(name), max_wait_s=math.inf)


def contestants(*, others: bool, waits: Sequence[float]) -> tuple[Contestant, ...]:
    """Ours, with seats kept or changing hands, without a bound on waiting and with bounds; and others."""
    made = [Contestant(name, _unbounded(named)) for name, named in OTHERS.items() if others]
    for name, scheduler in {
        RETAINED: _unbounded("sjf"),
        SEATS: replace(_unbounded("isrtf"), takeover=IMPROVEMENT),
    }.items():
        made.append(Contestant(name, scheduler))
        made += [Contestant(f"{name}, wait {w:g}", scheduler, longest_wait=w) for w in waits]
        ages = AGES if others else ()
        made += [Contestant(f"{name}, aged {w:g}", replace(scheduler, rank=f"aged(weight={w:g})")) for w in ages]
    return tuple(made)


def tables(shared: Path, shuffles: int, *, tuning: bool, fast: bool) -> dict[str, LabTable]:
    """A laboratory a model: every policy with every predictor; for tuning ours alone, on other prompts."""
    engine.warm_up()
    made = {}
    for model in list(MODELS)[: 2 if fast else None]:
        known = predictors(shared, model)
        asked = contestants(others=not tuning, waits=WAITS[::2] if fast else WAITS)
        question = Question(asked, tuple(known), LOADS, BATCHES, shuffles, LoadUnit.ALONE, name=model)
        with search.threads() as workers:
            made[model] = lab(question, Bench(shared, model, known, tuning), each=workers.run)
    return made


def over_cells(of: dict[str, LabTable], policy_name: str, predictor: str) -> dict[str, float]:
    """Means over all models, loads and batch sizes of what a policy does; by load, too."""
    cells = [c for t in of.values() for c in t.cells if (c.policy, c.predictor) == (policy_name, predictor)]
    known = [c for c in cells if not math.isnan(c["gap_closed"].value)]

    def mean(metric: str, at: list[Any]) -> float:
        return float(f"{np.mean([c[metric].value for c in at]):.4g}")

    return {
        "gap_closed": mean("gap_closed", known),
        "p99_over_fcfs": mean("jct.p99/fcfs", cells),
        "p99_over_oracle": mean("jct.p99/oracle", cells),
        "preemptions": mean("preemptions_per_request", cells),
        **{f"gap_closed_{load:g}x": mean("gap_closed", [c for c in known if c.load == load]) for load in LOADS},
    }


def by_model(of: dict[str, LabTable], policy_name: str, predictor: str) -> dict[str, float]:
    """The share of the gap closed for each model, and half of the 95 % interval of its mean over models."""
    made = {model: over_cells({model: table}, policy_name, predictor)["gap_closed"] for model, table in of.items()}
    return made | {"half_width": float(f"{mean_half_width(list(made.values())):.2g}")}


def mean_half_width(values: list[float]) -> float:
    """Half of the 95 % t interval of the mean."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def frontier(of: dict[str, LabTable], predictor: str) -> list[dict[str, Any]]:
    """Gap closed against the tail as the bound on waiting, or ageing, varies."""
    names = list(dict.fromkeys(c.policy for t in of.values() for c in t.cells if c.policy.startswith(OURS)))
    return [{"policy": name, **over_cells(of, name, predictor)} for name in names]


def chosen(tuned: list[dict[str, Any]], tail: str, most: float) -> str:
    """The policy that closes most of the gap within a bound on the tail, on other prompts than it is judged by."""
    within = [point for point in tuned if point[tail] <= most] or [min(tuned, key=lambda point: point[tail])]
    return str(max(within, key=lambda point: point["gap_closed"])["policy"])


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Rows of benchmarks/lengths.py by name."""
    if not (shared / FOLDER).is_dir():
        return {"elis.skipped": f"no folder {shared / FOLDER}"}
    tuning = tables(shared, SHUFFLES - 1, tuning=True, fast=fast)
    judged = tables(shared, SHUFFLES, tuning=False, fast=fast)
    names = list(dict.fromkeys(c.predictor for t in judged.values() for c in t.cells if c.predictor))
    best = HEADLINE
    tuned = frontier(tuning, best)
    near_oracle = over_cells(judged, by_oracle := chosen(tuned, "p99_over_oracle", 1.05), best)
    near_fcfs = over_cells(judged, by_fcfs := chosen(tuned, "p99_over_fcfs", 1.15), best)
    return {
        "elis.gap_closed": {
            "value": near_oracle["gap_closed"], "policy": by_oracle, "predictor": best, **near_oracle,
            "trained_on": _blend.about(), "by_model": by_model(judged, by_oracle, best),
        },
        "elis.p99_over_oracle": {"value": near_oracle["p99_over_oracle"], "policy": by_oracle},
        "elis.gap_closed_at_p99_115": {
            "value": near_fcfs["gap_closed"], "policy": by_fcfs, "predictor": best, **near_fcfs,
            "trained_on": _blend.about(), "by_model": by_model(judged, by_fcfs, best),
        },
        "elis.by_predictor": {"value": math.nan, **by_predictor(tuning, judged, names)},
        "elis.frontier": {"value": math.nan, **{name: frontier(judged, name) for name in names}},
        "elis.statistics": {"value": math.nan, **statistics(judged, names)},
        "elis.table5": {"value": math.nan, **table5(judged, by_oracle, best)},
        "elis.figure6": {"value": math.nan, **figure6(judged)},
        "elis.paper": {"value": math.nan, "gap_closed": paper_gap()},
    }  # fmt: skip


def by_predictor(tuning: dict, evaluated: dict, names: list[str]) -> dict[str, Any]:
    """For each predictor: the most of the gap within 5 % of the oracle's P99, within 15 % of FCFS', without a bound."""
    made = {}
    for name in names:
        tuned = frontier(tuning, name)
        made[name] = {
            "within 5 % of the oracle's P99": _report(evaluated, chosen(tuned, "p99_over_oracle", 1.05), name),
            "within 15 % of FCFS' P99": _report(evaluated, chosen(tuned, "p99_over_fcfs", 1.15), name),
            "seats kept, no bound": _report(evaluated, RETAINED, name),
            "seats change hands, no bound": _report(evaluated, SEATS, name),
            "ELIS ISRTF": _report(evaluated, "ELIS ISRTF", name),
        }
    return made


def _report(evaluated: dict, name: str, predictor: str) -> dict[str, Any]:
    return {"policy": name, **over_cells(evaluated, name, predictor)}


def statistics(evaluated: dict, names: list[str]) -> dict[str, Any]:
    """Which policy with which statistic of the same predictor closes most."""
    policies = (RETAINED, SEATS, *OTHERS)
    own = [name for name in names if name.startswith(("default", HEADLINE))]
    return {f"{one}, {name}": over_cells(evaluated, one, name) for one in policies for name in own}


def table5(evaluated: dict[str, LabTable], own: str, predictor: str) -> dict[str, Any]:
    """Mean JCT in seconds at batch 4: FCFS, ELIS' ISRTF, ours, SJF with known lengths."""
    made: dict[str, Any] = {}
    for model, table in evaluated.items():
        for load in LOADS:
            cells = {(c.policy, c.predictor): c["jct.mean"].value for c in table.at(max(BATCHES), load)}
            made[f"{model} {load:g}x"] = {
                "FCFS": cells["fcfs", ""],
                "ISRTF": cells["ELIS ISRTF", predictor],
                "own": cells[own, predictor],
                "SJF": cells["oracle", "oracle"],
            }
    return made


def figure6(evaluated: dict[str, LabTable]) -> dict[str, float]:
    """How much shorter ELIS' ISRTF makes mean JCT than FCFS, over models: percent by batch size and load."""
    return {
        f"batch {batch}, {load:g}x": float(f"{100 * (1 - np.mean(ratios)):.3g}")
        for batch in BATCHES
        for load in LOADS
        for ratios in (
            [
                c["jct.mean/fcfs"].value
                for t in evaluated.values()
                for c in t.at(batch, load)
                if (c.policy, c.predictor) == ("ELIS ISRTF", HEADLINE)
            ],
        )
    }


def paper_gap() -> float:
    """The share of the gap that ISRTF closes in the paper's Table 5, mean over its 15 rows."""
    return float(f"{np.mean([(f - i) / (f - s) for f, i, s in PAPER]):.3g}")
