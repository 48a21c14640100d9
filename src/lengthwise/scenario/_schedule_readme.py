"""The README of a schedule's folder: what was chosen and is expected, what to run, how to see whether it came true."""

from __future__ import annotations

import math

from lengthwise import backend, schedule
from lengthwise.gateway.plugin.check import TESTED
from lengthwise.report import percent, rounded
from lengthwise.report.schedule import tokens_said
from lengthwise.scenario.schedule_outcomes import requests_to_count
from lengthwise.schema.schedule import SchedulePlan, Spread

SPLIT_CANNOT = (
    "The batch that encodes: vLLM takes at most B_E prompts and begins with what is there, B_E or not.",
    "Stages of two tensor-parallel degrees, and several stages on the decoding side. Each side is one stage here.",
    "Micro-batches (B_m): its decoding engine has one batch.",
    "The cache's way through host memory at the planned pace: it goes from GPU to GPU, which is no slower.",
    "One decode iteration for each encoding: the sides do not wait for each other.",
)
NOT_RESIZED = (
    "Batches kept within the threshold of their mean: its encodings are as heavy as they come, so that the worst case "
    "above, which counts on the threshold, may be passed."
)


INSIDE_NEEDS = (
    f"vLLM {' or '.join(TESTED)}, as the class was run on no other (`trust_version` in its settings takes any);",
    "one stage and one data-parallel rank, no speculation, no KV connector, so that a step is one batch, a token each;",
    "lengthwise in vLLM's own environment: without it that vLLM does not start.",
)


