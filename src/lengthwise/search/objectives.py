"""Evaluation of configurations, the same in every worker, step by step: bound, scouting run, exact, rough answer."""

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
from lengthwise.schema.plan import Bottleneck, Bounds, Choice, Exclusion, Limit, Point, Status
from lengthwise.search import capacity_search
from lengthwise.search.bounds import ceiling, fits_any
from lengthwise.search.capacity_search import MIN_REQUESTS, Capacity, Effort, Trials
from lengthwise.search.limits import AT_RATE, Question, SloLimits
from lengthwise.search.load import Load
from lengthwise.search.measurement import Window, mean_point
from lengthwise.search.space import Settings
from lengthwise.statistics import drawn_estimate

CURVE_SEEDS = 4
OPERATING_STEPS, OPERATING_STEP = 5, 0.985
"""Attempts to find an operating point that holds, each at this share of the previous rate."""
SCOUTED_SHARE = 0.95
"""Share of the rough capacity at which a scouted configuration is measured."""
MAX_REPLICAS_FACTOR = 3
"""If this many times the replicas that one alone suggests do not suffice, more replicas do not help."""
OBJECTIVE_METRICS = {"goodput": "good_requests_per_s", "energy": "energy_j_per_output_token", "makespan": "makespan"}
BINDING_SHARE = 0.8  # use of a limit from which it binds at a given rate
AT = capacity_search.CURVE_FRACTIONS.index(1.0)  # the operating point's place in a load curve
EXACT_LENGTHS = 8
"""Runs of a ranked configuration are this many times longer than a scouting run."""


@dataclass(frozen=True)
class Evaluation:
    """One deployment under one load, for one question."""

    deployment: Deployment
    load: Load
    question: Question

    def shift(self, choice: Choice) -> Choice:
        """Return a rough objective: the capacity on few seeds, starting from the known one."""
        found = capacity_search.rough_capacity(
            self.deployment, self.load, self.question.slo_limits, choice.capacity_rps.value
        )
        rate = found.rate_rps.value
        value = rate * 3600 / choice.price_per_hour_usd if rate > 0 else math.nan
        if self.question.objective.name == "energy" and choice.at is not None:
            value = choice.objective.value  # known at the requested bound only
        return _with_effort(choice, found.effort, objective=Estimate(value))

    def with_model_error(self, point: Point, effort: Effort, rate_rps: Estimate = UNKNOWN) -> Point:
        """Return a point with model intervals from short runs; costs follow from a capacity ``rate_rps``."""
        limits, level = self.question.slo_limits, self.question.level
        tried = comparable_deployments(self.deployment, self.question.model_draws)
        if len(tried) == 1:
            return point
        top = replace(ceiling(self.deployment, self.load.sample(), limits.limits), rate_rps=point.rate_rps)
        length, measure = capacity_search.run_length(top, limits), capacity_search.point_at
        runs = [measure(point.rate_rps, one, self.load, limits, length, range(1), level, effort) for one in tried]
        return self.drawn(point, runs, rate_rps)

    def drawn(self, point: Point, runs: Sequence[Point], rate_rps: Estimate = UNKNOWN) -> Point:
        """Return a point with model intervals from runs, the first without error; keep the objective's draws."""
        values = dict[str, Estimate]()
        for name, estimate in point.values.items():
            drawn = values[name] = drawn_estimate(estimate, [run.value(name) for run in runs])
            low, high = drawn.model_low, drawn.model_high
            if name.startswith("usd_per_") and rate_rps.has_model_interval:
                per_rate = estimate.value * rate_rps.value
                low, high = per_rate / rate_rps.model_high, per_rate / max(rate_rps.model_low, 1e-300)
            if name != OBJECTIVE_METRICS.get(self.question.objective.name):
                values[name] = Estimate(estimate.value, estimate.half_width, low, high)
        return replace(point, values=values)

    def _impossible(self, choice: Choice, impossible: dict[str, str]) -> Choice:
        metric, reason = next(iter(impossible.items()))
        return rejected(choice, Exclusion(reason, f"breaks {metric} when idle"))


def _with_effort(choice: Choice, effort: Effort, **changes: Any) -> Choice:
    simulations, requests = choice.simulations + effort.simulations, choice.requests + effort.requests
    return replace(choice, simulations=simulations, requests=requests, **changes)


def rejected(choice: Choice, exclusion: Exclusion, effort: Effort | None = None, **changes: Any) -> Choice:
    """Return a choice that cannot be used, with the effort of finding this out and other changes."""
    return _with_effort(choice, effort or Effort(), status=Status.REJECTED, exclusion=exclusion, **changes)


