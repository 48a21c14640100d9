"""What stands between the tables of the page on schedules."""

from __future__ import annotations

from _exegpt_words import number, percent


def times(of: float) -> str:
    return f"{number(of)} times"


def seconds(of: float) -> str:
    return f"{number(of)} s"


AIMS = (  # name, what it is, how it is shown, why it is missed
    (
        "exegpt.gain_small_mid",
        "throughput over FasterTransformer, small and mid-sized models",
        times,
        "a stronger FasterTransformer, see [gains](#gains-over-fastertransformer)",
    ),
    (
        "exegpt.gain_large",
        "the same, large models",
        times,
        "a stronger FasterTransformer whose batches make looser bounds, see [gains](#gains-over-fastertransformer)",
    ),
    ("exegpt.gain_all", "the same, all of these", times, "as for the large models"),
    (
        "exegpt.gain_real",
        "the same, recorded lengths",
        times,
        "other lists than the paper's, see [recorded lengths](#recorded-lengths)",
    ),
    (
        "exegpt.gain_over_vllm_v1",
        "throughput over vLLM v1 with chunked prefill, as it is best cut",
        times,
        "the paper has no such comparison; see [other systems](#other-systems)",
    ),
    (
        "exegpt.search_s_max",
        "slowest choice (all strategies, all degrees), CPU of one core",
        seconds,
        "see [what a choice takes](#what-a-choice-takes)",
    ),
    (
        "exegpt.points_share_max",
        "share of all schedules estimated, at most",
        percent,
        "see [what a choice takes](#what-a-choice-takes)",
    ),
    (
        "exegpt.regret_max",
        "throughput missed against looking at all, at most",
        percent,
        "see [what a choice misses](#what-a-choice-misses)",
    ),
    (
        "exegpt.nonmonotone_share",
        "points that break monotony by more than 5 %, Table 5's variables",
        percent,
        "WAA's micro-batches and changing splits, of which the search assumes nothing: [how](#how-monotone-it-is)",
    ),
    (
        "exegpt.estimator_error_p95",
        "estimates against the event engine, P95 over random schedules of RRA and WAA",
        percent,
        "one or two new requests a micro-batch, or fewer, see [estimates](#estimates-against-the-engine)",
    ),
    (
        "exegpt.live.throughput_error",
        "throughput expected of RRA schedules against a real engine held to them, the worst of them",
        percent,
        "tables of decode iterations, see [on a real engine](#on-a-real-engine)",
    ),
    ("exegpt.live.latency_error", "the same, latency of the longest outputs", percent, "the same"),
    ("exegpt.live.decode_batch_error", "the same, decode batch", percent, "the same"),
    (
        "exegpt.live.exact_phases",
        "phases of that engine that are exactly B_E and N_D, the worst repeat",
        percent,
        "see [on a real engine](#on-a-real-engine)",
    ),
    (
        "exegpt.live.over_stock",
        "throughput of that engine over its own scheduler with as many requests under way, the best of them",
        times,
        "the paper has no such comparison; see [on a real engine](#on-a-real-engine)",
    ),
)

