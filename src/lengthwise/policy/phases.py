"""Batching in phases of prefill and decode; the sizes of the phases are data (``Policy.parameters``), not code."""

from __future__ import annotations

from lengthwise.policy.contracts import DECODES_WAIT, NEW_PHASE, ONE_BY_ONE, PAUSE_DECODES

_UNBOUNDED = 1 << 60


def rra(num_waiting, num_running, in_flight, stages, phase_steps, phase_rounds, parameter_0, parameter_1, parameter_2):
    """Phases: B_E new requests are prefilled, then N_D decode iterations follow (ExeGPT's RRA).

    Parameters: B_E, N_D, M (number of micro-batches; 0: as many as stages). A phase starts with a prefill of B_E / M
    new requests in each micro-batch, whose running decodes pause. Each micro-batch then runs N_D decode iterations, in
    turn. The phase ends after these, or when no request is left. The next phase starts when a request waits.
    """
    most = min(parameter_2, stages) if parameter_2 > 0 else stages
    parts = min(most, parameter_0)
    starts = num_running == 0 or phase_rounds >= parameter_1
    place = 0 if starts else phase_steps
    if num_waiting == 0 or place >= parts or (in_flight >= most and num_running > 0):
        return 0, 0, DECODES_WAIT
    share = parameter_0 * (place + 1) // parts - parameter_0 * place // parts
    equal = (num_waiting + parts - place - 1) // (parts - place)
    return min(share, equal), _UNBOUNDED, DECODES_WAIT + PAUSE_DECODES + (NEW_PHASE if starts else 0)


def rra_steady(
    decodes, num_waiting, num_running, in_flight, stages, phase_steps, phase_rounds, step_prompts, step_tokens,
    next_tokens, parameter_0, parameter_1, parameter_2, parameter_3, parameter_4, parameter_5,
):  # fmt: skip
    """As ``rra``, with prefill batches adjusted so that the work is uniform (ExeGPT, section 5.2).

    Further parameters: the threshold in thousandths, the mean prompt tokens of a phase, the mean decode batch. A
    micro-batch gets its part of the B_E new requests, or as many as bring its size within the threshold of its mean.
    If these requests' prompt tokens differ from their mean by more than the threshold, the micro-batch gets the number
    of requests that comes closest to it, at least 1.
    """
    most = min(parameter_2, stages) if parameter_2 > 0 else stages
    parts = min(most, parameter_0)
    starts = num_running == 0 or phase_rounds >= parameter_1
    place = 0 if starts else phase_steps
    if num_waiting == 0 or place >= parts or (in_flight >= most and num_running > 0):
        return 0, 0, DECODES_WAIT
    low, high = 1000 - parameter_3, 1000 + parameter_3
    share = parameter_0 * (place + 1) // parts - parameter_0 * place // parts
    new = max(share, (low * parameter_5 + 1000 * most - 1) // (1000 * most) - decodes)
    new = max(min(new, high * parameter_5 // (1000 * most) - decodes), 1)
    equal = (num_waiting + step_prompts + parts - place - 1) // (parts - place)
    mean, after = parameter_4 * share // parameter_0, step_tokens + next_tokens
    short = new <= equal and 1000 * step_tokens < low * mean
    fits = 1000 * after <= high * mean
    more = fits and (step_prompts < min(new, equal) or short)
    if step_prompts > 0 and not (more or (short and step_tokens + after < 2 * mean)):
        return 0, 0, DECODES_WAIT
    flags = DECODES_WAIT + PAUSE_DECODES + ONE_BY_ONE
    return _UNBOUNDED, _UNBOUNDED, flags + (NEW_PHASE if starts else 0)


def prefill(parameter_0):
    """Batches of at most B_E (parameter 0) complete prompts. Any decodes wait (prefill GPUs of WAA)."""
    return parameter_0, _UNBOUNDED, DECODES_WAIT


def prefill_steady(num_waiting, step_prompts, step_tokens, next_tokens, parameter_0, parameter_1, parameter_2):
    """As ``prefill``, with batches adjusted so that the work is uniform (ExeGPT, section 5.2).

    Further parameters: the threshold in thousandths, the mean prompt tokens of a batch. A batch has B_E prompts if
    their tokens differ from the mean by at most the threshold. Otherwise it has the number of prompts that brings the
    tokens within the threshold, or else closest to the mean, and at least 1.
    """
    low, high = 1000 - parameter_1, 1000 + parameter_1
    after = step_tokens + next_tokens
    short = num_waiting > 0 and 1000 * step_tokens < low * parameter_2
    fits = 1000 * after <= high * parameter_2
    more = fits and (step_prompts < parameter_0 or short)
    if step_prompts > 0 and not (more or (short and step_tokens + after < 2 * parameter_2)):
        return 0, 0, DECODES_WAIT
    return _UNBOUNDED, _UNBOUNDED, DECODES_WAIT + ONE_BY_ONE
