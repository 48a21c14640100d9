"""What a profile holds: for each operator and shard its ranges, its noise, its gaps, its share of the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.cost.profiles._gaps import Gap, gaps
from lengthwise.cost.profiles._work import RowWork, known_model, row_work
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.profile import WHOLE_COLUMNS, Profile

_AXES = tuple(name for name in WHOLE_COLUMNS if name not in ("tp", "repeats"))


@dataclass(frozen=True)
class Share:
    """What rows reach of the data sheet's peak, as shares: of FLOP/s, of bytes a second, of the nearer of both."""

    flops: float
    bandwidth: float
    roofline: float


@dataclass(frozen=True)
class OperatorView:
    """One operator of one shard (``tp`` 0: a kernel of no model) in one dtype.

    Attributes:
        operator: Its name in the profile.
        tp: The shard.
        dtype: Of its weights or activations.
        rows: Indices of its rows in the profile.
        axes: Lowest and highest value of each column that is not 0 throughout.
        seconds: The shortest and the longest time.
        spread: The median of the distance between quartiles over the time; NaN where none is told.
        gaps: Where a step of the model would lie and nothing was measured.
        median: The median row's share of the data sheet's peak; None where it is not known.
        best: The best row's.
    """

    operator: str
    tp: int
    dtype: str
    rows: npt.NDArray[np.int64]
    axes: dict[str, tuple[int, int]]
    seconds: tuple[float, float]
    spread: float
    gaps: tuple[Gap, ...]
    median: Share | None
    best: Share | None


@dataclass(frozen=True)
class ProfileView:
    """A profile, what is in it, and the work of its rows (None: the device is neither given nor in the catalog)."""

    profile: Profile
    operators: tuple[OperatorView, ...]
    work: RowWork | None


def describe_profile(
    profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None
) -> ProfileView:
    """What a profile holds, in the order of its operators, shards and dtypes.

    ``gpu`` and ``model`` are what was measured, where the profile names none that the catalog knows.
    """
    model = model or known_model(profile.facts.model)
    work, longest = row_work(profile, gpu, model), model.max_model_len if model else None
    return ProfileView(profile, tuple(_view(profile, rows, work, longest) for rows in _groups(profile)), work)


def _groups(profile: Profile) -> Iterator[npt.NDArray[np.int64]]:
    for operator in profile.operators:
        own = np.flatnonzero(profile["operator"] == operator)
        tps, dtypes = profile["tp"][own], profile["dtype"][own]
        for tp in np.unique(tps):
            for dtype in np.unique(dtypes[tps == tp]):
                yield own[(tps == tp) & (dtypes == dtype)]


def _view(
    profile: Profile, rows: npt.NDArray[np.int64], work: RowWork | None, longest: int | None
) -> OperatorView:
    own = profile.where(_mask(len(profile), rows))
    seconds = own["seconds"]
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = own["spread_s"] / seconds
    known = spread[np.isfinite(spread)]
    median, best = _shares(work, rows, seconds) if work is not None else (None, None)
    return OperatorView(
        operator=str(own["operator"][0]),
        tp=int(own["tp"][0]),
        dtype=str(own["dtype"][0]),
        rows=rows,
        axes={name: (int(own[name].min()), int(own[name].max())) for name in _AXES if own[name].any()},
        seconds=(float(seconds.min()), float(seconds.max())),
        spread=float(np.median(known)) if len(known) else float("nan"),
        gaps=gaps(own, longest),
        median=median,
        best=best,
    )


def _mask(n: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(n, dtype=bool)
    mask[rows] = True
    return mask


def _shares(work: RowWork, rows: npt.NDArray[np.int64], seconds: Floats) -> tuple[Share | None, Share | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = work.least_s()[rows] / seconds
    known = np.flatnonzero(np.isfinite(shares))
    if not len(known):
        return None, None
    order = known[np.argsort(shares[known], kind="stable")]
    return tuple(  # type: ignore[return-value]
        _share(work, int(rows[one]), float(seconds[one]), float(shares[one]))
        for one in (order[len(order) // 2], order[-1])
    )


def _share(work: RowWork, row: int, seconds: float, roofline: float) -> Share:
    flops = float(work.flops[row] / seconds / work.peak_flops[row])
    return Share(flops, float(work.bytes[row] / seconds / work.bandwidth), roofline)
