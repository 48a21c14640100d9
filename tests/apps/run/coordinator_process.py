"""A run in a process of its own, to be killed: coordinator_process.py FOLDER [KEY=VALUE...]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def main():
    from engines_world import chained, job_of, local, plan

    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import RESUME, run_here

    folder, options = Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
    job = job_of(chained(), [(plan(0), plan(1))])
    launcher = local(folder, ("m0", "m1"), more=options.get("more", "--fixed-s 0.05"))

    def watch(progress):
        pids = [process.local.process.pid for _, process, _ in launcher._running.values()]
        row = {
            "pids": pids,
            "done": sum(one.ended for one in progress.models),
            "going": sum(m.going for m in progress.models),
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    with open_ledger(folder / "ledger.sqlite") as ledger:
        ended = run_here(job, ledger, launcher, watch=watch, watch_s=0.02)
    if ended.exit_code == 130:
        sys.stdout.write(RESUME + "\n")
    raise SystemExit(ended.exit_code)


if __name__ == "__main__":
    main()
