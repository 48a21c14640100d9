"""The few numbers that a calibration moves, and the tables that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.measure.calibrate.answer import USUAL_HOST_S
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, grid_value
from lengthwise.schema.deployment import Deployment

SCALE_LOG_SD, COMM_LOG_SD, SECONDS_LOG_SD = 0.5, 0.7, 2.0
"""What is believed of a table that says nothing of its errors: a factor of 1.65 on its kernels, of 2 on its
collectives, and of 7 on a host that nobody measured. Two standard deviations are twice that in log."""
LEAST_LOG_SD = 0.25
"""Who calibrates doubts the tables: what they say of themselves is not believed beyond this."""
HOST_STEP_S, HOST_SEQUENCE_S = USUAL_HOST_S["host_step"], USUAL_HOST_S["host_sequence"]
CLIENT_S, MASKED_S = 1e-3, 1e-12
"""Where the search starts if the tables hold no host overhead at all, and no seconds of attention."""

PARTS = {
    "work": ("layer", "first", "head"),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "comm": ("comm",),
}
LABELS = {
    "work": "projections, MLP, head (all but attention)",
    "prefill": "prefill attention",
    "decode": "decode attention",
    "comm": "communication",
    "masked": "dense masks, per layer for each query and cached token of others",
    "host_step": "host, each step",
    "host_sequence": "host, each sequence of a step",
    "client": "client and HTTP, each request",
    "log_step": "host within logged iterations",
}
NAMES = tuple(LABELS)
MASKED = "masked"


@dataclass(frozen=True)
class Knob:
    """A parameter before it is fitted: ``log(value)`` is believed to be normal about ``log(centre)``.

    ``neutral`` is what it is where nobody moves it, which the tables given are: 1, their own host's seconds,
    or none at all, to which no logarithm comes.
    """

    name: str
    centre: float
    log_sd: float
    neutral: float

    @property
    def unit(self) -> str:
        """What the value is in."""
        return "x" if self.name in PARTS else "s"

    def from_neutral(self, z: float) -> float:
        """How far ``z`` is from neutral; from none at all the value itself, in standard deviations of its log."""
        return abs(z) if self.neutral == self.centre else 1.0 / self.log_sd

    def value(self, z: float) -> float:
        """The value that is ``z`` prior standard deviations from the centre; exactly 0 stands for neutral."""
        return self.neutral if z == 0.0 else self.centre * math.exp(self.log_sd * z)


def knobs(deployment: Deployment, *, logged: bool, masked: bool = False) -> tuple[Knob, ...]:
    """The parameters of a deployment; communication only where GPUs talk to each other.

    Args:
        deployment: With the tables to start from.
        logged: Whether there is a log of iterations, whose clock sees less of the host.
        masked: Whether dense masks are one of them; they always are where the tables know of some.
    """
    cost, parallel = deployment.cost, deployment.parallel
    step_s, sequence_s = host_line(cost.host_s)
    found = [Knob(name, 1.0, _log_sd(cost, name), 1.0) for name in PARTS]
    if parallel.tp == 1 and parallel.pp == 1:
        found = [knob for knob in found if knob.name != "comm"]
    seconds = [
        _seconds("host_step", step_s, HOST_STEP_S),
        _seconds("host_sequence", sequence_s, HOST_SEQUENCE_S),
        _seconds("client", cost.front.request_s, CLIENT_S),
    ]
    if masked or cost.masked_s > 0:
        seconds.append(_seconds(MASKED, cost.masked_s, _pair_s(cost)))
    if logged:
        seconds.append(replace(seconds[0], name="log_step"))
    return (*found, *seconds)


def _seconds(name: str, held_s: float, usual_s: float) -> Knob:
    """Seconds about those that the tables hold, or about what is usual where they hold none."""
    return Knob(name, held_s if held_s > 0 else usual_s, SECONDS_LOG_SD, held_s)


def _pair_s(cost: CostTables) -> float:
    """A layer's seconds of a query and a key of the tables' longest prompt: where the search for others' starts."""
    largest = cost.prefill_s.shape[0] - 1
    chunk = largest if cost.rule.kind == MERGED else grid_value(largest)
    return float(cost.prefill_s[-1, 0]) / chunk**2 or MASKED_S


def _log_sd(cost: CostTables, name: str) -> float:
    """From what the tables say of their own errors, else a rule of thumb."""
    own = [e.log_sd for e in cost.errors if e.part in (*PARTS[name], "step")]
    if own:
        return max(LEAST_LOG_SD, math.hypot(*own))
    return COMM_LOG_SD if name == "comm" else SCALE_LOG_SD


def apply(cost: CostTables, values: Mapping[str, float]) -> CostTables:
    """The tables with their parts scaled, their host's line and front replaced; what is not named stays.

    "client" is a pure delay, as ``Front.request_s`` is.
    """
    work, comm = values.get("work", 1.0), values.get("comm", 1.0)
    return replace(
        cost,
        layer_s=cost.layer_s * work,
        first_s=cost.first_s * work,
        head_s=cost.head_s * work,
        prefill_s=cost.prefill_s * values.get("prefill", 1.0),
        decode_s=cost.decode_s * values.get("decode", 1.0),
        comm_s=cost.comm_s * comm,
        send_s=cost.send_s * comm,
        host_s=_host(cost.host_s, values),
        masked_s=values.get("masked", cost.masked_s),
        front=replace(cost.front, request_s=values.get("client", cost.front.request_s)),
    )


def _host(host_s: Floats, values: Mapping[str, float]) -> Floats:
    """The host's seconds with another line; what the old one left over stays on top."""
    step_s, sequence_s = host_line(host_s)
    seqs = np.arange(len(host_s))
    rest = host_s - (step_s + sequence_s * seqs)
    new = values.get("host_step", step_s) + values.get("host_sequence", sequence_s) * seqs
    moved = np.maximum(0.0, new + rest)
    return np.concatenate([host_s[:1], moved[1:]])


def host_line(host_s: Floats) -> tuple[float, float]:
    """Intercept and slope of the host's seconds over sequences from one on."""
    if len(host_s) < 3:
        return float(host_s[-1]), 0.0
    seqs = np.arange(1, len(host_s))
    slope, intercept = np.polyfit(seqs, host_s[1:], 1)
    slope = slope if abs(slope) * len(seqs) > 1e-12 else 0.0
    return float(intercept), float(slope)
