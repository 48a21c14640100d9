"""Figures of the lexical predictor: in its distribution, out of it, as tokens come, and what can be known at all."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import _texts
import numpy as np

from lengthwise.predict import Prompts, Samples
from lengthwise.predict.evaluation import Evaluation, evaluate, kendall, knowable, latency_ms
from lengthwise.predict.lexical import Lexical
from lengthwise.predict.sample_files import Split, split
from lengthwise.predict.serialization import default
from lengthwise.schema.estimate import Estimate

FOLDS = 5
MOST_WINDOWS = 8000
APART = (0, 50, 100, 200, 300, 400, 600)
ELIS_MODELS = ("llama-2-7b-chat-hf", "llama-2-70b-chat-hf", "vicuna-7b-v1.5", "vicuna-13b-v1.3", "vicuna-33b-v1.3")
"""Models of the families that ELIS served, of those that AlpacaEval holds."""


@cache
def learnt(text: Path, fast: bool) -> tuple[Split, Lexical]:
    """Samples in two parts by prompt, and a lexical predictor of the first; quick: Open-Assistant's alone."""
    parts = split(_texts.oasst(text) if fast else _texts.wide(text), 0.2, 0)
    return parts, Lexical(most_windows=1500 if fast else MOST_WINDOWS).fit(parts.train)


def figures(shared: Path, fast: bool) -> dict:
    """Rows of benchmarks/lengths.py by name; a quick look learns from Open-Assistant's samples alone."""
    text = shared / "data/text"
    draws = 10 if fast else 40
    parts, model = learnt(text, fast)
    inside = evaluate(model, parts.test, draws=draws, clock=None)
    other = _texts.alpaca_eval(text)
    outside = {"wide" if not fast else "oasst": evaluate(model, other, windows=APART, draws=draws, clock=None)}
    apart = _texts.without(other, list(_texts.shipped(text).prompts.text))
    outside["shipped"] = evaluate(default(), apart, windows=APART, draws=draws, clock=None)
    told = {
        "predict.lexical_tau": {
            **number(inside.scores["tau"]),
            "samples": len(parts.train),
            "prompts": len(set(parts.train.prompts.text)),
        },
        "predict.lexical_scores": {
            name: number(inside.scores[name]) for name in ("tau_within", "coverage90", "pinball", "mae", "r2", "log_r2")
        },
        "predict.lexical_r2_by_window": {"value": round(inside.windows[-1].r2_all, 4), "windows": by_window(inside)},
        "predict.lexical_ms": {
            "value": round(fastest_ms(32, apart.prompts), 4),
            "batch_1": round(fastest_ms(1, apart.prompts), 4),
        },
        "predict.knowable": known_share(text, draws),
        "predict.reached": reached(text),
    }
    for name, found in outside.items():
        told[f"predict.tau_apart_{name}"] = apart_figures(found)
    if not fast:
        told["predict.tau_from_to"] = from_to(text)
    return told


def number(estimate: Estimate) -> dict:
    return {"value": round(estimate.value, 4), "half_width": round(estimate.half_width, 4)}


def by_window(found: Evaluation) -> list[dict]:
    """What is known after so many tokens: of all requests (those that ended count as known), and of those that run."""
    return [
        {
            "tokens": w.tokens,
            "running": w.running,
            "mae_all": round(w.mae.value * w.running / found.requests, 1),
            "r2_all": round(w.r2_all, 4),
            "r2_running": round(w.r2.value, 4),
            "tau_running": round(w.tau.value, 4),
            "mae_running": round(w.mae.value, 1),
            "coverage90": round(w.coverage90.value, 4),
        }
        for w in found.windows
    ]


def apart_figures(found: Evaluation) -> dict:
    """Scores on models and prompts that were not learnt from."""
    taus = {name: of["tau"] for name, of in found.by_model.items()}
    return {
        **number(found.scores["tau_within"]),
        "elis_models": {name: round(taus[name], 4) for name in ELIS_MODELS},
        "tau_by_model": {name: round(tau, 4) for name, tau in taus.items()},
        "coverage90": number(found.scores["coverage90"]),
        "mae": number(found.scores["mae"]),
        "by_window": by_window(found),
    }


