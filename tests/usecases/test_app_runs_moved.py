"""An application's file whose simulated answers are not as long as planned: observed, replanned, reported."""

from __future__ import annotations

import json

import pytest

from lengthwise.schema.errors import InputError
from lengthwise.usecases.app_plan import PlanSettings
from lengthwise.usecases.app_run import run_app
from lengthwise.usecases.app_setup import load_app_request

FILE = """
[inputs]
file = "rows.jsonl"
id = "id"

[models.a]
model = "opt-1.3b"
lengths = {{ kind = "uniform", low = 1, high = 120 }}

[models.b]
model = "llama-2-13b"
revision = "another"
lengths = {{ kind = "uniform", low = 1, high = 120 }}

[models.c]
model = "llama-2-13b"
{lengths}

[calls.all]
model = ["a", "b", "c"]
prompt = "Tell {{{{ topic }}}}"
max_tokens = 1500

[cluster]
nodes = ["4xA100-80GB"]

[run]
launcher = "simulated"

[run.engines.c]
length_factor = 10.0
"""


def requested(folder, sets=(), lengths='lengths = { kind = "uniform", low = 1, high = 120 }'):
    rows = [json.dumps({"id": str(n), "topic": f"t{n}"}) for n in range(1000)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "app.toml").write_text(FILE.format(lengths=lengths), encoding="utf-8")
    return load_app_request(folder / "app.toml", sets)


def ran(folder, name, sets=()):
    found = requested(folder, sets)
    planned = found.planned(PlanSettings(compare=False, draws=2, true_draws=4, what_ifs=False))
    run = found.file.run
    return run_app(planned, found.file.rows, found.engines(), folder / name, settings=run.settings)


@pytest.mark.slow
def test_answers_ten_times_as_long_trigger_replanning_and_give_the_same_outputs(tmp_path):
    retained, anew = ran(tmp_path, "retained", ["run.replans=0"]), ran(tmp_path, "anew")
    events = [event for event in anew.metadata["events"] if event["what"] in ("replan", "keep")]
    assert any("as long as planned (c " in event["description"] for event in events)
    assert any("a new plan for the rest takes" in event["description"] for event in events if event["what"] == "replan")
    assert not {"replan", "keep"} & {event["what"] for event in retained.metadata["events"]}
    assert anew.exported.files == retained.exported.files
    assert anew.completed.seconds < retained.completed.seconds


def test_true_lengths_of_a_model_without_lengths_are_refused(tmp_path):
    found = requested(tmp_path, lengths="")
    planned = found.planned(PlanSettings(compare=False, draws=1, true_draws=2, what_ifs=False))
    with pytest.raises(InputError, match="give the model lengths"):
        run_app(planned, found.file.rows, found.engines(), tmp_path / "run")
