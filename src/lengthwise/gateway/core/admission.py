"""Who may wait, and who has waited in vain."""

from __future__ import annotations

import math

from lengthwise.gateway.config import Admission
from lengthwise.gateway.request import Refusal, Request

DEADLINE = Refusal(504, "deadline", "The request waited until its own deadline had passed.")


def draining(drain_s: float) -> Refusal:
    """The gateway is about to end."""
    return Refusal(503, "draining", "The gateway is shutting down; ask again.", drain_s)


def unknown_model(model: str) -> Refusal:
    """No engine serves the model."""
    return Refusal(404, "model_not_found", f"No engine here serves the model {model!r}.")


def no_engine(model: str, waited_s: float) -> Refusal:
    """There was no engine for too long."""
    message = f"No engine for the model {model!r} was there for {waited_s:g} s."
    return Refusal(503, "no_engine", message, max(1.0, math.ceil(waited_s)))


def refusal(
    admission: Admission, request: Request, queued: int, queued_bytes: int, wait_s: float
) -> Refusal | None:
    """Why the request may not wait, where so many wait and so long a wait is predicted; None it may."""
    again_s = float(max(1, math.ceil(min(wait_s, 3600.0))))
    if queued >= admission.max_queued:
        return Refusal(429, "queue_full", f"{queued} requests are waiting already.", again_s)
    if queued_bytes + request.body_bytes > admission.max_queued_bytes:
        return Refusal(429, "queue_bytes", f"{queued_bytes} bytes of requests are waiting already.", again_s)
    if wait_s > admission.max_predicted_wait_s:
        message = (
            f"The predicted wait is {wait_s:.1f} s; at most {admission.max_predicted_wait_s:g} s are let in."
        )
        return Refusal(429, "predicted_wait", message, again_s)
    return None
