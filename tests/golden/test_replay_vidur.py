"""The recorded runs of Vidur replay exactly, and the script reports it by its exit code."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import replay_vidur

SCRIPT = Path(__file__).with_name("replay_vidur.py")
FOLDER = "golden/vidur"
CASES = (
    "g02_70b_tp2_sarathi512_conv_q0.9",
    "g03_70b_tp2pp2_sarathi512_arxiv_q0.8",
    "g06_7b_tp1_vllm_conv_q4.4",
    "g07_7b_tp1_sarathi512_uniform_4rep_rr_q20",
    "g08_7b_tp1_vllm_smallkv_restarts_conv_q3",
    "g10_7b_tp1_ft_fixed128_64_q10",
)
SMALLEST = CASES[-1]
ITS_TABLES = "tables_Llama-2-7b-hf_tp1_pp1.npz"


@pytest.mark.parametrize("case", CASES)
def test_recorded_case_replays_exactly(shared, case) -> None:
    result = replay_vidur.compare(shared(f"{FOLDER}/{case}.json.gz"))
    assert result.passes, str(result)


def test_no_recorded_case_is_forgotten(shared) -> None:
    found = {path.name.removesuffix(".json.gz") for path in shared(FOLDER).glob("g*.json.gz")}
    assert found == set(CASES)


def doctored(shared, folder: Path, change) -> Path:
    """A folder with the smallest case, changed, and its tables."""
    with gzip.open(shared(f"{FOLDER}/{SMALLEST}.json.gz")) as file:
        case = json.load(file)
    change(case)
    with gzip.open(folder / f"{SMALLEST}.json.gz", "wt") as file:
        json.dump(case, file)
    shutil.copy(shared(f"{FOLDER}/{ITS_TABLES}"), folder / ITS_TABLES)
    return folder


def one_iteration_more(case) -> None:
    case["summary"]["iterations"] += 1


def one_restart_more(case) -> None:
    case["summary"]["num_restarts_total"] += 1


def completion_off_by_a_millionth(case) -> None:
    case["requests"][300]["completed_at"] *= 1 + 1e-6


def first_schedule_off_by_a_millionth(case) -> None:
    case["requests"][300]["scheduled_at"] *= 1 + 1e-6


def prefill_never_completed(case) -> None:
    case["requests"][300]["prefill_completed_at"] = None


def unknown_scheduler(case) -> None:
    case["config"]["cluster_config"]["replica_scheduler_config"]["name"] = "another"


CHANGES = [
    one_iteration_more,
    one_restart_more,
    completion_off_by_a_millionth,
    first_schedule_off_by_a_millionth,
    prefill_never_completed,
    unknown_scheduler,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_doctored_case_exits_1(shared, tmp_path, capsys, change) -> None:
    assert replay_vidur.main([str(doctored(shared, tmp_path, change))]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "0 of 1 cases pass" in out


def test_untouched_copy_exits_0(shared, tmp_path, capsys) -> None:
    assert replay_vidur.main([str(doctored(shared, tmp_path, lambda case: None))]) == 0
    assert "1 of 1 cases pass" in capsys.readouterr().out


def test_missing_tables_exit_1(shared, tmp_path, capsys) -> None:
    shutil.copy(shared(f"{FOLDER}/{SMALLEST}.json.gz"), tmp_path)
    assert replay_vidur.main([str(tmp_path)]) == 1
    assert ITS_TABLES in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["absent"], ["one", "two"], [str(SCRIPT)]])
def test_wrong_arguments_exit_2(arguments, capsys) -> None:
    assert replay_vidur.main(arguments) == 2
    assert "usage" in capsys.readouterr().out


def test_folder_without_cases_exits_2_as_a_script(tmp_path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"no g*.json.gz in {tmp_path}" in done.stdout
