"""The paper's studies as tables of docs/apps.md: what was planned, beside others, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _gateway_numbers import number, with_ends

Rows = Mapping[str, Mapping[str, Any]]
NOT_YET = "not measured yet"
STUDIES = (
    ("ensembling", "Ensembling: nine models of 6B to 13B answer every request (section 5.1)"),
    ("routing", "Routing: each of 6,856 requests goes to one of five models (section 5.2)"),
    ("chain", "Chain summary: chunk by chunk, then an evaluator of 70B (section 5.3)"),
    ("mixed", "Mixed: a chain summary with four evaluations beside an ensembling (section 5.4)"),
)
OTHERS = (("max", "max-heuristic"), ("min", "min-heuristic"), ("samullm", "the paper's greedy, run by us"))
ABLATION = (
    ("over_ours", "the paper's greedy without preemption, over our plan"),
    ("of_greedy", "the paper's greedy: without over with"),
    ("of_min", "min-heuristic: without over with"),
)
LIMITS = (256, 512)


def studies(named: Rows) -> str:
    """A part for each study."""
    return "\n".join(_study(named, name, title) for name, title in STUDIES)


def _study(named: Rows, study: str, title: str) -> str:
    lines = [f"### {title}\n", "| gain end to end over | lowest | highest | the paper |", "|---|---|---|---|"]
    for other, words in OTHERS:
        cells, paper = [], []
        for end in ("lowest", "highest"):
            row = named.get(f"apps.{study}.speedup_over_{other}_{end}")
            cells.append(_gain(row) if row else NOT_YET)
            paper += [f"{of:g}" for of in [((row or {}).get("details") or {}).get("paper")] if of]
        lines.append(f"| {words} | {' | '.join(cells)} | {' to '.join(paper) or '-'} |")
    cases = ((named.get(f"apps.{study}.cases") or {}).get("details") or {}).get("cases") or ()
    return "\n".join(lines) + "\n\n" + (_cases(cases) if cases else f"{NOT_YET.capitalize()}.\n")


def _gain(row: Mapping[str, Any]) -> str:
    """Four digits: near 1, three do not tell who is sooner."""
    ends = row.get("ci")
    return f"{row['value']:.4g}" + (f" [{ends[0]:.4g}, {ends[1]:.4g}]" if ends else "")


def _cases(cases: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| case | tasks | ours, s | search, s | of it before the start | greedy, s | max, s | min, s | estimate off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        methods = case["methods"]
        whole = [
            number(methods[name]["makespan_s"] + methods[name]["lead_s"])
            for name in ("lengthwise", "samullm", "max", "min")
        ]
        mine, off = methods["lengthwise"], case["estimate_error"]
        looked = number(mine["search_s"]), number(mine["lead_s"])
        cells = [case["case"], number(case["tasks"]), whole[0], *looked, *whole[1:], f"{off:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ablation(named: Rows) -> str:
    """No preemption, known lengths, and lengths of another set than was planned with."""
    lines = ["| what | limit 256 | limit 512 | the paper |", "|---|---|---|---|"]
    wanted = [(f"apps.no_preemption_{name}", words) for name, words in ABLATION]
    wanted.append(("apps.known_over_unknown", "planned with unknown over planned with known lengths"))
    wanted.append(("apps.other_set_error", "worst error where outputs are 0.7 to 1.3 times as long as planned"))
    for name, words in wanted:
        rows = [named.get(f"{name}_{limit}") for limit in LIMITS]
        paper = next((row["details"].get("paper") for row in rows if row), "-")
        cells = [with_ends(row["value"], row.get("ci")) if row else NOT_YET for row in rows]
        lines.append(f"| {words} | {' | '.join(cells)} | {paper} |")
    return "\n".join(lines) + "\n"
