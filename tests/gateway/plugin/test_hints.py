"""Hints for engines that order themselves, and how they get into a body and out again."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.gateway.config import Admission, Dispatch, Engine, GatewayConfig, Order, PredictionConfig
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.plugin.settings import hint_of
from lengthwise.gateway.relay.engine_request import MAX_PRIORITY, SchedulingHints, merge_fields
from lengthwise.gateway.request import Client, LengthPrediction, Request
from lengthwise.predict.distribution import LEVELS, LengthDistribution


def hints(mode: str, **prediction) -> SchedulingHints:
    config = GatewayConfig((Engine("http://e"),), order=Order(mode), prediction=PredictionConfig(**prediction))
    return SchedulingHints(config, Scheduler(config.order, Admission(), Dispatch()).engine_priority)


def worker(kind="vllm", sign=1):
    return SimpleNamespace(kind=kind, priority_sign=sign)


def live(total=100.0, row=None, priority=0, **more):
    prediction = LengthPrediction(total, quantiles=row)
    return Request(1, 0.0, "m", 10, 1000, Client(priority=priority), length_prediction=prediction, **more)


def test_only_modes_in_which_the_engine_orders_send_hints():
    def of(mode):
        config = GatewayConfig((Engine("http://e"),), order=Order(mode))
        return SchedulingHints(config, lambda _: 1).fields(live(), worker())

    assert [mode for mode in ("observe", "fcfs", "srtf", "isrtf", "windowed", "bins") if of(mode)] == []
    assert of("engine-priority")
    assert of("engine-plugin")


def test_priorities_have_the_engines_polarity_and_fit_32_bits():
    reported = hints("engine-priority")
    queue = [live(50.0), live(70.0), live(10.0, priority=1), live(5000.0, priority=-1), live(float("nan"))]
    queue += [live(1e30, priority=10**9), live(-1e30, priority=-(10**9))]
    vllm = [reported.fields(one, worker(sign=1))["priority"] for one in queue]
    sglang = [reported.fields(one, worker("sglang", sign=-1))["priority"] for one in queue]
    assert vllm == [-one for one in sglang]
    assert all(isinstance(one, int) and abs(one) <= MAX_PRIORITY for one in vllm)
    order = sorted(range(7), key=lambda k: vllm[k])
    assert order == [6, 3, 0, 1, 4, 2, 5]
    assert reported.fields(queue[0], worker("openai", sign=0)) == {}
    assert reported.add_to(queue[0], worker("openai", sign=0), b'{"a":1}', "chat", []) == b'{"a":1}'
    headers = []  # a body of /v1/messages has no priority, and one of /v1/embeddings no output to order
    assert reported.add_to(queue[0], worker(sign=1), b'{"a":1}', "messages", headers) == b'{"a":1}'
    assert headers == [("X-Vllm-Priority", str(vllm[0]))]
    assert reported.add_to(queue[0], worker(sign=1), b'{"a":1}', "embeddings", []) == b'{"a":1}'


def test_the_plug_in_is_sent_the_remaining_length_of_this_run():
    reported = hints("engine-plugin")
    assert reported.fields(live(priority=3), worker()) == {
        "vllm_xargs": {"lengthwise_predicted": 100.0, "lengthwise_class": 3}
    }
    again = live()
    again.generated_tokens = 30
    assert reported.fields(again, worker())["vllm_xargs"]["lengthwise_predicted"] == 70.0
    assert reported.fields(live(), worker("sglang")) == {}
    assert reported.fields(live(1e9), worker())["vllm_xargs"]["lengthwise_predicted"] == 1000.0


@pytest.mark.parametrize(("statistic", "level"), [("mean", None), ("median", 0.5), ("p80", 0.8), ("p90", 0.9)])
@pytest.mark.parametrize("so_far", [0, 40])
def test_the_lengths_of_later_windows_are_those_of_the_conditional_distribution(statistic, level, so_far):
    row = np.exp(np.interp(LEVELS, [0, 1], [2.0, 6.5]))
    request = live(row=row, total=float(row.mean()))
    request.generated_tokens = so_far
    fields = hints("engine-plugin", statistic=statistic).fields(request, worker())
    hint = hint_of(fields["vllm_xargs"], 1000, 256.0)
    assert not hint.error
    assert [at for at, _ in hint.later] == [50, 100, 200, 400][: len(hint.later)]
    assert len(hint.later) >= 3
    for at, total in hint.later:
        left = LengthDistribution(row[None], LEVELS).given(at + so_far)
        wanted = (left.mean if level is None else left.quantile(level))[0]
        assert total + so_far == pytest.approx(wanted, rel=0.12)
        assert total > at


def test_a_body_is_spliced_only_where_the_field_is_absent():
    assert merge_fields(b'{"a":1}', {"priority": 3}) == b'{"priority":3,"a":1}'
    assert merge_fields(b" { } ", {"priority": 3}) == b' {"priority":3 } '
    for other in (b'"priority":0', b'"prio\\u0072ity":0', b'"priority":null'):
        body = merge_fields(b'{"messages":[{"content":"h\\u00e9"}],' + other + b"}", {"priority": 3})
        assert json.loads(body, object_pairs_hook=list)[-1] == ("priority", 3)
        assert json.loads(body)["messages"] == [{"content": "hé"}]
    own = {"vllm_xargs": {"lengthwise_predicted": 5, "lengthwise_class": 0}}
    merged = merge_fields(b'{"vllm_xargs":{"x":[1,2],"lengthwise_predicted":1},"a":{"b":1}}', own)
    assert json.loads(merged) == {"a": {"b": 1}, "vllm_xargs": {"x": [1, 2], **own["vllm_xargs"]}}
    assert json.loads(merge_fields(b'{"vllm_xargs":7}', own)) == own
    # The name within a text is no field.
    text = b'{"prompt":"say \\"priority\\" and \\"vllm_xargs\\""}'
    assert json.loads(merge_fields(text, own)) == {**json.loads(text), **own}


TEXTS = st.text(max_size=12) | st.sampled_from(["priority", "vllm_xargs"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5), st.booleans(), st.sampled_from(["priority", "vllm_xargs"]))
def test_any_body_keeps_its_other_fields_and_has_the_added_ones_once(fields, plain, name):
    own = {"priority": 3} if name == "priority" else {"vllm_xargs": {"lengthwise_predicted": 5}}
    body = json.dumps(fields, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    pairs = json.loads(merge_fields(body, own), object_pairs_hook=lambda pairs: pairs)
    assert [key for key, _ in pairs].count(name) == 1
    found = json.loads(merge_fields(body, own))
    other = fields.get(name)
    wanted = {**other, **own[name]} if name == "vllm_xargs" and isinstance(other, dict) else own[name]
    assert found == {**fields, name: wanted}


RUBBISH = VALUES | st.floats() | st.integers() | st.lists(st.floats() | st.integers(0, 9), max_size=6)


@given(
    st.none()
    | RUBBISH
    | st.fixed_dictionaries(
        {}, optional={"lengthwise_predicted": RUBBISH, "lengthwise_class": RUBBISH, "lengthwise_later": RUBBISH}
    ),
    st.integers(-1, 300),
)
def test_any_hint_yields_a_usable_length(report, max_tokens):
    hint = hint_of(report, max_tokens, 256.0)
    for generated in (0, 1, 50, 10**6):
        assert 0 <= hint.predicted_tokens(generated) <= max(1, max_tokens)
    assert -2047 <= hint.priority <= 2047
    if not isinstance(report, dict) or "lengthwise_predicted" not in report:
        assert hint.error == "no lengthwise_predicted"
