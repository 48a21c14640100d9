"""Mistakes made in the example applications: reported once, with the likely intent, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lengthwise.cli import main
from lengthwise.config.app_file import load_app
from lengthwise.schema.errors import ScenarioError

FOLDER = Path(__file__).parents[2] / "examples" / "apps"


def example(name):
    return FOLDER / f"{name}.toml"


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ("nmae=x", "nmae: there is no such key; did you mean name?"),
        ("inputs.fiel=x", "inputs.fiel: there is no such key; did you mean inputs.file?"),
        ("inputs.id=idd", "there is no field for the id named 'idd'. Did you mean: id?"),
        ("models.alder.wieghts=x", "models.alder.wieghts: there is no such key; did you mean weights?"),
        ("models.alder.engine.max_num_seq=4", "there is no such key; did you mean engine.max_num_seqs?"),
        ("models.alder.cost=rooflin", "there is no source of costs named 'rooflin'. Did you mean: roofline?"),
        ("models.alder.model=llama-3.1-8", "there is no model named 'llama-3.1-8'. Did you mean: llama-3.1-8b"),
        ("calls.draft.extra.n=2", "calls.draft: extra.n must be 1, since a request has one answer; it is 2"),
        ("calls.draft.extra.stream=true", "calls.draft: extra.stream is not supported"),
        ("run.engines.alder.body.best_of=3", "run.engines.alder: body.best_of must be 1"),
        ("calls.draft.max_token=9", "calls.draft.max_token: there is no such key; did you mean max_tokens?"),
        ("calls.draft.model=aldr", "there is no model for call 'draft' named 'aldr'. Did you mean: alder?"),
        ("calls.draft.api=completions", "there is no api for call 'draft' named 'completions'. Did you mean: comp"),
        ("loops.refine.untl=x", "loops.refine.untl: there is no such key; did you mean until"),
        ("loops.refine.calls=['drft']", "there is no call for loop 'refine' named 'drft'. Did you mean: draft?"),
        ("cluster.node=x", "cluster.node: there is no such key; did you mean cluster.nodes?"),
        ("cluster.nodes=['2xA100-80G']", "there is no GPU named 'A100-80G'. Did you mean: A100-80GB"),
        ("run.max_num_sequ=3", "run.max_num_sequ: there is no such key; did you mean run.max_num_seqs?"),
        ("run.launcher=locl", "run.launcher: must be 'local', 'ray', 'static' or 'simulated'"),
        (
            "run.command='serve {prot}'",
            "there is no placeholder in the command of alder named 'prot'. Did you mean: port",
        ),
        ("run.engines.aldr.max_num_seqs=3", "there is no model named 'aldr'. Did you mean: alder?"),
        (
            "run.engines.alder.max_num_sequ=3",
            "run.engines.alder.max_num_sequ: there is no such key; did you mean max_num_seqs?",
        ),
    ],
)
def test_a_typo_is_reported_once_with_a_suggestion(change, report):
    with pytest.raises(ScenarioError) as error:
        load_app(example("critique-tiny"), [change])
    assert report in str(error.value)
    assert "problems" not in str(error.value)
    assert f"--set {change.partition('=')[0]}" in str(error.value) or "critique-tiny.toml" in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "report"),
    [
        ("chain-summary-tiny", ["calls.verdict.prompt='{{ sumary }}'"], "'sumary'. Did you mean: summary"),
        ("ensemble-tiny", ["calls.answer.prompt='{{ qestion }}'"], "'qestion'. Did you mean: question"),
        ("chain-summary-tiny", ["calls.summary.over=chunk"], "'chunk'. Did you mean: chunks"),
        ("routing-tiny", ["calls.answer.model_from=modle"], "'modle'. Did you mean: model"),
        ("routing-tiny", ["calls.answer.known_tokens=token"], "'token'. Did you mean: tokens"),
        ("ensemble-tiny", ["calls.answer.prompt='{{ question'"], "a template must be one of Jinja2; line 1"),
        ("ensemble-tiny", ["calls.answer.prompt='{{ question | uper }}'"], "named 'uper'. Did you mean: upper"),
        ("critique-tiny", ["loops.refine.until='critique |'"], "until of loop 'refine'"),
        (
            "chain-summary-tiny",
            ["calls.verdict.prompt='{{ again }}'", "calls.again={model='alder', prompt='{{ verdict }}'}"],
            "verdict -> again -> verdict",
        ),
        (
            "ensemble-tiny",
            ["calls.question={model='alder', prompt='{{ question }}'}"],
            "call 'question' names 'question', which is itself. To use a field 'question' of the inputs, give",
        ),
        (
            "ensemble-tiny",
            ["calls.question={model='alder', prompt='Ask something.'}"],
            "call 'answer' names 'question', which is the call 'question' and a field 'question' of the inputs; one",
        ),
    ],
)
def test_an_unrunnable_application_is_reported_before_anything_starts(name, changes, report, tmp_path, capsys):
    sets = [word for change in changes for word in ("--set", change)]
    out = tmp_path / "run"
    code = main(["app", "run", str(example(name)), "--launcher", "simulated", "--out", str(out), *sets])
    message = capsys.readouterr().err
    assert code == 2
    assert report in message
    assert "Traceback" not in message
    assert not out.exists()


def test_a_cycle_is_reported_by_its_calls():
    changes = ["calls.verdict.prompt='{{ again }}'", "calls.again={model='alder', prompt='{{ verdict }}'}"]
    with pytest.raises(ScenarioError) as error:
        load_app(example("chain-summary-tiny"), changes)
    assert "verdict -> again -> verdict" in str(error.value)


def test_missing_weights_are_reported_before_an_engine_starts(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    for path in (example("critique-tiny"), FOLDER / "questions-tiny.jsonl", FOLDER / "core.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    for path in (FOLDER / "models").glob("*.json"):
        (tmp_path / "models" / path.name).write_text(path.read_text())
    code = main(["app", "run", str(tmp_path / "critique-tiny.toml"), "--out", str(tmp_path / "run")])
    assert code == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'models' / 'alder'} does not exist" in message
    assert "weights of alder must be a folder" in message
    assert not (tmp_path / "run").exists()
