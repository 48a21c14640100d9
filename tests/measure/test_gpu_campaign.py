"""The campaign on a GPU keeps its time, ends what hangs, and reports what a machine lacks; no GPU, no engine."""

import argparse
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import _circle
import _continuous
import fidelity
import gpu_campaign
import numpy as np
import pytest

from lengthwise.schema.errors import EngineError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

READY = "import sys, time\nprint('ready {}', flush=True)\n"


def engine(tmp_path, code, limit_s=20.0):
    script = tmp_path / "engine.py"
    script.write_text(code)
    return _continuous.started(sys.executable, tmp_path, {}, limit_s, script)


def test_engine_that_hangs_is_terminated_when_its_time_is_up(tmp_path):
    work, started = _circle.Lengths().workload(2, 0, None), time.monotonic()
    with engine(tmp_path, READY + "time.sleep(60)") as one:
        with pytest.raises(EngineError, match="did not print 'done' within 0 s"):
            one.run(work, 0.3)
        assert one.process.wait(30) != 0
    assert time.monotonic() - started < 50


def test_engine_that_never_starts_is_terminated(tmp_path):
    with (
        pytest.raises(EngineError, match="did not print 'ready' within"),
        engine(tmp_path, "import time; time.sleep(60)", 0.3),
    ):
        pass


def test_engine_that_dies_is_reported_with_its_last_output(tmp_path):
    work = _circle.Lengths().workload(2, 0, None)
    with (
        engine(tmp_path, READY + "sys.stdin.readline()\nsys.exit('no memory for the cache')") as one,
        pytest.raises(EngineError, match=r"no memory for the cache"),
    ):
        one.run(work, 20)


class Served:
    """An engine of so many requests a second on a clock of its own; what it was asked, and when."""

    def __init__(self, rate_rps, budget_s):
        self.rate_rps, self.budget_s, self.now, self.requested = rate_rps, budget_s, 0.0, []

    def left_s(self):
        return max(0.0, self.budget_s - self.now)

    def run(self, workload):
        n = len(workload)
        end_s = workload.arrival_s + (np.arange(n) + 1) / self.rate_rps
        if workload.arrival_s[-1] > 0:
            end_s = workload.arrival_s + 2.0
        self.requested.append(workload)
        self.now += float(end_s.max())
        started_s, lengths = end_s - 1 / self.rate_rps, workload.output_tokens
        tokens = [list(np.linspace(*span)) for span in zip(started_s, end_s, lengths, strict=True)]
        rows = [{"error": None, "token_s": t, "output_tokens": len(t)} for t in tokens]
        columns = ["start_s", "end_s", "cpu_s", "prefill_seqs", "prefill_tokens", "decode_seqs", "kv_tokens", "pairs"]
        reported = {
            "requests": rows,
            "sent_s": workload.arrival_s.tolist(),
            "end_s": float(end_s.max()),
            "step_columns": columns,
            "steps": [[0.0, 1.0, 0.1, 1, 8, 1, 9, 10]],
        }
        return _continuous.measured(reported, workload, {})


def loads(served, monkeypatch, repeats=2):
    """The names of the runs that a turn had time for, and its messages."""
    monkeypatch.setattr(_circle.time, "monotonic", lambda: served.now)
    message, retained = [], []
    sizes = {"static_s": 4.0, "seconds": 25.0, "least": 16, "left_s": served.left_s}
    turn = _circle.Turn(_circle.Setting("s", 8, 64), served.run, retained.append, _circle.Lengths(), **sizes)
    _circle.in_turns([turn], repeats, message.append)
    return [run.name for run in retained], message


def test_loads_of_a_slow_engine_last_as_long_as_they_may_not_as_many_requests_as_they_might(monkeypatch):
    served = Served(rate_rps=2.5, budget_s=1e6)
    names, _ = loads(served, monkeypatch)
    assert len(names) == 6
    half = served.requested[4]
    assert len(half) == pytest.approx(0.5 * 2.5 * 25, rel=0.2)  # of as many lengths
    assert half.arrival_s[-1] < 40


def test_repeats_that_the_time_does_not_allow_are_omitted_and_reported(monkeypatch):
    served = Served(rate_rps=10.0, budget_s=70.0)
    names, message = loads(served, monkeypatch)
    assert names[:3] == ["s-static-0", "s-half-0", "s-high-0"]
    assert len(names) < 6
    assert served.now < 70.0 + 3
    assert any("s-high-1 omitted" in line and "s are left" in line for line in message)


def test_first_runs_share_the_available_time(monkeypatch):
    served = Served(rate_rps=10.0, budget_s=44.0)
    names, _ = loads(served, monkeypatch, repeats=1)
    assert names == ["s-static-0", "s-half-0", "s-high-0"]
    assert served.now < 44.0 + 3


def test_model_is_chosen_by_the_memory_that_is_free():
    plans = [gpu_campaign.BIG, gpu_campaign.MIDDLE]
    assert 26e9 < gpu_campaign.BIG.needs_bytes < 32e9
    assert gpu_campaign.fitting(plans, 139e9) is gpu_campaign.BIG
    assert gpu_campaign.fitting(plans, 22e9) is gpu_campaign.MIDDLE
    assert gpu_campaign.fitting(plans, 4e9) is None


@pytest.mark.parametrize("plan", [gpu_campaign.BIG, gpu_campaign.MIDDLE, gpu_campaign.SMALL], ids=lambda p: p.name)
def test_memory_that_a_plan_needs_is_more_than_its_weights(plan):
    from lengthwise import catalog

    model = catalog.model_from_config(dict(plan.config), plan.name)
    weights = catalog.weight_bytes(model, plan.dtype)
    assert weights + 4e9 < plan.needs_bytes < 1.2 * weights + 15e9


