"""A run in a process of its own, to be killed: coordinator_process.py FOLDER [KEY=VALUE...]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]


def local_pids(launcher):
    return [process.local.process.pid for _, process, _ in launcher.running.values()]


def on_ray(folder, address):
    from engines_world import SERVER

    from lengthwise.apps.launch import EngineConfig, EngineTimeouts
    from lengthwise.apps.launch.ray import RayLauncher

    loaded = [
        EngineConfig(name, served=name, max_num_seqs=4, command=f"{SERVER} --fixed-s 0.05") for name in ("m0", "m1")
    ]
    return RayLauncher(loaded, folder / "logs", address, timeouts=EngineTimeouts(ready_s=60.0, grace_s=3.0))


def ray_pids(launcher):
    """Of engines that run and of their actors."""
    import os

    import ray

    def both(retained):
        return retained.process.local.process.pid, os.getpid()

    actors = [one.actor for one in list(launcher.running.values())]
    found = ray.get([one.__ray_call__.remote(both) for one in actors])
    return [pid for pair in found for pid in pair]


def main():
    from engines_world import chained, job_of, local, plan

    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import RESUME, run_on_engines

    folder, options = Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
    job = job_of(chained(), [(plan(0), plan(1))])
    command = {}
    if "stubborn" in options:
        command["command"] = f"{options['stubborn']} --host {{host}} --port {{port}} --model {{name}}"
    launcher = (
        on_ray(folder, options["ray"])
        if "ray" in options
        else local(folder, ("m0", "m1"), more=options.get("more", "--fixed-s 0.05"), **command)
    )

    def stopping(times):
        sys.stdout.write(f"stopped {times}\n")
        sys.stdout.flush()

    def watch(progress):
        done = sum(one.completed for one in progress.models)
        written = progress.share * float(job.expected_tokens.sum()) - done * float(job.expected_tokens.mean())
        pids = ray_pids(launcher) if "ray" in options else local_pids(launcher)
        row = {"pids": pids, "done": done, "active": sum(m.active for m in progress.models), "written": round(written)}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    with open_ledger(folder / "ledger.sqlite") as ledger:
        finished = run_on_engines(job, ledger, launcher, monitor=watch, watch_s=0.02, stopping=stopping)
    if finished.exit_code == 130:
        sys.stdout.write(RESUME + "\n")
    raise SystemExit(finished.exit_code)


if __name__ == "__main__":
    main()
