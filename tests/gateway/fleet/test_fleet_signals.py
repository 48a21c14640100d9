from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.gateway.fleet.engine_probe import MAX_LINES, parse_metrics

VLLM = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 70.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 21.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="m"} 9.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",hash_block_size="99",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0
process_start_time_seconds 1.7e+09
"""


def test_vllm_over_its_engines():
    reading = parse_metrics(VLLM, 5.0)
    signals = reading.signals
    assert (signals.running, signals.waiting, signals.kv_used, signals.preemptions) == (7, 2, 0.5, 21)
    assert signals.at_s == 5.0
    # Each engine has a null block.
    assert (reading.tokens, reading.started_s, reading.kv_tokens) == (1500, 1.7e9, 148 * 16)
    assert not reading.sleeping


def test_a_sleeping_vllm_is_seen():
    assert parse_metrics(VLLM.replace(b'"awake"} 1.0', b'"awake"} 0.0'), 0.0).sleeping


def test_sglang_and_llama_cpp_by_their_own_names():
    sglang = parse_metrics(
        b'sglang:num_running_reqs{model_name="m"} 5\nsglang:num_queue_reqs 1\nsglang:token_usage 0.4\n', 0.0
    )
    assert (sglang.signals.running, sglang.signals.waiting, sglang.signals.kv_used) == (5, 1, 0.4)
    llama = parse_metrics(b"llamacpp:requests_processing 2\r\nllamacpp:requests_deferred 7\r\n", 0.0)
    assert (llama.signals.running, llama.signals.waiting, llama.signals.kv_used) == (2, 7, None)


def test_a_cache_size_reported_in_tokens_is_used_directly():
    line = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="5000",num_gpu_blocks="100"} 1\n'
    assert parse_metrics(line, 0.0).kv_tokens == 5000


def test_retractions_are_counted_if_a_counter_exists():
    body = b"sglang:num_retracted_reqs 1\nsglang:num_retracted_requests_total 9\n"
    assert parse_metrics(body, 0.0).signals.preemptions == 9


def test_what_cannot_be_read_is_left_out():
    body = (
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting{\nvllm:kv_cache_usage_perc inf\n"
        b"vllm:num_preemptions_total -3\nvllm:generation_tokens_total\nprocess_start_time_seconds one\n"
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'
    )
    reading = parse_metrics(body, 0.0)
    signals = reading.signals
    assert (signals.running, signals.waiting, signals.kv_used, signals.preemptions) == (None,) * 4
    assert (reading.tokens, reading.started_s, reading.kv_tokens) == (None, None, None)


@given(st.binary(max_size=300), st.binary(max_size=40), st.integers(0, len(VLLM)))
def test_garbage_never_raises_and_never_counts(noise, more, at):
    names = (b"vllm:num_requests_running", b"sglang:token_usage", b"llamacpp:requests_deferred{")
    for body in (noise, VLLM[:at] + noise + VLLM[at:], VLLM[:at], *(name + more for name in names)):
        signals = parse_metrics(body, 0.0).signals
        for value in (signals.running, signals.waiting, signals.kv_used, signals.preemptions):
            assert value is None or value >= 0


def test_a_restarted_process_is_recognized_by_its_start_time_or_falling_counters():
    old = parse_metrics(b"vllm:generation_tokens_total 10\nprocess_start_time_seconds 5\n", 0.0)
    assert parse_metrics(b"vllm:generation_tokens_total 10\nprocess_start_time_seconds 5\n", 1.0).follows(old)
    assert not parse_metrics(b"vllm:generation_tokens_total 99\nprocess_start_time_seconds 6\n", 1.0).follows(old)
    assert not parse_metrics(b"vllm:generation_tokens_total 9\n", 1.0).follows(old)
    assert parse_metrics(b"nothing\n", 1.0).follows(old)


def test_of_one_metric_only_so_many_lines_are_read():
    many = b"vllm:num_requests_running 1\n" * 50_000 + b"vllm:num_requests_waiting 3\n"
    signals = parse_metrics(many, 0.0).signals
    assert (signals.running, signals.waiting) == (MAX_LINES, 3)
