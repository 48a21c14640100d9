"""Points are spent where they tell most, within the budget, on a clock of our own; no torch."""

import json
import math
import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from lengthwise.measure.operators.adaptive import coarse_grid, fine_grid
from lengthwise.measure.operators.bench import Outcome, Sample
from lengthwise.measure.operators.campaign import Campaign, Journal, Plan, as_profile, notes, table
from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, ROWS, NoRoomError, Operator, Point
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import ProfileFacts

UP = Operator("mlp up", ROWS, (1,), (2048,), 8, {"n": 64, "k": 32})
PROMPT = Operator("prefill attention", PREFILL, (1, 2), (2048, 4095), 8)
DECODES = Operator("decode attention", DECODE, (1,), (64, 65536, 4096), 8)
METADATA = ProfileFacts(name="x", source="lengthwise", gpu="y")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class FakePoint:
    bench: object
    point: object
    backend: str = "fake"

    def sample(self):
        wall_s = self.bench.seconds(self.point.operator, self.point.at)
        self.bench.clock.now += wall_s
        return Sample(wall_s)


@dataclass
class FakeBench:
    seconds: object
    clock: Clock = field(default_factory=Clock)
    overhead_s: float = 0.01
    room: int = 10**9
    prepared: list = field(default_factory=list)

    def prepare(self, point):
        if point.work > self.room:
            raise NoRoomError("out of memory")
        self.clock.now += self.overhead_s
        self.prepared.append(point.key)
        return FakePoint(self, point)

    def discard(self):
        pass


def affine(operator, at):
    if operator.kind == PREFILL:
        return 1e-5 + 1e-6 * at[0] + 1e-9 * at[0] * (at[1] + at[0] / 2)
    return 1e-5 + 1e-6 * at[-1]


def kinked(operator, at):
    """Twice as dear from 300 rows on, as when a kernel runs out of a cache."""
    return affine(operator, at) * (2 if at[0] >= 300 else 1)


def campaign(bench, operators, budget_s=30.0, journal=None):
    journal = journal or Journal(None, {}, operators)
    return Campaign(Plan(tuple(operators), budget_s), bench, journal, bench.clock, lambda *_: None)


def test_points_are_spent_where_the_kink_is():
    outcomes = campaign(FakeBench(kinked), [UP]).run()
    added = {o.point.at[0] for o in outcomes} - {p.at[0] for p in coarse_grid(UP)}
    assert len(added) >= 3
    near = [rows for rows in added if abs(math.log2(rows / 300)) <= 1]
    assert len(near) > len(added) / 2


def test_what_is_affine_needs_no_more_than_the_coarse_grid():
    bench = FakeBench(affine)
    outcomes = campaign(bench, [UP, PROMPT, DECODES]).run()
    assert len(outcomes) == sum(len(coarse_grid(one)) for one in (UP, PROMPT, DECODES))
    assert bench.clock.now < 10


def test_kinks_of_a_cheap_operator_get_fewer_points():
    small = [Operator(name, ROWS, (1,), (2048,), 8) for name in ("rope", "kv write", "activation")]

    def seconds(operator, at):
        return kinked(operator, at) * (1 if operator == UP else 1e-2)

    outcomes = campaign(FakeBench(seconds, overhead_s=0.5), [*small, UP], budget_s=22.0).run()
    points = {one.name: 0 for one in (*small, UP)}
    for outcome in outcomes:
        points[outcome.point.operator.name] += 1
    assert points["mlp up"] > max(points[one.name] for one in small)


def test_budget_is_respected():
    rng = np.random.default_rng(0)

    def noisy(operator, at):
        return affine(operator, at) * math.exp(rng.normal(0, 0.3))

    bench = FakeBench(noisy, overhead_s=0.05)
    one = campaign(bench, [UP, PROMPT, DECODES], budget_s=8.0)
    one.run()
    assert 7.5 < bench.clock.now < 9.0


