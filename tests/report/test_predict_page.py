"""The page and the file of a predictor's scores: escaped, reproducible, and drawn in a browser."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from driving import look
from markupsafe import escape as markup_escape

from lengthwise.predict import Ecdf, Prompts, Samples
from lengthwise.predict.evaluation import evaluate
from lengthwise.predict.lexical_model import BandLosses
from lengthwise.report.predict import WORDS, predict_json, repredictions, score_text, warnings, write_predict_html
from lengthwise.schema.errors import InputError

NASTY = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def found():
    made = []
    for name, seed in (("log <b>.jsonl", 0), ("other.jsonl", 1)):
        rng = np.random.default_rng(seed)
        tokens = np.maximum(1, rng.lognormal(4.5, 0.8, 400)).astype(np.int64)
        prompts = Prompts(400, text=[f"p {i % 150}" for i in range(400)], model=["a", NASTY] * 200)
        samples = Samples(prompts, tokens, np.zeros(400, bool))
        made.append(evaluate(Ecdf().fit(samples), samples, name=name, draws=20, clock=None))
    return made


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "predict.html"
    write_predict_html(path, found, {"samples": 400, "prompts": 150}, heading="Lengths <of> all")
    return path


def test_the_page_is_escaped_and_reproducible(page, found, tmp_path) -> None:
    text = page.read_text()
    assert "alert(1)</script>" not in text
    assert "log &lt;b&gt;.jsonl" in text
    assert all(str(markup_escape(words)) in text for words in WORDS.values())
    write_predict_html(tmp_path / "again.html", found, {"samples": 400, "prompts": 150}, heading="Lengths <of> all")
    assert (tmp_path / "again.html").read_text() == text
    with pytest.raises(InputError, match="a unique name"):
        write_predict_html(tmp_path / "x.html", [found[0], found[0]])
    with pytest.raises(InputError, match="at least one"):
        write_predict_html(tmp_path / "x.html", [])


def test_a_predictor_that_does_not_read_outputs_says_why(found) -> None:
    assert "it has not learned to read outputs" in repredictions(found[0])
    weak = replace(found[0], held_out=(BandLosses(50, 100, 996, 477, 43.7, 48.5, 3.06),))
    assert "do not show that reading the output is better; pinball loss 43.7 instead of 48.5" in repredictions(weak)
    reads = replace(weak, reads_output=(50, 100))
    assert repredictions(reads).startswith("reads the output so far at 50 to 100 tokens")


def test_the_file_holds_every_number(found) -> None:
    made = json.loads(predict_json(found, {"kind": "ecdf"}))
    one = made["evaluations"][0]
    assert one["scores"]["mae"]["value"] == pytest.approx(found[0].scores["mae"].value)
    assert len(one["windows"]) == len(found[0].windows)
    assert one["calibration"]["level"][0] == 0.05
    assert "NaN" not in predict_json(found)


def test_scores_read_well() -> None:
    assert score_text("coverage90", 0.9012, 0.011) == "90.1 ± 1.1 %"
    assert score_text("mae", 81.234, 2.2) == "81.2 ± 2.2"
    assert score_text("coverage90", 1.0, 0.06) == "100.0 +0.0 \N{MINUS SIGN}6.0 %"
    assert "of the median" in WORDS["mae"]
    assert "of the mean" in WORDS["rmse"]


def test_too_few_prompts_are_a_warning(found) -> None:
    assert not any("too few for intervals" in line for line in warnings(found[0]))
    assert "2 prompts are too few for intervals of the scores" in warnings(replace(found[0], prompts=2))[0]


def test_unknown_scores_are_dashes() -> None:
    assert score_text("tau", float("nan")) == "\N{EN DASH}"


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_screen(driver, page, width, scheme) -> None:
    driver.get_log("browser")
    look(driver, page.as_uri(), width, scheme, plots=6)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    marks = driver.execute_script("return document.querySelectorAll('#pairs path.point').length")
    assert marks == 400
    assert driver.execute_script("return document.querySelectorAll('#bins .bars path').length") == 12
    assert driver.get_log("browser") == []
