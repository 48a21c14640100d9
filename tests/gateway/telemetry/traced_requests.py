"""A gateway's events, reported by hand to a listener."""

from __future__ import annotations

import numpy as np

from lengthwise.gateway.request import Client, LengthPrediction, Outcome, Request
from lengthwise.predict import LEVELS

CONFIG_ENGINE = "http://127.0.0.1:1"


def length_prediction(total: float, source: str = "predictor") -> LengthPrediction:
    return LengthPrediction(total, source, quantiles=total * (0.5 + np.asarray(LEVELS)))


def request(number: int, arrival_s: float = 0.0, *, model: str = "m", tenant: int = 0, predicted: float = 10.0):
    return Request(
        id=number,
        arrival_s=arrival_s,
        model=model,
        prompt_tokens=7,
        max_tokens=100,
        client=Client(tenant),
        length_prediction=length_prediction(predicted),
    )


def serve(listener, q: Request, start_s: float, tokens: int, token_s: float, *, worker: str = "w0") -> float:
    """Arrived, dispatched, all its tokens, finished; returns the end."""
    listener.on_admission(q)
    return run(listener, q, start_s, tokens, token_s, worker=worker)


def run(listener, q: Request, start_s: float, tokens: int, token_s: float, *, worker: str = "w0") -> float:
    q.dispatch.queued_for_s += start_s - q.arrival_s
    listener.dispatched(q, worker, start_s)
    now_s = start_s
    for k in range(tokens):
        now_s = start_s + (k + 1) * token_s
        if k == 0:
            listener.first_token(q, now_s)
        q.generated_tokens += 1
        listener.tokens(q, 1, now_s)
    listener.on_end(q, Outcome.FINISHED, now_s)
    return now_s
