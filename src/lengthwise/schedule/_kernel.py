"""The loops of the estimator: a row of results for every schedule.

Stages come in groups of ``count`` neighbours that take the same time. Nothing is allocated: scratch comes in.
``groups`` columns: stages, layers, whether of degree 1, whether first, whether last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise._jit import jit, jit_cold

Floats = npt.NDArray[np.float64]


class DegreeTables(NamedTuple):
    """One degree's tables.

    ``by_tokens`` columns: layer with its collectives, first, send. ``by_seqs``: head, host. ``prompt``: of one
    prompt the mean tokens, mean square, variance of tokens, mean attention seconds of a layer, their
    covariance with tokens and variance; attention is 0 there where the tables merge prompts.
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
def at(table, slope, amount, column):
    """The table between its entries, and beyond the last one with its last slope."""
    last = table.shape[0] - 1
    if amount >= last:
        return table[last, column] + (amount - last) * slope[column]
    index = int(amount)
    low = table[index, column]
    return low + (amount - index) * (table[index + 1, column] - low)


@jit
def _cell(value, points):
    """(index, fraction) of a value on the axis of ``schema.cost_tables.grid_value``."""
    if value < 32.0:
        index = int(value)
        fraction = value - index
    else:
        shift = math.frexp(value)[1] - 5
        scaled = value / (1 << shift)
        whole = int(scaled)
        index = (shift + 1) * 16 + whole - 16
        fraction = scaled - whole
    if index < points - 1:
        return index, fraction
    low, high = _grid(points - 2), _grid(points - 1)
    return points - 2, (value - low) / (high - low)


@jit
def _grid(index):
    if index < 32:
        return index
    return (16 + index % 16) << (index // 16 - 1)


@jit
def _between(table, x, y):
    i, u = _cell(x, table.shape[0])
    j, v = _cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return low + u * (high - low)


@jit
def _step_lookup(table, i, j):
    return table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)]


@jit
def decode_attention_s(t, seqs, kv_tokens):
    """One layer's decode attention."""
    masked = t.masked_s * max(seqs - 1.0, 0.0) * kv_tokens
    if not t.merged:
        return _between(t.decode, seqs, kv_tokens) + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    column = math.ceil(kv_tokens / seqs / t.step_tokens)
    whole = int(seqs)
    low, high = _step_lookup(t.decode, whole, column), _step_lookup(t.decode, whole + 1, column)
    return factor * (low + (seqs - whole) * (high - low)) + masked


@jit
def encode_attention_s(t, seqs):
    """One layer's attention of so many prompts, expected over their lengths."""
    mean = t.prompt[0]
    masked = t.masked_s * max(seqs * (seqs - 1.0), 0.0) * mean * mean
    if not t.merged:
        return seqs * t.prompt[3] + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    return factor * _step_lookup(t.prefill, int(math.sqrt(seqs * t.prompt[1]) + 0.5), 0) + masked


@jit_cold
def encode_layer_s(t, seqs, share):
    """One layer's seconds for ``seqs`` prompts; ``share`` of its matrix products is done here."""
    tokens = seqs * t.prompt[0]
    return share * at(t.by_tokens, t.tokens_slope, tokens, 0) + encode_attention_s(t, seqs)


@jit_cold
def decode_layer_s(t, seqs, kv_tokens, more_tokens, share):
    """One layer's seconds for one token of ``seqs`` sequences; 0 without.

    ``share`` of its matrix products over ``more_tokens`` newly encoded ones comes on top.
    """
    if seqs <= 0.0:
        return 0.0
    layer = at(t.by_tokens, t.tokens_slope, seqs, 0) + decode_attention_s(t, seqs, kv_tokens)
    if share > 0.0 and more_tokens > 0.0:
        layer += share * at(t.by_tokens, t.tokens_slope, more_tokens, 0)
    return layer


