"""Generates workloads, also from named presets, which are data files of this package."""

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
    """Return a workload of ``num_requests`` requests that are drawn from the models.

    Clients' limits of outputs are those that ``lengths`` draws (``ClientLimits``). Arrivals, lengths and tenants have
    separate random streams: with one seed, other arrivals leave every length unchanged, and another rate only scales
    time. A ``ClosedLoop`` also sets the workload's concurrency. Raises InputError for an invalid argument.

    Args:
        predicted: The predicted lengths: "none"; "oracle", the true lengths; or "mean", the mean of the drawn lengths
            for every request.
        priority: One integer for each request, or one for all; requests with smaller ones are scheduled first.
        tenants: Number of tenants with equal shares of the requests, or the weights of their shares: ``[9, 1]``.
    """
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    if seed < 0:
        raise InputError(f"seed must not be negative; it is {seed}")
    for_arrivals, for_lengths, for_tenants = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    arrival_s = arrivals.sample(num_requests, for_arrivals)
    drawn = draw(lengths, num_requests, for_lengths)
    priorities = None
    if priority is not None:
        values = np.asarray(priority)
        if values.shape not in ((), (num_requests,)) or values.dtype.kind not in "iub":
            message = f"priority must be one integer, or {num_requests} of them; got {values.dtype} {values.shape}"
            raise InputError(message)
        priorities = np.broadcast_to(values.astype(np.int64), (num_requests,))
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=drawn.prompt,
        output_tokens=drawn.output,
        predicted_tokens=predicted_lengths(predicted, drawn.output),
        priority=priorities,
        tenant=None if tenants is None else drawn_tenants(tenants, num_requests, for_tenants),
        extra=dict(drawn.texts),
        **drawn.limit_columns(),
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        name=name,
    )


def predicted_lengths(predicted: Predicted, output: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """Return the predicted lengths [n] of requests with these outputs, as ``generate`` explains; None for "none"."""
    if predicted not in ("none", "oracle", "mean"):
        raise InputError(f"predicted must be none, oracle or mean; it is {predicted!r}")
    if predicted == "none":
        return None
    return output.astype(np.float64) if predicted == "oracle" else np.full(len(output), output.mean())


def drawn_tenants(tenants: int | Sequence[float], n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the tenant [n], from 0, of each of n requests or sessions; ``tenants`` is as in ``generate``."""
    weights = np.ones(tenants) if isinstance(tenants, int) else np.asarray(tenants, float)
    if weights.ndim != 1 or not len(weights) or not (np.isfinite(weights) & (weights > 0)).all():
        raise InputError(f"tenants must be an integer of at least 1, or weights above 0; got {tenants!r}")
    return rng.choice(len(weights), n, p=weights / weights.sum())


@dataclass(frozen=True, eq=False)
class Preset:
    """A named workload, from which requests can be generated."""

    name: str
    description: str  # one or two sentences
    lengths: Lengths
    arrivals: Arrivals  # if ``generate`` gets none
    source: str
    license: str

    def generate(
        self, num_requests: int, arrivals: Arrivals | None = None, seed: int = 0, *, predicted: Predicted = "none"
    ) -> Workload:
        """Return a workload of this kind; the arguments are those of :func:`generate`."""
        return generate(
            num_requests, self.lengths, arrivals or self.arrivals, seed, predicted=predicted, name=self.name
        )


def preset(name: str) -> Preset:
    """Return the preset with this name. Raises UnknownNameError, which suggests a similar name."""
    names = _names()
    if name.lower() not in names:
        raise UnknownNameError("workload", name, names)
    return _load(name.lower())


def presets() -> Mapping[str, Preset]:
    """Return all presets by name, in alphabetical order."""
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


_ARRIVALS: Mapping[str, Callable[..., Arrivals]] = {"all_at_once": AllAtOnce, "gamma": Gamma, "poisson": Poisson}
_MARGINALS: Mapping[str, Callable[..., Marginal]] = {
    "mean_median_p90": Quantiles.from_mean_median_p90,
    "quantiles": Quantiles,
    # With ``before_cut``, mean and sd are those of the normal before its truncation.
    "truncated_normal": lambda mean, sd, high, *, before_cut=False: (
        TruncatedNormal if before_cut else TruncatedNormal.from_moments
    )(mean, sd, 1.0, high),
}
