"""The pool: turns of sessions, newest answers, ends of tasks, and what a session sees."""

from __future__ import annotations

import threading

import pytest

from lengthwise.schema.errors import InputError
from lengthwise.ui.work import COMPLETE, FIRST, JOB, MAX_FILES, MAX_JOBS, CancelledTaskError, Pool, Task

LIMIT_S = 60.0


def test_sessions_take_turns_and_first_answers_pass_jobs():
    pool, gate, order = Pool(threads=1), threading.Event(), []
    busy, calm = pool.session(None), pool.session(None)
    started = threading.Event()
    pool.add(Task(busy, "0", FIRST, lambda _: (started.set(), gate.wait(LIMIT_S))))
    assert started.wait(LIMIT_S)
    tasks = [pool.add(Task(busy, f"job {at}", JOB, lambda _, at=at: order.append(f"busy {at}"))) for at in range(3)]
    tasks.append(pool.add(Task(calm, "tab", JOB, lambda _: order.append("calm"))))
    tasks.append(pool.add(Task(busy, "tab", FIRST, lambda _: order.append("first"))))
    gate.set()
    for task in tasks:
        task.future.result(LIMIT_S)
    assert order == ["first", "calm", "busy 0", "busy 1", "busy 2"]


def test_a_thread_is_free_for_first_answers_while_jobs_and_complete_answers_run():
    pool, gate = Pool(threads=3), threading.Event()
    session = pool.session(None)
    long = [pool.add(Task(session, f"{at}", JOB, lambda _: gate.wait(LIMIT_S))) for at in range(4)]
    long += [pool.add(Task(session, f"{at}", COMPLETE, lambda _: gate.wait(LIMIT_S))) for at in range(4)]
    assert pool.add(Task(session, "9", FIRST, lambda _: "found")).future.result(LIMIT_S) == "found"
    gate.set()
    assert all(task.future.result(LIMIT_S) for task in long)


def test_jobs_that_run_together_have_few_threads_for_their_work():
    """The first has all processors of jobs, the second half of them: together at most n (1 + ln n)."""
    pool, gate = Pool(threads=10), threading.Event()
    jobs = []
    for at in range(8):
        started = threading.Event()
        work = lambda _, started=started: (started.set(), gate.wait(LIMIT_S))  # noqa: E731
        jobs.append(pool.add(Task(pool.session(None), f"{at}", JOB, work)))
        assert started.wait(LIMIT_S)
    assert [task.threads for task in jobs] == [8, 4, 2, 2, 1, 1, 1, 1]
    gate.set()


def test_the_newest_answer_of_a_tab_ends_its_older_ones_and_no_others():
    pool, gate, started = Pool(threads=1), threading.Event(), threading.Event()
    session = pool.session(None)

    def checked(task):
        started.set()
        gate.wait(LIMIT_S)
        task.check()

    running = pool.add(Task(session, "a", FIRST, checked))
    assert started.wait(LIMIT_S)
    other, waiting = (pool.add(Task(session, tab, FIRST, lambda _: 1)) for tab in "ba")
    newest = pool.add(Task(session, "a", COMPLETE, lambda _: 2))
    gate.set()
    for older in (running, waiting):
        with pytest.raises(CancelledTaskError):
            older.future.result(LIMIT_S)
    assert (other.future.result(LIMIT_S), newest.future.result(LIMIT_S)) == (1, 2)


def test_a_session_sees_its_own_jobs_and_files_and_their_number_is_bounded():
    pool, gate = Pool(threads=1), threading.Event()
    one, other = pool.session(None), pool.session("forged")
    assert pool.session(one.key) is one
    assert other.key not in ("forged", one.key)
    jobs = [pool.add(Task(one, "", JOB, lambda _: gate.wait(LIMIT_S))) for _ in range(MAX_JOBS)]
    with pytest.raises(InputError, match="unfinished jobs"):
        pool.add(Task(one, "", JOB, lambda _: None))
    with pytest.raises(InputError, match="no such job"):
        other.job(jobs[0].id)
    pool.cancel(jobs[-1])
    gate.set()
    assert one.job(jobs[0].id).future.result(LIMIT_S)

    files = [one.store("../../etc/pass wd", b"text") for _ in range(MAX_FILES + 1)]
    assert one.file(files[-1]).read_bytes() == b"text"
    assert one.file(files[-1]).name == "_.._etc_pass wd"
    for session, identity in ((other, files[-1]), (one, files[0]), (one, ["list"])):
        with pytest.raises(InputError, match="no such file"):
            session.file(identity)


def test_errors_name_uploaded_files_by_their_names():
    pool = Pool(threads=1)
    session = pool.session(None)
    path = session.file(session.store("calls.csv", b"a"))

    def fails(_):
        raise InputError(f"{path}, line 1: must be a trace")

    with pytest.raises(InputError, match=r"^calls\.csv, line 1: must be a trace$"):
        pool.add(Task(session, "tab", FIRST, fails)).future.result(LIMIT_S)
