"""The times between tokens of each request, where a run tells them, so that requests can be drawn with theirs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.metrics._compare_sides import Run, gaps_as_columns
from lengthwise.metrics._describe import weighted_quantiles
from lengthwise.schema.measured import TokenTimes
from lengthwise.schema.records import Records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Gaps = tuple[Floats, Ints]
"""[gaps] seconds, and the row of the request that each is of."""

MOST = 20_000_000
"""More gaps than these are not held at once."""

_NEAR, _LEVELS = 0.02, np.array([0.5, 0.9, 0.99])


def gaps_of(run: Run) -> Gaps | None:
    """The gaps of the requests that count, with rows from 0.

    A measured run tells when each token came. A simulated one tells its steps: a token of a request comes at the
    end of a step of its replica between its first and last token, of each where they are as many as tokens, else
    of evenly spread ones (stages of a pipeline take turns). That is believed where all gaps together are those that
    the run counted: as many, with quantiles within 2 %. None where nothing is told, or it is not believed.
    """
    records, tokens = run.records, run.measured.tokens
    if not 0 < records.gaps.total <= MOST:
        return None
    found = _of_steps(records) if tokens is None else _of_pieces(tokens)
    if found is None or not _agree(found[0], records):
        return None
    place = run.places[found[1]]
    return found[0][place >= 0], place[place >= 0]


def _of_pieces(tokens: TokenTimes) -> Gaps:
    """Gaps between pieces; tokens that came together are 0 apart."""
    row = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    inside = row[1:] == row[:-1]
    together = np.repeat(row, np.maximum(tokens.tokens - 1, 0))
    gaps = np.concatenate([np.diff(tokens.at_s)[inside], np.zeros(len(together))])
    return gaps, np.concatenate([row[1:][inside], together])


def _of_steps(records: Records) -> Gaps | None:
    r, steps = records.requests, records.steps
    if steps is None:
        return None
    several = np.flatnonzero((r.output_tokens > 1) & np.isfinite(r.first_token_s))
    found = []
    for replica in np.unique(r.replica[several]):
        ends = np.sort(steps.end_s[(steps.replica == replica) & (steps.decode_seqs > 0)])
        own = several[r.replica[several] == replica]
        gaps = _between(ends, r.first_token_s[own], r.finished_s[own], r.output_tokens[own] - 1)
        if gaps is None:
            return None
        found.append((gaps, np.repeat(own, r.output_tokens[own] - 1)))
    if not found:
        return None
    return np.concatenate([gap for gap, _ in found]), np.concatenate([row for _, row in found])


def _between(ends: Floats, first_s: Floats, last_s: Floats, later: Ints) -> Floats | None:
    """Gaps of requests one after another, each of ``later`` tokens; None where steps are too few for them."""
    begin = np.searchsorted(ends, first_s, side="right")
    past = np.searchsorted(ends, last_s, side="right")
    steps = np.where(np.isfinite(last_s), past - begin, later)  # who is not finished had a token at each
    if (steps < later).any() or (begin + steps > len(ends)).any():
        return None
    nth = np.arange(int(later.sum())) - np.repeat(np.cumsum(later) - later, later) + 1
    each, of = np.repeat(steps, later), np.repeat(later, later)
    at_s = ends[np.repeat(begin, later) + (nth * each + of - 1) // of - 1]
    before_s = np.concatenate([[0.0], at_s[:-1]])
    before_s[nth == 1] = first_s
    gaps: Floats = at_s - before_s
    return gaps


def _agree(gaps: Floats, records: Records) -> bool:
    """Whether they are those that the run counted."""
    if len(gaps) != records.gaps.total:
        return False
    counted = weighted_quantiles(*gaps_as_columns(records.gaps), _LEVELS)
    return bool(np.allclose(np.quantile(gaps, _LEVELS), counted, rtol=_NEAR, atol=1e-6))
