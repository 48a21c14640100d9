"""A campaign on one GPU within a budget of seconds, unattended: every file is written as soon as possible."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _circle
import _circle_rows
import _continuous
import _harness
from _circle import BLOCK, Run, Setting
from _gpu import Clock, Plan

from lengthwise import Deployment, Workload, catalog, simulate
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import write_profile
from lengthwise.measure import write_records
from lengthwise.measure.operators import measure_profile
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import EngineError, InputError, LengthwiseError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.records import Measured
from lengthwise.schema.specs import GpuSpec


class Campaign:
    """One campaign on one device within a budget, its files in a folder."""

    def __init__(self, out: Path, device: str, plan: Plan, python: str, clock: Clock) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.plan, self.python, self.clock = out, device, plan, python, clock
        self.report: dict[str, Any] = {"plan": plan.name, "budget_s": clock.budget_s, "messages": []}
        self.runs: list[Run] = []
        self.measured_by = _harness.of_measuring()
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
        write_whole(self.out / name, "".join(_harness.strict_json(line) + "\n" for line in lines).encode())

    def run(self) -> int:
        """Profile, measure, calibrate, simulate, compare; return the exit status."""
        plan, setting = self.plan, Setting("fifo", self.plan.seqs, self.plan.step_tokens)
        try:
            gpu = device_of(self.device, plan.dtype)
            self.say(f"{plan.name} on {gpu.name}, {self.clock.budget_s:.0f} s")
            base = setting.deployment(str(self.config), gpu, plan.max_model_len, plan.blocks, plan.dtype)
            tables = self._profiled(base)
            return self._compared(base, tables, self._measured(setting, base))
        except LengthwiseError as error:
            self.say(f"ended: {error}")
            return 1

    def _profiled(self, d: Deployment) -> CostTables:
        """Return cost tables of the profile; the roofline's where profiling fails."""
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

    def _measured(self, setting: Setting, base: Deployment) -> dict[str, Any]:
        """Return the engine's metadata; ``runs`` are as many as time and engine allowed."""
        plan, clock = self.plan, self.clock
        lengths, known = _circle.Lengths(plan.prompt, plan.output), {"deployment": _circle.facts_of(base)}
        flags = {"device": self.device, "dtype": plan.dtype, "attention": "paged|sdpa,sdpa"}
        flags |= {"batch-tokens": plan.step_tokens, "seqs": plan.seqs, "blocks": plan.blocks, "block-size": BLOCK}
        metadata: dict[str, Any] = {}
        # compiles the simulator while the engine starts, so that the end does not wait for it
        first = lengths.workload(4, 0, None, "compile")
        compiling = threading.Thread(target=simulate, args=(first, base), daemon=True)
        compiling.start()

        def bench(workload: Workload) -> Measured:
            measured = engine.run(workload, clock.to_measure_s() + clock.end_s / 3)
            return replace(measured, metadata={**measured.metadata, **known})

        def named(run: Run) -> None:
            write_records(run.measured, self.out / f"{run.name}.measured.parquet")
            self.runs.append(run)

        try:
            with _continuous.started(self.python, self.config, flags, clock.to_measure_s()) as engine:
                metadata |= engine.metadata
                self.report["engine"] = metadata
                self.say(f"{metadata['engine']} with {metadata['attention']} on {metadata['device']}")
                compiling.join(clock.to_measure_s())
                budget = {"least": 16, "left_s": clock.to_measure_s}
                turn = _circle.Turn(setting, bench, named, lengths, plan.static_s, plan.seconds, **budget)
                _circle.in_turns([turn], plan.repeats, self.say)
        except EngineError as error:
            self.say(f"the engine ended early: {error}")
        return metadata

    def _compared(self, base: Deployment, tables: CostTables, metadata: dict[str, Any]) -> int:
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
        duration_s, calibrated = clock.elapsed_s - before_s, replace(base, cost=found.tables)
        errors = {"calibrated": _circle.errors(base, found.tables, runs), **errors}
        answers = {run.name: _circle.simulated(calibrated, run) for run in held_out}
        rows = _circle_rows.rows(prefix, errors, runs, held_out, answers)
        machine = {"device": base.gpu.name, "cores": os.cpu_count(), "python": platform.python_version()}
        about = {"engine": metadata, "machine": machine, "seconds": round(clock.elapsed_s, 1)}
        rows[f"{prefix}.calibration"] = _circle_rows.calibration_row(found, duration_s, learnt, runs, about)
        for row in rows.values():
            row["details"] |= _harness.origin(self.measured_by)
        self._write("rows.json", [{"name": name} | row for name, row in rows.items()])
        self.say(f"calibrated on {len(learnt)} runs in {duration_s:.1f} s; rows.json is written")
        for name, row in rows.items():
            print(f"{name:52} {row['value']:10.4g} {row['unit']}", flush=True)
        for run in runs:
            if clock.left_s() > 0:
                _circle.write_simulated(self.out, calibrated, run)
        self.say("done")
        return 0


def free(device: str) -> None:
    """Free the memory of the profile before the engine, another process, allocates its own."""
    gc.collect()
    if device != "cpu":
        import torch

        try:
            torch.cuda.empty_cache()
        except RuntimeError:  # a GPU that broke for this process alone
            return


def device_of(device: str, dtype: str) -> GpuSpec:
    """Return the catalog's GPU of this name, else one of the peaks of a product and a copy in torch."""
    import torch

    cuda = device != "cpu"
    name = torch.cuda.get_device_name() if cuda else str(_harness.machine()["cpu"])
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        pass
    if not cuda:
        torch.set_num_threads(1)
    n, items = (8192, 2**29) if cuda else (1024, 2**26)
    a = torch.ones(n, n, dtype=getattr(torch, dtype), device=device)
    b = torch.ones(items, dtype=torch.float32, device=device)
    c = torch.empty_like(b)

    def best_s(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 16 * 2**30
    source = f"measured with torch: a product of {n} x {n}, a copy of {4 * items} bytes"
    flops = {dtype: 2 * n**3 / best_s(lambda: a @ a)}
    return _circle.as_device(name, flops, memory, 8 * items / best_s(lambda: c.copy_(b)), source)
