"""Writes docs/apps.md from benchmarks/results/apps.json: python docs/generate_apps.py [--check].

What each figure is stands here in words; every number that was measured comes from the file of results, and
what is not in it is called not measured yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _apps_faults import table as faults
from _apps_live_words import drained, live
from _apps_studies import NOT_YET, Rows, ablation, studies
from _fidelity_overview import NO_INTERVAL, decision
from _gateway_numbers import number, with_ends

HERE = Path(__file__).parent
PAGE = HERE / "apps.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "apps.json"

HEAD = """\
# Applications of several models: what plans gain, how far they are off, what runs withstand

An application is models, a graph between them and rows; a plan says which models run when, on which GPUs, so that all is
done soonest. How to write, plan and run one is in the [guide](guide-apps.md); how it works, in
[decision 0024](decisions/0024-applications.md). The figures are made by one command:

```sh no-run
python benchmarks/apps.py --save
python docs/generate_apps.py            # this page, from benchmarks/results/apps.json
```

The studies are those of SamuLLM (arXiv:2503.16893), in simulation: 8 A100-80GB, NVLink in pairs. "End to end" is makespan and
search together: as `app run` has it, engines of the plan at first sight start while a better one is looked for, so that of our own
search those seconds count that pass before anything starts - all of them where the plan that is found begins with other engines. The
heuristics and the paper's greedy plan first and start then, as the paper's system does, and are charged all of theirs. Plans are made with lengths drawn once; all methods are judged by the same six other draws, and the 95 %
intervals are of these pairs. Where lengths are known there is one draw, and no interval.
"""

FIGURES = """\
## Figures and aims

In brackets the 95 % interval, of `apps.search_s` and `apps.runner_overhead_ms` the range over the repeats, of
`apps.gap_to_exact` that over the instances. *Met* is what meets its aim with both ends; *borderline* meets it, but an end does
not; *no interval*: measured once, or no chance is in it.
"""

AIMS: tuple[tuple[str, str, float, bool, str], ...] = (
    *(
        (f"apps.{study}.speedup_over_{other}_lowest", f"{study}: least gain over the {other}-heuristic", 1.0, True, "")
        for study in ("ensembling", "routing", "chain", "mixed")
        for other in ("max", "min")
    ),
    ("apps.better_over_greedy", "gain over the paper's greedy, geometric mean of all cases", 1.0, True, ""),
    ("apps.better_over_greedy_lowest", "the least of them", 1.0, True, ""),
    ("apps.gap_to_exact", "how much longer than the best of all staged plans, mean", 0.05, False, ""),
    ("apps.search_s", "search: 10 models, 8 GPUs, 10,000 requests", 2.0, False, "s"),
    ("apps.search_mixed_s", "search: mixed, 500 documents", 10.0, False, "s"),
    ("apps.estimate_error_live", "makespan estimated against measured, lengths of a sample", 0.15, False, ""),
    ("apps.estimate_error_live_known", "the same, lengths known", 0.15, False, ""),
    ("apps.runner_overhead_ms", "the runner's own time a task, of 10,000", 2.0, False, "ms"),
    ("apps.drain_1e6_peak_mib", "memory of planning and draining 1,000,000 tasks", 4096.0, False, "MiB"),
)  # fmt: skip
"""(name, what it is, aim, whether more is better, unit)"""
STANDS = {NO_INTERVAL: "met, no interval", "borderline": "borderline: the interval reaches beyond"}

GAINS = """\
## What plans gain

Lengths of outputs are drawn from assumed distributions with the facts that the paper tells of its own, so that gains may be
compared in their range, not case by case.
"""

MISSED = """\
## What is missed, and why

- **Gains over the greedy a hair below 1.** Where models wait for one another, engines start as the max-heuristic has them; where the plan
  that is found is the greedy's own and begins otherwise, what was spent on looking further than the greedy is lost: about a second in
  many minutes. The search is bounded to 0.5 % of the best makespan known, in counted work and not by a clock, but it cannot know that
  nothing was to be found. Where engines start as the plan that is found has them, the search costs no time; such gains are 1 over the
  heuristic whose engines they are.
- **No preemption costs more here than in the paper.** The mixed application has eleven models on eight GPUs. Without preemption
  the summaries keep to the end the GPUs that they got first, beside seven other models; the paper does not tell what its own plan
  gave them.
- **Plans with known lengths can be worse** by some percent than those of sampled ones on the same true lengths: the search
  is bounded and finds a good plan, not the best.
- **Chains depend on their longest document**, so that one draw of lengths tells its makespan badly: that is most of the
  estimate's error there. More draws (`--draws`) tell it better, and take longer.
"""

SEARCH = """\
## Search

