"""Estimate against reality: three small models on this machine's CPU, profiled, planned and run by the command line.

Each question goes to one of three models, which answers until it happens to say a letter: how long that takes, only a
sample tells. What is kept in LENGTHWISE_APPS_LIVE (a folder) is not measured again.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from _vllm import require

EXAMPLES = Path(__file__).parents[1] / "examples" / "apps"
RETAINED = os.environ.get("LENGTHWISE_APPS_LIVE", "")
ROWS, SAMPLE, QUICK_ROWS = 180, 90, 24
"""Questions that are run, and others whose answers tell how long answers are."""
MODELS = ("alder", "birch", "cedar")
"""5, 27 and 84 million parameters."""
SEATS = {"alder": 4, "birch": 8, "cedar": 8}
"""The smallest answers so quickly that a client of eight at once on the same cores would measure itself."""
LONGEST, ENDS = 160, "q"
REPEATS, STARTS = 5, 2
TRIES = 3
"""Of the profile: it measures again what a busy machine spoiled, and nothing else."""
BUSY, LOAD = 3.0, "load.json"
"""Load of the machine at a run's end (mean of a minute) above which others were at work: told, and not counted.

It is fixed before runs are measured, and rows hold it.
"""
CORES = (1, 2)
"""Models after one another on one core, and two at a time on two."""

APP = """\
name = "routed (live)"

[inputs]
file = "{rows}"

[calls.answer]
model_from = "model"
api = "completion"
prompt = "Question: {{{{ question }}}}\\nAnswer:"
max_tokens = {longest}
temperature = 1.0
stop = ["{ends}"]
{known}
{models}
[cluster]
nodes = ["{cores}x{examples}/core.toml"]

[run.environment]
HF_HUB_OFFLINE = "1"
VLLM_NO_USAGE_STATS = "1"
VLLM_DO_NOT_TRACK = "1"
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_CACHE_ROOT = "{place}/cache"
OMP_NUM_THREADS = "1"
KMP_BLOCKTIME = "0"
"""
MODEL = """
[models.{name}]
model = "{examples}/models/{name}.json"
weights = "{place}/models/{name}"
weight_dtype = "float32"
kv_dtype = "float32"
max_model_len = 1024
engine = {{ max_num_seqs = {seats} }}

[run.engines.{name}]
command = \"\"\"{python} -m vllm.entrypoints.openai.api_server --model {{weights}} --served-model-name {{name}} \\
    --host {{host}} --port {{port}} --dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs {seats} \\
    --generation-config vllm --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor\"\"\"
