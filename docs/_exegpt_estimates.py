"""What is said beneath the tables of the search and of estimates: what they assume, and how far they are off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from _exegpt_words import WINNERS, Rows, details, number, percent, table


def table5(rows: Rows) -> Iterator[str]:
    """What the search takes for monotone."""
    told = details(rows, "exegpt.nonmonotone_share")
    if "assumed_by_the_search" not in told:
        return
    assumed = told["assumed_by_the_search"]
    yield (
        "\nOf what the search takes for monotone (B_E, N_D, WAA's B_E of one split) "
        f"{percent(assumed['latency'])} of the points break it by latency and {percent(assumed['throughput'])} by throughput. More "
        "micro-batches lower the latency only while there are fewer of them than decoding stages, and with a larger batch a GPU may "
        "change sides: both are searched side by side. Groups of RRA (TP), which Table 5 leaves out, raise throughput as often as "
        "they lower it."
    )


def table7(rows: Rows) -> Iterator[str]:
    """What of the spread is prompts, what the shape of a phase."""
    if not details(rows, "exegpt.variance.paper_11.5s.as_it_comes"):
        return
    yield (
        "\nMean stage times of its schedule at 11.5 s are the paper's. Prompts of Table 3 vary more than its +-7.1 %; with the adjustment, encodings stay "
        "within the threshold that is asked for. Decode iterations spread because a batch shrinks from the first iteration of a phase to "
        "the last; at one place in the phase they spread less, and the adjustment of prompts hardly changes them."
    )
    free, held = (details(rows, f"exegpt.variance.paper_5.9s.{name}") for name in ("as_it_comes", "within_5_percent"))
    if free and held:
        yield (
            f"\nWAA's encodings vary more, few prompts at a time: its B_E = 10 by +-{percent(free['encode']['range'])} as they come, "
            f"+-{percent(held['encode']['range'])} adjusted to 5 % (paper: 0.85 s +-11.8 %, of which schedule it does not say); its decode "
            f"iterations by +-{percent(free['decode']['range'])} and +-{percent(held['decode']['range'])} (paper: 0.041 s +-5.5 %). "
            "An encoding is one stage's, the slowest one's; a threshold below one prompt's share cannot be kept with few."
        )


def search(rows: Rows) -> Iterator[str]:
    """What the largest share is of."""
    told = details(rows, "exegpt.points_share_max")
    seconds = details(rows, "exegpt.search_s_max")
    if not told or not seconds:
        return
    yield (
        f"\nThe slowest is {seconds['of']}; the largest share {told['of']}. Each choice is asked of a new planner: tables of costs "
        "are there, ranges of the variables are found anew, all strategies and degrees are searched. The paper takes 3 s to 2 "
        "minutes for RRA, 1 to 5 minutes for WAA, and 5 hours to a day for looking at all."
    )
    shares = told.get("by_strategy") or {}
    if shares:
        yield _shares(shares)


def _shares(shares: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest share of each strategy's own schedules, and why WAA's is large."""
    each = "; ".join(
        f"{WINNERS[name]} {percent(one['value'])} ({one['evaluated']:,} of {one['points']:,}; {one['of']}), in the middle "
        f"{percent(one['median'])}"
        for name, one in shares.items()
    )
    more = max(one["value"] for one in shares.values()) > 1
    beyond = (
        " More than all: these counts have places beyond the end of a stretch in them, which are no schedules."
        if more
        else ""
    )
    return (
        f"\nThe aim is of all schedules together. Of a strategy's own at most: {each}. WAA has few, hundreds to thousands "
        "beside RRA's hundred thousands to millions, as there is no N_D. They go by stretches of batches that are split alike "
        "between encoding and decoding GPUs, of each of which both ends are looked at, as nothing is assumed from one to the "
        f"next; where stretches are short, that is nearly every schedule.{beyond}"
    )


