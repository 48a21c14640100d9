"""Writes docs/fidelity.md and docs/fidelity-runs.md from benchmarks/results/fidelity.json and fidelity-earlier.json.

What each ground truth is stands here in words; every number on the pages comes from the file of results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _fidelity_campaigns import campaigns
from _fidelity_ci import tested
from _fidelity_misses import misses
from _fidelity_overview import decision, figure, number, overview
from _fidelity_runs import runs_page
from _fidelity_sections import SHOWN, plain
from _fidelity_silicon import all_points, beside
from _fidelity_standing import standing

HERE = Path(__file__).parent
PAGES = HERE / "fidelity.md", HERE / "fidelity-runs.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "fidelity.json"
EARLIER = RESULTS.with_name("fidelity-earlier.json")
GPU = HERE.parent / "benchmarks" / "results" / "gpu" / "rows.json"
VERSION = 1
"""Of the rows that can be read; those without one are of the first."""

HEAD = """\
# Fidelity: what was predicted, what was measured

A simulator is worth what its error bars say. Every number below is an error of lengthwise against something that was
measured, made by one command on a machine that has the data or the engine:

```sh no-run
make engine torch
python benchmarks/fidelity.py --save     # --only live,recorded,calibrated,coverage,counters,times,silicon,gpu,...
python docs/generate_fidelity.py         # this page and the details, from benchmarks/results/fidelity.json
```

All errors are relative, in percent. Square brackets hold 95 % intervals; round ones hold ranges (smallest to largest), named
by what they are over: loads (each the median of its repeats) or single runs. Each run and point is in the
[details](fidelity-runs.md); how to measure your own is in the [guide to calibration](guide-calibrate.md).
"""

STANDING = """\
## Where this stands
"""

OVERVIEW = """\
## At a glance

