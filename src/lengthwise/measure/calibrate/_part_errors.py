"""How far the parts of calibrated tables may still be off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lengthwise.measure.calibrate import _parameters as parameters
from lengthwise.measure.calibrate.answer import Parameter
from lengthwise.schema.cost_tables import CostTables, Front, PartError

LEAST_LOG_SD = 0.005
HOST_LOG_SD, MOST_LOG_SD = 0.5, 1.0
"""Of a host of which nobody told anything, as the roofline has it; and the most that is believed of any host."""
HOST_LINE = ("host_step", "host_sequence")
FIRST_TOKEN_PARTS, FIRST_TOKEN_MOST = ("prefill", "host"), 0.5


def part_errors(
    given: CostTables,
    found: Sequence[Parameter],
    shares: Mapping[str, float],
    tpot_log_sd: float,
    ttft_log_sd: float,
) -> tuple[PartError, ...]:
    """Errors of the parts from their parameters' intervals, and of whole steps what those do not explain.

    Args:
        given: The tables before, whose word on the host stands where the runs told nothing of it.
        found: The parameters.
        shares: By parameter, by how much times between tokens grow (in log) with it.
        tpot_log_sd: Spread of held-out times between tokens: "step", less what the parts' errors amount to.
        ttft_log_sd: Spread of held-out times to the first token: what exceeds the other is of prefill and host.
    """
    sds = {p.name: _log_sd(p) for p in found}
    parts = {part: sds[name] for name, own in parameters.PARTS.items() if name in sds for part in own}
    if "comm" in parts:
        parts["send"] = parts["comm"]
    masked = next((p for p in found if p.name == parameters.MASKED), None)
    if masked is not None and masked.value > 0:
        parts["masked"] = sds["masked"]
    client = next((p for p in found if p.name == "client"), None)
    if given.front != Front() or (client is not None and client.value > 0):
        parts["front"] = sds["client"] if client is not None and client.told else _before(given, "front")
    parts["host"] = _host_log_sd(given, found)
    explained = sum((shares.get(p.name, 0.0) * sds[p.name]) ** 2 for p in found if p.told)
    step = math.sqrt(max(LEAST_LOG_SD**2, tpot_log_sd**2 - explained))
    more = min(FIRST_TOKEN_MOST, math.sqrt(max(0.0, ttft_log_sd**2 - tpot_log_sd**2)))
    for part in FIRST_TOKEN_PARTS:
        parts[part] = math.hypot(parts.get(part, 0.0), more)
    return (PartError("step", step), *(PartError(part, sd) for part, sd in parts.items() if sd > 0))


def _log_sd(p: Parameter) -> float:
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
    line = {p.name: (p.value, _log_sd(p) if p.told else before) for p in found if p.name in HOST_LINE}
    sds = []
    for batch in (1, len(given.host_s) - 1):
        seconds = {name: value * (batch if name == HOST_LINE[1] else 1) for name, (value, _) in line.items()}
        total_s = sum(seconds.values())
        spread = math.hypot(*(seconds[name] * sd for name, (_, sd) in line.items()))
        sds.append(spread / total_s if total_s > 0 else before)
    return max(sds)


def _before(given: CostTables, part: str) -> float:
    return next((e.log_sd for e in given.errors if e.part == part), HOST_LOG_SD)
