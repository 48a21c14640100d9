"""The whole circle on real engines of this machine: profile, measure, calibrate, simulate the same, compare.

    python benchmarks/_live.py --out FOLDER [--quick] [--only vllm,transformers] [--again KEPT]

writes each run's records (measured and simulated), the profile and rows.json there; --again takes profile and
measured records from a folder that is kept (results/live/vllm, results/live/transformers) and does the rest anew.
Rows keep when and by what code (a hash of it) their runs were measured and by what code they were made, so that none is
called blind that is not.
vLLM on one thread of a CPU at two settings of its scheduler and three loads, each three times; transformers'
continuous batching at three loads. Calibrated on the static and the half load of one setting, all repeats; errors
are of the others: nearly full load, and the other setting.
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
import _circle_coverage
import _circle_rows
import _continuous
import _frozen
import _vllm
from _circle import Lengths, Run, Setting
from _device import machine, this_thread
from _harness import commit, strict_json
from _turns import Turn, in_turns

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

MAX_MODEL_LEN = 1024
BLOCK, BLOCKS = 32, 512
WIDE, NARROW = Setting("wide", 32, 2048), Setting("narrow", 8, 256)
FIFO = Setting("fifo", 32, 512)
"""Of transformers: decodes first, then prompts in order of arrival, cut to the step's tokens, as vLLM v1 does."""
SECTIONS = ("vllm", "transformers")


@dataclass(frozen=True)
class Plan:
    """How much of it."""

    size: str = "small"
    settings: tuple[Setting, ...] = (WIDE, NARROW)
    profile_s: float = 60.0
    static_s: float = 12.0
    seconds: float = 20.0
    repeats: int = 3
    lengths: Lengths = field(default_factory=Lengths)


@dataclass(frozen=True)
class Split:
    """Runs that a calibration learns from, runs held out, those of them that it is scored on; its costs and its log."""

    learnt: Sequence[Run]
    satisfied: Sequence[Run]
    scored: Sequence[Run]
    priced: Deployment
    steps: Iterations | None

    def calibrated(self, masks: str = "auto") -> Calibration:
        """Costs calibrated to what is learnt from."""
        return _circle.calibrated(self.learnt, self.scored, self.priced, self.steps, masks)


FULL = Plan()
QUICK = Plan(size="tiny", profile_s=20.0, static_s=5.0, seconds=8.0, repeats=1)


def figures(
    shared: Path, fast: bool, out: Path | None = None, only: Sequence[str] = SECTIONS, *, retry: Path | None = None
) -> dict[str, Any]:
    """Rows by name; raises FileNotFoundError where no engine is installed. ``shared`` is not needed."""
    del shared
    if retry is None:
        _vllm.require()
        if importlib.util.find_spec("torch") is None:
            raise FileNotFoundError("no torch to profile this machine with: make torch")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(out) if out else Path(folder) / "out"
        place.mkdir(parents=True, exist_ok=True)
        circle = Circle(place.resolve(), Path(folder), QUICK if fast else FULL, retry=retry)
        told: dict[str, Any] = {}
        for section in only:
            told |= {"vllm": circle.vllm, "transformers": circle.transformers}[section]()
        known = {"code": commit()} | _frozen.metadata(circle.measured_by)
        for row in told.values():
            row["details"] |= known
        (place / "rows.json").write_text("".join(strict_json({"name": n} | row) + "\n" for n, row in told.items()))
        return told


