"""Training of a length predictor, with an evaluation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from lengthwise import predict
from lengthwise.predict import Evaluation, Samples
from lengthwise.predict.sample_files import Split
from lengthwise.schema.errors import MissingExtraError, UnknownNameError

KINDS = {"lexical": "Lexical", "encoder": "Encoder", "ecdf": "Ecdf", "buckets": "BucketEcdf", "constant": "Constant"}
_SEEDED = ("lexical", "encoder")


@dataclass(frozen=True)
class TrainedPredictor:
    """A predictor, the metadata for its file, its evaluation and the split; None if nothing was held out."""

    predictor: Any
    metadata: dict[str, Any]
    samples: int
    evaluation: Evaluation | None = None
    split: Split | None = None


def check_kind(kind: str) -> None:
    """Raise UnknownNameError unless there is such a kind of predictor."""
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", kind, KINDS)


def train(
    samples: Samples, kind: str, *, test_share: float = 0.2, seed: int = 0, conformal: bool = False
) -> TrainedPredictor:
    """Train a predictor; raise MissingExtraError if its kind needs a package that is not installed.

    ``test_share`` of the prompts is held out; samples without prompts are not split.
    """
    check_kind(kind)
    try:
        predictor = getattr(predict, KINDS[kind])(**({"seed": seed} if kind in _SEEDED else {}))
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
    text, models = samples.prompts.text, samples.prompts.model
    metadata: dict[str, Any] = {
        **{key: value for key, value in samples.metadata.items() if key not in ("unknown_finish", "misspelt")},
        "samples": len(samples),
        "prompts": len({prompt.strip() for prompt in text}) if text is not None else 0,
        "models": sorted({str(name) for name in models}) if models is not None else [],
        "censored": int(samples.censored.sum()),
        "seed": seed,
        "trained": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }
    if test_share == 0 or text is None:
        predictor.fit(samples)
        return TrainedPredictor(predictor, metadata, len(samples))
    parts = predict.split(samples, test_share, seed)
    predictor.fit(parts.train)
    found = predict.evaluate(predictor, parts.test, name=f"{kind} on held-out prompts", seed=seed)
    scores = {name: [float(e.value), float(e.half_width)] for name, e in found.scores.items() if np.isfinite(e.value)}
    metadata |= {"test_share": test_share, "held_out": scores, "near_duplicates": parts.near_duplicates}
    return TrainedPredictor(predictor, metadata, len(parts.train), found, parts)
