"""Compiled loops of the estimator: one row of results per schedule.

A visit is the pass of one micro-batch through one pipeline stage. Neighbouring stages with equal visit times form a
group; ``count`` [groups] is the number of stages of each group. Columns of ``groups``: stages, layers of a stage,
whether its tensor-parallel degree is 1, whether it is the first stage, whether it is the last. ``a`` are the cost
tables of the larger degree, ``b`` those of the smaller (or the same). The loops allocate nothing: callers pass scratch
arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import bilinear, entry_2d

Floats = npt.NDArray[np.float64]

MAX_ROUNDS = 64
_STEADY_TOLERANCE = 1e-10
_MIN_COUNT = 4.0
"""From this mean number of sequences on, the correction for empty micro-batches fades out (``presence``)."""
_HALVINGS = 32
_MAX_BATCHES_BEHIND = 1000.0  # number of batches that the longest one can delay if the pipeline never idles


class DegreeTables(NamedTuple):
    """Cost tables of one tensor-parallel degree, in seconds.

    Columns of ``by_tokens``: a layer with its collectives, the first stage's embedding, a send to the next stage.
    Columns of ``by_seqs``: the head, the host. ``prompt`` describes a random prompt by six numbers: mean, mean square
    and variance of its tokens; the mean attention seconds of a layer, their covariance with the tokens, and their
    variance. The last three are 0 if the tables merge prompts into one.
    """

    by_tokens: Floats
    tokens_slope: Floats
    by_seqs: Floats
    seqs_slope: Floats
    prefill: Floats
    decode: Floats
    prompt: Floats
    merged: bool
    step_tokens: int
    merge_factor: float
    masked_s: float


@jit
def lookup(table, slope, amount, column):
    """Return a table's value at ``amount`` tokens or sequences. Each unit beyond the last row adds ``slope``."""
    last = table.shape[0] - 1
    if amount >= last:
        return table[last, column] + (amount - last) * slope[column]
    index = int(amount)
    low = table[index, column]
    return low + (amount - index) * (table[index + 1, column] - low)


@jit
def decode_attention_s(t, seqs, kv_tokens):
    """Return the attention seconds of one layer if ``seqs`` sequences decode, with ``kv_tokens`` cached in total."""
    masked = t.masked_s * max(seqs - 1.0, 0.0) * kv_tokens
    if not t.merged:
        return bilinear(t.decode, seqs, kv_tokens) + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    column = math.ceil(kv_tokens / seqs / t.step_tokens)
    floor = int(seqs)
    low, high = entry_2d(t.decode, floor, column), entry_2d(t.decode, floor + 1, column)
    return factor * (low + (seqs - floor) * (high - low)) + masked


@jit
def prefill_attention_s(t, seqs):
    """Return the expected attention seconds of one layer for ``seqs`` random prompts."""
    mean = t.prompt[0]
    masked = t.masked_s * max(seqs * (seqs - 1.0), 0.0) * mean * mean
    if not t.merged:
        return seqs * t.prompt[3] + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    return factor * entry_2d(t.prefill, int(math.sqrt(seqs * t.prompt[1]) + 0.5), 0) + masked


@jit_cold
def prefill_layer_s(t, seqs, share):
    """Return the seconds of one layer that prefills ``seqs`` prompts and computes ``share`` of its matrix products."""
    tokens = seqs * t.prompt[0]
    return share * lookup(t.by_tokens, t.tokens_slope, tokens, 0) + prefill_attention_s(t, seqs)


@jit_cold
def decode_layer_s(t, seqs, kv_tokens, more_tokens, share):
    """Return the seconds of one layer when ``seqs`` sequences decode one token each, or 0 without sequences.

    The seconds include a ``share`` of the layer's matrix products for the ``more_tokens`` tokens of newly prefilled
    prompts.
    """
    if seqs <= 0.0:
        return 0.0
    layer = lookup(t.by_tokens, t.tokens_slope, seqs, 0) + decode_attention_s(t, seqs, kv_tokens)
    if share > 0.0 and more_tokens > 0.0:
        layer += share * lookup(t.by_tokens, t.tokens_slope, more_tokens, 0)
    return layer


