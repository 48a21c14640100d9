"""Generated workloads, and named presets from the data files of this package."""

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
    """Return a workload of ``num_requests`` requests drawn from the models; raise InputError for an invalid argument.

    Arrivals, lengths and tenants have separate random streams: with one seed, other arrivals leave every length
    unchanged, and another rate only scales time. A ``ClosedLoop`` also sets the workload's concurrency.

    Args:
        predicted: Column of predicted lengths: "none"; "oracle", the true ones; "mean", the drawn mean for every
            request.
        priority: One integer for each request, or one for all; smaller ones are scheduled first.
        tenants: Number of tenants with equal shares of the requests, or weights of their shares: ``[9, 1]``.
    """
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    if seed < 0:
        raise InputError(f"seed must not be negative; it is {seed}")
    for_arrivals, for_lengths, for_tenants = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    arrival_s = arrivals.sample(num_requests, for_arrivals)
    drawn = draw(lengths, num_requests, for_lengths)
    predicted_tokens: npt.NDArray[np.float64] | None = None
    if predicted == "oracle":
        predicted_tokens = drawn.output.astype(np.float64)
    elif predicted == "mean":
        predicted_tokens = np.full(num_requests, drawn.output.mean())
    elif predicted != "none":
        raise InputError(f"predicted must be none, oracle or mean; it is {predicted!r}")
    priorities = tenant = None
    if priority is not None:
        values = np.asarray(priority)
        if values.shape not in ((), (num_requests,)) or values.dtype.kind not in "iub":
            raise InputError(
                f"priority must be one integer, or {num_requests} of them; got {values.dtype} {values.shape}"
            )
        priorities = np.broadcast_to(values.astype(np.int64), (num_requests,))
    if tenants is not None:
        weights = np.ones(tenants) if isinstance(tenants, int) else np.asarray(tenants, float)
        if weights.ndim != 1 or not len(weights) or not (np.isfinite(weights) & (weights > 0)).all():
            raise InputError(f"tenants must be a number of at least 1, or weights above 0; got {tenants!r}")
        tenant = for_tenants.choice(len(weights), num_requests, p=weights / weights.sum())
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=drawn.prompt,
        output_tokens=drawn.output,
        predicted_tokens=predicted_tokens,
        priority=priorities,
        tenant=tenant,
        extra=dict(drawn.texts),
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        name=name,
    )


@dataclass(frozen=True, eq=False)
class Preset:
    """A named workload."""

    name: str
    description: str  # one or two sentences
    lengths: Lengths
    arrivals: Arrivals  # by default
    source: str
    license: str

    def generate(
        self, num_requests: int, arrivals: Arrivals | None = None, seed: int = 0, *, predicted: Predicted = "none"
    ) -> Workload:
        """Return a workload of this kind; arguments are those of :func:`generate`."""
        return generate(
            num_requests, self.lengths, arrivals or self.arrivals, seed, predicted=predicted, name=self.name
        )


def preset(name: str) -> Preset:
    """Return the preset of this name, in upper or lower case; raise UnknownNameError with the nearest name."""
    names = _names()
    if name.lower() not in names:
        raise UnknownNameError("workload", name, names)
    return _load(name.lower())


def presets() -> Mapping[str, Preset]:
    """Return all presets by name, in order."""
    return MappingProxyType({name: _load(name) for name in _names()})


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    folder = files("lengthwise.workload") / "data"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@lru_cache(maxsize=64)
def _load(name: str) -> Preset:
    spec = tomllib.loads((files("lengthwise.workload") / "data" / f"{name}.toml").read_text("utf-8"))
    prompt = _marginal(**spec["prompt"])
    lengths: Lengths
    if "outputs" in spec:
        outputs = spec["outputs"]
        lengths = Conditional(prompt, tuple(_marginal(**{**outputs, "tokens": tokens}) for tokens in outputs["tokens"]))
    else:
        lengths = Joint(prompt, _marginal(**spec["output"]), spec.get("correlation", 0.0))
    if "cap" in spec:
        lengths = Capped(lengths, **spec["cap"])
    arrivals = _ARRIVALS[spec["arrivals"].pop("kind")](**spec["arrivals"])
    return Preset(name, spec["description"], lengths, arrivals, spec["source"], spec["license"])


def _marginal(kind: str, **values: Any) -> Marginal:
    return _MARGINALS[kind](**values)


def _truncated_normal(mean: float, sd: float, high: float, *, before_cut: bool = False) -> Marginal:
    return (TruncatedNormal if before_cut else TruncatedNormal.from_moments)(mean, sd, 1.0, high)


_ARRIVALS: Mapping[str, Callable[..., Arrivals]] = {"all_at_once": AllAtOnce, "gamma": Gamma, "poisson": Poisson}
_MARGINALS: Mapping[str, Callable[..., Marginal]] = {
    "mean_median_p90": Quantiles.from_mean_median_p90,
    "quantiles": Quantiles,
    "truncated_normal": _truncated_normal,
}
