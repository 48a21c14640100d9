"""Clusters, models and tasks that tests of the planner share."""

from __future__ import annotations

from dataclasses import replace

from lengthwise import catalog
from lengthwise.schema.app import Cluster, Machine


def cluster_of(*gpus, group=2, kinds=("A100-80GB",)):
    """Machines of so many GPUs, in islands of ``group``; kinds go round."""
    node = replace(catalog.node("dgx-a100"), link_group=group)
    return Cluster(
        tuple(
            Machine(replace(catalog.gpu("A100-80GB"), name=kinds[i % len(kinds)]), replace(node, gpus=n), n)
            for i, n in enumerate(gpus)
        )
    )