class AtCapacity(Evaluation):
    """Objectives at the largest rate that holds the limits: requests per dollar, energy."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with its upper bound, REJECTED where an idle deployment breaks a limit."""
        top = ceiling(self.deployment, self.load.sample(), self.question.slo_limits.limits)
        if top.impossible:
            return self._impossible(choice, top.impossible)
        best = top.rate_rps * 3600 / choice.price_per_hour_usd if self._is_per_dollar else math.nan
        return replace(choice, bounds=Bounds(best, top.rate_rps))

    @property
    def _is_per_dollar(self) -> bool:
        return self.question.objective.name == "requests_per_dollar"

    def scout(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return the choice with a rough capacity, PRUNED where a limit breaks at the ``threshold`` objective."""
        slo_limits, rate = self.question.slo_limits, threshold * choice.price_per_hour_usd / 3600
        if self._is_per_dollar and rate < choice.bounds.rate_rps:
            found = capacity_search.check_rate(rate, self.deployment, self.load, slo_limits)
            if found.binds:
                reason = f"it breaks {found.binds} at the rate of {threshold:.4g} {self.question.objective.unit}"
                return _with_effort(
                    choice,
                    found.effort,
                    bounds=replace(choice.bounds, objective=threshold),
                    exclusion=Exclusion(reason, f"breaks {found.binds} far below the best"),
                    bottleneck=Bottleneck(found.binds),
                )
        found = capacity_search.scout(self.deployment, self.load, slo_limits)
        if not found.rate_rps.value > 0:
            return self._rejected(choice, found)
        at = self._measure(SCOUTED_SHARE * found.rate_rps.value, found, found.requests, range(1))
        return self._measured(choice, found, at, Status.SCOUTED)

    def rank(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return the choice with its capacity and load curve; SCOUTED if it is below the ``threshold`` objective."""
        question, min_rps = self.question, 0.0
        if self._is_per_dollar and not math.isnan(threshold):
            min_rps = threshold * choice.price_per_hour_usd / 3600
        found = capacity_search.capacity(
            self.deployment,
            self.load,
            question.slo_limits,
            precision=question.precision,
            seeds=question.seeds,
            level=question.level,
            min_rps=min_rps,
        )
        rate = found.rate_rps
        if not rate.value > 0:
            return self._rejected(choice, found)
        if not rate.has_interval and rate.value < min_rps:
            rough = Estimate(rate.value * 3600 / choice.price_per_hour_usd)
            bottleneck = Bottleneck(found.binds)
            return _with_effort(choice, found.effort, objective=rough, capacity_rps=rate, bottleneck=bottleneck)
        found = capacity_search.with_model_error(
            found, self.deployment, self.load, question.slo_limits, question.model_draws
        )
        seeds = range(min(CURVE_SEEDS, question.seeds, self.load.seeds or CURVE_SEEDS))

        def measure(rate_rps: float, share: float = 1.0) -> Point:
            return self._measure(rate_rps, found, max(MIN_REQUESTS, int(found.requests * share)), seeds)

        at = measure(found.low_rps)
        for _ in range(OPERATING_STEPS):
            if not at.satisfied:  # near the crossing, chance decides; the operating point must hold
                at = measure(at.rate_rps * OPERATING_STEP)
        rates = {at.rate_rps: found.rate_rps}
        curve = capacity_search.curve(at, measure)
        points = tuple(self.with_model_error(one, found.effort, rates.get(one.rate_rps, UNKNOWN)) for one in curve)
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
        return _with_effort(
            choice,
            found.effort,
            status=status,
            objective=objective if status is Status.RANKED else Estimate(objective.value),
            capacity_rps=found.rate_rps,
            bounds=replace(choice.bounds, rate_rps=found.ceiling.rate_rps),
            at=at,
            points=(at,),
            bottleneck=Bottleneck(found.binds),
        )

    def _rejected(self, choice: Choice, found: Capacity) -> Choice:
        lowest = found.ceiling.rate_rps * capacity_search.FLOOR_SHARE
        reason = f"{found.binds} breaks at every tried rate, down to {lowest:.3g} requests/s"
        return rejected(choice, Exclusion(reason, f"breaks {found.binds} at any rate"), found.effort)


class AtRate(Evaluation):
    """Objectives at a given rate: cost or GPUs of the replicas that sustain it, goodput, energy."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with its bound, REJECTED where no number of replicas holds the limits."""
        top = ceiling(self.deployment, self.load.sample(), self.question.slo_limits.limits)
        if top.impossible:
            return self._impossible(choice, top.impossible)
        deployment, is_sized = self.deployment, self.question.objective.name in AT_RATE
        if self._finds_replicas(choice):
            deployment = self._resized(math.ceil(self._rate_rps / top.rate_rps))
            if deployment.parallel.gpus > self.question.max_gpus:
                return self._too_many_gpus(choice, deployment, Effort())
        elif is_sized and top.rate_rps < self._rate_rps:
            reason = f"it serves at most {top.rate_rps:.3g} requests/s"
            return rejected(choice, Exclusion(reason, "cannot serve the rate"))
        return replace(choice, bounds=Bounds(self._size(deployment) if is_sized else math.nan, top.rate_rps))

    def scout(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with a rough number of replicas, for which bounds are tight, and the metrics of one run."""
        deployment, effort = self.deployment, Effort()
        if self._finds_replicas(choice):
            one = capacity_search.scout(deployment, self.load, self.question.slo_limits)
            effort = one.effort
            if not one.rate_rps.value > 0:
                return _broken(choice, one.binds, effort, "at any rate")
            deployment = self._resized(math.ceil(self._rate_rps / one.rate_rps.value))
            if deployment.parallel.gpus > self.question.max_gpus:
                return self._too_many_gpus(choice, deployment, effort)
        return self._measured(choice, deployment, effort, range(1), 1, Status.SCOUTED)

    def rank(self, choice: Choice, _threshold: float = math.nan) -> Choice:
        """Return the choice with its load curve and the fewest replicas that hold the rate, if it finds them."""
        deployment, effort, is_certain = self.deployment, Effort(), True
        seeds = self.load.seeds_up_to(self.question.seeds)
        if self._finds_replicas(choice):
            guess = max(choice.gpus // deployment.parallel.gpus, 1)
            replicas, is_certain = self.fewest_replicas(guess, seeds, effort)
            deployment = self._resized(replicas)
            if deployment.parallel.gpus > self.question.max_gpus:
                return self._too_many_gpus(choice, deployment, effort)
        ranked = self._measured(choice, deployment, effort, seeds, EXACT_LENGTHS, Status.RANKED)
        if ranked.status is Status.RANKED and self.question.objective.name in AT_RATE:
            half = 0.0 if is_certain else self._size(deployment) / deployment.parallel.replicas
            size, spent = Estimate(ranked.objective.value, half), Effort()
            tried = comparable_deployments(self.deployment, self.question.model_draws)
            if self._finds_replicas(choice) and len(tried) > 1:
                known = deployment.parallel.replicas
                needed = [replace(self, deployment=x).fewest_replicas(known, range(1), spent, 1)[0] for x in tried]
                sizes = [self._size(self._resized(max(1, known + count - needed[0]))) for count in needed]
                size = drawn_estimate(size, sizes)
            # From here on, names tell how many replicas were found.
            found = {REPLICAS: deployment.parallel.replicas} if self._finds_replicas(choice) else {}
            ranked = _with_effort(ranked, spent, objective=size, settings=choice.settings | found)
        return ranked

    def fewest_replicas(
        self, guess: int, seeds: range, effort: Effort, lengths: int = EXACT_LENGTHS
    ) -> tuple[int, bool]:
        """Return the fewest replicas that sustain the rate, and whether this is significant over the seeds."""
        replicas, low, high, step = guess, 0, 0, 1
        usage_of: dict[int, tuple[float, float]] = {}
        most = max(1, self.question.max_gpus // self.deployment.parallel.gpus)
        last = min(most, MAX_REPLICAS_FACTOR * (guess + 1))
        while not high or high - low > 1:
            requests = self._requests(self._resized(replicas), lengths)
            trials = Trials(self._resized(replicas), self.load, self.question.slo_limits, requests, seeds, effort)
            usage = trials.usage(self._rate_rps)
            usage_of[replicas] = usage, trials.half_width(self._rate_rps, self.question.level)
            if usage <= 1:
                high = replicas
            elif replicas > last:
                return replicas, False  # something other than replicas is lacking
            else:
                low = replicas
            replicas = (low + high) // 2 if low and high else max(1, high - step) if high else low + step
            step *= 2
        return high, all(abs(usage - 1) > half for n, (usage, half) in usage_of.items() if n in (low, high))

    def _measured(
        self, choice: Choice, deployment: Deployment, effort: Effort, seeds: range, lengths: int, status: Status
    ) -> Choice:
        """Return the choice with its metrics at the rate, REJECTED if they break a limit."""
        question, requests = self.question, self._requests(deployment, lengths)

        def measure(rate_rps: float, share: float = 1.0, max_seeds: int = CURVE_SEEDS) -> Point:
            count = max(MIN_REQUESTS, int(requests * share))
            used = seeds[:max_seeds]
            return capacity_search.point_at(
                rate_rps, deployment, self.load, question.slo_limits, count, used, question.level, effort
            )

        at, is_ranked = measure(self._rate_rps, max_seeds=len(seeds)), status is Status.RANKED
        gpus, usd = deployment.parallel.gpus, deployment.price_per_hour_usd
        measured = replace(choice, gpus=gpus, price_per_hour_usd=usd, at=at, points=(at,))
        if not at.satisfied and (is_ranked or not self._finds_replicas(choice)):
            return _broken(measured, self._tightest(at, 0.0), effort, "at the rate")
        metric = OBJECTIVE_METRICS.get(question.objective.name)
        points: tuple[Point, ...] = (at,)
        if is_ranked:
            sized = replace(self, deployment=deployment)
            points = tuple(sized.with_model_error(one, effort) for one in capacity_search.curve(at, measure))
            at = points[AT]
        objective = at.values[metric] if metric else Estimate(self._size(deployment), 0.0)
        return _with_effort(
            # The curve's runs count as effort: it is measured before the effort is read.
            replace(measured, at=at, points=points),
            effort,
            status=status,
            objective=objective if is_ranked else Estimate(objective.value),
            bottleneck=Bottleneck(self._tightest(at)),
        )

    def _tightest(self, at: Point, share: float = BINDING_SHARE) -> str:
        """Return the metric of the limit that is nearest to its bound, "" if it is used less than ``share``."""

        def used(limit: Limit) -> float:
            value = at.value(limit.metric)
            return limit.bound / max(value, 1e-12) if limit.at_least else value / limit.bound

        limits = self.question.slo_limits.limits
        tightest = max(limits, key=used, default=None)
        if tightest is None:
            return "throughput"
        return tightest.metric if not used(tightest) < share else ""

    def _size(self, deployment: Deployment) -> float:
        """Return the objective of a number of replicas: GPUs or dollars per hour."""
        is_gpus = self.question.objective.name == "fewest_gpus"
        return float(deployment.parallel.gpus if is_gpus else deployment.price_per_hour_usd)

    def _requests(self, deployment: Deployment, lengths: int) -> int:
        top = ceiling(deployment, self.load.sample(), self.question.slo_limits.limits)
        return capacity_search.run_length(replace(top, rate_rps=self._rate_rps), self.question.slo_limits) * lengths

    @property
    def _rate_rps(self) -> float:
        assert self.question.rate_rps is not None  # Question requires it for these objectives
        return self.question.rate_rps

    def _finds_replicas(self, choice: Choice) -> bool:
        is_auto = choice.settings.get("deployment.replicas", "auto") == "auto"
        return self.question.objective.name in AT_RATE and is_auto

    def _resized(self, replicas: int) -> Deployment:
        return replace(self.deployment, parallel=replace(self.deployment.parallel, replicas=replicas))

    def _too_many_gpus(self, choice: Choice, deployment: Deployment, effort: Effort) -> Choice:
        gpus, max_gpus, usd = deployment.parallel.gpus, self.question.max_gpus, deployment.price_per_hour_usd
        reason = f"the rate needs {gpus} GPUs, and at most {max_gpus} are allowed"
        exclusion = Exclusion(reason, f"takes more than {max_gpus} GPUs")
        return rejected(choice, exclusion, effort, gpus=gpus, price_per_hour_usd=usd)


def _broken(choice: Choice, metric: str, effort: Effort, where: str) -> Choice:
    return rejected(choice, Exclusion(f"{metric} breaks {where}", f"breaks {metric} {where}"), effort)


class Makespan(Evaluation):
    """The makespan of an offline batch, whose requests all arrive at time 0."""

    def bound(self, choice: Choice) -> Choice:
        """Return the choice with the shortest makespan of any schedule and seed."""
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
            at = self.drawn(at, [self._run(one, range(1), effort) for one in tried]) if len(tried) > 1 else at
        makespan = at.values.pop("makespan")
        measured = _with_effort(
            choice,
            effort,
            status=status,
            objective=makespan if status is Status.RANKED else Estimate(makespan.value),
            at=at,
            points=(at,),
            bottleneck=Bottleneck("throughput"),
        )
        if (served := at.value("served")) < 1:
            reason = f"{1 - served:.1%} of the requests can never fit"
            return rejected(measured, Exclusion(reason, "does not serve all requests"))
        for limit in question.slo_limits.limits:
            if not limit.is_satisfied(value := at.value(limit.metric)):
                exclusion = Exclusion(f"{limit.metric} is {value:.3g}", f"breaks {limit.metric}")
                return rejected(measured, exclusion)
        return measured

    def _run(self, deployment: Deployment, seeds: range, effort: Effort) -> Point:
        """Return the metrics of the batch, the makespan among them, and add the runs to ``effort``."""
        windows = []
        for seed in seeds:
            batch = self.load.batch(seed, self.question.requests)
            records = engine.simulate(batch, deployment, seed=seed, max_log_steps=0)
            windows.append(Window(deployment, records, None, -1.0, records.end_s))
            effort.simulations, effort.requests = effort.simulations + 1, effort.requests + len(batch)
        makespan = mean_point([{"makespan": window.end_s} for window in windows], self.question.level)
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
    """Return the evaluation of a deployment for a question; energy is that at the question's rate if it has one."""
    is_energy_at_rate = question.objective.name == "energy" and question.rate_rps is not None
    kind = _EVALUATIONS["cost_at_rate" if is_energy_at_rate else question.objective.name]
    return kind(deployment, load, question)


Build = Callable[[Mapping[str, Any]], Deployment]
REPLICAS = "deployment.replicas"


@dataclass(frozen=True)
class Task:
    """One step ("bound", "scout", "rank" or "shift") of one configuration's evaluation.

    ``extra`` holds arguments of the step: a threshold of ``scout`` and ``rank``; metric and factor of ``shift``.
    """

    step: str
    choice: Choice
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Evaluates configurations step by step.

    ``build`` maps settings to a deployment of one replica; it raises InputError where it cannot run.
    """

    build: Build
    load: Load
    question: Question

    def __call__(self, task: Task) -> Choice:
        """Return the choice after one step of its evaluation."""
        choice, question, extra = task.choice, self.question, task.extra
        if task.step == "bound":
            return self._bound(choice)
        if task.step == "shift":
            question, extra = replace(question, slo_limits=question.slo_limits.with_bound(*extra)), ()
        evaluation = evaluation_of(self._deployment(choice.settings), self.load, question)
        step: Callable[..., Choice] = getattr(evaluation, task.step)
        return step(choice, *extra)

    def _bound(self, choice: Choice) -> Choice:
        """Return a configuration with its bound in closed form: PRUNED until it is simulated, or REJECTED."""
        try:
            deployment = self._deployment(choice.settings)
        except (UnknownNameError, PolicyError):
            raise  # an error in the question, not a configuration that cannot run
        except InputError as error:
            regions = {DoesNotFitError: "does not fit in memory", ProfileError: "is not in the profile"}
            region = next((name for kind, name in regions.items() if isinstance(error, kind)), "cannot be built")
            return rejected(choice, Exclusion(str(error), region))
        parallel, max_gpus = deployment.parallel, self.question.max_gpus
        choice = replace(choice, gpus=parallel.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
        if parallel.gpus > max_gpus or parallel.gpus == 0:
            gpus = parallel.tp * parallel.pp * max(parallel.replicas, 1)
            reason = f"it takes {gpus} GPUs, and at most {max_gpus} are allowed"
            return rejected(choice, Exclusion(reason, f"takes more than {max_gpus} GPUs"), gpus=gpus)
        if not fits_any(deployment, self.load):
            reason = f"every prompt reaches max_model_len ({deployment.max_model_len}) or is rejected"
            return rejected(choice, Exclusion(reason, "takes no request"))
        return evaluation_of(deployment, self.load, self.question).bound(choice)

    def _deployment(self, settings: Settings) -> Deployment:
        """Return the deployment with the replicas of the settings; with one if the search finds their number."""
        one = self.build({key: value for key, value in settings.items() if key != REPLICAS})
        one.require_one_side("a search")
        replicas = settings.get(REPLICAS, "auto" if self.question.objective.name in AT_RATE else 1)
        if replicas == "auto":
            return one
        count = self.question.max_gpus // one.parallel.gpus if replicas == "fill" else int(replicas)
        return replace(one, parallel=replace(one.parallel, replicas=count))


def sized(deployment: Deployment, gpus: int) -> Deployment:
    """Return the deployment with the number of replicas that makes up ``gpus`` GPUs."""
    parallel = deployment.parallel
    return replace(deployment, parallel=replace(parallel, replicas=max(1, gpus // (parallel.tp * parallel.pp))))


def better(a: float, b: float, question: Question) -> bool:
    """Return whether objective ``a`` is better than ``b``; NaN is never better."""
    if math.isnan(a) or math.isnan(b):
        return not math.isnan(a) and math.isnan(b)
    return a > b if question.objective.higher_is_better else a < b
