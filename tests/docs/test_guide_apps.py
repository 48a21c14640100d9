"""What the run_plan to applications quotes is what its commands print now."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, blocks

from lengthwise.apps.run import ModelProgress, Progress
from lengthwise.cli import main
from lengthwise.cli.app_run import line

GUIDE = ROOT / "docs" / "guide-apps.md"
README = ROOT / "examples" / "apps" / "README.md"
ENSEMBLE = ROOT / "examples" / "apps" / "ensemble.toml"


@pytest.fixture(scope="module")
def quoted():
    return [block.text.splitlines() for block in blocks(GUIDE) if block.language == "text"]


def is_searched(text):
    """Whether a line is of a method, with the seconds of its search: another thing on every machine."""
    return text.split()[0].split("_")[0] in {"method", "lengthwise", "samullm", "max", "min"}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "app"), [(GUIDE, ENSEMBLE), (README, README.parent / "chain-summary.toml")])
def test_the_plan_is_the_one_that_is_quoted(page, app, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["app", "plan", str(app)]) == 0
    printed = {" ".join(text.split()) for text in capsys.readouterr().out.splitlines()}
    block = next(block for block in blocks(page) if block.language == "text")
    shown = {" ".join(text.split()) for text in block.text.splitlines() if text.strip()}
    shown = {text for text in shown if not is_searched(text)}
    assert len(shown) >= 5
    assert shown <= printed


def test_the_line_of_progress_has_the_form_that_is_quoted(quoted):
    (shown,) = quoted[1]
    models = (
        ModelProgress("beta", "runs", 400, {}, 9, 0, 3851.0, None, ()),
        ModelProgress("judge", "starts", 400, {}, 0, 0, 0.0, None, ((0,),), starts_s=30.0),
    )
    made = line(Progress(30.5, 1, 3, models, 0.5, (36.1, 32.4, 39.9)))
    assert re.sub(r"[\d.,]+", "0", made) == re.sub(r"[\d.,]+", "0", shown).replace("0/0 at", "0/0 at")


def test_costs_that_are_named_are_those_that_are_assumed_and_known():
    from lengthwise.apps.plan.space import SwitchRates
    from lengthwise.cost.estimators.fitters import FITTERS

    text, rates = GUIDE.read_text("utf-8"), SwitchRates()
    assert "`profile:FILE#linear`" in text
    assert "linear" in FITTERS
    assert f"{rates.engine_start_s:g} s for the engine" in text
    assert f"{rates.disk_bytes_per_s / 1e9:g} GB/s from disk and {rates.pcie_bytes_per_s / 1e9:g} GB/s to each" in text


def test_files_that_a_run_is_stated_to_write_have_the_names_it_gives_them():
    from lengthwise.apps.ledger import FILE
    from lengthwise.apps.run import results
    from lengthwise.usecases import app_run

    text = GUIDE.read_text("utf-8")
    names = (results.OUTPUTS, results.PARQUET, results.DEAD, results.MANIFEST, FILE, "logs/",
             app_run.BATCH_ANSWERS, app_run.BATCH_ERRORS)  # fmt: skip
    assert [name for name in names if name not in text] == []
