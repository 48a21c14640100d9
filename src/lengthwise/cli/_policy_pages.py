"""The pages of ``lengthwise catalog policies``."""

from __future__ import annotations

import math

from lengthwise import policy as room
from lengthwise.cli._show import print_facts, print_table
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import UnknownNameError

_ONLY_THE_BOUND = "only scheduler.max_wait_s bounds the wait"
_EXAMPLES = {
    "bins": "(boundaries=[100, 300])",
    **dict.fromkeys(("equal_mass", "uniform_optimal", "exponential", "learned"), "(k=8)"),
}


def policies() -> None:
    """All policies and named schedulers."""
    rows = [(axis, *_bare(name, _plain(doc))) for axis, name, doc in all_policies()]
    print_table(("axis", "name", "what it does"), rows)


def _bare(name: str, doc: str) -> tuple[str, str]:
    """A policy's name without its parameters, which are told after what it does."""
    bare, _, parameters = name.rstrip(")").partition("(")
    return bare, f"{doc} Takes {parameters}." if parameters else doc


def all_policies() -> list[tuple[str, str, str]]:
    """Policies, and the bins that a scenario cuts from its own workload."""
    from lengthwise.scenario import BINNING_RULES

    return [
        *room.catalog(),
        *(("binning", f"{name}(k)", doc) for name, doc in BINNING_RULES.items()),
    ]


def _plain(doc: str) -> str:
    """A docstring's line without its marks of code."""
    return doc.replace("``", "")


def policy(name: str) -> None:
    """Every policy or scheduler of one name; a policy with parameters by its bare name or with some given."""
    wanted = name.partition("(")[0]
    rows = [row for row in all_policies() if row[1].partition("(")[0] == wanted]
    if not rows:
        raise UnknownNameError("policy", name, names())
    for axis, found, doc in rows:
        print_facts(found, [("axis", axis), ("what it does", _plain(doc)), *_takes(axis, found)])


def _takes(axis: str, name: str) -> list[tuple[str, str]]:
    if axis == "scheduler":
        return _parts(name)
    bare, bracket, parameters = name.partition("(")
    example = bare + _EXAMPLES.get(bare, bracket + parameters)
    facts = [("parameters", parameters.rstrip(")"))] if bracket else []
    facts += [("in a file", f'[scheduler] {axis} = "{example}"')]
    if axis == "binning" and bare not in room.known(axis) and bare != "bins":
        return facts
    found = room.resolve(axis, example)
    facts.insert(0, ("looks at", ", ".join(found.arguments)))
    return [*facts, ("starvation", found.starvation or _ONLY_THE_BOUND)] if axis == "rank" else facts


def _parts(name: str) -> list[tuple[str, str]]:
    """A named scheduler's axes, as a file may change them."""
    whole: Scheduler = room.scheduler(name)
    rank = room.resolve("rank", whole.rank)
    return [
        ("in a file", f'[scheduler] policy = "{name}"'),
        ("preempt", whole.preempt),
        ("router", str(whole.router)),
        ("starvation", rank.starvation or _ONLY_THE_BOUND),
        *_waits(whole),
    ]


def _waits(whole: Scheduler) -> list[tuple[str, str]]:
    """The bounds on waiting that a named scheduler brings along."""
    bounds = {"max_wait_s": whole.max_wait_s, "batch_wait_s": whole.batch_wait_s}
    return [(key, f"{s:g} (inf lifts it)") for key, s in bounds.items() if math.isfinite(s)]


def names() -> list[str]:
    """The names of all policies, schedulers and rules, without parameters."""
    return sorted({row[1].partition("(")[0] for row in all_policies()})
