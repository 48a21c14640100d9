"""Campaigns on real engines of this machine: profile, measure, calibrate, simulate the same, compare.

    python benchmarks/_live.py --out FOLDER [--quick] [--only vllm,transformers] [--again SAVED]

writes records (measured and simulated), profile and rows.json there; --again takes profile and measured records from
an earlier folder (results/live/*). Only rows of frozen code count as blind. vLLM runs on one CPU thread at two settings
and three loads, transformers at three loads, each three times. Errors are of loads that the calibration has not seen.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import _circle
import _continuous
from _circle import BLOCK, Lengths, Run, Setting, Turn, device_of, in_turns, iterations_of, machine_of
from _harness import measured_by, of_measuring, origin, strict_json

from lengthwise import Deployment, Workload, simulate
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.profiles import read_profile, write_profile
from lengthwise.measure import read_records, write_records
from lengthwise.measure.calibration import Calibration, Iterations, read_iterations
from lengthwise.measure.operators import MeasurementSettings, measure_operators
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import EngineError
from lengthwise.schema.profile import Profile
from lengthwise.schema.records import SIMULATED, RunResult
from lengthwise.schema.specs import GpuSpec

WIDE, NARROW = Setting("wide", 32, 2048), Setting("narrow", 8, 256)
FIFO = Setting("fifo", 32, 512)
"""Of transformers: decodes first, then prompts in order of arrival, limited to the step's tokens, as vLLM v1 does."""
SECTIONS = ("vllm", "transformers")


@dataclass(frozen=True)
class Plan:
    """The size of a campaign; ``settings`` are vLLM's, ``fifo`` is transformers'. ``left_s``: time for measuring."""

    size: str = "small"
    settings: tuple[Setting, ...] = (WIDE, NARROW)
    fifo: Setting = FIFO
    dtype: str = "float32"
    max_model_len: int = 1024
    blocks: int = 512
    profile_s: float = 60.0
    static_s: float = 12.0
    seconds: float = 20.0
    repeats: int = 3
    lengths: Lengths = field(default_factory=Lengths)
    least: int = 80
    left_s: Callable[[], float] = lambda: math.inf


@dataclass(frozen=True)
class Split:
    """Runs that a calibration learns from, held-out runs, those it is scored on, uncalibrated costs, and a step log."""

    learnt: Sequence[Run]
    held_out: Sequence[Run]
    scored: Sequence[Run]
    priced: Deployment
    steps: Iterations | None

    def calibrated(self) -> Calibration:
        return _circle.calibrated(self.learnt, self.scored, self.priced, self.steps)


FULL = Plan()
QUICK = Plan(size="tiny", profile_s=20.0, static_s=5.0, seconds=8.0, repeats=1)


def figures(
    _shared: Path, quick: bool, out: Path | None = None, only: Sequence[str] = SECTIONS, *, again: Path | None = None
) -> dict[str, Any]:
    """Return rows by name; ``again`` repeats all but the measurements of an earlier campaign."""
    import _vllm

    plan = QUICK if quick else FULL
    if again is None and importlib.util.find_spec("torch") is None:
        raise FileNotFoundError("no torch to profile this machine with: make torch")
    with tempfile.TemporaryDirectory() as folder:
        place, work = Path(out or Path(folder) / "out").resolve(), Path(folder)
        python, model = ("", None) if again else (_vllm.require(), _vllm.make_model(work / plan.size, plan.size))
        config = model and json.loads((model / "config.json").read_text())
        circle = Circle(place, work, plan, config, again=again, python=python)
        rows: dict[str, Any] = {}
        for section in only:
            rows |= {"vllm": circle.vllm, "transformers": circle.transformers}[section]()
        circle.write(rows)
        return rows


