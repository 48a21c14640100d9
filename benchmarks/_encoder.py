"""What the sentence encoder predicts of prompts, and of models, that it has not seen; and what it costs."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _texts
import numpy as np
from scipy.stats import kendalltau

from lengthwise.predict import Prompts, Samples
from lengthwise.predict.contract import partial
from lengthwise.predict.encoder import Encoder
from lengthwise.predict.lexical import Lexical
from lengthwise.schema.errors import InputError

WINDOWS = (0, 50, 100, 150, 200, 300)
OUT_MODELS = 24


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Learns on four fifths of the permissive prompts; in distribution is the rest, out of it AlpacaEval."""
    try:
        folder = Encoder(ENCODER_FOLDER).encoder.folder
    except InputError as error:
        return {"skipped": str(error)}
    text = shared / "data/text"
    outside = _texts.alpaca_eval(text)
    sets = training_sets(text, quick)
    seen, unseen = split(sets, {plain(t) for t in outside.prompts.text})
    everything = _texts.together(list(seen.values()))
    started = time.perf_counter()
    encoder = Encoder(folder, most_windows=1500 if quick else 6000).fit(everything)
    learnt_s = time.perf_counter() - started
    lexical = Lexical().fit(everything)
    report: dict[str, Any] = {
        "prompts_learnt": encoder.facts_["prompts"],
        "learnt_s": round(learnt_s, 1),
        "encoder_ms": latency(encoder, outside.prompts),
    }
    for name, predict in members(encoder, lexical).items():
        report[name] = {
            "tau_in": {source: tau(predict, part) for source, part in unseen.items()},
            "tau_out": tau(predict, outside),
        }
    report["r2_by_window"] = {
        name: r2_by_window(predictor, _texts.together(list(unseen.values())), quick)
        for name, predictor in (("encoder", encoder), ("lexical", lexical))
    }
    report["r2_by_window_out"] = {
        name: r2_by_window(predictor, outside, quick, relative=True)
        for name, predictor in (("encoder", encoder), ("lexical", lexical))
    }
    held = _texts.together(list(unseen.values()))
    report["coverage90"] = round(coverage(encoder, held), 3)
    return report


def training_sets(text: Path, quick: bool) -> dict[str, Samples]:
    """Permissive sets with answers of models; self_instruct_252 is left out, AlpacaEval has its prompts."""
    sets = {
        "arena": _texts.arena_hard(text),
        "oasst": _texts.oasst(text),
        "llamafactory_en": _texts.instructions(text, "llamafactory_demo", "alpaca_en_demo"),
        "roleplay": _texts.instructions(text, "gpteacher", "roleplay-simple-deduped"),
    }
    if not quick:
        sets["codegen"] = _texts.instructions(text, "gpteacher", "codegen-instruct")
        for task in ("gsm", "crux", "math-l5"):
            sets[f"zeroeval_{task}"] = few_models(_texts.zeroeval(text, task), 6)
    return sets


def few_models(samples: Samples, many: int) -> Samples:
    """The samples of some of the models, spread over their names."""
    names = np.unique(np.array(samples.prompts.model))
    kept = names[np.linspace(0, len(names) - 1, many).astype(int)]
    return samples.take(np.flatnonzero(np.isin(np.array(samples.prompts.model), kept)))


def split(sets: dict[str, Samples], banned: set[str]) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Samples to learn from and, by the hash of the prompt, a fifth held out; no prompt that is banned."""
    seen, unseen = {}, {}
    for name, samples in sets.items():
        texts = [plain(t) for t in samples.prompts.text]
        held = np.array([int(hashlib.sha256(t.encode()).hexdigest()[:8], 16) % 5 == 1 for t in texts])
        free = np.array([t not in banned for t in texts])
        seen[name] = samples.take(np.flatnonzero(free & ~held))
        if (free & held).any():
            unseen[name] = samples.take(np.flatnonzero(free & held))
    return seen, unseen


def plain(text: str) -> str:
    """A prompt as its words alone."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def members(encoder: Any, lexical: Any) -> dict[str, Callable[[Prompts], np.ndarray]]:
    """What orders prompts: each alone, and the mean of their logarithms."""
    return {
        "encoder": lambda p: np.log(encoder.predict(p).median),
        "lexical": lambda p: np.log(lexical.predict(p).median),
        "both": lambda p: np.log(encoder.predict(p).median) + np.log(lexical.predict(p).median),
    }


