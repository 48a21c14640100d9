"""Makespans estimated and measured: three small models on this machine's CPU, profiled, planned and run by the CLI.

Each question goes to one of three models, which answers until it happens to generate a letter: only a sample shows how
long that takes. What is saved in LENGTHWISE_APPS_LIVE (a folder) is not measured again.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _vllm import require

from lengthwise.statistics import mean_estimate

EXAMPLES = Path(__file__).parents[1] / "examples" / "apps"
SAVED = os.environ.get("LENGTHWISE_APPS_LIVE", "")
ROWS, SAMPLE, QUICK_ROWS = 180, 90, 24
"""Questions that are run, and others for the profile of lengths."""
MODELS = {"alder": 4, "birch": 8, "cedar": 8}
"""Models of 5, 27 and 84 million parameters by ``max_num_seqs``; with 8 the client would limit the smallest one."""
REPEATS, PROFILE_TRIES = 5, 3
BUSY_LOAD = 3.0
"""Load average at the end of a run above which other programs ran: reported, not counted. Fixed before measuring."""

APP = """\
name = "routed (live)"

[inputs]
file = "{rows}.csv"

[calls.answer]
model_from = "model"
api = "completion"
prompt = "Question: {{{{ question }}}}\\nAnswer:"
max_tokens = 160
temperature = 1.0
stop = ["q"]
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
VLLM_CACHE_ROOT = "{folder}/cache"
OMP_NUM_THREADS = "1"
KMP_BLOCKTIME = "0"
"""
MODEL = """
[models.{name}]
model = "{examples}/models/{name}.json"
weights = "{folder}/models/{name}"
weight_dtype = "float32"
kv_dtype = "float32"
max_model_len = 1024
engine = {{ max_num_seqs = {max_num_seqs} }}

[run.engines.{name}]
command = \"\"\"{python} -m vllm.entrypoints.openai.api_server --model {{weights}} --served-model-name {{name}} \\
    --host {{host}} --port {{port}} --dtype float32 --enforce-eager --max-model-len 1024 \\
    --max-num-seqs {max_num_seqs} --generation-config vllm \\
    --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor\"\"\"
