"""The tables of gains: every model and task under its bounds, and the other systems, the paper's numbers beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _exegpt_words import BOUNDS, MODELS, TASKS, WINNERS, Rows, details, number, table, under, with_ends


def gains(rows: Rows) -> Iterator[str]:
    """The mean gains over sets of models and tasks."""
    about = (
        ("small_mid", "T5, OPT, 39B, 101B; S, T, C1", 2.0, None),
        ("large", "101B, 175B twice, 341B; G, C1, C2", 3.2, 2.2),
        ("all", "both", 2.9, None),
    )
    lines = []
    for name, of, paper, paper_loose in about:
        row = rows.get(f"exegpt.gain_{name}")
        told = details(rows, f"exegpt.gain_{name}")
        if row is None or "by_bound" not in told:
            continue
        by_bound = [number(told["by_bound"][bound]) for bound in BOUNDS]
        loose = f" ({paper_loose:g})" if paper_loose else ""
        most = f"{number(told['least'])} to {number(told['most'])}"
        other = number(told["if_batches_ran_to_the_longest_output"])
        lines.append(
            [
                of,
                number(row["value"]),
                f"{paper:g}",
                *by_bound[:3],
                f"{by_bound[3]}{loose}",
                number(told["geometric_mean"]),
                most,
                other,
            ]
        )
    head = ["models; tasks", "mean gain", "paper", *(f"bound {b}" for b in BOUNDS[:3]), "none (paper)"]
    head += ["geometric mean", "range", "were FT to run on to the task's longest"]
    yield from table(head, lines)


def overview(rows: Rows) -> Iterator[str]:
    """A line a model and task: the gain under each bound and who had it."""
    found, lines = under(rows, "exegpt.figure."), []
    for model, title in MODELS:
        for task, letter in TASKS.items():
            cells = (found.get(f"{model}.{task}") or {}).get("cells")
            if cells:
                lines.append([title, letter, *map(gain_of, cells)])
    yield from table(["model", "task", *(f"bound {bound}" for bound in BOUNDS)], lines)


def gain_of(cell: Mapping[str, Any]) -> str:
    return f"{number(cell['gain'])} {WINNERS[cell['won']]}" if cell["won"] else "nothing meets it"


def winners(rows: Rows) -> Iterator[str]:
    """By task, in how many cells each strategy won; the models that WAA fits apart from those that it does not."""
    found, lines = under(rows, "exegpt.figure."), []
    for task, letter in TASKS.items():
        some = [(name, told["cells"]) for name, told in found.items() if name.endswith(f".{task}")]
        fits = [cells for _, cells in some if _waa_runs(cells)]
        if not some:
            continue
        lines.append([letter, PAPER_WINS[task], *_won([c for cells in fits for c in cells])])
        lines[-1].append(
            ", ".join(dict(MODELS)[n.rpartition(".")[0]] for n, cells in some if not _waa_runs(cells)) or "-"
        )
    head = ["task", "paper", "bounds where both can run", "RRA won", "WAA won", "RRA's mean over WAA's", "WAA does not fit"]  # fmt: skip
    yield from table(head, lines)


PAPER_WINS = {"s": "WAA", "t": "RRA", "g": "RRA", "c1": "WAA (small), RRA (large)", "c2": "RRA"}


def _waa_runs(cells: Sequence[Mapping[str, Any]]) -> bool:
    return any(cell["strategies"].get(name) for cell in cells for name in ("waa-c", "waa-m"))


def _won(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    pairs = [
        (cell["strategies"]["rra"]["rps"], waa)
        for cell in cells
        if cell["strategies"]["rra"] and (waa := waa_rps(cell))
    ]
    ahead = sum(rra > waa for rra, waa in pairs)
    ratio = sum(rra / waa for rra, waa in pairs) / len(pairs) if pairs else None
    return [str(len(pairs)), str(ahead), str(len(pairs) - ahead), number(ratio)]


def waa_rps(cell: Mapping[str, Any]) -> float:
    return max((one["rps"] for name in ("waa-c", "waa-m") if (one := cell["strategies"][name])), default=0.0)


def cells(rows: Rows) -> Iterator[str]:
    """A table a model: requests a second of each system under each bound, and what was chosen."""
    found = under(rows, "exegpt.figure.")
    for model, title in MODELS:
        lines = []
        for task, letter in TASKS.items():
            some = (found.get(f"{model}.{task}") or {}).get("cells") or []
            lines.extend([letter, *_cell(cell)] for cell in some)
        if lines:
            yield f"### {title}\n"
            head = ["task", "bound", "s", "FT (batch)", "RRA", "WAA-C", "WAA-M", "gain", "chosen", "held, s"]
            yield from table(head, lines)
            yield ""


def _cell(cell: Mapping[str, Any]) -> list[str]:
    each = [cell["strategies"][name] for name in ("rra", "waa-c", "waa-m")]
    chosen = cell["strategies"].get(cell["won"]) if cell["won"] else None
    return [
        cell["bound"],
        number(cell["bound_s"]),
        f"{number(cell['ft']['rps'])} ({cell['ft']['batch']})",
        *(number(one["rps"]) if one else "-" for one in each),
        number(cell["gain"]) if cell["won"] else "-",
        chosen["words"] if chosen else "nothing",
        number(chosen["constrained_latency_s"]) if chosen else "-",
    ]


def systems(rows: Rows) -> Iterator[str]:
    """The gains over every system, then each model's cells."""
    lines = []
    for name, title in SYSTEMS:
        told = details(rows, f"exegpt.gain_over_{name.replace('-', '_')}")
        if told:
            row = rows[f"exegpt.gain_over_{name.replace('-', '_')}"]
            lines.append(
                [
                    title,
                    with_ends(row["value"], row["ci"]),
                    *(number(told["by_bound"][bound]) for bound in BOUNDS),
                    f"{told['ahead']} of {told['both_meet']}",
                    number(told["in_replicas"]),
                    number(told["as_cut_for_ft"]),
                ]
            )
    head = ["over", "mean", *(f"bound {bound}" for bound in BOUNDS), "ahead in", "schedules in replicas, too"]
    yield from table([*head, "both on one replica, as wide as a node"], lines)
    yield ""
    yield from _systems_cells(rows)