class Circle:
    """One machine's campaign: results in ``out``, weights and logs in ``work``, an earlier campaign in ``again``.

    ``config`` is the model's; ``python`` runs transformers' engine.
    """

    def __init__(
        self,
        out: Path,
        work: Path,
        plan: Plan,
        config: Mapping[str, Any] | None = None,
        *,
        again: Path | None = None,
        device: str = "cpu",
        python: str = "",
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.work, self.plan, self.again, self.device, self.python = out, work, plan, again, device, python
        self.source, self.start, self.model = again.resolve() if again else out, time.monotonic(), work / plan.size
        self.config = str(self.source / f"{plan.size}.json")
        self.measured_by = measured_by(self.source) if again else of_measuring()
        self.runs: list[Run] = []
        path = self.source / "device.json"
        if again:
            known = json.loads(path.read_text())
            self.machine, self.profile = known["machine"], read_profile(self.source / "profile.parquet")
            self.gpu = GpuSpec(**known["gpu"] | {"aliases": tuple(known["gpu"]["aliases"])})
            return
        Path(self.config).write_text(json.dumps(config, indent=1))
        for name in ("*.measured.parquet", "*.simulated.parquet", "profile.points.jsonl", "rows.json"):
            for old in out.glob(name):
                old.unlink()
        self.gpu = device_of(device, plan.dtype)
        self.machine = machine_of(self.gpu, plan.dtype)
        path.write_text(strict_json({"gpu": asdict(self.gpu), "machine": self.machine} | self.measured_by))
        self.profile = self._profiled()

    def report(self, text: str) -> None:
        """Print a line with the seconds since the start, and add it to progress.log."""
        line = f"{time.monotonic() - self.start:6.1f} s  {text}"
        print(line, file=sys.stderr, flush=True)
        with (self.out / "progress.log").open("a") as log:
            log.write(line + "\n")

    def write(self, rows: Mapping[str, Any]) -> None:
        """Complete rows by the code that made them, and write rows.json."""
        for row in rows.values():
            row["details"] |= origin(self.measured_by)
        lines = (strict_json({"name": name} | row) + "\n" for name, row in rows.items())
        (self.out / "rows.json").write_text("".join(lines))
        for name, row in rows.items():
            print(f"{name:44} {row['value']:10.4g} {row['unit']:9} {row.get('target', '')}", flush=True)

    def deployment(self, setting: Setting) -> Deployment:
        plan = self.plan
        return setting.deployment(self.config, self.gpu, plan.max_model_len, plan.blocks, plan.dtype)

    def _profiled(self) -> Profile | None:
        """Return the profile of the device; None where an unattended GPU's fails."""
        plan, cpu = self.plan, self.device == "cpu"
        widest = WIDE if cpu else plan.fifo
        try:
            sizes = {"max_tokens": widest.step_tokens, "max_seqs": widest.seqs, "max_context": plan.max_model_len}
            settings = MeasurementSettings(self.device, plan.dtype, threads=1 if cpu else None, **sizes)
            budget_s, resume = min(plan.profile_s, plan.left_s() / 3), self.out / "profile.points.jsonl"
            model = self.deployment(widest).model
            found = measure_operators(model, settings, budget_s=budget_s, resume=None if cpu else resume)
        except Exception:
            if cpu:
                raise
            self.report(f"no profile, the roofline replaces it: {traceback.format_exc()}")
            return None
        finally:  # frees the memory of the profile; the engine, another process, allocates its own
            gc.collect()
            if not cpu:
                import torch

                with contextlib.suppress(RuntimeError):  # a GPU that broke for this process alone
                    torch.cuda.empty_cache()
        write_profile(found.profile, self.out / "profile.parquet")
        self.report("; ".join((f"profile of {len(found.profile)} points", *found.profile.metadata.notes)))
        return found.profile

    def tables(self, d: Deployment) -> CostTables:
        if self.profile is None:
            return d.cost
        return fit_profile(self.profile, Target(d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len))[0]

    def vllm(self) -> dict[str, Any]:
        """Measure both settings, engines up at once (an idle one sleeps) and loads in turns; return the rows."""
        import _vllm

        if self.again:
            self.runs = [run for setting in self.plan.settings for run in self.saved_runs(setting)]
        else:
            with contextlib.ExitStack() as engines:
                self.runs, turns = [], []
                for setting in self.plan.settings:
                    d, log = self.deployment(setting), self.work / f"vllm-{setting.name}.log"
                    engine = engines.enter_context(_vllm.served(d, self.model, log))
                    self.report(f"vLLM ready after {engine.ready_after_s:.0f} s")
                    where = (engine.url, self.model.name, log, engine.process.pid, self.out)
                    watched = _vllm.Watched(*where, deployment=_circle.facts_of(d))
                    turns.append(self.turn(setting, watched.bench, watched.named))
                in_turns(turns, self.plan.repeats, self.report)
        return self._comparison("fidelity.live", self.plan.settings[0])

    def transformers(self, prefix: str = "fidelity.live_transformers") -> dict[str, Any]:
        """Measure one setting of transformers' continuous batching, in a process that feeds itself; return the rows."""
        plan = self.plan
        if self.again:
            self.runs = self.saved_runs(plan.fifo)
        else:
            base = self.deployment(plan.fifo)
            flags = {"device": self.device, "dtype": plan.dtype, "batch-tokens": plan.fifo.step_tokens}
            flags |= {"seqs": plan.fifo.seqs, "blocks": plan.blocks, "block-size": BLOCK}
            # compiles the simulator while the engine starts, so that the end does not wait for it
            first = plan.lengths.workload(4, 0, None, "compile")
            compiling = threading.Thread(target=simulate, args=(first, base), daemon=True)
            compiling.start()

            def bench(workload: Workload) -> RunResult:
                measured = engine.run(workload, plan.left_s() + 20.0)  # of the time for the end
                return replace(measured, metadata={**measured.metadata, "deployment": _circle.facts_of(base)})

            self.runs = []
            try:
                with _continuous.started(self.python, Path(self.config), flags, plan.left_s()) as engine:
                    self.report(f"{engine.metadata['engine']} on {engine.metadata['device']}")
                    compiling.join()
                    in_turns([self.turn(plan.fifo, bench)], plan.repeats, self.report)
            except EngineError as error:
                if self.device == "cpu":
                    raise
                self.report(f"the engine exited early: {error}")
        return self._comparison(prefix, plan.fifo)

    def saved_runs(self, setting: Setting) -> list[Run]:
        """Return the runs of a setting in the folder: each round of its loads, one after the other."""
        found = []
        for path in self.source.glob(f"{setting.name}-*.measured.parquet"):
            name, load, repeat = path.name.split(".")[0].split("-")
            found.append(Run(name, load, int(repeat), read_records(path)))
        return sorted(found, key=lambda run: (run.repeat, list(_circle.LOADS).index(run.load)))

    def turn(
        self, setting: Setting, bench: Callable[[Workload], RunResult], noted: Callable[[str], None] = lambda _: None
    ) -> Turn:
        """Return a setting's turns, whose runs are written as they come."""

        def named(run: Run) -> None:
            write_records(run.measured, self.out / f"{run.name}.measured.parquet")
            self.runs.append(run)
            noted(run.name)

        plan = self.plan
        return Turn(setting, bench, named, plan.lengths, plan.static_s, plan.seconds, plan.least, plan.left_s)

    def split(self, runs: Sequence[Run], first: Setting) -> Split:
        """Return the runs that a calibration of the first setting learns from, and those held out."""
        learnt = [run for run in runs if run.setting == first.name and run.load in _circle.LEARNT]
        held_out = [run for run in runs if run not in learnt]
        base = self.deployment(first)
        logs = [iterations_of(self.source, run.name) for run in learnt if run.load == "half"]
        scored = [run for run in held_out if run.setting == first.name]
        steps = read_iterations(logs[0]) if logs and logs[0].exists() else None
        return Split(learnt, held_out, scored, replace(base, cost=self.tables(base)), steps)

    def _comparison(self, prefix: str, first: Setting) -> dict[str, Any]:
        runs, settings = self.runs, {s.name: s for s in (*self.plan.settings, self.plan.fifo)}
        split, started_s = self.split(runs, first), time.monotonic()
        if not split.learnt or not split.held_out:
            self.report("there are too few runs to calibrate and to evaluate")
            return {}
        calibration = split.calibrated()
        duration_s, tables = time.monotonic() - started_s, calibration.tables
        self.report(f"calibrated on {len(split.learnt)} runs in {duration_s:.1f} s")
        errors: dict[str, dict[str, dict[str, float]]] = {"calibrated": {}, "profile": {}, "roofline": {}}
        answers, priced = {}, {}
        for name in dict.fromkeys(run.setting for run in runs):
            own, d = [run for run in runs if run.setting == name], self.deployment(settings[name])
            priced[name] = replace(d, cost=tables)
            for kind, cost in {"calibrated": tables, "profile": self.tables(d), "roofline": d.cost}.items():
                errors[kind] |= _circle.errors(d, cost, own)
            for run in own:
                answers[run.name] = records = _circle.simulated(priced[name], run)
                of = RunResult(records, run.measured.workload, SIMULATED, {"of": run.name})
                write_records(of, self.out / f"{run.name}.simulated.parquet")
        found = _circle.rows(prefix, errors, runs, split.held_out, answers)
        if self.device == "cpu":  # a budget has no time for it
            blind = replace(split, scored=[]).calibrated().tables.evidence.errors
            found[f"{prefix}.interval_coverage"] = _circle.coverage_row(priced, blind, split.held_out)
        row = _circle.calibration_row(calibration, duration_s, split.learnt, runs, {"machine": self.machine})
        return found | {f"{prefix}.calibration": row}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="folder for records and rows")
    options.add_argument("--quick", action="store_true", help="a smaller model, shorter runs, once each")
    options.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    options.add_argument("--again", type=Path, help="measure nothing: use the runs of this folder")
    args = options.parse_args()
    figures(args.out, args.quick, args.out, args.only.split(","), again=args.again)


if __name__ == "__main__":
    main()