def readme(
    plan: SchedulePlan, told: schedule.Runnable, in_flight: int, outside: str, doubt: Spread | None
) -> str:
    """The text of README.md.

    Args:
        plan: The choice.
        told: What is run.
        in_flight: Requests under way at a time.
        outside: Why vLLM's own scheduler cannot keep the phases; "" it can.
        doubt: What is run, if costs are off; None: they do not say how far they may be.
    """
    parts = [
        f"# {plan.name or told.row.words}",
        _chosen(plan, told),
        "## Expected",
        _expected(plan, told, doubt),
        "## Run it",
        _split_steps() if told.decode else _phase_steps(outside),
        "## Check it",
        _split_check(in_flight, told.pipelines) if told.decode else _phase_check(told),
        "## When lengths move",
        _moving(split=told.decode is not None),
        "## What vLLM does otherwise" if told.decode else "",
        backend.listed(_cannot(plan)) if told.decode else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def said(plan: SchedulePlan, told: schedule.Runnable) -> str:
    """What is run, in a sentence or two."""
    if told.exact:
        return f"Engines can be told {told.row.words} as it is."
    times = f"{told.pipelines} times " if told.pipelines > 1 else ""
    share = told.throughput_rps / plan.chosen.throughput_rps
    return (
        f"{plan.chosen.words} cannot be told to engines: {told.why}. {times}{told.row.words} is the best of those that "
        f"can: {_three(told.throughput_rps)} requests/s, {share:.2f} of the choice, latency "
        f"{_three(told.row.latency_s)} s, {_three(told.row.latency_high_s)} s in the worst case."
    )


def _cannot(plan: SchedulePlan) -> tuple[str, ...]:
    """What of a split vLLM does not do; without batches that are kept even its latencies range further."""
    return SPLIT_CANNOT if plan.threshold is None else (*SPLIT_CANNOT, NOT_RESIZED)


def _chosen(plan: SchedulePlan, told: schedule.Runnable) -> str:
    facts = "; ".join(plan.facts.values())
    if told.exact:
        return f"{facts}.\n\nChosen and run: **{told.row.words}**."
    return f"{facts}.\n\nChosen: {plan.chosen.words}.\n\n{said(plan, told)}"


def _expected(plan: SchedulePlan, told: schedule.Runnable, doubt: Spread | None) -> str:
    row = told.row
    rows = [
        ("requests a second", _three(told.throughput_rps)),
        (f"latency of an output of {tokens_said(plan.quantile_tokens)}", f"{_three(row.latency_s)} s"),
        ("the same when batches are heavy", f"{_three(row.latency_high_s)} s"),
        ("latency bound", f"{plan.bound_s:g} s" if math.isfinite(plan.bound_s) else "none"),
        ("requests that are decoded at a time", _three(row.decode_batch)),
        ("an encoding", f"{_three(row.encode_s)} s"),
        ("a decode iteration", f"{_three(1e3 * row.decode_s)} ms"),
    ]
    lines = ["| | planned |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    note = (
        "Estimated, not measured, with the cost tables of scenario.toml. Latency counts from when a request's encoding "
        "begins; the wait for that is not in it."
    )
    return "\n".join(lines) + f"\n\n{note} {_doubted(plan, told, doubt)}"


def _doubted(plan: SchedulePlan, told: schedule.Runnable, doubt: Spread | None) -> str:
    """How far off that may be, and how often the bound would then hold."""
    if doubt is None:
        return "How far the tables may be off is not known."
    held_s = doubt.latency_high_s if plan.worst_case else doubt.latency_s
    rate, latency = (
        " to ".join(map(_three, ends))
        for ends in ([told.pipelines * end for end in doubt.throughput_rps], held_s)
    )
    what = "the bound" if math.isfinite(plan.bound_s) else "memory"
    verb = "holds" if math.isfinite(plan.bound_s) else "holds it"
    return (
        f"If the tables are off as far as they may be: {rate} requests/s, {latency} s"
        f"{' when batches are heavy' if plan.worst_case else ''} ({percent(doubt.level)} of {doubt.draws} draws), and "
        f"**{what} {verb} in {percent(doubt.held_share)} of the draws**."
    )


def outside(told: schedule.Runnable) -> str:
    """Why vLLM's own scheduler cannot keep the phases; "" it can."""
    if told.encode.stages > 1:
        return (
            f"this schedule has {told.encode.stages} pipeline stages, with as many batches under way at a time, and "
            "its class holds an engine of one stage"
        )
    return ""


def _phase_steps(outside: str) -> str:
    engine = (
        "`sh vllm.sh` starts the engine (`MODEL=... sh vllm.sh` loads another checkpoint). Any OpenAI-compatible "
        "engine with as many seats does."
    )
    text = _numbered([engine, "`lengthwise serve gateway.toml` keeps the schedule before it, at port 8080."])
    if outside:
        return text + (
            f"\n\nvLLM's own scheduler does not keep these phases: {outside}. The gateway keeps them from outside, by "
            "the tokens that it sees: vLLM may encode and decode in one step, and takes up new requests an iteration "
            "or two after they are sent, which counts as part of N_D."
        )
    return text + (
        "\n\nOr `sh vllm-phases.sh` instead of both: vLLM's own scheduler keeps the phases, to the step. Do not put "
        "that gateway before it: phases would be kept twice. It takes\n\n"
        f"{backend.listed(INSIDE_NEEDS)}\n\n"
        "Where vLLM is another one, or after an error of the class, it keeps vLLM's own order, and its log says "
        '"keeps its own schedule" and why. Then no phases are kept: use the gateway, which counts iterations by the '
        "tokens that it sees and needs nothing of the engine."
    )


def _moving(*, split: bool) -> str:
    watch = (
        "`lengthwise schedule watch scenario.toml --records RUN` replays what `lengthwise bench` recorded and says "
        "when the lengths had moved, what would then be best, and what changing to it costs."
    )
    if split:
        return watch
    return watch + (
        " `lengthwise schedule run` (above) with `--adapt` does so while it serves: it changes batches and phases, "
        "and tells what another layout would bring and take."
    )


def _split_steps() -> str:
    sides = "`sh prefill.sh` and `sh decode.sh` start the two sides, `sh router.sh` the router before them."
    door = "`lengthwise serve gateway.toml` lets in as many requests as the schedule has under way, at port 8080."
    return _numbered([sides, door])


def _phase_check(told: schedule.Runnable) -> str:
    number = requests_to_count(told.row)
    return (
        f"With vllm.sh running and no gateway: `lengthwise schedule run scenario.toml --engine "
        f"http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN} --requests {number} --out run` keeps the "
        f"schedule, plays {number:,} requests of these lengths, which fill enough phases to count, and prints batches, "
        "iterations, throughput and latency beside the plan, and whether the bound held."
    )


def _split_check(in_flight: int, pairs: int) -> str:
    more = (
        f" The plan is of one of {pairs} pairs: give each a router of its own, and name them all (--engine)."
        if pairs > 1
        else ""
    )
    return (
        f"With both sides and the router running and no gateway: `lengthwise schedule run scenario.toml --engine "
        f"http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN} --out run` plays requests of these lengths, at "
        f"most {in_flight // pairs:,} at a time, and prints throughput and latency beside the plan, and whether the "
        f"bound held.{more}"
    )


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _three(value: float) -> str:
    return rounded(value, math.nan)[0]
