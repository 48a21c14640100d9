"""The few numbers that a calibration moves, and the tables that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schema.cost_tables import CostTables, Floats
from lengthwise.schema.deployment import Deployment

SCALE_LOG_SD, COMM_LOG_SD, SECONDS_LOG_SD = 0.5, 0.7, 2.0
"""What is believed of a table that says nothing of its errors: a factor of 1.65 on its kernels, of 2 on its
collectives, and of 7 on a host that nobody measured. Two standard deviations are twice that in log."""
LEAST_LOG_SD = 0.25
"""Who calibrates doubts the tables: what they say of themselves is not believed beyond this."""
HOST_STEP_S, HOST_SEQUENCE_S, CLIENT_S = 100e-6, 1e-6, 1e-3
"""Where the search starts if the tables hold no host overhead at all."""

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
    "host_step": "host, each step",
    "host_sequence": "host, each sequence of a step",
    "client": "client and HTTP, each request",
    "log_step": "host within logged iterations",
}
NAMES = tuple(LABELS)


@dataclass(frozen=True)
class Knob:
    """A parameter before it is fitted: ``log(value)`` is believed to be normal about ``log(centre)``."""

    name: str
    centre: float
    log_sd: float

    @property
    def unit(self) -> str:
        """What the value is in."""
        return "x" if self.name in PARTS else "s"

    def value(self, z: float) -> float:
        """The value that is ``z`` prior standard deviations from the centre."""
        return self.centre * math.exp(self.log_sd * z)


def knobs(deployment: Deployment, *, logged: bool) -> tuple[Knob, ...]:
    """The parameters of a deployment; communication only where GPUs talk to each other.

    Args:
        deployment: With the tables to start from.
        logged: Whether there is a log of iterations, whose clock sees less of the host.
    """
    cost, parallel = deployment.cost, deployment.parallel
    step_s, sequence_s = _line(cost.host_s)
    found = [Knob(name, 1.0, _log_sd(cost, name)) for name in PARTS]
    if parallel.tp == 1 and parallel.pp == 1:
        found = [knob for knob in found if knob.name != "comm"]
    seconds = {
        "host_step": step_s if step_s > 0 else HOST_STEP_S,
        "host_sequence": sequence_s if sequence_s > 0 else HOST_SEQUENCE_S,
        "client": CLIENT_S,
    }
    if logged:
        seconds["log_step"] = seconds["host_step"]
    return (*found, *(Knob(name, centre, SECONDS_LOG_SD) for name, centre in seconds.items()))


def _log_sd(cost: CostTables, name: str) -> float:
    """From what the tables say of their own errors, else a rule of thumb."""
    own = [e.log_sd for e in cost.errors if e.part in (*PARTS[name], "step")]
    if own:
        return max(LEAST_LOG_SD, math.hypot(*own))
    return COMM_LOG_SD if name == "comm" else SCALE_LOG_SD


def apply(cost: CostTables, values: Mapping[str, float]) -> CostTables:
    """The tables with their parts scaled and their host's line replaced; what is not named stays."""
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
    )


def _host(host_s: Floats, values: Mapping[str, float]) -> Floats:
    """The host's seconds with another line; what the old one left over stays on top."""
    step_s, sequence_s = _line(host_s)
    seqs = np.arange(len(host_s))
    rest = host_s - (step_s + sequence_s * seqs)
    new = values.get("host_step", step_s) + values.get("host_sequence", sequence_s) * seqs
    moved = np.maximum(0.0, new + rest)
    return np.concatenate([host_s[:1], moved[1:]])


def _line(host_s: Floats) -> tuple[float, float]:
    """Intercept and slope over sequences from one on."""
    if len(host_s) < 3:
        return float(host_s[-1]), 0.0
    seqs = np.arange(1, len(host_s))
    slope, intercept = np.polyfit(seqs, host_s[1:], 1)
    slope = slope if abs(slope) * len(seqs) > 1e-12 else 0.0
    return float(intercept), float(slope)
