"""Predictions: what predictors say, bounded, conditioned on what has come, and never a reason to fail."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from bad_predictors import OneWord, Words
from hypothesis import given, settings
from hypothesis import strategies as st
from prediction_worlds import finished, predicted, request

from lengthwise.gateway.config import PredictionConfig
from lengthwise.gateway.length_prediction import CorrectedPrediction, LengthPredictor, Oracle, fixed_tokens
from lengthwise.gateway.length_prediction.length_predictor import MAX_SESSIONS
from lengthwise.gateway.length_prediction.prediction import MAX_CHARS, STATISTICS
from lengthwise.gateway.length_prediction.prediction import condition as given_row
from lengthwise.gateway.request import Client, Outcome
from lengthwise.predict import (
    LEVELS,
    Constant,
    Ecdf,
    InSession,
    LengthDistribution,
    Prompts,
    attach,
    default,
    samples_of,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

TEXTS = ["Write a 500 word story", "Is 7 prime? yes or no", "", "List ten tips\n```x```", "三 ideas for a trip"]


def inline(predictor, **config) -> LengthPredictor:
    return LengthPredictor(PredictionConfig(**config), predictor=predictor, place="inline")


@pytest.mark.parametrize("statistic", ["mean", "median", "p80", "p90"])
def test_a_prediction_is_the_estimate_of_the_predictor_alone_or_in_a_batch(statistic: str) -> None:
    async def main() -> None:
        async with inline(default(), statistic=statistic) as f:
            together = await asyncio.gather(*(predicted(f, text) for text in TEXTS * 8))
            message = default().predict(Prompts(5, TEXTS, np.full(5, 20), ["vicuna-13b"] * 5))
            expected = (
                message.mean
                if statistic == "mean"
                else message.quantile({"median": 0.5, "p80": 0.8}.get(statistic, 0.9))
            )
            for made, length, row in zip(together, np.tile(expected, 8), np.tile(message.tokens, (8, 1)), strict=True):
                if row[-1] <= 4096:
                    assert made.length_prediction.total_tokens == pytest.approx(length, rel=1e-9)
                np.testing.assert_allclose(made.length_prediction.quantiles, np.minimum(row, 4096), rtol=1e-9)
                assert made.length_prediction.source == "predictor"
                assert made.length_prediction.at_tokens == 0

    asyncio.run(main())


def test_the_default_is_loaded_by_its_name_and_a_missing_file_is_reported() -> None:
    async def main() -> None:
        async with LengthPredictor(PredictionConfig(inline_below_s=1.0)) as f:
            assert f.state()["where"] == "inline"
            assert 0 < f.seconds < 1.0
            assert (await predicted(f)).length_prediction.source == "predictor"
        with pytest.raises(InputError, match=r"no file nowhere\.lwp"):
            async with LengthPredictor(PredictionConfig("nowhere.lwp")):
                pass

    asyncio.run(main())


ROWS = st.lists(st.floats(1, 1e6), min_size=len(LEVELS), max_size=len(LEVELS)).map(sorted)


@given(ROWS, st.integers(0, 1_000_000))
def test_what_has_come_rules_lengths_out_as_in_the_batch(row, so_far) -> None:
    quick = given_row(np.array(row), so_far)
    slow = LengthDistribution.of(np.array(row)).given(so_far).at(LEVELS)
    np.testing.assert_allclose(quick, slow.tokens[0], rtol=1e-6, atol=1e-6)
    for name, level in (("median", 0.5), ("p80", 0.8), ("p90", 0.9)):
        assert STATISTICS[name](quick) == pytest.approx(float(slow.quantile(level)[0]), rel=1e-6)
    assert STATISTICS["mean"](quick) == pytest.approx(float(slow.mean[0]), rel=1e-6)


@settings(max_examples=30)
@given(st.integers(1, 8192), st.integers(0, 9000), st.sampled_from(TEXTS))
def test_every_prediction_is_finite_at_least_one_and_at_most_the_requested_limit(most, so_far, text) -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = await predicted(f, text, max_tokens=most)
            for made.generated_tokens in (0, min(so_far, most)):
                again = await f.repredict(made, text, None)
                for length_prediction in (made.length_prediction, again):
                    assert math.isfinite(length_prediction.total_tokens)
                    assert 1 <= length_prediction.total_tokens <= most
                    assert length_prediction.quantiles.min() >= 1
                    assert length_prediction.quantiles.max() <= most
                    assert (np.diff(length_prediction.quantiles) >= 0).all()
                assert again.at_tokens == made.generated_tokens
                assert again.total_tokens >= min(most, made.generated_tokens + 1) - 1e-9 or not made.generated_tokens
                made.length_prediction = again

    asyncio.run(main())


def test_a_series_of_repredictions_equals_one_prediction_at_once() -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = await predicted(f)
            first = made.length_prediction
            for made.generated_tokens in (50, 100, 150, 200):
                made.length_prediction = await f.repredict(made, "Write a story", None)
            np.testing.assert_array_equal(
                made.length_prediction.quantiles, np.minimum(given_row(first.unbounded, 200), 4096)
            )
            assert made.length_prediction.initial_total_tokens == first.total_tokens

    asyncio.run(main())


def test_the_text_so_far_is_read_by_predictors_that_use_it() -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = await predicted(f, "List ten tips")
            made.generated_tokens = 200
            text = "\n".join(f"{i}. a tip of some words" for i in range(1, 11)) + "\nI hope this helps!"
            reported = await f.repredict(made, "List ten tips", text)
            known = await f.repredict(made, "List ten tips", None)
            assert reported.total_tokens != known.total_tokens
            assert reported.total_tokens > 200
            assert reported.source == "predictor"

    asyncio.run(main())


class Halves:
    """Predicts 100 tokens, and of a text so far twice as many again; the text is read at 10 to 20 tokens."""

    reads_output = (10, 20)

    def predict(self, prompts, tokens_so_far=0):
        so_far = np.broadcast_to(np.asarray(tokens_so_far), (len(prompts),))
        total = np.where(so_far > 0, 3 * so_far, 100) if prompts.output_so_far else np.full(len(prompts), 100)
        return LengthDistribution.of(np.repeat(total[:, None], len(LEVELS), axis=1)).given(so_far).at(LEVELS)


def test_the_text_is_read_only_where_the_predictor_reads_it() -> None:
    async def main() -> None:
        async with inline(Halves()) as f:
            made = await predicted(f)
            for made.generated_tokens, total in ((9, 100), (10, 30), (20, 60), (21, 100)):
                reported = await f.repredict(made, "x", "some text")
                assert reported.total_tokens == pytest.approx(total), made.generated_tokens
        async with LengthPredictor(PredictionConfig(), predictor=default(), place="process") as separate:
            assert separate.reads_output == default().reads_output

    asyncio.run(main())


def test_learned_corrections_apply_to_text_based_predictions_too() -> None:
    """Outputs are twice as long as predicted, and so is what remains."""

    async def main() -> None:
        async with inline(Halves()) as f:
            for _ in range(200):
                await finished(f, 200)
            made = await predicted(f)
            assert made.length_prediction.total_tokens == pytest.approx(200, rel=0.05)
            made.generated_tokens = 15
            reported = await f.repredict(made, "x", "some text")
            assert reported.total_tokens == pytest.approx(15 + 2 * 30, rel=0.1)

    asyncio.run(main())


def test_a_requested_fixed_length_is_used_and_not_learned_from() -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = await finished(f, 77, fixed_tokens=77)
            assert made.length_prediction.source == "requested"
            assert made.length_prediction.total_tokens == 77
            assert (await predicted(f, fixed_tokens=500, max_tokens=90)).length_prediction.total_tokens == 90
            assert f.state()["finished"] == 0
        async with LengthPredictor(
            PredictionConfig(), predictor=default(), place="inline", use_requested=False
        ) as deaf:
            assert (await predicted(deaf, fixed_tokens=77)).length_prediction.source == "predictor"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "most", "tokens"),
    [
        ({"ignore_eos": True, "min_tokens": 90}, 90, 90),
        ({"ignore_eos": True, "min_tokens": 80}, 90, 0),
        ({"ignore_eos": True}, 90, 0),
        ({"ignore_eos": False, "min_tokens": 90}, 90, 0),
        ({"ignore_eos": True, "min_tokens": 90, "stop": ["x"]}, 90, 0),
        ({}, 1, 1),
        ({"ignore_eos": True, "min_tokens": 90}, None, 0),
    ],
)
def test_when_a_client_fixes_a_length(fields, most, tokens) -> None:
    body = "".join(f'"{name}"' for name in fields).encode()
    assert fixed_tokens(body, lambda: fields, most) == tokens


def test_without_a_predictor_all_are_alike() -> None:
    async def main() -> None:
        async with LengthPredictor(PredictionConfig("none")) as f:
            made = [await finished(f, 10 * i + 1, text) for i, text in enumerate(TEXTS)]
            assert len({one.length_prediction.total_tokens for one in made}) == 1
            made[0].generated_tokens = 1000
            assert (await f.repredict(made[0], "", None)).total_tokens == 1001
            assert f.state()["where"] == "none"

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("word", ["raise", "nan", "negative", "huge", "shape", "strange"])
def test_a_predictor_that_fails_leaves_its_rows_to_the_prior(word: str) -> None:
    async def main() -> None:
        async with inline(OneWord()) as f:
            bad, good = await asyncio.gather(predicted(f, f"please {word} now"), predicted(f, "all is well"))
            assert bad.length_prediction.source == "prior"
            assert 1 <= bad.length_prediction.total_tokens <= 4096
            if word not in ("raise", "shape", "strange"):
                assert good.length_prediction.source == "predictor"
                assert good.length_prediction.total_tokens == pytest.approx(40)
            assert sum(f.state()["faults"].values()) >= 1
            assert (await predicted(f, "all is well")).length_prediction.source == "predictor"

    asyncio.run(main())


@pytest.mark.slow
def test_what_stands_in_are_the_lengths_of_the_model_then_of_all() -> None:
    async def main() -> None:
        async with inline(OneWord()) as f:
            for _ in range(40):
                await finished(f, 700, "raise", model="long")
                await finished(f, 20, "raise", model="short")
            message = {
                name: (await predicted(f, "raise", model=name)).length_prediction.total_tokens
                for name in ("long", "short", "new")
            }
            assert message["long"] == pytest.approx(700)
            assert message["short"] == pytest.approx(20)
            assert message["short"] < message["new"] < message["long"]

    asyncio.run(main())


def test_one_batch_answers_all_of_a_turn_of_the_loop() -> None:
    sizes: list[int] = []

    class Counted(Words):
        def predict(self, prompts, tokens_so_far=0):
            sizes.append(len(prompts))
            return super().predict(prompts, tokens_so_far)

    async def main() -> None:
        async with inline(Counted()) as f:
            sizes.clear()
            await asyncio.gather(*(predicted(f, "a b") for _ in range(40)))
            assert sizes == [16, 16, 8]

    asyncio.run(main())


def test_a_request_cancelled_while_it_awaits_its_prediction_harms_no_other() -> None:
    async def main() -> None:
        async with inline(Words()) as f:
            gone = asyncio.ensure_future(predicted(f, "a"))
            stays = asyncio.ensure_future(predicted(f, "a b"))
            await asyncio.sleep(0)
            gone.cancel()
            assert (await stays).length_prediction.total_tokens == pytest.approx(30)

    asyncio.run(main())


def test_of_a_very_long_prompt_both_ends_are_shown() -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = await predicted(f, "Summarize: " + "word " * MAX_CHARS + " in one sentence")
            assert made.length_prediction.source == "predictor"

    asyncio.run(main())


def test_an_oracle_returns_the_true_length_and_otherwise_its_predictor() -> None:
    async def main() -> None:
        lengths = {"a": 123.0}
        oracle = Oracle(
            PredictionConfig(), length=lambda _, text: lengths.get(text or ""), predictor=Constant(50.0), place="inline"
        )
        async with oracle as f:
            known, other = await predicted(f, "a"), await predicted(f, "b")
            assert known.length_prediction.source == "oracle"
            assert known.length_prediction.total_tokens == 123
            known.generated_tokens = 50
            assert (await f.repredict(known, "a", None)).total_tokens == 123
            assert other.length_prediction.source == "predictor"
            assert isinstance(other.length_prediction, CorrectedPrediction)
            f.on_end(known, Outcome.FINISHED, 0.0)
            assert f.state()["sources"]["oracle"] == 1

    asyncio.run(main())


def test_a_prediction_of_others_is_conditioned_too() -> None:
    async def main() -> None:
        async with inline(default()) as f:
            made = request()
            made.generated_tokens = 300
            again = await f.repredict(made, "x", None)
            assert again.total_tokens == 301
            assert again.at_tokens == 300

    asyncio.run(main())


def chats(count: int, turns: int, seed: int = 0) -> Workload:
    """Sessions with alike outputs, one turn of all sessions after the other."""
    rng = np.random.default_rng(seed)
    output = np.exp(5 + 0.8 * rng.standard_normal(count) + 0.4 * rng.standard_normal((turns, count))).astype(int) + 1
    n = count * turns
    extra = {"session": np.tile(np.arange(count), turns), "turn": np.repeat(np.arange(turns), count)}
    return Workload(np.arange(n, dtype=float), np.full(n, 20), output.ravel(), extra=extra)


@pytest.mark.parametrize("place", ["inline", "process"])
def test_the_session_of_a_request_predicts_the_same_live_as_in_a_simulation(place: str) -> None:
    """Also beyond EARLIER_TURNS, and of a request that the predictor in a process got in a batch with others."""
    trained = InSession(Ecdf()).fit(samples_of(chats(60, 4)))
    requests = chats(12, 11, seed=1)
    simulated = attach(requests, trained, update_predictions=False).predicted_tokens

    async def main() -> list[float]:
        live: list[float] = []
        config = PredictionConfig(learn=False, deadline_s=60.0)
        async with LengthPredictor(config, predictor=trained, place=place) as f:
            for turn in range(11):
                rows = range(12 * turn, 12 * turn + 12)
                clients = [Client(session=f"chat {row % 12}") for row in rows]
                made = await asyncio.gather(*(predicted(f, client=one, max_tokens=10**6) for one in clients))
                live += [one.length_prediction.total_tokens for one in made]
                for one, row in zip(made, rows, strict=True):
                    one.generated_tokens = int(requests.output_tokens[row])
                    f.on_end(one, Outcome.FINISHED, 0.0)
        return live

    np.testing.assert_allclose(asyncio.run(main()), simulated, rtol=1e-9)
    assert len(set(np.round(simulated[12:], 6))) > 60


def test_only_finished_outputs_of_the_own_session_count_and_few_sessions_are_stored() -> None:
    trained = InSession(Ecdf()).fit(samples_of(chats(60, 4)))

    async def main() -> None:
        async with inline(trained, learn=False) as f:
            own, other = Client(1, session="a"), Client(2, session="a")
            first = await predicted(f, client=own)
            first.generated_tokens = 900
            f.on_end(first, Outcome.CLIENT_GONE, 0.0)
            unnamed = await finished(f, 900, client=Client(1))
            several = await finished(f, 900, client=own, choices=2)
            before = [one.length_prediction.total_tokens for one in (first, unnamed, several)]
            await finished(f, 900, client=own)
            later, stranger = await predicted(f, client=own), await predicted(f, client=other)
            assert len({*before, stranger.length_prediction.total_tokens}) == 1
            assert later.length_prediction.total_tokens > before[0]
            assert f.state()["sessions"] == 1
            for number in range(MAX_SESSIONS):
                f.on_end(request(client=Client(session=str(number)), generated_tokens=5), Outcome.FINISHED, 0.0)
            assert f.state()["sessions"] == MAX_SESSIONS
            forgotten = await predicted(f, client=own)
            assert forgotten.length_prediction.total_tokens == before[0]

    asyncio.run(main())
