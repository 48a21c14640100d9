"""What is said beneath the tables of gains and choices: where they are the paper's and where not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _exegpt_gains import waa_rps
from _exegpt_words import MODELS, TASKS, Rows, between, details, holds, number, percent, under


def gains(rows: Rows) -> Iterator[str]:
    """Why the gains are what they are."""
    told, large = (details(rows, f"exegpt.gain_{name}") for name in ("all", "large"))
    if not told or not large:
        return
    yield (
        "\nFasterTransformer is as strong here as its rules allow. Its prompts are not padded: were they padded to the "
        f"longest of their micro-batch, the mean over all would be {number(told['if_prompts_were_padded'])}. A batch is over "
        "with its own longest output: did it run to the task's longest, "
        f"{number(told['if_batches_ran_to_the_longest_output'])}. It has all memory that weights leave, so that its batches "
        "reach into the hundreds. And RRA and WAA hold the bound in their worst case, it in its mean.\n"
    )
    yield (
        f"With RRA alone, which is all that the paper shows of large models, their gain is {number(large['rra_alone'])}: "
        "WAA fits 175B and 341B by the estimate of memory, where the paper's failed.\n"
    )
    yield from _tight(rows)
    yield (
        "The paper's 2.0 and 3.2 make 2.9 only if three in four scenarios are of large models; which twenty they are its "
        "text does not list. Ours are the 23 models and tasks that its sections 7.3 and 7.4 name."
    )


def _tight(rows: Rows) -> Iterator[str]:
    found = {int(name): told for name, told in under(rows, "exegpt.tight.batch_").items()}
    if not found:
        return
    shown = ", ".join(f"{number(told['value'])} ({batch})" for batch, told in sorted(found.items()))
    most = max(told["most"] for told in found.values())
    yield (
        "Gains grow as bounds get tight, and how tight the tightest bound is depends on FasterTransformer's smallest "
        "batches. Under the latency of one of its batches of so many requests, the large models' mean gain is "
        f"{shown}; at most {number(most)}. The paper's 3.2, and its 15.2 at the tightest bound of 175B and task G (ours at "
        f"batches of 4 and 8 there: {_at(found, 4)} and {_at(found, 8)}), are of that kind.\n"
    )


def _at(found: dict, batch: int) -> str:
    return number(found[batch]["gains"].get("gpt-3-175b-a40, g")) if batch in found else "-"


def winners(rows: Rows) -> Iterator[str]:
    """Where the shape is the paper's and where it is not."""
    told = details(rows, "exegpt.lockstep.waa_ahead")
    if not told:
        return
    here = {task: _ahead(rows, task) for task in told["by_task"]}
    shares = [
        f"{TASKS[task]} {here[task]} ({one['waa_ahead']}) of {one['cells']}" for task, one in told["by_task"].items()
    ]
    short, long = (_met_by_both(rows, tasks) for tasks in (("s", "c1"), ("t", "g", "c2")))
    holds(2 * sum(waa > rra for _, rra, waa in short) > len(short), "WAA leads on short outputs")
    holds(all(bound != "10 %" for bound, *_ in long), "WAA cannot meet tight bounds on long outputs")
    loose = [(rra, waa) for bound, rra, waa in _met_by_both(rows, ("t",)) if bound in ("70 %", "none")]
    ahead, large = sum(waa > rra for rra, waa in loose), _large_of_waa(rows)
    holds(3 * ahead > len(loose), "WAA often leads on T where bounds are loose")
    holds({"175B", "341B"} <= {name.split()[1].rstrip(",") for name in large}, "WAA runs on 175B and 341B")
    yield (
        "\nAs in the paper, WAA leads on short outputs (S, C1) and cannot meet the tightest bound on long ones (T, G, C2). Two things differ. "
        f"WAA often leads on T, too, where bounds are loose (in {ahead} of {len(loose)} cells at 70 % and without one): decoding does not "
        "wait for encoding here, and its pipeline has few bubbles. Of the paper's cells WAA wins, and in brackets would win if it were "
        f"read literally (a decode iteration for each encoding): {', '.join(shares)}. And WAA runs on {'; '.join(large)}: two copies of "
        "350 GB are less than half of what 32 A40 hold."
    )


def _met_by_both(rows: Rows, tasks: Sequence[str]) -> list[tuple[str, float, float]]:
    """(bound, RRA's requests a second, WAA's) of the cells of tasks in which both meet the bound."""
    cells = [
        cell
        for name, told in under(rows, "exegpt.figure.").items()
        if name.rpartition(".")[2] in tasks
        for cell in told.get("cells") or []
    ]
    pairs = [(cell["bound"], cell["strategies"]["rra"], waa_rps(cell)) for cell in cells]
    return [(bound, rra["rps"], waa) for bound, rra, waa in pairs if rra and waa]


