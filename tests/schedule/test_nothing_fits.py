"""What is advised where no schedule fits: about memory where that is short, else about the layout."""

from __future__ import annotations

import pytest

from lengthwise import catalog
from lengthwise.schedule import Cluster, Estimator, Planner, Strategy, cluster_tables
from lengthwise.schema.errors import ScheduleError


def refused(task, model, gpus, degrees, strategies=(Strategy.RRA,)):
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), gpus)
    estimator = Estimator(task, cluster, model, cluster_tables(model, cluster, degrees))
    with pytest.raises(ScheduleError, match=f"no schedule fits {gpus} GPUs") as reported:
        Planner(estimator, degrees, strategies).best()
    return str(reported.value)


@pytest.mark.parametrize(("gpus", "strategy"), [(48, Strategy.RRA), (96, Strategy.WAA_C)])
def test_more_stages_than_layers_suggest_fewer_gpus_and_not_more(opt, summaries, gpus, strategy):
    message = refused(summaries, opt, gpus, [1], [strategy])
    assert "it has more stages than the model has layers" in message
    assert "Use fewer GPUs" in message
    assert "at most 40 stages, one a layer" in message
    assert "memory" not in message


def test_what_is_advised_for_too_many_stages_helps(opt, summaries):
    for gpus, degree in ((40, 1), (48, 4)):
        cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), gpus)
        estimator = Estimator(summaries, cluster, opt, cluster_tables(opt, cluster, [1, degree]))
        assert Planner(estimator, [degree], [Strategy.RRA]).best(60.0).row.throughput_rps > 0


def test_groups_that_fit_no_side_suggest_a_lower_degree(opt, summaries):
    message = refused(summaries, opt, 4, [4], [Strategy.WAA_C])
    assert message.endswith("Use a lower tensor-parallel degree, RRA, or more GPUs")


def test_single_gpus_without_tables_suggest_adding_them(opt, summaries):
    message = refused(summaries, opt, 6, [4])
    assert "single GPUs next to the groups have no cost tables" in message
    assert "Give cost tables of TP 1 too, or use as many GPUs as the degree divides" in message


def test_weights_that_do_not_fit_suggest_more_memory_even_where_a_layout_lacks_layers(summaries):
    message = refused(summaries, catalog.model("gpt-3-175b"), 4, [1, 4])
    assert "the weights of" in message
    assert message.endswith("Use more GPUs, or GPUs with more memory")
