"""Synthetic workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.workload.arrivals import Arrivals, ClosedLoop
from lengthwise.workload.lengths import Lengths, draw

Predicted = Literal["none", "oracle", "mean"]


def generate(
    num_requests: int,
    lengths: Lengths,
    arrivals: Arrivals,
    seed: int = 0,
    *,
    predicted: Predicted = "none",
    priority: npt.ArrayLike | None = None,
    tenants: int | Sequence[float] | None = None,
    name: str = "",
) -> Workload:
    """A workload of ``num_requests`` requests drawn from the models.

    Arrivals and lengths have a random stream each: with one seed, a change of the rate or of the kind
    of arrivals leaves every length as it is, and a change of the rate only stretches time.

    Args:
        num_requests: How many, at least 1.
        lengths: Draws prompt and output lengths; those of a trace with texts draw these too, into ``extra``.
        arrivals: Draws arrival times. A ``ClosedLoop`` also sets the workload's concurrency.
        seed: Any integer from 0; the same seed gives the same bytes.
        predicted: Column of predicted lengths: "none"; "oracle", the true ones; "mean", the mean of
            the drawn outputs for every request.
        priority: One integer a request, or one for all; smaller goes first.
        tenants: How many tenants send requests, as many each, or the weights of their numbers of
            requests: ``[9, 1]``. Whose a request is, is drawn from a stream of its own.
        name: For tables and reports.

    Raises:
        InputError: A number is out of range, or a model cannot draw that many.
    """
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    if seed < 0:
        raise InputError(f"seed must not be negative; it is {seed}")
    for_arrivals, for_lengths, for_tenants = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    arrival_s = arrivals.sample(num_requests, for_arrivals)
    drawn = draw(lengths, num_requests, for_lengths)
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=drawn.prompt,
        output_tokens=drawn.output,
        predicted_tokens=_predict(drawn.output, predicted),
        priority=None if priority is None else _broadcast(priority, num_requests),
        tenant=None if tenants is None else _tenants(tenants, num_requests, for_tenants),
        extra=dict(drawn.texts),
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        name=name,
    )


def _predict(output: npt.NDArray[np.int64], predicted: str) -> npt.NDArray[np.float64] | None:
    if predicted == "none":
        return None
    if predicted == "oracle":
        return output.astype(np.float64)
    if predicted == "mean":
        return np.full(len(output), output.mean())
    raise InputError(f"predicted must be none, oracle or mean; it is {predicted!r}")


def _tenants(tenants: int | Sequence[float], n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    weights = np.ones(tenants) if isinstance(tenants, int) else np.asarray(tenants, float)
    if weights.ndim != 1 or not len(weights) or not (np.isfinite(weights) & (weights > 0)).all():
        raise InputError(f"tenants must be a number of at least 1, or weights above 0; got {tenants!r}")
    return rng.choice(len(weights), n, p=weights / weights.sum())


def _broadcast(priority: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
    values = np.asarray(priority)
    if values.shape not in ((), (n,)) or values.dtype.kind not in "iub":
        raise InputError(f"priority must be one integer, or {n} of them; got {values.dtype} {values.shape}")
    return np.broadcast_to(values.astype(np.int64), (n,))
