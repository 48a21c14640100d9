"""Probabilities of lengths: from marginals exactly, from samples as counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from lengthwise import catalog
from lengthwise.schedule import TaskLengths
from lengthwise.schedule.lengths import TAIL_LEVEL
from lengthwise.schema.errors import InputError
from lengthwise.workload import Fixed, LogNormal, TruncatedNormal, Uniform, generate, preset

TABLE_3 = {"s": (32, 63, 80), "t": (128, 292, 320), "g": (192, 417, 480), "c1": (64, 137, 160), "c2": (256, 579, 640)}


@pytest.mark.parametrize("task", TABLE_3)
def test_tasks_have_the_printed_mean_p99_and_maximum_of_outputs(task):
    mean, p99, longest = TABLE_3[task]
    lengths = TaskLengths.from_preset(f"exegpt-{task}")
    assert lengths.mean_output_tokens == pytest.approx(mean, rel=2e-3)
    assert abs(lengths.output_quantile(0.99) - p99) <= 1
    assert lengths.max_output_tokens == longest


def test_a_normals_probabilities_are_its_masses_between_half_tokens():
    normal = TruncatedNormal(20.0, 6.0, 1.0, 50.0)
    pmf = TaskLengths.from_marginals(normal, Fixed(1)).prompt_pmf
    edges = np.clip(np.arange(0, 51) + 0.5, 1.0, 50.0)
    expected = np.diff(norm.cdf(edges, 20, 6)) / (norm.cdf(50, 20, 6) - norm.cdf(1, 20, 6))
    np.testing.assert_allclose(pmf[1:], expected, atol=1e-11)
    assert pmf.sum() == pytest.approx(1.0, abs=1e-15)


def test_uniform_lengths_are_equally_likely():
    lengths = TaskLengths.from_marginals(Uniform(3, 7), Uniform(1, 2))
    np.testing.assert_allclose(lengths.prompt_pmf, [0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.2], atol=1e-11)
    assert lengths.mean_square_prompt == pytest.approx((9 + 16 + 25 + 36 + 49) / 5)
    assert lengths.prompt_variance == pytest.approx(2.0)


def test_fixed_lengths_have_no_variance_at_all():
    lengths = TaskLengths.fixed(100, 7)
    assert lengths.prompt_variance == 0.0
    assert lengths.mean_prompt_tokens == 100.0
    assert lengths.output_quantile(0.01) == lengths.output_quantile(1.0) == 7
    np.testing.assert_array_equal(lengths.decode_survival(1), np.ones(6))
    np.testing.assert_array_equal(lengths.decode_survival(0), np.ones(7))


def test_a_workloads_lengths_are_counted():
    workload = generate(500, preset("exegpt-s").lengths, preset("exegpt-s").arrivals, seed=3)
    lengths = TaskLengths.from_samples(workload.prompt_tokens, workload.output_tokens)
    assert lengths.mean_prompt_tokens == pytest.approx(workload.prompt_tokens.mean())
    assert lengths.output_quantile(0.5) == int(np.sort(workload.output_tokens)[249])


def test_a_preset_without_two_marginals_is_drawn_by_its_seed():
    one, same, other = (TaskLengths.from_preset("sharegpt", 4096, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.output_pmf, same.output_pmf)
    assert one.mean_output_tokens != other.mean_output_tokens


def test_survival_sums_to_the_mean_number_of_iterations():
    lengths = TaskLengths.from_preset("exegpt-t")
    assert lengths.decode_survival(1).sum() == pytest.approx(lengths.mean_output_tokens - 1)
    assert lengths.decode_survival(0).sum() == pytest.approx(lengths.mean_output_tokens)


@pytest.mark.parametrize(
    "pmf", [[], [1.0], [0.5, 0.5], [0.0, 0.4], [0.0, -1.0, 2.0], [0.0, float("nan")], [[0.0, 1.0]]]
)
def test_what_is_no_distribution_of_lengths_is_refused(pmf):
    with pytest.raises(InputError, match="add up to 1"):
        TaskLengths(pmf, [0.0, 1.0])


@pytest.mark.parametrize("samples", [[], [0], [1.5], [float("nan")], [2**40]])
def test_samples_that_are_no_lengths_are_refused(samples):
    with pytest.raises(InputError):
        TaskLengths.from_samples(samples, [1])


def test_an_endless_tail_is_refused():
    with pytest.raises(InputError, match="Give a maximum"):
        TaskLengths.from_marginals(Fixed(1), LogNormal(1000.0, 3.0))


def test_an_unbounded_tail_ends_at_a_stated_quantile():
    """A log-normal ends at its 99.99 % quantile; the rest counts as that long, and a bounded one is complete."""
    lengths = TaskLengths.from_marginals(Fixed(1), LogNormal(150.0, 0.8))
    last = 150 * math.exp(0.8 * norm.ppf(TAIL_LEVEL))
    assert lengths.max_output_tokens == round(last)
    above = norm.sf(math.log((lengths.max_output_tokens - 0.5) / 150) / 0.8)
    assert lengths.output_pmf[-1] == pytest.approx(above, rel=1e-6)
    assert TaskLengths.from_marginals(Fixed(1), Uniform(1, 70_000)).max_output_tokens == 70_000


def test_lengths_beyond_the_models_are_refused():
    with pytest.raises(InputError, match=r"within the context of t5-11b \(1024 tokens\)"):
        TaskLengths.fixed(1000, 25).require_within(catalog.model("t5-11b"))
    TaskLengths.fixed(1000, 24).require_within(catalog.model("t5-11b"))
