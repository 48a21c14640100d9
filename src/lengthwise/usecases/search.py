"""Asks a scenario's search: every variant is a question of its own."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lengthwise import backend, engine, metrics, report, search
from lengthwise.config.files import merged, resolved
from lengthwise.config.scenario import Scenario
from lengthwise.config.search_space import limits_of, space_of
from lengthwise.config.sections import SearchSection
from lengthwise.config.variants import Variant, build, deployment, require_one_each, untold_note
from lengthwise.config.workload import load_of
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.plan import Choice, Plan, Status, Study
from lengthwise.search import Bench, Options, Question, Run, Store
from lengthwise.search.strategy import Strategy
from lengthwise.search.workers import Workers
from lengthwise.usecases.simulate import slo_of


def contents(complete: Scenario) -> dict[str, str]:
    """A digest by name of every file outside the scenario that decides its answers.

    A folder (of a profile) is told by the names, sizes and times of its files.
    """
    on, of = complete.deployment, complete.scheduler
    policies = (of.policy, of.rank, of.leave, of.batching, of.memory, of.router, of.takeover, of.binning)
    files = [text.rpartition(":")[0] for text in policies if text and ":" in text]
    named = (
        complete.workload.trace,
        complete.predictor.file,
        on.model,
        on.gpu,
        on.node,
        on.cost.partition(":")[2].partition("#")[0],
        *files,
    )
    if complete.search is not None:
        axes = (complete.search.space, *complete.search.any_of)
        named += tuple(v for a in axes for vs in a.values() for v in (vs if isinstance(vs, list) else [vs]))
    whole_texts = {text for text in named if isinstance(text, str) and text}
    parts = {part for text in whole_texts for part in (text, text.partition(":")[2], text.rpartition(":")[0])}
    parts |= {part.partition("#")[0] for part in parts}  # an estimator after a profile's name
    places = {text: resolved(text, complete.folder) for text in parts if text}
    return {text: _digest(place) for text, place in sorted(places.items()) if place.exists()}


def _digest(place: Path) -> str:
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    told = [
        f"{path.relative_to(place)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in sorted(place.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RequestSpec:
    """One question: a scenario without variants, and what evaluates its configurations."""

    name: str
    scenario: Scenario
    bench: Bench


def questions(scenario: Scenario) -> list[RequestSpec]:
    """The questions of a scenario, one a variant.

    Raises:
        InputError: There is no [search], or something of it does not work out; a note says where.
    """
    return [_requested(whole, scenario) for whole in scenario.effective()]


def plan(
    scenario: Scenario, workers: Workers, *, store: Store | None = None, progress: Progress = lambda *_: None
) -> Study:
    """The answer of a scenario's search: a plan a variant, and what it costs to confuse them.

    Args:
        scenario: With a [search].
        workers: Who evaluates; see ``lengthwise.search.workers``.
        store: Where evaluations are kept and found again.
        progress: Called with what is done ("llama bound"), evaluations done and to do.

    Raises:
        InputError: As for ``questions``, or a limit is reached in a way that no configuration can be built.
    """
    asked = questions(scenario)
    runs = [Run(a.bench, workers, _identity(a.scenario) if store is not None else "", store) for a in asked]
    plans = []
    for one, run in zip(asked, runs, strict=True):
        run.progress = _named_progress(one.name if len(asked) > 1 else "", progress)
        run.restart()
        plans.append(_explained(_planned(one, run), one))
    return search.study(scenario.name, plans, runs)


def _planned(requested: RequestSpec, run: Run) -> Plan:
    section = _section(requested.scenario)
    space = space_of(section)
    strategy: Strategy[dict[str, Any]] | None = None
    if section.strategy == "bayesian":
        strategy = search.Bayesian(space.alternatives(), section.trials, requested.scenario.run.seed)
    options = Options(section.top, section.strategy == "exhaustive", section.sensitivity, strategy)
    candidates = [] if strategy else list(search.checked(space).candidates())
    return search.search(requested.name, candidates, space.values(), run, options, _metadata(requested))


def settled(requested: RequestSpec, choice: Choice) -> Scenario:
    """The scenario of a choice at its operating point, as ``lengthwise simulate`` runs it."""
    whole = _with(requested.scenario, choice.settings)
    tp, pp = whole.deployment.tp, whole.deployment.pp
    update: dict[str, Any] = {"deployment": {"replicas": max(1, choice.gpus // (tp * pp))}}
    rate = choice.at.rate_rps if choice.at is not None else None
    offline = requested.bench.question.objective.name == "makespan"
    if offline:
        update["workload"] = {"arrivals": {"kind": "all_at_once"}, "num_requests": requested.bench.question.requests}
    elif rate is not None:
        update["workload"] = {"request_rate": rate}
    base = whole.model_dump(exclude={"search"}, exclude_unset=True, exclude_none=True)
    name = f"{requested.name}: {choice.name}" if requested.name else choice.name
    made = type(whole).model_validate(merged(base, update | {"name": name}))
    return made.from_file(whole.source, whole.folder)


@dataclass
class Built:
    """Builds deployments of one replica from settings; travels to other processes."""

    scenario: Scenario

    def __call__(self, settings: Mapping[str, Any]) -> Deployment:
        """The scenario's deployment with these settings."""
        return deployment(_with(self.scenario, settings))


