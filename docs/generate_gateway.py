"""Writes docs/gateway.md from benchmarks/results/gateway.json: python docs/generate_gateway.py [--check].

What each figure is stands here in words; every number that was measured comes from the file of results, and
what is not in it is called not measured yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from _fidelity_overview import NO_INTERVAL, decision
from _gateway_faults import table as faults
from _gateway_numbers import number, when, with_ends
from _gateway_order import NOT_YET, described, gain, told_of_simulated

HERE = Path(__file__).parent
PAGE = HERE / "gateway.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "gateway.json"
Rows = Mapping[str, Mapping[str, Any]]

HEAD = """\
# The gateway: what it costs, what it gains, what it withstands

How to run one is in the [guide](guide-gateway.md). The figures are made by one command, on the machine that it names:

```sh no-run
python benchmarks/gateway.py --save
python docs/generate_gateway.py         # this page, from benchmarks/results/gateway.json
```
"""

FIGURES = """\
## Figures and aims

In brackets the range over the repeats, and for `gateway.live.` and `gateway.emulated.` the 95 % interval over shuffles. *Met*
is what meets its aim with both ends; *borderline* meets it, but an end does not; *no interval*: measured once, or a
count, so that nothing says how far chance moves it. Every row has its date: a row may be older than the code beside it.
"""

_IN = "share of the results in whose interval what the simulator foretold lies"
AIMS: tuple[tuple[str, str, float, bool, str], ...] = (
    ("gateway.added_p50_ms", "latency added to one request, median", 1.0, False, "ms"),
    ("gateway.rps", "requests a second that are not streamed, one core", 1500.0, True, "requests/s"),
    ("gateway.cpu_us_per_token", "CPU of a streamed token, streams paced", 100.0, False, "us"),
    ("gateway.cpu_us_per_token_back_to_back", "the same, tokens back to back", 100.0, False, "us"),
    ("gateway.rss_growth_mib", "memory grown over 100,000 requests", 10.0, False, "MiB"),
    ("gateway.live.gap_closed", "share of the gap in mean JCT from FCFS to known lengths", 0.5, True, ""),
    ("gateway.live.p99_over_oracle", "its P99 over that of known lengths", 1.1, False, ""),
    ("gateway.live.simulated_in_interval", _IN, 0.95, True, ""),
    ("gateway.live.simulated_within", "the same shuffle by shuffle, which is stricter", 0.95, True, ""),
    ("gateway.emulated.gap_closed", "share of the gap closed before emulated engines", 0.5, True, ""),
    ("gateway.emulated.p99_over_oracle", "its P99 over that of known lengths there", 1.1, False, ""),
    ("gateway.emulated.simulated_in_interval", _IN, 0.95, True, ""),
    ("gateway.emulated.simulated_within", "the same shuffle by shuffle, which is stricter", 0.95, True, ""),
    ("gateway.scale_50_over_10", "peak rate of 50 engines over that of 10", 4.8, True, ""),
    ("gateway.rerank_10k_ms", "10,000 waiting requests put in order anew", 5.0, False, "ms"),
)
"""(name, what it is, aim, whether more is better, unit)"""
STANDS = {NO_INTERVAL: "met, no interval", "borderline": "borderline: the interval reaches beyond"}
"""How far an aim is met, as this page says it."""

OVERHEAD = """\
## What it costs

One process confined to one core in front of a backend that costs nothing and answers at once, in the same run with
whatever other gateways are installed; keys, queue and prediction of lengths are on. Added latency is over the
direct line, one request at a time; CPU is of the process and its children, and withstands a busy neighbour better
than rates do. A shared machine's speed drifts, by a half and more: the last two columns say what it took right before and after
for a fixed loop of plain Python (100,000 rounds) and one of small writes and reads through a pair of sockets (5,000).
Rows of another run are called so.
ELIS states 11 ms of its own for a prediction and a decision (arXiv 2505.09142).
"""

OTHERS = (
    ("gateway", "**lengthwise**"),
    ("peer.vllm_router", "vllm-router (Rust)"),
    ("peer.smg", "smg (Rust)"),
    ("peer.sglang_router", "sglang-router (Rust)"),
    ("peer.litellm", "LiteLLM"),
)
COLUMNS = (
    ("added_p50_ms", "added p50, ms"),
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("rps", "requests/s"),
    ("cpu_us_per_request", "CPU a request, us"),
    ("cpu_us_per_token", "CPU a token, paced, us"),
    ("cpu_us_per_token_back_to_back", "back to back, us"),
    ("machine_pace", "the machine then: a loop, us"),
    ("machine_pace_io", "writes and reads, us"),
)

SAME_RUN = timedelta(hours=1)
"""Within which the gateway and all its peers are measured, one after the other."""

COUNTS = (10, 50)
"""Of engines."""
MOST_DELAY_S = 0.5
"""Of a rate that holds; the benchmark's own."""
SCALE = """\
## How it scales

Engines emulated in real time (4 seats, 50 ms a step) behind the real gateway, which has one core: the largest rate at
which requests are delayed 0.5 s or less in the mean, by queueing and everything else.
"""

FAULTS = """\
## What it withstands

Each line is an automated test; the words of the link are the test's name.
"""

