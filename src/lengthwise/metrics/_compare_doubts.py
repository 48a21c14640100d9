"""What limits the trust in a comparison, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from lengthwise.metrics._compare_origin import doubts_of_origin
from lengthwise.metrics._compare_sides import Run, are_same_lengths, are_same_times
from lengthwise.metrics.clocks import clock_doubt
from lengthwise.schema.records import Status

FEW = 100
"""With fewer requests a tail is a handful of them."""

WORTH = 0.01


def doubts_of(a: Run, b: Run, *, paired: bool) -> tuple[str, ...]:
    """Each doubt once, the gravest first: what does not belong together, what is missing, what was measured."""
    found = [*_together(a, b), *_served_lengths(a, b, paired=paired)]
    for name, run in (("A", a), ("B", b)):
        found += [*_partial(name, run)]
        doubt = clock_doubt(run.requests, run.records.end_s)
        found += [f"{name}: {doubt}."] if doubt else []
        found += [f"{name}: {doubt}" for doubt in run.measured.doubts]
    fewest = min(len(run.requests.arrival_s) for run in (a, b))
    if fewest < FEW:
        found.append(f"There are {fewest} requests: tails (P95, P99) rest on a handful of them.")
    return tuple(dict.fromkeys(found))


def _together(a: Run, b: Run) -> Iterator[str]:
    ours, theirs = a.measured.workload, b.measured.workload
    yield from doubts_of_origin(a.measured, b.measured)
    if are_same_lengths(ours, theirs):
        if not are_same_times(ours, theirs):
            yield "The same requests arrive at different times in A and B: queues differ by the load, too."
        return
    for name, what in (("prompt_tokens", "prompts"), ("output_tokens", "outputs asked for")):
        mean_a, mean_b = (float(getattr(w, name).mean()) for w in (ours, theirs))
        if abs(mean_a - mean_b) > WORTH * mean_b:
            yield (
                f"They do not belong together: {what} have {mean_a:,.0f} tokens on average in A and {mean_b:,.0f} in B."
            )
    if len(ours) != len(theirs):
        yield f"They are of different requests: {len(ours):,} in A and {len(theirs):,} in B."
    elif ours.concurrency != theirs.concurrency:
        yield "They do not belong together: one is a closed loop, or one of another concurrency."
    else:
        yield "They are of different requests: lengths differ one by one."


def _served_lengths(a: Run, b: Run, *, paired: bool) -> Iterator[str]:
    """Outputs that ended earlier or later than in the other run."""
    if paired:
        done = (a.requests.status == Status.FINISHED) & (b.requests.status == Status.FINISHED)
        other = a.requests.output_tokens[done] != b.requests.output_tokens[done]
        if done.any() and other.mean() > WORTH:
            yield f"{100 * other.mean():.0f} % of outputs are not as long in A as in B: JCT compares unlike work."


def _partial(name: str, run: Run) -> Iterator[str]:
    status = run.requests.status
    unfinished = int((status == Status.UNFINISHED).sum())
    if unfinished:
        yield f"{name} is a partial run: {unfinished:,} of {len(status):,} requests were not finished at its end."
    errors = sum(run.measured.errors.values())
    if errors:
        worst = max(run.measured.errors, key=lambda key: run.measured.errors[key])
        yield f"{name}: {errors:,} requests failed, most of: {worst}."
