"""Prompts with the outputs of many models, from the folder of recorded data, as samples to learn from.

A set whose name begins with ``nc_`` is non-commercial: it is for evaluation, never for training.
"""

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predict import Prompts, Samples
from lengthwise.schema.workload import estimated_tokens

OPEN_RUNS = ("pythia-12b-sft-v8-7k", "falcon-7b-sft-mix", "llama2-13b-orca-8k", "codellama-13b-oasst")
"""Runs of Open-Assistant's own models with recorded texts, on base models whose licence allows this use."""
GPTEACHER = ("codegen-instruct", "roleplay-simple-deduped", "toolformer-similarity-0.8")
ZEROEVAL = ("gsm", "crux", "math-l5")
TRUNCATED = 0.85
"""An output with this share of its limit counts as truncated, unless its model reports its end."""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _samples(source: str, rows: Iterable[tuple[str, str, dict[str, Any], str, bool]]) -> Samples:
    """Return samples of rows (prompt, model, row with counts, output, censored), empty outputs left out."""
    made = []
    for prompt, model, row, output, censored in rows:
        tokens = row.get("token_len") or row.get("n_tok_tekken131k") or estimated_tokens(output)
        if output.strip() and tokens >= 1:
            made.append((prompt, model, output, int(tokens), censored))
    prompt, model, output, tokens, censored = map(list, zip(*made, strict=True))
    counted = np.array([estimated_tokens(text) for text in prompt], np.int64)
    prompts = Prompts(len(made), text=prompt, prompt_tokens=counted, model=model)
    return Samples(prompts, np.array(tokens, np.int64), np.array(censored, bool), output, {"sources": [source]})


def _files(folder: Path) -> list[tuple[str, Path]]:
    return [(p.name.removesuffix(".jsonl.gz").removesuffix("_merged"), p) for p in sorted(folder.glob("*.jsonl.gz"))]


def _answers(source: str, folder: Path, prompt_of: Callable[[dict[str, Any]], str]) -> Samples:
    """Return the outputs of a folder's models; OpenAI's o1 is left out, whose reasoning tokens are hidden."""
    files = [(name, path) for name, path in _files(folder) if not name.startswith("o1-")]
    return _samples(source, ((prompt_of(r), name, r, r["output"], False) for name, path in files for r in lines(path)))


@cache
def alpaca_eval(text: Path) -> Samples:
    """Return 24 models on 655 everyday prompts; evaluation only (CC-BY-NC)."""
    folder = text / "nc_alpaca_eval"
    prompts = {r["idx"]: r["instruction"] for r in lines(folder / "instructions.jsonl.gz")}
    return _answers(folder.name, folder / "outputs", lambda row: prompts[row["idx"]])


@cache
def oasst(text: Path) -> Samples:
    """Return 9 runs of 2023 on 191 everyday prompts, several samples per prompt; truncated outputs are censored."""
    folder = text / "oasst_multisample"
    prompts = {r["prompt_idx"]: r["prompt"] for r in lines(folder / "prompts.jsonl.gz")}

    def rows() -> Iterator[tuple[str, str, dict[str, Any], str, bool]]:
        for name, path in _files(folder / "outputs"):
            model = name.split("_", 1)[1].split("_sampling")[0].removeprefix("OpenAssistant_").removesuffix("_sample")
            reports_end = any(r["ended_with_eos"] for r in lines(path))
            for r in lines(path):
                near_limit = r["n_tok_tekken131k"] >= TRUNCATED * (r["max_new_tokens"] or 1e9)
                truncated = near_limit and not (reports_end and r["ended_with_eos"])
                yield prompts[r["prompt_idx"]], model, r, r["output"], truncated

    return _samples(folder.name, rows())


@cache
def zeroeval(text: Path, task: str) -> Samples:
    """Return many models on school mathematics, hard mathematics or code reading, temperature 0."""
    folder = text / f"zeroeval_{task}"
    prompts = {r["id"]: r["prompt"] for r in lines(folder / "prompts.jsonl.gz")}
    return _answers(folder.name, folder / "outputs", lambda row: prompts[row["id"]])


@cache
def arena_hard(text: Path) -> Samples:
    """Return GPT-3.5 and GPT-4 on 405 hard prompts, with counts of their own tokenizer."""
    return _answers("arena_hard_v0.1", text / "arena_hard_v0.1", lambda row: row["prompt"])


@cache
def instructions(text: Path, folder: str, name: str) -> Samples:
    """Return one response per instruction: gpteacher, llamafactory_demo, nc_codealpaca."""
    source, rows = f"{folder}/{name}", []
    for r in lines(text / folder / f"{name}.jsonl.gz"):
        prompt = "\n\n".join(part for of in ("instruction", "input") if (part := (r.get(of) or "").strip()))
        rows.append((prompt, source, r, r.get("response", r.get("output")) or "", False))
    return _samples(source, rows)


def together(parts: list[Samples]) -> Samples:
    sets, sources = [p.prompts for p in parts], list(chain(*(p.metadata["sources"] for p in parts)))
    texts, models, outputs = ([s.text for s in sets], [s.model for s in sets], [p.output for p in parts])
    counted = np.concatenate([s.prompt_tokens for s in sets])
    prompts = Prompts(len(counted), text=[*chain(*texts)], prompt_tokens=counted, model=[*chain(*models)])
    tokens, censored = (np.concatenate([getattr(p, of) for p in parts]) for of in ("output_tokens", "censored"))
    return Samples(prompts, tokens, censored, [*chain(*outputs)], {"sources": sources})


def sample_lengths(text: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lengths of 70 runs with several samples per prompt: run, prompt, tokens (estimated)."""
    with gzip.open(text / "oasst_multisample/sample_lengths.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chars, pieces, prompt = (np.array([int(r[of]) for r in rows]) for of in ("n_chars", "n_wordpunct", "prompt_idx"))
    tokens = np.maximum(1, np.rint(0.06 * chars + 0.76 * pieces)).astype(np.int64)
    return np.array([r["run"] + "/" + r["sampling_config"] for r in rows]), prompt, tokens


def without(samples: Samples, texts: Iterable[str]) -> Samples:
    known = {text.strip() for text in texts}
    rows = [i for i, text in enumerate(samples.prompts.text) if text.strip() not in known]
    return samples.take(np.array(rows, np.int64))


def shipped(text: Path) -> Samples:
    """Return the data of the shipped predictor: Apache-2.0, outputs of openly licensed models."""
    samples = oasst(text)
    rows = [i for i, model in enumerate(samples.prompts.model) if any(name in model for name in OPEN_RUNS)]
    return samples.take(np.array(rows))


def wide(text: Path) -> Samples:
    """Return all commercially usable data, without prompts that AlpacaEval contains as well."""
    parts = [oasst(text), arena_hard(text), *(zeroeval(text, task) for task in ZEROEVAL)]
    parts += [instructions(text, "gpteacher", name) for name in GPTEACHER]
    parts.append(instructions(text, "llamafactory_demo", "alpaca_en_demo"))
    return without(together(parts), alpaca_eval(text).prompts.text)
