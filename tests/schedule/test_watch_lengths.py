"""The watch over lengths: what it claims while nothing changes, and how soon it sees what does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom, kstest

from lengthwise.schedule import Monitor, TaskLengths, Watcher
from lengthwise.schedule.adaptation import lengths_since
from lengthwise.schedule.drift_monitor import BETS, BUCKET, EmpiricalRanks, Evidence, KnownRanks, bet_factors
from lengthwise.schedule.length_drift import shift_moment
from lengthwise.schema.errors import InputError

PLANNED = TaskLengths.from_preset("exegpt-t")
RATE = 20.0


def stream(rng, prompt_pmf, output_pmf, count):
    """Lengths of some requests."""
    pmfs = (prompt_pmf, output_pmf)
    return np.column_stack([rng.choice(len(pmf), count, p=pmf) for pmf in pmfs]).tolist()


def reported(watcher, lengths, start=0):
    """The alarms over some requests."""
    answers = (watcher.observe(*pair, (start + at) / RATE) for at, pair in enumerate(lengths))
    return [alarm for alarm in answers if alarm is not None]


def most(streams, rate):
    """So many false alarms, or fewer, in 999 of 1,000 tests of a watch that keeps its word."""
    return int(binom.ppf(0.999, streams, rate))


def test_a_bet_pays_one_in_the_mean():
    factors = bet_factors()
    assert factors.shape[1] == BETS
    assert factors.mean(axis=0) == pytest.approx(np.ones(BETS), abs=1e-12)
    assert factors.min() > 0


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_known_lengths_that_stay_raise_no_more_alarms_than_stated(rate):
    streams, rng = 2000, np.random.default_rng(7)
    evidence, ever = Evidence((streams, 2)), np.zeros(streams, dtype=bool)
    for _ in range(500):
        evidence.add(rng.random((streams, 2)))
        ever |= evidence.amount.mean(axis=-1) >= 1 / rate
    assert ever.sum() <= most(streams, rate)


def test_dependent_sides_are_no_reason_for_an_alarm():
    """Outputs that follow from prompts: each side's ranks are even, together they are not independent."""
    streams, rng = 2000, np.random.default_rng(8)
    evidence, ever = Evidence((streams, 2)), np.zeros(streams, dtype=bool)
    for _ in range(300):
        ranks = rng.random(streams)
        evidence.add(np.column_stack([ranks, 1 - ranks]))
        ever |= evidence.amount.mean(axis=-1) >= 10
    assert ever.sum() <= most(streams, 0.1)


def alarmed(seed, known, after, requests):
    """Whether a watch over lengths that stay ever alarms; its plan was counted over ``known`` requests."""
    rng = np.random.default_rng(seed)
    lengths = stream(rng, PLANNED.prompt_pmf, PLANNED.output_pmf, known + after)
    planned = TaskLengths.from_samples(*np.array(lengths[:known]).T)
    watch = Monitor(false_positive_rate=0.1, min_requests=1, seed=seed)
    return bool(reported(Watcher(planned, requests, watch), lengths[known:]))


def test_counted_lengths_raise_no_more_alarms_than_stated():
    streams = 60
    assert sum(alarmed(seed, 100, 250, 100) for seed in range(streams)) <= most(streams, 0.1)


@pytest.mark.slow
def test_counted_lengths_raise_no_more_alarms_than_stated_over_a_thousand_streams():
    streams = 1000
    assert sum(alarmed(seed, 100, 500, 100) for seed in range(streams)) <= most(streams, 0.1)


def test_a_small_sample_taken_for_the_truth_would_break_the_word():
    streams = 30
    assert sum(alarmed(seed, 40, 400, None) for seed in range(streams)) > most(streams, 0.1)


def seen_at(seed, what, change, *, side="outputs", before=300, requests=None):
    """The first alarm after a move of one side."""
    rng = np.random.default_rng(seed)
    pmfs = {"prompts": PLANNED.prompt_pmf, "outputs": PLANNED.output_pmf}
    lengths = stream(rng, *pmfs.values(), before)
    pmfs[side] = shift_moment(pmfs[side], what, change, 1500)
    lengths += stream(rng, *pmfs.values(), 3000)
    watcher = Watcher(PLANNED, requests, Monitor(min_requests=1, seed=seed))
    for at, pair in enumerate(lengths):
        alarm = watcher.observe(*pair, at / RATE)
        if alarm is not None:
            return alarm
    raise AssertionError("no alarm")


