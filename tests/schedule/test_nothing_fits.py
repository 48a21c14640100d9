"""What is advised where no schedule fits: about memory where that is short, else about the layout."""

from __future__ import annotations

import pytest

from lengthwise import catalog
from lengthwise.schedule import Cluster, Estimator, Planner, Strategy, cluster_tables
from lengthwise.schema.errors import ScheduleError


def refused(task, model, gpus, degrees, strategies=(Strategy.RRA,)):
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), gpus)
    estimator = Estimator(task, cluster, model, cluster_tables(model, cluster, degrees))
    with pytest.raises(ScheduleError, match=f"no schedule fits {gpus} GPUs") as told:
        Planner(estimator, degrees, strategies).best()
    return str(told.value)


@pytest.mark.parametrize(("gpus", "strategy"), [(48, Strategy.RRA), (96, Strategy.WAA_C)])
def test_more_stages_than_layers_ask_for_fewer_gpus_not_for_more(opt, summaries, gpus, strategy):
    said = refused(summaries, opt, gpus, [1], [strategy])
    assert "it has more stages than the model has layers" in said
    assert "Use fewer GPUs" in said
    assert "at most 40 stages, one a layer" in said
    assert "memory" not in said


def test_what_is_advised_for_too_many_stages_helps(opt, summaries):
    for gpus, degree in ((40, 1), (48, 4)):
        cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), gpus)
        estimator = Estimator(summaries, cluster, opt, cluster_tables(opt, cluster, [1, degree]))
        assert Planner(estimator, [degree], [Strategy.RRA]).best(60.0).row.throughput_rps > 0


def test_groups_that_no_side_holds_ask_for_a_lower_degree(opt, summaries):
    said = refused(summaries, opt, 4, [4], [Strategy.WAA_C])
    assert said.endswith("Use a lower tensor-parallel degree, RRA, or more GPUs")


def test_single_gpus_without_tables_ask_for_them(opt, summaries):
    said = refused(summaries, opt, 6, [4])
    assert "single GPUs next to the groups have no cost tables" in said
    assert "Give cost tables of TP 1 too, or use as many GPUs as the degree divides" in said


def test_weights_that_do_not_fit_ask_for_memory_even_where_a_layout_lacks_layers(summaries):
    said = refused(summaries, catalog.model("gpt-3-175b"), 4, [1, 4])
    assert "the weights of" in said
    assert said.endswith("Use more GPUs, or GPUs with more memory")
