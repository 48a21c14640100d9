"""A run that always ends alike, however often it is cut off, and processes that work on it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import numpy as np

from lengthwise.apps.ledger import Ending, Output, Partial, State, open_ledger
from lengthwise.apps.ledger.postgres_store import PostgresStore
from lengthwise.apps.ledger.sql_store import SqliteStore
from lengthwise.schema.errors import OutputError
from lengthwise.testing.ledgers import broken_invariant, draw_tasks

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["numpy", "psycopg", "pytest", "lengthwise.testing.ledgers"])
LIMIT_S = 120
FAR_S = 1e9
LONG = "x" * 400_000


def tasks_of(count, seed=7):
    return draw_tasks(np.random.default_rng(seed), count, models=1)


def ending(lease):
    """What comes of a task, by its number alone; five tasks share each key."""
    if lease.task % 7 == 6:
        return Ending(lease.task, lease.fence, State.DEAD, error="poison")
    if lease.task % 5 == 4:
        return Ending(lease.task, lease.fence, State.SKIPPED)
    if lease.attempt == 1 and lease.task % 6 == 5:
        return Ending(lease.task, lease.fence, State.READY, error="once more")
    key = f"k{lease.task // 5}"
    return Ending(lease.task, lease.fence, State.DONE, key, Output(f"of {key}", "stop", 2, 3))


def drain(ledger, owner, *, batch=3, acknowledged=lambda _: None, most=10**9):
    """Works until nothing is ready; how many endings were accepted."""
    accepted = 0
    while accepted < most and (leases := ledger.lease(0, batch, owner=owner, now_s=0.0, lease_s=60.0)):
        ledger.heartbeat(owner, now_s=1.0, lease_s=60.0)
        ledger.save([(f"k{lease.task // 5}", Partial(f"so far {lease.task}", (1,), (2,))) for lease in leases])
        endings = [ending(lease) for lease in leases]
        taken = ledger.finalize(endings)
        ledger.set_metadata({"last": str(leases[-1].task)})
        acknowledged([one for one, good in zip(endings, taken, strict=True) if good])
        accepted += sum(taken)
    return accepted


def finish(place, tasks):
    """Opened again and resumed, a run stands whole, and ends so (by task: state, key, answer, error)."""
    with open_ledger(place) as ledger:
        rows = ledger.rows(0, len(tasks) + 1)
        assert broken_invariant(tasks, rows) == ""
        assert sum(ledger.counts().values()) == len(tasks)
        assert ledger.open("run", tasks), "resumed, not laid out anew"
        ledger.expire(now_s=FAR_S)
        drain(ledger, "resumed", batch=50)
        finished = ledger.rows(0, len(tasks) + 1)
        assert broken_invariant(tasks, finished) == ""
        assert all(row.state >= State.DONE for row in finished)
        assert ledger.partials([row.key for row in finished if row.key]) == {}
        return [(row.task, row.state, row.key, row.output, row.error) for row in finished]


def undisturbed(place, tasks):
    with open_ledger(place) as ledger:
        assert not ledger.open("run", tasks)
    return finish(place, tasks)


def child(work, *values):
    """A process of its own that does the work; killed with the test if it hangs."""
    process = FORKED.Process(target=work, args=values, daemon=True)
    process.start()
    return process


def finished(process):
    process.join(LIMIT_S)
    assert process.exitcode is not None, "a process hangs"
    return process.exitcode


def drain_and_die(place, tasks, kill_at, log):
    """Lays out and drains, killed by itself before the statement of that number; notes what was acknowledged."""
    count = 0

    def look(*_):
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = open_ledger(place)
    watch(ledger, look)
    ledger.open("run", tasks)
    drain(
        ledger,
        "mortal",
        batch=4,
        acknowledged=lambda good: os.write(file, "".join(f"{e.task} {e.state:d}\n" for e in good).encode()),
    )
    ledger.close()
    os.write(file, f"statements {count}\n".encode())


def watch(ledger, check):
    """Looks before each statement, those that begin and end a transaction too."""
    store = ledger.store
    if isinstance(store, SqliteStore):
        store.connection.set_trace_callback(check)
        return
    for name in ("rows", "changed", "many", "load"):
        setattr(PostgresStore, name, _monitor_task(getattr(PostgresStore, name), check))
    write = store.write
    store.write = lambda work: write(lambda session: _then(work(session), check))


def _monitor_task(method, check):
    def watched(*values):
        check()
        return method(*values)

    return watched


def _then(done, check):
    """Once more before the transaction ends."""
    check()
    return done


def drain_all(place, owner, most, out, meet=None):
    """Drains the ledger and reports the tasks that it ended; ``meet``: a barrier before its first report."""
    own = []

    def acknowledged(good):
        if meet is not None and good and not own:
            meet.wait(LIMIT_S)
        own.extend((one.task, int(one.state)) for one in good)

    with open_ledger(place) as ledger:
        drain(ledger, owner, batch=5, most=most, acknowledged=acknowledged)
    out.put(own)


def drain_until_killed(place, tasks):
    with open_ledger(place) as ledger:
        ledger.open("run", tasks)
        ledger.expire(now_s=FAR_S)
        drain(ledger, "mortal")


def fill(place, tasks, out):
    """A process whose files may not grow beyond 1 MB: what it hears when it writes more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    message = ""
    try:
        with open_ledger(place) as ledger:
            drain(ledger, "me", most=20)
            for i in range(100):
                ledger.save([(f"p{i}", Partial(LONG))])
    except OutputError as error:
        message = str(error)
    Path(out).write_text(message)