def tau(predict: Callable[[Prompts], np.ndarray], samples: Samples) -> float:
    """Kendall's tau-b of predicted and true lengths within one model, the mean over models."""
    said, names = predict(samples.prompts), np.array(samples.prompts.model)
    rows = [np.flatnonzero(names == name) for name in np.unique(names)]
    taus = [kendalltau(said[r], samples.output_tokens[r]).statistic for r in rows if len(r) > 10]
    return round(float(np.nanmean(taus)), 3)


def r2_by_window(
    predictor: Any, samples: Samples, quick: bool, *, relative: bool = False
) -> dict[int, float]:
    """R2 of the expected whole length once ``w`` tokens have come, over the requests that outlived them.

    With ``relative`` lengths are log lengths less the mean of their model, for models whose scale nobody
    knows.
    """
    out = {}
    for window in WINDOWS:
        alive = np.flatnonzero((samples.output_tokens > window) & ~samples.censored)
        rows = np.sort(np.random.default_rng(0).permutation(alive)[: 300 if quick else 1200])
        some = samples.take(rows)
        so_far = np.full(len(some), window, np.int64)
        prompts = partial(some.prompts, some.output, some.output_tokens, so_far) if window else some.prompts
        said, true = predictor.predict(prompts, so_far).mean, some.output_tokens.astype(float)
        if relative:
            said, true = centred(np.log(said), some), centred(np.log(true), some)
        out[window] = round(float(1 - ((true - said) ** 2).sum() / ((true - true.mean()) ** 2).sum()), 3)
    return out


def centred(values: np.ndarray, samples: Samples) -> np.ndarray:
    """Values less the mean of their model."""
    _, model = np.unique(np.array(samples.prompts.model), return_inverse=True)
    return values - (np.bincount(model, values) / np.bincount(model))[model]


def coverage(predictor: Any, samples: Samples) -> float:
    """How often the length lies between the 5 % and 95 % quantile, of outputs that ended by themselves."""
    whole = samples.take(np.flatnonzero(~samples.censored))
    said = predictor.predict(whole.prompts)
    inside = (whole.output_tokens >= said.quantile(0.05)) & (whole.output_tokens <= said.quantile(0.95))
    return float(inside.mean())


def latency(predictor: Any, prompts: Prompts) -> dict[str, float]:
    """Milliseconds a prompt on one thread, tokenising included, of prompts that are new to it.

    Of five passes over a prompt the quickest counts, and the seconds are those of the process: others may
    share the machine.
    """
    texts = list(dict.fromkeys(prompts.text))[:256]
    out = {}
    for batch in (1, 32):
        times = []
        for start in range(0, len(texts) - batch + 1, batch):
            asked = Prompts(batch, text=texts[start : start + batch])
            best = min(timed(predictor, asked) for _ in range(5))
            times.append(best / batch * 1e3)
        out[f"batch_{batch}_median"] = round(float(np.median(times)), 2)
        out[f"batch_{batch}_p95"] = round(float(np.quantile(times, 0.95)), 2)
    return out


def timed(predictor: Any, asked: Prompts) -> float:
    predictor.encoder.forget()
    started = time.process_time()
    predictor.predict(asked)
    return time.process_time() - started


ENCODER_FOLDER: str | None = None

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--encoder", help="folder of the encoder")
    given = parser.parse_args()
    ENCODER_FOLDER = given.encoder
    print(json.dumps(figures(given.shared, given.quick), indent=1))
