"""The paper's Tables 5 to 7 and Figures 10 and 11 by us, and what the search costs and misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _exegpt_gains import gain_of
from _exegpt_words import BOUNDS, MODELS, TASKS, WINNERS, Rows, details, number, percent, table, under


def table6(rows: Rows) -> Iterator[str]:
    """The paper's choices beside ours, and what theirs are estimated to yield."""
    lines = []
    found = under(rows, "exegpt.table6.")
    for bound in ("3.1s", "5.9s", "11.5s", "none"):
        if bound not in found:
            continue
        told = found[bound]
        paper, ours = told["paper"], told["choice"]
        lines.append(
            [
                bound.removesuffix("s"),
                paper["words"],
                f"{number(paper['latency_s'])}, {number(paper['rps'])}",
                _pair(told["their_schedule"]),
                _pair(told["their_schedule_as_they_count"]),
                ours["words"],
                f"{_pair(ours)} ({number(ours['constrained_latency_s'])})",
            ]
        )
    head = ["bound, s", "paper chose", "and had: s, requests/s", "that, by us", "by us as the paper counts"]
    yield from table([*head, "we choose", "s, requests/s (held, s)"], lines)


def _pair(schedule: Mapping[str, Any] | None) -> str:
    return f"{number(schedule['latency_s'])}, {number(schedule['rps'])}" if schedule else "memory does not hold it"


def table5(rows: Rows) -> Iterator[str]:
    """Shares of points that break monotony: (latency, throughput) in percent, the paper's in brackets."""
    told = details(rows, "exegpt.nonmonotone_share")
    paper = {(one["task"], one["tolerance"]): one for one in told.get("paper", [])}
    lines = []
    for (task, tolerance), of_paper in paper.items():
        line = [TASKS[task], f"{100 * tolerance:g} %"]
        for strategy, variable in COLUMNS5:
            some = [
                one
                for one in told["rows"]
                if (one["task"], one["tolerance"], one["variable"]) == (task, tolerance, variable)
                and one["strategy"].startswith(strategy)
            ]
            theirs = of_paper.get(f"{strategy} {variable}")
            line.append(_shares(some) + (f" ({theirs[0]:g}, {theirs[1]:g})" if theirs else ""))
        lines.append(line)
    yield from table(["task", "tolerance", *(f"{s.upper()} {v}" for s, v in COLUMNS5)], lines)


COLUMNS5 = (
    *(("rra", "B_E"), ("rra", "N_D"), ("rra", "TP")),
    *(("waa", "B_E"), ("waa", "B_E, one split"), ("waa", "TP"), ("waa", "B_m")),
)


def _shares(some: Sequence[Mapping[str, Any]]) -> str:
    points = sum(one["points"] for one in some)
    if not points:
        return "-"
    shares = (100 * sum(one[kind] * one["points"] for one in some) / points for kind in ("latency", "throughput"))
    return ", ".join(f"{share:.1f}" for share in shares)


def table7(rows: Rows) -> Iterator[str]:
    """Stage times and their ranges, as they come and adjusted; WAA's iterations have no place in a phase."""
    lines = []
    for told in under(rows, "exegpt.variance.").values():
        if "encode" not in told:
            continue
        kept = "none" if told["threshold"] is None else percent(told["threshold"])
        encode, decode = told["encode"], told["decode"]
        lines.append(
            [
                told["schedule"],
                kept,
                _ranged(encode),
                percent(told["expected_encode_range"]),
                _ranged(decode),
                percent(decode.get("range_at_its_place")),
                percent(told["expected_decode_range"]),
                number(told["rps"]),
                number(told["latency_p99_s"]),
            ]
        )
    head = ["schedule", "threshold", "encoding, s and 99 % range", "expected range"]
    head += ["decode iteration, s and 99 % range", "range at its place in a phase", "expected range"]
    head += ["requests/s", "P99 latency, s"]
    yield from table(head, lines)