def regret(rows: Rows) -> Iterator[str]:
    """Bayesian search and random instances."""
    told = details(rows, "exegpt.regret_max")
    if told:
        missed = rows["exegpt.regret_max"]["value"]
        of = f"; the largest is of {told['of']}" if missed > 0 else ""
        yield (
            f"\n{told['equal']} of {told['bounds']} choices are as good as the best of all; the mean loss is "
            f"{percent(told['mean'])}{of}.\n"
        )
    bayes = details(rows, "exegpt.bayesian_regret")
    if bayes:
        row = rows["exegpt.bayesian_regret"]
        yield (
            f"Bayesian search (a tree-structured Parzen estimator, {bayes['seeds']} seeds; {bayes['of']}) misses "
            f"{percent(row['value'])} [{percent(row['ci'][0])}, {percent(row['ci'][1])}] with as many points as branch and bound took "
            f"({bayes['evaluated']} of {bayes['points']:,}), and {percent(bayes['twice_as_many'])} with twice as many; branch and "
            f"bound {percent(bayes['branch_and_bound'])}. Its interval is the range over seeds.\n"
        )
    random = details(rows, "exegpt.random_regret_over_gap")
    if random:
        row = rows["exegpt.random_regret_over_gap"]
        yield (
            f"On {random['instances']:,} random instances of 1 to 5 variables, half of them monotone, half shaken by up to 10 %, the "
            f"search never missed more than the gap that it promises (at most {number(row['value'])} of it), and found the best itself in "
            f"{random['exactly_the_best']:,}."
        )


def engine(rows: Rows) -> Iterator[str]:
    """Errors by what kind of schedule it is."""
    lines = []
    for name, title in (
        ("exegpt.estimator_error_p95", "at random"),
        (
            "exegpt.estimator_error_p95_of_choices",
            "chosen under the tightest bound and none (RRA), under all four (WAA), every model and task",
        ),
    ):
        told = details(rows, name)
        if not told:
            continue
        row = rows[name]
        ends = f" [{percent(row['ci'][0])}, {percent(row['ci'][1])}]"
        lines.append(
            [
                title,
                str(told["schedules"]),
                percent(row["value"]) + ends,
                percent(told["median"]),
                percent(told["throughput_p95"]),
                percent(told["latency_p95"]),
            ]
        )
        lines.extend(
            [f"- {_strategy(kind)}", str(one["schedules"]), percent(one["p95"]), *_disaggregated(one)]
            for kind, one in [*told.get("by_strategy", {}).items(), *told.get("by_kind", {}).items()]
        )
    yield from table(["schedules", "how many", "P95", "median", "throughput's P95", "latency's P95"], lines)
    if lines:
        yield from _why_off(rows)
    yield from _retained(rows)


def _retained(rows: Rows) -> Iterator[str]:
    """Whether what is chosen under a bound keeps it."""
    row, told = rows.get("exegpt.bound_broken_share"), details(rows, "exegpt.bound_broken_share")
    if row is None or not told:
        return
    odd = len(told["broke_more_than_chance_explains"])
    yield (
        f"\n**Kept bounds.** Every model's and task's choices under its finite bounds, of RRA and of WAA, as they come and resized within 5 %, "
        f"were played out: {told['choices']} schedules. Of their {told['outputs']:,} outputs of the bound's quantile "
        f"{percent(row['value'])} [{percent(row['ci'][0])}, {percent(row['ci'][1])}] took longer than the bound (at most 1 % may); "
        f"{odd or 'none'} of the schedules broke it more often than chance explains."
    )


def _strategy(name: str) -> str:
    return WINNERS.get(name, name)


def _disaggregated(one: Mapping[str, Any]) -> list[str]:
    if "median" not in one:
        return ["", "", ""]
    return [percent(one["median"]), percent(one["throughput_p95"]), percent(one["latency_p95"])]


def _why_off(rows: Rows) -> Iterator[str]:
    told = details(rows, "exegpt.estimator_error_p95")
    if "by_strategy" in told:
        yield (
            f"\n{told['beyond_5_percent']} of the {told['schedules']} random schedules are off by more than 5 %. With fewer new requests "
            "than micro-batches the engine encodes for some of them only, the estimate for each a fraction of a request. With one or two for "
            "each, some have twice as many as others, and the estimate, at the pace of the largest, is too slow. WAA is off most "
            "where both sides are busy nearly all the time, and wait for each other now and then, which is in no estimate; and where one "
            "prompt is encoded at a time, for which two batches a stage are not quite enough. WAA of an encoder-decoder (T5) is not played. "
            "Of no task here: where N_D is 1 and a fifth of the outputs or fewer are longer than one token, the latency of these few is told too "
            "long, by 7 to 32 % in five schedules that were played out (OPT 13B, 4 x A40; throughput within 5 %; from three tenths on "
            "both within 1 %). The cause has not been found."
        )


__all__ = ["engine", "regret", "search", "table5", "table7"]
