"""The notebooks of examples/notebooks run, and answers of notebook functions agree with the commands."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from documents import ROOT
from nbclient import NotebookClient

from lengthwise import notebook
from lengthwise.cli import main
from lengthwise.schema.errors import MissingExtraError, UnknownNameError

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SHORT = {"model": "opt-125m", "gpu": "L4", "rate": 5}
SMALL = {"workload.num_requests": 50, "run.seeds": 2, "run.model_draws": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's client, which this process runs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)
    made = nbformat.read(path, as_version=4)
    NotebookClient(made, timeout=120, resources={"metadata": {"path": path.parent}}).execute()
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("text/html" in output.get("data", {}) for output in outputs)
    saved = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in saved)  # outputs would be stale


def test_a_simulation_has_the_numbers_of_the_command(capsys):
    answer = notebook.simulate(settings=SMALL, **SHORT)
    options = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    short = [word for key, value in SHORT.items() for word in (f"--{key}", str(value))]
    assert main(["simulate", *short, *options, "--json", "-"]) == 0
    summary = json.loads(capsys.readouterr().out)["results"][0]["summary"]
    rows = {row["metric"]: row for row in answer.to_polars().to_dicts()}
    for metric in ("ttft_s.mean", "jct_s.p99"):
        key, statistic = metric.split(".")
        expected = summary[key][statistic]
        assert rows[metric]["value"] == pytest.approx(expected["value"])
        assert rows[metric]["high"] == pytest.approx(expected["value"] + expected["half_width"])
    assert answer.to_pandas().to_dict("records") == answer.to_polars().to_pandas(
        use_pyarrow_extension_array=False
    ).to_dict("records")
    text = re.sub(r"<[^>]+>", "", answer._repr_html_())
    assert "TTFT p99" in text
    assert answer.value[0].name in text


def test_every_plot_draws_what_its_name_says():
    answer = notebook.simulate(settings=SMALL | {"slo.ttft": "1s"}, **SHORT)
    assert {"ttft", "tbt", "tpot", "jct", "batch", "waiting", "kv", "output", "shares"} <= set(answer.plots)
    for name in answer.plots:
        axes = answer.plot(name)
        assert axes.lines or axes.patches
        axes.figure.clear()
    assert answer.plot("ttft", axes) is axes
    with pytest.raises(UnknownNameError, match="ttft"):
        answer.plot("tfft")


def test_a_missing_library_names_its_extra(monkeypatch):
    answer = notebook.Answer([], [{"value": 1.0}], "", {"one": lambda ax: None})
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[pandas\]"):
        answer.to_pandas()
    with pytest.raises(MissingExtraError, match=r"lengthwise\[notebook\]"):
        answer.plot()