def _large_of_waa(rows: Rows) -> list[str]:
    """Titles of the models of 175B and more on which WAA meets some bound."""
    told = under(rows, "exegpt.figure.")
    return [
        title
        for model, title in MODELS
        if model.startswith(("gpt-3-175b", "gpt-3-341b"))
        and any(waa_rps(cell) for task in TASKS for cell in (told.get(f"{model}.{task}") or {}).get("cells") or [])
    ]


def _ahead(rows: Rows, task: str) -> int:
    """In how many of the paper's cells of a task WAA won."""
    small = ("t5-11b-a40", "opt-13b-a40", "gpt-3-39b-a40", "gpt-3-101b-a100")
    large = ("gpt-3-101b-a100", "gpt-3-175b-a40", "gpt-3-175b-a100", "gpt-3-341b-a40")
    models = {"s": small, "t": small, "c1": dict.fromkeys((*small, *large))}.get(task, large)
    cells = [cell for model in models for cell in details(rows, f"exegpt.figure.{model}.{task}").get("cells") or []]
    return sum((cell["won"] or "").startswith("waa") for cell in cells)


def systems(rows: Rows) -> Iterator[str]:
    """What was played out and what was not, and what it comes to against today's engines."""
    yield from _left_out(rows)
    yield from _over_today(rows)


def _left_out(rows: Rows) -> Iterator[str]:
    """Which models and tasks are not in the table, and why."""
    played = set(under(rows, "exegpt.systems."))
    every = [f"{model}.{task}" for model, _ in MODELS for task in TASKS if (model, task) != ("t5-11b-a40", "c2")]
    if not played:
        return
    holds(played <= set(every), "T5 takes no prompts of task C2")
    without = [name for name in every if name not in played]
    if not without:
        yield f"\nAll {len(every)} scenarios, a model and a task each, were played out (T5 takes no prompts of task C2)."
        return
    tasks = {title: [t for t in TASKS if f"{model}.{t}" in without] for model, title in MODELS}
    named = "; ".join(f"{title}: {', '.join(TASKS[task] for task in some)}" for title, some in tasks.items() if some)
    several = [details(rows, f"exegpt.systems.{name}").get("configurations") or {} for name in sorted(played)]
    counts = [sum(one.values()) for one in several if one]
    cost = f" ({between(counts, number)} configurations of the systems each)" if counts else ""
    text = (
        f"\n**{len(without)} of the {len(every)} scenarios, a model and a task each, are not played out**: {named}. The reason is time: "
        f"a scenario has every system in every cut and size{cost}, and more GPUs have more cuts. What the others would show is not "
        "known."
    )
    if {"gpt-3-175b-a40", "gpt-3-341b-a40"}.isdisjoint(name.partition(".")[0] for name in played):
        text += (
            " The longest pipelines (32 and 48 GPUs) are not in these means, so that they do not compare with the "
            "[gains over all](#gains-over-fastertransformer)."
        )
    yield text


def _over_today(rows: Rows) -> Iterator[str]:
    """The gain over vLLM v1, and who is ahead of whom otherwise than in the paper."""
    told = details(rows, "exegpt.gain_over_vllm_v1")
    row = rows.get("exegpt.gain_over_vllm_v1")
    if not told or row is None:
        return
    yield (
        f"\n**Against vLLM v1 the gain is {number(row['value'])}**, {number(told['by_bound']['10 %'])} under the tightest "
        f"bound and {number(told['by_bound']['none'])} without one; schedules are ahead in {told['ahead']} of "
        f"{told['both_meet']} cells, and meet a bound that it does not in {told['only_exegpt']}. Chunked prefill joins prompts to "
        "decode steps, which leaves little of the bubbles that RRA and WAA were made against, and every replica keeps its own "
        f"GPUs busy without pipelines. On one replica as wide as a node, as the paper ran its baselines, the gain is "
        f"{number(told['as_cut_for_ft'])}; with schedules in replicas, too, {number(told['in_replicas'])}. Intervals are Student's over "
        f"the means of {told['scenarios']} scenarios, a model and a task each, of {told['models']} models alone.\n"
    )
    joining = [rows[name]["value"] for name in ("exegpt.gain_over_orca", "exegpt.gain_over_vllm") if name in rows]
    static = (rows.get("exegpt.gain_over_fastertransformer") or {"value": math.inf})["value"]
    holds(
        all(gain < static for gain in joining), "systems that let requests come and go are ahead of FasterTransformer"
    )
    yield (
        "In the paper's Figure 7 FasterTransformer is ahead of DeepSpeed-Inference, Orca and vLLM on OPT-13B; here those that "
        "let requests come and go are ahead of it. The paper names vLLM's Python as a reason for its order; here the host takes "
        "the same seconds for all. DeepSpeed's micro-batches matter only where there are stages."
    )


