"""Hit rates of a prefix cache by size, and what its memory saves: sentences, a table, a page, JSON fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lengthwise.report.curves import Figure
from lengthwise.report.formatting import UNKNOWN, amount, counted, model_text, percent, rounded, seconds, two_digits
from lengthwise.report.html_page import Row, TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.report.theory import estimate_cell, figure_of, line_of, marks_of
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_atomic
from lengthwise.schema.kv import CacheSize, KvStudy, Loading


def size_rows(study: KvStudy) -> tuple[list[str], list[Row]]:
    """Return heads and rows of the table of cache sizes. A column without any number is left out."""
    columns: dict[str, list[str | TableCell]] = {
        "cache": [size.name for size in study.sizes],
        "GB": [UNKNOWN if math.isnan(size.gb) else amount(size.gb) for size in study.sizes],
        "tokens": [f"{size.tokens:,}" for size in study.sizes],
        "tokens found, %": [estimate_cell(size.token_share.scaled(100)) for size in study.sizes],
        "with the pool, %": [estimate_cell(size.hierarchy_share.scaled(100)) for size in study.sizes],
        "prefill saved, %": [estimate_cell(size.saved_share.scaled(100)) for size in study.sizes],
        "saved, s/h": [_with_model(size.saved_s_per_hour) for size in study.sizes],
        "net, $/h": [_signed(size.net_usd_per_hour) for size in study.sizes],
        "$ per saved s": [_with_model(size.usd_per_saved_s) for size in study.sizes],
        "$ per M tokens": [_with_model(size.usd_per_million_tokens) for size in study.sizes],
        "blocks found, %": [estimate_cell(size.block_share.scaled(100)) for size in study.sizes],
    }
    known = {name: cells for name, cells in columns.items() if any(getattr(c, "text", c) != UNKNOWN for c in cells)}
    return list(known), [list(cells) for cells in zip(*known.values(), strict=True)]


def _with_model(value: Estimate) -> TableCell:
    cell = estimate_cell(value)
    return TableCell(cell.text, cell.interval, model_text(value))


def _signed(value: Estimate) -> TableCell:
    cell, ends = estimate_cell(value), map(two_digits, (value.model_low, value.model_high))
    return TableCell(cell.text, cell.interval, f"({' to '.join(ends)})" if value.has_model_interval else "")


def answers(study: KvStudy) -> list[str]:
    """Return sentences on hit rates by size, the tiers, loads of prefixes, and the net saving of memory."""
    every = study.curve[-1]
    if not every.token_share.value > 0:
        found = f"begins with the same full block of {counted(study.block_tokens, 'token')} as an earlier request"
        return [f"A prefix cache of any size finds nothing: no prompt {found} (its last token's block does not count)."]
    unlimited = f"An unlimited cache finds {_percent(every.token_share)} of the prompt tokens"
    parts = f"{_size_for(study, 0.9)} per replica finds 90 % of that, {_size_for(study, 0.5)} finds 50 %"
    sentences = [f"{unlimited}; {parts}."]
    pool = next((size for size in study.sizes if size.name == "GPU pool"), None)
    if pool is not None:
        found = f"The GPU pool of {pool.tokens:,} tokens ({amount(pool.gb)} GB) finds {_percent(pool.token_share)}"
        simulated, findable = study.found.simulated, max(every.token_share.value, study.found.unlimited.value)
        points = _points(findable - pool.token_share.value)
        more = f"at most {points} percentage point{'' if points == '1' else 's'}"
        if math.isfinite(simulated.value):
            found += f", and {_percent(simulated)} where requests run together"
            more += f" to the first figure, {_points(findable - simulated.value)} to the second"
        sentences.append(f"{found}; more memory adds {more}.")
    if study.tiers:
        names = [tier.name + (f" of {amount(tier.gb)} GB" if math.isfinite(tier.gb) else "") for tier in study.tiers]
        pairs = [(_percent(tier.token_share), _percent(tier.simulated)) for tier in study.tiers]
        by_curve, by_simulation = (
            _listed([share.removesuffix(" %") for share in shares]) + " %" for shares in zip(*pairs, strict=True)
        )
        each = f"find {by_curve} of the prompt tokens, each beyond those before it"
        sentences.append(f"As one LRU hierarchy, {_listed(names)} {each}; in the simulation they find {by_simulation}.")
    sentences += [_loading_answer(study, loading) for loading in study.loadings]
    return [*sentences, *_price_answers(study, pool)]


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _percent(share: Estimate) -> str:
    text, half = rounded(100 * share.value, 100 * share.half_width)
    return f"{text} ± {half} %" if half else f"{text} %"


def _points(share: float) -> str:
    return percent(max(0.0, share)).removesuffix(" %")


def _size_for(study: KvStudy, part: float) -> str:
    size = next(size for size in study.curve if size.token_share.value >= part * study.curve[-1].token_share.value)
    return f"{size.tokens:,} tokens" if math.isnan(size.gb) else f"{amount(size.gb)} GB ({size.tokens:,} tokens)"


def _loading_answer(study: KvStudy, loading: Loading) -> str:
    after = f"for a request with {counted(study.new_tokens, 'token')} after the prefix"
    source = f"{loading.source} at {loading.gb_per_s:g} GB/s of each GPU"
    even = loading.break_even_tokens
    if math.isinf(even.value):
        most = f"{study.prefix_tokens[-1]:,} tokens"
        return f"Loading from {source} is never faster than computing, up to {most}, {after}."
    at = min(range(len(study.prefix_tokens)), key=lambda i: abs(study.prefix_tokens[i] - 1000))
    model = f" {model_text(even)}" if model_text(even) else ""
    return (
        f"Loading from {source} is faster than computing from prefixes of {even.value:,.0f} tokens{model} on, {after}. "
        f"A prefix of {study.prefix_tokens[at]:,} tokens takes {seconds(loading.load_s[at])} to load and "
        f"{seconds(study.compute_s[at])} to compute."
    )


def _price_answers(study: KvStudy, pool: CacheSize | None) -> list[str]:
    if math.isnan(study.usd_per_gb_hour) or pool is None:
        return []
    priced = [size for size in study.sizes if math.isfinite(size.net_usd_per_hour.value)]
    if not priced:
        return ["No size of memory in the table finds more than the GPU pool: memory behind it saves nothing."]
    best = max(priced, key=lambda size: size.net_usd_per_hour.value)
    net, gpu = best.net_usd_per_hour, f"${study.gpu_usd_per_s:.2g} for a second of the replica's GPUs"
    low = np.nanmin([net.value, net.low, net.model_low])
    high = np.nanmax([net.value, net.high, net.model_high])
    price, memory = f"At {gpu} and ${study.usd_per_gb_hour:g} for a GB of memory and hour", "memory"
    if study.storage_usd_per_hour:
        price += f", and ${study.storage_usd_per_hour:.2g} for an hour of the replica's storage"
        memory = "memory with this storage"
    if net.value <= 0:
        limit = max((_worth(study, size) - study.storage_usd_per_hour) / size.gb for size in priced)
        pays = "may not pay" if high > 0 else "does not pay"
        loss = f"of the sizes that find more than the GPU pool, {best.name} loses least; it {_usd(study, best)}"
        below = f"It would pay below ${limit:.2g} for a GB of memory and hour"
        if limit <= 1e-9 * study.usd_per_gb_hour:  # not above the rounding of floats
            below = "The storage alone costs more than memory and storage save together"
            below = below if study.storage_usd_per_hour else "No price would make it pay, because it saves nothing"
        return [f"{price}, {memory} {pays}: {loss}. {below}."]
    pays = "pays" if low > 0 else "may pay"
    answer = f"{price}, {memory} {pays}: of these sizes {best.name} has the largest net saving; it {_usd(study, best)}."
    larger = next((size for size in priced if size.blocks > best.blocks), None)
    if larger is not None:
        step_usd = (larger.gb - best.gb) * study.usd_per_gb_hour
        saved_usd = _worth(study, larger) - _worth(study, best)
        answer += f" The step to {larger.name} {_costs(step_usd, saved_usd)}."
    return [answer]


def _worth(study: KvStudy, size: CacheSize) -> float:
    return size.net_usd_per_hour.value + _price(study, size)


def _price(study: KvStudy, size: CacheSize) -> float:
    return size.gb * study.usd_per_gb_hour + study.storage_usd_per_hour


def _costs(price_usd: float, saved_usd: float) -> str:
    """Return a phrase on the cost and the saving of memory in an hour."""
    saves = f"${saved_usd:.2g}/h" if saved_usd > 1e-9 * price_usd else "nothing"  # less is a rounding error
    return f"costs ${price_usd:.2g}/h and saves {saves}"


def _usd(study: KvStudy, size: CacheSize) -> str:
    net = _signed(size.net_usd_per_hour)
    each = " ".join(filter(None, (net.text, net.interval, net.model)))
    worth, saved_s = _worth(study, size), _worth(study, size) / study.gpu_usd_per_s
    costs = _costs(_price(study, size), worth)
    return f"{costs} ({saved_s:,.0f} s of prefill beyond the GPU pool): a net {each} $/h"


def _figures(study: KvStudy) -> list[Figure]:
    in_gb = not math.isnan(study.bytes_per_token)

    def x(sizes: tuple[CacheSize, ...]) -> list[float]:
        return [size.gb if in_gb else size.tokens for size in sizes]

    unit = "GB of KV cache per replica" if in_gb else "tokens of KV cache"
    named = [size for size in study.sizes if size.is_given]
    curves = [
        line_of("tokens found", 0, x(study.curve), [size.token_share.value for size in study.curve]),
        marks_of("tokens found", 0, x(study.sizes), [size.token_share for size in study.sizes], 0, 1)
        | {"silent": True},
    ]
    if math.isfinite(study.curve[-1].hierarchy_share.value):
        behind = [size.hierarchy_share.value for size in study.curve]
        others = ", the GPU pool and the storage" if len(study.tiers) > 2 else " and the GPU pool"
        curves.append(line_of(f"found by this memory{others}", 1, x(study.curve), behind))
    drawn = [
        figure_of(
            "hits",
            "Share found by size of the cache",
            {"label": f"{unit}, log scale", "log": True},
            {"label": "share of the prompts", "format": ".0%"},
            curves,
        )
        | {"marks": [{"x": x((size,))[0], "text": size.name} for size in named]}
    ]
    if study.loadings:
        lines = [line_of("compute", 0, study.prefix_tokens, study.compute_s)]
        for i, loading in enumerate(study.loadings):
            lines.append(line_of(f"load from {loading.source}", i + 1, study.prefix_tokens, loading.load_s))
        drawn.append(
            figure_of(
                "loading",
                "Seconds to load a prefix, or to compute it",
                {"label": "tokens of the prefix, log scale", "log": True},
                {"label": "seconds, log scale", "log": True},
                lines,
            )
        )
    return drawn


def _cards(study: KvStudy) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, interval or note)."""
    cards = [("Unlimited cache finds", _percent(study.curve[-1].token_share), "of the prompt tokens")]
    if study.curve[-1].token_share.value > 0:
        size, _, tokens = _size_for(study, 0.9).partition(" (")
        cards.append(("90 % of that needs", size, f"per replica{f' ({tokens}' if tokens else ''}"))
    cards += [
        ("GPU pool finds", _percent(size.token_share), f"with {amount(size.gb)} GB per replica")
        for size in study.sizes
        if size.name == "GPU pool"
    ]
    priced = [size for size in study.sizes if math.isfinite(size.net_usd_per_hour.value)]
    if priced:
        best = max(priced, key=lambda size: size.net_usd_per_hour.value)
        net = _signed(best.net_usd_per_hour)
        cards.append(
            ("Net saving, $/h", net.text, " ".join(filter(None, (net.interval, net.model, f"with {best.name}"))))
        )
    return cards


def write_kv_html(path: Path | str, study: KvStudy) -> None:
    """Write an HTML page with the answers, curves and numbers of a study."""
    drawn = _figures(study)
    heads, rows = size_rows(study)
    write_page(
        path,
        "kv",
        data=drawn,
        heading="What a prefix cache finds",
        metadata=(study.name, *study.metadata),
        cards=_cards(study),
        answers=answers(study),
        notes=study.notes,
        ids=[figure["id"] for figure in drawn],
        heads=heads,
        rows=rows,
        all_simulated=study.found.all_simulated,
    )


def write_kv_json(path: Path | str, study: KvStudy) -> None:
    """Write the study to a JSON file. Raises OutputError if the file cannot be written."""
    write_atomic(path, json_text("kv", {"answers": answers(study), **plain(study)}).encode())