@pytest.mark.parametrize(
    ("what", "change", "within"),
    [
        ("mean", -0.3, 150),
        ("mean", -0.15, 500),
        ("mean", 0.15, 700),
        ("mean", 0.3, 200),
        ("sd", -0.3, 250),
        ("sd", 0.3, 250),
        ("skewness", 0.4, 1200),
    ],
)
def test_a_move_is_seen_within_so_many_requests(what, change, within):
    """Of five streams the median; the first 300 requests are as planned."""
    alarms = [seen_at(seed, what, change) for seed in range(5)]
    assert 0 < np.median([alarm.request - 300 for alarm in alarms]) <= within


def test_a_plan_counted_over_requests_sees_moves_too():
    alarms = [seen_at(seed, "mean", 0.3, requests=1000) for seed in range(3)]
    assert 0 < np.median([alarm.request - 300 for alarm in alarms]) <= 300


@pytest.mark.parametrize("side", ["prompts", "outputs"])
def test_the_alarm_names_the_changed_side_its_start_and_the_new_lengths(side):
    alarm = seen_at(4, "mean", 0.3, side=side)
    assert alarm.sides == (side,)
    assert abs(alarm.started - 301) <= 40
    assert alarm.started_s == pytest.approx((alarm.started - 1) / RATE)
    assert len(alarm.prompt_tokens) == len(alarm.output_tokens) == alarm.request - alarm.started + 1
    assert alarm.evidence[side] >= 100


def test_an_alarm_waits_for_enough_requests_with_the_new_lengths():
    rng = np.random.default_rng(2)
    longer = shift_moment(PLANNED.output_pmf, "mean", 0.3, 1500)
    watcher = Watcher(PLANNED, None, Monitor(min_requests=400))
    alarms = reported(watcher, stream(rng, PLANNED.prompt_pmf, longer, 600))
    assert len(alarms[0].output_tokens) == 400


def test_after_an_alarm_the_new_lengths_are_the_usual_ones():
    rng = np.random.default_rng(3)
    longer = shift_moment(PLANNED.output_pmf, "mean", 0.3, 1500)
    watcher = Watcher(PLANNED)
    first = reported(watcher, stream(rng, PLANNED.prompt_pmf, longer, 2000))
    assert (len(first), watcher.alarms) == (1, 1)
    again = reported(watcher, stream(rng, PLANNED.prompt_pmf, PLANNED.output_pmf, 600), 2000)
    assert len(again) == 1
    assert abs(again[0].started - 2001) <= 60


def test_equal_streams_and_seeds_give_equal_alarms():
    one, two = (seen_at(6, "mean", 0.15) for _ in range(2))
    assert (one.request, one.started, one.evidence, one.sides) == (two.request, two.started, two.evidence, two.sides)
    assert one.output_tokens.tobytes() == two.output_tokens.tobytes()


def test_ranks_among_what_was_seen_are_counts():
    rng = np.random.default_rng(0)
    seen = rng.integers(1, 3 * BUCKET, 50).tolist()
    ranks = EmpiricalRanks(np.bincount(seen))
    for tokens, draw in itertools.product([1, 5, BUCKET - 1, BUCKET, 4 * BUCKET], [0.0, 0.5, 1.0]):
        seen.append(tokens)
        expected = (sum(x < tokens for x in seen) + draw * sum(x == tokens for x in seen)) / len(seen)
        assert ranks.rank_of(tokens, draw) == pytest.approx(expected)


def test_ranks_in_a_known_distribution_are_its_shares():
    ranks = KnownRanks(np.array([0.0, 0.25, 0.5, 0.25]))
    assert [ranks.rank_of(tokens, 0.5) for tokens in (1, 2, 3, 9)] == [0.125, 0.5, 0.875, 1.0]