class Circle:
    """One machine's round: what is worth keeping in ``out``, weights and logs in ``work``.

    ``again``: where an earlier round lies of which profile and measured runs are taken.
    """

    def __init__(self, out: Path, work: Path, plan: Plan, *, retry: Path | None = None) -> None:
        self.out, self.work, self.plan, self.retry = out, work, plan, retry
        self.retained = out if retry is None else retry.resolve()
        self.start = time.monotonic()
        self.model, config = work / plan.size, self.retained / f"{plan.size}.json"
        if retry is None:
            _vllm.make_model(self.model, plan.size)
            shutil.copyfile(self.model / "config.json", config)
        self.config = str(config)
        self.measured_by = _frozen.measured_by(self.retained) if retry else _frozen.of_measuring()
        self.gpu, self.machine = self._device()
        self.profile = self._profiled()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _device(self) -> tuple[GpuSpec, dict[str, Any]]:
        """The device and the machine's facts as they were when its runs were measured."""
        path = self.retained / "device.json"
        if self.retry and path.exists():
            kept = json.loads(path.read_text())
            gpu = GpuSpec(**kept["gpu"] | {"aliases": tuple(kept["gpu"]["aliases"])})
            return gpu, kept["machine"]
        gpu = this_thread()
        if self.retry:
            return gpu, machine(gpu) | {"measured_again": True}
        path.write_text(strict_json({"gpu": asdict(gpu), "machine": machine(gpu)} | self.measured_by))
        return gpu, machine(gpu)

    def deployment(self, setting: Setting) -> Deployment:
        limits = replace(setting.limits(MAX_MODEL_LEN, BLOCK), weight_dtype="float32", kv_dtype="float32")
        return _circle.deployment_of(self.config, self.gpu, limits, BLOCKS)

    def _profiled(self) -> Profile:
        if self.retry:
            return read_profile(self.retained / "profile.parquet")
        d = self.deployment(WIDE)
        profile = measure_profile(
            d.model,
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
        """What the profile alone says."""
        tables, _ = fit_profile(self.profile, d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len)
        return tables

    def vllm(self) -> dict[str, Any]:
        """Both settings measured; calibrated on half the capacity of the first one."""
        notes: dict[str, Any] = {}
        if self.retry:
            runs = [run for setting in self.plan.settings for run in self.kept_runs(setting)]
        else:
            runs = self._under_vllm(notes)
        return self._comparison("fidelity.live", runs, self.plan.settings[0], self._recorded("vllm", notes))

    def _under_vllm(self, notes: dict[str, Any]) -> list[Run]:
        """An engine for each setting, all up at once (an idle one sleeps), and their loads in turns."""
        with contextlib.ExitStack() as engines:
            turns = []
            for setting in self.plan.settings:
                d, log = self.deployment(setting), self.work / f"vllm-{setting.name}.log"
                engine = engines.enter_context(_vllm.served(d, self.model, log))
                self.say(f"vLLM ready after {engine.ready_after_s:.0f} s")
                where = (engine.url, self.model.name, log, engine.process.pid, notes, self.out)
                told = _vllm.Watched(*where, deployment=_circle.facts_of(d))
                turns.append(self._turn(setting, told.bench, told.named))
            return self._measured(turns)

    def transformers(self) -> dict[str, Any]:
        """One setting of another engine, in a process that feeds itself."""
        if self.retry:
            return self._comparison(
                "fidelity.live_transformers", self.kept_runs(FIFO), FIFO, self._recorded("fifo", {})
            )
        flags = {"batch-tokens": FIFO.step_tokens, "seqs": FIFO.seqs, "blocks": BLOCKS, "block-size": BLOCK}
        with _continuous.started(_vllm.require(), Path(self.config), flags) as engine:
            self.say(f"{engine.metadata['engine']} ready")
            known = {"deployment": _circle.facts_of(self.deployment(FIFO))}

            def bench(workload: Workload) -> Measured:
                measured = engine.run(workload)
                return replace(measured, metadata={**measured.metadata, **known})

            runs = self._measured([self._turn(FIFO, bench, lambda _: None)])
            notes = self._recorded("fifo", {"engine": dict(engine.metadata)})
        return self._comparison("fidelity.live_transformers", runs, FIFO, notes)

    def kept_runs(self, setting: Setting) -> list[Run]:
        """The runs of a setting that the folder holds: each round of its loads, one after the other."""
        found = []
        for path in self.retained.glob(f"{setting.name}-*.measured.parquet"):
            name, load, repeat = path.name.split(".")[0].split("-")
            found.append(Run(name, load, int(repeat), read_records(path)))
        return sorted(found, key=lambda run: (run.repeat, list(_circle.LOADS).index(run.load)))

    def _recorded(self, name: str, notes: dict[str, Any]) -> dict[str, Any]:
        """Notes beside the runs, kept in the folder."""
        path = self.retained / f"{name}.notes.json"
        if not self.retry:
            path.write_text(strict_json(notes))
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept

    def _turn(self, setting: Setting, bench: Callable[[Workload], Measured], named: Callable[[str], None]) -> Turn:
        return Turn(setting, bench, named, self.plan.lengths, self.plan.static_s, self.plan.seconds)

    def _measured(self, turns: Sequence[Turn]) -> list[Run]:
        """All runs in turns, each written as it comes."""
        runs = []
        for run in in_turns(turns, self.plan.repeats):
            write_records(run.measured, self.out / f"{run.name}.measured.parquet")
            runs.append(run)
            told = _circle.quantiles(run.measured.records)
            shown = ", ".join(f"{metric} {1000 * value_s:.1f} ms" for metric, value_s in told.items())
            self.say(f"{run.name}: {len(run.measured.workload)} requests, {shown}")
        return runs

    def split(self, runs: Sequence[Run], first: Setting) -> Split:
        """What a calibration of the first setting learns from, and what is held against it."""
        learnt = [run for run in runs if run.setting == first.name and run.load in _circle.LEARNT]
        held = [run for run in runs if run not in learnt]
        base = self.deployment(first)
        log = _vllm.iterations_of(self.retained, next(run.name for run in learnt if run.load == "half"))
        return Split(
            learnt,
            held,
            [run for run in held if run.setting == first.name],
            replace(base, cost=self.tables(base)),
            read_iterations(log) if log.exists() else None,
        )

    def _comparison(self, prefix: str, runs: list[Run], first: Setting, notes: dict[str, Any]) -> dict[str, Any]:
        by_name = {s.name: s for s in (*self.plan.settings, FIFO)}
        split = self.split(runs, first)
        learnt, held = split.learnt, split.satisfied
        started = time.monotonic()
        calibration = split.calibrated()
        duration_s = time.monotonic() - started
        self.say(f"calibrated on {len(learnt)} runs in {duration_s:.1f} s")
        told: dict[str, dict[str, dict[str, float]]] = {"calibrated": {}, "profile": {}, "roofline": {}}
        told["without_masks"], bare = {}, calibration.tables
        if calibration.tables.masked_s > 0:
            bare = split.calibrated(masks="no").tables
        answers = {}
        for setting in {run.setting: by_name[run.setting] for run in runs}.values():
            own = [run for run in runs if run.setting == setting.name]
            d = self.deployment(setting)
            told["calibrated"] |= _circle.errors(d, calibration.tables, own)
            told["profile"] |= _circle.errors(d, self.tables(d), own)
            told["roofline"] |= _circle.errors(d, d.cost, own)
            told["without_masks"] |= _circle.errors(d, bare, own)
            for run in own:
                answers[run.name] = _circle.simulated(replace(d, cost=calibration.tables), run)
                kept = _circle.as_simulated(answers[run.name], run)
                write_records(kept, self.out / f"{run.name}.simulated.parquet")
        found = _circle_rows.rows(prefix, told, runs, held, answers)
        priced_by = {name: replace(self.deployment(s), cost=calibration.tables) for name, s in by_name.items()}
        blind = replace(split, scored=[]).calibrated().tables.errors
        found[f"{prefix}.interval_coverage"] = _circle_coverage.row(priced_by, blind, held)
        found[f"{prefix}.calibration"] = _circle_rows.of_calibration(
            calibration, duration_s, learnt, runs, {"machine": self.machine, "runs": notes}
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for records and rows")
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter runs, once each")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--again", type=Path, help="measure nothing: take what this folder holds")
    given = parser.parse_args()
    only = given.only.split(",")
    told = figures(given.out, given.fast, given.out, only, retry=given.retry)
    for name, row in told.items():
        print(f"{name:44} {row['value']:10.4g} {row['unit']:9} {row.get('target', '')}")


if __name__ == "__main__":
    main()
