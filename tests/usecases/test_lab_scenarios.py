"""The table [lab]: what it means, what it refuses, and what comes of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lengthwise import config
from lengthwise.config.sections import LabSection
from lengthwise.schema.errors import InputError, ScenarioError
from lengthwise.schema.lab import LoadUnit
from lengthwise.usecases import lab as lab_module
from lengthwise.usecases.lab import ScenarioBench, question_of

BASE = """
name = "small"
workload = { prompt = 50, output = { kind = "lognormal", mean = 40, cv = 1.0 }, request_rate = 1, num_requests = 60 }
deployment = { model = "opt-125m", gpu = "A100-80GB", num_blocks = 4096 }
engine = { max_num_seqs = 2, max_model_len = 1024 }
"""
LAB = """
[lab]
policies = [
  "sjf", "aged(weight=20)", { name = "mine", rank = "srtf", preemption = "by_rank", max_wait_factor = 1.5 }, "mlfq",
]
predictors = ["oracle", { kind = "lognormal_error", sigma = 0.5 }, { kind = "reversed", name = "worst" }]
loads = [0.5, 2.0]
batch_sizes = [1, 2]
seeds = 2
"""


def loaded(lab: str = LAB, *overrides: str):
    return config.loads(BASE + lab, overrides=overrides)


def test_names_short_forms_and_tables_are_contestants() -> None:
    question, _ = question_of(loaded())
    by_name = {p.name: p for p in question.policies}
    assert list(by_name) == ["sjf", "aged(weight=20)", "mine", "mlfq"]
    assert by_name["aged(weight=20)"].scheduler.rank == "aged(weight=20)"
    assert by_name["mine"].scheduler.preemption == "by_rank"
    assert by_name["mine"].max_wait_factor == 1.5
    assert [p.predicts for p in question.policies] == [True, True, True, False]
    assert question.predictors == ("oracle", "lognormal_error sigma=0.5", "worst")
    assert question.unit is LoadUnit.CAPACITY
    assert question.base.rank == "fcfs_preempted_first"


def test_a_policy_stands_on_the_scenarios_own_scheduler() -> None:
    text = '[scheduler]\npolicy = "sarathi"\nmax_wait_s = 9.0\n[lab]\npolicies = ["shortest_prompt", "sjf"]'
    question, _ = question_of(loaded(text))
    own, named = (p.scheduler for p in question.policies)
    assert (own.batching, own.rank, own.max_wait_s) == ("chunked", "shortest_prompt", 9.0)
    assert (named.batching, named.max_wait_s) == ("unified", 300.0)
    assert (question.base.batching, question.base.max_wait_s) == ("chunked", float("inf"))


def test_rates_are_requests_a_second_and_defaults_work() -> None:
    question, _ = question_of(loaded("[lab]\nrates = [0.5, 3]"))
    assert (question.unit, question.loads) == (LoadUnit.RPS, (0.5, 3))
    assert question.batch_sizes == (2,)
    assert [p.name for p in question.policies] == ["sjf", "isrtf"]
    assert question.predictors == ("oracle",)


def test_every_predictor_sees_the_same_requests() -> None:
    requested = loaded()
    bench = question_of(requested)[1]
    plain = bench.requests(1, "")
    assert plain.predictions is None
    for name in bench.predictors:
        reported = bench.requests(1, name)
        assert reported.predictions is not None
        assert (
            dataclasses.replace(reported, predictions=None, predicted_tokens=None).output_tokens.tolist()
            == plain.output_tokens.tolist()
        )
    assert isinstance(bench, ScenarioBench)
    assert bench.deployment(bench.deployment(None, 1).scheduler, 7).limits.max_num_seqs == 7


@pytest.mark.parametrize(
    ("lab", "states"),
    [
        ("[lab]\npolicies = []", "lab.policies: must not be empty; it is []"),
        ("[lab]\nloads = []", "lab.loads: must not be empty; it is []"),
        ('[lab]\npolicies = [{ policy = "sjf", max_wait_facto = 1 }]', "did you mean lab.policies.0.max_wait_factor?"),
        ('[lab]\npredictors = [{ kind = "oracle", sgma = 1 }]', "did you mean lab.predictors.0.sigma?"),
        ("[lab]\nloads = [0.0]", "lab.loads.0: must be above 0; it is 0.0"),
        ("[lab]\nloads = [1.0]\nrates = [1.0]", "exclude each other"),
        ('[lab]\npolicies = ["sjf", "sjf"]', "two policies are called 'sjf'"),
        ('[lab]\npredictors = ["oracle", "oracle"]', "two predictors are called 'oracle'"),
        ('[lab]\npredictors = ["none"]', "predicts nothing"),
        ('[lab]\npredictors = [{ kind = "reversed", name = "oracle" }]', "give another"),
        ('[lab]\npredictors = [{ kind = "lognormal_error" }]', "lognormal_error needs sigma"),
        ('[lab]\npredictors = [{ kind = "oracle", sigma = 1.0 }]', "sigma is not of kind oracle"),
        ("[lab]\nseeds = 0", "lab.seeds: must be at least 1"),
        ("[lab]\nbatch_sizes = [0]", "lab.batch_sizes.0"),
        ('[lab]\npolicies = [{ rank = "sjf", max_wait_factor = 0.0 }]', "max_wait_factor"),
        ("[lab]\nbatches = [4]", "lab.batches: there is no such key"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(lab, states) -> None:
    with pytest.raises(ScenarioError) as error:
        loaded(lab)
    assert states in str(error.value)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("", "needs a table [lab]"),
        (LAB + '[[variants]]\nname = "a"\n', "remove the [[variants]]"),
        ('[predictor]\nkind = "oracle"\n' + LAB, "lab.predictors"),
        ('[lab]\npolicies = ["shortest"]', "shortest"),
        ('[lab]\npolicies = ["aged(heavy=1)"]', "has wrong parameters"),
        ('[lab]\npredictors = [{ kind = "model", file = "absent.lwp" }]', "absent.lwp"),
    ],
)
def test_an_error_names_its_place_in_the_file(text, states) -> None:
    with pytest.raises(InputError) as error:
        lab_module.lab(loaded(text))
    assert states in str(error.value)
    assert any("[lab] of scenario" in note for note in error.value.__notes__)


def test_a_closed_loop_has_no_load() -> None:
    with pytest.raises(InputError, match="closed loop"):
        lab_module.lab(config.loads((BASE + LAB).replace("request_rate = 1", "concurrency = 4")))


def test_the_scenario_can_be_written_and_read_again() -> None:
    requested = loaded()
    assert config.loads(requested.to_toml()).lab == requested.lab


def test_one_or_two_at_a_time_give_the_same_bytes() -> None:
    requested = loaded(LAB, "lab.batch_sizes=[2]")
    one, two = (lab_module.lab(requested, jobs=jobs) for jobs in (1, 2))
    assert repr(dataclasses.asdict(one)) == repr(dataclasses.asdict(two))
    assert [v.load for v in one.decisions] == [0.5, 2.0]
    names = [cell.name for cell in one.at(2, 2.0)]
    assert names[:2] == ["fcfs", "oracle (oracle)"]
    assert names[-1] == "mlfq"
    assert len(names) == 2 + 3 * 3 + 1


def test_the_reference_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "examples" / "reference.toml").read_text("utf-8")
    table = text.split("\n[lab]")[1].split("[[variants]]")[0]
    written = set(re.findall(r"^(?:#: )?(\w+) =", table, flags=re.MULTILINE))
    assert written >= set(LabSection.model_fields) - {"policies"}
    assert {"name", "max_wait_factor"} <= written


def test_rates_on_the_command_line_replace_the_files_loads() -> None:
    reported = config.load("examples/lab-chat.toml", ["lab.rates=[1.5]"]).lab
    assert reported is not None
    assert (reported.loads, reported.rates) == (None, [1.5])