@jit_cold
def outside_layers_s(t, seqs, tokens, first, last):
    """Return the seconds of a visit outside the layers (embedding, host, head, send), or 0 without sequences."""
    if seqs <= 0.0:
        return 0.0
    seconds = 0.0
    if first > 0.0:
        seconds += lookup(t.by_tokens, t.tokens_slope, tokens, 1) + lookup(t.by_seqs, t.seqs_slope, seqs, 1)
    if last > 0.0:
        return seconds + lookup(t.by_seqs, t.seqs_slope, seqs, 0)
    return seconds + lookup(t.by_tokens, t.tokens_slope, tokens, 2)


@jit_cold
def prefill_deviation_s(t, seqs, share, layers):
    """Return the standard deviation of the seconds of ``seqs`` independent prompts, linearized at their mean tokens."""
    tokens = seqs * t.prompt[0]
    step = 0.01 * tokens + 1.0
    ahead = lookup(t.by_tokens, t.tokens_slope, tokens + step, 0) - lookup(t.by_tokens, t.tokens_slope, tokens, 0)
    slope = share * ahead / step
    variance = slope * slope * t.prompt[2] + 2.0 * slope * t.prompt[4] + t.prompt[5]
    return layers * math.sqrt(max(variance, 0.0) * seqs)


@jit
def _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s):
    """Move micro-batches 0 to ``jobs`` - 1 through all stages. Each stage serves them in this order.

    ``ready_s`` is the time at which each micro-batch can enter the first stage. The loop replaces it by the time at
    which the micro-batch leaves the last stage. ``first_s`` and ``last_s`` are the times at which the first and the
    last stage of each group become free. ``scale`` multiplies the visits of a prefill (column 0). Inside a group no
    micro-batch waits, because all stages of the group are equally fast.
    """
    for job in range(jobs):
        now = ready_s[job]
        for group in range(len(count)):
            seconds = visit_s[group, column]
            if column == 0:
                seconds *= scale[job]
            start = max(now, first_s[group])
            if group == 0:
                started_s[job] = start
            now = start + seconds
            first_s[group] = now
            if count[group] > 1:
                now = max(now + (count[group] - 1) * seconds, last_s[group] + seconds)
            last_s[group] = now
        ready_s[job] = now


@jit
def _range_of_shifts(values, before, size, low, high):
    for index in range(size):
        shift = values[index] - before[index]
        low, high = min(low, shift), max(high, shift)
        before[index] = values[index]
    return low, high


