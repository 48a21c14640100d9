"""Prompts with the outputs of many models, from the folder of recorded data, as samples to learn from.

A set whose name begins with ``nc_`` is non-commercial: it is for evaluation, never for training.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from lengthwise.predict import Prompts, Samples
from lengthwise.schema.workload import estimated_tokens

SHORTEST = 1


@dataclass
class Rows:
    """Samples while they are gathered."""

    prompt: list[str] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    censored: list[bool] = field(default_factory=list)

    def add(self, prompt: str, model: str, row: dict, *, output: str, censored: bool = False) -> None:
        tokens = row.get("token_len") or row.get("n_tok_tekken131k") or estimated_tokens(output)
        if output.strip() and tokens >= SHORTEST:
            self.prompt.append(prompt)
            self.model.append(model)
            self.output.append(output)
            self.tokens.append(int(tokens))
            self.censored.append(censored)

    def samples(self, source: str) -> Samples:
        counted = np.array([estimated_tokens(text) for text in self.prompt], np.int64)
        prompts = Prompts(len(self.prompt), text=self.prompt, prompt_tokens=counted, model=self.model)
        tokens, censored = np.array(self.tokens, np.int64), np.array(self.censored, bool)
        return Samples(prompts, tokens, censored, self.output, {"sources": [source]})


def lines(path: Path) -> Iterator[dict]:
    """The rows of a gzip JSONL file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def joined(instruction: str, given: str) -> str:
    """An instruction and what it is about, as a user would send them."""
    return f"{instruction.strip()}\n\n{given.strip()}" if given.strip() else instruction.strip()


def name_of(path: Path) -> str:
    """A model's name from the name of its file."""
    return path.name.removesuffix(".jsonl.gz").removesuffix("_merged")


@cache
def alpaca_eval(text: Path) -> Samples:
    """24 models on 655 everyday prompts; evaluation only (CC-BY-NC)."""
    prompts = {r["idx"]: r["instruction"] for r in lines(text / "nc_alpaca_eval/instructions.jsonl.gz")}
    rows = Rows()
    for path in sorted((text / "nc_alpaca_eval/outputs").glob("*.jsonl.gz")):
        for r in lines(path):
            rows.add(prompts[r["idx"]], name_of(path), r, output=r["output"])
    return rows.samples("nc_alpaca_eval")


@cache
def oasst(text: Path) -> Samples:
    """9 runs of 2023 on 191 everyday prompts, several samples a prompt; cut outputs are censored."""
    folder = text / "oasst_multisample"
    prompts = {r["prompt_idx"]: r["prompt"] for r in lines(folder / "prompts.jsonl.gz")}
    rows = Rows()
    for path in sorted((folder / "outputs").glob("*.jsonl.gz")):
        name = name_of(path)
        model = name.split("_", 1)[1].split("_sampling")[0].removeprefix("OpenAssistant_").removesuffix("_sample")
        says_end = any(r["ended_with_eos"] for r in lines(path))
        for r in lines(path):
            most = r["max_new_tokens"] or 1e9
            near_cap = r["n_tok_tekken131k"] >= 0.85 * most
            cut = near_cap and not (says_end and r["ended_with_eos"])
            rows.add(prompts[r["prompt_idx"]], model, r, output=r["output"], censored=cut)
    return rows.samples("oasst_multisample")


@cache
def zeroeval(text: Path, task: str) -> Samples:
    """Many models on school mathematics, hard mathematics or code reading, temperature 0."""
    folder = text / f"zeroeval_{task}"
    prompts = {r["id"]: r["prompt"] for r in lines(folder / "prompts.jsonl.gz")}
    rows = Rows()
    for path in sorted((folder / "outputs").glob("*.jsonl.gz")):
        if not path.name.startswith("o1-"):  # its reasoning tokens are hidden
            for r in lines(path):
                rows.add(prompts[r["id"]], name_of(path), r, output=r["output"])
    return rows.samples(f"zeroeval_{task}")


@cache
def arena_hard(text: Path) -> Samples:
    """GPT-3.5 and GPT-4 on 405 hard prompts, with counts of their own tokenizer."""
    rows = Rows()
    for path in sorted((text / "arena_hard_v0.1").glob("*.jsonl.gz")):
        for r in lines(path):
            rows.add(r["prompt"], name_of(path), r, output=r["output"])
    return rows.samples("arena_hard_v0.1")


