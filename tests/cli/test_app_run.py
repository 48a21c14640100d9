"""``lengthwise app run``, ``status`` and ``cancel``: files, exit codes, what is printed; killed and gone on with."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from apps_world import write_app

SIMULATED = ("--launcher", "simulated")
LIMIT_S = 120.0


def outputs(folder):
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines()]


def run(cli, path, out, *more):
    return cli("app", "run", path, "--out", out, *more)


def test_a_run_writes_answers_in_the_order_of_the_rows_and_a_manifest(cli, tmp_path):
    out = tmp_path / "run"
    finished = run(cli, write_app(tmp_path), out, *SIMULATED)
    assert finished.code == 0, finished.err
    assert finished.out.splitlines()[0].startswith("done after ")
    assert "16 done" in finished.out
    assert f"outputs, manifest and logs are in {out}" in finished.out
    assert [(one["id"], one["call"]) for one in outputs(out)] == [
        (f"r{n}", call) for n in range(8) for call in ("draft", "verdict")
    ]
    metadata = json.loads((out / "manifest.json").read_text("utf-8"))
    assert metadata["counts"]["all"] == {"done": 16}
    assert set(metadata["sha256"]) == {"app", "inputs", "outputs.jsonl", "outputs.parquet"}
    assert not (out / "dead.jsonl").exists()


def test_progress_off_a_terminal_is_a_line_now_and_then_after_what_is_assumed(cli, tmp_path):
    finished = run(cli, write_app(tmp_path), tmp_path / "run", *SIMULATED)
    lines = finished.err.splitlines()
    assert lines[0].startswith("note: switch times are assumed")
    assert lines[1].startswith("0.5 s: 0 of 16 tasks, ")
    assert "s left (" in lines[1]
    assert "writer starts (" in lines[1]
    quiet = run(cli, tmp_path / "judged.toml", tmp_path / "quiet", *SIMULATED, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


def test_a_line_of_progress_stays_short_with_many_models():
    from lengthwise.apps.run import ModelProgress, Progress
    from lengthwise.cli.app_run import line

    models = tuple(
        ModelProgress(f"a-model-with-a-long-name-{n:02}", "runs", 2000, {}, 256, 9, 12345.0, None, ((n,),))
        for n in range(12)
    )
    reported = line(Progress(95.4, 1, 3, models, 0.3, (400.0, 360.0, 440.0)))
    assert "a-model-with-a-long-name-00" in reported
    assert "8 more models" in reported
    assert len(reported) < 400


def test_the_table_of_a_terminal_has_each_model_and_fits_it():
    import io

    from rich.console import Console

    from lengthwise.apps.ledger import State
    from lengthwise.apps.run import ModelProgress, Progress
    from lengthwise.cli.app_run import table

    states = {State.DONE: 1200, State.DEAD: 1, State.READY: 799}
    models = (
        ModelProgress("stablelm-tuned-alpha-7b", "runs", 2000, states, 256, 9, 12345.0, None, ((0, 1), (2, 3)), stage=1,
                      left_s=312.0),
        ModelProgress("llama-3.1-70b", "starts", 2000, {State.WAITING: 2000}, 0, 0, 0.0, None, ((4, 5),), 31.7, 1),
        ModelProgress("chatglm3-6b", "waits", 9, {State.WAITING: 9}, 0, 0, 0.0, None, (), stage=2),
    )  # fmt: skip
    progress = Progress(95.4, 1, 3, models, 0.3, (400.0, 360.0, 440.0))

    def shown(width):
        out = io.StringIO()
        Console(file=out, width=width).print(table(progress))
        return out.getvalue().splitlines()

    wide = shown(120)
    assert wide[0] == "95 s: 1,201 of 4,009 tasks, stage 2 of 3, 6.67 min left (6.00 min to 7.33 min)"
    assert wide[1].split() == ["model", "done", "of", "under", "way", "tokens/s", "GPUs", "stage", "left", "dead"]
    assert wide[2].split() == [
        "stablelm-tuned-alpha-7b", "runs", "1,201", "2,000", "256", "12,345", "0,1", "2,3", "2", "5.20", "min", "1"
    ]  # fmt: skip
    assert wide[3].split() == ["llama-3.1-70b", "starts", "32", "s", "0", "2,000", "4,5", "2"]
    assert wide[4].split() == ["chatglm3-6b", "waits", "0", "9", "3"]
    narrow = shown(80)
    assert len(narrow) == len(wide) + 1, "nothing is broken"
    assert "under way" not in narrow[1]
    assert narrow[-1] == "a wider terminal also shows: stage, under way"
    assert "…" not in "".join(narrow)


def test_the_page_of_a_run_is_written(cli, tmp_path):
    finished = run(cli, write_app(tmp_path), tmp_path / "run", *SIMULATED, "--report", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text("utf-8")
    assert "The run finished after" in page
    assert "<h2>The run</h2>" in page
    assert "<h2>The plan</h2>" in page
    assert f"wrote {tmp_path / 'run.html'}" in finished.err


def test_a_plan_that_was_written_is_followed(cli, tmp_path):
    path = write_app(tmp_path)
    quick = ("--draws", 1, "--true-draws", 2, "--no-what-if", "-q")
    assert cli("app", "plan", path, *quick, "--method", "max", "--json", tmp_path / "plan.json").code == 0
    assert run(cli, path, tmp_path / "run", *SIMULATED, "--plan", tmp_path / "plan.json").code == 0
    planned = json.loads((tmp_path / "plan.json").read_text("utf-8"))["planned"]
    followed = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))["plan"]
    assert [[p["dp"] for p in stage] for stage in followed] == [[p["dp"] for p in stage] for stage in planned]


def test_a_run_is_resumed_only_when_requested_and_ends_the_same(cli, tmp_path):
    path, out = write_app(tmp_path), tmp_path / "run"
    run(cli, path, out, *SIMULATED, "-q")
    first = (out / "outputs.jsonl").read_bytes()
    finished = run(cli, path, out, *SIMULATED)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: ")
    assert "--resume" in finished.err
    again = run(cli, path, out, *SIMULATED, "--resume")
    assert again.code == 0
    assert "note: resumed: draft: 8 of 8 answers kept; verdict: 8 of 8" in again.err
    assert (out / "outputs.jsonl").read_bytes() == first


def test_a_folder_without_a_run_to_resume_is_reported(cli, tmp_path):
    path, out, message = write_app(tmp_path), tmp_path / "run", "has no run to resume: a new one starts"
    started = run(cli, path, out, *SIMULATED, "--resume")
    assert (started.code, message in started.out + started.err) == (0, True)
    again = run(cli, path, out, *SIMULATED, "--resume")
    assert (again.code, message in again.out + again.err) == (0, False)


def test_answers_retained_by_a_changed_application_are_reported(cli, tmp_path):
    path, out = write_app(tmp_path), tmp_path / "run"
    run(cli, path, out, *SIMULATED, "-q")
    drafts = [one["text"] for one in outputs(out) if one["call"] == "draft"]
    path = write_app(tmp_path, decision="Is it good? {{ draft }}")
    finished = run(cli, path, out, *SIMULATED, "--resume")
    assert finished.code == 0
    reported = "draft: 8 of 8 answers kept; verdict: 0 of 8 answers kept"
    assert finished.out.splitlines()[0] == reported
    lines = finished.err.splitlines()
    assert lines[0] == f"note: resumed: {reported}", "at the start too, before any progress"
    assert [one["text"] for one in outputs(out) if one["call"] == "draft"] == drafts


@pytest.mark.slow
def test_a_full_disk_exits_with_2_and_a_remedy_and_the_run_resumes_when_there_is_room(cli, tmp_path):
    """A file may not grow beyond a size: the ledger holds a part of the answers by then."""
    path, out = write_app(tmp_path, rows=300), tmp_path / "run"
    assert run(cli, path, tmp_path / "complete", *SIMULATED, "-q").code == 0
    command = [sys.executable, "-m", "lengthwise.cli", "app", "run", str(path), "--out", str(out), *SIMULATED]
    finished = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert finished.returncode == 2, finished.stderr
    assert f"error: cannot use the ledger {out / 'ledger.sqlite'}: " in finished.stderr
    assert "free space or repair the disk, and continue with --resume" in finished.stderr
    assert not (out / "outputs.jsonl").exists()
    status = json.loads(cli("app", "status", out, "--json").out)
    assert sum(status["tasks"].values()) == 600
    again = run(cli, path, out, *SIMULATED, "--resume")
    assert again.code == 0, again.err
    assert (out / "outputs.jsonl").read_bytes() == (tmp_path / "complete" / "outputs.jsonl").read_bytes()


def test_a_request_that_cannot_be_made_is_dead_and_the_rest_is_done(cli, tmp_path):
    path = write_app(tmp_path, decision="Judge {{ draft if part != 3 or 'tokens' not in draft else draft.split()[9] }}")
    rows = [json.dumps({"id": f"r{n}", "topic": "the sea", "part": n}) for n in range(8)]
    (tmp_path / "topics.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    finished = run(cli, path, tmp_path / "run", *SIMULATED)
    assert finished.code == 1, finished.err
    assert "15 done, 1 dead" in finished.out
    (dead,) = [json.loads(line) for line in (tmp_path / "run" / "dead.jsonl").read_text("utf-8").splitlines()]
    assert (dead["id"], dead["call"], dead["state"]) == ("r3", "verdict", "dead")
    assert "list object has no element 9" in dead["error"]
    assert f"1 tasks are dead or blocked by dead ones: {tmp_path / 'run' / 'dead.jsonl'}" in finished.err


def test_status_and_cancel_of_a_run_that_is_over(cli, tmp_path):
    out = tmp_path / "run"
    run(cli, write_app(tmp_path), out, *SIMULATED, "-q")
    assert cli("app", "status", out).out.splitlines()[0] == "16 of 16 tasks have finished: 16 done"
    reported = json.loads(cli("app", "status", out, "--json").out)
    assert (reported["tasks"], reported["runs_now"], reported["cancelled"]) == ({"done": 16}, [], False)
    assert cli("app", "cancel", out).out == "not running; there is nothing to cancel\n"


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_without_a_run_there_is_none_to_inspect(cli, tmp_path, command):
    finished = cli("app", command, tmp_path)
    assert finished.code == 2
    assert "must be the folder of a run" in finished.err


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (("--launcher", "locl"), "Did you mean: local"),
        (("--launcher", "static"), "address"),
        (("--plan", "none.json"), "cannot read the plan none.json"),
        (("--node", "2xA100-80GB", "--node", "2xA100-80GB"), "--launcher ray"),
        (("--report", "no/such/run.html"), "does not exist"),
    ],
)
def test_what_cannot_be_run_is_one_error_alone(cli, tmp_path, arguments, report):
    finished = run(cli, write_app(tmp_path), tmp_path / "run", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: ")
    assert report in finished.err
    assert not (tmp_path / "run" / "outputs.jsonl").exists()


class Process:
    """A run of its own, on real processes of emulated engines."""

    def __init__(self, cli, path, out, *more):
        self._cli, self._out = cli, out
        command = [sys.executable, "-m", "lengthwise.cli", "app", "run", str(path), "--out", str(out), *more]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )

    def has(self, test):
        """Waits until a test of the status returns true."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            finished = self._cli("app", "status", self._out, "--json")
            if finished.code == 0 and test(json.loads(finished.out)):
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError(f"it never came: {finished}")

    def completed(self):
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


def some_are_done(status):
    return 0 < status["tasks"].get("done", 0) < 60


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "killed", "cancelled"])
def test_an_interrupted_run_is_resumed_and_ends_as_if_undisturbed(cli, tmp_path, how):
    """Greedy answers: byte for byte those of an undisturbed run."""
    path = write_app(tmp_path, rows=30, step_s=0.02)
    assert run(cli, path, tmp_path / "complete", "-q").code == 0
    out = tmp_path / "run"
    process = Process(cli, path, out)
    process.has(some_are_done)
    if how == "cancelled":
        assert cli("app", "cancel", out).out == "the run is cancelled\n"
    else:
        os.kill(process.process.pid, signal.SIGINT if how == "interrupted" else signal.SIGKILL)
    code, printed, reported = process.completed()
    if how == "killed":
        assert code == -signal.SIGKILL
    else:
        assert code == 130, reported
        assert ("stopped after" if how == "interrupted" else "cancelled after") in printed
    status = cli("app", "status", out)
    assert "not running; continue with app run --resume" in status.out
    again = run(cli, path, out, "--resume")
    assert again.code == 0, again.err
    assert (out / "outputs.jsonl").read_bytes() == (tmp_path / "complete" / "outputs.jsonl").read_bytes()