@jit_cold
def ends_s(t, seqs, tokens, first, last):
    """What only the first stage, only the last, and all but the last have; 0 without sequences."""
    if seqs <= 0.0:
        return 0.0
    seconds = 0.0
    if first > 0.0:
        seconds += at(t.by_tokens, t.tokens_slope, tokens, 1) + at(t.by_seqs, t.seqs_slope, seqs, 1)
    if last > 0.0:
        return seconds + at(t.by_seqs, t.seqs_slope, seqs, 0)
    return seconds + at(t.by_tokens, t.tokens_slope, tokens, 2)


@jit_cold
def encode_deviation_s(t, seqs, share, layers):
    """Standard deviation of a stage's seconds for ``seqs`` prompts: independent ones, linear near the mean."""
    tokens = seqs * t.prompt[0]
    step = 0.01 * tokens + 1.0
    ahead = at(t.by_tokens, t.tokens_slope, tokens + step, 0) - at(t.by_tokens, t.tokens_slope, tokens, 0)
    slope = share * ahead / step
    variance = slope * slope * t.prompt[2] + 2.0 * slope * t.prompt[4] + t.prompt[5]
    return layers * math.sqrt(max(variance, 0.0) * seqs)


MOST_ROUNDS = 64
_UNIFORM = 1e-10


@jit
def _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s):
    """Moves micro-batches 0 .. jobs - 1 through all stages, each stage in their order.

    ``ready_s`` is when each can enter, then when it has left; ``first_s`` and ``last_s`` are when the first and
    the last stage of each group are free. Between these two nobody waits: the stages take the same time.
    """
    for job in range(jobs):
        now = ready_s[job]
        for group in range(len(count)):
            seconds = visit_s[group, column]
            if column == 0:
                seconds *= scale[job]
            begin = max(now, first_s[group])
            if group == 0:
                started_s[job] = begin
            now = begin + seconds
            first_s[group] = now
            if count[group] > 1:
                now = max(now + (count[group] - 1) * seconds, last_s[group] + seconds)
            last_s[group] = now
        ready_s[job] = now


@jit
def _spread(values, before, size, least, most):
    for index in range(size):
        moved = values[index] - before[index]
        least, most = min(least, moved), max(most, moved)
        before[index] = values[index]
    return least, most


