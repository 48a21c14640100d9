"""Evaluates configurations, the same in every worker, in steps: bound, scouting run, exact and rough results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lengthwise import engine
from lengthwise.cost.model_error import comparable_deployments
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, ProfileError, UnknownNameError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.metric_names import quantity, split
from lengthwise.schema.plan import Bottleneck, Bounds, Choice, Exclusion, Limit, Point, Status, limit_text
from lengthwise.search import bounds, capacity_search
from lengthwise.search.bounds import ceiling, fits_any
from lengthwise.search.capacity_search import MIN_REQUESTS, Capacity, Effort, Trials
from lengthwise.search.limits import AT_RATE, WAITS, Question, SloLimits, allowed_share, excess, rule, value_text
from lengthwise.search.load import Load
from lengthwise.search.measurement import Window, mean_values
from lengthwise.search.space import Settings
from lengthwise.statistics import drawn_estimate

CURVE_SEEDS = 4
NOT_BUILT = "cannot be built"
SCOUTED_SHARE = 0.95  # share of the rough capacity at which a scouted configuration is measured
MAX_REPLICAS_FACTOR = 3
"""The search for the number of replicas gives up above this many times the number that the rate of one suggests."""
OBJECTIVE_METRICS = {"goodput": "good_requests_per_s", "energy": "energy_j_per_output_token", "makespan": "makespan"}
BINDING_SHARE = 0.8  # usage from which a limit binds at a given rate
AT = capacity_search.CURVE_FRACTIONS.index(1.0)  # index of the operating point in a load curve
EXACT_LENGTHS = 8  # at a given rate, runs of a ranked configuration are this many times as long as a scouting run


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one deployment under one load for one question, in steps.

    Each step takes a choice and returns it with its results: a bound, a scouting run, exact results ("rank"), or a
    rough objective under another bound ("shift").
    """

    deployment: Deployment
    load: Load
    question: Question

    def shift(self, choice: Choice) -> Choice:
        """Return the choice with a rough objective, from a short search that starts at the known capacity."""
        found = capacity_search.rough_capacity(
            self.deployment, self.load, self.question.slo_limits, choice.capacity_rps.value
        )
        rate = found.rate_rps.value
        value = rate * 3600 / choice.price_per_hour_usd if rate > 0 else math.nan
        if self.question.objective.name == "energy" and choice.at is not None:
            value = choice.objective.value  # known at the requested bound only
        return _with_effort(choice, found.effort, objective=Estimate(value))

    def with_model_error(self, point: Point, effort: Effort) -> Point:
        """Return a point with intervals of the cost model's error, from short runs with perturbed cost tables."""
        limits, level = self.question.slo_limits, self.question.level
        tried = comparable_deployments(self.deployment, self.question.model_draws)
        if len(tried) == 1:
            return point
        top = replace(ceiling(self.deployment, self.load.sample(), limits.limits), rate_rps=point.rate_rps)
        length, measure = capacity_search.run_length(top, self.load, limits), capacity_search.point_at
        runs = [measure(point.rate_rps, one, self.load, limits, length, range(1), level, effort) for one in tried]
        return self.with_intervals(point, runs)

    def with_intervals(self, point: Point, runs: Sequence[Point]) -> Point:
        """Return a point with intervals of the cost model's error from ``runs``, of which the first has no error."""
        values = dict[str, Estimate]()
        for name, estimate in point.values.items():
            drawn = values[name] = drawn_estimate(estimate, [run.value(name) for run in runs])
            if name != OBJECTIVE_METRICS.get(self.question.objective.name):
                values[name] = Estimate(estimate.value, estimate.half_width, drawn.model_low, drawn.model_high)
        return replace(point, values=values)

    def reason(self, how: str, binds: str) -> str:
        """Return why a limit breaks, with the rejected requests: first if they alone are more than the limit allows."""
        share, rejections = bounds.rejections(self.deployment, self.load.sample())
        limit = next((one for one in self.question.slo_limits.limits if one.metric == binds), None)
        waits = limit is not None and split(limit.metric)[0] in (*WAITS, "within_slo", "served")
        parts = [rejections, how] if limit and waits and share > allowed_share(limit) else [how, rejections]
        return "; ".join(filter(None, parts))

    def _impossible(self, choice: Choice, impossible: dict[str, str]) -> Choice:
        metric, reason = next(iter(impossible.items()))
        limits = self.question.slo_limits.limits
        return rejected(choice, Exclusion(reason, f"breaks {rule(metric, limits)} even without other requests"))

    def _broken_at_every_rate(self, choice: Choice, found: Capacity) -> Choice:
        group = f"breaks {rule(found.binds, self.question.slo_limits.limits)} at every rate"
        return rejected(
            choice, Exclusion(self.reason(f"{found.excess}, the lowest rate tried", found.binds), group), found.effort
        )