Errors of each ground truth, and what others state in the same columns: in their own words, on their own ground truths,
hence not to be read across rows but where the runs are the same. A dash: not measured yet, or not stated.
"""

FIGURES = """\
## Figures and aims
"""

VERDICTS = """\
*Met*, of real engines: by every load that was held out, and by all of the 95 % interval; *by the median*: by the middle of
the loads, not by each. *Borderline*: the aim is met by the figure, but not by the median over single runs, or not by all of
the interval. *No interval*: the figure meets the aim, and nothing tells how far chance moves it. *Consistent*, of what
intervals hold: the interval of the count holds the aim. Of few values it holds almost any (5 of 5: from 48 % up), and wide
intervals hold much: how wide they are is told below. Intervals of real engines draw repeats of a load anew, and blocks of
requests within them: of three repeats they are rough, and rather too narrow. Those of `fidelity.calibrated` take all
statistics of a run as off together. The aims of `fidelity.recorded` are LLMServingSim's own errors on the same runs.
"""

SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "A real engine on this machine",
        ("fidelity.live.",),
        (
            "vLLM 0.32 on one thread of a CPU serves a small model of random weights under two settings of its scheduler "
            "and three loads each, every load three times. Operators are profiled on the same CPU, costs are calibrated "
            "on the static load and on half of the capacity under the first setting, and the same requests of all other "
            "runs are simulated: 85 % of the capacity, and the other setting. What the engine "
            "itself repeats to is the floor. Profile and measured runs are kept in benchmarks/results/live, of which "
            "`benchmarks/_live.py --again` makes these rows anew."
        ),
    ),
    (
        "Another engine: continuous batching of transformers",
        ("fidelity.live_transformers.",),
        (
            "The same circle with another scheduler and another way to attend, on the same machine, calibrated on the static "
            "and the half load and held against 85 % of the capacity. It attends with a dense mask: a step costs the product of "
            "its query tokens and the whole KV cache in use. Operators that are profiled alone cannot tell that, and it "
            "is largest under load; calibration finds it as a term of its own (`masked_s` of the tables: seconds a layer for "
            "each query and each cached token of another sequence), where the runs show it. Masks of 0.3, 0.75 and 1.6 "
            "times a prompt's own pair that were planted in simulated runs are found. The form of the term was settled before "
            "these runs were measured, how it is looked for was not. Its runs are kept beside vLLM's."
        ),
    ),
    (
        "Recorded runs on GPUs",
        ("fidelity.recorded.",),
        (
            "Three runs of vLLM 0.19 with 300 requests each (LLMServingSim's examples), simulated from kernels that were "
            "profiled on the same GPUs. MAPE over mean, median, P90, P95 and P99; the aim is LLMServingSim's own error on "
            "these runs, and it is missed where ours is larger."
        ),
    ),
    (
        "The same runs without profiles, calibrated",
        ("fidelity.calibrated.",),
        (
            "The plain roofline, calibrated on the first half of each run's requests; errors on the second half. The other "
            "half of the same run is the easiest thing to be right about: this says what a calibration on your own traffic "
            "buys, and is no match for the figures above, which saw none of these runs."
        ),
    ),
    (
        "How long a calibration takes",
        ("calibrate_300_s",),
        (
            "To 300 requests over three loads or somewhat more (whole runs), each with what it has beside its requests. Where nobody "
            "says that an engine attends by request, dense masks are looked for as well; where they stand out all is searched anew."
        ),
    ),
    (
        "What a server's counters add",
        ("fidelity.counters.",),
        (
            "Runs of 120 requests of a simulated 8B on an H100 with 2 % of noise, whose server counted its steps as vLLM does "
            "(looks every 0.25 to 1 s), calibrated three times each: the error in log of what was planted, a factor of 1.3 on the "
            "work and 2 ms of host a step. The log does not see half of the host. A simulated server has no clock that drifts: of "
            "a real one see the engine tests."
        ),
    ),
    (
        "Thousands of measured deployments",
        ("fidelity.silicon.", "fidelity.argonne."),
        (
            "Mean TTFT and TPOT of models on H100, H200 and B200 under vLLM, SGLang and TensorRT-LLM (AIConfigurator's "
            "silicon sample), in three ways. `shipped` and `shipped_tables` are what `deploy` and `simulate` say: the "
            "roofline, or imported kernels, with a host by the engine's name, which brings its front (what a request waits "
            "before the engine), nothing else. Their headlines are not held out, since these hosts and fronts were fitted "
            "to the same points; in the details, by host, `unseen` takes those fitted on other models and other GPUs only, and "
            "`default` one that no point here has shaped and that has no front. `roofline_unseen` and `tables` take hosts "
            "and fronts fitted on other models and other GPUs only, the front by a closed form, and add waits by an "
            "engine's settings, which `simulate` has no term for. In all of them the roofline's kernel curves were fitted to "
            "kernels measured on these same GPUs, and whoever chose the form and the first guesses of the fit of hosts "
            "had seen all points. Headlines are of points whose client is recorded. And Argonne's static batches, by vendor: no constant of the roofline was ever fitted on AMD."
        ),
    ),
    (
        "A GPU of our own",
        ("fidelity.gpu.",),
        (
            "`python benchmarks/gpu_campaign.py` does it unattended in under 8 minutes: profile, continuous batching of "
            "transformers at three loads, simulation. No machine used so far had a GPU, so that there is nothing to show: the "
            "CUDA paths (events, graphs, memory that runs out) have been run against stand-ins for torch alone, which test "
            "their control flow and tell nothing of time."
        ),
    ),
    (
        "Do intervals hold",
        ("calibrate_coverage", "fidelity.brackets."),
        (
            "The share of intervals that hold the truth: of a calibration's parameters where the truth was planted (each run "
            "calibrated once; exact 95 % intervals of the share, as if parameters of one run were independent; clients wait 0 s in them, "
            "which no interval of positive seconds holds), and, where measured, of what `simulate` prints around TTFT and TPOT. Square brackets draw whole pairs of a model and a "
            "GPU, since the points of a pair are sweeps over one deployment and miss together: pairs are few, so that these "
            "intervals are rough, and the table below says more. How much later than said a request may come to "
            "its engine was fitted to TTFT of one half of the measured deployments (Llama-3.1-70B on B200, DeepSeek-V3 on "
            "H200); the figure of TTFT is of the other half, which shares no pair of a model and a GPU with it, that of TPOT "
            "of all. That it leans to the slow side at all was chosen after all points had been seen, those of the other half "
            "among them: its size is held out, its form is not. Both take a host and a front of other models and GPUs. What is covered is a spread, no bias: where an "
            "engine is told to wait for prompts to gather, and under vLLM on B200, TTFT is still mostly above the number "
            "itself, now within its interval more often; in the details, `by waits` and `by engine and gpu` tell how often. "
            "The default host has no front, hence no spread of it: its intervals hold far fewer first tokens (`by truth`)."
        ),
    ),
    (
        "Profiles",
        ("profile.",),
        (
            "Operators of this machine, measured by one thread within the budget and judged on unseen points: the median over "
            "operators of each one's median error. The aim was set for five minutes on a quiet device."
        ),
    ),
)


def page(rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page to read, of rows as the files of results hold them, ``earlier`` of campaigns that were replaced."""
    parts = [
        HEAD,
        STANDING,
        standing(rows, earlier),
        OVERVIEW,
        overview(rows, tuple(all_points(rows))),
        FIGURES,
        _figures(rows),
        VERDICTS,
        "\n".join(misses(rows)),
    ]
    told = ""
    for title, prefixes, about in SECTIONS:
        mine = [row for row in rows if row["name"].startswith(prefixes)]
        shown = SHOWN.get(prefixes[0], plain)(mine) if mine else [f"Not measured yet (`{prefixes[0]}`).\n"]
        replaced = list(campaigns(rows, earlier, prefixes[0], report=told))
        told = title if replaced and not told else told
        parts.append("\n".join([f"## {title}\n", about + "\n", *shown, *replaced]))
    return "\n".join(part for part in (*parts, tested()) if part)


def results(*paths: Path) -> Iterator[dict[str, Any]]:
    """The rows that are committed."""
    for path in filter(Path.exists, paths):
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            if row.get("version", VERSION) > VERSION:
                sys.exit(f"{path.name} must hold rows of version {VERSION}; {row['name']} is of {row['version']}")
            yield row


def newest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each name the row whose runs were measured last: a campaign may be kept in both files."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["name"] not in found or _measured_at(found[row["name"]]) <= _measured_at(row):
            found[row["name"]] = row
    return list(found.values())


def _measured_at(row: Mapping[str, Any]) -> str:
    return (row.get("details") or {}).get("measured_at") or ""


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those that have an aim."""
    lines = ["| figure | measured | aim | |", "|---|---|---|---|"]
    for row in rows:
        if row.get("value") is not None and row.get("target") is not None:
            aim = number(row["target"], row["unit"])
            lines.append(f"| `{row['name']}` | {figure(row)} | {aim} | {decision(row)}{beside(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the pages, or with --check only says whether they are as the results are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the pages are not as the results"
    )
    check = parser.parse_args().check
    rows, earlier, stale = newest(results(RESULTS, GPU)), list(results(EARLIER)), []
    for path, text in zip(PAGES, (page(rows, earlier), runs_page(rows, SECTIONS)), strict=True):
        if check and not (path.exists() and path.read_text("utf-8") == text):
            stale.append(path.name)
        elif not check:
            path.write_text(text, "utf-8")
    if stale:
        print(f"{', '.join(stale)}: not what the results say: python docs/generate_fidelity.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
