"""What a report shows: one variant and all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lengthwise.metrics import Beyond, Summary
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records


@dataclass(frozen=True)
class Result:
    """One variant: its numbers, the records its curves are drawn from, and what ran.

    Attributes:
        name: Of the variant, unique in a report.
        summary: Its numbers, over as many seeds as were run.
        records: One run of it; curves and timelines show this one.
        deployment: What ran; None where a real engine was measured, whose hardware nobody described.
        scenario_text: The scenario it came from, shown as it is; may be empty.
        summaries: One a seed, where there are several; variants with the same seeds are then
            compared pair by pair, which tells smaller differences apart.
        notes: What limits the trust in the numbers, a sentence each: extrapolated costs, for one.
        beyond: Where runs went beyond the measurements behind the cost tables.
        model_draws: Runs under tables that are a little off, behind the model intervals.
        engine: What is known of a measured engine, by label.
    """

    name: str
    summary: Summary
    records: Records
    deployment: Deployment | None
    scenario_text: str = ""
    summaries: Sequence[Summary] = ()
    notes: Sequence[str] = ()
    beyond: Sequence[Beyond] = ()
    model_draws: int = 0
    engine: Mapping[str, str] = field(default_factory=dict)


def check_results(results: list[Result]) -> None:
    """Raises InputError when there is nothing to show or two variants share a name."""
    if not results:
        raise InputError("a report needs at least one result; the list is empty")
    names = [r.name for r in results]
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise InputError(f"variants in a report must have names of their own; used twice: {', '.join(twice)}")
