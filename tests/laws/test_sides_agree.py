"""Law 1 where prompts and decodes are on replicas apart: kernel and reference agree to the last bit."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sides import disaggregated, speculating_sides
from test_kernel_agrees import EXAMPLES, assert_same, outcome
from worlds import workloads


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), disaggregated(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_with_disaggregated_decoding(workload, deployment, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    reference = outcome("reference", workload, deployment, **options)
    kernel = outcome("kernel", workload, deployment, **options)
    assert_same(kernel, reference)


@settings(max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(speculating_sides(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_where_a_decode_side_speculates(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    reference, kernel = (outcome(engine, *world, **options) for engine in ("reference", "kernel"))
    assert_same(kernel, reference)
