"""What ``lengthwise predict`` does and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import typer

from lengthwise import predict as p
from lengthwise.backend.collect import Endpoint
from lengthwise.backend.collect import collect as backend_collect
from lengthwise.cli._outputs import require_plotly, require_writable
from lengthwise.cli._predict_notes import mend_name, notes
from lengthwise.cli._predict_scores import CARD, print_scores
from lengthwise.cli._show import print_facts, print_table
from lengthwise.predict.evaluate import Evaluation
from lengthwise.predict.evaluate import evaluate as evaluated
from lengthwise.predict.read import read, read_prompts, split
from lengthwise.predict.shipped import opened
from lengthwise.report.predict import WORDS, predict_json, score_text, write_predict_html
from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError
from lengthwise.schema.files import write_whole

KINDS: dict[str, Callable[[int], Any]] = {
    "lexical": lambda seed: _made("lexical", "Lexical")(seed=seed),
    "encoder": lambda seed: _made("encoder", "Encoder")(seed=seed),
    "ecdf": lambda _: p.Ecdf(),
    "buckets": lambda _: p.BucketEcdf(),
    "constant": lambda _: p.Constant(),
}
_TOLD = (
    "sources",
    "samples",
    "prompts",
    "models",
    "censored",
    "trained",
    "versions",
    "licence",
    "weaknesses",
)
_JUDGED = {"held_out": "on held-out prompts", "other_prompts_and_models": "on other prompts and models"}
_BAR = 32


def train(
    files: Sequence[Path],
    out: Path,
    *,
    kind: str,
    test_share: float,
    seed: int,
    conformal: bool,
    model: str | None,
) -> None:
    """Trains, evaluates on held-out prompts, and saves."""
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", kind, KINDS)
    require_writable([out], files)
    samples = read(files, model=model)
    for line in notes(samples):
        typer.echo(line)
    predictor = KINDS[kind](seed)
    if conformal:
        predictor = p.Conformal(predictor, seed=seed)
    facts: dict[str, Any] = {
        **{k: v for k, v in _facts_of(samples).items() if k not in ("unknown_finish", "misspelt")},
        "seed": seed,
        "trained": _today(),
        "versions": _versions(),
    }
    known = samples.prompts.text is not None
    if test_share > 0 and known:
        parts = split(samples, test_share, seed)
        predictor.fit(parts.train)
        found = evaluated(predictor, parts.test, name=f"{kind} on held-out prompts", seed=seed)
        facts |= {"test_share": test_share, "held_out": _figures(found)}
        print_scores(
            [found], f"{kind}: {len(parts.train):,} samples learnt from, {len(parts.test):,} held out"
        )
    else:
        predictor.fit(samples)
        why = "no prompts, so nothing could be held out" if not known else "nothing was held out"
        typer.echo(f"{kind}: {len(samples):,} samples learnt from; {why}")
    p.save(predictor, out, facts)
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB)")


def evaluate(
    source: str,
    files: Sequence[Path],
    *,
    report: Path | None,
    json_file: str | None,
    seed: int,
    model: str | None,
) -> None:
    """Evaluates on all files together and, where there are several, on each."""
    to_stdout = json_file == "-"
    require_writable(
        [f for f in (report, Path(json_file) if json_file and not to_stdout else None) if f], files
    )
    if report:
        require_plotly()
    predictor = opened(mend_name(source))
    names = [f.name for f in files] if len({f.name for f in files}) == len(files) else list(map(str, files))
    groups = {name: [file] for name, file in zip(names, files, strict=True)}
    if len(files) > 1:
        groups = {"all": list(files), **groups}
    found = [
        evaluated(predictor, read(group, model=model), name=name, seed=seed) for name, group in groups.items()
    ]
    if json_file:
        text = predict_json(found, getattr(predictor, "facts_", {}))
        if to_stdout:
            sys.stdout.write(text)
        else:
            write_whole(json_file, text.encode())
    if not to_stdout:
        print_scores(found, f"{source} on {', '.join(map(str, files))}")
    if report:
        write_predict_html(
            report, found, getattr(predictor, "facts_", {}), heading=f"Predicted lengths: {source}"
        )
        typer.echo(f"wrote {report}", err=to_stdout)


def collect(
    prompts: Path, *, url: str, model: str, out: Path, max_tokens: int | None, temperature: float | None,
    concurrency: int,
) -> None:  # fmt: skip
    """Asks a server, and tells how it went; InputError where nothing was answered."""
    wanted = read_prompts(prompts)
    endpoint = Endpoint(url, model, max_tokens, temperature, os.environ.get("OPENAI_API_KEY"))
    found = backend_collect(wanted, out, endpoint, concurrency=concurrency)
    typer.echo(f"{found.done:,} answered, {found.skipped:,} were there, {found.failed:,} failed: {out}")
    if found.failed:
        raise InputError(
            f"{found.failed:,} of {len(wanted):,} prompts were not answered; the first: {found.reason}"
        )


def show_card(source: str) -> None:
    """Prints what a predictor is, what it learnt from, and how well it did."""
    predictor = opened(mend_name(source))
    facts = dict(getattr(predictor, "facts_", {}) or {})
    figures = {words: facts.pop(key) for key, words in _JUDGED.items() if facts.get(key)}
    facts["versions"] = [f"{name} {number}" for name, number in (facts.get("versions") or {}).items()]
    known = [key for key in _TOLD if key in facts]
    print_facts(
        f"{source}: a predictor of kind {predictor.kind}",
        [
            (key.replace("_", " "), _said(facts[key]))
            for key in (*known, *sorted(set(facts) - set(known)))
            if not isinstance(facts[key], dict)
        ],
    )
    if figures:
        rows = [
            [WORDS[name], *(score_text(name, *of.get(name, (float("nan"),))) for of in figures.values())]
            for name in CARD
            if any(name in of for of in figures.values())
        ]
        print_table(("score", *figures), rows, wraps=())


def show_prompt(source: str, prompt: str, model: str | None, tokens_so_far: int) -> None:
    """Prints the distribution of one prompt's answer."""
    predictor = opened(mend_name(source))
    names = [model] if model is not None else None
    said = predictor.predict(p.Prompts(1, text=[prompt], model=names), np.array([tokens_so_far]))
    so_far = f", given that {tokens_so_far:,} have come" if tokens_so_far else ""
    known = getattr(predictor, "knows_model", None)
    who = (
        []
        if model is None
        else [("model", model + ("" if known is None or known(model) else " (not one it knows)"))]
    )
    print_facts(
        f"Output tokens{so_far}",
        [
            *who,
            ("expected", f"{said.mean[0]:,.0f} tokens"),
            ("half are below", f"{said.median[0]:,.0f} tokens"),
            ("nine in ten are in", f"{said.quantile(0.05)[0]:,.0f} to {said.quantile(0.95)[0]:,.0f} tokens"),
        ],
    )
    print_table(
        (
            "quantile",
            "tokens",
            "",
        ),
        _bars(said),
    )