LIMITS = """\
## What is not claimed

- At low load no order gains anything: nobody waits. Mode `observe` says so of your own traffic.
- Figures are of the machine that made them, mostly a small shared one; ratios in one run are worth more than times.
- The engines of the gain are small, on a CPU. What a cut costs on a GPU with little cache to spare is not measured.
- Only vLLM was run for real. SGLang and llama.cpp are emulated after their documentation.
- The predicted wait (429, Retry-After) knows predicted tokens and the rates at which engines make them, not their KV cache.
- R gateways are R queues ([what that costs](../deploy/README.md)); nothing orders or is fair across them.
- Manifests are checked against Kubernetes' schemas and the gateway's own settings, not applied to a cluster by a test.
"""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, of rows as the file of results holds them."""
    named = {row["name"]: row for row in rows if row.get("value") is not None}
    parts = (
        (HEAD, _machine(named)),
        (FIGURES, _figures(named)),
        (OVERHEAD, _additional(named)),
        (described(named), gain(named)),
        (SCALE, _scale(named)),
        (FAULTS, faults()),
        (LIMITS, ""),
    )
    return "\n".join("\n".join(filter(None, part)) for part in parts)


def results() -> list[dict[str, Any]]:
    """The rows that are committed; none where nothing was."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


def _machine(named: Rows) -> str:
    seen = {
        f"{one['cpu']}, {one['cores']} cores, Python {one['python']}"
        for row in named.values()
        if (one := (row.get("details") or {}).get("machine"))
    }
    return f"Measured on: {'; '.join(sorted(seen))}.\n" if seen else ""


def _figures(named: Rows) -> str:
    lines = ["| figure | what it is | measured | aim | | on |", "|---|---|---|---|---|---|"]
    for name, about, aim, more, unit in AIMS:
        row = named.get(name)
        aim = aim if row is None or row.get("target") is None else row["target"]  # noqa: PLW2901
        wanted = f"{'at least' if more else 'at most'} {number(aim, unit)}"
        if row is None:
            lines.append(f"| `{name}` | {about} | {NOT_YET} | {wanted} | | |")
        else:
            stands = decision({**row, "target": aim, "better": "higher" if more else "lower"})
            figure = _figure(row, unit) + told_of_simulated(row.get("details") or {})
            told = f"{figure} | {wanted} | {STANDS.get(stands, stands)} | {when(row)}"
            lines.append(f"| `{name}` | {about} | {told} |")
    return "\n".join(lines) + "\n"


def _additional(named: Rows) -> str:
    lines = [f"| | {' | '.join(title for _, title in COLUMNS)} | on |", f"|---|{'---|' * len(COLUMNS)}---|"]
    for prefix, title in OTHERS:
        found = [named.get(f"{prefix}.{column}") for column, _ in COLUMNS]
        cells = [number(row["value"]) if row else "-" for row in found]
        apart = "" if _same_run(named.get("gateway.rps"), found) else " (another run)"
        date = max(map(when, found))
        lines.append(f"| {title}{apart} | {' | '.join(cells)} | {date} |")
    lines.append("\nA dash: not measured yet, or not installed where it was.")
    direct = (named.get("gateway.added_p50_ms", {}).get("details") or {}).get("direct_p50_ms")
    if direct is not None:
        lines.append(f"The direct line takes {number(direct)} ms.")
    return "\n".join(lines) + "\n"


def _same_run(own: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether rows were measured when ours were: peers follow within minutes; true where there is nothing to hold."""
    kept = [row.get("retained") for row in rows if row]
    if own is None or not kept:
        return True
    if own.get("retained") is None or None in kept:
        return own.get("retained") is None and not any(kept)
    started = datetime.fromisoformat(own["retained"])
    return all(abs(datetime.fromisoformat(one) - started) < SAME_RUN for one in kept if one)


def _scale(named: Rows) -> str:
    peaks = [(count, named.get(f"gateway.peak_rps_{count}")) for count in COUNTS]
    if any(row is None for _, row in peaks):
        return f"{NOT_YET.capitalize()}.\n"
    lines = ["| engines | peak rate |", "|---|---|"]
    lines += [f"| {count} | {number(row['value'])} requests/s |" for count, row in peaks if row]
    told = [_resolved(ratio)] if (ratio := named.get("gateway.scale_50_over_10")) else []
    told += [f"Measured on {date}."] if (date := when(peaks[0][1])) else []
    return "\n".join([*lines, "", *filter(None, told)]) + "\n"


def _resolved(ratio: Mapping[str, Any]) -> str:
    """How finely the ratio of the peak rates is known: of each, the next rate that was tried did not hold."""
    ends = [_reserved(ratio["details"][count]) for count in map(str, COUNTS) if (ratio.get("details") or {}).get(count)]
    if len(ends) < 2 or None in ends:
        return ""
    (least, over), (most, above) = ends
    step = max(over / least, above / most) - 1
    return (
        f"A peak rate is the largest that was tried and held; the next one that was tried is {100 * step:.1f} % above and "
        f"did not. So the ratio is known to ±{100 * step:.1f} %: it lies between {number(COUNTS[1] / COUNTS[0] * most / over)} and "
        f"{number(COUNTS[1] / COUNTS[0] * above / least)}."
    )


def _reserved(probes: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """(the largest share of the engines' capacity that held, the least that did not); None where all or none held."""
    held = [one["share"] for one in probes if one["delay_s"] <= MOST_DELAY_S]
    other = [one["share"] for one in probes if one["delay_s"] > MOST_DELAY_S]
    return (max(held), min(other)) if held and other else None


def _figure(row: Mapping[str, Any], unit: str) -> str:
    return f"{with_ends(row['value'], row.get('ci'))} {unit}".strip()


def main() -> int:
    """Writes the page, or with --check only says whether it is as the results are."""
    text = page(results())
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not same:
            print(f"{PAGE.name} is not what the results say: python docs/generate_gateway.py")
        return 0 if same else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
