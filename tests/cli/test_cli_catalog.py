"""``lengthwise catalog`` and ``lengthwise workload``."""

from __future__ import annotations

import pytest
from rich.console import Console

from lengthwise import catalog, policy
from lengthwise import workload as w
from lengthwise.cli import catalog as pages
from lengthwise.cli import main, tables


def test_without_a_kind_it_counts_each(cli):
    finished = cli("catalog")
    assert finished.code == 0
    counted = {line.split()[0]: line.split()[1] for line in finished.out.splitlines()[1:]}
    assert counted["models"] == str(len(catalog.models()))
    assert set(counted) == {"models", "gpus", "nodes", "policies", "workloads"}


@pytest.mark.parametrize("kind", ["models", "gpus", "nodes", "policies", "workloads"])
def test_a_kind_lists_every_entry_and_each_entry_has_a_page(cli, kind):
    entries = cli("catalog", kind)
    assert entries.code == 0
    for name in pages.names(kind):
        assert name in entries.out
    for name in pages.names(kind)[:3]:
        shown = cli("catalog", kind, name)
        assert (shown.code, shown.err) == (0, "")
        assert name in shown.out


def test_the_singular_will_do(cli):
    assert cli("catalog", "gpu") == cli("catalog", "gpus")
    assert cli("catalog", "policy", "sjf") == cli("catalog", "policies", "sjf")