SYSTEMS = (
    ("fastertransformer", "FasterTransformer"),
    ("deepspeed-inference", "DeepSpeed-Inference"),
    ("orca", "Orca"),
    ("vllm", "vLLM v0"),
    ("sarathi", "Sarathi"),
    ("vllm-v1", "vLLM v1"),
    ("vllm-v1-disaggregated", "vLLM v1, disaggregated"),
)


def _systems_cells(rows: Rows) -> Iterator[str]:
    found, lines = under(rows, "exegpt.systems."), []
    shown = [
        (name, title) for name, title in SYSTEMS if any(name in one["cells"][0]["systems"] for one in found.values())
    ]
    for model, model_title in MODELS:
        for task, letter in TASKS.items():
            for cell in (found.get(f"{model}.{task}") or {}).get("cells") or []:
                line = [model_title, letter, cell["bound"], _rps(cell["exegpt"]), _replicas(cell)]
                lines.append([*line, *(_rps(cell["systems"].get(name)) for name, _ in shown)])
    head = ["model", "task", "bound", "RRA or WAA", "in replicas"]
    yield from table([*head, *(title for _, title in shown)], lines)


def _replicas(cell: Mapping[str, Any]) -> str:
    one = cell["exegpt_in_replicas"]
    return f"{number(one['rps'])} ({one.get('replicas', 1)})" if one else "-"


def _rps(one: Mapping[str, Any] | None) -> str:
    return number(one["rps"]) if one else "-"