def _with(scenario: Scenario, settings: Mapping[str, Any]) -> Scenario:
    """The scenario with values for dotted keys; the number of replicas is left to the search."""
    over: dict[str, dict[str, Any]] = {"deployment": {"replicas": 1}}
    for key, value in settings.items():
        section, _, leaf = key.rpartition(".")
        if key != search.REPLICAS:
            over.setdefault(section, {})[leaf] = value
    base = scenario.model_dump(exclude_unset=True, exclude_none=True)
    return type(scenario).model_validate(merged(base, over)).from_file(scenario.source, scenario.folder)


def _requested(complete: Scenario, scenario: Scenario) -> RequestSpec:
    with _located(complete, scenario):
        section = _section(complete)
        require_one_each(complete, space_of(section))
        return RequestSpec(
            complete.name, complete, Bench(Built(_plain(complete)), _load(complete), question_of(complete, section))
        )


def question_of(complete: Scenario, section: SearchSection) -> Question:
    """What a [search] asks; raises InputError where it lacks something."""
    limits = limits_of(section)
    objective = search.objective(section.objective)
    if objective.name not in ("makespan", "goodput"):
        limits = search.with_stability(limits)
    _check_replicas(section)
    return Question(
        objective=objective,
        promises=search.Promises(limits, slo_of(complete)),
        rate_rps=section.rate,
        max_gpus=section.max_gpus or search.UNLIMITED_GPUS,
        requests=complete.workload.num_requests or 1000,
        precision=section.precision,
        seeds=section.seeds,
    )


def _check_replicas(section: SearchSection) -> None:
    wanted = space_of(section).values().get(search.REPLICAS, ())
    if "fill" in wanted and section.max_gpus is None:
        raise InputError('deployment.replicas = "fill" fills search.max_gpus, which is not set')
    if "auto" in wanted and section.objective not in ("cost_at_rate", "fewest_gpus"):
        raise InputError(
            'deployment.replicas = "auto" is for the objectives cost_at_rate and fewest_gpus; give numbers or "fill"'
        )


def _section(complete: Scenario) -> SearchSection:
    if complete.search is None:
        raise InputError(
            'a search needs a table [search] with a space, such as: [search.space] gpu = ["A100-80GB", "H100"], '
            "tp = [1, 2, 4]"
        )
    return complete.search


def _plain(complete: Scenario) -> Scenario:
    """Without what only the search reads: less to send to a worker."""
    return complete.model_copy(update={"search": None, "variants": []})


def _load(complete: Scenario) -> search.Load:
    return load_of(complete.workload, complete.folder, complete.run.seed, complete.predictor, complete.deployment.model)


def _metadata(requested: RequestSpec) -> dict[str, str]:
    whole, question = requested.scenario, requested.bench.question
    axes = space_of(_section(whole)).values()
    metadata = {"workload": requested.bench.load.name}
    if "deployment.model" not in axes:
        metadata = {"model": whole.deployment.model} | metadata
    if note := untold_note(whole):
        metadata["cost tables"] = note
    if question.rate_rps is not None:
        metadata["rate"] = f"{question.rate_rps:g} requests a second"
    if question.objective.name == "makespan":
        metadata["requests"] = f"{question.requests:,} requests at once"
    if question.max_gpus < search.UNLIMITED_GPUS:
        metadata["GPUs"] = f"at most {question.max_gpus} GPUs"
    return metadata


def _identity(complete: Scenario) -> str:
    """Whatever decides an evaluation beside the settings that are varied, and the code."""
    section = _section(complete)
    told = complete.model_dump(mode="json", exclude={"name", "description", "variants", "search"})
    asked = section.model_dump(mode="json", include={"objective", "rate", "max_gpus", "limits", "precision", "seeds"})
    return search.content_key(told, asked, contents(complete), search.code_version())


def _explained(found: Plan, requested: RequestSpec) -> Plan:
    """The ranked choices with what binds their hardware at the operating point."""
    ranked = [c for c in found.choices if c.status is Status.RANKED]
    top = {c.key for c in ranked[: _section(requested.scenario).top]}
    told = [replace(c, cause=_binding(c, requested)) if c.key in top else c for c in found.choices]
    return replace(found, choices=tuple(told))


