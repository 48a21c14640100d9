from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.workload import (
    AllAtOnce,
    ClosedLoop,
    Gamma,
    Joint,
    LogNormal,
    Poisson,
    Uniform,
    generate,
    preset,
    presets,
)

CHAT = Joint(LogNormal(400, 1), LogNormal(150, 0.8))


@given(st.integers(1, 200), st.integers(0, 99))
def test_a_seed_gives_the_same_bytes(n, seed):
    first, again = (generate(n, CHAT, Poisson(2), seed) for _ in range(2))
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(first, column).tobytes() == getattr(again, column).tobytes()


def test_arrivals_do_not_touch_lengths_nor_lengths_arrivals():
    slow, fast, bursty = (generate(300, CHAT, a, 5) for a in (Poisson(1), Poisson(10), Gamma(1, 3)))
    for other in (fast, bursty):
        assert other.prompt_tokens.tolist() == slow.prompt_tokens.tolist()
        assert other.output_tokens.tolist() == slow.output_tokens.tolist()
    np.testing.assert_allclose(slow.arrival_s, 10 * fast.arrival_s)
    uniform = generate(300, Joint(Uniform(1, 9), Uniform(1, 9)), Poisson(1), 5)
    assert uniform.arrival_s.tolist() == slow.arrival_s.tolist()


def test_seeds_differ():
    assert generate(50, CHAT, Poisson(1), 0).arrival_s[0] != generate(50, CHAT, Poisson(1), 1).arrival_s[0]


def test_predictions_and_priorities():
    plain = generate(50, CHAT, AllAtOnce())
    assert plain.predicted_tokens is None
    assert plain.priority is None
    oracle = generate(50, CHAT, AllAtOnce(), predicted="oracle", priority=3)
    assert oracle.predicted_tokens.tolist() == oracle.output_tokens.tolist()
    assert set(oracle.priority) == {3}
    mean = generate(50, CHAT, AllAtOnce(), predicted="mean", priority=np.arange(50))
    assert set(mean.predicted_tokens) == {mean.output_tokens.mean()}
    assert mean.priority.tolist() == list(range(50))


def test_a_closed_loop_sets_the_concurrency():
    loop = generate(20, CHAT, ClosedLoop(4), name="loop")
    assert (loop.concurrency, loop.name) == (4, "loop")
    assert not loop.arrival_s.any()
    assert generate(20, CHAT, AllAtOnce()).concurrency is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"predicted": "perfect"}, "none, oracle or mean"),
        ({"priority": [1, 2]}, "one integer, or 5"),
        ({"priority": 0.5}, "one integer"),
    ],
)
def test_invalid_arguments_are_reported(arguments, message):
    with pytest.raises(InputError, match=message):
        generate(**{"num_requests": 5, "lengths": CHAT, "arrivals": AllAtOnce(), **arguments})


