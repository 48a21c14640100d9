"""SamuLLM's applications as tasks and models: its counts and limits, lengths drawn from distributions of its facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.apps.plan import Served
from lengthwise.apps.plan.draws import draw
from lengthwise.schema.app import Cluster, Machine, TaskDraw, Tasks
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelSpec

Ints = npt.NDArray[np.int64]
CHUNK_TOKENS = 2048
EVALUATOR_TOKENS = 300
"""Instructions of Decipherpref's template, about."""
ENSEMBLING_PROMPT, ENSEMBLING_OUTPUT = (5, 21, 127), (1, 180, 490)
"""(fewest, mean, most) tokens of MixInstruct, section 5.1."""
ROUTING_PROMPT, ROUTING_OUTPUT = (9, 310, 577), (3, 199, 1585)
"""Of RouterBench, section 5.2."""
SUMMARY_OUTPUT, VERDICT_OUTPUT = (1, 500, 1200), (1, 150, 600)
"""Assumed: the paper does not tell them."""
ROUTED = (
    ("llama-2-70b", 408),
    ("mixtral-8x7b", 1267),
    ("llama-2-13b", 2068),
    ("codellama-34b", 456),
    ("mistral-7b", 2657),
)
"""Table 1; WizardLM-13B-V1.2 has the shapes of Llama-2-13b."""