def _binding(choice: Choice, requested: RequestSpec) -> str:
    question, load = requested.bench.question, requested.bench.load
    assert choice.at is not None  # it is ranked
    deployed = search.sized(requested.bench.build(choice.settings), choice.gpus)
    offline = question.objective.name == "makespan"
    few = min(_EXPLAINED, load.most)
    requests = load.batch(0, question.requests) if offline else load.at(0, few, choice.at.rate_rps)
    steps = STEPS if deployed.cost.reach != Reach() else 0
    records = engine.simulate(requests, deployed, keep_steps=steps)
    summary = metrics.summarize(records, deployed)
    limits = deployed.limits
    binds = report.what_binds(
        summary,
        max_batch_seqs=limits.max_num_seqs / deployed.parallel.pp,
        offered=not offline,
        queued_for_s=report.mean_queued_s(records),
    )
    beyond = [f" {one.description}." for one in metrics.beyond_reach(records, deployed)]
    return f"The hardware is {report.bound_by(binds)} {binds.resource}. {binds.description}{''.join(beyond)}"


_EXPLAINED, STEPS = 4000, 1_000_000


def _named_progress(name: str, progress: Progress) -> Progress:
    return lambda step, done, of: progress(f"{name} {step}".strip(), done, of)


@contextmanager
def _located(complete: Scenario, scenario: Scenario) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        variant = f"variant {complete.name!r} of " if scenario.variants else ""
        error.add_note(f"in {variant}{scenario.source}")
        raise


CLAIM_REQUESTS = 2000
CLAIM_S = 200.0
CLAIM_SEEDS = 5
WARMUP_SHARE = 0.2


def write_launches(scenario: Scenario, study: Study, folder: Path, top: int = 1) -> list[Path]:
    """A folder for each of the best configurations of each plan; returns these folders.

    Each holds server scripts, Kubernetes resources, a load test, and a scenario whose simulation repeats
    the claim.

    Raises:
        OutputError: A folder or file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from error
    made: list[Path] = []
    for asked, plan in zip(questions(scenario), study.plans, strict=True):
        best = [c for c in plan.choices if c.status is Status.RANKED][:top]
        for at, choice in enumerate(best):
            name = _slug(f"{plan.name if len(study.plans) > 1 else ''} {at + 1} {choice.name}")
            _write(folder / name, asked, plan, choice)
            made.append(folder / name)
    return made


def _write(folder: Path, requested: RequestSpec, plan: Plan, choice: Choice) -> None:
    whole = _claimed(settled(requested, choice))
    variant = build(whole)[0]
    backend.write_launch(
        folder,
        variant.deployment,
        name=_slug(choice.name),
        scenario_text=whole.to_toml(),
        workload=variant.workload(whole.run.seed),
        rate_rps=_rate(choice, variant),
        claim=_claim(plan, choice),
    )


def _claimed(complete: Scenario) -> Scenario:
    """Long enough to show the claim, several times, without the time in which the batches fill up."""
    rate = complete.workload.request_rate
    if rate is None:
        return complete.with_run(seeds=max(complete.run.seeds, CLAIM_SEEDS))
    requests = max(complete.workload.num_requests or 0, CLAIM_REQUESTS, math.ceil(rate * CLAIM_S))
    longer = complete if complete.workload.is_replay else _with_requests(complete, requests)
    warmup_s = WARMUP_SHARE * requests / rate if math.isfinite(rate) else 0.0
    return longer.with_run(seeds=max(complete.run.seeds, CLAIM_SEEDS), warmup_s=round(warmup_s, 1))


def _with_requests(complete: Scenario, requests: int) -> Scenario:
    section = complete.workload.model_copy(update={"num_requests": requests})
    return complete.model_copy(update={"workload": section})


def _rate(choice: Choice, variant: Variant) -> float:
    if choice.at is not None:
        return choice.at.rate_rps
    return variant.scenario.workload.request_rate or 1.0


def _claim(plan: Plan, choice: Choice) -> str:
    assert choice.at is not None  # it is ranked
    told = [
        f"{report.metric_text(limit.metric, choice.at.value(limit.metric))} ({report.limit_text(limit)})"
        for limit in plan.limits
    ]
    held = f": {', '.join(told)}" if told else ""
    objective = choice.objective
    half = f" ± {report.rounded(objective.value, objective.half_width)[1]}" if objective.half_width > 0 else ""
    what = plan.objective.label
    return (
        f"Simulated at {choice.at.rate_rps:.4g} requests a second{held}. "
        f"{what[0].upper()}{what[1:]}: {objective.value:,.6g}{half} {plan.objective.unit}, "
        f"on {choice.gpus} GPU{'s' if choice.gpus > 1 else ''} at ${choice.price_per_hour_usd:.2f} an hour"
        f"{_where(choice)}."
    )


def _where(choice: Choice) -> str:
    """That the numbers are of a rate a little below the capacity, which the objective is of."""
    rate = choice.capacity_rps
    if not rate.has_interval:
        return ""
    value, half = report.rounded(rate.value, rate.half_width)
    return f", at its capacity of {value} ± {half}; the run is at the lower end of that"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
