"""What the sentence encoder predicts of prompts, and of models, that it has not seen; and what it costs.

Beside it, on the same samples, the lexical predictor and the mean of both. Everything is learnt on the training
prompts of ``_predict.learnt``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import _predict
import _texts
import numpy as np

from lengthwise.predict import Ensemble, Prompts, Samples
from lengthwise.predict.encoder import Encoder
from lengthwise.predict.evaluation import Evaluation, evaluate
from lengthwise.schema.errors import InputError

SCORES = ("tau", "tau_within", "coverage90", "pinball", "mae", "r2", "log_r2", "bias")
WINDOW_REQUESTS = 1500
"""Requests that are followed window by window: every text so far costs the encoder milliseconds."""


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Rows of benchmarks/lengths.py by name.

    Raises:
        FileNotFoundError: There is no encoder, or no recorded data.
    """
    try:
        folder = Encoder(ENCODER_FOLDER).encoder.folder
    except InputError as error:
        raise FileNotFoundError(str(error)) from error
    text = shared / "data/text"
    parts, lexical = _predict.learnt(text, fast)
    started = time.process_time()
    encoder = Encoder(folder, most_windows=1500 if fast else 6000).fit(parts.train)
    learnt_s = time.process_time() - started
    inside, outside = parts.test, _texts.alpaca_eval(text)
    members = {"encoder": encoder, "lexical": lexical, "both": Ensemble([encoder, lexical], [0.5, 0.5])}
    held = {name: whole(member, inside, 0 if fast else 60) for name, member in members.items()}
    apart = {name: whole(member, outside, 0) for name, member in members.items()}
    followed = {
        name: by_window(members[name], some(inside, 400 if fast else WINDOW_REQUESTS))
        for name in ("encoder", "lexical")
    }
    metadata = {"prompts": encoder.metadata_["prompts"], "samples": len(parts.train), "cpu_s": round(learnt_s, 1)}
    best = max(("encoder", "both"), key=lambda name: held[name].scores["tau"].value)
    return {
        "predict.tau": {**_predict.number(held[best].scores["tau"]), "by": best, "learnt": metadata},
        "predict.coverage90": {**_predict.number(held[best].scores["coverage90"]), "by": best},
        "predict.in_distribution": {name: scores(found) for name, found in held.items()},
        "predict.apart": {name: scores(found) for name, found in apart.items()},
        "predict.r2_by_window": {"value": followed["encoder"][-1]["r2_all"], "windows": followed},
        "predict.encoder_ms": latency(encoder, outside.prompts),
        "predict.encoder_share": {"value": encoder.location_.sense_share, "of": "the location, by cross-validation"},
    }


def whole(predictor: Any, samples: Samples, draws: int) -> Evaluation:
    return evaluate(predictor, samples, windows=(), draws=draws, clock=None)


def scores(found: Evaluation) -> dict[str, Any]:
    return {name: _predict.number(found.scores[name]) for name in SCORES}


def some(samples: Samples, many: int) -> Samples:
    """So many of the samples that ended by themselves, drawn once and for all."""
    kept = np.random.default_rng(0).permutation(np.flatnonzero(~samples.censored))[:many]
    return samples.take(np.sort(kept))


def by_window(predictor: Any, samples: Samples) -> list[dict[str, Any]]:
    return _predict.by_window(evaluate(predictor, samples, draws=30, clock=None))


def latency(predictor: Any, prompts: Prompts) -> dict[str, float]:
    """Milliseconds of processor time a prompt, tokenising and lexical features included, of prompts new to it.

    Of three passes over a prompt the quickest counts: others may share the machine.
    """
    texts = list(dict.fromkeys(prompts.text))[:192]
    out: dict[str, float] = {}
    for batch in (1, 32):
        times = []
        for start in range(0, len(texts) - batch + 1, batch):
            asked = Prompts(batch, text=texts[start : start + batch])
            times.append(min(timed(predictor, asked) for _ in range(3)) / batch * 1e3)
        out[f"batch_{batch}_median"] = round(float(np.median(times)), 2)
        out[f"batch_{batch}_p95"] = round(float(np.quantile(times, 0.95)), 2)
    return {"value": max(out["batch_1_median"], out["batch_32_median"]), **out}


def timed(predictor: Any, requested: Prompts) -> float:
    predictor.encoder.discard()
    started = time.process_time()
    predictor.predict(requested)
    return time.process_time() - started


ENCODER_FOLDER: str | None = None

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--encoder", help="folder of the encoder")
    given = parser.parse_args()
    ENCODER_FOLDER = given.encoder
    print(json.dumps(figures(given.shared, given.fast), indent=1))