def fastest_ms(batch: int, prompts: Prompts) -> float:
    """Milliseconds of processor time a prompt: other processes do not count, and of five rounds the least does."""
    return min(latency_ms(default(), prompts, batch, time.thread_time) for _ in range(5))


def known_share(text: Path, draws: int) -> dict:
    """The between-prompt share of the variance over 70 runs; uncut lengths, and all of them."""
    rows = _texts.sample_lengths(text)
    out: dict = {}
    for name, kept in (("all", np.ones(len(rows["run"]), bool)), ("uncut", ~rows["censored"])):
        found = knowable(rows["run"][kept], rows["prompt"][kept], rows["tokens"][kept], draws=draws)
        shares = [share for share, _ in found.runs.values()]
        out[name] = {
            "share": number(found.share),
            "log_share": number(found.log_share),
            "runs": len(shares),
            "runs_quartiles": [round(float(q), 4) for q in np.quantile(shares, [0.25, 0.5, 0.75])],
            "cut": round(float(rows["censored"].mean()), 4),
        }
    return {**out["all"]["share"], **out}


def reached(text: Path) -> dict:
    """R2 within a run on Open-Assistant's prompts, each predicted by a model that has not seen it.

    Lengths are those of ``known_share``'s "all": cut at the run's limit, and so is the prediction, in every quantile.
    """
    samples = _texts.oasst(text)
    prompts, prompt = np.unique(list(samples.prompts.text), return_inverse=True)
    fold = np.random.default_rng(0).permutation(len(prompts))[prompt] % FOLDS
    run = np.unique(list(samples.prompts.model), return_inverse=True)[1]
    y = samples.output_tokens.astype(float)
    limit = np.array([y[run == r].max() for r in range(run.max() + 1)])[run]
    p, log_p = np.zeros(len(y)), np.zeros(len(y))
    for k in range(FOLDS):
        own, out = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        model = Lexical(most_windows=1).fit(samples.take(own))
        said = model.predict(samples.prompts.take(out))
        cut = np.minimum(said.tokens, limit[out][:, None])
        steps = np.diff(said.levels)
        p[out] = ((cut[:, 1:] + cut[:, :-1]) / 2) @ steps
        log_p[out] = ((np.log(cut[:, 1:]) + np.log(cut[:, :-1])) / 2) @ steps
    taus = [kendall(p[run == r], y[run == r]) for r in np.unique(run)]
    return {
        "value": round(_within(y, p, run), 4),
        "log_r2_within_run": round(_within(np.log(y), log_p, run), 4),
        "tau_within_run": round(float(np.mean(taus)), 4),
    }


def _within(y: np.ndarray, p: np.ndarray, run: np.ndarray) -> float:
    """R2 about each run's own mean, the prediction's mean moved there, too: what prompts told."""
    y = y - (np.bincount(run, y) / np.bincount(run))[run]
    p = p - (np.bincount(run, p) / np.bincount(run))[run]
    return 1 - float(((y - p) ** 2).sum() / (y**2).sum())


def from_to(text: Path) -> dict:
    """Mean tau within a model, from a training set to a test set of other prompts and models."""
    zeroeval = _texts.together([_texts.zeroeval(text, task) for task in ("gsm", "crux", "math-l5")])
    gpteacher = [
        _texts.instructions(text, "gpteacher", name)
        for name in ("codegen-instruct", "roleplay-simple-deduped", "toolformer-similarity-0.8")
    ]
    sets: dict[str, Samples] = {
        "oasst": _texts.oasst(text),
        "zeroeval": zeroeval,
        "arena_hard": _texts.arena_hard(text),
        "alpaca_en_demo": _texts.instructions(text, "llamafactory_demo", "alpaca_en_demo"),
        "gpteacher": _texts.together(gpteacher),
    }
    tests = {"alpaca_eval": _texts.alpaca_eval(text), "oasst": sets["oasst"], "zeroeval": sets["zeroeval"]}
    out: dict[str, dict[str, float]] = {}
    for source, samples in sets.items():
        model = Lexical(most_windows=1).fit(samples)
        for target, other in tests.items():
            if target != source:
                rest = _texts.without(other, list(samples.prompts.text))
                found = evaluate(model, rest, windows=(), draws=0, clock=None)
                out.setdefault(source, {})[target] = round(found.scores["tau_within"].value, 4)
    return out
