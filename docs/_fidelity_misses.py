"""Of what misses are made: the parts of a missed figure that are worst and best, from what its row keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_overview import decision, number

Rows = Sequence[Mapping[str, Any]]

TITLE = "## What the misses are made of\n"
ABOUT = (
    "Of each missed figure the parts that lie furthest from what was measured and nearest to it, by what is known of each point (from "
    "10 points on), and what is known of the cause.\n"
)
PARTS = {"by_gpu": "GPUs", "by_dtype": "formats", "by_model": "models", "by_backend": "engines"}
MIN_COUNT = 10
CAUSES = {
    "fidelity.argonne.amd.": (
        "No constant of the roofline was fitted on AMD, and software of 2024 is recorded there: what is told is what the data "
        "sheet would allow with NVIDIA's efficiencies. How much of the rest is the hardware's and how much the software's, "
        "these points do not tell."
    ),
    "fidelity.live.": (
        "In part steps of one token, which are told too short: vLLM's log has them at 6.7 ms and those of two tokens at 7.1 ms, where the profile, of "
        "torch's own products, has two thirds for one of what it has for two (transformers takes these products, and is told well). They are 22 % of "
        "the time at half load of the setting with fewer seats, and 11 % at that of the one that is learnt from. A factor of its own for one token, "
        "tried on these very runs, was found at 1.7 and leaves 5.9 %. Of the rest nothing is known but that repeats lie as far apart."
    ),
    "fidelity.recorded.": (
        "Each run is one draw of arrivals. What prompts and decodes cost in one step is added up from profiles of steps of either "
        "kind; a term for both at once is lacking. That this is the cause is likely and not tested."
    ),
    "fidelity.silicon.tables.": (
        "TTFT at a concurrency is for the most part waiting in front of the engine, which no table of kernels holds: it is fitted on other "
        "models and GPUs. That it weighs more where kernels are quicker would fit the order of GPUs; it is not tested."
    ),
}
"""By the first words of figures: what is known of a cause."""


def misses(rows: Rows) -> Iterator[str]:
    """The section; nothing where nothing is missed."""
    missed = [row for row in rows if _is_missed(row)]
    if not missed:
        return
    yield TITLE
    yield ABOUT
    groups: dict[str, list[str]] = {}
    for row in missed:
        start = next((start for start in CAUSES if row["name"].startswith(start)), "")
        groups.setdefault(start, []).append(_of(row))
    for start, lines in groups.items():
        yield from lines
        if start:
            yield f"\n{CAUSES[start]}\n"
    yield ""


def _is_missed(row: Mapping[str, Any]) -> bool:
    told = row.get("value") is not None and row.get("target") is not None
    return told and decision(row).startswith("missed")


def _of(row: Mapping[str, Any]) -> str:
    details = row.get("details") or {}
    told = [text for text in (_recorded(details), *_parts(details), _loads(details), _bias(details)) if text]
    said = "; ".join(told) or "its row keeps no parts"
    return f"- `{row['name']}`, {number(row['value'], row['unit'])}: {said}"


def _parts(details: Mapping[str, Any]) -> Iterator[str]:
    for key, word in PARTS.items():
        of = {name: one for name, one in (details.get(key) or {}).items() if one["points"] >= MIN_COUNT}
        if len(of) > 1:
            order = sorted(of, key=lambda name: of[name]["p50"])
            told = [f"{name} {_percent(of[name]['p50'])} ({of[name]['bias']:+.1%})" for name in order]
            yield f"by {word} {', '.join(told)}"


def _recorded(details: Mapping[str, Any]) -> str:
    runs = details.get("runs") or {}
    if not all(isinstance(of, Mapping) and "llmservingsim_mape" in of for of in runs.values()):
        return ""
    told = (
        f"{name} {_percent(of['mape'])} (theirs {_percent(of['llmservingsim_mape'])})"
        for name, of in sorted(runs.items(), key=lambda item: item[1]["mape"])
    )
    return f"by runs {', '.join(told)}" if runs else ""


def _loads(details: Mapping[str, Any]) -> str:
    loads = details.get("signed_by_load") or {}
    told = (
        f"{name} {of['calibrated']:+.1%} where its own repeats lie {_percent(of['repeats_spread'])} apart"
        for name, of in loads.items()
        if "repeats_spread" in of
    )
    return ", ".join(told)


def _bias(details: Mapping[str, Any]) -> str:
    """On which side it is, where nothing else is known."""
    known = any(len(details.get(key) or {}) > 1 for key in PARTS)
    return "" if known or "bias" not in details else f"told {details['bias']:+.1%} at the median"


def _percent(of: float) -> str:
    return number(of, "relative")
