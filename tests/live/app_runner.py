"""An application of two models on real engines, run by the coordinator in a process of its own.

python app_runner.py FOLDER COMMANDS.json: goes on with what is in the folder; says how it ended, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lengthwise.apps.app import App, Call, Loop, Model, Sampling, over
from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.launch import EngineConfig, EngineTimeouts, LocalLauncher
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.run import (
    ClusterPlacer,
    Planned,
    RunPlan,
    RunTasks,
    Settings,
    expected_tokens,
    export,
    job_of,
    run_on_engines,
)
from lengthwise.apps.run.results import RunFolder
from lengthwise.catalog import default_node, gpu
from lengthwise.schema.app import Cluster, Machine, ModelPlan

GPU = "A100-80GB"
"""Stands for a core: what the planner calls GPUs are slots in which an engine runs."""
ROWS = [
    {"topic": topic, "chunks": [f"{topic}, part {k}" for k in range(1 + n % 3)]}
    for n, topic in enumerate(("rivers", "bridges", "boats", "harbours", "maps", "tides"))
]


def application() -> App:
    """A chain over the parts of a text by one model, and a draft that another criticises and the first mends."""
    greedy = Sampling(max_tokens=160, extra={"ignore_eos": True})
    step = "{% if previous %}{{ previous[:80] }} {% endif %}Next {{ item }}."
    return App(
        [Model("writer", "opt-125m"), Model("critic", "opt-125m")],
        [
            Call("summarise", "writer", step, fan=over("chunks"), sampling=greedy, api="completion"),
            Call("critique", "critic", "Of {{ previous.revise or summarise }}", sampling=greedy, api="completion"),
            Call("revise", "writer", "Mend by {{ critique }}", sampling=greedy, api="completion"),
        ],
        [Loop("refine", ("critique", "revise"), 2)],
    )


def main(folder: Path, commands: dict[str, str]) -> int:
    """The run's exit code."""
    expanded = expand(application(), ROWS)
    draws = [draw(expanded.tasks, [None, None], [512, 512], seed) for seed in range(2)]
    spec = gpu(GPU)
    both = tuple(ModelPlan(m, GPU) for m in range(2))
    placer = ClusterPlacer(Cluster((Machine(spec, default_node(spec, 2), 2),)), lambda plan, how: 20.0)
    run_plan = RunPlan((both,))
    work = RunTasks(expanded.tasks, TemplateDecider(expanded), expected_tokens(draws), source_hashes="live")
    job = job_of(work, Planned(run_plan, placer), Settings(save_s=0.5, linger_s=0.05, lease_s=30.0))
    launcher = LocalLauncher(
        [EngineConfig(name, served="m", max_num_seqs=4, command=commands[name]) for name in ("writer", "critic")],
        folder / "logs",
        timeouts=EngineTimeouts(ready_s=180.0, grace_s=5.0),
    )
    place = RunFolder(folder)
    with place.locked(resume=True) as ledger:
        finished = run_on_engines(job, ledger, launcher)
        reported = export(ledger, job.layout, folder / "out", ids=lambda row: str(expanded.ids[row]))
    counts = {state.name: 0 for *_, state in finished.counts}
    for (*_, state), count in finished.counts.items():
        counts[state.name] += count
    print(json.dumps({"how": finished.how, "counts": counts, "files": dict(reported.files)}), flush=True)
    return int(finished.exit_code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
