"""The few numbers that a calibration moves, and the tables that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.measure.calibration.result import USUAL_HOST_S, Parameter
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Front, PartError, grid_value
from lengthwise.schema.deployment import Deployment

SCALE_LOG_SD, COMM_LOG_SD, SECONDS_LOG_SD = 0.5, 0.7, 2.0
"""What is believed of a table that says nothing of its errors: a factor of 1.65 on its kernels, of 2 on its
collectives, and of 7 on a host that nobody measured. Two standard deviations are twice that in log."""
MIN_PRIOR_LOG_SD = 0.25
"""Who calibrates doubts the tables: what they say of themselves is not believed beyond this."""
HOST_STEP_S, HOST_SEQUENCE_S = USUAL_HOST_S["host_step"], USUAL_HOST_S["host_sequence"]
CLIENT_S, MASKED_S = 1e-3, 1e-12
"""Where the search starts if the tables hold no host overhead at all, and no seconds of attention."""

PARTS = {"work": ("layer", "first", "head"), "prefill": ("prefill",), "decode": ("decode",), "comm": ("comm",)}
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
    center: float
    log_sd: float
    neutral: float

    @property
    def unit(self) -> str:
        """What the value is in."""
        return "x" if self.name in PARTS else "s"

    def from_neutral(self, z: float) -> float:
        """How far ``z`` is from neutral; from none at all the value itself, in standard deviations of its log."""
        return abs(z) if self.neutral == self.center else 1.0 / self.log_sd

    def value(self, z: float) -> float:
        """The value that is ``z`` prior standard deviations from the centre; exactly 0 stands for neutral."""
        return self.neutral if z == 0.0 else self.center * math.exp(self.log_sd * z)


def knobs(deployment: Deployment, *, logged: bool, masked: bool = False) -> tuple[Knob, ...]:
    """The parameters of a deployment; communication only where GPUs talk to each other.

    Args:
        deployment: With the tables to start from.
        logged: Whether there is a log of iterations, whose clock sees less of the host.
        masked: Whether dense masks are one of them; they always are where the tables know of some.
    """
    cost, parallel = deployment.cost, deployment.parallel
    step_s, sequence_s = host_line(cost.host_s)
    found = [Knob(name, 1.0, _prior_log_sd(cost, name), 1.0) for name in PARTS]
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


def _seconds(name: str, constrained_latency_s: float, usual_s: float) -> Knob:
    """Seconds about those that the tables hold, or about what is usual where they hold none."""
    return Knob(
        name, constrained_latency_s if constrained_latency_s > 0 else usual_s, SECONDS_LOG_SD, constrained_latency_s
    )


def _pair_s(cost: CostTables) -> float:
    """A layer's seconds of a query and a key of the tables' longest prompt: where the search for others' starts."""
    largest = cost.prefill_s.shape[0] - 1
    chunk = largest if cost.rule.kind == MERGED else grid_value(largest)
    return float(cost.prefill_s[-1, 0]) / chunk**2 or MASKED_S


def _prior_log_sd(cost: CostTables, name: str) -> float:
    """From what the tables say of their own errors, else a rule of thumb."""
    own = [e.log_sd for e in cost.errors if e.part in (*PARTS[name], "step")]
    if own:
        return max(MIN_PRIOR_LOG_SD, math.hypot(*own))
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


MIN_ERROR_LOG_SD = 0.005
HOST_LOG_SD, MOST_LOG_SD = 0.5, 1.0
"""Of a host of which nobody told anything, as the roofline has it; and the most that is believed of any host."""
HOST_LINE = ("host_step", "host_sequence")
FIRST_TOKEN_PARTS, FIRST_TOKEN_MOST = ("prefill", "host"), 0.5


def part_errors(
    given: CostTables, found: Sequence[Parameter], shares: Mapping[str, float], tpot_log_sd: float, ttft_log_sd: float
) -> tuple[PartError, ...]:
    """Errors of the parts from their parameters' intervals, and of whole steps what those do not explain.

    Args:
        given: The tables before, whose word on the host stands where the runs told nothing of it.
        found: The parameters.
        shares: By parameter, by how much times between tokens grow (in log) with it.
        tpot_log_sd: Spread of held-out times between tokens: "step", less what the parts' errors amount to.
        ttft_log_sd: Spread of held-out times to the first token: what exceeds the other is of prefill and host.
    """
    sds = {p.name: _parameter_log_sd(p) for p in found}
    parts = {part: sds[name] for name, own in PARTS.items() if name in sds for part in own}
    if "comm" in parts:
        parts["send"] = parts["comm"]
    masked = next((p for p in found if p.name == MASKED), None)
    if masked is not None and masked.value > 0:
        parts["masked"] = sds["masked"]
    client = next((p for p in found if p.name == "client"), None)
    if given.front != Front() or (client is not None and client.value > 0):
        parts["front"] = sds["client"] if client is not None and client.report else _before(given, "front")
    parts["host"] = _host_log_sd(given, found)
    explained = sum((shares.get(p.name, 0.0) * sds[p.name]) ** 2 for p in found if p.report)
    step = math.sqrt(max(MIN_ERROR_LOG_SD**2, tpot_log_sd**2 - explained))
    more = min(FIRST_TOKEN_MOST, math.sqrt(max(0.0, ttft_log_sd**2 - tpot_log_sd**2)))
    for part in FIRST_TOKEN_PARTS:
        parts[part] = math.hypot(parts.get(part, 0.0), more)
    return (PartError("step", step), *(PartError(part, sd) for part, sd in parts.items() if sd > 0))


def _parameter_log_sd(p: Parameter) -> float:
    """From the 95 % interval: of a factor as it is, of seconds at most what is believed of a host."""
    if p.low <= 0 or p.high <= 0:
        return 0.0
    sd = math.log(p.high / p.low) / (2 * 1.96)
    return sd if p.unit == "x" else min(MOST_LOG_SD, sd)


def _host_log_sd(given: CostTables, found: Sequence[Parameter]) -> float:
    """Of the host's seconds in the batch in which they are least known, a single request or the largest.

    Its step and its sequences are known apart; what runs did not tell has what was said of the host before. The spread
    of their sum is convex in the share of either, so that it is largest at an end.
    """
    before = _before(given, "host")
    line = {p.name: (p.value, _parameter_log_sd(p) if p.report else before) for p in found if p.name in HOST_LINE}
    sds = []
    for batch in (1, len(given.host_s) - 1):
        seconds = {name: value * (batch if name == HOST_LINE[1] else 1) for name, (value, _) in line.items()}
        total_s = sum(seconds.values())
        spread = math.hypot(*(seconds[name] * sd for name, (_, sd) in line.items()))
        sds.append(spread / total_s if total_s > 0 else before)
    return max(sds)


def _before(given: CostTables, part: str) -> float:
    return next((e.log_sd for e in given.errors if e.part == part), HOST_LOG_SD)