def steady_round(
    jobs, prefills, steps, finish, count, visit_s, scale, ready_s, first_s, last_s, started_s, before
):  # fmt: skip
    """Return the seconds of a round, and the latency in it, in the steady state.

    A round is a prefill and ``steps`` decode iterations. The latency is from a prefill's start to the end of iteration
    ``finish``. Column 0 of ``visit_s`` [groups, steps + 1] is a prefill visit. ``prefills`` micro-batches prefill, and
    ``scale`` multiplies the visits of each. The state is steady once all times of a round are later than those of the
    round before by the same amount. If no round is steady within ``MAX_ROUNDS``, the seconds are the mean over the
    second half of the rounds.
    """
    groups = len(count)
    ready_s[:jobs] = 0.0
    first_s[:groups] = 0.0
    last_s[:groups] = 0.0
    before[:, :] = 0.0
    half_s, latency_s = 0.0, 0.0
    for turn in range(MAX_ROUNDS):
        _pass(prefills, count, visit_s, 0, scale, ready_s, first_s, last_s, started_s)
        for job in range(prefills):
            before[3, job] = started_s[job]
        latency_s = 0.0
        for column in range(steps + 1):
            if column > 0:
                _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s)
            if column == finish:
                for job in range(prefills):
                    latency_s = max(latency_s, ready_s[job] - before[3, job])
        low, high = _range_of_shifts(ready_s, before[0], jobs, math.inf, 0.0)
        low, high = _range_of_shifts(first_s, before[1], groups, low, high)
        low, high = _range_of_shifts(last_s, before[2], groups, low, high)
        if high - low <= _STEADY_TOLERANCE * high:
            return high, latency_s
        if turn == MAX_ROUNDS // 2 - 1:
            half_s = ready_s[0]
    return (ready_s[0] - half_s) / (MAX_ROUNDS // 2), latency_s


def presence(seqs: float, requests: float, isolated: bool) -> tuple[float, float]:
    """Return the probability that a micro-batch is not empty, and the factor by which its mean size then increases.

    The factor is the mean number of sequences of non-empty micro-batches divided by ``seqs``, the mean of all
    micro-batches. An empty micro-batch takes no time, so the expected time is the time of a non-empty one times the
    probability. The requests finish independently: if a share p of ``requests`` is left, the micro-batch is empty with
    probability (1 - p)^requests. If ``isolated``, one of its requests is known to be present, so that the probability
    is 1. From ``_MIN_COUNT`` to ``2 * _MIN_COUNT`` sequences the correction fades out, so that the estimate is
    continuous.
    """
    if not 0.0 < seqs < min(requests, 2.0 * _MIN_COUNT):
        return 1.0, 1.0
    gone, weight = 1.0 - seqs / requests, min(1.0, 2.0 - seqs / _MIN_COUNT)
    if isolated:
        return 1.0, 1.0 + weight * gone / seqs
    present = 1.0 - weight * gone**requests
    return present, 1.0 / present


def largest_excess(seqs: float, dispersion: float, score: float) -> float:
    """Return the number of sequences by which the largest micro-batch exceeds ``seqs``, the mean of non-empty ones.

    ``dispersion`` is the variance of a micro-batch's sequences divided by their mean. ``score`` is the expected number
    of standard deviations by which the largest micro-batch exceeds the mean. One sequence of a non-empty micro-batch is
    certain and does not vary.
    """
    return score * math.sqrt(max(seqs - 1.0, 0.0) * min(dispersion, 1.0))


def part_factor(new: float, parts: int, place: int) -> float:
    """Return the size of part ``place`` over the mean if ``new`` requests are shared evenly. Part 0 is the smallest."""
    requests = math.floor(new + 0.5)
    if requests <= parts:
        return 1.0
    smallest = requests // parts
    larger = requests - smallest * parts
    return (smallest + (1 if place >= parts - larger else 0)) * parts / requests


def pace_factor(present: float, parts: int, longest: float, largest_s: float, total_s: float) -> float:
    """Return the factor on visits of non-empty micro-batches with which an iteration takes its expected time.

    The time of an iteration is the larger of two: the slowest stage's time for all non-empty micro-batches, and the
    pass of the longest micro-batch through all stages. No micro-batch starts its next iteration earlier.

    Args:
        present: Probability that a micro-batch is not empty.
        parts: Number of micro-batches.
        longest: Visit of the longest micro-batch divided by the mean visit.
        largest_s: Seconds of the slowest stage's visit.
        total_s: Seconds of the visits of all stages.
    """
    alike_s = max(parts * largest_s, total_s)
    if alike_s <= 0.0:
        return present
    return max(present * parts * largest_s, (1.0 - (1.0 - present) ** parts) * longest * total_s) / alike_s


_round, _presence, _largest_excess = jit(steady_round), jit(presence), jit(largest_excess)
_pace_factor, _part_factor = jit(pace_factor), jit(part_factor)


@jit
def _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, tokens):
    if groups[g, 2] > 0:
        return groups[g, 1] * layer_b_s + outside_layers_s(b, seqs, tokens, groups[g, 3], groups[g, 4])
    return groups[g, 1] * layer_a_s + outside_layers_s(a, seqs, tokens, groups[g, 3], groups[g, 4])


@jit
def _layer_pair_s(a, b, mixed, seqs, kv_tokens, more_tokens, share):
    layer_a_s = decode_layer_s(a, seqs, kv_tokens, more_tokens, share)
    if not mixed:
        return layer_a_s, layer_a_s
    return layer_a_s, decode_layer_s(b, seqs, kv_tokens, more_tokens, share)


@jit
def _has_two_degrees(groups):
    found = False
    for g in range(1, groups.shape[0]):
        found = found or groups[g, 2] != groups[0, 2]
    return found


