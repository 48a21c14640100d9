"""Cost tables that are off: of two degrees, and of several at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.cost.model_error import perturbed, perturbed_degrees
from lengthwise.schedule import Cluster, cluster_tables
from lengthwise.schema.cost_tables import CostEvidence, OtherDegree, PartError


@pytest.fixture(scope="module")
def tables():
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 4)
    return cluster_tables(catalog.model("opt-13b"), cluster, [1, 4])


def ratios(changed, cost, name):
    return [float(getattr(one, name)[5] / getattr(cost, name)[5]) for one in changed]


def test_the_other_degree_is_as_far_off(tables):
    cost = replace(tables[4], other=OtherDegree(tables[1], np.array([0, 1])))
    moved = perturbed(cost)
    layer = ratios(moved, cost, "layer_s")
    assert len(set(layer)) == 16
    assert ratios([one.other.tables for one in moved], tables[1], "layer_s") == pytest.approx(layer)
    assert ratios([one.other.tables for one in moved], tables[1], "host_s") == pytest.approx(
        ratios(moved, cost, "host_s")
    )


def test_another_degree_without_errors_uses_those_of_its_neighbour(tables):
    other = replace(tables[1], evidence=CostEvidence())
    evidence = CostEvidence(errors=(PartError("step", 0.1),))
    cost = replace(tables[4], evidence=evidence, other=OtherDegree(other, np.array([0, 1])))
    moved = perturbed(cost)
    assert ratios([one.other.tables for one in moved], other, "layer_s") == pytest.approx(
        ratios(moved, cost, "layer_s")
    )


def test_tables_without_another_degree_are_moved_as_before(tables):
    plain = perturbed(tables[4])
    companion = perturbed(replace(tables[4], other=OtherDegree(tables[1], np.array([0, 1]))))
    assert ratios(plain, tables[4], "layer_s") == ratios(companion, tables[4], "layer_s")


def test_degrees_are_off_together(tables):
    drawn = perturbed_degrees(tables)
    assert [sorted(one) for one in drawn] == [[1, 4]] * 16
    for name in ("layer_s", "head_s", "host_s"):
        by_degree = [ratios([one[tp] for one in drawn], tables[tp], name) for tp in (1, 4)]
        assert by_degree[0] == pytest.approx(by_degree[1])
        assert len(set(by_degree[0])) == 16
    assert not np.any(drawn[0][1].comm_s)


def test_tables_without_errors_are_not_moved(tables):
    assert perturbed_degrees({tp: replace(cost, evidence=CostEvidence()) for tp, cost in tables.items()}) == []
    assert perturbed_degrees(tables, draws=0) == []


def test_context_before_a_chunk_has_an_error_of_its_own_or_that_of_prefill(tables):
    def factors(*errors):
        evidence = CostEvidence(errors=tuple(PartError(part, 0.3) for part in errors))
        moved = [one.prefill_s for one in perturbed(replace(tables[1], evidence=evidence))]
        own_s = tables[1].prefill_s[1:, :1]
        context_s = tables[1].prefill_s[1:, 1:] - own_s
        own = [(one[1:, :1] / own_s).mean() for one in moved]
        context = [((one[1:, 1:] - one[1:, :1]) / context_s)[context_s > 0].mean() for one in moved]
        assert own == pytest.approx([(one[-1, 0] / own_s[-1, 0]) for one in moved])
        return own, context

    together, separate, alone = factors("prefill"), factors("prefill", "context"), factors("context")
    assert together[0] == pytest.approx(together[1])
    assert len(set(np.round(together[0], 9))) == 16
    assert abs(np.corrcoef(*np.log(separate))[0, 1]) < 0.3
    assert alone[0] == pytest.approx([1.0] * 16)
    assert np.std(np.log(alone[1])) == pytest.approx(0.3, rel=0.1)