def table6(rows: Rows) -> Iterator[str]:
    """How near the paper's schedules are, and where the choices part."""
    found = under(rows, "exegpt.table6.")
    if "none" not in found or "kept_at_tightest" not in found:
        return
    rra = [found[bound] for bound in ("11.5s", "none")]
    off = [abs(one["their_schedule"][ours] / one["paper"][ours] - 1) for one in rra for ours in ("rps", "latency_s")]
    kept = found["3.1s"]["paper"]["rps"] / found["none"]["paper"]["rps"]
    yield (
        f"\nWhat the paper measured of its RRA schedules is estimated within {percent(max(off))}. {_of_waa([found['3.1s'], found['5.9s']])} "
        f"{_parted(found['none'])} The tightest bound keeps {percent(found['kept_at_tightest']['value'])} of the highest throughput (the "
        f"paper's text says 80 %, its Table 6 has {percent(kept)})."
    )


def _of_waa(some: Sequence[Mapping[str, Any]]) -> str:
    """How the paper's WAA schedules are estimated."""
    off = {
        name: [one["their_schedule"][name] / one["paper"][name] - 1 for one in some] for name in ("rps", "latency_s")
    }
    low = [-error for error in off["latency_s"]]
    holds(min(low) > 0, "latencies of the paper's WAA schedules are lower here")
    return (
        f"Of WAA the throughput is within {percent(max(map(abs, off['rps'])))}, the latency {between(low, percent)} lower "
        "([0016](decisions/0016-estimates-of-schedules.md))."
    )


def _parted(report: Mapping[str, Any]) -> str:
    """Whether without a bound the choice is the paper's strategy."""
    best = report["strategies"]
    rps = {name: one["rps"] for name, one in best.items() if one}
    won = max(rps, key=lambda name: rps[name])
    if won == "rra":
        return "Without a bound RRA is chosen, as in the paper."
    return (
        f"Choices part where bounds are loose: {best[won]['words']} has {number(rps[won])} requests a second, RRA at best "
        f"{number(rps['rra'])}."
    )


def real(rows: Rows) -> Iterator[str]:
    """How often bounds were broken."""
    told = details(rows, "exegpt.gain_real")
    if "with_margin" not in told:
        return
    met = told["cells"] - told["nothing_met"]
    tenths = [round(one["lengths"]["requests"], -2) / 10 for one in under(rows, "exegpt.real.").values()]
    yield (
        f"\nThe first split is shown; the mean is over {told['splits']} splits, its interval their range. On lengths that it had "
        f"not seen a schedule broke its bound in {told['broke_its_bound']} of {met} cells and FasterTransformer in "
        f"{told['ft_broke_its_bound']} of {told['cells']}: a tenth of these lists is {between(tenths, number)} requests, whose 99th percentile "
        f"is a guess. Planned under bounds {percent(told['margin'])} tighter, the gain is {number(told['with_margin'])} and "
        f"{told['with_margin_broke']} are broken. Long tails are what the paper gives as the "
        f"reason for its 4.4: the gain rises here, too, with the outputs' deviation over their mean{_with_tails(rows)}."
    )


def _with_tails(rows: Rows) -> str:
    """How surely gains rise with tails, over models and lists."""
    some = list(under(rows, "exegpt.real.").values())
    tails = [one["lengths"]["output_sd"] / one["lengths"]["output_mean"] for one in some]
    means = [statistics.fmean(cell["gain"] for cell in one["cells"]) for one in some]
    same = statistics.correlation(_ranks(tails), _ranks(means))
    holds(same > 0.5, "gains rise with the outputs' deviation over their mean")
    return f" (rank correlation {number(same)} over {len(some)} models and lists)"


def _ranks(some: Sequence[float]) -> list[float]:
    """[n] places in order; those that are equal share theirs."""
    return [sum(other < one for other in some) + some.count(one) / 2 for one in some]


def figure11(rows: Rows) -> Iterator[str]:
    """The paper's numbers and why ours are other ones."""
    told = details(rows, "exegpt.drift.waa")
    if "moves" not in told:
        return
    paper = told["paper"]
    margins = {(one["changed"], one["change"]): one["margin"] for one in told["moves"]}
    more = (margins["mean", 0.15], paper["margin_mean_15_a"]), (margins["sd", 0.3], paper["margin_sd_30_a"])
    holds(all(ours is None or ours > theirs for ours, theirs in more), "WAA's latencies move more than the paper's")
    bound = told["bound"]
    other = "" if bound == "30 %" else f"WAA meets no bound as tight as its 30 % here, hence that of {bound}. "
    yield (
        f"The paper (WAA, 30 % bound) asks for {percent(paper['margin_mean_15_a'])} for a mean that is 15 % longer under (a), "
        f"{percent(paper['margin_mean_15_b'])} under (b), and {percent(paper['margin_sd_30_a'])} for a deviation 30 % larger under "
        f"(a). {other}Its latencies move more than the paper's: where "
        "decoding keeps up with encoding only just, longer outputs mean a larger decode batch and slower iterations at a time "
        "(Little's law). RRA's go by steps: an output that needs one more phase waits for one more encoding."
    )


__all__ = ["figure11", "gains", "real", "systems", "table6", "winners"]