@jit
def _fill_prefill(a, b, groups, count, seqs, share, visit_s, z, max_range):
    """Fill column 0 of ``visit_s``. Return the slowest visit, the sum of all visits, and the slowest visit's range.

    The range is the share by which the slowest visit takes longer if its work is ``z`` standard deviations above the
    mean. ``max_range`` limits the range of a batch's tokens under dynamic adjustment; without adjustment it is
    infinite.
    """
    layer_a_s, layer_b_s = prefill_layer_s(a, seqs, share), prefill_layer_s(b, seqs, share)
    largest, total, slowest = 0.0, 0.0, 0
    for g in range(len(count)):
        visit_s[g, 0] = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs * a.prompt[0])
        total += count[g] * visit_s[g, 0]
        if visit_s[g, 0] > largest:
            largest, slowest = visit_s[g, 0], g
    deviation_s = prefill_deviation_s(b if groups[slowest, 2] > 0 else a, seqs, share, groups[slowest, 1])
    relative = z * math.sqrt(a.prompt[2] / seqs) / a.prompt[0]
    adjusted = 1.0 if relative <= max_range else max_range / relative
    return largest, total, adjusted * z * deviation_s / largest


def rra_rows(
    a, b, groups, count, seqs_in, steps, jobs, finish, phases, offset, loads, z, max_range, scores,
    visit_s, scale, ready_s, first_s, last_s, started_s, before, out,
):  # fmt: skip
    """Fill a row of ``out`` for each RRA schedule.

    Columns: seconds of a round, latency, latency at the quantile, seconds of a prefill and of a decode iteration, and
    the shares by which these take longer at ``z`` standard deviations above the mean (ranges). The prefills of the
    micro-batches differ in length: ``scores[n]`` are the expected deviations, in ascending order, of n standard normal
    values. Every later stage waits for the longest prefill, so the differences do not average out. If B_E is not a
    multiple of the number of micro-batches, the same micro-batches always have one request more. Decodes differ
    likewise: an iteration takes at least the pass of the largest micro-batch (``_pace_factor``).

    ``seqs_in``, ``steps`` and ``jobs`` are B_E, N_D and B_m. The request whose latency is estimated completes in
    iteration ``finish`` of phase ``phases``. ``loads`` [sum of steps, 4] are the sequences, the KV tokens and the
    variances of both, at each iteration and per new request; a schedule's rows start at its ``offset``.
    """
    mixed = _has_two_degrees(groups)
    for row in range(len(seqs_in)):
        new, n, m = seqs_in[row], steps[row], jobs[row]
        prefills = int(min(m, new))
        largest, total, prefill_range = _fill_prefill(
            a, b, groups, count, new / prefills, 1.0, visit_s, z, max_range[row]
        )
        for job in range(prefills):
            scale[job] = max(1.0 + scores[prefills, job] * prefill_range / z, 0.0) if z > 0.0 else 1.0
            scale[job] *= _part_factor(new, prefills, job)
        prefill_range /= math.sqrt(float(prefills))
        prefill_s = total + (prefills - 1) * largest
        sparse = _fill_decode(
            a, b, mixed, groups, count, new, m, n, offset[row], loads, scores[m, m - 1], visit_s, isolated=False
        )
        round_s, latency_s = _round(
            m, prefills, n, finish[row], count, visit_s, scale, ready_s, first_s, last_s, started_s, before
        )
        decode_s, total, slowest = 0.0, 0.0, 0
        for g in range(len(count)):
            group_s = 0.0
            for u in range(n):
                group_s += visit_s[g, u + 1]
            total += count[g] * group_s
            if group_s > decode_s:
                decode_s, slowest = group_s, g
        occupied_round_s = round_s
        if sparse:  # The request whose latency is estimated is always present, so none of its iterations is empty.
            _fill_decode(
                a, b, mixed, groups, count, new, m, n, offset[row], loads, scores[m, m - 1], visit_s, isolated=True
            )
            occupied_round_s, latency_s = _round(
                m, prefills, n, finish[row], count, visit_s, scale, ready_s, first_s, last_s, started_s, before
            )
        latency_s += (phases[row] - 1) * occupied_round_s
        decode_range = _rra_range(a, b, groups, slowest, new, m, n, offset[row], loads, z, visit_s)
        varying_s = max(latency_s - phases[row] * prefill_s, 0.0)
        out[row, 0], out[row, 1] = round_s, latency_s
        out[row, 2] = latency_s + prefill_s * prefill_range * math.sqrt(float(phases[row])) + varying_s * decode_range
        out[row, 3], out[row, 4] = prefill_s, max(m * decode_s, total) / n
        out[row, 5], out[row, 6] = prefill_range, decode_range
    return 0


