"""The table [lab] of a scenario file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lengthwise import policy
from lengthwise.scenario._predictor import PredictorSection
from lengthwise.scenario._values import Count, NotNan, Section, Text
from lengthwise.scenario.sections import SchedulerSection

Load = Annotated[NotNan, Field(gt=0, le=1e6)]


class LabPolicy(SchedulerSection):
    """A scheduler that is tried: keys of [scheduler], and a name.

    ``longest_wait`` sets ``max_wait_s`` to so many times the 99th percentile of JCT under FCFS at the same load.
    """

    name: Text | None = None
    longest_wait: Annotated[NotNan, Field(gt=0, le=1e6)] | None = None

    @property
    def title(self) -> str:
        """The name, or what the file says of it."""
        return self.name or _title(self, "policy", "rank")


class LabPredictor(PredictorSection):
    """A predictor that is tried: keys of [predictor], and a name."""

    name: Text | None = None

    @property
    def title(self) -> str:
        """The name, or what the file says of it."""
        return self.name or _title(self, "kind", "file")


class LabSection(Section):
    """What ``lengthwise lab`` tries: every policy with every predictor, at every load and batch size.

    A policy is the name of a scheduler ("srtf"), a rank ("aged(weight=20)"), or a table of keys of
    [scheduler], on top of the scenario's own where ``policy`` is not among them; with ``longest_wait``
    nobody waits longer than so many times FCFS' 99th percentile. A predictor is a kind ("oracle") or a
    table of keys of [predictor]. ``loads`` are shares of what FCFS sustains (``unit`` "capacity"), or
    multiples of batch size / mean time of a request alone ("alone", ELIS); ``rates`` are requests a
    second. FCFS and the shortest first with lengths known run in any case: the ends of the gap.
    """

    policies: Annotated[list[LabPolicy], Field(min_length=1)] = Field(
        default_factory=lambda: [LabPolicy(policy="sjf"), LabPolicy(policy="isrtf")]
    )
    predictors: list[LabPredictor] = Field(default_factory=lambda: [LabPredictor(kind="oracle")])
    loads: Annotated[list[Load], Field(min_length=1)] | None = None
    unit: Literal["capacity", "alone"] = "capacity"
    rates: Annotated[list[Load], Field(min_length=1)] | None = None
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5

    @field_validator("policies", mode="before")
    @classmethod
    def _policies(cls, given: Any) -> Any:
        return [_policy(one) for one in given] if isinstance(given, list) else given

    @field_validator("predictors", mode="before")
    @classmethod
    def _predictors(cls, given: Any) -> Any:
        return (
            [{"kind": one} if isinstance(one, str) else one for one in given]
            if isinstance(given, list)
            else given
        )

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if self.loads is not None and self.rates is not None:
            raise ValueError("loads (shares of capacity) and rates (requests/s) exclude each other; keep one")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        _require_each_once("policies", [one.title for one in self.policies])
        _require_each_once("predictors", [one.title for one in self.predictors])
        for one in self.predictors:
            if one.kind == "none":
                raise ValueError(
                    'a predictor of kind "none" predicts nothing; policies that need none run once anyway'
                )
            if one.title == "oracle" and one.kind != "oracle":
                raise ValueError(
                    'the name "oracle" is for the predictor that knows the lengths; give another'
                )
        return self


def _policy(given: Any) -> Any:
    """A text is a scheduler's name where there is one, else a rank."""
    if not isinstance(given, str):
        return given
    return {"policy" if given in policy.named() else "rank": given}


def _title(section: Section, *first: str) -> str:
    """What was set: the first keys bare, the others as key=value."""
    told = section.model_dump(exclude_unset=True, exclude_none=True, exclude={"name"})
    bare = [str(told.pop(key)) for key in first if key in told]
    rest = [f"{key}={_text(value)}" for key, value in told.items()]
    return " ".join([*bare, *rest]) or "as the scenario"


def _text(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _require_each_once(what: str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are called {twice[0]!r}; give each a name of its own")
