"""The watch over recorded requests: what moved there, and what only stood beside its like."""

from __future__ import annotations

import numpy as np

from lengthwise.config.workload import read_trace
from lengthwise.schedule import Monitor, TaskLengths, Watcher


def alarms(prompts, outputs, known, every=1):
    """Of a watch over all but the first requests, which its plan was counted over."""
    planned = TaskLengths.from_samples(prompts[:known], outputs[:known])
    watcher = Watcher(planned, known, Monitor(every=every))
    pairs = zip(prompts[known:].tolist(), outputs[known:].tolist(), strict=True)
    return sum(watcher.observe(*pair, float(at)) is not None for at, pair in enumerate(pairs))


def lengths(path, most):
    trace = read_trace(path, sort=True)
    return trace.prompt_tokens[:most], trace.output_tokens[:most]


def test_requests_of_their_own_raise_no_alarm(shared):
    prompts, outputs = lengths(shared("data/traces/lengths_arxiv_summarization_llama2tok.csv.gz"), 6000)
    assert alarms(prompts, outputs, 1500) == 0


def test_turns_of_conversations_raise_alarms_that_few_tested_or_shuffled_ones_do_not(shared):
    prompts, outputs = lengths(shared("data/traces/lengths_sharegpt_8k_llama2tok.csv.gz"), 6000)
    order = np.random.default_rng(0).permutation(len(prompts))
    assert alarms(prompts, outputs, 1500) > 1
    assert alarms(prompts, outputs, 1500, every=10) == 0
    assert alarms(prompts[order], outputs[order], 1500) == 0