def test_budget_below_the_coarse_grid_states_what_it_needs_and_keeps_its_points(tmp_path):
    bench = FakeBench(lambda _, at: 1e-2 * at[0])
    journal = Journal(tmp_path / "points.jsonl", {}, [UP])
    with pytest.raises(InputError, match=r"a budget of 5 s does not suffice .*: \d s are spent, and \d+ of its points"):
        campaign(bench, [UP], budget_s=5.0, journal=journal).run()
    again = Journal(tmp_path / "points.jsonl", {}, [UP])
    assert again.before
    with pytest.raises(InputError, match=r"s are spent, \d+ s of them in earlier runs that this one continues"):
        campaign(FakeBench(bench.seconds), [UP], budget_s=6.0, journal=again).run()


@pytest.mark.parametrize("power", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("budget_s", [1.0, 5.0, 20.0])
def test_what_the_coarse_grid_takes_lies_between_the_two_budgets_of_a_refusal(power, budget_s):
    def seconds(operator, at):
        return 2e-4 * math.prod(at) ** power if operator is UP else 1e3 * affine(operator, at)

    operators = [UP, PROMPT, DECODES]
    with pytest.raises(InputError, match=r"does not suffice .* or start again, without these points") as refused:
        campaign(FakeBench(seconds), operators, budget_s=budget_s).run()
    min_s, max_s = map(float, re.search(r"The grid needs from (\d+) s, .* to (\d+) s,", str(refused.value)).groups())
    assert budget_s < min_s < max_s
    bench = FakeBench(seconds)
    campaign(bench, operators, budget_s=max_s).measure_coarse_grid()
    assert min_s <= bench.clock.now + 1


def test_killed_run_goes_on_and_measures_nothing_twice(tmp_path):
    file, operators = tmp_path / "points.jsonl", [UP, PROMPT]
    first = FakeBench(kinked)
    campaign(first, operators, 4.0, Journal(file, {"model": "m"}, operators)).run()
    lines = file.read_bytes().splitlines(keepends=True)
    retained = len(lines) // 2
    file.write_bytes(b"".join(lines[:retained]) + lines[retained][:20])  # killed within a line
    done = {(line["operator"], tuple(line["at"]), line["skew"]) for line in map(json.loads, lines[1:retained])}

    again = FakeBench(kinked)
    journal = Journal(file, {"model": "m"}, operators)
    assert len(journal.before) == len(done)
    assert journal.elapsed_s == json.loads(lines[retained - 1])["elapsed_s"]
    outcomes = campaign(again, operators, 4.0, journal).run()
    assert not done & set(again.prepared)
    assert {o.point.key for o in outcomes} == done | set(again.prepared)
    assert len(Journal(file, {"model": "m"}, operators).before) == len(outcomes)


def test_time_of_the_killed_run_counts(tmp_path):
    operators = [UP]
    bench = FakeBench(kinked)
    journal = Journal(tmp_path / "points.jsonl", {}, operators)
    campaign(bench, operators, journal=journal).run()
    journal = Journal(tmp_path / "points.jsonl", {}, operators)
    later = FakeBench(kinked, Clock(1000.0))
    assert campaign(later, operators, budget_s=1e-3, journal=journal).run()
    assert not later.prepared


@pytest.mark.parametrize("changed", [{"model": "other"}, {"dtype": "float32"}, {"device": "another"}])
def test_points_of_another_measurement_are_refused(tmp_path, changed):
    requested = {"model": "m", "dtype": "bfloat16", "device": "d"}
    Journal(tmp_path / "points.jsonl", requested, [UP])
    name = next(iter(changed))
    with pytest.raises(ProfileError, match=f"another measurement .*{name}: {requested[name]} there"):
        Journal(tmp_path / "points.jsonl", requested | changed, [UP])


def test_file_that_is_no_journal_is_refused(tmp_path):
    file = tmp_path / "points.jsonl"
    file.write_text("tokens,seconds\n1,2\n")
    with pytest.raises(ProfileError, match="must be a file of points"):
        Journal(file, {}, [UP])
    assert file.read_text() == "tokens,seconds\n1,2\n"


def test_point_without_memory_is_skipped_and_noted_and_the_rest_continues():
    bench = FakeBench(affine, room=Point(PROMPT, (2048, 0)).work - 1)
    outcomes = campaign(bench, [UP, PROMPT]).run()
    skipped = [o for o in outcomes if o.skipped]
    assert [o.point.at for o in skipped] == [(2048, 0)]  # the larger ones are not even tried
    assert (512, 1024) in {o.point.at for o in outcomes}
    assert any("prefill attention" in note and "skipped from (2048, 0)" in note for note in notes(outcomes))
    profile = as_profile(outcomes, METADATA, "float32")
    assert not (profile.of("prefill attention")["chunk"] == 2048).any()
    assert profile.of("mlp up")["tokens"].max() == 2048


def test_profile_has_a_row_a_degree_and_what_describes_it():
    outcomes = campaign(FakeBench(affine), [UP, PROMPT, DECODES]).run()
    profile = as_profile(outcomes, METADATA, "float32")
    assert profile.tensor_parallel == (1, 2)
    assert set(profile.of("mlp up")["n"]) == {64}
    assert len(profile.of("prefill attention", 1)) == len(profile.of("prefill attention", 2))
    decode = profile.of("decode attention")
    assert set(decode["skew"]) == {1, 4}
    assert (decode["kv_tokens"] >= 16 * decode["seqs"]).all()
    assert (profile.of("mlp up")["repeats"] == 9).all()
    assert 3 <= decode["repeats"][decode["seconds"].argmax()] < 9  # slow points have fewer


def test_messages_measured_elsewhere_are_retained_and_not_measured_again():
    send = Operator("send", MESSAGE, (0,), (1 << 20,), 1, {"gpus": 2})
    bench = FakeBench(affine)
    one = campaign(bench, [UP])
    one.add_outcomes([Outcome(Point(send, (n,)), (kinked(send, (n,)),), (), "gloo") for n in (16, 256, 4096, 65536)])
    outcomes = one.run()
    assert {key[0] for key in bench.prepared} == {UP.key}
    profile = as_profile(outcomes, METADATA, "float32")
    assert profile.of("send")["bytes"].tolist() == [16, 256, 4096, 65536]
    assert set(profile.of("send")["tp"]) == {0}
    assert set(profile.of("send")["gpus"]) == {2}
    lines = {line.operator: line for line in table(outcomes)}
    assert math.isnan(lines["send"].share)
    assert lines["mlp up"].share == 1


def test_table_shows_errors_and_shares():
    lines = {line.operator: line for line in table(campaign(FakeBench(kinked), [UP, DECODES]).run())}
    assert lines["mlp up"].error < 0.03
    assert lines["mlp up"].spread == 0
    assert 0 < lines["mlp up"].share <= 1


def test_processor_seconds_stand_where_others_took_the_core():
    class Contended(FakePoint):
        def sample(self):
            return Sample(2e-3, 1e-3)

    class Bench(FakeBench):
        def prepare(self, point):
            super().prepare(point)
            self.clock.now += 0.01
            return Contended(self, point)

    outcomes = campaign(Bench(affine), [UP], budget_s=5.0).run()
    assert {o.seconds for o in outcomes} == {1e-3}
    assert any("CPU time" in note for note in notes(outcomes))


@pytest.mark.parametrize(
    "operator",
    [
        UP,
        PROMPT,
        DECODES,
        Operator("x", PREFILL, (1,), (4096, 511)),
        Operator("x", DECODE, (1,), (1, 1, 1)),
        Operator("x", ROWS, (1,), (1,)),
    ],
)
def test_grids_stay_within_the_range(operator):
    for places in ([p.at for p in coarse_grid(operator)], fine_grid(operator)):
        assert places
        for at in places:
            assert all(value >= 0 for value in at)
            if operator.kind == PREFILL:
                assert at[0] + at[1] <= max(operator.largest[1] + 1, operator.largest[0])
            elif operator.kind == DECODE:
                assert at[1] <= operator.largest[1]
                assert at[1] // at[0] <= operator.largest[2]
            assert at[0] <= operator.largest[0]