def turns(rng, count):
    """Outputs of conversations of eight turns, each about as long as the one before; half of all is the user's own."""
    own = rng.integers(0, 150, -(-count // 8)).repeat(8)[:count]
    return [(100, int(tokens)) for tokens in own + rng.integers(1, 100, count)]


def test_neighbours_that_are_alike_raise_alarms_unless_few_are_tested():
    """The same distribution all along: with every request tested the order itself is seen, one in eight is fine."""
    alarms = dict.fromkeys((1, 8), 0)
    for every, seed in itertools.product(alarms, range(12)):
        lengths = turns(np.random.default_rng(seed), 2000)
        planned = TaskLengths.from_samples(*np.array(lengths[:800]).T)
        watch = Monitor(false_positive_rate=0.1, min_requests=1, every=every, seed=seed)
        alarms[every] += bool(reported(Watcher(planned, 800, watch), lengths[800:]))
    assert alarms[8] <= most(12, 0.1) < alarms[1]


def test_ranks_of_few_tested_requests_are_even_from_the_first_on():
    """Counted over 40 requests, one in ten tested: the first ranks among four kept ones."""
    streams, ranks = 600, []
    for seed in range(streams):
        rng = np.random.default_rng(seed)
        seen = rng.choice(len(PLANNED.output_pmf), 41, p=PLANNED.output_pmf)
        planned = TaskLengths.from_samples(seen[:40], seen[:40])
        outputs = Watcher(planned, 40, Monitor(every=10, seed=seed)).ranks[1]
        ranks.append(outputs.rank_of(int(seen[40]), float(rng.random())))
    assert kstest(ranks, "uniform").pvalue > 0.01


def test_few_tested_requests_raise_no_more_alarms_than_stated():
    streams, alarms = 36, 0
    for seed in range(streams):
        rng = np.random.default_rng(seed)
        lengths = stream(rng, PLANNED.prompt_pmf, PLANNED.output_pmf, 2100)
        planned = TaskLengths.from_samples(*np.array(lengths[:100]).T)
        watch = Monitor(false_positive_rate=0.1, min_requests=1, every=10, seed=seed)
        alarms += bool(reported(Watcher(planned, 100, watch), lengths[100:]))
    assert alarms <= most(streams, 0.1)


def test_a_change_is_seen_among_few_tested_requests_and_reported_with_all():
    rng = np.random.default_rng(9)
    longer = shift_moment(PLANNED.output_pmf, "mean", 0.3, 1500)
    lengths = stream(rng, *(PLANNED.prompt_pmf, PLANNED.output_pmf), 400)
    lengths += stream(rng, PLANNED.prompt_pmf, longer, 1200)
    (alarm,) = reported(Watcher(PLANNED, None, Monitor(min_requests=1, every=4)), lengths)
    assert abs(alarm.started - 401) <= 160
    assert alarm.request % 4 == 0
    assert len(alarm.output_tokens) == alarm.request - alarm.started + 1
    assert alarm.output_tokens.tolist() == [o for _, o in lengths[alarm.started - 1 : alarm.request]]


def test_a_side_that_is_not_watched_raises_no_alarm_and_is_not_known_better():
    """Prompts that are only estimated, a third too long: their move is not seen, that of the outputs is."""
    rng = np.random.default_rng(11)
    prompts, outputs = (shift_moment(pmf, "mean", 0.3, 1500) for pmf in (PLANNED.prompt_pmf, PLANNED.output_pmf))
    watcher = Watcher(PLANNED, None, Monitor(min_requests=1, sides=("outputs",)))
    assert reported(watcher, stream(rng, prompts, PLANNED.output_pmf, 600)) == []
    (alarm,) = reported(watcher, stream(rng, prompts, outputs, 400), 600)[:1]
    assert alarm.sides == alarm.watched == tuple(alarm.evidence) == ("outputs",)
    after = lengths_since(PLANNED, alarm, 4096)
    assert after.prompt_pmf.tolist() == PLANNED.prompt_pmf.tolist()
    assert after.mean_output_tokens == pytest.approx(alarm.output_tokens.mean(), rel=0.02)


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"sides": ()}, "sides must be some of"),
        ({"sides": ("answers",)}, "sides must be some of"),
        ({"every": 0}, "every must be at least 1"),
        ({"false_positive_rate": 0.0}, "false_positive_rate must be above 0 and below 1"),
        ({"false_positive_rate": 1.0}, "false_positive_rate must be above 0 and below 1"),
        ({"min_requests": 0}, "min_requests must be from 1"),
    ],
)
def test_a_watch_has_its_ranges(given, states):
    with pytest.raises(InputError, match=states):
        Monitor(**given)


def test_what_cannot_be_a_request_is_refused():
    watcher = Watcher(PLANNED)
    watcher.observe(10, 10, 1.0)
    for pair, states in (((0, 5), "prompts must be"), ((5, 2.5), "outputs must be")):
        with pytest.raises(InputError, match=states):
            watcher.observe(*pair, 2.0)
    with pytest.raises(InputError, match="in order of time"):
        watcher.observe(5, 5, 0.5)
    with pytest.raises(InputError, match="at least 1 request"):
        Watcher(PLANNED, 0)
