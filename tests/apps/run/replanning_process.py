"""A run that is replanned, in a process of its own: replanning_process.py FOLDER here|virtual."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

COUNTS, MEANS = (300, 300), (100, 100)
PLANNING, PLANNED = "is planned anew", "was planned anew"


def parts():
    """The job, which is late from the start on, and its engines."""
    from test_replanning import LONGEST, Geometric, planned

    from lengthwise.apps.launch import Lengths, SimulatedLauncher
    from lengthwise.apps.plan.draws import draw
    from lengthwise.apps.run import (
        ClusterPlacer,
        DrawDecider,
        Planned,
        RunTasks,
        Settings,
        expected_tokens,
        job_of,
        run_plan_of,
    )
    from lengthwise.apps.run.replanning import Replanner

    tasks, draws, space, made = planned(COUNTS, MEANS)
    lengths, longest = [Geometric(mean) for mean in MEANS], [LONGEST] * len(MEANS)
    comes = draw(tasks, lengths, longest, (2, 0))
    run_plan = replace(run_plan_of(made), ends_s=tuple(0.4 + 0.001 * k for k in range(len(made.planned))))
    work = RunTasks(tasks, DrawDecider(tasks, comes), expected_tokens(draws), "late")
    seconds = lambda plan, how: 0.1 if how == "start" else 0.0  # noqa: E731
    job = job_of(work, Planned(run_plan, ClusterPlacer(space.cluster, seconds)), Settings(save_s=0.1, lease_s=5.0))
    anew = Replanner(job.layout.tasks, lengths, longest, space, made.planned, made.reserve)
    launcher = SimulatedLauncher(tasks.models, space.deployment, Lengths.of(tasks, comes), seconds)
    return replace(job, replan=anew), launcher


def say(what):
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def main():
    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import run_on_engines, run_simulated

    folder, way = Path(sys.argv[1]), sys.argv[2]
    job, launcher = parts()

    def anew(deviation):
        say(PLANNING)
        time.sleep(2.0 if way == "virtual" else 60.0)
        found = job.replan(deviation)
        say(PLANNED)
        return found

    with open_ledger(folder / "ledger.sqlite") as ledger:
        run = run_on_engines if way == "current" else run_simulated
        try:
            finished = run(replace(job, replan=anew), ledger, launcher)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    raise SystemExit(finished.exit_code)


if __name__ == "__main__":
    main()