def steady_round(
    jobs, encodes, steps, finish, count, visit_s, scale, ready_s, first_s, last_s, started_s, before
):  # fmt: skip
    """(seconds of a round, seconds from a micro-batch's encoding to the end of iteration ``finish``), steady.

    Column 0 of ``visit_s`` [groups, steps + 1] is the encoding, which ``encodes`` of the micro-batches have,
    ``scale`` times as long each.
    A round is steady once everything in it comes later by the same time than in the round before; where that
    does not come to pass within ``MOST_ROUNDS``, the mean of their second half is taken.
    """
    groups = len(count)
    ready_s[:jobs] = 0.0
    first_s[:groups] = 0.0
    last_s[:groups] = 0.0
    before[:, :] = 0.0
    half_s, latency_s = 0.0, 0.0
    for turn in range(MOST_ROUNDS):
        _pass(encodes, count, visit_s, 0, scale, ready_s, first_s, last_s, started_s)
        for job in range(encodes):
            before[3, job] = started_s[job]
        latency_s = 0.0
        for column in range(steps + 1):
            if column > 0:
                _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s)
            if column == finish:
                for job in range(encodes):
                    latency_s = max(latency_s, ready_s[job] - before[3, job])
        least, most = _spread(ready_s, before[0], jobs, math.inf, 0.0)
        least, most = _spread(first_s, before[1], groups, least, most)
        least, most = _spread(last_s, before[2], groups, least, most)
        if most - least <= _UNIFORM * most:
            return most, latency_s
        if turn == MOST_ROUNDS // 2 - 1:
            half_s = ready_s[0]
    return (ready_s[0] - half_s) / (MOST_ROUNDS // 2), latency_s


_MIN_COUNT = 4.0
"""Sequences of a micro-batch up to which it is asked how often there is none; from twice as many on it is not."""


def rare(seqs: float, each: float, isolated: bool) -> tuple[float, float]:
    """(how often there is one, how many times the mean sequences there then are), of ``seqs`` in the mean.

    An empty micro-batch takes no time: what is expected is that of one that is not, as often as there is one. Its
    ``each`` requests end one apart from the other, so with p of them still there it is empty in (1 - p)^each.
    ``isolated``: as one of them sees it that is there for certain. Between ``_MIN_COUNT`` and twice as many the correction
    fades, so that nothing jumps where it ends.
    """
    if not 0.0 < seqs < min(each, 2.0 * _MIN_COUNT):
        return 1.0, 1.0
    gone, counts = 1.0 - seqs / each, min(1.0, 2.0 - seqs / _MIN_COUNT)
    if isolated:
        return 1.0, 1.0 + counts * gone / seqs
    there = 1.0 - counts * gone**each
    return there, 1.0 / there


def beyond(seqs: float, dispersion: float, score: float) -> float:
    """Sequences that the largest micro-batch has more than one that is not empty, which has ``seqs`` in the mean.

    ``dispersion`` is a micro-batch's variance over its mean, ``score`` the deviations by which the largest is expected
    beyond the mean. Of those that are not empty one at least is no part of what varies.
    """
    return score * math.sqrt(max(seqs - 1.0, 0.0) * min(dispersion, 1.0))


def part(new: float, parts: int, place: int) -> float:
    """How many times the mean the ``place``-th smallest part has, as even as whole requests allow."""
    whole = math.floor(new + 0.5)
    if whole <= parts:
        return 1.0
    least = whole // parts
    larger = whole - least * parts
    return (least + (1 if place >= parts - larger else 0)) * parts / whole


def pace(present: float, parts: int, longest: float, largest_s: float, whole_s: float) -> float:
    """How many times its own seconds a visit takes, in the mean, at the pace of its iteration.

    An iteration is as long as the slowest stage is busy, with as many of the micro-batches as are ``present``, or as the
    way of the longest of them through all stages, if there is one at all: nobody begins anew before.

    Args:
        present: How often a micro-batch is not empty.
        parts: Micro-batches.
        longest: How many times the mean visit that of the longest takes.
        largest_s: Seconds of the slowest stage's visit.
        whole_s: Seconds of the visits of all stages.
    """
    alike_s = max(parts * largest_s, whole_s)
    if alike_s <= 0.0:
        return present
    return max(present * parts * largest_s, (1.0 - (1.0 - present) ** parts) * longest * whole_s) / alike_s


_HALVINGS = 32
_MOST_BEHIND = 1000.0
"""Batches among which the longest is looked for where the pipeline never idles."""
_round, _rare, _out_of_range, _pace, _part = jit(steady_round), jit(rare), jit(beyond), jit(pace), jit(part)


@jit
def _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, tokens):
    """Seconds of a stage of group ``g``, its layers taking ``layer_a_s`` or ``layer_b_s`` each."""
    if groups[g, 2] > 0:
        return groups[g, 1] * layer_b_s + ends_s(b, seqs, tokens, groups[g, 3], groups[g, 4])
    return groups[g, 1] * layer_a_s + ends_s(a, seqs, tokens, groups[g, 3], groups[g, 4])


@jit
def _layer_pair_s(a, b, mixed, seqs, kv_tokens, more_tokens, share):
    layer_a_s = decode_layer_s(a, seqs, kv_tokens, more_tokens, share)
    if not mixed:
        return layer_a_s, layer_a_s
    return layer_a_s, decode_layer_s(b, seqs, kv_tokens, more_tokens, share)


@jit
def _mixed(groups):
    """Whether stages of both degrees are there; else ``a`` and ``b`` are the same tables, or only ``a`` is used."""
    found = False
    for g in range(1, groups.shape[0]):
        found = found or groups[g, 2] != groups[0, 2]
    return found


