"""Several coordinators on one PostgreSQL ledger, as a user starts them; one is killed, the other ends the run alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ledger"))
from postgres_world import Server, programs

from lengthwise.apps.ledger import FINISHED, State, open_ledger
from lengthwise.schema.errors import LengthwiseError

pytestmark = pytest.mark.slow
LIMIT_S = 240
PROGRAM = str(Path(sys.executable).parent / "lengthwise")
ENGINE = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
ROWS = 24
FILE = f"""
[inputs]
file = "rows.jsonl"
id = "id"

[models.a]
model = "opt-125m"

[calls.draft]
model = "a"
prompt = "Write of {{{{ topic }}}}"
max_tokens = 24

[calls.judge]
model = "a"
prompt = "Judge: {{{{ draft }}}}"
max_tokens = 16

[cluster]
nodes = ["1xA100-80GB"]

[run]
launcher = "local"
command = "{ENGINE} --fixed-s 0.05"
max_num_seqs = 4
lease = 3
save = 0.2
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(programs(), tmp_path_factory.mktemp("postgres"))
    yield started
    started.stop()


@pytest.fixture
def app(tmp_path):
    rows = [json.dumps({"id": f"r{n}", "topic": f"t{n}"}) for n in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "app.toml").write_text(FILE, encoding="utf-8")
    return tmp_path / "app.toml"


def command(app, out, *more):
    return [PROGRAM, "app", "run", str(app), "--out", str(out), "--quiet", *more]


def done(store):
    try:
        with open_ledger(store, read_only=True) as ledger:
            counts = ledger.counts()
    except LengthwiseError:  # it is not laid out yet
        return 0, 0
    return sum(n for (_, state), n in counts.items() if state == State.DONE), sum(counts.values())


def until(true, what):
    ends_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < ends_s, what
        time.sleep(0.02)


def test_one_of_two_coordinators_is_killed_and_the_other_ends_the_run_alike(server, app, tmp_path):
    subprocess.run(command(app, tmp_path / "isolated"), check=True, timeout=LIMIT_S)
    store = server.place(f"t{uuid.uuid4().hex[:12]}")
    both = [
        subprocess.Popen(command(app, tmp_path / name, "--store", store), process_group=0) for name in ("one", "two")
    ]
    try:
        until(lambda: done(store)[0] >= 4, "both are under way")
        assert both[0].poll() is None
        os.kill(both[0].pid, signal.SIGKILL)
        assert both[0].wait() == -signal.SIGKILL
        assert done(store)[0] < 2 * ROWS, "there was something left to do"
        assert both[1].wait(LIMIT_S) == 0
    finally:
        for one in both:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
    alone, other = ((tmp_path / name / "outputs.jsonl").read_bytes() for name in ("isolated", "two"))
    assert other == alone
    assert len(alone.splitlines()) == 2 * ROWS
    with open_ledger(store, read_only=True) as ledger:
        counts = ledger.counts()
        assert sum(counts.values()) == 2 * ROWS
        assert {state for (_, state), n in counts.items() if n} <= set(FINISHED)
    reported = [PROGRAM, "app", "status", str(tmp_path / "two"), "--store", store]
    message = subprocess.run([*reported, "--json"], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert json.loads(message.stdout)["tasks"]["done"] == 2 * ROWS


def test_the_store_may_stand_in_the_file(server, app, tmp_path):
    store = server.place(f"t{uuid.uuid4().hex[:12]}")
    words = ["--launcher", "simulated", "--set", f'run.store="{store}"']
    subprocess.run(command(app, tmp_path / "run", *words), check=True, timeout=LIMIT_S)
    assert done(store) == (2 * ROWS, 2 * ROWS)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_without_the_driver_the_extra_is_named(app, tmp_path):
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "psycopg.py").write_text("raise ImportError('no psycopg')", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "absent")}
    words = command(app, tmp_path / "run", "--store", "postgresql://nowhere/x", "--launcher", "simulated")
    message = subprocess.run(words, env=env, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert message.returncode == 2
    assert "lengthwise[postgres]" in message.stderr
