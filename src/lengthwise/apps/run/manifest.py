"""What a run was, as facts that a file can hold."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.run.contracts import Job
from lengthwise.apps.run.ending import Ended
from lengthwise.apps.run.exporting import Exported


def manifest(
    job: Job,
    ended: Ended,
    exported: Exported,
    *,
    app: str,
    inputs: str,
    models: Mapping[str, str],
) -> dict[str, Any]:
    """Counts, hashes, versions, the plan and how long it took.

    Args:
        job: That ran.
        ended: How.
        exported: What was written.
        app: SHA-256 of the application.
        inputs: SHA-256 of its inputs.
        models: Revision or weights of each model, by name.
    """
    names = job.layout.tasks.models
    return {
        "how": ended.how,
        "error": ended.error or None,
        "resumed": ended.resumed,
        "reused": None if ended.reused is None else asdict(ended.reused),
        "counts": counts(job, ended),
        "answers": exported.answers,
        "dead": exported.dead,
        "sha256": {"app": app, "inputs": inputs, **exported.files},
        "identity": job.identity,
        "versions": {"lengthwise": version("lengthwise"), "python": platform.python_version()},
        "models": dict(models),
        "engines": {names[model]: list(abouts) for model, abouts in ended.engines.items()},
        "plan": [
            [{**asdict(plan), "model": names[plan.model]} for plan in stage] for stage in job.guide.stages
        ],
        "seconds": round(ended.seconds, 3),
        "silent": [
            {**asdict(one), "model": names[one.model], "words": one.words(names[one.model])}
            for one in ended.silent
        ],
        "events": [
            {**asdict(event), "model": names[event.model] if event.model >= 0 else None}
            for event in ended.events
        ],
    }


def counts(job: Job, ended: Ended) -> dict[str, dict[str, int]]:
    """Tasks by call and state, with all of them under "all"."""
    found: dict[str, dict[str, int]] = {"all": {}}
    for (call, _, state), tasks in sorted(ended.counts.items()):
        for name in (job.layout.tasks.calls[call], "all"):
            states = found.setdefault(name, {})
            states[State(state).name.lower()] = states.get(State(state).name.lower(), 0) + tasks
    return found