@jit
def _fill_decode(a, b, mixed, groups, count, new, m, n, offset, loads, score, visit_s, isolated):
    """Fill the decode columns of ``visit_s``, and return whether a micro-batch may be empty in some iteration."""
    sparse, requests, uneven = False, max(new / m, 1.0), _part_factor(new, m, m - 1)
    for u in range(n):
        seqs, kv_tokens = new * loads[offset + u, 0] / m, new * loads[offset + u, 1] / m
        dispersion = loads[offset + u, 2] / loads[offset + u, 0] if seqs > 0.0 else 0.0
        present, factor = _presence(seqs, requests, isolated)
        sparse = sparse or factor > 1.0
        seqs, kv_tokens, largest, total = seqs * factor, kv_tokens * factor, 0.0, 0.0
        layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs, kv_tokens, 0.0, 0.0)
        for g in range(len(count)):
            visit_s[g, u + 1] = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs)
            largest, total = max(largest, visit_s[g, u + 1]), total + count[g] * visit_s[g, u + 1]
        more = _largest_excess(seqs, dispersion, score) + (uneven - 1.0) * seqs
        longest = _longest_over_mean(a, b, mixed, groups, seqs, kv_tokens, more, visit_s[0, u + 1])
        pace = _pace_factor(present, m, longest, largest, total)
        for g in range(len(count)):
            visit_s[g, u + 1] *= pace
    return sparse


@jit
def _longest_over_mean(a, b, mixed, groups, seqs, kv_tokens, more, mean_s):
    if more <= 0.0 or mean_s <= 0.0:
        return 1.0
    layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs + more, kv_tokens * (1.0 + more / seqs), 0.0, 0.0)
    return _visit_of(a, b, groups, 0, layer_a_s, layer_b_s, seqs + more, seqs + more) / mean_s


@jit
def _rra_range(a, b, groups, g, new, m, n, offset, loads, z, visit_s):
    """Return the share by which decode visits of group ``g`` take longer at a load ``z`` deviations above the mean."""
    high_s, mean_s = 0.0, 0.0
    for third in range(3):
        u = third * (n - 1) // 2
        seqs, kv_tokens = new * loads[offset + u, 0], new * loads[offset + u, 1]
        if seqs <= 0.0:
            continue
        seqs = (seqs + z * math.sqrt(new * loads[offset + u, 2])) / m
        kv_tokens = (kv_tokens + z * math.sqrt(new * loads[offset + u, 3])) / m
        layer_a_s, layer_b_s = _layer_pair_s(a, b, True, seqs, kv_tokens, 0.0, 0.0)
        expected_s = visit_s[g, u + 1]
        high_s += max(_visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs), expected_s)
        mean_s += expected_s
    return high_s / mean_s - 1.0 if mean_s > 0.0 else 0.0


@jit_cold
def _iteration_s(a, b, mixed, groups, count, m, seqs, kv_tokens, more_tokens, share):
    """Return the seconds of a decode iteration: ``m`` visits of the slowest stage, or one pass through all stages."""
    seqs, kv_tokens = seqs / m, kv_tokens / m
    layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs, kv_tokens, more_tokens / m, share)
    largest, total = 0.0, 0.0
    for g in range(len(count)):
        seconds = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs)
        largest, total = max(largest, seconds), total + count[g] * seconds
    return max(m * largest, total)


@jit
def _deviations_behind(spread, idle):
    """Return by how many standard deviations longer batches ahead of a batch delay it.

    No batch overtakes another. The longest batch delays the batches behind it until the gaps between them add up to its
    excess. ``spread`` is the standard deviation of a batch and ``idle`` the gap after each, both in batches. The
    longest of k normally distributed batches is about sqrt(2 ln k) - 0.6 deviations above the mean (k from 2 to 1000).
    """
    batches = _MAX_BATCHES_BEHIND if idle * _MAX_BATCHES_BEHIND <= spread else 1.0 + spread / idle
    return max(math.sqrt(2.0 * math.log(batches)) - 0.6, 0.0)


