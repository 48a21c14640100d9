"""Writes docs/fidelity.md from benchmarks/results/fidelity.json: python docs/generate_fidelity.py [--check].

What each ground truth is stands here in words; every number on the page comes from the file of results.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _fidelity_overview import figure, number, overview

HERE = Path(__file__).parent
PAGE = HERE / "fidelity.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "fidelity.json"
TOLD = {"interval", "range"}
GPU = HERE.parent / "benchmarks" / "results" / "gpu" / "rows.json"

HEAD = """\
# Fidelity: what was predicted, what was measured

A simulator is worth what its error bars say. Every number below is an error of lengthwise against something that was
measured, made by one command on a machine that has the data or the engine:

```sh no-run
make engine torch
python benchmarks/fidelity.py --save     # --only live,recorded,calibrated,silicon,profiles
python docs/generate_fidelity.py         # this page, from benchmarks/results/fidelity.json
```

Relative errors; in brackets 95 % intervals, and where it says so the range over runs. How to measure your own is in the
[guide to calibration](guide-calibrate.md).
"""

OVERVIEW = """\
## At a glance

Errors of each ground truth, and what others state in the same columns: in their own words, on their own ground truths,
hence not to be read across rows but where the runs are the same. A dash: not measured yet, or not stated.
"""

FIGURES = """\
## Figures and aims
"""

SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "A real engine on this machine",
        ("fidelity.live.",),
        (
            "vLLM 0.32 on one thread of a CPU serves a small model of random weights under two settings of its scheduler "
            "and three loads each, every load three times. Operators are profiled on the same CPU, costs are calibrated "
            "on the static load and on half of the capacity under the first setting, and the same requests of all other "
            "runs are simulated: 85 % of the capacity, and the other setting. Errors are medians over those runs, with "
            "the range over them; what the engine itself repeats to is the floor."
        ),
    ),
    (
        "Another engine: continuous batching of transformers",
        ("fidelity.live_transformers.",),
        "The same circle with another scheduler and another way to attend, on the same machine.",
    ),
    (
        "Recorded runs on GPUs",
        ("fidelity.recorded.",),
        (
            "Three runs of vLLM 0.19 with 300 requests each (LLMServingSim's examples), simulated from kernels that were "
            "profiled on the same GPUs. MAPE over mean, median, P90, P95 and P99; LLMServingSim's own errors on these runs "
            "beside ours."
        ),
    ),
    (
        "The same runs without profiles, calibrated",
        ("fidelity.calibrated.", "calibrate_"),
        "The plain roofline, calibrated on a part of the requests; errors on the others.",
    ),
    (
        "Thousands of measured deployments",
        ("fidelity.silicon.", "fidelity.argonne."),
        (
            "Mean TTFT and TPOT of models on H100, H200 and B200 under vLLM, SGLang and TensorRT-LLM (AIConfigurator's "
            "silicon sample), in three ways. `shipped` and `shipped_tables` are what `deploy` and `simulate` say: the "
            "roofline, or imported kernels, with a host by the engine's name, nothing else. `roofline_unseen` and `tables` "
            "add a front before the engine, waits by an engine's settings and hosts, all fitted on other models and other "
            "GPUs only, terms that `simulate` does not have. In all of them the roofline's kernel curves were fitted to "
            "kernels measured on these same GPUs, and whoever chose the form and the first guesses of the fit of hosts "
            "had seen all points. Headlines are of points whose client is recorded; `all agg points` adds sweeps of "
            "unknown clients. And Argonne's static batches."
        ),
    ),
    (
        "A GPU of our own",
        ("fidelity.gpu.",),
        "`python benchmarks/gpu_campaign.py`: profile, continuous batching of transformers at three loads, simulation.",
    ),
    (
        "Profiles",
        ("profile.",),
        "Operators of this machine, measured within a budget and judged on unseen points.",
    ),
)


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, of rows as the files of results hold them."""
    parts = [HEAD, OVERVIEW, overview(rows), FIGURES, _figures(rows)]
    for title, prefixes, about in SECTIONS:
        mine = [row for row in rows if row["name"].startswith(prefixes)]
        parts.append("\n".join([f"## {title}\n", about + "\n", *_section(mine, prefixes)]))
    return "\n".join(parts)


def results() -> Iterator[dict[str, Any]]:
    """The rows that are committed."""
    for path in (RESULTS, GPU):
        if path.exists():
            yield from map(json.loads, path.read_text("utf-8").splitlines())


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those that have an aim."""
    lines = ["| figure | measured | aim | |", "|---|---|---|---|"]
    for row in rows:
        target = row.get("target")
        if row.get("value") is not None and target is not None:
            met = row["value"] <= target if row["better"] == "lower" else row["value"] >= target
            lines.append(
                f"| `{row['name']}` | {figure(row)} | {number(target, row['unit'])} | {'met' if met else 'missed'} |"
            )
    return "\n".join(lines) + "\n"


def _section(rows: Sequence[Mapping[str, Any]], prefixes: tuple[str, ...]) -> Iterator[str]:
    if not rows:
        yield f"Not measured yet (`{prefixes[0]}`).\n"
    for row in rows:
        told = "" if row.get("value") is None else f": {figure(row)}"
        yield f"**`{row['name']}`**{told}\n"
        rest = {key: one for key, one in (row.get("details") or {}).items() if key not in TOLD}
        yield from _details(rest, ())


def _details(details: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Plain values as one line, mappings of mappings of plain values as a table, and so on downwards."""
    plain = {key: value for key, value in details.items() if not isinstance(value, Mapping | list)}
    plain |= {key: value for key, value in details.items() if isinstance(value, list) and _flat(value)}
    where = f"{', '.join(path)}: " if path else ""
    if plain:
        yield f"{where}{', '.join(f'{_words(key)} {_plain(value)}' for key, value in plain.items())}.\n"
    nested = {key: value for key, value in details.items() if isinstance(value, Mapping) and value}
    tables = {
        key: value for key, value in nested.items() if not any(isinstance(v, Mapping) for v in value.values())
    }
    if len(tables) > 1:
        yield from _table(tables, path)
    for key, value in nested.items():
        if key not in tables or len(tables) == 1:
            yield from _details(value, (*path, _words(key)))
    for key, value in details.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            yield from _table({str(at + 1): one for at, one in enumerate(value)}, (*path, _words(key)))


def _table(rows: Mapping[str, Mapping[str, Any]], path: tuple[str, ...]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    yield f"| {', '.join(path) or ' '} | {' | '.join(map(_words, columns))} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, row in rows.items():
        cells = [_plain(row[column]) if column in row else "" for column in columns]
        yield f"| {name.replace('|', '/')} | {' | '.join(cells)} |"
    yield ""


def _flat(values: list[Any]) -> bool:
    return not any(isinstance(value, Mapping | list) for value in values)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) and abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def main() -> int:
    """Writes the page, or with --check only says whether it is as the results are."""
    text = page(list(results()))
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not same:
            print(f"{PAGE.name} is not what the results say: python docs/generate_fidelity.py")
        return 0 if same else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