def test_an_entry_has_its_numbers_and_where_they_come_from(cli):
    out = cli("catalog", "gpus", "A100-80GB").out
    spec = catalog.gpu("A100-80GB")
    for fact in (spec.source, spec.price_source, "312 TFLOP/s", "80.00 GiB"):
        assert fact in out
    out = cli("catalog", "models", "llama-2-70b").out
    for fact in ("68,976,648,192", "320.0 KiB", "GQA 64/8 x 128"):
        assert fact in out
    out = cli("catalog", "policies", "sjf").out
    for fact in (policy.resolve("rank", "sjf").doc, "predicted_tokens", '[scheduler] rank = "sjf"'):
        assert fact in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cats",), "gpus, models, nodes, policies, workloads"),
        (("models", "lama-2-70b"), "llama-2-70b"),
        (("gpus", "H1000"), "H100"),
        (("policies", "sjff"), "sjf"),
        (("workloads", "chat-1"), "chat-1m"),
    ],
)
def test_unknown_names_are_exit_2_and_name_the_nearest(cli, arguments, words):
    finished = cli("catalog", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert words in finished.err


def test_no_marks_of_code_in_what_policies_do(cli):
    marked = {name for _, name, doc in policy.catalog() if "``" in doc}
    assert marked
    pages_of_them = [cli("catalog", "policies").out, *(cli("catalog", "policies", n).out for n in marked)]
    assert not any("``" in page for page in pages_of_them)


@pytest.fixture
def narrow(monkeypatch):
    """A terminal of 80 columns."""
    monkeypatch.setattr(tables, "console", lambda: Console(width=80, highlight=False))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", ["models", "gpus", "nodes", "policies", "workloads"])
def test_names_are_not_broken_on_a_narrow_terminal(cli, kind):
    out = cli("catalog", kind).out
    assert max(map(len, out.splitlines())) <= 80
    assert set(pages.names(kind)) <= set(out.split())


@pytest.mark.usefixtures("narrow")
def test_columns_are_left_out_rather_than_numbers_broken(cli, tmp_path):
    long = w.generate(500, w.Joint(w.Uniform(10_000, 900_000), w.Uniform(10_000, 900_000)), w.Poisson(2.0))
    w.write(long, tmp_path / "t.csv", "vidur")
    out = cli("workload", "show", tmp_path / "t.csv").out
    found = w.describe(w.read(tmp_path / "t.csv")).prompt
    assert max(map(len, out.splitlines())) <= 80
    assert {f"{found.mean:,.1f}", f"{found.min:,}", f"{found.quantiles['p99']:,.0f}"} <= set(out.split())
    assert "a wider terminal also shows: p5" in out
    assert "1.98 PFLOP/s" in cli("catalog", "gpus").out
    assert "pcie4-through-host " in cli("catalog", "nodes").out


KINDS = ["models", "gpus", "nodes", "policies", "workloads"]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_in_a_pipe_fit_in_100_columns_and_columns_shows_all(cli, monkeypatch, kind):
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = cli("catalog", kind).out.splitlines()
    assert max(map(len, piped)) <= 100
    assert set(pages.names(kind)) <= set(" ".join(piped).split())
    if " also shows: " in piped[-1]:
        columns, names = piped.pop().split(" also shows: ")
        monkeypatch.setenv(*columns.split("="))
        assert " also shows: " not in cli("catalog", kind).out
        monkeypatch.setenv("COLUMNS", "400")
        head = cli("catalog", kind).out.splitlines()[0]
        assert all(name in head and name not in piped[0] for name in names.split(", "))


def test_the_width_of_tables_in_a_pipe_is_that_of_columns(cli, monkeypatch):
    for columns, widest in (("70", 70), ("0", 100), ("wide", 100), ("400", 400)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = cli("catalog", "policies").out.splitlines()
        assert max(map(len, lines)) <= widest
        assert columns != "400" or max(map(len, lines)) > 100


def test_lines_of_text_in_a_pipe_are_not_broken(cli):
    found = catalog.gpu("A100-80GB")
    price = f" {found.price_per_hour_usd:.2f} $/h: {found.price_source}"
    assert len(price) > 100
    assert any(line.endswith(price) for line in cli("catalog", "gpu", "A100-80GB").out.splitlines())


def test_workload_show_reports_the_same_as_describe(cli, tmp_path):
    complete = w.generate(500, w.Joint(w.Fixed(100), w.Uniform(1, 99)), w.Poisson(2.0), seed=1)
    w.write(complete, tmp_path / "t.csv", "vidur")
    found = w.describe(w.read(tmp_path / "t.csv"))
    finished = cli("workload", "show", tmp_path / "t.csv")
    assert finished.code == 0
    for fact in ("500", f"{found.total_tokens:,}", f"{found.output.mean:,.1f}", f"{found.interarrival_cv:.2f}"):
        assert fact in finished.out
    assert any(bar in finished.out for bar in "▁▂▃▄▅▆▇█")


def test_workload_show_draws_from_a_preset(cli):
    small = cli("workload", "show", "chat-1m", "--num-requests", "50", "--seed", "3")
    assert small.code == 0
    assert "chat-1m" in small.out
    assert small.out == cli("workload", "show", "chat-1m", "--num-requests", "50", "--seed", "3").out
    assert small.out != cli("workload", "show", "chat-1m", "--num-requests", "50", "--seed", "4").out


def test_workload_show_takes_a_closed_loop_and_an_offline_batch(cli, tmp_path):
    lengths = w.Joint(w.Fixed(5), w.Fixed(5))
    w.write(w.generate(5, lengths, w.ClosedLoop(2)), tmp_path / "loop.parquet")
    w.write(w.generate(1, lengths, w.AllAtOnce()), tmp_path / "one.parquet")
    assert "2 (closed loop)" in cli("workload", "show", tmp_path / "loop.parquet").out
    assert "all at once" in cli("workload", "show", tmp_path / "one.parquet").out


@pytest.mark.parametrize("text", ["", "arrived_at,num_prefill_tokens,num_decode_tokens\n", "a,b\n1,2\n"])
def test_a_bad_trace_is_exit_2_and_named(cli, tmp_path, text):
    (tmp_path / "bad.csv").write_text(text)
    finished = cli("workload", "show", tmp_path / "bad.csv")
    assert (finished.code, finished.out) == (2, "")
    assert "bad.csv" in finished.err


def test_neither_a_file_nor_a_preset(cli):
    finished = cli("workload", "show", "chat-1")
    assert finished.code == 2
    assert "there is no file chat-1" in finished.err
    assert "chat-1m" in finished.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("catalog g", "gpus"),
        ("catalog gpus A1", "A100-80GB"),
        ("catalog models llama-2-7", "llama-2-70b"),
        ("sim", "simulate"),
    ],
)
def test_the_shell_completes_commands_kinds_and_names(monkeypatch, capsys, words, offered):
    monkeypatch.setenv("_LENGTHWISE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"lengthwise {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    main([])
    assert offered in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hrrn", ("starvation", "passed only by requests that have waited at least")),
        ("sjf", ("starvation", "only scheduler.max_wait_s bounds the wait")),
        ("isrtf", ("max_wait_s", "300 (inf removes the bound)")),
        ("multi_bin", ("batch_wait_s", "30 (inf removes the bound)")),
        ("mlfq", ("starvation", "within its level by no later request")),
        ("mlfq", ("quantum=64, levels=6", 'rank = "mlfq(quantum=64')),
        ("aged(weight=20)", ("weight=10.0", "predicted remaining tokens / weight")),
        ("bins", ('binning = "bins(boundaries=[100, 300])"',)),
        ("equal_mass", ('binning = "equal_mass(k=8)"', "boundaries from the workload")),
    ],
)
def test_policies_list_their_parameters_and_what_bounds_a_wait(cli, name, words):
    out = cli("catalog", "policy", name).out
    assert all(word in out for word in words)