def waa_rows(
    a, b, prefill_groups, prefill_count, decode_groups, decode_count, seqs_in, jobs, loads, iterations,
    out_s, in_s, projected, lockstep, z, max_range, longest, visit_s, out,
):  # fmt: skip
    """Fill a row of ``out`` for each WAA schedule.

    The first seven columns are those of ``rra_rows``; a round is the time from the start of one prefill to that of the
    next. The eighth column is B_D.

    ``loads`` [4] are the decoding sequences, their KV tokens and the variances of both per new request, as in a row of
    ``rra_rows`` with N_D = 1. The KV transfer of one prompt occupies the host links of a prefill GPU for ``out_s`` and
    those of a decode GPU for ``in_s`` seconds. The decode GPUs compute the share ``projected`` of a layer's matrix
    products over a prompt. A batch of only the longest prompts is ``longest`` [rows] standard deviations above the mean
    batch.
    """
    mixed = (
        _has_two_degrees(decode_groups)
        or _has_two_degrees(prefill_groups)
        or decode_groups[0, 2] != prefill_groups[0, 2]
    )
    for row in range(len(seqs_in)):
        new, m = seqs_in[row], jobs[row]
        largest, passing_s, prefill_range = _fill_prefill(
            a, b, prefill_groups, prefill_count, new, 1.0 - projected, visit_s, z, max_range[row]
        )
        period_s, more = max(largest, new * max(out_s, in_s)), new * a.prompt[0]
        batch, kv_tokens, scale = new * loads[0], new * loads[1], 1.0
        full_s = _iteration_s(a, b, mixed, decode_groups, decode_count, m, batch, kv_tokens, more, projected)
        iteration_s = full_s
        if not lockstep and full_s < period_s:  # Bisect for the smaller batch that Little's law gives.
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                scale = 0.5 * (low + high)
                iteration_s = _iteration_s(
                    a, b, mixed, decode_groups, decode_count, m,
                    scale * batch, scale * kv_tokens, scale * more, projected,
                )  # fmt: skip
                if iteration_s < scale * period_s:
                    high = scale
                else:
                    low = scale
        decoding = scale * batch
        high_s = _iteration_s(
            a, b, mixed, decode_groups, decode_count, m,
            decoding + z * math.sqrt(scale * new * loads[2]),
            scale * kv_tokens + z * math.sqrt(scale * new * loads[3]),
            scale * more, projected,
        )  # fmt: skip
        cycle_s = max(period_s, full_s)
        pace_s = cycle_s if lockstep else iteration_s
        spread = prefill_range / z if z > 0.0 else 0.0
        behind = min(_deviations_behind(spread, cycle_s / largest - 1.0), longest[row])
        behind_s = (passing_s - largest) * spread * behind
        entry_s, high_entry_s, joins = passing_s + behind_s, largest * prefill_range, 0.0
        if iterations > 0:  # Prompts are transferred one at a time (on average the middle one) and join a micro-batch.
            entry_s, joins = entry_s + 0.5 * (new + 1.0) * (out_s + in_s), 1.0 / m
            high_entry_s += 0.5 * (new - 1.0) * (out_s + in_s)
        out[row, 0], out[row, 1] = cycle_s, entry_s + (iterations + 0.5 * joins) * pace_s
        out[row, 2] = entry_s + high_entry_s + (iterations + joins) * max(high_s, pace_s)
        if lockstep and period_s > full_s:
            out[row, 2] += largest * prefill_range * math.sqrt(iterations + joins)
        out[row, 3], out[row, 4] = passing_s, iteration_s
        out[row, 5], out[row, 6] = prefill_range, high_s / iteration_s - 1.0 if iteration_s > 0.0 else 0.0
        out[row, 7] = decoding
    return 0


def visits(t, seqs, kv_tokens, layers, first, last, more_tokens, prefill, share, out):
    """Fill ``out`` with the seconds of visits: prefills of ``seqs`` prompts, or decodes with ``kv_tokens`` cached."""
    for row in range(len(out)):
        if prefill:
            tokens, layer_s = seqs[row] * t.prompt[0], prefill_layer_s(t, seqs[row], share)
        else:
            tokens = seqs[row]
            layer_s = decode_layer_s(t, seqs[row], kv_tokens[row], more_tokens[row], share)
        out[row] = layers[row] * layer_s + outside_layers_s(t, seqs[row], tokens, first[row], last[row])
    return 0
