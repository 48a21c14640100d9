"""ExeGPT's small case: OPT-13B on four A40s, summarisation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lengthwise import catalog
from lengthwise.schedule import Cluster, Estimator, TaskLengths, cluster_tables

sys.path.insert(0, str(Path(__file__).parent))  # schedule_grids


@pytest.fixture(scope="session")
def opt():
    return catalog.model("opt-13b")


@pytest.fixture(scope="session")
def four_a40():
    return Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 4)


@pytest.fixture(scope="session")
def opt_tables(opt, four_a40):
    return cluster_tables(opt, four_a40, [1, 2, 4])


@pytest.fixture(scope="session")
def summaries():
    return TaskLengths.from_preset("exegpt-s")


@pytest.fixture(scope="session")
def opt_estimator(opt, four_a40, opt_tables, summaries):
    return Estimator(summaries, four_a40, opt, opt_tables)
