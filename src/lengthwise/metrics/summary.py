"""What a run means: counts, rates, latencies, goodput, hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.metrics.estimate import Distribution
from lengthwise.metrics.hardware import Hardware
from lengthwise.metrics.slo import Slo
from lengthwise.schema.estimate import Estimate


@dataclass(frozen=True)
class Counts:
    """Requests by bucket, adding up to ``arrived``; summed over seeds where there are several.

    Requests that had not arrived when the run ended are not counted at all. The last three say
    why requests were rejected: the prompt alone reaches ``max_model_len``, or is above the tokens
    of a step that may not cut it, or above what the KV memory admits.
    """

    arrived: int
    finished: int
    rejected: int
    timed_out: int
    unfinished: int
    preemptions: int
    rejected_too_long: int = 0
    rejected_over_token_budget: int = 0
    rejected_over_kv_memory: int = 0


@dataclass(frozen=True)
class Rates:
    """What was delivered a second: requests that finished, their prompts, their outputs."""

    requests_per_s: Estimate
    prompt_tokens_per_s: Estimate
    output_tokens_per_s: Estimate


@dataclass(frozen=True)
class Goodput:
    """Requests that kept every limit of ``slo``: share of those that arrived, and a second.

    ``met`` tells the share for each limit alone. Requests that did not finish are not good.
    """

    slo: Slo
    share: Estimate
    requests_per_s: Estimate
    met: dict[str, Estimate]


@dataclass(frozen=True)
class Summary:
    """The numbers of one run, or of several seeds of it.

    Latencies are over requests that have them (JCT, TPOT and normalized latency: those that
    finished; TTFT: those with a first token; queueing delay: those that were scheduled).
    Requests that gave up or were rejected show in ``counts`` and ``goodput``.

    Attributes:
        name: The records' name.
        seeds: Seeds of the runs behind it.
        intervals: "batch means" within one run, "seeds" over several, "difference" of two.
        level: Confidence level of every interval.
        window_s: Seconds from the end of the warm-up to the last event.
        counts: Requests by bucket, warm-up left out.
        rates: Throughput in the window.
        ttft_s: Arrival until first token.
        tpot_s: Mean time between the tokens of one request.
        tbt_s: Time between tokens, all tokens pooled (ITL); of the whole run, warm-up included.
        jct_s: Arrival until last token.
        queueing_delay_s: Arrival until first scheduled.
        normalized_latency_s: JCT a token of output.
        goodput: None where no SLO was given.
        hardware: None where no deployment was given; of the whole run, warm-up included.
        model_level: Level of the model intervals (``model_low``, ``model_high``); NaN where there are none.
    """

    name: str
    seeds: tuple[int, ...]
    intervals: str
    level: float
    window_s: Estimate
    counts: Counts
    rates: Rates
    ttft_s: Distribution
    tpot_s: Distribution
    tbt_s: Distribution
    jct_s: Distribution
    queueing_delay_s: Distribution
    normalized_latency_s: Distribution
    goodput: Goodput | None
    hardware: Hardware | None
    model_level: float = math.nan