max_num_seqs = {max_num_seqs}
"""


@dataclass(frozen=True)
class Measurement:
    """The folder of a measurement, and how many questions it runs."""

    folder: Path
    rows: int

    def app(self, rows: str, cores: int, *, known: bool = False) -> Path:
        """Write the application's file over some rows."""
        paths = {"examples": EXAMPLES, "folder": self.folder}
        models = "".join(
            MODEL.format(name=name, max_num_seqs=max_num_seqs, python=require(), **paths)
            for name, max_num_seqs in MODELS.items()
        )
        line = 'known_tokens = "tokens"' if known else ""
        path = self.folder / f"{rows}-{cores}{'-known' if known else ''}.toml"
        path.write_text(APP.format(rows=rows, cores=cores, models=models, known=line, **paths))
        return path

    def write_rows(self, name: str, questions: Sequence[str], tokens: Sequence[int] = ()) -> None:
        """Write the model of each question, and the length of its answer where it is known."""
        with (self.folder / f"{name}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(("model", "question", "tokens"))
            names = list(MODELS)
            for n, question in enumerate(questions):
                out.writerow((names[n % len(names)], question, tokens[n] if tokens else ""))

    def command(self, *words: str | Path) -> None:
        """Run ``lengthwise app``."""
        with (self.folder / "commands.log").open("a") as log:
            command = [sys.executable, "-m", "lengthwise.cli", "app", *map(str, words)]
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=900)

    def profile(self, sample: int) -> None:
        """Make the models and measure switches, lengths and costs; a retry measures only what other load spoiled."""
        if not (self.folder / "models" / "cedar").exists():
            words = [require(), str(EXAMPLES / "make_models.py"), str(self.folder / "models")]
            subprocess.run(words, check=True, capture_output=True, timeout=300)
        app, out = self.app("sample", 1), self.folder / "profile"
        for _ in range(PROFILE_TRIES):
            self.command("profile", app, "--out", out, "--rows", str(sample), "--times", "2", "--calibrate")
            if len(json.loads((out / "profile.json").read_text())["costs"]) == len(MODELS):
                return

    def case(self, cores: int, repeats: int, *, known: bool) -> dict[str, Any]:
        """Plan an application and run it; return estimated and measured seconds."""
        name, profile = f"{cores}-{'known' if known else 'unknown'}", self.folder / "profile"
        app, path = self.app("known" if known else "run", cores, known=known), self.folder / f"{name}.plan.json"
        if not path.exists():
            self.command("plan", app, "--profile", profile, "--no-what-if", "--draws", "4", "--json", path)
        plan = json.loads(path.read_text())
        estimate_s, runs = plan["makespan"]["value"], []
        for repeat in range(repeats):
            out = self.folder / f"{name}-{repeat}"
            if not (out / "manifest.json").exists():
                self.command("run", app, "--profile", profile, "--plan", path, "--out", out)
                (out / "load.json").write_text(json.dumps(os.getloadavg()[0]))
            load = json.loads((out / "load.json").read_text())
            runs.append(json.loads((out / "manifest.json").read_text()) | {"load": load})
        pairs = [(run["seconds"], estimate_s / run["seconds"] - 1) for run in runs]
        quiet = [pair for pair, run in zip(pairs, runs, strict=True) if run["load"] <= BUSY_LOAD]
        return {
            "cores": cores,
            "estimate_s": estimate_s,
            "estimate_half_width_s": plan["makespan"]["half_width"],
            "measured_s": [seconds for seconds, _ in quiet],
            "errors": [error for _, error in quiet],
            "busy": [pair for pair, run in zip(pairs, runs, strict=True) if run["load"] > BUSY_LOAD],
            "loads": [run["load"] for run in runs],
            "plan": [[f"{each['model']} x{each['dp']}" for each in stage] for stage in runs[0]["plan"]],
            "events": [run["events"] for run in runs],
        }


def figures(_: Path, quick: bool) -> dict[str, Any]:
    """Return errors of makespans with unknown lengths, then with those of the first run (requests have seeds)."""
    require()
    rows, sample = (QUICK_ROWS, QUICK_ROWS) if quick else (ROWS, SAMPLE)
    repeats, cores = (1, (1,)) if quick else (REPEATS, (1, 2))  # one model at a time, or two
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    with tempfile.TemporaryDirectory() as scratch:
        place = Measurement(Path(SAVED or scratch).resolve(), rows)
        place.folder.mkdir(parents=True, exist_ok=True)
        place.write_rows("run", questions[:rows])
        place.write_rows("sample", questions[-sample:])
        place.profile(sample)
        unknown = [place.case(n, repeats, known=False) for n in cores]
        outputs = (place.folder / f"{cores[0]}-unknown-0" / "outputs.jsonl").read_text("utf-8").splitlines()
        place.write_rows("known", questions[:rows], [int(json.loads(line)["output_tokens"]) for line in outputs])
        known = [place.case(n, repeats, known=True) for n in cores]
    return {
        "apps.estimate_error_live": _error_row(unknown, "6.5 % to 38.7 %, mean 25.6 %"),
        "apps.estimate_error_live_known": _error_row(known, "9.2 % to 20.5 %, mean 17 %"),
    }


def _error_row(cases: Sequence[dict[str, Any]], paper: str) -> dict[str, Any]:
    """Return the mean absolute error over all runs that count, with Student's t interval."""
    error = mean_estimate([abs(one) for case in cases for one in case["errors"]])
    ci = (max(error.low, 0.0), error.high) if error.has_interval else None
    return {"value": error.value, "ci": ci, "details": {"paper": paper, "cases": list(cases)}}
