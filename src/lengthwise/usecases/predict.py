"""Training of a length predictor, and its evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import predict, workload
from lengthwise.predict import Evaluation, Samples
from lengthwise.predict.sample_files import Split
from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError

KINDS = {
    "lexical": "Lexical", "encoder": "Encoder", "ecdf": "Ecdf", "buckets": "BucketEcdf", "constant": "Constant",
    "in_session": "InSession",
}  # fmt: skip
_SEEDED = ("lexical", "encoder")


@dataclass(frozen=True)
class TrainedPredictor:
    """A trained predictor, the metadata for its file, and an evaluation, which is None without held-out prompts."""

    predictor: Any
    metadata: dict[str, Any]
    samples: int
    evaluation: Evaluation | None = None
    split: Split | None = None


def check_kind(kind: str) -> None:
    """Raise UnknownNameError unless a kind of predictor has this name."""
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", kind, KINDS)


def read_samples(files: Sequence[Path], kind: str, *, model: str | None = None) -> Samples:
    """Read the requests to learn from: those of a trace for the kind "in_session", otherwise prompts with outputs.

    A trace's sessions are its own, or those that its shared prefixes show. Raises InputError if a file cannot be read,
    or there is more than one trace.
    """
    if kind != "in_session":
        return predict.read(files, model=model)
    if len(files) > 1:
        raise InputError(f"a predictor of kind in_session learns from one trace; there are {len(files)} files")
    requests = workload.find_sessions(workload.read(files[0]))
    samples = predict.samples_of(requests, model)
    return replace(samples, metadata={"sources": [files[0].name]})


def train(
    samples: Samples, kind: str, *, test_share: float = 0.2, seed: int = 0, conformal: bool = False
) -> TrainedPredictor:
    """Train a predictor of output lengths, and evaluate it on held-out prompts.

    A share ``test_share`` of the prompts, or of the sessions, is held out. Samples with neither are not split and not
    evaluated. Raises MissingExtraError if the predictor needs a package that is not installed.
    """
    check_kind(kind)
    try:
        inner = (predict.Ecdf(),) if kind == "in_session" else ()
        predictor = getattr(predict, KINDS[kind])(*inner, **({"seed": seed} if kind in _SEEDED else {}))
    except ImportError as error:
        raise MissingExtraError(f"the {kind} predictor", "predict") from error
    if conformal:
        predictor = predict.Conformal(predictor, seed=seed)
    versions = {}
    for package in ("lengthwise", "numpy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    can_split = test_share > 0 and (samples.prompts.text is not None or samples.group is not None)
    parts = predict.split(samples, test_share, seed) if can_split else None
    learned = samples if parts is None else parts.train
    text, models = learned.prompts.text, learned.prompts.model
    metadata: dict[str, Any] = {
        **{key: value for key, value in samples.metadata.items() if key not in ("unknown_finish", "misspelt")},
        "samples": len(learned),
        "prompts": len({prompt.strip() for prompt in text}) if text is not None else 0,
        "models": sorted({str(name) for name in models}) if models is not None else [],
        "censored": int(learned.censored.sum()),
        "seed": seed,
        "trained": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }
    predictor.fit(learned)
    if parts is None:
        return TrainedPredictor(predictor, metadata, len(learned))
    unit = "prompts" if samples.group is None else "sessions"
    found = predict.evaluate(predictor, parts.test, name=f"{kind} on held-out {unit}", seed=seed)
    scores = {name: [float(e.value), float(e.half_width)] for name, e in found.scores.items() if np.isfinite(e.value)}
    metadata |= {"test_share": test_share, "held_out": scores, "near_duplicates": parts.near_duplicates}
    return TrainedPredictor(predictor, metadata, len(parts.train), found, parts)
