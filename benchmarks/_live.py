"""Campaigns on real engines of this machine: profile, measure, calibrate, simulate the same, compare.

    python benchmarks/_live.py --out FOLDER [--quick] [--only vllm,transformers] [--again SAVED]

writes each run's records (measured and simulated), the profile and rows.json there; --again takes profile and
measured records from an earlier folder (results/live/vllm, results/live/transformers) and repeats the rest. Rows state
the hashes of the code that measured and that made them: only those of frozen code count as blind. vLLM runs on one CPU
thread at two settings and three loads, transformers' continuous batching at three loads, each three times. The
calibration sees the static and the half load of one setting; errors are of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import _circle
import _circle_rows
import _continuous
import _vllm
from _circle import BLOCK, Lengths, Run, Setting, Turn, in_turns, machine_of, this_thread
from _harness import measured_by, of_measuring, origin, strict_json

from lengthwise import Deployment, Workload
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import read_profile, write_profile
from lengthwise.measure import read_records, write_records
from lengthwise.measure.calibration import Calibration, Iterations, read_iterations
from lengthwise.measure.operators import measure_profile
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.profile import Profile
from lengthwise.schema.records import Measured
from lengthwise.schema.specs import GpuSpec

MAX_MODEL_LEN, BLOCKS = 1024, 512
WIDE, NARROW = Setting("wide", 32, 2048), Setting("narrow", 8, 256)
FIFO = Setting("fifo", 32, 512)
"""Of transformers: decodes first, then prompts in order of arrival, cut to the step's tokens, as vLLM v1 does."""
SECTIONS = ("vllm", "transformers")


@dataclass(frozen=True)
class Plan:
    """The size of a campaign."""

    size: str = "small"
    settings: tuple[Setting, ...] = (WIDE, NARROW)
    profile_s: float = 60.0
    static_s: float = 12.0
    seconds: float = 20.0
    repeats: int = 3
    lengths: Lengths = field(default_factory=Lengths)


@dataclass(frozen=True)
class Split:
    """Runs that a calibration learns from, held-out runs, those it is scored on, uncalibrated costs, and a step log."""

    learnt: Sequence[Run]
    held_out: Sequence[Run]
    scored: Sequence[Run]
    priced: Deployment
    steps: Iterations | None

    def calibrated(self) -> Calibration:
        """Calibrate the costs to the runs to learn from."""
        return _circle.calibrated(self.learnt, self.scored, self.priced, self.steps)


FULL = Plan()
QUICK = Plan(size="tiny", profile_s=20.0, static_s=5.0, seconds=8.0, repeats=1)


def figures(
    _shared: Path, quick: bool, out: Path | None = None, only: Sequence[str] = SECTIONS, *, again: Path | None = None
) -> dict[str, Any]:
    """Return rows by name."""
    if again is None:
        _vllm.require()
        if importlib.util.find_spec("torch") is None:
            raise FileNotFoundError("no torch to profile this machine with: make torch")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(out) if out else Path(folder) / "out"
        place.mkdir(parents=True, exist_ok=True)
        circle = Circle(place.resolve(), Path(folder), QUICK if quick else FULL, again=again)
        rows: dict[str, Any] = {}
        for section in only:
            rows |= {"vllm": circle.vllm, "transformers": circle.transformers}[section]()
        made = origin(circle.measured_by)
        for row in rows.values():
            row["details"] |= made
        (place / "rows.json").write_text("".join(strict_json({"name": n} | row) + "\n" for n, row in rows.items()))
        return rows


