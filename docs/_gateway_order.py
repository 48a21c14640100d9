"""What order gains on real engines, of docs/gateway.md: each policy and each cell, and what the simulator said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _gateway_numbers import number, with_ends

Rows = Mapping[str, Mapping[str, Any]]
NOT_YET = "not measured yet"
TOLD = ("within", "not within", "too noisy to tell")
"""What may come of a result that the simulator foretold."""

GAIN = """\
## What order gains

The whole gateway before two real engines (vLLM on a CPU, a small model of random weights), bursts of recorded prompts
whose outputs are forced to their recorded lengths, at 1, 3 and 5 times the rate that full batches serve, batches of 1,
2 and 4. *Gap closed* is (FCFS - policy) / (FCFS - oracle) of mean JCT, where the oracle is shortest first by the
true lengths. The simulator is told how fast the engines were in the FCFS runs of the same bursts, and asked what each
order gives; a request that is cut by windows is charged each time what the engines take for a new one. ELIS closes
about a tenth of its gap.

`simulated_within` is over the results (gap closed, tail and mean of each order, pooled over batches and loads). Behind
what was simulated stands by how much the measured is off what was simulated of the same shuffles, with half the width of
the 95 % interval of that: *within* where 0 is in the interval, and half of it is at most 0.2 of the gap, or 10 % of a
ratio; *not within* where 0 is not in it; *too noisy to tell* where 0 is in it, but it is wider. What counts is the
share, of all of them, that is within.
"""


def told_of_simulated(details: Mapping[str, Any]) -> str:
    """How many results the simulator had foretold, had not, and where chance hides it; "" where nobody counted."""
    if not details.keys() >= set(TOLD):
        return ""
    return f": {', '.join(f'{details[told]} {told}' for told in TOLD)}"


def gain(named: Rows) -> str:
    """Both tables."""
    details = (named.get("gateway.live.gap_closed", {}).get("details")) or {}
    if not details.get("policies"):
        return f"{NOT_YET.capitalize()}.\n"
    return "\n".join([*_policies(details["policies"]), "", *_cells(details.get("cells") or [])]) + "\n"


def _policies(policies: Mapping[str, Any]) -> Iterator[str]:
    yield "| policy | gap closed | simulated | P99 over the oracle's | simulated | mean JCT over FCFS' | simulated |"
    yield f"|---|{'---|' * 6}"
    for name, told in policies.items():
        cells = []
        for metric in ("gap_closed", "p99_over_oracle", "mean_over_fcfs"):
            one = told[metric]
            cells += [with_ends(one["value"], one.get("ci")), _simulated(one)]
        yield f"| {name} | {' | '.join(cells)} |"


def _simulated(one: Mapping[str, Any]) -> str:
    if one.get("simulated") is None:
        return "-"
    text = with_ends(one["simulated"], one.get("simulated_ci"))
    if one.get("told") is None:
        return text
    off = f"{one['off_by']:+.2g}"
    half = one.get("off_by_half_width")
    return f"{text} ({one['told']}: off by {off}{'' if half is None else f' ± {half:.2g}'})"


def _cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not cells:
        return
    names = list(cells[0]["policies"])
    yield f"| load | batch | {' | '.join(f'{name}: mean, P99 s' for name in names)} | |"
    yield f"|---|---|{'---|' * len(names)}---|"
    for cell in cells:
        told = [cell["policies"][name] for name in names]
        shown = [f"{number(one['mean_s'])}, {number(one['p99_s'])}" for one in told]
        noise = " noise" if _is_noise(cell["policies"]) else ""
        yield f"| {number(cell['load'])}x | {cell['batch']} | {' | '.join(shown)} |{noise} |"
    if any(_is_noise(cell["policies"]) for cell in cells):
        yield "\n*Noise*: the oracle is no faster than FCFS there, so that there is no gap of which to close a share."


def _is_noise(policies: Mapping[str, Any]) -> bool:
    """Whether known lengths gain nothing in a cell: what order does is less than chance."""
    if not {"fcfs", "oracle"} <= policies.keys():
        return False
    return bool(policies["oracle"]["mean_s"] >= policies["fcfs"]["mean_s"])