@cache
def instructions(text: Path, folder: str, name: str) -> Samples:
    """One response an instruction: gpteacher, llamafactory_demo, nc_codealpaca."""
    rows = Rows()
    for r in lines(text / folder / f"{name}.jsonl.gz"):
        answer = r.get("response", r.get("output")) or ""
        rows.add(joined(r["instruction"], r.get("input") or ""), f"{folder}/{name}", r, output=answer)
    return rows.samples(f"{folder}/{name}")


@cache
def self_instruct(text: Path) -> Samples:
    """8 models of the GPT-3 family on 209 instructions."""
    rows = Rows()
    for path in sorted((text / "self_instruct_252").glob("*.jsonl.gz")):
        for r in lines(path):
            answer = r["response"]
            answer = answer.get("text", "") if isinstance(answer, dict) else answer or ""
            rows.add(joined(r["instruction"], r.get("input") or ""), name_of(path), r, output=answer)
    return rows.samples("self_instruct_252")


@cache
def human(text: Path, name: str) -> Samples:
    """Answers that people wrote: gsm8k_train, humaneval, mbpp."""
    keys = {
        "gsm8k_train": ("question", "answer"),
        "humaneval": ("prompt", "canonical_solution"),
        "mbpp": ("text", "code"),
    }
    prompt, answer = keys[name]
    rows = Rows()
    for r in lines(text / f"{name}.jsonl.gz"):
        rows.add(r[prompt], f"human/{name}", r, output=r[answer])
    return rows.samples(name)


def together(parts: list[Samples]) -> Samples:
    """The samples of several sets, one after the other."""
    prompts = Prompts(
        sum(len(p) for p in parts),
        text=[t for p in parts for t in p.prompts.text],
        prompt_tokens=np.concatenate([p.prompts.prompt_tokens for p in parts]),
        model=[m for p in parts for m in p.prompts.model],
    )
    return Samples(
        prompts,
        np.concatenate([p.output_tokens for p in parts]),
        np.concatenate([p.censored for p in parts]),
        [o for p in parts for o in p.output],
        {"sources": [s for p in parts for s in p.metadata["sources"]]},
    )


@cache
def sample_lengths(text: Path) -> dict[str, np.ndarray]:
    """Lengths of 70 runs with several samples a prompt: run, prompt, tokens (estimated), censored."""
    with gzip.open(text / "oasst_multisample/sample_lengths.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chars = np.array([int(r["n_chars"]) for r in rows])
    pieces = np.array([int(r["n_wordpunct"]) for r in rows])
    tokens = np.maximum(1, np.rint(0.06 * chars + 0.76 * pieces)).astype(np.int64)
    most = np.array([float(r["max_new_tokens"] or "inf") for r in rows])
    ended = np.array([r["ended_with_eos"] == "1" for r in rows])
    run = np.array([r["run"] + "/" + r["sampling_config"] for r in rows])
    says_end = {name: bool(ended[run == name].any()) for name in np.unique(run)}
    told = np.array([says_end[name] for name in run])
    return {
        "run": run,
        "prompt": np.array([int(r["prompt_idx"]) for r in rows]),
        "tokens": tokens,
        "censored": (tokens >= 0.85 * most) & ~(told & ended),
    }


OPEN_RUNS = ("pythia-12b-sft-v8-7k", "falcon-7b-sft-mix", "llama2-13b-orca-8k", "codellama-13b-oasst")
"""Runs of Open-Assistant's own models whose texts are recorded, on base models that may be used freely for this."""


def of_models(samples: Samples, names: tuple[str, ...]) -> Samples:
    """The samples of models whose name holds one of ``names``."""
    return samples.take(np.array([i for i, m in enumerate(samples.prompts.model) if any(name in m for name in names)]))


def without(samples: Samples, texts: list[str]) -> Samples:
    """The samples of other prompts than these."""
    known = {text.strip() for text in texts}
    kept = [i for i, text in enumerate(samples.prompts.text) if text.strip() not in known]
    return samples.take(np.array(kept, np.int64))


def shipped(text: Path) -> Samples:
    """What the predictor that is shipped may learn from: Apache-2.0 data, outputs of openly licensed models."""
    return of_models(oasst(text), OPEN_RUNS)


def wide(text: Path) -> Samples:
    """Everything that is not non-commercial; prompts that AlpacaEval has, too, are left out."""
    gpteacher = ("codegen-instruct", "roleplay-simple-deduped", "toolformer-similarity-0.8")
    parts = [
        oasst(text),
        arena_hard(text),
        *(zeroeval(text, task) for task in ("gsm", "crux", "math-l5")),
        *(instructions(text, "gpteacher", name) for name in gpteacher),
        instructions(text, "llamafactory_demo", "alpaca_en_demo"),
    ]
    return without(together(parts), list(alpaca_eval(text).prompts.text))
