"""Full disks, locked files, broken connections: each is reported, and the store stays intact."""

from __future__ import annotations

import sqlite3
import threading
import time

import pytest
from ledger_world import FAR_S, LONG, child, fill, finish, finished, tasks_of, undisturbed

from lengthwise.apps.ledger import Ending, Output, State, open_ledger
from lengthwise.schema.errors import OutputError


def test_on_a_full_disk_a_settle_is_refused_completely_and_works_when_there_is_room(tmp_path):
    path = tmp_path / "run.sqlite"
    tasks = tasks_of(60)
    with open_ledger(path) as ledger:
        ledger.open("run", tasks)
        leases = ledger.lease(0, 3, owner="me", now_s=0, lease_s=60)
        before = ledger.rows(0, 60)
        connection = ledger.store.connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 5}")  # SQLite then reports a full disk
        with pytest.raises(OutputError, match=r"full.*free space"):
            ledger.finalize([done(lease, LONG) for lease in leases])
        assert ledger.rows(0, 60) == before, "all of it or nothing"
        assert ledger.results([f"k{lease.task}" for lease in leases]) == {}
        connection.execute(f"PRAGMA max_page_count = {2**31 - 2}")
        assert ledger.finalize([done(lease, "short") for lease in leases]) == [True] * 3


def done(lease, text):
    return Ending(lease.task, lease.fence, State.DONE, f"k{lease.task}", Output(text, "stop", 1, 1))


def test_a_file_size_limit_is_reported_and_the_ledger_is_intact(tmp_path):
    path, tasks = str(tmp_path / "run.sqlite"), tasks_of(60)
    with open_ledger(path) as ledger:
        ledger.open("run", tasks)
    assert finished(child(fill, path, tasks, str(tmp_path / "message"))) == 0
    assert "recorded outputs remain" in (tmp_path / "message").read_text()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert finish(path, tasks) == undisturbed(str(tmp_path / "expected.sqlite"), tasks)


def test_while_another_holds_the_file_it_waits(tmp_path):
    path = tmp_path / "run.sqlite"
    with open_ledger(path) as ledger:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        free = threading.Timer(0.3, other.execute, ["ROLLBACK"])
        free.start()
        assert other.in_transaction
        assert not ledger.open("run", tasks_of(5))
        assert not other.in_transaction, "not before the other had let go"
        free.join()
        other.close()


def test_a_long_lock_by_another_process_is_reported_and_reads_continue(tmp_path):
    path = tmp_path / "run.sqlite"
    with open_ledger(path, timeout_s=0.1) as ledger:
        ledger.open("run", tasks_of(5))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutputError, match=r"free for writing within 0\.1 s; another process"):
            ledger.lease(0, 1, owner="me", now_s=0, lease_s=1)
        assert sum(ledger.counts().values()) == 5
        other.close()
        assert ledger.lease(0, 1, owner="me", now_s=0, lease_s=1)


def test_a_long_lock_by_another_client_of_the_server_is_reported(server):
    import psycopg

    place = server.place("reserved")
    with open_ledger(place, timeout_s=0.2) as ledger:
        ledger.open("run", tasks_of(5))
        (lease,) = ledger.lease(0, 1, owner="me", now_s=0, lease_s=1)
        url = place.partition("&schema")[0]
        with psycopg.connect(url) as other:
            other.execute("SELECT * FROM reserved.tasks FOR UPDATE")
            with pytest.raises(OutputError, match=r"free for writing within 0\.2 s; another client"):
                ledger.finalize([done(lease, "x")])
            assert ledger.lease(0, 5, owner="me", now_s=0, lease_s=1) == [], "what others hold is left out"
            assert ledger.expire(now_s=FAR_S) == 0
            assert sum(ledger.counts().values()) == 5
            other.rollback()
        assert ledger.finalize([done(lease, "x")]) == [True]


def test_a_client_that_stops_within_a_transaction_is_let_go_of(server):
    place = server.place("stopped")
    with open_ledger(place, timeout_s=0.3) as stopped, open_ledger(place, timeout_s=30) as ledger:
        ledger.open("run", tasks_of(5))
        (lease,) = ledger.lease(0, 1, owner="me", now_s=0, lease_s=1)

        def stop(session):
            session.rows("SELECT * FROM tasks FOR UPDATE")
            assert ledger.finalize([done(lease, "x")]) == [True], "the server ends the transaction that does nothing"
            session.rows("SELECT 1")

        with pytest.raises(OutputError):
            stopped.store.write(stop)
        assert sum(stopped.counts().values()) == 5, "and connects anew"


def test_a_broken_connection_is_reported_and_reopened(server):
    with open_ledger(server.place("broken")) as ledger:
        ledger.open("run", tasks_of(5))
        with pytest.raises(OutputError, match="check the server"):
            ledger.store.write(lambda s: s.rows("SELECT pg_terminate_backend(pg_backend_pid())"))
        assert sum(ledger.counts().values()) == 5


def test_deadlocked_transactions_both_complete(server):
    """The server ends one of two transactions that wait for each other; the ledger retries that one."""
    place, tasks = server.place("crossed"), tasks_of(4)
    with open_ledger(place) as one, open_ledger(place) as two:
        one.open("run", tasks)
        met, tried = threading.Barrier(2), []

        def cross(session, first, second):
            tried.append(first)
            session.rows("SELECT 1 FROM tasks WHERE task = ? FOR UPDATE", first)
            if len(tried) <= 2:
                met.wait(30)
            session.rows("SELECT 1 FROM tasks WHERE task = ? FOR UPDATE", second)
            return time.monotonic()

        message = []
        other = threading.Thread(target=lambda: message.append(two.store.write(lambda s: cross(s, 1, 0))))
        other.start()
        message.append(one.store.write(lambda s: cross(s, 0, 1)))
        other.join(60)
        assert len(message) == 2
        assert len(tried) >= 3, "one of them was retried"