class Circle:
    """One machine's campaign: results in ``out``, weights and logs in ``work``, an earlier campaign in ``again``."""

    def __init__(self, out: Path, work: Path, plan: Plan, *, again: Path | None = None) -> None:
        self.out, self.work, self.plan, self.again = out, work, plan, again
        self.source = again.resolve() if again else out
        self.start = time.monotonic()
        self.model, config = work / plan.size, self.source / f"{plan.size}.json"
        if not again:
            _vllm.make_model(self.model, plan.size)
            shutil.copyfile(self.model / "config.json", config)
        self.config = str(config)
        self.measured_by = measured_by(self.source) if again else of_measuring()
        self.gpu, self.machine = self._device()
        self.profile = self._profiled()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _device(self) -> tuple[GpuSpec, dict[str, Any]]:
        """Return the device and the machine's facts at the time when its runs were measured."""
        path = self.source / "device.json"
        if self.again:
            known = json.loads(path.read_text())
            return GpuSpec(**known["gpu"] | {"aliases": tuple(known["gpu"]["aliases"])}), known["machine"]
        gpu = this_thread()
        path.write_text(strict_json({"gpu": asdict(gpu), "machine": machine_of(gpu)} | self.measured_by))
        return gpu, machine_of(gpu)

    def deployment(self, setting: Setting) -> Deployment:
        """Return the deployment of a setting with the roofline's costs."""
        return setting.deployment(self.config, self.gpu, MAX_MODEL_LEN, BLOCKS)

    def _profiled(self) -> Profile:
        if self.again:
            return read_profile(self.source / "profile.parquet")
        profile = measure_profile(
            self.deployment(WIDE).model,
            device="cpu",
            dtype="float32",
            threads=1,
            budget_s=self.plan.profile_s,
            max_tokens=WIDE.step_tokens,
            max_seqs=WIDE.seqs,
            max_context=MAX_MODEL_LEN,
        )
        write_profile(profile, self.out / "profile.parquet")
        self.say(f"profile of {len(profile)} points")
        return profile

    def tables(self, d: Deployment) -> CostTables:
        """Return the tables of the profile alone."""
        return fit_profile(self.profile, d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len)[0]

    def vllm(self) -> dict[str, Any]:
        """Measure both settings, engines up at once (an idle one sleeps) and loads in turns; return the rows."""
        notes: dict[str, Any] = {}
        if self.again:
            runs = [run for setting in self.plan.settings for run in self.saved_runs(setting)]
        else:
            with contextlib.ExitStack() as engines:
                turns = []
                for setting in self.plan.settings:
                    d, log = self.deployment(setting), self.work / f"vllm-{setting.name}.log"
                    engine = engines.enter_context(_vllm.served(d, self.model, log))
                    self.say(f"vLLM ready after {engine.ready_after_s:.0f} s")
                    where = (engine.url, self.model.name, log, engine.process.pid, notes, self.out)
                    watched = _vllm.Watched(*where, deployment=_circle.facts_of(d))
                    turns.append(self.turn(setting, watched.bench, watched.named))
                runs = in_turns(turns, self.plan.repeats, self.say)
        return self._comparison("fidelity.live", runs, self.plan.settings[0], self._recorded("vllm", notes))

    def transformers(self) -> dict[str, Any]:
        """Measure one setting of transformers' continuous batching, in a process that feeds itself; return the rows."""
        notes: dict[str, Any] = {}
        if self.again:
            runs = self.saved_runs(FIFO)
        else:
            flags = {"batch-tokens": FIFO.step_tokens, "seqs": FIFO.seqs, "blocks": BLOCKS, "block-size": BLOCK}
            known = {"deployment": _circle.facts_of(self.deployment(FIFO))}
            with _continuous.started(_vllm.require(), Path(self.config), flags) as engine:
                self.say(f"{engine.metadata['engine']} ready")
                notes["engine"] = dict(engine.metadata)

                def bench(workload: Workload) -> Measured:
                    measured = engine.run(workload)
                    return replace(measured, metadata={**measured.metadata, **known})

                runs = in_turns([self.turn(FIFO, bench)], self.plan.repeats, self.say)
        return self._comparison("fidelity.live_transformers", runs, FIFO, self._recorded("fifo", notes))

    def saved_runs(self, setting: Setting) -> list[Run]:
        """Return the runs of a setting in the folder: each round of its loads, one after the other."""
        found = []
        for path in self.source.glob(f"{setting.name}-*.measured.parquet"):
            name, load, repeat = path.name.split(".")[0].split("-")
            found.append(Run(name, load, int(repeat), read_records(path)))
        return sorted(found, key=lambda run: (run.repeat, list(_circle.LOADS).index(run.load)))

    def _recorded(self, name: str, notes: dict[str, Any]) -> dict[str, Any]:
        """Write the notes of the runs beside them, or read those of an earlier campaign."""
        path = self.source / f"{name}.notes.json"
        if not self.again:
            path.write_text(strict_json(notes))
        return dict(json.loads(path.read_text()))

    def turn(
        self, setting: Setting, bench: Callable[[Workload], Measured], noted: Callable[[str], None] = lambda _: None
    ) -> Turn:
        """Return a setting's turns, whose runs are written as they come."""

        def named(run: Run) -> None:
            write_records(run.measured, self.out / f"{run.name}.measured.parquet")
            noted(run.name)

        return Turn(setting, bench, named, self.plan.lengths, self.plan.static_s, self.plan.seconds)

    def split(self, runs: Sequence[Run], first: Setting) -> Split:
        """Return the runs that a calibration of the first setting learns from, and those held out."""
        learnt = [run for run in runs if run.setting == first.name and run.load in _circle.LEARNT]
        held_out = [run for run in runs if run not in learnt]
        base = self.deployment(first)
        log = _vllm.iterations_of(self.source, next(run.name for run in learnt if run.load == "half"))
        scored = [run for run in held_out if run.setting == first.name]
        steps = read_iterations(log) if log.exists() else None
        return Split(learnt, held_out, scored, replace(base, cost=self.tables(base)), steps)

    def _comparison(self, prefix: str, runs: list[Run], first: Setting, notes: dict[str, Any]) -> dict[str, Any]:
        split, started_s = self.split(runs, first), time.monotonic()
        calibration = split.calibrated()
        duration_s, tables = time.monotonic() - started_s, calibration.tables
        self.say(f"calibrated on {len(split.learnt)} runs in {duration_s:.1f} s")
        settings = {s.name: s for s in (*self.plan.settings, FIFO)}
        errors: dict[str, dict[str, dict[str, float]]] = {"calibrated": {}, "profile": {}, "roofline": {}}
        answers, priced = {}, {}
        for name in dict.fromkeys(run.setting for run in runs):
            own, d = [run for run in runs if run.setting == name], self.deployment(settings[name])
            priced[name] = replace(d, cost=tables)
            for kind, cost in {"calibrated": tables, "profile": self.tables(d), "roofline": d.cost}.items():
                errors[kind] |= _circle.errors(d, cost, own)
            for run in own:
                answers[run.name] = _circle.write_simulated(self.out, priced[name], run)
        found = _circle_rows.rows(prefix, errors, runs, split.held_out, answers)
        blind = replace(split, scored=[]).calibrated().tables.errors
        found[f"{prefix}.interval_coverage"] = _circle_rows.coverage_row(priced, blind, split.held_out)
        about = {"machine": self.machine, "runs": notes}
        calibration_row = _circle_rows.calibration_row(calibration, duration_s, split.learnt, runs, about)
        return found | {f"{prefix}.calibration": calibration_row}


def main() -> None:
    """Run the campaigns of the command line and print their rows."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="folder for records and rows")
    options.add_argument("--quick", action="store_true", help="a smaller model, shorter runs, once each")
    options.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    options.add_argument("--again", type=Path, help="measure nothing: use the runs of this folder")
    args = options.parse_args()
    rows = figures(args.out, args.quick, args.out, args.only.split(","), again=args.again)
    for name, row in rows.items():
        print(f"{name:44} {row['value']:10.4g} {row['unit']:9} {row.get('target', '')}")


if __name__ == "__main__":
    main()
