"""Whether a server's counters tell of a run's requests alone, and of each step once."""

from __future__ import annotations

import numpy as np

from lengthwise.measure.calibrate._counters import Counters
from lengthwise.measure.calibrate._runs import Run
from lengthwise.schema.records import RequestRecords, Status

OTHERS_TOKENS = 0.02
"""Tokens that are not of the run's requests, relative to theirs: beyond that somebody else used the server."""
TWICE = 0.1
"""Steps beyond those that the run's tokens allow, relative to these: beyond that some were counted more than once."""


def not_own(run: Run, counters: Counters) -> str:
    """In words why they do not; empty where they do, as far as tokens tell."""
    if not len(counters):
        return ""
    r = run.measured.records.requests
    made, tokens, steps, lost = (
        float(column[-1] - column[0])
        for column in (counters.generated, counters.tokens, counters.steps, counters.preempted)
    )
    for what, theirs, ours in (
        ("made", made, float(r.output_tokens.sum())),
        ("computed in prompts", tokens - made, float(r.prompt_tokens.sum())),
    ):
        if theirs > ours * (1 + OTHERS_TOKENS):
            return f"the server {what} {theirs:,.0f} tokens meanwhile, of which {ours:,.0f} are of the run's requests"
    if lost == 0 and steps > (most := most_steps(r)) * (1 + TWICE):
        return (
            f"it counted {steps:,.0f} steps, where those that decode got a token of {most:,.0f}: each of several HTTP "
            "fronts (--api-server-count) counts a step in which it has a request, others used the server, or the "
            "client was late to read its answers"
        )
    return ""


def most_steps(r: RequestRecords) -> float:
    """Steps that gave a token; infinite where a request began and did not finish.

    A step gives one to every request that decodes. So from some moment on there are as many as the request gets that
    decodes then and ends last, until its end; where nobody decodes it is the step of the next first token.
    """
    begun = r.output_tokens > 0
    finished = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    if not finished[begun].all():
        return float("inf")
    order = np.argsort(r.first_token_s[begun], kind="stable")
    columns = (r.first_token_s, r.finished_s, r.output_tokens - 1)
    waiting = list(zip(*(column[begun][order].tolist() for column in columns), strict=True))[::-1]
    steps, at_s, last = 0.0, -np.inf, (-np.inf, -np.inf, 0)
    while waiting or last[1] > at_s:
        while waiting and waiting[-1][0] <= at_s:
            last = max(last, waiting.pop(), key=lambda each: each[1])
        if last[1] > at_s:
            steps += last[2] * (last[1] - at_s) / (last[1] - last[0])
            at_s = last[1]
        elif waiting:
            steps, at_s = steps + 1, waiting[-1][0]
    return steps
