"""``[deployment.decode]``: replicas apart that decode what those of ``[deployment]`` prefill."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lengthwise.scenario._values import Count, Section, Share, Text, Wait


class DecodeSection(Section):
    """How what decodes apart is cut and limited, and how requests get there; the rest is as in the file.

    ``link``: "node" is what joins a replica of each side (inside a node where they fit into one, else its network),
    "host" the host's memory, written and read; ``handover`` are seconds that each request's transfer takes on top.
    ``one_at_a_time = false``: transfers do not wait for one another.
    """

    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    num_blocks: Count | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=2**17)] | None = None
    max_step_seqs: Annotated[int, Field(ge=1, le=2**17)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpu_memory_utilization: Share | None = None
    link: Literal["node", "host"] = "node"
    handover: Wait = 0.0
    one_at_a_time: bool = True
    batching: Text = "unified"
    memory: Text = "paged"
    preempt: Literal["recompute", "swap"] = "recompute"
    router: Text = "round_robin"

    @property
    def limits(self) -> dict[str, Any]:
        """The engine's limits that are its own."""
        names = ("max_num_seqs", "max_step_seqs", "max_in_flight", "gpu_memory_utilization")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"max_step_seqs": None, "max_in_flight": None} | given
