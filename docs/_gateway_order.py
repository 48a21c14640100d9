"""What order gains on real engines, of docs/gateway.md: each policy and each cell, and what the simulator said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _gateway_numbers import entries, number, percents, when, with_ends

Rows = Mapping[str, Mapping[str, Any]]
NOT_YET = "not measured yet"
TOLD = ("within", "not within", "too noisy to tell")
"""What may come of a result that the simulator foretold."""
CAN_CUT = ("isrtf", "isrtf, eager")
MIN_COUNT = 0.01
"""Of the requests: fewer cuts change next to nothing."""
METRICS = {"gap_closed": "gap", "p99_over_oracle": "P99", "mean_over_fcfs": "mean"}

GAIN = """\
## What order gains

The whole gateway before two real engines (vLLM on a CPU, a small model of random weights), bursts of recorded prompts
at 1, 3 and 5 times the rate that full batches serve, batches of 1, 2 and 4. Outputs are forced to their recorded
lengths divided by {by}, {most} tokens at most, so that a small engine serves a burst in seconds; windows are of {window}
tokens for ELIS' 50, and the shipped predictor's lengths are divided by {by} likewise. It is asked once a request, does not
learn from the burst, and engines are given as many requests at once as they have places. A request gives its place
up (*isrtf*) where that is worth a hundred times what it costs, the default; *eager*: as much as it costs.

*Gap closed* is (FCFS - policy) / (FCFS - oracle) of mean JCT, where the oracle is shortest first by the
true lengths. The simulator is told how fast the engines were in the FCFS runs of the same bursts, and asked what each
order gives; a request that is cut by windows is charged each time what the engines take for a new one. ELIS closes
about a tenth of its gap. Measured three times on 2026-11-23,
with nothing else on the machine, *isrtf* closed 0.45 [0.34, 0.57], 0.48 [0.35, 0.61] and 0.54 [0.43, 0.65] of it; before the
second time tokens ceased to have the scheduler decide before a look is due, before the third nothing changed in its way.

