"""Workloads by name, from the data files beside this one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import Workload
from lengthwise.workload.arrivals import AllAtOnce, Arrivals, ClosedLoop, Gamma, Poisson
from lengthwise.workload.distributions import Marginal, Quantiles, TruncatedNormal
from lengthwise.workload.lengths import Capped, Conditional, Joint, Lengths, draw

Predicted = Literal["none", "oracle", "mean"]


def generate(
    num_requests: int,
    lengths: Lengths,
    arrivals: Arrivals,
    seed: int = 0,
    *,
    predicted: Predicted = "none",
    priority: npt.ArrayLike | None = None,
    tenants: int | Sequence[float] | None = None,
    name: str = "",
) -> Workload:
    """A workload of ``num_requests`` requests drawn from the models.

    Arrivals and lengths have a random stream each: with one seed, a change of the rate or of the kind
    of arrivals leaves every length as it is, and a change of the rate only stretches time.

    Args:
        num_requests: How many, at least 1.
        lengths: Draws prompt and output lengths; those of a trace with texts draw these too, into ``extra``.
        arrivals: Draws arrival times. A ``ClosedLoop`` also sets the workload's concurrency.
        seed: Any integer from 0; the same seed gives the same bytes.
        predicted: Column of predicted lengths: "none"; "oracle", the true ones; "mean", the mean of
            the drawn outputs for every request.
        priority: One integer a request, or one for all; smaller goes first.
        tenants: How many tenants send requests, as many each, or the weights of their numbers of
            requests: ``[9, 1]``. Whose a request is, is drawn from a stream of its own.
        name: For tables and reports.

    Raises:
        InputError: A number is out of range, or a model cannot draw that many.
    """
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    if seed < 0:
        raise InputError(f"seed must not be negative; it is {seed}")
    for_arrivals, for_lengths, for_tenants = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    arrival_s = arrivals.sample(num_requests, for_arrivals)
    drawn = draw(lengths, num_requests, for_lengths)
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=drawn.prompt,
        output_tokens=drawn.output,
        predicted_tokens=_predict(drawn.output, predicted),
        priority=None if priority is None else _broadcast(priority, num_requests),
        tenant=None if tenants is None else _tenants(tenants, num_requests, for_tenants),
        extra=dict(drawn.texts),
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        name=name,
    )


def _predict(output: npt.NDArray[np.int64], predicted: str) -> npt.NDArray[np.float64] | None:
    if predicted == "none":
        return None
    if predicted == "oracle":
        return output.astype(np.float64)
    if predicted == "mean":
        return np.full(len(output), output.mean())
    raise InputError(f"predicted must be none, oracle or mean; it is {predicted!r}")


def _tenants(tenants: int | Sequence[float], n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    weights = np.ones(tenants) if isinstance(tenants, int) else np.asarray(tenants, float)
    if weights.ndim != 1 or not len(weights) or not (np.isfinite(weights) & (weights > 0)).all():
        raise InputError(f"tenants must be a number of at least 1, or weights above 0; got {tenants!r}")
    return rng.choice(len(weights), n, p=weights / weights.sum())


def _broadcast(priority: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
    values = np.asarray(priority)
    if values.shape not in ((), (n,)) or values.dtype.kind not in "iub":
        raise InputError(f"priority must be one integer, or {n} of them; got {values.dtype} {values.shape}")
    return np.broadcast_to(values.astype(np.int64), (n,))


@dataclass(frozen=True, eq=False)
class Preset:
    """A named workload.

    Attributes:
        name: How it is asked for.
        description: What it is, in a sentence or two.
        lengths: Draws the lengths.
        arrivals: The arrivals that come with it, when no others are asked for.
        source: Where the numbers come from.
        license: Under what terms they came.
    """

    name: str
    description: str
    lengths: Lengths
    arrivals: Arrivals
    source: str
    license: str

    def generate(
        self, num_requests: int, arrivals: Arrivals | None = None, seed: int = 0, *, predicted: Predicted = "none"
    ) -> Workload:
        """A workload of this kind; see ``lengthwise.workload.preset_files``."""
        arrivals = self.arrivals if arrivals is None else arrivals
        return generate(num_requests, self.lengths, arrivals, seed, predicted=predicted, name=self.name)


def preset(name: str) -> Preset:
    """The preset of this name, in any case of letters.

    Raises:
        UnknownNameError: There is none; the message names the nearest.
    """
    names = _names()
    if name.lower() not in names:
        raise UnknownNameError("workload", name, names)
    return _load(name.lower())


def presets() -> Mapping[str, Preset]:
    """All presets by name, in order."""
    return MappingProxyType({name: _load(name) for name in _names()})


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    folder = files("lengthwise.workload") / "data"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@lru_cache(maxsize=64)
def _load(name: str) -> Preset:
    spec = tomllib.loads((files("lengthwise.workload") / "data" / f"{name}.toml").read_text("utf-8"))
    lengths: Lengths
    if "outputs" in spec:
        lengths = Conditional(_marginal(spec["prompt"]), _classes(spec["outputs"]))
    else:
        lengths = Joint(_marginal(spec["prompt"]), _marginal(spec["output"]), spec.get("correlation", 0.0))
    if "cap" in spec:
        lengths = Capped(lengths, **spec["cap"])
    arrivals = _ARRIVALS[spec["arrivals"]["kind"]](**_without_kind(spec["arrivals"]))
    return Preset(name, spec["description"], lengths, arrivals, spec["source"], spec["license"])


def _marginal(spec: dict[str, Any]) -> Marginal:
    return _MARGINALS[spec["kind"]](**_without_kind(spec))


def _classes(spec: dict[str, Any]) -> tuple[Marginal, ...]:
    return tuple(_marginal({**spec, "tokens": tokens}) for tokens in spec["tokens"])


def _without_kind(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "kind"}


def _truncated_normal(mean: float, sd: float, high: float, *, before_cut: bool = False) -> Marginal:
    build = TruncatedNormal if before_cut else TruncatedNormal.from_moments
    return build(mean, sd, 1.0, high)


_ARRIVALS: Mapping[str, Callable[..., Arrivals]] = {"all_at_once": AllAtOnce, "gamma": Gamma, "poisson": Poisson}
_MARGINALS: Mapping[str, Callable[..., Marginal]] = {
    "mean_median_p90": Quantiles.from_mean_median_p90,
    "quantiles": Quantiles,
    "truncated_normal": _truncated_normal,
}