def _with_effort(choice: Choice, effort: Effort, **changes: Any) -> Choice:
    simulations, requests = choice.simulations + effort.simulations, choice.requests + effort.requests
    return replace(choice, simulations=simulations, requests=requests, **changes)


def rejected(choice: Choice, exclusion: Exclusion, effort: Effort | None = None, **changes: Any) -> Choice:
    """Return the choice as REJECTED, with the effort that led to it, and with other ``changes`` of fields."""
    return _with_effort(choice, effort or Effort(), status=Status.REJECTED, exclusion=exclusion, **changes)


class AtCapacity(Evaluation):
    """Objectives at the largest rate at which the limits hold: requests per dollar, energy."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with its upper bound; REJECTED if an idle deployment breaks a limit."""
        top = ceiling(self.deployment, self.load.sample(), self.question.slo_limits.limits)
        if top.impossible:
            return self._impossible(choice, top.impossible)
        best = top.rate_rps * 3600 / choice.price_per_hour_usd if self._is_per_dollar else math.nan
        return replace(choice, bounds=Bounds(best, top.rate_rps))

    @property
    def _is_per_dollar(self) -> bool:
        return self.question.objective.name == "requests_per_dollar"

    def scout(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return the choice with a rough capacity.

        It stays PRUNED if a limit breaks at the rate that gives the objective ``threshold``. It is REJECTED if a limit
        breaks at every rate.
        """
        slo_limits, rate = self.question.slo_limits, threshold * choice.price_per_hour_usd / 3600
        if self._is_per_dollar and rate < choice.bounds.rate_rps:
            found = capacity_search.check_rate(rate, self.deployment, self.load, slo_limits)
            if found.binds:
                unit = self.question.objective.unit
                how = f"{found.excess} ({threshold:.4g} {unit}); better configurations reach that within the limits"
                top, bottleneck = replace(choice.bounds, objective=threshold), Bottleneck(found.binds)
                group = f"breaks {rule(found.binds, slo_limits.limits)} far below the best"
                exclusion = Exclusion(self.reason(how, found.binds), group)
                return _with_effort(choice, found.effort, bounds=top, exclusion=exclusion, bottleneck=bottleneck)
        found = capacity_search.scout(self.deployment, self.load, slo_limits)
        if not found.rate_rps.value > 0:
            return self._broken_at_every_rate(choice, found)
        at = self._measure(SCOUTED_SHARE * found.rate_rps.value, found, found.requests, range(1))
        return self._measured(choice, found, at, Status.SCOUTED)

    def rank(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return the choice with capacity and load curve; still SCOUTED if it is worse than ``threshold``."""
        question, min_rps = self.question, 0.0
        if self._is_per_dollar and not math.isnan(threshold):
            min_rps = threshold * choice.price_per_hour_usd / 3600
        limits, most, level = question.slo_limits, question.seeds, question.level
        found = capacity_search.capacity(
            self.deployment, self.load, limits, precision=question.precision, seeds=most, level=level, min_rps=min_rps
        )
        rate = found.rate_rps
        if not rate.value > 0:
            return self._broken_at_every_rate(choice, found)
        if not rate.has_interval and rate.value < min_rps:
            rough = Estimate(rate.value * 3600 / choice.price_per_hour_usd)
            bottleneck = Bottleneck(found.binds)
            return _with_effort(choice, found.effort, objective=rough, capacity_rps=rate, bottleneck=bottleneck)
        found = capacity_search.with_model_error(found, self.deployment, self.load, limits, question.model_draws)
        seeds = range(min(CURVE_SEEDS, most, self.load.seeds or CURVE_SEEDS))

        def measure(rate_rps: float, share: float = 1.0) -> Point:
            return self._measure(rate_rps, found, max(MIN_REQUESTS, int(found.requests * share)), seeds)

        at = capacity_search.operating_point(found.low_rps, limits, measure)
        points = tuple(self.with_model_error(one, found.effort) for one in capacity_search.curve(at, measure))
        return replace(self._measured(choice, found, points[AT], Status.RANKED), points=points)

    def _measure(self, rate_rps: float, found: Capacity, requests: int, seeds: range) -> Point:
        slo_limits, level = self.question.slo_limits, self.question.level
        return capacity_search.point_at(
            rate_rps, self.deployment, self.load, slo_limits, requests, seeds, level, found.effort
        )

    def _measured(self, choice: Choice, found: Capacity, at: Point, status: Status) -> Choice:
        objective = found.rate_rps.scaled(3600 / choice.price_per_hour_usd)
        if self.question.objective.name == "energy":
            objective = at.values["energy_j_per_output_token"]
        objective = objective if status is Status.RANKED else Estimate(objective.value)
        top, bottleneck = replace(choice.bounds, rate_rps=found.ceiling.rate_rps), Bottleneck(found.binds)
        measured = replace(choice, status=status, objective=objective, capacity_rps=found.rate_rps, bounds=top)
        return _with_effort(measured, found.effort, at=at, points=(at,), bottleneck=bottleneck)


class AtRate(Evaluation):
    """Objectives at a given rate: cost or GPUs of the replicas that sustain the rate, goodput, energy."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with its bound; REJECTED if no number of replicas can meet the limits at the rate."""
        top = ceiling(self.deployment, self.load.sample(), self.question.slo_limits.limits)
        if top.impossible:
            return self._impossible(choice, top.impossible)
        deployment, is_sized = self.deployment, self.question.objective.name in AT_RATE
        if self._finds_replicas(choice):
            deployment = self._resized(math.ceil(self._rate_rps / top.rate_rps))
            if not self.question.is_within_budget(deployment):
                return self._over_budget(choice, deployment, Effort())
        elif is_sized and top.rate_rps < self._rate_rps:
            reason = f"it serves at most {top.rate_rps:.3g} requests/s; the rate is {self._rate_rps:g}"
            return rejected(choice, Exclusion(reason, "cannot serve the rate"))
        return replace(choice, bounds=Bounds(self._size(deployment) if is_sized else math.nan, top.rate_rps))

    def scout(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with the metrics of one run, and replicas by the rough capacity of a single one."""
        deployment, effort = self.deployment, Effort()
        if self._finds_replicas(choice):
            one = capacity_search.scout(deployment, self.load, self.question.slo_limits)
            effort = one.effort
            if not one.rate_rps.value > 0:
                return self._broken_at_every_rate(choice, one)
            deployment = self._resized(math.ceil(self._rate_rps / one.rate_rps.value))
            if not self.question.is_within_budget(deployment):
                return self._over_budget(choice, deployment, effort)
        return self._measured(choice, deployment, effort, range(1), 1, Status.SCOUTED)

    def rank(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with its load curve and the fewest replicas, unless the settings fix their number."""
        deployment, effort, is_certain = self.deployment, Effort(), True
        seeds = self.load.seeds_up_to(self.question.seeds)
        if self._finds_replicas(choice):
            guess = max(choice.gpus // deployment.gpus, 1)
            replicas, is_certain = self.fewest_replicas(guess, seeds, effort)
            deployment = self._resized(replicas)
            if not self.question.is_within_budget(deployment):
                return self._over_budget(choice, deployment, effort)
        ranked = self._measured(choice, deployment, effort, seeds, EXACT_LENGTHS, Status.RANKED)
        if ranked.status is Status.RANKED and self.question.objective.name in AT_RATE:
            of_one = self._size(self._resized(2)) - self._size(self._resized(1))
            size, spent = Estimate(ranked.objective.value, 0.0 if is_certain else of_one), Effort()
            tried = comparable_deployments(self.deployment, self.question.model_draws)
            if self._finds_replicas(choice) and len(tried) > 1:
                known = deployment.parallel.replicas
                needed = [replace(self, deployment=x).fewest_replicas(known, range(1), spent, 1)[0] for x in tried]
                sizes = [self._size(self._resized(max(1, known + count - needed[0]))) for count in needed]
                size = drawn_estimate(size, sizes)
                fixed = self._size(self._resized(1)) - of_one  # of storage that all replicas share
                low, high = ((end - fixed) / of_one for end in (size.model_low, size.model_high))
                ends = math.floor(low + 1e-9), math.ceil(high - 1e-9)  # complete replicas
                size = replace(size, model_low=fixed + ends[0] * of_one, model_high=fixed + ends[1] * of_one)
            # From here on, the choice's name includes the number of replicas.
            found = {REPLICAS: deployment.parallel.replicas} if self._finds_replicas(choice) else {}
            ranked = _with_effort(ranked, spent, objective=size, settings=choice.settings | found)
        return ranked

    def fewest_replicas(
        self, guess: int, seeds: range, effort: Effort, lengths: int = EXACT_LENGTHS
    ) -> tuple[int, bool]:
        """Return the fewest replicas that sustain the rate, and whether this number is certain despite sampling.

        It is certain if, beyond the spread over seeds, this number meets the limits and one replica less breaks them.
        """
        replicas, low, high, step = guess, 0, 0, 1
        usage_of: dict[int, tuple[float, float]] = {}
        most = max(1, self.question.max_gpus // self.deployment.gpus)
        last = min(most, MAX_REPLICAS_FACTOR * (guess + 1))
        while not high or high - low > 1:
            requests = self._requests(self._resized(replicas), lengths)
            trials = Trials(self._resized(replicas), self.load, self.question.slo_limits, requests, seeds, effort)
            usage = trials.usage(self._rate_rps)
            usage_of[replicas] = usage, trials.half_width(self._rate_rps, self.question.level)
            if usage <= 1:
                high = replicas
            elif replicas > last:
                return replicas, False  # more replicas do not help
            else:
                low = replicas
            replicas = (low + high) // 2 if low and high else max(1, high - step) if high else low + step
            step *= 2
        return high, all(abs(usage - 1) > half for n, (usage, half) in usage_of.items() if n in (low, high))

    def _measured(
        self, choice: Choice, deployment: Deployment, effort: Effort, seeds: range, lengths: int, status: Status
    ) -> Choice:
        question, requests = self.question, self._requests(deployment, lengths)

        def measure(rate_rps: float, share: float = 1.0, max_seeds: int = CURVE_SEEDS) -> Point:
            count = max(MIN_REQUESTS, int(requests * share))
            used = seeds[:max_seeds]
            return capacity_search.point_at(
                rate_rps, deployment, self.load, question.slo_limits, count, used, question.level, effort
            )

        at, is_ranked = measure(self._rate_rps, max_seeds=len(seeds)), status is Status.RANKED
        gpus, usd = deployment.gpus, deployment.price_per_hour_usd
        measured = replace(choice, gpus=gpus, price_per_hour_usd=usd, at=at, points=(at,))
        if not at.satisfied and (is_ranked or not self._finds_replicas(choice)):
            limit = max(question.slo_limits.limits, key=lambda one: at.usage[one.metric])
            where = f"at {self._rate_rps:g} requests/s on {gpus} GPU{'s' * (gpus > 1)}"
            reason = self.reason(f"{excess(limit, at.usage[limit.metric])} {where}", limit.metric)
            return rejected(measured, Exclusion(reason, f"breaks {limit_text(limit)} at the rate"), effort)
        metric = OBJECTIVE_METRICS.get(question.objective.name)
        points: tuple[Point, ...] = (at,)
        if is_ranked:
            sized = replace(self, deployment=deployment)
            points = tuple(sized.with_model_error(one, effort) for one in capacity_search.curve(at, measure))
            at = points[AT]
        objective = at.values[metric] if metric else Estimate(self._size(deployment), 0.0)
        objective = objective if is_ranked else Estimate(objective.value)
        measured = replace(measured, at=at, points=points, bottleneck=Bottleneck(self._tightest(at)))
        return _with_effort(measured, effort, status=status, objective=objective)  # with the effort of the curve

    def _tightest(self, at: Point) -> str:
        """Return the metric nearest to its bound, "" below BINDING_SHARE of it, "throughput" without limits."""

        def used(limit: Limit) -> float:
            value = at.value(limit.metric)
            return limit.bound / max(value, 1e-12) if limit.at_least else value / limit.bound

        limits = self.question.slo_limits.limits
        tightest = max(limits, key=used, default=None)
        if tightest is None:
            return "throughput"
        return tightest.metric if not used(tightest) < BINDING_SHARE else ""

    def _size(self, deployment: Deployment) -> float:
        is_gpus = self.question.objective.name == "fewest_gpus"
        return float(deployment.gpus if is_gpus else deployment.price_per_hour_usd)

    def _requests(self, deployment: Deployment, lengths: int) -> int:
        top = ceiling(deployment, self.load.sample(), self.question.slo_limits.limits)
        top, limits = replace(top, rate_rps=self._rate_rps), self.question.slo_limits
        return capacity_search.run_length(top, self.load, limits) * lengths

    @property
    def _rate_rps(self) -> float:
        assert self.question.rate_rps is not None  # Question requires it for these objectives
        return self.question.rate_rps

    def _finds_replicas(self, choice: Choice) -> bool:
        is_auto = choice.settings.get("deployment.replicas", "auto") == "auto" and not self.deployment.groups
        return self.question.objective.name in AT_RATE and is_auto

    def _resized(self, replicas: int) -> Deployment:
        return replace(self.deployment, parallel=replace(self.deployment.parallel, replicas=replicas))

    def _over_budget(self, choice: Choice, deployment: Deployment, effort: Effort) -> Choice:
        gpus, usd = deployment.gpus, deployment.price_per_hour_usd
        exclusion = _excess_of_budget(f"{self._rate_rps:g} requests/s need", deployment, self.question)
        return rejected(choice, exclusion, effort, gpus=gpus, price_per_hour_usd=usd)


def _excess_of_budget(subject: str, deployment: Deployment, question: Question) -> Exclusion:
    if deployment.gpus > (most := question.max_gpus):
        return Exclusion(f"{subject} {deployment.gpus} GPUs; search.max_gpus is {most}", f"takes more than {most} GPUs")
    usd, budget = deployment.price_per_hour_usd, question.max_usd_per_hour
    reason = f"{subject} GPUs of ${usd:.2f} an hour; search.max_usd_per_hour is {budget:g}"
    return Exclusion(reason, f"costs more than ${budget:g} an hour")


class Makespan(Evaluation):
    """The makespan of an offline batch, whose requests all arrive at time 0."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with a lower bound on the makespan, for all schedules and seeds."""
        seeds = self.load.seeds_up_to(self.question.seeds)
        batches = [self.load.batch(seed, self.question.requests) for seed in seeds]
        rates = [ceiling(self.deployment, batch).rate_rps for batch in batches]
        min_s = min(len(batch) / rate for batch, rate in zip(batches, rates, strict=True))
        return replace(choice, bounds=Bounds(min_s, max(rates)))

    def scout(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with the makespan of one seed."""
        return self._measured(choice, range(1), Status.SCOUTED)

    def rank(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with the mean makespan over seeds."""
        return self._measured(choice, self.load.seeds_up_to(self.question.seeds), Status.RANKED)

    def _measured(self, choice: Choice, seeds: range, status: Status) -> Choice:
        question, effort = self.question, Effort()
        at = self._run(self.deployment, seeds, effort)
        if status is Status.RANKED:
            tried = comparable_deployments(self.deployment, question.model_draws)
            if len(tried) > 1:
                at = self.with_intervals(at, [self._run(one, range(1), effort) for one in tried])
        makespan = at.values.pop("makespan")
        objective = makespan if status is Status.RANKED else Estimate(makespan.value)
        measured = replace(choice, at=at, points=(at,), bottleneck=Bottleneck("throughput"))
        measured = _with_effort(measured, effort, status=status, objective=objective)
        if (served := at.value("served")) < 1:
            _, reason = bounds.rejections(self.deployment, self.load.batch(0, question.requests))
            reason = reason or f"{1 - served:.1%} of the requests are rejected or time out"
            return rejected(measured, Exclusion(reason, "does not serve all requests"))
        for limit in question.slo_limits.limits:
            found = at.values.get(limit.metric, UNKNOWN)
            if not limit.is_satisfied(found.value):
                spread = " in one run"
                if found.has_interval:
                    spread = f" \N{PLUS-MINUS SIGN} {quantity(limit.metric, found.half_width, 2)}"
                reason = f"{value_text(limit, found.value, spread)} when all requests arrive at once"
                return rejected(measured, Exclusion(reason, f"breaks {limit_text(limit)}"))
        return measured

    def _run(self, deployment: Deployment, seeds: range, effort: Effort) -> Point:
        windows = []
        for seed in seeds:
            batch = self.load.batch(seed, self.question.requests)
            records = engine.simulate(batch, deployment, seed=seed, max_log_steps=0)
            windows.append(Window(deployment, records, None, -1.0, records.end_s, batch.prefixes is not None))
            effort.simulations, effort.requests = effort.simulations + 1, effort.requests + len(batch)
        makespan = mean_values([{"makespan": window.end_s} for window in windows], self.question.level)
        rate_rps = len(windows[0].records.requests.arrival_s) / makespan["makespan"].value
        at = capacity_search.point_of(rate_rps, windows, SloLimits(()), self.question.level)
        return replace(at, values=at.values | makespan)


_EVALUATIONS: dict[str, type[AtCapacity | AtRate | Makespan]] = {
    "requests_per_dollar": AtCapacity,
    "cost_at_rate": AtRate,
    "fewest_gpus": AtRate,
    "goodput": AtRate,
    "energy": AtCapacity,
    "makespan": Makespan,
}


def evaluation_of(deployment: Deployment, load: Load, question: Question) -> AtCapacity | AtRate | Makespan:
    """Return the evaluation for the question's objective. With a rate, "energy" is measured at this rate."""
    is_energy_at_rate = question.objective.name == "energy" and question.rate_rps is not None
    kind = _EVALUATIONS["cost_at_rate" if is_energy_at_rate else question.objective.name]
    return kind(deployment, load, question)


Build = Callable[[Mapping[str, Any]], Deployment]
REPLICAS, DECODE_REPLICAS = "deployment.replicas", "deployment.decode.replicas"


@dataclass(frozen=True)
class Task:
    """One step ("bound", "scout", "rank" or "shift") in the evaluation of one configuration.

    ``extra`` are the arguments of the step: the threshold of "scout" and "rank"; the metric and the factor of "shift".
    """

    step: str
    choice: Choice
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Evaluates configurations, one step at a time.

    ``build`` maps settings to a deployment, and raises InputError if the configuration cannot run. If it is of separate
    decode replicas, the settings have the numbers of both.
    """

    build: Build
    load: Load
    question: Question

    def __call__(self, task: Task) -> Choice:
        """Return the choice of a task, with the results of the task's step."""
        choice, question, extra = task.choice, self.question, task.extra
        if task.step == "bound":
            return self._bound(choice)
        if task.step == "shift":
            question, extra = replace(question, slo_limits=question.slo_limits.with_bound(*extra)), ()
        evaluation = evaluation_of(self.deployment(choice.settings), self.load, question)
        step: Callable[..., Choice] = getattr(evaluation, task.step)
        return step(choice, *extra)

    def _bound(self, choice: Choice) -> Choice:
        """Return the choice with its closed-form bound: REJECTED if it cannot run, else PRUNED until simulated."""
        try:
            deployment = self.deployment(choice.settings)
            deployment.require_known_rules(self.load.sample())
            engine.check_groups(deployment)
        except (UnknownNameError, PolicyError) as error:  # the question is wrong, not the configuration
            error.add_note("with " + ", ".join(f"{key} = {value!r}" for key, value in choice.settings.items()))
            raise
        except InputError as error:
            groups = {DoesNotFitError: "does not fit in memory", ProfileError: "is not in the profile"}
            group = next((name for kind, name in groups.items() if isinstance(error, kind)), NOT_BUILT)
            return rejected(choice, Exclusion(str(error), group))
        parallel, max_gpus = deployment.parallel, self.question.max_gpus
        choice = replace(choice, gpus=deployment.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
        if deployment.gpus > max_gpus or parallel.gpus == 0:
            gpus = parallel.gpus_per_replica * max(parallel.replicas, 1)
            ranks = "dp x " if any(side.parallel.dp > 1 for side in deployment.sides) else ""
            shape = f"tp x pp x {ranks}replicas are"
            if (decode := deployment.decode) is not None:
                shape = f"tp x pp x {ranks}replicas of both sides, {gpus} + {decode.parallel.gpus}, are"
                gpus = deployment.gpus
            reason = f"{shape} {gpus} GPUs; search.max_gpus is {max_gpus}"
            return rejected(
                choice, Exclusion(reason, f"takes more than {max_gpus} GPU{'s' * (max_gpus > 1)}"), gpus=gpus
            )
        if not self.question.is_within_budget(deployment):
            return rejected(choice, _excess_of_budget("it has", deployment, self.question))
        if not fits_any(deployment, self.load):
            reason = f"every prompt reaches max_model_len ({deployment.max_model_len}) or is rejected"
            return rejected(choice, Exclusion(reason, "takes no request"))
        return evaluation_of(deployment, self.load, self.question).bound(choice)

    def deployment(self, settings: Settings) -> Deployment:
        """Return the deployment, with one replica if the search has to find the number of replicas."""
        replicas = settings.get(REPLICAS, "auto" if self.question.objective.name in AT_RATE else 1)
        one = self.build(settings)  # with the numbers in it, because the link between both sides depends on them
        if one.groups:
            return one
        if one.decode is not None:
            for key, number in ((REPLICAS, replicas), (DECODE_REPLICAS, settings.get(DECODE_REPLICAS, 1))):
                if not isinstance(number, int):
                    raise InputError(
                        f"{key} must be a number with separate decode replicas under this strategy; it is {number!r}. "
                        'Give numbers, or the strategy "pruned"'
                    )
            return one
        one = replace(one, parallel=replace(one.parallel, replicas=1))
        if replicas == "auto":
            return one
        count = self.question.max_gpus // one.gpus if replicas == "fill" else int(replicas)
        return replace(one, parallel=replace(one.parallel, replicas=count))


def sized(deployment: Deployment, gpus: int) -> Deployment:
    """Return the deployment with as many replicas as fit on ``gpus`` GPUs, at least one; of two sides, unchanged."""
    parallel = deployment.parallel
    if deployment.decode is not None or deployment.groups:
        return deployment
    return replace(deployment, parallel=replace(parallel, replicas=max(1, gpus // parallel.gpus_per_replica)))


def better(a: float, b: float, question: Question) -> bool:
    """Return whether objective ``a`` is better than ``b``; every number is better than NaN."""
    if math.isnan(a) or math.isnan(b):
        return not math.isnan(a) and math.isnan(b)
    return a > b if question.objective.higher_is_better else a < b
