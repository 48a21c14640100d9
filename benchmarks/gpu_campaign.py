"""A GPU's campaign: profile a Llama of 8 billion random weights, serve it, calibrate, simulate, compare.

    python benchmarks/gpu_campaign.py [--out FOLDER] [--budget 470]   seconds in total, unattended
    python benchmarks/gpu_campaign.py --device cpu --tiny              the same code without a GPU, two minutes

It needs numpy, scipy, polars, numba, platformdirs, torch and transformers in one environment (or the engine's two
in another: --engine-python), lengthwise installed or this checkout, no network and no downloads. An image for GPUs may
lack polars, which writes profile and records, and platformdirs, which locates the cache of compiled code. On a machine
without network install wheels of both that were fetched elsewhere, for the image's Python:

    pip download --only-binary=:all: --dest wheels polars platformdirs      (polars brings polars-runtime-32)
    pip install --no-index --find-links wheels polars platformdirs          (or --target FOLDER, on PYTHONPATH)

The engine is transformers' continuous batching. Measurements are written as they come: points of the profile, the
profile (Parquet), each run's records, progress.json, and at last rows.json. Repeats that the budget has no time for
are left out. A GPU with less memory gets a Llama of one billion.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import platform
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import _frozen
from _gpu import BLOCK, RESULTS, Clock, Plan, UnfitError, as_installed, chosen

HERE = Path(__file__).resolve().parent
GRACE_S = 5.0
if importlib.util.find_spec("lengthwise") is None:
    sys.path[:0] = [str(HERE.parent / "src"), as_installed(HERE.parent)]


def main() -> int:
    """Run the campaign of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for profile, records and rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the script")
    parser.add_argument("--budget", type=float, default=470.0, metavar="SECONDS", help="for all of it")
    parser.add_argument("--engine-python", default=sys.executable, help="has torch and transformers")
    args = parser.parse_args()
    if args.budget <= 0:
        parser.error(f"--budget must be above 0 s; got {args.budget:g}")
    clock = Clock(args.budget)
    end_at(args.budget + GRACE_S)
    try:
        plan = chosen(args)
    except UnfitError as error:
        print(error, file=sys.stderr)
        return 2
    from lengthwise.schema.errors import LengthwiseError

    campaign = Campaign(args.out.resolve(), args.device, plan, args.engine_python, clock)
    try:
        return campaign.run()
    except LengthwiseError as error:
        campaign.say(f"ended: {error}")
        return 1


def end_at(seconds: float) -> None:
    """End this process after some seconds in any state; its engine ends soon after it."""
    timer = threading.Timer(seconds, lambda: os._exit(4))
    timer.daemon = True
    timer.start()


