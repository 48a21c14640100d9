"""The program as a whole: help, version, exit codes, and how fast it starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lengthwise.cli import main, program
from lengthwise.schema.errors import InputError, InternalError

ROOT = Path(__file__).parents[2]
COMMANDS = [(), ("simulate",), ("explain",), ("catalog",), ("workload",), ("workload", "show")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_that_is_a_command_line_of_its_own(cli, command):
    finished = cli(*command, "--help")
    assert finished.code == 0
    assert cli(*command, "-h") == finished
    after = finished.out.split("Example")[1].splitlines()
    assert any(line.strip().startswith("lengthwise ") for line in after)


def test_help_lists_the_commands(cli):
    finished = cli("--help")
    for command in ("simulate", "explain", "catalog", "workload"):
        assert f"\n  {command}" in finished.out


def test_without_arguments_it_names_six_tasks_by_commands_that_exist(cli):
    finished = cli()
    assert (finished.code, finished.err) == (0, "")
    tasks = [line.split()[1:] for line in finished.out.splitlines() if line.startswith("  lengthwise ")]
    assert len(tasks) == 6
    for words in tasks:
        assert words[0] in program.COMMANDS
        assert {word for word in words if word.startswith("--")} <= set(
            cli(*words[: 1 + (words[0] == "app")], "--help").out.split()
        )
        assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))


def test_version(cli):
    finished = cli("--version")
    assert (finished.code, finished.out.split()[0]) == (0, "lengthwise")


@pytest.mark.parametrize("arguments", [("no-such-command",), ("simulate",), ("simulate", "--seeds", "0", "x")])
def test_wrong_usage_exits_with_2_and_reports_on_standard_error(cli, arguments):
    finished = cli(*arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.strip()


def _raises(error):
    def command() -> None:
        raise error

    return command


@pytest.fixture
def broken(monkeypatch):
    """A program whose one command raises."""

    def make(error):
        app = program.typer.Typer(pretty_exceptions_enable=False)
        app.command()(_raises(error))
        monkeypatch.setattr(program, "app", app)

    return make


def test_your_errors_are_exit_2_with_their_notes_and_no_traceback(cli, broken):
    error = InputError("x must be 1; it is 2")
    error.add_note("in variant 'a' of s.toml")
    broken(error)
    assert cli() == (2, "", "error: x must be 1; it is 2\n  (in variant 'a' of s.toml)\n")


@pytest.mark.parametrize("error", [InternalError("a law"), KeyError("k")], ids=["law", "slip"])
def test_our_errors_are_exit_1_with_a_traceback_and_a_plea(cli, broken, error):
    broken(error)
    finished = cli()
    assert finished.code == 1
    assert "Traceback" in finished.err
    assert "please report" in finished.err


def test_ctrl_c_is_exit_130(cli, broken):
    broken(KeyboardInterrupt())
    finished = cli()
    assert (finished.code, finished.out) == (130, "")
    assert "Traceback" not in finished.err


def test_main_takes_the_command_line_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lengthwise", "--version"])
    assert main() == 0
    assert capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom lengthwise.cli import main\nmain(['--help'])\nheavy = {'numpy', 'numba', 'polars', "
        "'plotly', 'scipy', 'pydantic', 'rich'} & set(sys.modules)\nsys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_model_name_is_reported_before_anything_of_the_simulation_is_imported():
    code = (
        "import sys\nfrom lengthwise.cli import main\n"
        "main(['simulate', 'examples/chat-70b.toml', '--set', 'deployment.model=llama-2-70'])\n"
        "late = {'numba', 'llvmlite', 'scipy', 'polars', 'rich', 'lengthwise.metrics.summary', "
        "'lengthwise.schema.plan', 'lengthwise.predict.distribution', 'lengthwise.cost.roofline_tables', "
        "'lengthwise.engine.kernel_runner'}\n"
        "sys.exit(str(late & set(sys.modules) or 'none'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Did you mean: llama-2-70b" in done.stderr
    assert done.stderr.splitlines()[-1] == "none"


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -c 'from lengthwise.cli import main; raise SystemExit(main())' catalog models"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_an_encoding_without_our_characters_is_no_bug():
    code = "from lengthwise.cli import main; raise SystemExit(main(['workload', 'show', 'chat-1m']))"
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=narrow)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


def test_a_place_that_another_user_closed_is_no_bug(cli, monkeypatch, tmp_path):
    """Even the check whether a file exists is denied: the program reports it for every command that looks."""
    locked = tmp_path / "locked" / "run"
    exists = Path.exists

    def closed(path):
        if "locked" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    finished = cli(
        "app", "run", ROOT / "examples" / "apps" / "critique.toml", "--out", locked, "--launcher", "simulated"
    )
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith(f"error: this user has no access to {locked}")
    assert "(Permission denied)" in finished.err
    assert "Traceback" not in finished.err
