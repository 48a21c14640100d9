"""The table [predictor] of a scenario file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lengthwise import predict
from lengthwise.scenario._values import Count, NotNan, Section, Text
from lengthwise.schema.errors import InputError

Kind = Literal[
    "none", "oracle", "constant", "ecdf", "bucket_ecdf", "lognormal_error", "bin_neighbour", "confusion",
    "quantised", "same", "reversed", "model", "default",
]  # fmt: skip
PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "oracle": (),
    "constant": ("tokens", "conditional"),
    "ecdf": ("conditional",),
    "bucket_ecdf": ("buckets", "conditional"),
    "lognormal_error": ("sigma", "bias", "half_life_tokens", "certain"),
    "bin_neighbour": ("boundaries", "p", "split", "half_life_tokens"),
    "confusion": ("boundaries", "matrix"),
    "quantised": ("boundaries",),
    "same": ("tokens",),
    "reversed": ("pivot",),
    "model": ("file", "conditional"),
    "default": ("conditional",),
}
_OF_ALL = ("name", "kind", "window_tokens", "statistic", "repredict")
_NEEDED = {
    "lognormal_error": ("sigma",),
    "bin_neighbour": ("boundaries", "p"),
    "confusion": ("boundaries", "matrix"),
    "quantised": ("boundaries",),
    "model": ("file",),
}
OUTERMOST = 2.0
"""Where only the lengths between classes are given, the last class is believed to end at so many times the last."""
_LEARNING = ("ecdf", "bucket_ecdf")
_Positive = Annotated[NotNan, Field(gt=0, le=1e9)]


class PredictorSection(Section):
    """Who predicts output lengths, at first and again after every ``window_tokens`` of output.

    Of what: "oracle" knows them; "lognormal_error", "bin_neighbour", "confusion" and "quantised" know them
    with an error (``sigma`` and ``bias`` of the logarithm; ``p`` on each side, ``split``; a ``matrix`` of
    true by said classes; the class alone), "same" says ``tokens`` of every request and "reversed"
    ``pivot`` squared over the length. "constant", "ecdf" and "bucket_ecdf" (by prompt length) learn from other
    requests of the same [workload], drawn with another seed, never from the requests themselves.
    "model" is a trained predictor's ``file``, "default" the one that comes with lengthwise.
    ``boundaries`` are growing lengths, or into how many equally full classes lengths fall;
    those between the classes do as well where there is one, or one fewer than the ``matrix`` has rows. An error halves
    every ``half_life_tokens``. ``conditional`` asks once and then lets survival alone tell what is left.
    ``statistic`` is what policies are told of the distribution: "mean", "median", a quantile ("q0.9"), or
    "tail_inflated".
    """

    kind: Kind = "none"
    file: Text | None = None
    tokens: Annotated[NotNan, Field(ge=1, le=1e9)] | None = None
    buckets: Annotated[int, Field(ge=1, le=1024)] = 8
    sigma: Annotated[NotNan, Field(ge=0, le=10)] | None = None
    bias: Annotated[NotNan, Field(ge=-10, le=10)] = 0.0
    half_life_tokens: _Positive | None = None
    certain: bool = False
    boundaries: list[float] | Annotated[int, Field(ge=1, le=4096)] | None = None
    p: Annotated[NotNan, Field(ge=0, le=0.5)] | None = None
    split: Annotated[NotNan, Field(ge=0, le=1)] = 0.5
    matrix: list[list[float]] | None = None
    pivot: Annotated[NotNan, Field(ge=1, le=1e5)] = 256.0
    conditional: bool = False
    window_tokens: Count = 50
    statistic: Text = "mean"
    repredict: bool = True

    @property
    def has_chance(self) -> bool:
        """Whether another seed gives other predictions of the same requests."""
        return self.kind in ("lognormal_error", "bin_neighbour", "confusion")

    @property
    def learns(self) -> bool:
        """Whether it must see other requests first."""
        counted = isinstance(self.boundaries, int)
        return self.kind in _LEARNING or counted or (self.kind == "constant" and self.tokens is None)

    @field_validator("statistic")
    @classmethod
    def _known_statistic(cls, statistic: str) -> str:
        try:
            predict.statistic_of(statistic)
        except InputError as error:
            raise ValueError(str(error)) from error
        return statistic

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Self:
        known = (*_OF_ALL, *PARAMETERS[self.kind])
        defaults = type(self).model_fields
        for key in self.model_fields_set:
            if key not in known and getattr(self, key) != defaults[key].default:
                takes = ", ".join(PARAMETERS[self.kind]) or "none of its own"
                raise ValueError(f"{key} is not of kind {self.kind}, which takes {takes}")
        for key in _NEEDED.get(self.kind, ()):
            if getattr(self, key) is None:
                raise ValueError(f"{self.kind} needs {key}")
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        try:
            if self.kind not in ("none", "model", "default"):
                self.made()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self

    def made(self) -> Any:
        """The predictor as its kind says, before it has learnt; not of "none", "model" and "default"."""
        own = {
            key: getattr(self, key) for key in PARAMETERS[self.kind] if key not in ("conditional", "buckets")
        }
        if isinstance(self.boundaries, list) and "boundaries" in own:
            own["boundaries"] = self._edges(self.boundaries)
        if self.kind == "same" and self.tokens is None:
            own = {}
        if self.kind == "bucket_ecdf":
            own = {"by": ("model", "prompt_tokens"), "buckets": self.buckets}
        return _CLASSES[self.kind](**own)

    def _edges(self, given: list[float]) -> list[float]:
        """Boundaries from the least length to the greatest; those between classes alone get outer ones."""
        inner = len(given) == 1 or (self.matrix is not None and len(given) == len(self.matrix) - 1)
        return [0.0, *given, OUTERMOST * given[-1]] if inner and min(given) > 0 else given


_CLASSES: dict[str, Any] = {
    "oracle": predict.Oracle,
    "constant": predict.Constant,
    "ecdf": predict.Ecdf,
    "bucket_ecdf": predict.BucketEcdf,
    "lognormal_error": predict.LogNormalError,
    "bin_neighbour": predict.BinNeighbour,
    "confusion": predict.Confusion,
    "quantised": predict.Quantised,
    "same": predict.Same,
    "reversed": predict.Reversed,
}
