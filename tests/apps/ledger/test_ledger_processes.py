"""Several processes work on one ledger at once: nothing twice, nothing lost."""

from __future__ import annotations

import threading

from ledger_world import FORKED, LIMIT_S, child, drain_all, finish, finished, tasks_of, undisturbed

from lengthwise.apps.ledger import State, open_ledger

MOST = 10**9


def test_several_processes_lease_from_one_ledger_nothing_twice_and_nothing_lost(place):
    tasks, out, meet = tasks_of(500), FORKED.Queue(), FORKED.Barrier(4)
    expected = undisturbed(place("expected"), tasks)
    with open_ledger(place()) as ledger:
        ledger.open("run", tasks)
    processes = [child(drain_all, place(), f"owner{i}", MOST, out, meet) for i in range(4)]
    message = [out.get(timeout=LIMIT_S) for _ in processes]
    assert [finished(process) for process in processes] == [0] * 4
    final = [task for own in message for task, state in own if state != State.READY]
    assert len(final) == len(set(final)), "no task was ended by two"
    assert all(message), "all worked"
    # One may find nothing ready while others hold the rest: what is left is finished here.
    assert finish(place(), tasks) == expected
    with open_ledger(place()) as ledger:
        states = {row.task: row.state for row in ledger.rows(0, 500)}
    assert all(states[task] == state for own in message for task, state in own if state != State.READY)


def test_a_status_is_read_while_a_run_writes(place):
    tasks, out = tasks_of(300), FORKED.Queue()
    with open_ledger(place()) as ledger:
        ledger.open("run", tasks)
    writer = child(drain_all, place(), "writer", MOST, out)
    looks = []
    with open_ledger(place(), read_only=True) as status:
        while not looks or writer.is_alive():
            counts = status.counts()
            assert sum(counts.values()) == 300, "counts add up at every moment"
            looks.append(sum(n for (_, state), n in counts.items() if state >= State.DONE))
    out.get(timeout=LIMIT_S)
    assert finished(writer) == 0
    assert looks == sorted(looks), "what ended stays so"


def test_one_handle_serves_several_threads(place):
    tasks = tasks_of(200)
    with open_ledger(place()) as ledger:
        ledger.open("run", tasks)
        got = []

        def lease():
            while leases := ledger.lease(0, 1, owner="us", now_s=0, lease_s=60):
                got.append(leases[0].task)

        threads = [threading.Thread(target=lease) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        ready = sorted(row.task for row in ledger.rows(0, 200) if row.state == State.LEASED)
    assert sorted(got) == ready


def test_two_coordinators_that_start_at_once_lay_out_once(place):
    tasks = tasks_of(300)
    message, gate = [], threading.Barrier(4)

    def start():
        gate.wait(LIMIT_S)
        with open_ledger(place()) as ledger:
            message.append(ledger.open("run", tasks))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(message) == [False, True, True, True]
