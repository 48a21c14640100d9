"""What a real engine did of schedules: as expected, held to them, kept before it, and its own scheduler beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from _exegpt_words import Rows, between, details, holds, number, percent, signed, table

Seen = Mapping[str, Mapping[str, Any]]
"""Of repeats: by number its mean and range."""
HEAD = [
    "schedule", "what", "requests/s", "longest outputs, s", "decode batch", "cycle, s", "encoding, s",
    "decoding of a cycle, s", "decode iterations a cycle", "one of them, ms",
]  # fmt: skip


def live(rows: Rows) -> Iterator[str]:
    """A line for each schedule and what had it."""
    lines = []
    for name, told in _schedules(rows).items():
        words = _words(told["expected"]["controls"])
        ways = (
            ("expected", _expected(told["expected"])),
            ("event engine, same tables", _pair(told["simulated"], number)),
            ("engine held to it", _reserved(told["seen"])),
            ("kept by the gateway", _retained(told["seen_of_gateway"])),
            (
                f"stock scheduler, {round(told['expected']['decode_batch'])} under way",
                _pair(told["stock_as_many_under_way"], _spread),
            ),
        )
        lines += [[f"{name}: {words}" if k == 0 else "", *way] for k, way in enumerate([w, *c] for w, c in ways)]
    yield from table(HEAD, lines)


def _schedules(rows: Rows) -> Mapping[str, Mapping[str, Any]]:
    return details(rows, "exegpt.live.schedules").get("by_name") or {}


def _words(controls: Mapping[str, Any]) -> str:
    return f"B_E = {controls['encode_batch']}, N_D = {controls['decode_steps']}"


def _expected(report: Mapping[str, Any]) -> list[str]:
    steps, decode_s = report["controls"]["decode_steps"], report["decode_s"]
    names = ("throughput_rps", "latency_s", "decode_batch", "cycle_s", "encode_s")
    return [*(number(report[name]) for name in names), number(steps * decode_s), str(steps), number(1e3 * decode_s)]


def _reserved(report: Seen) -> list[str]:
    names = ("throughput_rps", "latency_s", "decode_batch", "cycle_s", "encode_s")
    shown = [_spread(report[name]) for name in names]
    return [*shown, number(_decoding_s(report)), number(_iterations(report)), _spread(report["decode_s"], 1e3)]


def _retained(report: Seen) -> list[str]:
    names = ("throughput_rps", "latency_s", "decode_batch", "cycle_s")
    return [*(_spread(report[name]) for name in names), "-", "-", _spread(report["decode_steps"]), "-"]


def _pair(report: Mapping[str, Any], shown: Callable[[Any], str]) -> list[str]:
    return [shown(report["throughput_rps"]), shown(report["latency_s"]), *["-"] * 6]


def _spread(report: Mapping[str, Any], times: float = 1.0) -> str:
    mean, low, high = (number(times * of) for of in (report["mean"], *report["range"]))
    return mean if low == mean == high else f"{mean} ({low} to {high})"


def _decoding_s(report: Seen) -> float:
    """What of a cycle is not encoding."""
    return report["cycle_s"]["mean"] - report["encode_s"]["mean"]


def _iterations(report: Seen) -> float:
    return _decoding_s(report) / report["decode_s"]["mean"]


def on_engine(rows: Rows) -> Iterator[str]:
    """How far off the estimates were, and where it comes from."""
    some = _schedules(rows)
    if not some:
        return
    yield f"\n{_off(rows, some)}\n"
    yield f"{_parts(some)}\n"
    yield f"{_tables(details(rows, 'exegpt.live.schedules'), some)}\n"
    yield _over_stock(rows, some)


def _off(rows: Rows, some: Mapping[str, Mapping[str, Any]]) -> str:
    errors = {
        what: [one["expected_over_seen"][what] - 1 for one in some.values()]
        for what in ("throughput", "latency", "decode_batch")
    }
    exact = rows["exegpt.live.exact_phases"]
    phases = f"{exact['details']['phases']} phases"
    kept = (
        f"All {phases}"
        if exact["value"] == 1
        else f"In the worst repeat {percent(exact['value'])} (of {phases} in all)"
    )
    each = between([one["seen"]["phases"]["mean"] for one in some.values()], number)
    return (
        f"{kept} are exactly as the schedule has them, {each} a repeat; the decode batch is expected within "
        f"{percent(max(map(abs, errors['decode_batch'])))}. Of seconds, the throughput expected is off by "
        f"{_each(some, errors['throughput'])}, the latency of the longest outputs by {_each(some, errors['latency'])}."
    )


def _each(some: Mapping[str, Any], errors: Sequence[float]) -> str:
    return ", ".join(f"{signed(error)} ({name})" for name, error in zip(some, errors, strict=True))


def _parts(some: Mapping[str, Mapping[str, Any]]) -> str:
    """Which part of a cycle is off, and what is no error at all."""
    expected = [one["expected"] for one in some.values()]
    seen = [one["seen"] for one in some.values()]
    encode = [e["encode_s"] / s["encode_s"]["mean"] - 1 for e, s in zip(expected, seen, strict=True)]
    decode = [
        e["controls"]["decode_steps"] * e["decode_s"] / _decoding_s(s) - 1 for e, s in zip(expected, seen, strict=True)
    ]
    played = [
        one["expected"][name] / one["simulated"][name] - 1
        for one in some.values()
        for name in ("throughput_rps", "latency_s")
    ]
    holds(max(map(abs, played)) < 0.05, "estimates are the event engine's on the tables of the real engine")
    text = (
        f"Of a cycle's seconds those of encoding are off by {_each(some, encode)}, those of decoding by {_each(some, decode)}. The event "
        f"engine on the same tables is within {percent(max(map(abs, played)))} of the estimates: what is off is the tables, "
    )
    less_encode = max(map(abs, encode)) < min(map(abs, decode))
    text += "of decode iterations more than of encodings." if less_encode else "of encodings, too."
    early = [
        (name, one["controls"]["decode_steps"], _iterations(s))
        for (name, one), s in zip(((n, o["expected"]) for n, o in some.items()), seen, strict=True)
        if _iterations(s) < one["controls"]["decode_steps"] - 0.5
    ]
    if early:
        named = ", ".join(f"{number(iterations)} of {steps} ({name})" for name, steps, iterations in early)
        text += (
            f" A phase ends when nobody is left, here after {named} iterations in the mean. An expected iteration is the mean over all "
            "N_D, those in which hardly ever anybody is left taking little: of these schedules single iterations do not compare."
        )
    return text


def _tables(report: Mapping[str, Any], some: Mapping[str, Mapping[str, Any]]) -> str:
    """What is known of the tables: the calibration, runs held out of it, the machine."""
    errors = [one["jct_p50"] for one in report["held_out_errors"].values()]
    moved = [one for one in report["calibration"] if one["value"] != one["prior"]]
    shown = ", ".join(f"{one['label']} {number(one['value'])}" for one in moved)
    text = f"The calibration {'moved no parameter' if not moved else f'moved {shown}'}"
    text += _of_log(report, some) + ". "
    text += (
        f"On the stock engine's runs at nearly full load, which it did not see, the median JCT is {_list(errors)} off, one after "
        "the other, the same requests each time"
    )
    ratios = _cpu_ratios(report["runs"])
    if ratios:
        text += (
            f": the engine took {between(ratios, number)} times the processor seconds for a load in the first repeat as in the second. "
            "The machine changed its speed by that much while tables and schedules were measured"
        )
    return text + "."


def _list(errors: Sequence[float]) -> str:
    return " and ".join(signed(error) for error in errors)


def _of_log(report: Mapping[str, Any], some: Mapping[str, Mapping[str, Any]]) -> str:
    if not any(one["name"] == "log_step" for one in report["calibration"]):
        return ""
    logged = [1e3 * run["iterations_s"] / run["iterations"] for run in report["runs"].values()]
    seen = [1e3 * one["seen"]["decode_s"]["mean"] for one in some.values()]
    return (
        f". It was given the engine's log of steps, which has {between(logged, number)} ms a step where decode iterations took "
        f"{between(seen, number)} ms: this engine runs the model in the scheduler's own process, and vLLM's clock starts when a step "
        "was handed over, there: computed. Such logs are not fitted any more, the server's counters are; these rows are of before"
    )


def _cpu_ratios(runs: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """By load, the engine's processor seconds of the first repeat over those of the second."""
    first = {name.removesuffix("-0"): run for name, run in runs.items() if name.endswith("-0")}
    return [
        run["engine_cpu_s"] / runs[f"{name}-1"]["engine_cpu_s"] for name, run in first.items() if f"{name}-1" in runs
    ]


def _over_stock(rows: Rows, some: Mapping[str, Mapping[str, Any]]) -> str:
    def ratios(what: str, of: str, to: str) -> str:
        return between([one[of][what]["mean"] / one[to][what]["mean"] for one in some.values()], number)

    gains = details(rows, "exegpt.live.over_stock")
    ahead = [name for name in some if gains[name] > 1]
    times = ", ".join(f"{number(gains[name])} ({name})" for name in some)
    decision = f"ahead with {', '.join(ahead)}" if ahead else "not ahead of the engine's own scheduler here"
    why = (
        "On one stage there are no bubbles to fill, chunked prefill encodes beside decodes, and a place that is free is taken at once, "
        "where RRA's waits for the phase's end. "
    )
    longest = ratios("latency_s", "seen", "stock_as_many_under_way")
    gateway = ratios("throughput_rps", "seen_of_gateway", "seen")
    return (
        f"**RRA is {decision}**: with as many requests under way it has {times} times the requests a second. {'' if ahead else why}"
        f"Its longest outputs take {longest} times as long, waiting to be encoded left out. The gateway, which counts from outside, has "
        f"{gateway} times the requests a second of the scheduler class."
    )


__all__ = ["live", "on_engine"]