seats = {seats}
"""


@dataclass(frozen=True)
class Place:
    """Where everything of a measurement lies.

    Attributes:
        folder: All of it.
        rows: So many questions are run.
    """

    folder: Path
    rows: int = ROWS

    def app(self, rows: str, cores: int, *, known: bool = False) -> Path:
        """The application's file over these rows."""
        words = {"examples": EXAMPLES, "place": self.folder}
        models = "".join(
            MODEL.format(name=name, max_num_seqs=max_num_seqs, python=require(), **words)
            for name, max_num_seqs in SEATS.items()
        )
        path = self.folder / f"{rows}-{cores}{'-known' if known else ''}.toml"
        path.write_text(
            APP.format(
                rows=f"{rows}.csv", longest=LONGEST, ends=ENDS, cores=cores, models=models,
                known='known_tokens = "tokens"' if known else "", **words,
            )
        )  # fmt: skip
        return path

    def write(self, name: str, questions: Sequence[str], tokens: Sequence[int]) -> None:
        """Rows: who is asked what, and how long the answer is where that is known."""
        with (self.folder / f"{name}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(("model", "question", "tokens"))
            out.writerows(
                (MODELS[n % len(MODELS)], one, tokens[n] if tokens else "") for n, one in enumerate(questions)
            )

    def command(self, *words: str | Path) -> None:
        """One of ours, as a user gives it."""
        command = [sys.executable, "-m", "lengthwise.cli", "app", *map(str, words)]
        with (self.folder / "said.log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=900)


def prepared(place: Place) -> None:
    """Models, questions, and the profile: switches, lengths and costs by one command."""
    if not (place.folder / "models" / MODELS[-1]).exists():
        words = [require(), str(EXAMPLES / "make_models.py"), str(place.folder / "models")]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    sample = SAMPLE if place.rows == ROWS else QUICK_ROWS
    place.write("run", questions[: place.rows], ())
    place.write("sample", questions[-sample:], ())
    app, out = place.app("sample", 1), place.folder / "profile"
    for _ in range(TRIES):
        place.command("profile", app, "--out", out, "--rows", str(sample), "--times", str(STARTS), "--calibrate")
        if len(json.loads((out / "profile.json").read_text())["costs"]) == len(MODELS):
            return


def planned(place: Place, app: Path, name: str) -> dict[str, Any]:
    """The plan of an application under the profile, now or before."""
    path = place.folder / f"{name}.plan.json"
    if not path.exists():
        place.command(
            "plan", app, "--profile", place.folder / "profile", "--no-what-if", "--draws", "4", "--json", path
        )
    return dict(json.loads(path.read_text()))


def ran(place: Place, app: Path, name: str, repeat: int) -> dict[str, Any]:
    """The manifest of a run by the plan of that name, now or before."""
    out = place.folder / f"{name}-{repeat}"
    if not (out / "manifest.json").exists():
        plan = place.folder / f"{name}.plan.json"
        place.command("run", app, "--profile", place.folder / "profile", "--plan", plan, "--out", out)
        (out / LOAD).write_text(json.dumps(os.getloadavg()[0]))
    return dict(json.loads((out / "manifest.json").read_text()))


def case(place: Place, cores: int, *, known: bool, repeats: int) -> dict[str, Any]:
    """Seconds estimated before, and measured."""
    name = f"{cores}-{'known' if known else 'unknown'}"
    app = place.app("known" if known else "run", cores, known=known)
    plan = planned(place, app, name)
    runs = [ran(place, app, name, k) for k in range(repeats)]
    loads = [json.loads((place.folder / f"{name}-{k}" / LOAD).read_text()) for k in range(repeats)]
    estimate = plan["makespan"]["value"]
    errors = [estimate / one["seconds"] - 1 for one in runs]
    quiet = [k for k in range(repeats) if loads[k] <= BUSY]
    return {
        "cores": cores,
        "estimate_s": estimate,
        "estimate_half_width_s": plan["makespan"]["half_width"],
        "measured_s": [runs[k]["seconds"] for k in quiet],
        "errors": [errors[k] for k in quiet],
        "busy": [(runs[k]["seconds"], errors[k]) for k in range(repeats) if k not in quiet],
        "loads": loads,
        "busy_above": BUSY,
        "holds_stops": True,
        "starts_s": {model: _starts(place, model) for model in MODELS},
        "plan": [[f"{each['model']} x{each['dp']}" for each in stage] for stage in runs[0]["plan"]],
        "spans": plan["spans"],
        "events": [one["events"] for one in runs],
        "tokens": plan["tokens"],
    }


def _starts(place: Place, model: str) -> Any:
    book = json.loads((place.folder / "profile" / "profile.json").read_text())
    return [one for one in book.get("switches", ()) if one["model"] == model]


def lengths_of(run: Path) -> list[int]:
    """Output tokens of each row, as that run had them."""
    with (run / "outputs.jsonl").open() as file:
        return [int(json.loads(line)["output_tokens"]) for line in file]


def measured(place: Place, cores: Sequence[int], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Cases with unknown lengths, then with those that the first run had: requests' seeds are the tasks' own."""
    prepared(place)
    unknown = [case(place, n, known=False, repeats=repeats) for n in cores]
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines][: place.rows]
    place.write("known", questions, lengths_of(place.folder / f"{cores[0]}-unknown-0"))
    known = [case(place, n, known=True, repeats=repeats) for n in cores]
    return {"unknown": unknown, "known": known}


def row(cases: Sequence[dict[str, Any]], paper: str, description: str) -> dict[str, Any]:
    """Mean absolute error of the estimate over all runs; the interval is Student's, over runs."""
    from scipy.special import stdtrit

    each = [abs(error) for one in cases for error in one["errors"]]
    half = float(stdtrit(len(each) - 1, 0.975) * np.std(each, ddof=1) / math.sqrt(len(each))) if len(each) > 1 else 0.0
    value = mean(each)
    return {
        "value": value,
        "ci": (max(value - half, 0.0), value + half) if half else None,
        "details": {"lengths": description, "paper": paper, "cases": list(cases)},
    }  # fmt: skip


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Errors of makespans with unknown and with known lengths."""
    require()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(RETAINED or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder, QUICK_ROWS if fast else ROWS)
        found = measured(place, CORES[:1] if fast else CORES, 1 if fast else REPEATS)
    return {
        "apps.estimate_error_live": row(found["unknown"], "6.5 % to 38.7 %, mean 25.6 %", "of a sample"),
        "apps.estimate_error_live_known": row(found["known"], "9.2 % to 20.5 %, mean 17 %", "known beforehand"),
    }