def _ranged(report: Mapping[str, Any]) -> str:
    ends = report["ci"]
    return (
        f"{number(report['mean_s'])}, +-{percent(report['range'])} [{number(100 * ends[0])}, {number(100 * ends[1])}]"
    )


def figure11(rows: Rows) -> Iterator[str]:
    """What moves of the outputs do to a schedule that stays."""
    for name, told in under(rows, "exegpt.drift.").items():
        yield (
            f"**{name.upper()}**: {told['schedule']}, {number(told['rps'])} requests/s, {number(told['constrained_latency_s'])} s held under a bound of "
            f"{number(told['bound_s'])} s ({told['bound']} of FasterTransformer's latencies).\n"
        )
        lines = [
            [
                one["changed"],
                f"{one['change']:+g}" if one["changed"] == "skewness" else f"{100 * one['change']:+g} %",
                number(one["kept_rps"]),
                number(one["anew_rps"]),
                number(one["latency"]),
                _margin(one["margin"]),
                number(one["fixed_latency"]),
                _margin(one["fixed_margin"]),
            ]
            for one in told["moves"]
        ]
        head = ["changed", "by", "throughput kept", "chosen anew", "latency (a)", "margin (a)", "latency (b)"]
        yield from table([*head, "margin (b)"], lines)
        yield ""


def _margin(share: float | None) -> str:
    return "none is enough" if share is None else "none needed" if share == 0 else percent(share)


def real(rows: Rows) -> Iterator[str]:
    """Each list's cells: gain and who won."""
    lines = []
    for name, told in under(rows, "exegpt.real.").items():
        model, _, of = name.rpartition(".")
        lengths = told["lengths"]
        about = (
            f"{number(lengths['prompt_mean'])} / {number(lengths['output_mean'])}, sd {number(lengths['output_sd'])}"
        )
        shown = [gain_of(cell) + ("" if cell["is_satisfied"] else " (bound broken)") for cell in told["cells"]]
        lines.append([dict(MODELS)[model], of, f"{lengths['requests']:,}", about, *shown])
    head = ["model", "list", "requests", "prompt / output tokens", *(f"bound {bound}" for bound in BOUNDS)]
    yield from table(head, lines)


def search(rows: Rows) -> Iterator[str]:
    """By model, the slowest choice and the largest share of points."""
    choices = details(rows, "exegpt.search_s_max").get("choices") or []
    lines = []
    for model, title in MODELS:
        mine = [one for one in choices if one["model"] == model]
        if mine:
            seconds = sorted(one["search_s"] for one in mine)
            points = sorted(one["points"] for one in mine)
            share = max(one["points_share"] for one in mine)
            lines.append([title, str(len(mine)), number(seconds[len(seconds) // 2]), number(seconds[-1])])
            lines[-1] += [number(max(one["ranges_s"] for one in mine)), f"{points[0]:,} to {points[-1]:,}"]
            lines[-1].append(percent(share))
    head = ["model", "choices", "median, s", "slowest, s", "of that ranges, at most, s"]
    yield from table([*head, "schedules there are", "estimated, at most"], lines)


def regret(rows: Rows) -> Iterator[str]:
    """By question, bounds and what was missed at most."""
    questions = details(rows, "exegpt.regret_max").get("questions") or {}
    large = details(rows, "exegpt.regret_16_gpus").get("questions") or {}
    each = [*questions.items(), *large.items()]
    yield from table(
        ["model, task", "strategies", "bounds", "chosen", "schedules", "looking at all, min", "missed, at most"],
        [[name, *_question(told)] for name, told in each],
    )


def _question(report: Mapping[str, Any]) -> list[str]:
    chosen = ", ".join(f"{WINNERS[name]} {many}" for name, many in (report.get("chosen") or {}).items() if many)
    return [
        ", ".join(WINNERS[name] for name in report.get("strategies") or ()) or "-",
        str(report["bounds"]),
        chosen or "-",
        f"{report['points']:,}",
        number(report.get("exhaustive_minutes")),
        percent(report["regret_max"]),
    ]