`simulated_in_interval` is over the results (gap closed, tail and mean of each order, pooled over batches and loads): in
how many of them the prediction, over 40 shuffles, lies in the measured result's own interval. `simulated_within` asks more:
behind what was simulated stands by how much the measured is off what was simulated of the same shuffles, with half the
width of the 95 % interval of that, which leaves out what shuffles differ by. *Within* where 0 is in the interval, and half
of it is at most 0.2 of the gap, or 10 % of a ratio, or where all of it is below 0.05 of the gap, or 2 % of a ratio; else
*not within* where 0 is not in it, and *too noisy to tell* where it is wider.
"""


def described(named: Rows) -> str:
    """What was done, with the numbers of the run before real engines."""
    return GAIN.format_map(_traffic(_details(named, "gateway.live.gap_closed")))


def _traffic(details: Mapping[str, Any]) -> dict[str, Any]:
    told = details.get("traffic") or {"shrunk_by": "some", "window_tokens": "some", "max_tokens": "some"}
    return {"by": told["shrunk_by"], "window": told["window_tokens"], "most": told["max_tokens"]}


def told_of_simulated(details: Mapping[str, Any]) -> str:
    """How many results the simulator had foretold, had not, and where chance hides it; "" where nobody counted."""
    if not details.keys() >= set(TOLD):
        return ""
    return f": {', '.join(f'{details[told]} {told}' for told in TOLD)}"


EMULATED = """\
The same before two emulated engines: the gateway, the traffic and the orders are those above, but engines only wait, and
take no core from the gateway or from each other. What differs from above is what real engines do on a machine as small
as this.
"""
OTHER_LENGTHS = "Lengths are divided by {by} there, and windows are of {window} tokens.\n"


def gain(named: Rows) -> str:
    """What was measured before real engines, by policy and by cell, and before emulated ones."""
    details = _details(named, "gateway.live.gap_closed")
    if not details.get("policies"):
        return f"{NOT_YET.capitalize()}.\n"
    emulated = _details(named, "gateway.emulated.gap_closed")
    lines = [*_policies(details), "", *_message(named, "gateway.live"), *_longer(named)]
    lines += _why_off(named, details, emulated)
    lines += _cells(details.get("cells") or [])
    if emulated.get("policies"):
        traffic = _traffic(emulated)
        other = "" if traffic == _traffic(details) else OTHER_LENGTHS.format_map(traffic)
        lines += ["", EMULATED + other, *_policies(emulated), "", *_message(named, "gateway.emulated")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _details(named: Rows, name: str) -> Mapping[str, Any]:
    return named.get(name, {}).get("details") or {}


def _policies(details: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| policy | gap closed | at one pace | simulated | P99 over the oracle's | simulated | mean JCT over FCFS' | "
        "simulated | cuts a request |"
    )
    yield f"|---|{'---|' * 8}"
    paced = details.get("paced") or {}
    for name, told in details["policies"].items():
        cells = []
        for metric in ("gap_closed", "p99_over_oracle", "mean_over_fcfs"):
            one = told[metric]
            cells.append(with_ends(one["value"], one.get("ci")))
            if metric == "gap_closed":
                cells.append(_paced(paced.get(name)))
            cells.append(_simulated(one))
        yield f"| {name} | {' | '.join(cells)} | {_cuts(details.get('cells') or [], name)} |"


def _message(named: Rows, prefix: str) -> Iterator[str]:
    """Who was not cut, what the simulator did not foretell, and when that was measured: a paragraph."""
    row, foretold = named[f"{prefix}.gap_closed"], named.get(f"{prefix}.simulated_in_interval")
    cells, told = row["details"].get("cells") or [], []
    for name in filter(CAN_CUT.__contains__, row["details"]["policies"]):
        cuts, requests = _cut_of(cells, name)
        if cuts == 0 < requests:
            told.append(
                f"In these runs *{name}* cut nobody ({requests:,} requests): its figures are those of its order of waiting "
                "alone, mode `srtf`."
            )
        elif 0 < cuts < MIN_COUNT * requests:
            told.append(f"*{name}* cut {cuts:,} times in {requests:,} requests: it is hardly more than that order.")
    if foretold is not None and (outside := (foretold.get("details") or {}).get("outside")):
        told.append(f"Outside the measured interval is what was foretold of {_by_policy(outside)}.")
    if date := when(row):
        told.append(f"Measured on {date}.")
    if told:
        yield "\n".join([*told, ""])


def _longer(named: Rows) -> Iterator[str]:
    """What another run gave, of longer answers and fewer shuffles."""
    details = _details(named, "gateway.longer.gap_closed")
    if not details:
        return
    (gap, tail), traffic = (
        (named[f"gateway.longer.{of}"] for of in ("gap_closed", "p99_over_oracle")),
        _traffic(details),
    )
    yield (
        f"Another run ({when(gap)}; {details['plan']['shuffles']} shuffles, lengths divided by {traffic['by']}, so that bursts last longer; "
        f"load average at the end: {number(details['machine']['load_1m'])}) has the gap closed by {with_ends(gap['value'], gap['ci'])}, at one pace "
        f"{_paced((details.get('paced') or {}).get('isrtf'))}, and a P99 of {with_ends(tail['value'], tail['ci'])}: the two agree, and chance "
        "between shuffles is what is wide."
    )
    yield ""


def _by_policy(results: Sequence[str]) -> str:
    """Results as "policy, metric", those of a policy together."""
    found: dict[str, list[str]] = {}
    for policy, _, metric in (name.rpartition(", ") for name in results):
        found.setdefault(policy, []).append(METRICS.get(metric, metric))
    return "; ".join(f"*{policy}* ({entries(metrics)})" for policy, metrics in found.items())


def _why_off(named: Rows, details: Mapping[str, Any], emulated: Mapping[str, Any]) -> Iterator[str]:
    """Why the simulator misses before real engines, of what those runs kept."""
    foretold, machine = named.get("gateway.live.simulated_in_interval"), details.get("machine") or {}
    services = details.get("services") or {}
    if foretold is None or foretold["value"] >= (foretold.get("target") or 0.95) or not (machine and services):
        return
    yield (
        f"Why the simulator misses its aim here: the engines ({details.get('engines', 'two')}), the gateway and the client have "
        f"{machine['cores']} cores between them (load average at the end: {number(machine['load_1m'])}). Fitted to the FCFS runs, the seconds "
        f"that a request is at an engine are off by {percents(_errors(services))} in the median at batches of "
        f"{entries(list(services))}, and what is simulated rests on that fit."
    )
    if (calm := emulated.get("services")) and (off := _means_off(emulated)):
        yield (
            f"Before emulated engines, which take no core (load average at the end: "
            f"{number(emulated['machine']['load_1m'])}), the fit is off by {percents(_errors(calm))}, and the mean JCT of "
            f"every order but windows' is foretold within {100 * max(off):.1f} %, shuffle by shuffle."
        )
    yield ""


def _errors(services: Mapping[str, Any]) -> list[float]:
    return [one["error"] for one in services.values()]


def _means_off(details: Mapping[str, Any]) -> list[float]:
    """Of each order but windows': by how much its mean JCT over FCFS' was off what was foretold, relatively."""
    told = {name: of["mean_over_fcfs"] for name, of in details["policies"].items() if name != "windowed"}
    return [abs(one["off_by"]) / one["value"] for one in told.values() if one.get("off_by") is not None]


def _paced(report: Mapping[str, Any] | None) -> str:
    return "-" if report is None else with_ends(report["gap_closed"]["value"], report["gap_closed"].get("ci"))


def _cuts(cells: Sequence[Mapping[str, Any]], name: str) -> str:
    """How often a request was cut, in the mean over all cells; a dash where nobody counted."""
    cuts, requests = _cut_of(cells, name)
    return number(cuts / requests) if requests else "-"


def _cut_of(cells: Sequence[Mapping[str, Any]], name: str) -> tuple[int, int]:
    """(cuts, requests) over all cells; (0, 0) where nobody counted."""
    told = [cell["policies"][name] for cell in cells if name in cell["policies"]]
    if not told or not all({"cuts", "requests"} <= one.keys() for one in told):
        return 0, 0
    return sum(one["cuts"] for one in told), sum(one["requests"] for one in told)


def _simulated(one: Mapping[str, Any]) -> str:
    if one.get("simulated") is None:
        return "-"
    text = with_ends(one["simulated"], one.get("simulated_ci"))
    if one.get("report") is None:
        return text
    off = f"{one['off_by']:+.2g}"
    half = one.get("off_by_half_width")
    return f"{text} ({one['report']}: off by {off}{'' if half is None else f' ± {half:.2g}'})"


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