# Vidur, Table 1: mean, median, p90 of prefill, then of decode.
TABLE_1 = {
    "chat-1m": ((686, 417, 1678), (197, 139, 484)),
    "arxiv-4k": ((2588, 2730, 3702), (291, 167, 372)),
    "bwb-4k": ((1067, 1037, 1453), (1612, 1601, 2149)),
    "chat-uncapped": ((786, 417, 1678), (215, 141, 491)),
    "arxiv-uncapped": ((9882, 7827, 18549), (411, 228, 475)),
    "bwb-uncapped": ((2418, 2396, 3441), (3654, 3589, 5090)),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_vidur_presets_have_the_statistics_of_table_1(name):
    drawn = preset(name).generate(100_000, seed=1)
    for tokens, (mean, median, p90) in zip((drawn.prompt_tokens, drawn.output_tokens), TABLE_1[name], strict=True):
        assert tokens.mean() == pytest.approx(mean, rel=0.02)
        assert np.median(tokens) == pytest.approx(median, rel=0.02)
        assert np.quantile(tokens, 0.9) == pytest.approx(p90, rel=0.04)
    assert name.endswith("-uncapped") or (drawn.prompt_tokens + drawn.output_tokens).max() <= 4096


@pytest.mark.parametrize(("name", "median", "sd"), [("arxiv-4k", 15.7, 16), ("bwb-4k", 0.65, None)])
def test_vidur_presets_have_the_prompt_to_output_ratio(name, median, sd):
    drawn = preset(name).generate(100_000)
    ratio = drawn.prompt_tokens / drawn.output_tokens
    assert np.median(ratio) == pytest.approx(median, rel=0.03)
    assert sd is None or ratio.std() == pytest.approx(sd, rel=0.15)  # BWB's is not fitted: its lengths are independent


# ExeGPT, Table 3: mean, sd, max of inputs; mean, sd, p99, max of outputs.
TABLE_3 = {
    "s": ((256, 252, 512), (32, 13, 63, 80)),
    "t": ((128, 81, 256), (128, 68, 292, 320)),
    "g": ((64, 23, 128), (192, 93, 417, 480)),
    "c1": ((256, 115, 512), (64, 30, 137, 160)),
    "c2": ((512, 252, 1024), (256, 134, 579, 640)),
}


@pytest.mark.parametrize("task", TABLE_3)
def test_exegpt_presets_have_the_statistics_of_table_3(task):
    drawn = preset(f"exegpt-{task}").generate(100_000)
    (mean, sd, high), (out_mean, out_sd, out_p99, out_high) = TABLE_3[task]
    prompt, output = drawn.prompt_tokens, drawn.output_tokens
    assert prompt.mean() == pytest.approx(mean, rel=0.01)
    assert prompt.max() <= high
    # S and T print an sd that no distribution cut to 1..max can have: theirs is that before the cut.
    assert prompt.std() == pytest.approx(sd, rel=0.01) or (task in "st" and prompt.std() < high / 12**0.5)
    assert output.mean() == pytest.approx(out_mean, rel=0.01)
    assert output.std() == pytest.approx(out_sd, rel=0.02)
    assert np.quantile(output, 0.99) == pytest.approx(out_p99, rel=0.02)
    assert output.max() <= out_high


# What the traces themselves give: mean, median, p90 of prompts, then of outputs, and the median ratio.
TRACES = {
    "azure-conv": ((1154.7, 1020, 2734), (211.1, 129, 424), 3.58),
    "sharegpt": ((2340.0, 1730, 5696), (438.7, 415, 834), 4.55),
    "mooncake-conv": ((12035.1, 6909, 27367), (342.6, 350, 597), 26.4),
}


@pytest.mark.parametrize("name", TRACES)
def test_trace_presets_have_the_statistics_of_their_traces(name):
    drawn = preset(name).generate(100_000)
    *sides, ratio = TRACES[name]
    drawn_sides = (drawn.prompt_tokens, drawn.output_tokens)
    for tokens, (mean, median, p90) in zip(drawn_sides, sides, strict=True):
        assert tokens.mean() == pytest.approx(mean, rel=0.02)
        assert np.median(tokens) == pytest.approx(median, rel=0.03)
        assert np.quantile(tokens, 0.9) == pytest.approx(p90, rel=0.02)
    assert np.median(drawn.prompt_tokens / drawn.output_tokens) == pytest.approx(ratio, rel=0.03)


def test_every_preset_names_its_source():
    found = presets()
    assert list(found) == sorted(
        ["azure-conv", "mooncake-conv", "sharegpt", *TABLE_1, *(f"exegpt-{task}" for task in TABLE_3)]
    )
    for name, entry in found.items():
        assert entry.name == name
        assert entry.description
        assert entry.source
        assert entry.license
        drawn = entry.generate(10, Poisson(3), 2, predicted="mean")
        assert (len(drawn), drawn.name) == (10, name)
        assert drawn.predicted_tokens is not None


def test_names_are_found_in_any_case_and_near_ones_are_offered():
    assert preset("Chat-1M") is preset("chat-1m")
    with pytest.raises(UnknownNameError, match=r"no workload named 'chat-2m'\. Did you mean: chat-1m"):
        preset("chat-2m")


def test_tenants_are_drawn_by_their_weights_and_change_nothing_else():
    plain, shared = (generate(4000, CHAT, Poisson(1), 3, tenants=t) for t in (None, [9, 1]))
    assert plain.tenant is None
    assert set(shared.tenant.tolist()) == {0, 1}
    assert 0.87 < np.mean(shared.tenant == 0) < 0.93
    np.testing.assert_array_equal(shared.arrival_s, plain.arrival_s)
    np.testing.assert_array_equal(shared.output_tokens, plain.output_tokens)
    for wrong in (0, [], [1, -1], [[1]]):
        with pytest.raises(InputError, match="tenants must be"):
            generate(4, CHAT, Poisson(1), tenants=wrong)
