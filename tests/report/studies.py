"""A study made by hand: queues with closed forms, so that every number can be derived again."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.plan import (
    Bottleneck,
    Bounds,
    Choice,
    ExcludedGroup,
    Exclusion,
    Limit,
    Objective,
    Plan,
    Point,
    SearchEffort,
    Shift,
    Status,
    Study,
    Swap,
    Trade,
)

GPUS = {"a100-80gb": (1.0, 2.0), "h100-sxm <b>&</b>": (2.2, 4.0)}
"""Speed and price in USD an hour of one."""
TPS = (1, 2, 4, 8)
RANKS = ("fcfs", "srtf")
LOADS = (0.3, 0.5, 0.6, 0.7, 0.77, 0.83, 0.88, 0.93)
OBJECTIVE = Objective("requests_per_dollar", "Requests per dollar", "req/$", higher_is_better=True)


def study(*, plans: int = 2, **options) -> Study:
    """Chat and, where two are asked for, summaries, whose limits are other ones."""
    made = (plan("chat", (2.0, 0.08), **options), plan("summaries", (6.0, 0.2), **options))[:plans]
    swaps = () if plans == 1 else tuple(swap(a, b) for a in made for b in made)
    return Study("Which deployment?", made, swaps)


def cached(made: Study, **found: float) -> Study:
    """The study where the prefix cache has shares of the prompt tokens, less at each further place."""

    def at(c: Choice, place: int) -> Choice:
        shares = {name: Estimate(share / (1 + place)) for name, share in found.items()}
        points = tuple(replace(p, values=p.values | shares) for p in c.points)
        return replace(c, points=points, at=points[c.points.index(c.at)] if c.at and c.points else c.at)

    plans = (replace(p, choices=tuple(at(c, i) for i, c in enumerate(p.choices))) for p in made.plans)
    return replace(made, plans=tuple(plans))


def swap(of: Plan, used: Plan) -> Swap:
    ratio = 1.0 if of is used else 1.31 if of.name == "chat" else math.nan
    return Swap(of.name, used.name, of.choices[0].objective, ratio)


def plan(name: str, bounds: tuple[float, float], *, tied: int = 2, sizes=TPS, ranks=RANKS) -> Plan:
    limits = (Limit("ttft.p90", bounds[0]), Limit("tbt.p99", bounds[1]))
    tried = [choice(*kind, limits) for kind in itertools.product(GPUS, sizes, ranks)]
    choices = sorted(tried, key=place)
    ran = [c for c in choices if c.points]
    return Plan(
        name=name,
        metadata={"model": "toy-7b", "workload": f"{name} <i>&</i>"},
        objective=OBJECTIVE,
        limits=limits,
        axes={"deployment.gpu": tuple(GPUS), "deployment.tp": tuple(sizes), "scheduler.rank": tuple(ranks)},
        choices=tuple(choices),
        tied=tied if choices[0].status is Status.RANKED else 0,
        reasons=("It needs the fewest GPUs for a rate.", "srtf holds TTFT p90 <at> a higher load."),
        frontiers={m: frontier(ran, m) for m in ("ttft.p90", "tbt.p99", "jct.mean")},
        shifts=tuple(s for limit in limits for s in shifts(ran, limits, limit)),
        excluded_groups=groups(choices),
        effort=spent(choices),
    )


def spent(choices: list[Choice]) -> SearchEffort:
    ran, pruned = len([c for c in choices if c.points]), count(choices, Status.PRUNED)
    return SearchEffort(len(choices), ran, pruned, count(choices, Status.REJECTED), 3, 214, 1_200_000, 34.2)


def count(choices: list[Choice], status: Status) -> int:
    return len([c for c in choices if c.status is status])


def place(c: Choice) -> tuple[int, float]:
    return list(Status).index(c.status), -c.objective.value if c.points else 0.0


def choice(gpu: str, tp: int, rank: str, limits: tuple[Limit, ...]) -> Choice:
    settings = {"deployment.gpu": gpu, "deployment.tp": tp, "scheduler.rank": rank}
    name, (speed, price) = f"{tp} {gpu} {rank}", GPUS[gpu]
    common = {"key": name, "name": name, "settings": settings, "gpus": tp, "price_per_hour_usd": tp * price}
    if tp == 1:
        reason = f"the weights need 61.2 GB, {gpu} has 48.0 GB"
        return Choice(**common, status=Status.REJECTED, exclusion=Exclusion(reason, "weights do not fit"))
    if tp == 8 and rank == "fcfs":
        reason = "at most 900 req/$ by closed forms, the best has more"
        exclusion = Exclusion(reason, "bound below the best")
        return Choice(**common, status=Status.PRUNED, exclusion=exclusion, bounds=Bounds(900.0))
    points = load_curve(speed * tp**0.8, tp, rank, limits, tp * price)
    satisfied = [p for p in points if p.satisfied]
    if not satisfied:
        reason = "breaks TTFT p90 at any rate"
        return Choice(
            **common, status=Status.REJECTED, exclusion=Exclusion(reason, "latency at any rate"), at=points[0],
            points=points, simulations=6, requests=3000,
        )  # fmt: skip
    at = satisfied[-1]
    return Choice(
        **common,
        status=Status.SCOUTED if tp == 8 else Status.RANKED,
        objective=Estimate(3600 * at.rate_rps / (tp * price), 9.0 if tp < 8 else math.nan),
        capacity_rps=Estimate(at.rate_rps, 0.01),
        bounds=Bounds(rate_rps=speed * tp**0.8),
        at=at,
        points=points,
        bottleneck=Bottleneck(
            binding(points[len(satisfied)], limits) if len(satisfied) < len(points) else "throughput",
            "Decoding reads the weights: bound by memory bandwidth.",
        ),
        simulations=18,
        requests=9000,
    )


def binding(first: Point, limits: tuple[Limit, ...]) -> str:
    """The limit that is broken when the load is more than what holds."""
    return next(limit.metric for limit in limits if not limit.is_satisfied(first.value(limit.metric)))


def load_curve(top: float, tp: int, rank: str, limits: tuple[Limit, ...], price: float) -> tuple[Point, ...]:
    waits = 0.08 if rank == "srtf" else 0.2
    made = []
    for load in LOADS:
        queue = 1 / (1 - load)
        ttft, tbt = waits * queue * 3 / tp**0.3, 0.04 * queue**0.5 / tp**0.3 / top**0.1
        values = {
            "ttft.p90": Estimate(ttft, 0.02 * ttft),
            "tbt.p99": Estimate(tbt, 0.01 * tbt),
            "jct.mean": Estimate(40 * tbt + ttft, 0.1),
            "within_slo": Estimate(1 - 0.2 * load, 0.01),
            "requests_per_s": Estimate(load * top),
            "mfu": Estimate(0.4 * load),
            "kv_utilization": UNKNOWN,
        }
        satisfied = all(limit.is_satisfied(values[limit.metric].value) for limit in limits)
        made.append(Point(load * top, values, satisfied))
    return tuple(made)


def thousand(c: Choice, p: Point) -> float:
    return c.price_per_hour_usd / (3600 * p.rate_rps) * 1000


def frontier(choices: list[Choice], metric: str) -> tuple[Trade, ...]:
    trades = [Trade(c.name, p.rate_rps, thousand(c, p), p.value(metric)) for c in choices for p in c.points]
    retained: list[Trade] = []
    for trade in sorted(trades, key=lambda t: (t.cost_usd, t.latency_s)):
        if not retained or trade.latency_s < retained[-1].latency_s:
            retained.append(trade)
    return tuple(retained)


def shifts(choices: list[Choice], limits: tuple[Limit, ...], one: Limit) -> list[Shift]:
    made = []
    for factor in (0.1, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
        moved = [Limit(li.metric, li.bound * factor) if li is one else li for li in limits]
        made.append(Shift(one.metric, one.bound * factor, *best_under(choices, moved)))
    return made


def best_under(choices: list[Choice], limits: list[Limit]) -> tuple[str, float]:
    """The best measured point that holds other limits: what the page must find too."""
    satisfied = [
        (3600 * p.rate_rps / c.price_per_hour_usd, c.key)
        for c in choices
        for p in c.points
        if all(limit.is_satisfied(p.value(limit.metric)) for limit in limits)
    ]
    value, key = max(satisfied, default=(math.nan, ""))
    return key, value


def groups(choices: list[Choice]) -> tuple[ExcludedGroup, ...]:
    names = sorted({c.exclusion.group for c in choices if c.exclusion.group})
    return tuple(
        ExcludedGroup(
            name,
            len(alike := [c for c in choices if c.exclusion.group == name]),
            alike[0].exclusion.reason,
            {"deployment.tp": tuple(sorted({c.settings["deployment.tp"] for c in alike}))},
        )
        for name in names
    )
