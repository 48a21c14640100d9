"""The page of theory: its sentences, and that headless Chromium draws it within the screen."""

from __future__ import annotations

import json
import math

import pytest
from driving import look

from lengthwise import theory
from lengthwise.report.theory import answers, write_theory_html, write_theory_json

UNIFORM = theory.UniformTimes(1.0, 20.0)


@pytest.fixture(scope="module")
def bins() -> theory.MultiBinStudy:
    return theory.multibin_study(
        UNIFORM, 8, [1, 4, 16], rate_rps=0.5, target_share=0.9, error=0.1, requests=2000, seeds=3, metadata=["<b>&"]
    )


@pytest.fixture(scope="module")
def queue() -> theory.QueueStudy:
    return theory.queue_study(theory.ExponentialTimes(1.0), [0.02, 0.5, 0.9], slots=4)


def test_answers_name_the_best_number_of_bins(bins, queue):
    answer = " ".join(answers(bins))
    assert "16 bins of batches of 8" in answer
    assert f"{bins.bins_needed} bins with known lengths reach 90 % of the capacity" in answer
    assert "One bin cannot serve 0.500 requests/s; 4 bins can" in answer
    answer = " ".join(answers(queue))
    assert "At a load of 0.9" in answer
    assert "not worth it" in answer


def test_little_variance_is_not_worth_bins():
    same = theory.multibin_study(theory.UniformTimes(10, 10.1), 8, [1, 8], requests=0)
    assert "Bins are not worth it" in " ".join(answers(same))


def test_json_is_json_and_holds_everything(bins, queue, tmp_path):
    for study, kind in ((queue, "queue"), (bins, "multibin")):
        write_theory_json(tmp_path / "study.json", study)
        made = json.loads((tmp_path / "study.json").read_text("utf-8"))
        assert (made["format"], made["version"], made["kind"]) == ("lengthwise.theory", 1, kind)
        assert made["answers"] == answers(study)
    assert made["rows"][1]["cuts_s"] == pytest.approx([5.75, 10.5, 15.25])
    assert made["rows"][0]["simulated_rps"]["half_width"] > 0


def test_pages_are_escaped_and_the_same_again(bins, tmp_path):
    paths = [tmp_path / name for name in ("one.html", "two.html")]
    for path in paths:
        write_theory_html(path, bins)
    text = paths[0].read_text("utf-8")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "&lt;b&gt;&amp;" in text
    assert "<li><b>&" not in text
    assert text.index('<dl class="numbers">') < text.index("<figure")
    assert "NaN" not in text.split('id="figures">')[1].split("</script>")[0]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_are_drawn_and_nothing_is_wider_than_the_screen(driver, bins, queue, tmp_path, width, scheme):
    driver.get_log("browser")
    for study in (bins, queue):
        write_theory_html(tmp_path / "page.html", study)
        look(driver, (tmp_path / "page.html").as_uri(), width, scheme, plots=4)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) == 4
        assert all(box["right"] <= width and box["height"] >= 300 for box in boxes)
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def test_nothing_simulated_is_nothing_drawn(tmp_path):
    study = theory.multibin_study(UNIFORM, 8, [1, 2], requests=0)
    assert math.isnan(study.rows[0].simulated_rps.value)
    write_theory_html(tmp_path / "page.html", study)
    assert '"saturation"' not in (tmp_path / "page.html").read_text("utf-8")
