"""Plans and runs of applications as text: durations, shapes of plans, sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.report.formatting import (
    MINUS,
    PLUS_MINUS,
    TIMES,
    UNKNOWN,
    amount,
    counted,
    model_text,
    percent,
    rounded,
    two_digits,
)
from lengthwise.schema.app import AppMethod, AppPlan, AppStage, AppWhatIf, ModelPlan
from lengthwise.schema.estimate import Estimate
from lengthwise.statistics import mean_estimate

IDLE_REASONS = {  # reasons for GPU time in which no model runs
    "load": "loading",
    "waiting_for_parents": "waiting for other models",
    "no_plan_fits": "no plan fits the free GPUs",
    "left_free": "left free",
    "tail": "idle at the end",
}
NEGLIGIBLE_SHARE = 1e-6  # relative differences below it come from the order of additions
MIN_SHARE = 0.005  # smaller shares of GPU time are not named


@dataclass(frozen=True)
class AppFacts:
    """Facts about an application's plan, hardware and run."""

    name: str
    metadata: Sequence[str] = ()
    gpus: Sequence[str] = ()
    is_mixed: bool = False
    manifest: Mapping[str, Any] | None = None  # the run's manifest; None where it was only planned
    tokens: Mapping[str, int] = field(default_factory=dict)  # recorded output tokens, by model name
    answers: Mapping[str, int] = field(default_factory=dict)


def time_scale(value: float) -> tuple[float, str]:
    """Return (seconds per unit, unit) for the unit in which a time in seconds is easy to read: s, min or h."""
    if abs(value) < 120:
        return 1.0, "s"
    return (60.0, "min") if abs(value) < 7200 else (3600.0, "h")


def duration_text(value: float) -> str:
    """Return a time in seconds as text in a suitable unit ("45.3 s", "12.4 min", "3.21 h")."""
    if not math.isfinite(value):
        return UNKNOWN
    scale, unit = time_scale(value)
    return f"{amount(value / scale) if value / scale >= 0.001 else '0'} {unit}"


def estimate_duration_text(estimate: Estimate) -> str:
    """Return a time in seconds as text with its intervals ("45.30 ± 0.28 s (41 to 52)")."""
    scale, unit = time_scale(estimate.value)
    if not estimate.has_interval or _is_negligible(estimate.half_width, estimate.value):
        text = duration_text(estimate.value)
    else:
        value, half = rounded(estimate.value / scale, estimate.half_width / scale)
        text = f"{value} {PLUS_MINUS} {half} {unit}"
    return " ".join(filter(None, (text, model_text(estimate, 1 / scale))))


def difference_text(estimate: Estimate, of_s: float) -> str:
    """Return a signed difference of two times with an interval, or "none" if the difference is negligible.

    ``of_s`` is the approximate size of the times in seconds, with which the difference is compared.
    """
    half_s = 0.0 if math.isnan(estimate.half_width) else estimate.half_width
    has_half = not _is_negligible(half_s, of_s)
    ends_s = [estimate.model_low, estimate.model_high] if estimate.has_model_interval else []
    ends_s = [] if all(_is_negligible(end - estimate.value, of_s) for end in ends_s) else ends_s
    if _is_negligible(estimate.value, of_s) and not has_half and not ends_s:
        return "none"
    scale, unit = time_scale(max(abs(estimate.value), half_s))
    value, half = rounded(abs(estimate.value) / scale, half_s / scale if has_half else math.nan)
    value = "0" if _is_negligible(estimate.value, of_s) else value
    sign = "" if not re.search("[1-9]", value) else "+" if estimate.value > 0 else MINUS
    interval = f" {PLUS_MINUS} {half}" if has_half else ""
    is_exact = not (has_half or ends_s or math.isnan(estimate.half_width))
    low_to_high = " to ".join(f"{MINUS if end < 0 else '+'}{two_digits(abs(end) / scale)}" for end in ends_s)
    model = f" ({low_to_high})" if ends_s else ""
    return f"{sign}{value}{interval} {unit}{model}{' exactly' if is_exact else ''}"


def gain_text(plan: AppPlan, method: AppMethod) -> str:
    """Return a method's time, search included, relative to the plan's, with an interval ("2.25 ± 0.10")."""
    lead_s = next((one.lead_s for one in plan.methods if one.name == plan.method), 0.0)
    pairs = zip(method.makespans_s, plan.makespans_s, strict=False)
    half = mean_estimate([(other + method.lead_s) / max(own + lead_s, 1e-12) for other, own in pairs]).half_width
    gain, half_text = rounded(method.gain, half)
    return f"{gain} {PLUS_MINUS} {half_text}" if half > NEGLIGIBLE_SHARE else f"{method.gain:.2f}"


def _is_negligible(value: float, of_s: float) -> bool:
    return abs(value) <= NEGLIGIBLE_SHARE * max(abs(of_s), 1e-9)


def shape(plan: ModelPlan) -> str:
    """Return the number of replicas and the shape of each ("2", "2 x tp 4", "1 x tp 2 x pp 2")."""
    tp = f" {TIMES} tp {plan.tp}" if plan.tp > 1 else ""
    return f"{plan.dp}{tp}{f' {TIMES} pp {plan.pp}' if plan.pp > 1 else ''}"