CPU seconds of one core; the paper's search takes 22 to 69 s, up to 205 s for the min-heuristic. Optima: of all staged plans (the paper's
Definition 1) every one was looked at, for three models that do not depend on one another on two GPUs: of chains and of eight GPUs this says
nothing. The best schedule without preemption is of CP-SAT, which counts GPUs and does not place them; where it has not proved that
there is none better, what is told is the distance to the best that it found.
"""
OPTIMA = (
    ("apps.gap_to_exact", "ours, to the best staged plan"),
    ("apps.gap_to_exact_greedy", "the paper's greedy, to the same"),
    ("apps.gap_to_unpreempted_routing", "ours, to the best without preemption: routing"),
    ("apps.gap_to_unpreempted_ensembling", "the same: ensembling, 1,000 requests"),
)

RUNNER = """\
## The runner

Its own time is that of a whole run in virtual time over engines that answer at once: ledger, leases, records. Rendering of
templates and HTTP come on top. Memory grows with the tasks.
"""

LIVE = """\
## Estimate against reality

Three models of 5, 27 and 84 million parameters, each in a real vLLM on one thread of a machine of two cores, at a raised
priority (`nice -n -10`), since others worked there too. Every question goes to one of them,
which answers until it happens to say a certain letter. `lengthwise app profile --calibrate` measures switches, costs and, on
other questions, lengths; `app plan` estimates; `app run` runs, and its manifest tells the seconds, starts of engines
and all. On one core models run one after another, on two, two at a time. Known lengths are those of the first run: requests carry their
seeds. The paper's errors: mean 25.6 % with unknown and 17 % with known lengths.
"""

FAULTS = """\
## What runs withstand

Each line is an automated test; the words of the link are the test's name. At-least-once execution, exactly-once recorded
output: a request may be asked twice, but one answer is recorded.
"""

LIMITS = """\
## What is not claimed

- The studies are simulated. No GPU ran them; times of switching are a fit to the range that the paper tells.
- Live engines are small and on a CPU. What loads, sleeps and NVLink cost on GPUs is for `app profile` to measure there.
- The greedy is ours, by the paper's words; its own code was not run.
"""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, of rows as the file of results holds them."""
    named = {row["name"]: row for row in rows if row.get("value") is not None}
    parts = (
        (HEAD, ""),
        (FIGURES, _figures(named)),
        (GAINS, studies(named)),
        ("### Preemption, and lengths that are known or others (section 5.5)\n", ablation(named)),
        (MISSED, ""),
        (SEARCH, _search(named)),
        (RUNNER, drained(named)),
        (LIVE, live(named)),
        (FAULTS, faults()),
        (LIMITS, ""),
    )
    return "\n".join("\n".join(filter(None, part)) for part in parts)


def results() -> list[dict[str, Any]]:
    """The rows that are committed; none where nothing was."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


def _figures(named: Rows) -> str:
    lines = ["| figure | what it is | measured | aim | |", "|---|---|---|---|---|"]
    for name, about, aim, more, unit in AIMS:
        row, wanted = named.get(name), f"{'at least' if more else 'at most'} {number(aim, unit)}"
        if row is None:
            lines.append(f"| `{name}` | {about} | {NOT_YET} | {wanted} | |")
            continue
        stands = decision({**row, "target": aim, "better": "higher" if more else "lower"})
        figure = f"{_exactly(row) if aim == 1 else with_ends(row['value'], row.get('ci'))} {unit}".strip()
        lines.append(f"| `{name}` | {about} | {figure} | {wanted} | {STANDS.get(stands, stands)} |")
    return "\n".join(lines) + "\n"


def _exactly(row: Mapping[str, Any]) -> str:
    """Four digits after the point: a gain of 0.9997 is not one of 1."""
    ends = row.get("ci")
    return f"{row['value']:.4f}" + (f" [{ends[0]:.4f}, {ends[1]:.4f}]" if ends else "")


def _search(named: Rows) -> str:
    lines = ["| distance to the optimum | mean [range] |", "|---|---|"]
    for name, words in OPTIMA:
        row = named.get(name)
        cell = f"{row['value']:.2%}" if row else NOT_YET
        if row and row.get("ci"):
            cell += f" [{row['ci'][0]:.2%}, {row['ci'][1]:.2%}]"
        cell += _unproved((row or {}).get("details") or {})
        lines.append(f"| {words} | {cell} |")
    return "\n".join(lines) + "\n"


def _unproved(details: Mapping[str, Any]) -> str:
    """What a solver that came to no end knows of the optimum."""
    if details.get("proved", True):
        return ""
    return (
        f", to the best found ({details['optimum_s']:.3g} s), which is not proved: the optimum is at least "
        f"{details['bound_s']:.3g} s"
    )


def main() -> int:
    """Writes the page, or with --check only says whether it is as the results are."""
    text = page(results())
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not same:
            print(f"{PAGE.name} is not what the results say: python docs/generate_apps.py")
        return 0 if same else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
