"""The page and the files of a profile: escaped, reproducible, and drawn in a browser."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from driving import screen, until

from lengthwise.cost.profiles import check_profiles, describe_profile
from lengthwise.report.profile import check_json, profile_json, time_text, write_profile_html
from lengthwise.schema.profile import Profile, ProfileFacts

NASTY = "</script><script>alert(1)</script>"


def made():
    """A shard's products, attention over a plane with a hole, and kernels of no model."""
    tokens, plane = 2 ** np.arange(12), np.array([[c, k] for c in (16, 64, 256) for k in (0, 64, 1024)])
    parts = [
        {"operator": "mlp up", "tp": 1, "tokens": tokens, "dtype": "bfloat16"},
        {"operator": "rope", "tp": 1, "tokens": tokens, "dtype": "bfloat16"},
        {"operator": "prefill attention", "tp": 1, "chunk": plane[:, 0], "context": plane[:, 1], "seqs": 1},
        {"operator": "decode attention", "tp": 1, "seqs": plane[:, 0], "kv_tokens": plane[:, 0] * 100, "skew": 1},
        {"operator": "gemm", "tokens": tokens, "n": 512, "k": 1024, "dtype": "fp8"},
        {"operator": "all-reduce", "gpus": 2, "bytes": tokens * 100, "backend": NASTY},
    ]
    sizes = [max(np.size(v) for v in part.values()) for part in parts]
    names = sorted({name for part in parts for name in part})
    blank = dict.fromkeys(("operator", "dtype", "backend"), "")
    columns = {
        name: np.concatenate(
            [np.broadcast_to(part.get(name, blank.get(name, 0)), n) for part, n in zip(parts, sizes, strict=True)]
        )
        for name in names
    }
    metadata = ProfileFacts(f"a {NASTY}", "lengthwise", "H100", "llama-3-8b", notes=(f"note <b> {NASTY}",))
    return Profile(metadata, columns | {"seconds": np.linspace(1e-5, 1e-3, sum(sizes))})


@pytest.fixture(scope="module")
def view():
    return describe_profile(made())


@pytest.fixture(scope="module")
def page(view, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "profile.html"
    write_profile_html(path, view)
    return path


def figures(text):
    return json.loads(text.split('id="figures">')[1].split("</script>")[0])


def test_the_page_is_escaped_and_reproducible(page, view, tmp_path):
    text = page.read_text()
    assert NASTY not in text
    assert "note &lt;b&gt;" in text
    assert "http-equiv" in text
    write_profile_html(tmp_path / "again.html", view)
    assert (tmp_path / "again.html").read_text() == text


def test_figures_hold_the_profile_s_numbers(page, view):
    drawn = figures(page.read_text())
    products = drawn["tokens"][0]["curves"][0]
    own = view.profile.of("mlp up")
    assert products["name"] == "mlp up"
    assert products["x"] == own["tokens"].tolist()
    assert products["y"] == pytest.approx(own["seconds"], rel=1e-4)
    assert [c["name"] for c in drawn["attention"][0]["curves"]] == ["context 0", "context 64", "context 1,024"]
    assert {one["title"].split(",")[0] for one in drawn["kernels"]} == {"Gemm", "All-reduce"}
    assert drawn["maps"][0]["gaps"]
    assert drawn["roofline"][0]["bandwidth"] == 3350e9


def test_the_file_holds_every_operator(view):
    made_json = json.loads(profile_json(view))
    assert [one["operator"] for one in made_json["operators"]] == [one.operator for one in view.operators]
    assert sum(one["points"] for one in made_json["operators"]) == made_json["rows"] == len(view.profile)
    first = next(one for one in made_json["operators"] if one["operator"] == "mlp up")
    assert first["axes"] == {"tokens": [1, 2048]}
    assert first["spread"] is None
    assert first["gaps"] == [{"tokens": [2049, 8192]}]
    assert first["best"]["roofline"] > 0


def test_the_file_of_a_check_holds_every_region():
    old = made()
    new = replace(old, columns=old.columns | {"seconds": old["seconds"] * 2})
    made_json = json.loads(check_json(check_profiles(new, old)))
    assert made_json["changed"] == sum(row["points"] >= 3 for row in made_json["rows"]) > 5
    assert [row["ratio"] for row in made_json["rows"]] == pytest.approx([2.0] * len(made_json["rows"]))


def test_times_read_well():
    assert [time_text(s) for s in (8.35e-6, 2.5e-3, 3.0)] == ["8.35 us", "2.50 ms", "3.00 s"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_screen(driver, page, width, scheme):
    driver.get_log("browser")
    screen(driver, width, scheme)
    driver.get(page.as_uri())
    wanted = sum(map(len, figures(page.read_text()).values()))
    drawn = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg')).length"
    until(driver, f"return {drawn} >= {wanted}")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    wide = "return Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().width))"
    assert driver.execute_script(wide) < width
    assert driver.get_log("browser") == []