@jit
def _fill_encode(a, b, groups, count, seqs, share, visit_s, z, most_range):
    """(slowest visit, a way through all, relative range of the slowest) of encoding; fills column 0.

    ``most_range``: what dynamic adjustment leaves of the relative range of its prompts' tokens; infinite without.
    """
    layer_a_s, layer_b_s = encode_layer_s(a, seqs, share), encode_layer_s(b, seqs, share)
    largest, whole, slowest = 0.0, 0.0, 0
    for g in range(len(count)):
        visit_s[g, 0] = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs * a.prompt[0])
        whole += count[g] * visit_s[g, 0]
        if visit_s[g, 0] > largest:
            largest, slowest = visit_s[g, 0], g
    deviation_s = encode_deviation_s(b if groups[slowest, 2] > 0 else a, seqs, share, groups[slowest, 1])
    relative = z * math.sqrt(a.prompt[2] / seqs) / a.prompt[0]
    held = 1.0 if relative <= most_range else most_range / relative
    return largest, whole, held * z * deviation_s / largest


def rra_rows(
    a, b, groups, count, seqs_in, steps, jobs, finish, phases, offset, shares, z, most_range, scores,
    visit_s, scale, ready_s, first_s, last_s, started_s, before, out,
):  # fmt: skip
    """Fills a row a schedule: round, latency, its high end, encoding, a decode iteration, their ranges.

    Micro-batches' encodings differ: ``scores[n]`` are the deviations expected of the 1st, 2nd ... of n normal ones.
    Each next stage waits for the longest of them, so what they differ by is not to be had back. Where B_E does not
    divide by them some are one request larger, always the same ones.
    So are decodes: an iteration takes as long as the largest micro-batch's way (``pace``).
    ``shares`` [sum of steps, 4], a schedule's own from ``offset`` on: sequences, KV tokens and variances of
    both at each iteration, for one new request a phase. ``most_range``: a row's of ``_fill_encode``.
    """
    mixed = _mixed(groups)
    for row in range(len(seqs_in)):
        new, n, m = seqs_in[row], steps[row], jobs[row]
        encodes = int(min(m, new))
        largest, whole, encode_range = _fill_encode(
            a, b, groups, count, new / encodes, 1.0, visit_s, z, most_range[row]
        )
        for job in range(encodes):
            scale[job] = max(1.0 + scores[encodes, job] * encode_range / z, 0.0) if z > 0.0 else 1.0
            scale[job] *= _part(new, encodes, job)
        encode_range /= math.sqrt(float(encodes))
        encode_s = whole + (encodes - 1) * largest
        few = _fill_decode(
            a, b, mixed, groups, count, new, m, n, offset[row], shares, scores[m, m - 1], visit_s, isolated=False
        )
        round_s, latency_s = _round(
            m, encodes, n, finish[row], count, visit_s, scale, ready_s, first_s, last_s, started_s, before
        )
        decode_s, whole, slowest = 0.0, 0.0, 0
        for g in range(len(count)):
            own_s = 0.0
            for u in range(n):
                own_s += visit_s[g, u + 1]
            whole += count[g] * own_s
            if own_s > decode_s:
                decode_s, slowest = own_s, g
        held_s = round_s
        if few:  # whose latency is asked for is there all the while: no iteration of its is an empty one
            _fill_decode(
                a, b, mixed, groups, count, new, m, n, offset[row], shares, scores[m, m - 1], visit_s, isolated=True
            )
            held_s, latency_s = _round(
                m, encodes, n, finish[row], count, visit_s, scale, ready_s, first_s, last_s, started_s, before
            )
        latency_s += (phases[row] - 1) * held_s
        decode_range = _rra_range(a, b, groups, slowest, new, m, n, offset[row], shares, z, visit_s)
        varying_s = max(latency_s - phases[row] * encode_s, 0.0)
        out[row, 0], out[row, 1] = round_s, latency_s
        out[row, 2] = latency_s + encode_s * encode_range * math.sqrt(float(phases[row])) + varying_s * decode_range
        out[row, 3], out[row, 4] = encode_s, max(m * decode_s, whole) / n
        out[row, 5], out[row, 6] = encode_range, decode_range
    return 0


