"""Figures of predictors: in distribution, on other prompts and models, as tokens arrive, and what is predictable.

``encoder`` adds the sentence encoder, the lexical predictor on the same samples, and the mean of both.
"""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import _texts
import numpy as np
from _harness import group_use

from lengthwise.predict import Ensemble, Samples
from lengthwise.predict.encoder import Encoder, encoder_folder
from lengthwise.predict.evaluation import Evaluation, evaluate, explainable_variance, latency_ms
from lengthwise.predict.features import is_mathematics
from lengthwise.predict.lexical import Lexical
from lengthwise.predict.sample_files import Split, split
from lengthwise.predict.serialization import default
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate

sys.path.append(str(Path(__file__).parents[1] / "tests" / "predict"))  # which holds the predictor of ELIS
MAX_WINDOWS = 8000
WINDOWS = (0, 50, 100, 200, 300, 400, 600)
SCORES = ("tau", "tau_within", "coverage90", "pinball", "mae", "r2", "log_r2", "bias")


@cache
def learnt(text: Path, quick: bool) -> tuple[Split, Lexical]:
    """Return samples in two parts by prompt, and a lexical predictor of the first; quick: Open-Assistant's alone."""
    parts = split(_texts.oasst(text) if quick else _texts.wide(text), 0.2, 0)
    return parts, Lexical(max_windows=1500 if quick else MAX_WINDOWS).fit(parts.train)


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the rows of the lexical predictor by name; quick: trained on Open-Assistant's samples alone."""
    text = shared / "data/text"
    draws = 10 if quick else 40
    parts, model = learnt(text, quick)
    inside = evaluate(model, parts.test, draws=draws, clock=None)
    other = _texts.alpaca_eval(text)
    other = other.take(np.arange(0, len(other), 8)) if quick else other
    unseen = _texts.without(other, _texts.shipped(text).prompts.text)
    latency = partial(latency_ms, default(), unseen.prompts, clock=time.thread_time)
    batch_1, batch_32 = (min(latency(batch) for _ in range(5)) for batch in (1, 32))
    sizes = {"samples": len(parts.train), "prompts": len(set(parts.train.prompts.text))}
    sizes |= {"near_duplicates": parts.near_duplicates, "held_out": [asdict(band) for band in model.held_out_]}
    known = explainable_variance(*_texts.sample_lengths(text), draws=draws)
    rows = {
        "predict.lexical_tau": number(inside.scores["tau"]) | sizes,
        "predict.lexical_scores": {name: number(inside.scores[name]) for name in SCORES[1:-1]},
        "predict.lexical_r2_by_window": best_r2(by_window(inside)),
        "predict.lexical_ms": {"value": round(batch_32, 4), "batch_1": round(batch_1, 4)},
        "predict.knowable": number(known.share) | {"log_share": number(known.log_share), "runs": len(known.runs)},
        "predict.mathematics": {"by_set": mathematics(text, _texts.ZEROEVAL[: 1 if quick else None])},
    }
    trained_on = "oasst" if quick else "wide"
    for name, predictor, samples in ((trained_on, model, other), ("shipped", default(), unseen)):
        found = evaluate(predictor, samples, windows=WINDOWS, draws=draws, clock=None)
        scores = {score: number(found.scores[score]) for score in ("coverage90", "mae")}
        scores["tau_by_model"] = {model: round(of["tau"], 4) for model, of in found.by_model.items()}
        tau = number(found.scores["tau_within"])
        rows[f"predict.tau_apart_{name}"] = tau | scores | {"by_window": by_window(found)}
    return rows