def sent(**words):
    return argparse.Namespace(**{"device": "cuda", "tiny": False, "engine_python": "other", **words})


def test_all_missing_modules_of_a_machine_are_reported(monkeypatch):
    monkeypatch.setattr(gpu_campaign, "NEEDED", ("numpy", "no_such_module", "nor_this"))
    with pytest.raises(gpu_campaign.UnfitError, match=r"needs no_such_module, nor_this in .*pip install"):
        gpu_campaign.chosen(sent(device="cpu"))


def torch_that_sees(monkeypatch, gpus):
    reported = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: bool(gpus)))
    monkeypatch.setitem(sys.modules, "torch", reported)


def test_machine_without_a_gpu_is_reported_before_anything_that_could_be_installed(monkeypatch):
    torch_that_sees(monkeypatch, gpus=0)
    monkeypatch.setattr(gpu_campaign, "NEEDED", ("no_such_module",))
    with pytest.raises(gpu_campaign.UnfitError, match="no CUDA GPU"):
        gpu_campaign.chosen(sent(engine_python=sys.executable))
    torch_that_sees(monkeypatch, gpus=1)
    with pytest.raises(gpu_campaign.UnfitError, match="needs no_such_module in"):
        gpu_campaign.chosen(sent())


def test_machine_without_torch_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(gpu_campaign.UnfitError, match="needs torch, which does not import in"):
        gpu_campaign.chosen(sent(engine_python=sys.executable))


@pytest.fixture
def section(monkeypatch, tmp_path):
    """The benchmark's section gpu, of which the campaign is a script of the test's own."""
    monkeypatch.setattr(gpu_campaign, "CAMPAIGN", tmp_path / "campaign.py")

    def rows(code=""):
        gpu_campaign.CAMPAIGN.write_text("import pathlib, sys\nout = pathlib.Path(sys.argv[2])\n" + code)
        return fidelity.SECTIONS.rows("gpu", Path(), quick=True)

    return rows


@pytest.mark.parametrize("gpus", [0, None])
def test_benchmark_skips_its_gpu_with_the_reason(section, monkeypatch, gpus):
    torch_that_sees(monkeypatch, gpus)
    if gpus is None:
        monkeypatch.setitem(sys.modules, "torch", None)
    (row,) = section("sys.exit('started all the same')")
    assert row.name == "gpu.skipped"
    assert row.details["skipped"].startswith("no CUDA GPU" if gpus == 0 else "the campaign needs torch")


def test_benchmark_keeps_what_a_complete_campaign_writes(section, monkeypatch, tmp_path):
    """Profile and records are data that others can look at; of the quick look nothing is kept."""
    torch_that_sees(monkeypatch, gpus=1)
    monkeypatch.setattr(gpu_campaign, "RESULTS", tmp_path / "results")
    reported = '{"name": "fidelity.gpu.x.jct_p50_error", "value": 0.03}'
    code = (
        "out.mkdir(exist_ok=True)\n(out / 'profile.parquet').write_text('x')\n"
        f"(out / 'rows.json').write_text({reported!r})"
    )
    section(code)
    assert not (tmp_path / "results").exists()
    fidelity.SECTIONS.rows("gpu", Path(), quick=False)
    assert (tmp_path / "results" / "profile.parquet").exists()


def test_benchmark_uses_the_rows_of_the_campaign_where_there_is_a_gpu(section, monkeypatch):
    torch_that_sees(monkeypatch, gpus=1)
    reported = '{"name": "fidelity.gpu.x.jct_p50_error", "value": 0.03, "unit": "relative", "target": 0.1, "ci": null}'
    (row,) = section(f"assert sys.argv[3:] == ['--tiny']\n(out / 'rows.json').write_text({reported!r})")
    assert (row.name, row.value, row.target) == ("fidelity.gpu.x.jct_p50_error", 0.03, 0.1)
    (row,) = section("sys.exit('the GPU does not respond')")
    assert "ended without rows (1): the GPU does not respond" in row.details["skipped"]


def test_budget_has_a_last_part_for_what_follows_the_measuring():
    clock = gpu_campaign.Clock(470.0)
    assert 400 < clock.to_measure_s() < clock.left_s() <= 470
    assert gpu_campaign.Clock(0.0).to_measure_s() == 0


def test_campaign_imports_no_more_than_it_names():
    code = """
import sys
from importlib.machinery import PathFinder
BLOCKED = {"typer", "rich", "click", "aiohttp", "pydantic", "yaml", "sklearn", "plotly", "pandas", "tokenizers"}
class Without:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Without() if one is PathFinder else one for one in sys.meta_path]
import gpu_campaign, _live
from lengthwise import simulate, deploy
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import write_profile
from lengthwise.measure import write_records
from lengthwise.measure.operators import measure_operators
from lengthwise.measure.calibration import calibrate
import polars
print(simulate.__name__)
"""
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["simulate"], done.stderr


def test_campaign_ends_itself_whatever_it_is_doing():
    code = "import gpu_campaign, time; gpu_campaign.end_at(0.2); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=False, timeout=30)
    assert done.returncode == 4


def test_checkout_that_is_not_installed_reports_its_version():
    import importlib.metadata

    folder = gpu_campaign.as_installed(BENCHMARKS.parent)
    (found,) = importlib.metadata.distributions(name="lengthwise", path=[folder])
    assert found.version == importlib.metadata.version("lengthwise")