@jit
def _fill_decode(a, b, mixed, groups, count, new, m, n, offset, shares, score, visit_s, isolated):
    """Fills the columns of decode visits; whether at some iteration a micro-batch may well be empty (``rare``)."""
    few, each, uneven = False, max(new / m, 1.0), _part(new, m, m - 1)
    for u in range(n):
        seqs, kv_tokens = new * shares[offset + u, 0] / m, new * shares[offset + u, 1] / m
        dispersion = shares[offset + u, 2] / shares[offset + u, 0] if seqs > 0.0 else 0.0
        there, more = _rare(seqs, each, isolated)
        few = few or more > 1.0
        seqs, kv_tokens, largest, whole = seqs * more, kv_tokens * more, 0.0, 0.0
        layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs, kv_tokens, 0.0, 0.0)
        for g in range(len(count)):
            visit_s[g, u + 1] = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs)
            largest, whole = max(largest, visit_s[g, u + 1]), whole + count[g] * visit_s[g, u + 1]
        longest = _longest(
            a,
            b,
            mixed,
            groups,
            seqs,
            kv_tokens,
            _out_of_range(seqs, dispersion, score) + (uneven - 1.0) * seqs,
            visit_s[0, u + 1],
        )
        pace = _pace(there, m, longest, largest, whole)
        for g in range(len(count)):
            visit_s[g, u + 1] *= pace
    return few


@jit
def _longest(a, b, mixed, groups, seqs, kv_tokens, more, mean_s):
    """How many times the mean visit, ``mean_s``, of the first stage that of ``more`` sequences on top takes."""
    if more <= 0.0 or mean_s <= 0.0:
        return 1.0
    layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs + more, kv_tokens * (1.0 + more / seqs), 0.0, 0.0)
    return _visit_of(a, b, groups, 0, layer_a_s, layer_b_s, seqs + more, seqs + more) / mean_s


@jit
def _rra_range(a, b, groups, g, new, m, n, offset, shares, z, visit_s):
    """Relative range of a stage's decode visits, from the first, middle and last iteration of a phase."""
    high_s, mean_s = 0.0, 0.0
    for third in range(3):
        u = third * (n - 1) // 2
        seqs, kv_tokens = new * shares[offset + u, 0], new * shares[offset + u, 1]
        if seqs <= 0.0:
            continue
        seqs = (seqs + z * math.sqrt(new * shares[offset + u, 2])) / m
        kv_tokens = (kv_tokens + z * math.sqrt(new * shares[offset + u, 3])) / m
        layer_a_s, layer_b_s = _layer_pair_s(a, b, True, seqs, kv_tokens, 0.0, 0.0)
        there_s = visit_s[g, u + 1]
        high_s += max(_visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs), there_s)
        mean_s += there_s
    return high_s / mean_s - 1.0 if mean_s > 0.0 else 0.0


@jit_cold
def _iteration_s(a, b, mixed, groups, count, m, seqs, kv_tokens, more_tokens, share):
    """A decode iteration of m equal micro-batches: the slowest stage's m visits, or one way through."""
    seqs, kv_tokens = seqs / m, kv_tokens / m
    layer_a_s, layer_b_s = _layer_pair_s(a, b, mixed, seqs, kv_tokens, more_tokens / m, share)
    largest, whole = 0.0, 0.0
    for g in range(len(count)):
        seconds = _visit_of(a, b, groups, g, layer_a_s, layer_b_s, seqs, seqs)
        largest, whole = max(largest, seconds), whole + count[g] * seconds
    return max(m * largest, whole)


