"""The table [schedule] of a scenario file."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import Field, field_validator

from lengthwise.scenario._values import Count, NotNan, Seconds, Section, Text
from lengthwise.schedule import SYSTEMS, Strategy
from lengthwise.schema.errors import UnknownNameError

_QUANTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)")
_FIXED = re.compile(r"([1-9][0-9]{0,6}) tokens?")


class ScheduleSection(Section):
    """Which schedule to choose: under what latency bound, on how many GPUs, among which strategies.

    ``latency_bound`` is held for outputs as long as ``bound_for`` says ("p99": all but one in a hundred are no
    longer; "80 tokens": that long, however lengths move; some output must be), from the start of their encoding to the
    last token; inf: none. With ``worst_case`` it holds when batches are as heavy as the same share of them are at most,
    else for the expected latency. ``gpus`` None: as many as [deployment] has (tp x pp x replicas). ``strategies``:
    "rra" (every GPU encodes and decodes, in phases), "waa-c" and "waa-m" (some GPUs encode, the others decode, split by
    computation or by memory).
    ``threshold``: encodings are resized so that the tokens of their prompts stay within this share of their mean, and
    the decode batch within it of its own (ExeGPT's dynamic adjustment). The plan counts on that of encodings, as near
    as whole prompts come, and what runs it does both. None: encodings have B_E requests.
    ``baselines``: other systems that the choice is held against, or "all" of them: "fastertransformer",
    "deepspeed-inference", "orca", "vllm" (v0), "sarathi", "vllm-v1", "vllm-v1-disaggregated" (some replicas prefill,
    the others decode); each is simulated in all its configurations, which takes seconds to a minute.
    ``dram_gb_s``, ``ssd_gb_s``: how fast weights are loaded anew, in 1e9 bytes a second: from host memory to each GPU,
    and from the drives of each node. None: what ExeGPT measured (its seconds for its own models, else 4.9 and 7.3).
    """

    latency_bound: Seconds = math.inf
    bound_for: Text = "p99"
    gpus: Count | None = None
    strategies: list[Text] = Field(default_factory=lambda: [one.value for one in Strategy], min_length=1)
    worst_case: bool = True
    threshold: Annotated[NotNan, Field(gt=0, lt=1)] | None = None
    baselines: list[Text] = Field(default_factory=list)
    dram_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None
    ssd_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None

    @field_validator("bound_for")
    @classmethod
    def _quantile(cls, text: str) -> str:
        found = _QUANTILE.fullmatch(text)
        if not _FIXED.fullmatch(text) and (not found or not 50 <= float(found[1]) < 100):
            raise ValueError(
                'must be a quantile of the outputs from p50 to below p100, such as "p99" or "p99.9", '
                'or a fixed length such as "80 tokens"'
            )
        return text

    @field_validator("strategies")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        known = [one.value for one in Strategy]
        for name in names:
            if name not in known:
                raise ValueError(str(UnknownNameError("strategy", name, known)))
        return names

    @field_validator("baselines")
    @classmethod
    def _systems(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ("all", *SYSTEMS):
                raise ValueError(str(UnknownNameError("system", name, ["all", *SYSTEMS])))
        return names

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems that are meant, each once."""
        return SYSTEMS if "all" in self.baselines else tuple(dict.fromkeys(self.baselines))

    @property
    def level(self) -> float:
        """The quantile as a share; of batches alone where the bound is for a fixed length."""
        return 0.99 if self.output_tokens else float(self.bound_for[1:]) / 100

    @property
    def output_tokens(self) -> int | None:
        """The fixed length that the bound is for; None: it is for a quantile."""
        found = _FIXED.fullmatch(self.bound_for)
        return int(found[1]) if found else None
