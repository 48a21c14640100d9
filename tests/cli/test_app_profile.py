"""``lengthwise app profile``: an application's file to a folder that plans and runs take."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
import typer

from lengthwise.cli import app_profile
from lengthwise.config.app_file import load_app
from lengthwise.schema.errors import InputError
from lengthwise.usecases.app_profile_folder import read_profile
from lengthwise.usecases.app_setup import load_app_request

APP = '''
name = "judged"
[inputs]
file = "topics.jsonl"
[models.writer]
model = "opt-125m"
engine = {{ max_num_seqs = 4, max_model_len = 2048 }}
[models.judge]
model = "opt-125m"
engine = {{ max_num_seqs = 4, max_model_len = 2048 }}
[calls.draft]
model = "writer"
prompt = "Write of {{{{ topic }}}}"
max_tokens = 24
[calls.verdict]
model = "judge"
prompt = "Judge {{{{ draft }}}}"
max_tokens = 24
[cluster]
nodes = ["2xA100-80GB"]
[run]
sleeps = true
max_num_seqs = 4
command = """{python} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}} \\
--fixed-s 0.002"""
'''


@pytest.fixture
def profile(monkeypatch, capsys):
    """Runs the command as the program does: what is wrong with the input is an error."""
    monkeypatch.setenv("COLUMNS", "200")
    program = typer.Typer()
    program.command()(app_profile.run)

    def run(*arguments):
        code = program([str(argument) for argument in arguments], standalone_mode=False) or 0
        caught = capsys.readouterr()
        return SimpleNamespace(exit_code=code, stdout=caught.out, stderr=caught.err, output=caught.out + caught.err)

    return run


@pytest.fixture
def application(tmp_path):
    path = tmp_path / "judged.toml"
    path.write_text(APP.format(python=sys.executable), "utf-8")
    rows = [json.dumps({"topic": f"the sea, part {n}"}) for n in range(6)]
    (tmp_path / "topics.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    return path


@pytest.mark.slow
def test_a_profile_is_measured_shown_saved_and_applied(profile, application, tmp_path):
    out = tmp_path / "profile"
    finished = profile(application, "--out", out, "--rows", 4, "--times", 2)
    assert finished.exit_code == 0, finished.output
    shown = finished.stdout
    for name in ("writer", "judge"):
        assert re.search(rf"{name} +A100-80GB, tp=1 +2 +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+ +[\d.]+ ± ", shown)
        assert re.search(rf"{name} +4 +4 +[\d.]+ ± [\d.]+ +\d", shown)
        assert (out / f"lengths-{name}.csv").exists()
    assert "writer: started and stopped 2 of 2 times" in finished.stderr
    assert f"use it: lengthwise app plan {application} --profile {out}" in finished.stderr

    after = load_app_request(application, profile=out)
    book = read_profile(out)
    assert after.space.times.measured == book.switch_times().measured | {
        (name, "A100-80GB", 2, 1, how): seconds
        for (name, _, _, _, how), seconds in book.switch_times().measured.items()
    }
    assert all(model.lengths is not None for model in after.app.models)
    assert "switching times of judge are measured" in after.notes

    again = profile(application, "--out", out, "--rows", 4, "--times", 2)
    assert again.stderr.count("already measured") == 3
    assert again.stdout == shown
    assert profile(application, "--out", out, "--rows", 4, "--quiet").output == ""


@pytest.mark.slow
def test_lengths_are_read_back_by_a_file_of_its_own(profile, application, tmp_path):
    out = tmp_path / "profile"
    profile(application, "--out", out, "--rows", 4, "--times", 1, "--models", "writer")
    lengths = 'models.writer.lengths={ file = "profile/lengths-writer.csv", column = "output_tokens" }'
    writer = load_app(application, [lengths]).app.models[0]
    assert writer.lengths is not None
    assert not (out / "lengths-judge.csv").exists()


def test_external_engines_are_measured_for_lengths_alone(profile, application, tmp_path):
    import asyncio
    import threading

    from lengthwise.testing.engine_server import EngineServer, EngineSpec

    ready, over, urls = threading.Event(), threading.Event(), {}

    async def serve():
        async with EngineServer(EngineSpec("writer")) as one, EngineServer(EngineSpec("judge")) as two:
            urls.update(writer=one.url, judge=two.url)
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, over.wait)

    companion = threading.Thread(target=lambda: asyncio.run(serve()))
    companion.start()
    try:
        assert ready.wait(60)
        sets = [word for name, url in urls.items() for word in ("--set", f'run.engines.{name}.urls=["{url}"]')]
        out = tmp_path / "profile"
        finished = profile(application, "--out", out, "--rows", 3, "--set", "run.launcher=static", *sets)
    finally:
        over.set()
        companion.join()
    assert finished.exit_code == 0, finished.output
    assert "note: the engines already run" in finished.stdout
    book = read_profile(out)
    assert book.switches == ()
    assert [(one.model, one.outputs) for one in book.lengths] == [("writer", 3), ("judge", 3)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "writter"), "Did you mean: writer"),
        (("--shapes", "some"), "choice of shapes"),
        (("--set", "run.launcher=simulated"), "only real engines can be measured"),
        (("--node", "8xA100-8GB"), "A100-80GB"),
    ],
)
def test_an_unmeasurable_setup_is_reported(profile, application, tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        profile(application, "--out", tmp_path / "profile", *words)
    assert not (tmp_path / "profile").exists()


def test_an_application_without_gpus_is_reported_with_how_to_name_them(profile, application, tmp_path):
    text = application.read_text("utf-8")
    application.write_text(text.replace('[cluster]\nnodes = ["2xA100-80GB"]\n', ""), "utf-8")
    with pytest.raises(InputError, match="--node 8xA100-80GB"):
        profile(application, "--out", tmp_path / "profile")
    words = ("--node", "1xA100-80GB", "--rows", 0, "--times", 1, "--models", "judge")
    assert profile(application, "--out", tmp_path / "profile", *words).exit_code == 0
