"""What learning is worth on recorded answers of models that the shipped predictor has not seen."""

from __future__ import annotations

import asyncio
import gzip
import json

import numpy as np
import pytest
from prediction_worlds import finished
from scipy.stats import kendalltau

from lengthwise.gateway.config import PredictionConfig
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.predict import LEVELS, default

MODELS = ("vicuna-7b-v1.5", "Qwen1.5-7B-Chat", "phi-2", "gpt4_1106_preview")


def recorded(folder) -> list[tuple[str, str, int]]:
    """(model, prompt, output tokens), mixed."""

    def rows(path):
        with gzip.open(path, "rt") as file:
            return [json.loads(line) for line in file]

    requested = {row["idx"]: row["instruction"] for row in rows(folder / "instructions.jsonl.gz")}
    reported = [
        (model, requested[row["idx"]], max(1, int(row["n_tok_tekken131k"])))
        for model in MODELS
        for row in rows(folder / "outputs" / f"{model}.jsonl.gz")
        if row["output"] and row["idx"] in requested
    ]
    order = np.random.default_rng(0).permutation(len(reported))
    return [reported[int(i)] for i in order[:1600]]


async def served(traffic, *, learn: bool) -> tuple[dict[float, float], float, int]:
    """Coverage by level and Kendall's tau over the second half, and drift alarms."""
    async with LengthPredictor(PredictionConfig(learn=learn), predictor=default(), place="inline") as f:
        made = [await finished(f, tokens, text, model=model, max_tokens=100_000) for model, text, tokens in traffic]
        drifts = f.drifts
    last = made[len(made) // 2 :]
    message = np.array([one.length_prediction.unbounded for one in last])
    came = np.array([one.generated_tokens for one in last])
    cover = {p: float((came <= message[:, np.searchsorted(LEVELS, p)]).mean()) for p in (0.1, 0.5, 0.9)}
    return (
        cover,
        float(kendalltau([one.length_prediction.initial_total_tokens for one in last], came).statistic),
        drifts,
    )


@pytest.mark.slow
def test_quantiles_hold_and_the_order_is_far_better_once_models_are_known(shared) -> None:
    traffic = recorded(shared("data/text/nc_alpaca_eval"))
    before, tau_before, _ = asyncio.run(served(traffic, learn=False))
    after, tau_after, drifts = asyncio.run(served(traffic, learn=True))
    for level, share in after.items():
        assert abs(share - level) < 4 * np.sqrt(level * (1 - level) * (1 / 800 + 1 / 800))
    assert abs(before[0.9] - 0.9) > 0.05  # what there was to learn
    assert tau_after > tau_before + 0.1
    assert drifts == 0
