"""What the guide to applications quotes is what its commands print now."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, blocks

from lengthwise.apps.run import ModelProgress, Progress
from lengthwise.cli import main
from lengthwise.cli._app_run_page import line

GUIDE = ROOT / "docs" / "guide-apps.md"
ENSEMBLE = ROOT / "examples" / "apps" / "ensemble.toml"


@pytest.fixture(scope="module")
def quoted():
    return [block.text.splitlines() for block in blocks(GUIDE) if block.language == "text"]


@pytest.mark.slow
def test_the_plan_is_the_one_that_is_quoted(quoted, capsys):
    """All but the times of searches, which are another thing on every machine."""
    assert main(["app", "plan", str(ENSEMBLE)]) == 0
    printed = {" ".join(text.split()) for text in capsys.readouterr().out.splitlines()}
    shown = quoted[0]
    assert len(shown) >= 5
    assert {" ".join(text.split()) for text in shown} <= printed


def test_the_line_of_progress_has_the_form_that_is_quoted(quoted):
    (shown,) = quoted[1]
    models = (
        ModelProgress("beta", "runs", 400, {}, 9, 0, 3851.0, None, ()),
        ModelProgress("judge", "starts", 400, {}, 0, 0, 0.0, None, ((0,),), starts_s=30.0),
    )
    made = line(Progress(30.5, 1, 3, models, 0.5, (36.1, 32.4, 39.9)))
    assert re.sub(r"[\d.,]+", "0", made) == re.sub(r"[\d.,]+", "0", shown).replace("0/0 at", "0/0 at")


def test_files_that_a_run_is_said_to_write_have_the_names_that_it_gives_them():
    from lengthwise.apps.ledger import FILE
    from lengthwise.apps.run import exporting, folder
    from lengthwise.scenario import app_runs

    text = GUIDE.read_text("utf-8")
    names = (exporting.OUTPUTS, exporting.PARQUET, exporting.DEAD, exporting.MANIFEST, FILE, f"{folder.LOGS}/",
             app_runs.BATCH_ANSWERS, app_runs.BATCH_ERRORS)  # fmt: skip
    assert [name for name in names if name not in text] == []