class Campaign:
    """One campaign on one device within a budget, its files in a folder."""

    def __init__(self, out: Path, device: str, plan: Plan, python: str, clock: Clock) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.plan, self.python, self.clock = out, device, plan, python, clock
        self.report: dict[str, Any] = {"plan": plan.name, "budget_s": clock.budget_s, "messages": []}
        self.runs: list[Any] = []
        self.measured_by = _frozen.of_measuring()
        for old in (*out.glob("*.measured.parquet"), *out.glob("*.simulated.parquet"), out / "rows.json"):
            old.unlink(missing_ok=True)
        self.config = out / f"{plan.name}.json"
        self.config.write_text(json.dumps(dict(plan.config), indent=1))

    def say(self, text: str) -> None:
        """Print a line with the elapsed seconds, and add it to progress.json."""
        line = f"{self.clock.elapsed_s:6.1f} s  {text}"
        print(line, file=sys.stderr, flush=True)
        self.report["messages"].append(line.strip())
        self._write("progress.json", [self.report])

    def _write(self, name: str, lines: list[dict[str, Any]]) -> None:
        from _harness import strict_json

        from lengthwise.schema.files import write_whole

        write_whole(self.out / name, "".join(strict_json(line) + "\n" for line in lines).encode())

    def run(self) -> int:
        """Profile, measure, calibrate, simulate, compare; write every file as soon as possible."""
        import _circle
        from _device import device_of

        plan = self.plan
        self.gpu = device_of(self.device, plan.dtype)
        self.say(f"{plan.name} on {self.gpu.name}, {self.clock.budget_s:.0f} s")
        setting = _circle.Setting("fifo", plan.seqs, plan.step_tokens)
        limits = replace(setting.limits(plan.max_model_len, BLOCK), weight_dtype=plan.dtype, kv_dtype=plan.dtype)
        base = _circle.deployment_of(str(self.config), self.gpu, limits, plan.blocks)
        tables = self._profiled(base)
        return self._comparison(base, tables, self._measured(setting, base))

    def _profiled(self, d: Any) -> Any:
        """Return cost tables of the profile; the roofline's where profiling fails."""
        from lengthwise.cost.estimators import fit_profile
        from lengthwise.cost.profiles import write_profile
        from lengthwise.measure.operators import measure_profile
        from lengthwise.schema.errors import InputError

        plan, points = self.plan, self.out / "profile.points.jsonl"
        points.unlink(missing_ok=True)
        try:
            profile = measure_profile(
                d.model,
                device=self.device,
                dtype=plan.dtype,
                budget_s=min(plan.profile_s, 0.3 * self.clock.budget_s),
                max_tokens=plan.step_tokens,
                max_seqs=plan.seqs,
                max_context=plan.max_model_len,
                resume=points,
                **({"threads": 1} if self.device == "cpu" else {}),
            )
            write_profile(profile, self.out / "profile.parquet")
            self.say("; ".join((f"profile of {len(profile)} points", *profile.metadata.notes)))
            return fit_profile(profile, d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len)[0]
        except Exception as error:  # noqa: BLE001 - the campaign is unattended
            reason = error if isinstance(error, InputError) else traceback.format_exc()
            self.say(f"no profile, the roofline replaces it: {reason}")
            return d.cost
        finally:
            free(self.device)

    def _measured(self, setting: Any, base: Any) -> dict[str, Any]:
        """Return the engine's metadata; ``runs`` are as many as time and engine allowed."""
        import _circle
        import _continuous

        from lengthwise import simulate
        from lengthwise.schema.errors import EngineError

        plan, clock = self.plan, self.clock
        lengths = _circle.Lengths(plan.prompt, plan.output)
        flags = {
            "device": self.device,
            "dtype": plan.dtype,
            "attention": "paged|sdpa,sdpa",
            "batch-tokens": plan.step_tokens,
            "seqs": plan.seqs,
            "blocks": plan.blocks,
            "block-size": BLOCK,
        }
        metadata: dict[str, Any] = {}
        # compiles the simulator while the engine starts, so that the end does not wait for it
        first = lengths.workload(4, 0, None, "compile")
        compiling = threading.Thread(target=simulate, args=(first, base), daemon=True)
        compiling.start()
        try:
            with _continuous.started(self.python, self.config, flags, clock.to_measure_s()) as engine:
                metadata |= engine.metadata
                self.report["engine"] = metadata
                self.say(f"{metadata['engine']} with {metadata['attention']} on {metadata['device']}")
                compiling.join(clock.to_measure_s())
                self._loads(engine, setting, lengths, {"deployment": _circle.facts_of(base)})
        except EngineError as error:
            self.say(f"the engine ended early: {error}")
        return metadata

    def _loads(self, engine: Any, setting: Any, lengths: Any, known: dict[str, Any]) -> None:
        import _circle
        import numpy as np

        from lengthwise.measure import write_records

        plan, clock = self.plan, self.clock

        def bench(workload: Any) -> Any:
            measured = engine.run(workload, clock.to_measure_s() + clock.end_s / 3)
            return replace(measured, metadata={**measured.metadata, **known})

        def on_run(run: Any) -> None:
            write_records(run.measured, self.out / f"{run.name}.measured.parquet")
            self.runs.append(run)

        for _ in range(2):  # the first is the engine's own warm-up
            first = bench(lengths.workload(plan.seqs, 0, None, "warm-up"))
        duration_s = float(np.nanmax(first.records.requests.finished_s))
        rate_rps = plan.seqs / duration_s
        self.say(f"{plan.seqs} requests at once in {duration_s:.1f} s: about {rate_rps:.2f} a second")
        most = int(rate_rps * clock.to_measure_s() / 2)
        static_s = min(plan.static_s, clock.to_measure_s() / 4)
        _circle.measure_loads(
            bench,
            setting,
            lengths,
            static_n=max(8, min(most, 1000, max(2 * plan.seqs, round(rate_rps * static_s)))),
            seconds=plan.seconds,
            repeats=plan.repeats,
            on_run=on_run,
            say=self.say,
            least=16,
            left_s=clock.to_measure_s,
        )

    def _comparison(self, base: Any, tables: Any, metadata: dict[str, Any]) -> int:
        import _circle
        import _circle_rows

        from lengthwise.measure import write_records

        runs, clock, prefix = self.runs, self.clock, f"fidelity.gpu.{self.plan.name}"
        learnt = [run for run in runs if run.load in _circle.LEARNT]
        held_out = [run for run in runs if run.load not in _circle.LEARNT]
        errors = {"profile": _circle.errors(base, tables, runs), "roofline": _circle.errors(base, base.cost, runs)}
        self.report["errors"] = errors
        if not learnt or not held_out:
            self.say("there are too few runs to calibrate on some and to judge by others")
            return 1
        self.say("simulated by the profile and by the roofline")
        before_s = clock.elapsed_s
        found = _circle.calibrated(learnt, held_out, replace(base, cost=tables))
        duration_s = clock.elapsed_s - before_s
        calibrated = replace(base, cost=found.tables)
        errors = {"calibrated": _circle.errors(base, found.tables, runs), **errors}
        answers = {run.name: _circle.simulated(calibrated, run) for run in held_out}
        rows = _circle_rows.rows(prefix, errors, runs, held_out, answers)
        machine = {"device": self.gpu.name, "cores": os.cpu_count(), "python": platform.python_version()}
        about = {"engine": metadata, "machine": machine, "seconds": round(clock.elapsed_s, 1)}
        rows[f"{prefix}.calibration"] = _circle_rows.calibration_row(found, duration_s, learnt, runs, about)
        for row in rows.values():
            row["details"] |= _frozen.metadata(self.measured_by)
        self._write("rows.json", [{"name": name} | row for name, row in rows.items()])
        self.say(f"calibrated on {len(learnt)} runs in {duration_s:.1f} s; rows.json is written")
        for name, row in rows.items():
            print(f"{name:52} {row['value']:10.4g} {row['unit']}", flush=True)
        for run in runs:
            if clock.left_s() > 0:
                answer = _circle.as_simulated(_circle.simulated(calibrated, run), run)
                write_records(answer, self.out / f"{run.name}.simulated.parquet")
        self.say("done")
        return 0


def free(device: str) -> None:
    """Free the memory of the profile before the engine, another process, allocates its own."""
    gc.collect()
    if device != "cpu":
        import torch

        with contextlib.suppress(RuntimeError):  # a GPU that broke for this process alone
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
