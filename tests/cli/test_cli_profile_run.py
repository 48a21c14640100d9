"""A measurement that ends early reports where its points are, and leaves no file without any."""

import pytest

from lengthwise.measure.operators.bench import Outcome
from lengthwise.measure.operators.campaign import Journal
from lengthwise.measure.operators.points import ROWS, Operator, Point
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.usecases.profile_run import naming_points_file


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "p.parquet.points.jsonl", {"model": "m"}, [])


def ended_early(journal, error):
    with naming_points_file(journal.path, print):
        raise error


def add_a_point(journal):
    point = Point(Operator("mlp up", ROWS, (1,), (2048,)), (1,))
    journal.add(Outcome(point, (1e-3,), (1e-3,), ""), 0.1)


def test_points_are_named_with_how_to_go_on(journal):
    add_a_point(journal)
    with pytest.raises(InputError, match=r"too small\. .* kept in .*points\.jsonl; give --resume"):
        ended_early(journal, InputError("the budget is too small."))
    assert journal.path.exists()


def test_a_file_without_points_is_removed(journal):
    with pytest.raises(InputError, match=r"^the budget is too small\.$"):
        ended_early(journal, InputError("the budget is too small."))
    assert not journal.path.exists()


def test_an_interrupt_reports_where_the_points_are(journal, capsys):
    add_a_point(journal)
    with pytest.raises(KeyboardInterrupt):
        ended_early(journal, KeyboardInterrupt())
    assert "give --resume" in capsys.readouterr().out


def test_points_of_another_measurement_are_reported_once(journal):
    add_a_point(journal)
    with pytest.raises(ProfileError) as caught, naming_points_file(journal.path, print):
        Journal(journal.path, {"model": "another"}, [])
    assert "--resume" not in str(caught.value)
    assert journal.path.exists()


def test_arguments_are_checked_before_the_file_of_points(cli, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "p.parquet.points.jsonl").write_text("{}\n{}\n")
    requested = ("profile", "run", "--model", "llama-3.1-8b", "--device", "cpu", "--out", tmp_path / "p.parquet")
    finished = cli(*requested, "--tp", "7")
    assert finished.code == 2
    assert "points.jsonl" not in finished.err
    assert "--resume" in cli(*requested).err