@jit
def _waiting_after(spread, idle):
    """Standard deviations by which the longest batch that one still waits for, stage by stage, is longer.

    With room between stages nobody overtakes, and all who follow are as late as the longest one, until gaps add up to
    what it is longer by. ``idle`` is the gap a batch, in batches; the longest of k normal ones is about
    sqrt(2 ln k) - 0.6 deviations beyond the mean (k from 2 to 1000).
    """
    batches = _MOST_BEHIND if idle * _MOST_BEHIND <= spread else 1.0 + spread / idle
    return max(math.sqrt(2.0 * math.log(batches)) - 0.6, 0.0)


def waa_rows(
    a, b, encode_groups, encode_count, decode_groups, decode_count, seqs_in, jobs, shares, iterations,
    out_s, in_s, projected, lockstep, z, most_range, longest, visit_s, out,
):  # fmt: skip
    """Fills a row a schedule: cycle, latency, its high end, encoding, a decode iteration, their ranges, B_D.

    ``shares`` [4]: as for RRA, of N_D = 1. ``out_s`` and ``in_s``: seconds that one prompt's handover holds
    the host links. ``projected``: share of a layer's products over a prompt that the decoding GPUs do. ``longest``: as
    many standard deviations is a batch of the longest prompts beyond the mean.
    """
    mixed = _mixed(decode_groups) or _mixed(encode_groups) or decode_groups[0, 2] != encode_groups[0, 2]
    for row in range(len(seqs_in)):
        new, m = seqs_in[row], jobs[row]
        largest, passing_s, encode_range = _fill_encode(
            a, b, encode_groups, encode_count, new, 1.0 - projected, visit_s, z, most_range[row]
        )
        period_s, more = max(largest, new * max(out_s, in_s)), new * a.prompt[0]
        batch, kv_tokens, scale = new * shares[0], new * shares[1], 1.0
        full_s = _iteration_s(a, b, mixed, decode_groups, decode_count, m, batch, kv_tokens, more, projected)
        iteration_s = full_s
        if not lockstep and full_s < period_s:
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
        there = scale * batch
        high_s = _iteration_s(
            a, b, mixed, decode_groups, decode_count, m,
            there + z * math.sqrt(scale * new * shares[2]),
            scale * kv_tokens + z * math.sqrt(scale * new * shares[3]),
            scale * more, projected,
        )  # fmt: skip
        cycle_s = max(period_s, full_s)
        pace_s = cycle_s if lockstep else iteration_s
        spread = encode_range / z if z > 0.0 else 0.0
        behind_s = (passing_s - largest) * spread * min(_waiting_after(spread, cycle_s / largest - 1.0), longest[row])
        entry_s, high_entry_s, joins = passing_s + behind_s, largest * encode_range, 0.0
        if iterations > 0:  # handed over one at a time, the middle one in the mean; joins the next micro-batch
            entry_s, joins = entry_s + 0.5 * (new + 1.0) * (out_s + in_s), 1.0 / m
            high_entry_s += 0.5 * (new - 1.0) * (out_s + in_s)
        out[row, 0], out[row, 1] = cycle_s, entry_s + (iterations + 0.5 * joins) * pace_s
        out[row, 2] = entry_s + high_entry_s + (iterations + joins) * max(high_s, pace_s)
        if lockstep and period_s > full_s:
            out[row, 2] += largest * encode_range * math.sqrt(iterations + joins)
        out[row, 3], out[row, 4] = passing_s, iteration_s
        out[row, 5], out[row, 6] = encode_range, high_s / iteration_s - 1.0 if iteration_s > 0.0 else 0.0
        out[row, 7] = there
    return 0


def visits(t, seqs, kv_tokens, layers, first, last, more_tokens, encode, share, out):
    """Seconds of stage visits, one a row: encodings of ``seqs`` prompts, or decodes of them over ``kv_tokens``."""
    for row in range(len(out)):
        if encode:
            tokens, layer_s = seqs[row] * t.prompt[0], encode_layer_s(t, seqs[row], share)
        else:
            tokens = seqs[row]
            layer_s = decode_layer_s(t, seqs[row], kv_tokens[row], more_tokens[row], share)
        out[row] = layers[row] * layer_s + ends_s(t, seqs[row], tokens, first[row], last[row])
    return 0