@dataclass(frozen=True)
class Lengths:
    """Whole numbers between two ends with this mean: a scaled Beta distribution.

    Attributes:
        low: The fewest.
        mean: Of all.
        high: The most.
        spread: The smaller, the wider.
    """

    low: float
    mean: float
    high: float
    spread: float = 2.0

    def quantile(self, level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Tokens at each level."""
        from scipy.special import betaincinv

        share = (self.mean - self.low) / (self.high - self.low)
        at = betaincinv(share * self.spread, (1 - share) * self.spread, np.asarray(level, np.float64))
        return np.rint(self.low + (self.high - self.low) * at)

    def times(self, factor: float) -> Lengths:
        """The same ends, another mean."""
        return replace(self, mean=min(self.mean * factor, 0.9 * self.high))


@dataclass(frozen=True)
class World:
    """An application to be planned.

    Attributes:
        tasks: All that it asks.
        models: Of its calls.
        lengths: Of each model's outputs.
    """

    tasks: Tasks
    models: tuple[Served, ...]
    lengths: tuple[Lengths, ...]

    def draws(self, seed: int, count: int, *, factor: float = 1.0) -> list[TaskDraw]:
        """Ways in which it may turn out; ``factor``: lengths of another set, with that much the mean."""
        longest = [_spec(one).max_model_len for one in self.models]
        lengths = [one.times(factor) for one in self.lengths]
        return [draw(self.tasks, lengths, longest, (seed, i)) for i in range(count)]


def _spec(served: Served) -> ModelSpec:
    return served.model if isinstance(served.model, ModelSpec) else catalog.model(served.model)


def cluster(gpus: int = 8) -> Cluster:
    """The paper's machine."""
    node = catalog.node("a100-pairwise-nvlink-8")
    return Cluster((Machine(catalog.gpu("A100-80GB"), replace(node, gpus=gpus), gpus),))


def _shapes(
    name: str, layers: int, heads: int, ffn: FfnSpec, *, kv_heads: int = 0, vocab: int = 50432, width: int = 128
) -> ModelSpec:
    attention = AttentionSpec(heads, kv_heads or heads, width)
    return ModelSpec(name, layers, heads * width, vocab, attention, ffn, max_model_len=2048)


def nine() -> tuple[Served, ...]:
    """The models of section 5.1, by the shapes of their configurations."""
    neox = FfnSpec(20480, gated=False)
    return (
        Served("vicuna-13b-v1.5", "vicuna-13b"),
        Served("oasst-pythia-12b", _shapes("pythia-12b", 36, 40, neox)),
        *(Served(name, "llama-2-13b") for name in ("alpaca-13b", "baize-v2-13b", "koala-13b")),
        Served("dolly-v2-12b", _shapes("dolly-v2-12b", 36, 40, neox)),
        Served("mpt-7b-chat", _shapes("mpt-7b-chat", 32, 32, FfnSpec(16384, gated=False))),
        Served("chatglm3-6b", _shapes("chatglm3-6b", 28, 32, FfnSpec(13696), kv_heads=2, vocab=65024)),
        Served("stablelm-7b", _shapes("stablelm-7b", 16, 48, FfnSpec(24576, gated=False))),
    )


FACTORS = (1.2, 1.0, 0.7, 1.1, 1.0, 0.8, 1.1, 1.3, 0.8)
"""Means of the nine over their mean: assumed, as the paper shows that models differ but not by how much."""


def ensembling(requests: int, limit: int, *, seed: int = 0) -> World:
    """Every model answers every request (section 5.1)."""
    rng = np.random.default_rng((seed, 1))
    prompt = Lengths(*ENSEMBLING_PROMPT, 6.0).quantile(rng.random(requests)).astype(np.int64)
    model = np.repeat(np.arange(9), requests)
    tasks = tasks_of(nine(), model, np.tile(prompt, 9), np.full(9 * requests, limit))
    return World(tasks, nine(), _of_nine())


def _of_nine() -> tuple[Lengths, ...]:
    usual = Lengths(*ENSEMBLING_OUTPUT)
    return tuple(usual.times(factor / float(np.mean(FACTORS))) for factor in FACTORS)


def routing(*, known: bool, seed: int = 0) -> World:
    """Each request goes to one of five models (section 5.2)."""
    rng = np.random.default_rng((seed, 2))
    model = np.repeat(np.arange(len(ROUTED)), [count for _, count in ROUTED])
    prompt = Lengths(*ROUTING_PROMPT, 4.0).quantile(rng.random(len(model))).astype(np.int64)
    out = Lengths(*ROUTING_OUTPUT, 5.0)
    served = tuple(Served(name, name) for name, _ in ROUTED)
    tasks = tasks_of(served, model, prompt, np.full(len(model), 4096))
    if known:
        tasks = replace(tasks, known_tokens=out.quantile(rng.random(len(model))).astype(np.int64))
    return World(tasks, served, (out,) * len(ROUTED))


def chunks(documents: int, *, seed: int = 0) -> Ints:
    """How many chunks each document has: median 3; the longest 60 below 300 documents, 201 from there on."""
    from scipy.special import ndtri

    level = (np.arange(documents) + 0.5) / documents
    longest = 60 if documents < 300 else 201
    each = np.clip(np.rint(3 * np.exp(1.1 * ndtri(level))), 1, longest).astype(np.int64)
    each[-1] = longest
    return np.random.default_rng((seed, 3)).permutation(each)


def chain(documents: int, limit: int, evaluations: int, *, seed: int = 0) -> World:
    """Documents summarized chunk by chunk, each summary then evaluated (section 5.3)."""
    served = (Served("vicuna-13b-v1.5", "vicuna-13b"), Served("llama-2-70b-chat", "llama-2-70b"))
    model, prompt, parents = _chained(chunks(documents, seed=seed).tolist(), evaluations)
    tasks = tasks_of(served, np.array(model), np.array(prompt), np.full(len(model), limit), parents)
    return World(tasks, served, (Lengths(*SUMMARY_OUTPUT), Lengths(*VERDICT_OUTPUT)))


def _chained(documents: Iterable[int], evaluations: int) -> tuple[list[int], list[int], list[int]]:
    """(model, prompt tokens, parent or -1) of each task."""
    model: list[int] = []
    prompt: list[int] = []
    parents: list[int] = []
    for length in documents:
        first = len(model)
        model += [0] * length + [1] * evaluations
        prompt += [CHUNK_TOKENS] * length + [EVALUATOR_TOKENS] * evaluations
        last = first + length - 1
        parents += [-1, *range(first, last)] + [last] * evaluations
    return model, prompt, parents


def mixed(documents: int, requests: int, limit: int, *, seed: int = 0) -> World:
    """A chain summary with four evaluations beside an ensembling (section 5.4)."""
    one, other = chain(documents, 900, 4, seed=seed), ensembling(requests, limit, seed=seed)
    a, b = one.tasks, other.tasks
    served = (*one.models, *(replace(m, name=f"{m.name} (answers)") for m in other.models))
    parents = np.full(len(a) + len(b), -1)
    has = np.diff(a.parent_start) > 0
    parents[: len(a)][has] = a.parent
    tasks = tasks_of(
        served,
        np.concatenate([a.model, b.model + 2]),
        np.concatenate([a.prompt_tokens, b.prompt_tokens]),
        np.concatenate([a.max_tokens, b.max_tokens]),
        parents.tolist(),
    )
    return World(tasks, served, one.lengths + other.lengths)


def tasks_of(served: Sequence[Served], model: Ints, prompt: Ints, most: Ints, parents: Sequence[int] = ()) -> Tasks:
    """A row a task; each has at most one parent."""
    n, names = len(model), tuple(one.name for one in served)
    parent = np.array(parents, np.int64) if len(parents) else np.full(n, -1, np.int64)
    zeros = np.zeros(n, np.int64)
    return Tasks(
        calls=names,
        models=names,
        call=model.astype(np.int64),
        model=model.astype(np.int64),
        row=np.arange(n),
        round=zeros,
        index=zeros,
        prompt_tokens=prompt.astype(np.int64),
        max_tokens=most.astype(np.int64),
        known_tokens=zeros,
        parent_start=np.concatenate([[0], np.cumsum(parent >= 0)]).astype(np.int64),
        parent=parent[parent >= 0],
        shown=np.ones(int((parent >= 0).sum()), np.int64),
        random_draw=np.full(n, -1, np.int64),
    )