def _bars(said: p.LengthDistribution) -> list[list[str]]:
    levels = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
    tokens = [float(said.quantile(level)[0]) for level in levels]
    top = max(tokens)
    return [
        [f"{100 * level:g} %", f"{t:,.0f}", "█" * max(1, round(_BAR * t / top))]
        for level, t in zip(levels, tokens, strict=True)
    ]


def _made(module: str, name: str) -> Any:
    try:
        return getattr(import_module(f"lengthwise.predict.{module}"), name)
    except ImportError as error:
        raise MissingExtraError(f"the {module} predictor", "predict") from error


def _facts_of(samples: p.Samples) -> dict[str, Any]:
    text, model = samples.prompts.text, samples.prompts.model
    return {
        **samples.facts,
        "samples": len(samples),
        "prompts": len({t.strip() for t in text}) if text is not None else 0,
        "models": sorted({str(m) for m in model}) if model is not None else [],
        "censored": int(samples.censored.sum()),
    }


def _figures(found: Evaluation) -> dict[str, list[float]]:
    return {
        name: [float(e.value), float(e.half_width)]
        for name, e in found.scores.items()
        if np.isfinite(e.value)
    }


def _said(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    try:
        return ", ".join(str(item) for item in value)
    except TypeError:
        return str(value)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _versions() -> dict[str, str]:
    found = {}
    for name in ("lengthwise", "numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found
