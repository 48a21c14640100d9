"""Parameters that a calibration fits, their priors, and the cost tables for given values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lengthwise.measure.calibration.result import DEFAULT_HOST_S, Parameter
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Front, PartError, grid_value
from lengthwise.schema.deployment import Deployment

SCALE_LOG_SD, COMM_LOG_SD, SECONDS_LOG_SD = 0.5, 0.7, 2.0
"""Standard deviations of log(value): of the factors of kernels and of communication, unless the tables state errors,
and of parameters in seconds."""
MIN_PRIOR_LOG_SD = 0.25  # smallest deviation of a factor, whatever errors the tables state
CLIENT_S, MASKED_S = 1e-3, 1e-12  # centers if the tables have no seconds of a front end, or no prefill attention
PARTS = {
    "work": ("layer", "embedding", "head"),
    "prefill": ("prefill",),
    "context": ("context",),
    "decode": ("decode",),
    "comm": ("comm",),
}
LABELS = {
    "work": "projections, MLP, head (all but attention)",
    "prefill": "prefill attention",
    "context": "prefill attention to context before a chunk",
    "decode": "decode attention",
    "comm": "communication",
    "masked": "dense masks, per layer for each query and cached token of others",
    "host_step": "host, each step",
    "host_sequence": "host, each sequence of a step",
    "client": "client and HTTP, each request",
    "log_step": "host within logged iterations",
}
NAMES = tuple(LABELS)
MASKED, CONTEXT = "masked", "context"


@dataclass(frozen=True)
class Prior:
    """Prior of a parameter: ``log(value)`` is normal with mean ``log(center)`` and standard deviation ``log_sd``."""

    name: str
    center: float
    log_sd: float
    neutral: float  # value in the given tables; 0 has no logarithm

    @property
    def unit(self) -> str:
        """Unit of the value: "x" (a factor) or "s"."""
        return "x" if self.name in PARTS else "s"

    def value(self, z: float) -> float:
        """Return the value at ``z`` prior standard deviations from the center. A ``z`` of 0 gives ``neutral``."""
        return self.neutral if z == 0.0 else self.center * math.exp(self.log_sd * z)


def priors(deployment: Deployment, *, logged: bool, masked: bool = False) -> tuple[Prior, ...]:
    """Return the priors of a deployment's parameters. "comm" is a parameter only if GPUs communicate.

    With ``logged``, the parameters include "log_step", the host's seconds in a log of iterations, whose clock sees less
    of the host. With ``masked``, they include the cost of dense masks even if the tables have none.
    """
    cost, parallel = deployment.cost, deployment.parallel
    step_s, sequence_s = linear_host_cost(cost.host_s)
    found = []
    for name, parts in PARTS.items():
        if name == "comm" and parallel.tp == parallel.pp == 1:
            continue
        own = ("prefill",) if name == CONTEXT and all(e.part != CONTEXT for e in cost.evidence.errors) else parts
        stated = [e.log_sd for e in cost.evidence.errors if e.part in (*own, "step")]
        rule_of_thumb = COMM_LOG_SD if name == "comm" else SCALE_LOG_SD
        found.append(Prior(name, 1.0, max(MIN_PRIOR_LOG_SD, math.hypot(*stated)) if stated else rule_of_thumb, 1.0))
    seconds = {
        "host_step": (step_s, DEFAULT_HOST_S["host_step"]),
        "host_sequence": (sequence_s, DEFAULT_HOST_S["host_sequence"]),
        "client": (cost.front.request_s, CLIENT_S),
    }
    if masked or cost.masked_s > 0:
        # The search starts from a layer's seconds of a query and a key of the tables' longest prompt.
        largest = cost.prefill_s.shape[0] - 1
        chunk = largest if cost.rule.kind == MERGED else grid_value(largest)
        seconds[MASKED] = (cost.masked_s, float(cost.prefill_s[-1, 0]) / chunk**2 or MASKED_S)
    if logged:
        seconds["log_step"] = seconds["host_step"]
    found += [Prior(name, own if own > 0 else default, SECONDS_LOG_SD, own) for name, (own, default) in seconds.items()]
    return tuple(found)


def apply(cost: CostTables, values: Mapping[str, float]) -> CostTables:
    """Return the cost tables with these parameter values. Parameters that ``values`` omits are unchanged."""
    work, comm = values.get("work", 1.0), values.get("comm", 1.0)
    step_s, sequence_s = linear_host_cost(cost.host_s)
    seqs = np.arange(len(cost.host_s))
    residual_s = cost.host_s - (step_s + sequence_s * seqs)  # deviations from the old line are added to the new one
    host_s = values.get("host_step", step_s) + values.get("host_sequence", sequence_s) * seqs + residual_s
    prefill, context_s = values.get("prefill", 1.0), cost.prefill_s - cost.prefill_s[:, :1]
    return replace(
        cost,
        layer_s=cost.layer_s * work,
        embedding_s=cost.embedding_s * work,
        head_s=cost.head_s * work,
        prefill_s=cost.prefill_s * prefill + context_s * (values.get(CONTEXT, 1.0) - prefill),
        decode_s=cost.decode_s * values.get("decode", 1.0),
        comm_s=cost.comm_s * comm,
        send_s=cost.send_s * comm,
        host_s=np.concatenate([cost.host_s[:1], np.maximum(0.0, host_s)[1:]]),
        masked_s=values.get("masked", cost.masked_s),
        front=replace(cost.front, request_s=values.get("client", cost.front.request_s)),
    )


def linear_host_cost(host_s: Floats) -> tuple[float, float]:
    """Fit the host's seconds ([sequences + 1]) by a line over a step's sequences. Return its intercept and slope."""
    if len(host_s) < 3:
        return float(host_s[-1]), 0.0
    return _line_of(host_s.tobytes())


@lru_cache(maxsize=16)
def _line_of(host_s: bytes) -> tuple[float, float]:
    seconds = np.frombuffer(host_s)
    seqs = np.arange(1, len(seconds))
    slope, intercept = np.polyfit(seqs, seconds[1:], 1)
    return float(intercept), float(slope) if abs(slope) * len(seqs) > 1e-12 else 0.0


MIN_ERROR_LOG_SD = 0.005
HOST_LOG_SD, MAX_LOG_SD = 0.5, 1.0  # error of a host whose tables state none, and the largest error of any host
FIRST_TOKEN_PARTS, MAX_FIRST_TOKEN_LOG_SD = ("prefill", "host"), 0.5


def part_errors(
    given: CostTables, found: Sequence[Parameter], shares: Mapping[str, float], tpot_log_sd: float, ttft_log_sd: float
) -> tuple[PartError, ...]:
    """Estimate the errors of the parts of the tables from the intervals of the fitted parameters.

    ``shares`` are d log(time between tokens) / d log(parameter). The error of "step" is the part of ``tpot_log_sd``
    that the parts' errors do not explain. The excess of ``ttft_log_sd`` over ``tpot_log_sd`` is attributed to prefill
    and host.
    """
    sds = {p.name: _log_sd(p) for p in found}
    by_name = {p.name: p for p in found}
    given_sd = {e.part: e.log_sd for e in reversed(given.evidence.errors)}
    parts = {part: sds[name] for name, own in PARTS.items() if name in sds for part in own}
    if CONTEXT in by_name and not by_name[CONTEXT].determined:
        # Either the given tables are right about context, or as wrong as they are about chunks without context.
        parts[CONTEXT] = math.hypot(sds[CONTEXT], math.log(by_name["prefill"].value / by_name["prefill"].prior))
    if "comm" in parts:
        parts["send"] = parts["comm"]
    if MASKED in by_name and by_name[MASKED].value > 0:
        parts["masked"] = sds["masked"]
    client = by_name.get("client")
    if given.front != Front() or (client is not None and client.value > 0):
        determined = client is not None and client.determined
        parts["front"] = sds["client"] if determined else given_sd.get("front", HOST_LOG_SD)
    # Errors of a step and of its sequences are independent. The spread of their sum is convex in the share of either,
    # so that the host is least known in a batch of one or in the largest.
    host_sd = given_sd.get("host", HOST_LOG_SD)
    line = [p for p in found if p.name in DEFAULT_HOST_S]
    spreads = []
    for batch in (1, len(given.host_s) - 1):
        seconds = [p.value * (batch if p.name == "host_sequence" else 1) for p in line]
        own_sds = [sds[p.name] if p.determined else host_sd for p in line]
        spread = math.hypot(*(s * sd for s, sd in zip(seconds, own_sds, strict=True)))
        spreads.append(spread / sum(seconds) if sum(seconds) > 0 else host_sd)
    parts["host"] = max(spreads)
    explained = sum((shares.get(p.name, 0.0) * sds[p.name]) ** 2 for p in found if p.determined)
    step = math.sqrt(max(MIN_ERROR_LOG_SD**2, tpot_log_sd**2 - explained))
    more = min(MAX_FIRST_TOKEN_LOG_SD, math.sqrt(max(0.0, ttft_log_sd**2 - tpot_log_sd**2)))
    for part in FIRST_TOKEN_PARTS:
        parts[part] = math.hypot(parts.get(part, 0.0), more)
    return (PartError("step", step), *(PartError(part, sd) for part, sd in parts.items() if sd > 0))


def _log_sd(p: Parameter) -> float:
    """Return the standard deviation of log(value) from its 95 % interval. Seconds have at most MAX_LOG_SD."""
    if p.low <= 0 or p.high <= 0:
        return 0.0
    sd = math.log(p.high / p.low) / (2 * 1.96)
    return sd if p.unit == "x" else min(MAX_LOG_SD, sd)
