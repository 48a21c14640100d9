"""The traffic of the gain: recorded prompts and output lengths, bursts, and who predicts.

Prompts are AlpacaEval's (non-commercial: evaluated on, never trained on), lengths those of Vicuna 13B's recorded
outputs, divided by ``SHRINK`` so that a small engine serves a burst in seconds. The predictor is the shipped one; it
has seen none of these prompts, nor this model.

The engines are told each length out of the gateway's sight: ``vllm_xargs.output_tokens``, which the emulated engine
knows and a middleware of the demo's (``engine_side.forced_length``) brings to vLLM. The gateway sees ``max_tokens``,
the same for all.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import _elis
import numpy as np
import numpy.typing as npt

from lengthwise import predict, workload
from lengthwise.predict import LengthDistribution, Prompts
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
OUTPUTS = "vicuna-13b-v1.3"
SHAPE = 0.73
"""Of the Gamma gaps (ELIS)."""
SHRINK = 10
WINDOW = 50 // SHRINK
"""ELIS' 50 tokens, shrunk as the lengths are."""
MAX_TOKENS = 512
MODEL = "tiny"


class Shrunk:
    """What another predictor says, ``SHRINK`` times shorter; asked once a request."""

    predicts_once = True

    def __init__(self, inner: Any, by: float = SHRINK) -> None:
        self.inner, self.by = inner, by

    def fit(self, samples: Any) -> Any:
        """It is fitted."""
        raise NotImplementedError

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Distributions of whole lengths."""
        del tokens_so_far
        return LengthDistribution.of(np.maximum(1.0, self.inner.predict(prompts).tokens / self.by))


@lru_cache(maxsize=1)
def predictor() -> Shrunk:
    """Of the gateway and of the simulator."""
    return Shrunk(predict.default())


def shuffle(shared: Path, seed: int, count: int) -> Workload:
    """``count`` of the recorded prompts in random order, one a second in the mean, with what is predicted of them."""
    texts = _elis.texts(shared, OUTPUTS)
    rng = np.random.default_rng([seed, 0x6A1])
    order = [texts[i] for i in rng.permutation(len(texts))[:count]]
    tokens = np.array([max(1, round(one.output_tokens / SHRINK)) for one in order], np.int64)
    made = Workload(
        workload.Gamma(1.0, SHAPE**-0.5).sample(count, rng),
        np.array([max(1, one.prompt_tokens) for one in order], np.int64),
        np.minimum(tokens, MAX_TOKENS),
        extra={"prompt": np.array([one.prompt for one in order], object), "model": np.array([MODEL] * count, object)},
        name="gain",
    )
    return predict.attach(made, predictor(), window_tokens=WINDOW)


def at_rate(made: Workload, rate_rps: float) -> Workload:
    """The same requests, so many a second."""
    return replace(made, arrival_s=(made.arrival_s - made.arrival_s[0]) / rate_rps)


@dataclass(frozen=True)
class Served:
    """[n] what clients saw, in order of arrival.

    Attributes:
        jct_s: From when a request was due to its last byte.
        prompt_tokens: As the engine counted.
    """

    jct_s: Floats
    prompt_tokens: npt.NDArray[np.int64]


async def sent(port: int, made: Workload) -> Served:
    """An open loop against a gateway; AssertionError where an answer has not its recorded length."""
    import aiohttp

    loop, salt = asyncio.get_running_loop(), uuid.uuid4().hex
    started_s = loop.time() + 0.05
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(deadline_s: float, prompt: str, tokens: int) -> tuple[float, int]:
            await asyncio.sleep(started_s + deadline_s - loop.time())
            async with session.post(url, json=body(prompt, tokens, salt)) as answer:
                told = await answer.read()
            finished_s = loop.time() - started_s
            assert answer.status == 200, told[:500]
            usage = _usage(told)
            assert usage["completion_tokens"] == tokens, (usage, tokens)
            return finished_s - deadline_s, usage["prompt_tokens"]

        rows = zip(made.arrival_s.tolist(), made.extra["prompt"], made.output_tokens.tolist(), strict=True)
        ends = await asyncio.gather(*(one(*row) for row in rows))
    return Served(np.array([jct for jct, _ in ends]), np.array([count for _, count in ends], np.int64))


def body(prompt: str, tokens: int, salt: str) -> dict[str, Any]:
    """A request whose length only the engine is told; no run finds prompts of another in a cache."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "cache_salt": salt,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"output_tokens": tokens, "max_tokens": MAX_TOKENS},
    }


def _usage(stream: bytes) -> Mapping[str, int]:
    for event in reversed(stream.split(b"\n\n")):
        if event.startswith(b"data: {") and b'"usage"' in event:
            found = json.loads(event[6:]).get("usage")
            if found:
                return dict(found)
    raise AssertionError(f"no usage in {stream[-500:]!r}")
