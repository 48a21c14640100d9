"""Both stores pass the kit; and any sequence of calls answers as the naive rule does."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lengthwise.apps.ledger import Ending, Ledger, Output, Partial, State, open_ledger
from lengthwise.testing import LEDGER_CHECKS, check_ledger
from lengthwise.testing.ledgers import ReferenceLedger, broken_invariant, draw_tasks

KEYS = [f"k{i}" for i in range(6)]
OWNERS = ("ann", "bob")


@pytest.mark.slow
def test_both_stores_pass_the_kit(place):
    assert check_ledger(lambda name: open_ledger(place(name))) == list(LEDGER_CHECKS)


class Generous(Ledger):
    """Forgets whose last lease it was."""

    def finalize(self, endings):
        fences = {lease.task: lease.fence for lease in getattr(self, "last", [])}
        return super().finalize([replace(one, fence=fences.get(one.task, one.fence)) for one in endings])

    def lease(self, *values, **named):
        self.last = super().lease(*values, **named)
        return self.last


class Forgetful(Ledger):
    """Keeps partials of what is answered, and answers with them."""

    def results(self, keys):
        return {key: output for key, output in super().results(keys).items() if key != "k"}


class Greedy(Ledger):
    """Says of an expired lease that nothing ran out."""

    def expire(self, *, now_s):
        super().expire(now_s=now_s)
        return 0


@pytest.mark.parametrize("wrong", [Generous, Forgetful, Greedy])
def test_the_kit_finds_what_is_wrong(wrong, tmp_path):
    with pytest.raises(AssertionError, match=r"must|returns"):
        check_ledger(lambda name: wrong(open_ledger(tmp_path / f"{name}.sqlite").store))


class Machine(RuleBasedStateMachine):
    """A ledger beside the rule; laws that need no rule stand as invariants."""

    places = None
    """From a name to a place, set by the test."""

    def __init__(self):
        super().__init__()
        self.place = type(self).places(uuid.uuid4().hex[:8])
        self.ledger, self.model = open_ledger(self.place), ReferenceLedger()
        self.now_s, self.runs, self.leases, self.message = 0.0, 0, [], itertools.count()
        self.holder, self.fences, self.ends, self.answers = {}, {}, {}, {}

    def both(self, name, *values, **named):
        came, reported = (getattr(one, name)(*values, **named) for one in (self.ledger, self.model))
        assert came == reported, name
        return came

    @initialize(seed=st.integers(0, 2**32), count=st.integers(1, 14))
    def lay_out(self, seed, count):
        self.runs += 1
        self.tasks = draw_tasks(np.random.default_rng(seed), count, models=2)
        self.holder, self.ends = {}, {}
        assert not self.both("open", f"run {self.runs}", self.tasks)

    @rule(seed=st.integers(0, 99), count=st.integers(1, 14), same=st.integers(0, 9))
    def open_again(self, seed, count, same):
        if same:
            assert self.both("open", f"run {self.runs}", self.tasks)
        else:
            self.lay_out(seed, count)

    @rule(model=st.integers(0, 1), most=st.integers(-1, 5), owner=st.sampled_from(OWNERS), lease_s=st.integers(0, 9))
    def lease(self, model, most, owner, lease_s):
        for lease in self.both("lease", model, most, owner=owner, now_s=self.now_s, lease_s=lease_s):
            assert lease.task not in self.holder, "leased to one at a time"
            assert lease.fence > self.fences.get(lease.task, -1), "fences grow, over changed runs too"
            self.fences[lease.task] = lease.fence
            self.holder[lease.task] = lease
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finalize(self, data):
        some = data.draw(st.lists(st.sampled_from(self.leases[-10:]), min_size=1, max_size=4))
        endings = [self.ending(data, lease) for lease in some]
        for lease, taken in zip(some, self.both("finalize", endings), strict=True):
            assert taken == (self.holder.get(lease.task) == lease), "the last lease ends it, once"
            if taken:
                del self.holder[lease.task]

    def ending(self, data, lease):
        state = data.draw(st.sampled_from([State.DONE, State.DONE, State.READY, State.SKIPPED, State.DEAD]))
        word = f"{next(self.message)}"
        if state == State.DONE:
            return Ending(lease.task, lease.fence, state, data.draw(st.sampled_from(KEYS)), Output(word, "stop", 1, 1))
        later_s = self.now_s + data.draw(st.integers(0, 3)) if state == State.READY else 0.0
        error = data.draw(st.sampled_from([None, word]))
        return Ending(
            lease.task, lease.fence, state, error=error, not_before_s=later_s, counts=data.draw(st.booleans())
        )

    @rule(owner=st.sampled_from(OWNERS), lease_s=st.integers(0, 9))
    def heartbeat(self, owner, lease_s):
        self.both("heartbeat", owner, now_s=self.now_s, lease_s=lease_s)

    @rule(later_s=st.integers(0, 6))
    def expire(self, later_s):
        self.now_s += later_s
        self.both("expire", now_s=self.now_s)
        leased = {row.task for row in self.ledger.rows(0, 99) if row.state == State.LEASED}
        self.holder = {task: lease for task, lease in self.holder.items() if task in leased}

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def save(self, keys):
        self.both("save", [(key, Partial(f"{next(self.message)}", (), (1,))) for key in keys])

    @rule(name=st.sampled_from(["a", "b"]), value=st.sampled_from(["", "x", "y"]))
    def set_metadata(self, name, value):
        self.both("set_metadata", {name: value})

    @rule()
    def reopen(self):
        """Simulates a crash between two calls: the ledger gets no notice, and a new handle finds everything."""
        left, self.ledger = self.ledger, open_ledger(self.place)
        left.close()

    @invariant()
    def all_stands_as_the_rule_says(self):
        if not self.runs:
            return
        rows = self.both("rows", 0, 99)
        self.both("counts")
        self.both("metadata")
        self.both("partials", KEYS)
        self.both("outputs", range(99))
        answers = self.both("results", KEYS)
        assert broken_invariant(self.tasks, rows) == ""
        assert sum(self.ledger.counts().values()) == len(self.tasks), "counts add up to all"
        assert self.answers.items() <= answers.items(), "one result per key, for ever"
        self.answers = answers
        now = {row.task: row for row in rows if row.state >= State.DONE}
        assert self.ends.items() <= now.items(), "nothing that ended moves again"
        self.ends = now

    def teardown(self):
        self.ledger.close()


@pytest.mark.slow
def test_any_calls_in_any_order_answer_as_the_naive_rule_does(place, request, monkeypatch):
    count = {"sqlite": 100, "postgres": 25}[request.node.callspec.params["place"]]
    monkeypatch.setattr(Machine, "places", staticmethod(place))
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=count, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    )