def mathematics(text: Path, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return what the shipped predictor knows of each set of prompts, and their share that counts as mathematics."""
    sets = {f"ZeroEval {task}": _texts.zeroeval(text, task) for task in tasks}
    sets |= {"Arena-Hard": _texts.arena_hard(text), "AlpacaEval": _texts.alpaca_eval(text)}
    rows = {}
    for name, samples in sets.items():
        found, texts = evaluate(default(), samples, windows=(), draws=0, clock=None), set(samples.prompts.text)
        rows[name] = {"prompts": len(texts), "detected": round(sum(map(is_mathematics, texts)) / len(texts), 4)}
        rows[name] |= {score: round(found.scores[score].value, 4) for score in ("tau_within", "coverage90")}
    return rows


def number(estimate: Estimate) -> dict[str, float]:
    return {"value": round(estimate.value, 4), "half_width": round(estimate.half_width, 4)}


def by_window(found: Evaluation) -> list[dict[str, Any]]:
    """Return scores after so many tokens: of all requests (finished ones count as known), and of those running."""
    rows, deviation = [], found.scores["rmse"].value / (1 - found.scores["r2"].value) ** 0.5
    for w in found.windows:
        share, rmse = w.running / found.requests, deviation * (1 - w.r2_all) ** 0.5
        shares = {"r2_all": w.r2_all, "r2_running": w.r2.value, "tau_running": w.tau.value}
        shares |= {"mae_all": w.mae.value * share, "mae_running": w.mae.value, "coverage90": w.coverage90.value}
        shares |= {"rmse_all": rmse, "rmse_running": rmse / share**0.5}
        shares |= {"mae_all_conditioned": w.mae_conditioned * share}
        shares = {name: round(value, 4) for name, value in shares.items()}
        rows.append({"tokens": w.tokens, "running": w.running} | shares)
    return rows


def best_r2(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best R2 of running requests; that of all counts finished ones as predicted exactly."""
    return {"value": max(one["r2_running"] for one in windows), "windows": windows}


def installed_encoder() -> Path:
    """Return the folder of the sentence encoder; raise FileNotFoundError if there is none."""
    try:
        return encoder_folder()
    except InputError as error:
        raise FileNotFoundError(str(error)) from error


def encoder(shared: Path, quick: bool) -> dict[str, Any]:
    text, folder = shared / "data/text", installed_encoder()
    parts, lexical = learnt(text, quick)
    sentences = Encoder(folder, max_windows=1500 if quick else 6000).fit(parts.train)
    inside, outside = parts.test, _texts.alpaca_eval(text)
    members = {"encoder": sentences, "lexical": lexical, "both": Ensemble([sentences, lexical], [0.5, 0.5])}

    def evaluated(samples: Samples, draws: int) -> dict[str, Evaluation]:
        return {k: evaluate(one, samples, windows=(), draws=draws, clock=None) for k, one in members.items()}

    def scores(found: dict[str, Evaluation]) -> dict[str, Any]:
        return {k: {name: number(of.scores[name]) for name in SCORES} for k, of in found.items()}

    held_out, unseen = evaluated(inside, 0 if quick else 60), evaluated(outside, 0)

    def clock() -> float:
        sentences.encoder.cache.clear()  # every prompt is new
        return time.process_time()

    few = inside.take(np.sort(np.random.default_rng(0).permutation(len(inside))[: 100 if quick else 1500]))
    windows = {k: by_window(evaluate(of, few, draws=0, clock=None)) for k, of in members.items() if k != "both"}
    cpu_ms = {f"batch_{n}": round(latency_ms(sentences, outside.prompts, n, clock), 2) for n in (1, 32)}
    best = max(("encoder", "both"), key=lambda name: held_out[name].scores["tau"].value)
    return {
        **{f"predict.{score}": number(held_out[best].scores[score]) | {"by": best} for score in ("tau", "coverage90")},
        "predict.r2_by_window": best_r2(windows["encoder"]) | {"windows": windows},
        "predict.in_distribution": scores(held_out),
        "predict.apart": scores(unseen),
        "predict.encoder_ms": {"value": max(cpu_ms.values()), **cpu_ms},
    }


def sidecar(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the time of an answer of ``lengthwise predict serve`` to a client on this machine, one at a time."""
    command = [sys.executable, "-m", "lengthwise", "predict", "serve", "--port", "0"]
    body = json.dumps({"model": "m", "prompt": "Plan a trip to Rome, with a list of museums. " * 18})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as server:
        client = http.client.HTTPConnection(server.stdout.readline().split("//")[1].split("/")[0])
        took_ms, before_s = [], group_use(server.pid)[0]
        for _ in range(300 if quick else 3000):
            start_s = time.perf_counter()
            client.request("POST", "/v1/lengths", body, {"content-type": "application/json"})
            assert json.loads(client.getresponse().read())["source"] == "predictor"
            took_ms.append(1000 * (time.perf_counter() - start_s))
        cpu_ms = 1000 * (group_use(server.pid)[0] - before_s) / len(took_ms)
        server.terminate()
    found = {"value": np.median(took_ms), "p99": np.percentile(took_ms, 99), "cpu_ms": cpu_ms}
    return {"predict.sidecar_p50_ms": {name: round(float(ms), 3) for name, ms in found.items()}}


def elis(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the errors by window of ELIS' predictor and of ours, learnt from the same requests."""
    from elis_predictor import ElisPredictor

    folder, text = installed_encoder(), shared / "data/text"
    parts, made = split(_texts.oasst(text) if quick else _texts.wide(text), 0.2, 0), []
    for part, n in ((parts.train, 600), (parts.test, 400)):
        rows = np.random.default_rng(0).permutation(np.flatnonzero(~part.censored))[: 100 if quick else n]
        made.append(part.take(np.sort(rows)))
    paper = ElisPredictor(folder, *([1] if quick else [])).fit(made[0])
    members = {"elis": paper, "encoder": Encoder(folder).fit(made[0]), "lexical": Lexical().fit(made[0])}
    windows = {k: by_window(evaluate(of, made[1], draws=0, clock=None)) for k, of in members.items()}
    about = {"requests": [*map(len, made)], "train_rows": paper.rows, "best_epoch": paper.best_epoch}
    return {"elis.predictor_r2": best_r2(windows["elis"]) | {**about, "windows": windows}}