def gpus_text(plan: ModelPlan, *, is_mixed: bool) -> str:
    """Return the number of a plan's GPUs, with their kind if there are several kinds ("4", "4 H100")."""
    return f"{plan.gpus} {plan.gpu}" if is_mixed else str(plan.gpus)


def slowest_switches(stage: AppStage) -> dict[int, tuple[str, float]]:
    """Return by model number how the slowest replica became ready ("start" or "wake"), and in how many seconds."""
    found: dict[int, tuple[str, float]] = {}
    for switch in stage.switches:
        if switch.model not in found or switch.seconds > found[switch.model][1]:
            found[switch.model] = (switch.how, switch.seconds)
    return found


def what_if_text(what_if: AppWhatIf) -> str:
    """Return the assumed change of the hardware as text ("one more GPU")."""
    found = re.fullmatch(r"(island|gpus)_(plus|minus)_(\d+)", what_if.name)
    if found is None:
        return {"disk_twice_as_fast": "a disk twice as fast"}.get(what_if.name, what_if.name.replace("_", " "))
    kind, sign, count = found.groups()
    more = "more" if sign == "plus" else "fewer"
    if kind == "gpus":
        return f"one {more} GPU" if count == "1" else f"{count} GPUs {more}"
    return f"one {more} {'pair of GPUs' if count == '2' else f'group of {count} GPUs'} (with fast links)"


def idle_shares(plan: AppPlan, gpus: int) -> list[tuple[str, float]]:
    """Return (reason, share of all GPU time) for the GPU time without a running model, the largest share first."""
    total_s = gpus * (plan.stages[-1].end_s if plan.stages else 0.0)
    shares = [(reason, idle_s / total_s) for reason, idle_s in plan.idle_s.items() if total_s]
    return sorted(shares, key=lambda one: (-one[1], one[0]))


def sample_note(plan: AppPlan) -> str:
    """Return a note if the plan's stages do not end at the makespan, or "" if they do.

    The stages are of one sample of output lengths, but the makespan is a mean over samples.
    """
    end_s = plan.stages[-1].end_s if plan.stages else plan.makespan.value
    if duration_text(end_s) == duration_text(plan.makespan.value):
        return ""
    return f"The stages are those of one sample, which ends after {duration_text(end_s)}."


def sentences(plan: AppPlan, app_metadata: AppFacts) -> Iterator[str]:
    """Yield sentences on the makespan and its uncertainty, idle GPUs, other methods, and changes that would help."""
    gpus = f" on {counted(len(app_metadata.gpus), 'GPU')}" if app_metadata.gpus else ""
    draws = ""
    if len(plan.makespans_s) > 1 and plan.makespan.has_interval:
        draws = f"; mean over {len(plan.makespans_s)} length samples not used for planning, with its 95 % interval"
        if plan.makespan.has_model_interval:
            draws += ", and in brackets the 90 % interval of the cost model's error"
    yield f"Makespan {estimate_duration_text(plan.makespan)}{gpus} ({counted(len(plan.stages), 'stage')}{draws})."
    if note := sample_note(plan):
        yield note
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        yield f"Nine of ten samples lie between {duration_text(low)} and {duration_text(high)}."
    shares = idle_shares(plan, len(app_metadata.gpus))
    if shares:
        busy = max(0.0, 1.0 - sum(share for _, share in shares))
        reasons = [f"{percent(share)} {IDLE_REASONS.get(name, name)}" for name, share in shares if share >= MIN_SHARE]
        rest = f"; the rest: {', '.join(reasons)}" if reasons else ""
        yield f"Models run in {percent(busy)} of all GPU time{rest}."
    others = sorted((one for one in plan.methods if one.name != plan.method), key=lambda one: one.gain)
    if others:
        gains = ", ".join(f"{one.name.replace('_', ' ')} {gain_text(plan, one)}" for one in others)
        yield f"End-to-end time of other methods, search included, relative to this plan: {gains}."
    own = next((one for one in plan.methods if one.name == plan.method), None)
    if own is not None and others:
        best = min(others, key=lambda one: one.makespan.value)
        saved_s = [other - own_s for other, own_s in zip(best.makespans_s, own.makespans_s, strict=False)]
        saved = mean_estimate(saved_s or [best.makespan.value - own.makespan.value])
        more_s = own.search_s - best.search_s
        if saved.value > 0 and more_s > 0:
            yield (
                f"The best other plan is that of {best.name.replace('_', ' ')}; the search for a better one took "
                f"{duration_text(more_s)} more and saved {estimate_duration_text(saved)}."
            )
    for what_if in plan.what_ifs:
        change = difference_text(what_if.difference, plan.makespan.value)
        makespan = estimate_duration_text(what_if.makespan)
        effect = "the makespan would not change" if change == "none" else f"the makespan would be {makespan} ({change})"
        yield f"With {what_if_text(what_if)}, {effect}."