TEXTS = {
    "head": """\
# The best schedule under a latency bound: ExeGPT's evaluation made again

How to ask for a schedule is in the [reference](reference.md); how one is estimated and chosen in decisions
[0016](decisions/0016-estimates-of-schedules.md) and [0017](decisions/0017-choice-of-schedule.md). Here the evaluation of
ExeGPT (Oh et al., ASPLOS 2024, arXiv:2404.07947) is made again with them, on the paper's models, clusters and tasks:

```sh no-run
python benchmarks/exegpt.py --save       # --only figures,search,systems.opt-13b-a40: a section at a time
python docs/generate_exegpt.py           # this page, from benchmarks/results/exegpt.json
```

**Nothing here ran on a GPU.** RRA, WAA and every other system are estimated or played out with the same roofline tables,
nothing fitted; the paper measured. RRA was also kept before, and inside, a real vLLM on a CPU
([below](#on-a-real-engine)); WAA only [to see that it runs](decisions/0023-split-before-engines.md). The paper's figures are
pictures, so that only what its text and tables state stands beside ours. A bound is held for the 99th-percentile output. Square brackets hold intervals: 95 %, or the range over repeats where
so said.
""",
    "aims": "## Figures and aims\n",
    "gains": """\
## Gains over FasterTransformer

The better of RRA and WAA over static batches, under the 10, 30 and 70 % quantiles of the latencies of FasterTransformer's
batches, and without a bound (Figures 6 and 8). Means over models, tasks and bounds, as the paper has them.
""",
    "overview": """\
## Every model and task

The gain under each bound, and which strategy had it. Requests a second and the schedules are [below](#every-cell).
""",
    "winners": """\
## Who is ahead

Over all models and bounds of a task, where both strategies meet the bound.
""",
    "systems": """\
## Other systems

Every other system is played out by the engine on the same tables, in every way to cut the GPUs into equal replicas, with
all batch sizes that fit and several budgets of a step; its best under each bound counts. RRA and WAA spread over all GPUs, as
in the paper; *in replicas* they may be deployed several times over, too, which the paper does not consider.
""",
    "table6": """\
## One model closely: Table 6

OPT-13B on four A40, task S. Latencies in s, then requests a second; in brackets the latency in the worst case, which is
what a bound is held against.
""",
    "real": """\
## Recorded lengths

Lists of lengths instead of normal distributions (Figure 10): schedules and FasterTransformer's batches are planned from a
tenth of a list, and yield what they yield on the other nine tenths. The paper's three data sets are not at hand; these
are Alpaca's instructions (tokens estimated from the text), arXiv summaries, ShareGPT and Azure's conversations of 2023, of
each the requests whose prompt and output the models take in any pairing. Where memory would not hold the nine tenths, the
batch of encoding is lowered until it does.
""",
    "figure11": """\
## When outputs drift

Task T on OPT-13B (Figure 11): the outputs' mean, deviation or skewness moves, the schedule stays. All relative to what it
was. (a): the latency of the moved distribution's 99th percentile; (b): of an output of the length that was the
percentile. *Margin*: by how much the bound had to be tighter for the schedule chosen under it to hold.
""",
    "table5": """\
## How monotone it is

Percent of points that break monotony by latency, by throughput; in brackets the paper's Table 5. GPT-3 39B on 16 A40,
all degrees; of a variable with many values 40 are taken. A point breaks it if *any* point before it on its line is higher
by more than the tolerance, of the 70 % bound and of the throughput under it. *One split*: WAA's batches as the search has
them, those that are split alike between encoding and decoding GPUs.
""",
    "table7": """\
## How even the work is

OPT-13B, task S, played out: RRA on one stage of four GPUs (Table 7: encoding 1.68 s +-7.1 %, decode iteration 0.038 s
+-2.4 %), WAA on two GPUs that encode and two that decode (0.85 s +-11.8 %, 0.041 s +-5.5 %). Half of the width that holds 99 %, as a share of the mean; *threshold*: the dynamic adjustment of section 5.2.
""",
    "search": "## What a choice takes\n",
    "regret": """\
## What a choice misses

Looking at all is at every B_E that memory holds, every N_D up to the longest output, every number of groups, and of WAA's
micro-batches those of a list, as the search: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, fewer than GPUs. Numbers between
them are not looked at ([0017](decisions/0017-choice-of-schedule.md): where they were, none was better).
""",
    "engine": """\
## Estimates against the engine

Schedules at random (batch and phase on a logarithmic scale, any degree and groups that memory holds), played out by
the event engine with drawn lengths and a queue that never runs dry. Relative errors of throughput and of the latency of
the 99th-percentile output.
""",
    "live": """\
## On a real engine

RRA on a real vLLM: one thread of a CPU, a model of 27 million random weights, prompts of 8 to 400 tokens, outputs of 8 to 96.
The machine is profiled, the engine calibrated by a static and a half load, and from these tables schedules are chosen whose
longest outputs take at most 1.4 (*fast*) and 2.2 times (*middle*) the least that any schedule takes, and for the most
throughput (*most*), where 64 seats hold 1.3 times the decode batch. Then, with the same requests, some of which always wait:
an engine held to the schedule by our scheduler class; the gateway keeping it before an engine with its own scheduler; and that
engine by itself, as many requests under way as the decode batch has. Means, in brackets the range over repeats, which go in
turns. Latencies are from the beginning of the encoding; of the gateway from its sending, of the stock scheduler from the client's.
""",
    "cells": """\
## Every cell

Requests a second. FT: FasterTransformer, its batch in brackets. *Held*: latency in the worst case.
""",
}
