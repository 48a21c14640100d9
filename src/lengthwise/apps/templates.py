"""Jinja2 templates and expressions: what they name, and what they become. Outputs are data, never templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError

PREVIOUS = "previous"


@dataclass(frozen=True)
class Names:
    """What a text names.

    Attributes:
        plain: Names that stand by themselves.
        previous: Names after ``previous.``.
    """

    plain: frozenset[str]
    previous: frozenset[str]


@dataclass(frozen=True, eq=False)
class Text:
    """A template or an expression that has been read.

    Attributes:
        source: As written.
        names: What it names.
        compiled: Jinja2's.
        is_expression: Whether it has a value rather than a text.
    """

    source: str
    names: Names
    compiled: Any
    is_expression: bool

    def render(self, context: Mapping[str, Any]) -> Any:
        """The text, or an expression's value.

        Raises:
            InputError: A name is not there, or what it does cannot be done.
        """
        import jinja2

        try:
            if not self.is_expression:
                return self.compiled.render(context)
            return self.compiled(**context)
        except jinja2.UndefinedError as error:
            raise InputError(f"{error.message} in {shortened(self.source)!r}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"{type(error).__name__}: {error} in {shortened(self.source)!r}") from error


@lru_cache(maxsize=4096)
def template(source: str) -> Text:
    """A template; raises InputError with the line where it cannot be read."""
    return Text(source, _names(source, source), _compiled(source), is_expression=False)


@lru_cache(maxsize=4096)
def expression(source: str) -> Text:
    """An expression; raises InputError where it cannot be read."""
    inside = "{{ (" + source + ") }}"
    names = _names(inside, source)
    import jinja2

    try:
        compiled = environment().compile_expression(source, undefined_to_none=False)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"an expression must be one of Jinja2; {error.message} in {shortened(source)!r}") from error

    def value(**context: Any) -> Any:
        found = compiled(**context)
        str(found) if isinstance(found, jinja2.Undefined) else None  # a strict one raises
        return found

    return Text(source, names, value, is_expression=True)


@cache
def environment() -> Any:
    """Jinja2's sandbox, where what is not there is an error; raises MissingExtraError."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("an application's templates", "apps") from error
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)


def shortened(text: str, most: int = 80) -> str:
    """A text on one line, cut in the middle of nowhere."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def _compiled(source: str) -> Any:
    import jinja2

    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(
            f"a template must be one of Jinja2; line {error.lineno}: {error.message}: "
            f"{shortened(source.splitlines()[error.lineno - 1]) if source else ''}"
        ) from error


def _names(parsed: str, source: str) -> Names:
    import jinja2
    from jinja2 import meta, nodes

    try:
        tree = environment().parse(parsed)
        undeclared = meta.find_undeclared_variables(tree)
    except jinja2.TemplateAssertionError as error:
        raise _unknown(error, source) from error
    except jinja2.TemplateSyntaxError as error:
        line = source.splitlines()[min(error.lineno, len(source.splitlines())) - 1] if source else ""
        raise InputError(
            f"a template must be one of Jinja2; line {error.lineno}: {error.message}: {shortened(line)}"
        ) from error
    previous = set()
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node.node, nodes.Name) and node.node.name == PREVIOUS:
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
            if isinstance(name, str):
                previous.add(name)
    return Names(frozenset(undeclared), frozenset(previous))


def _unknown(error: Any, source: str) -> InputError:
    """What Jinja2 says of a filter or a test that there is none of, with the nearest ones."""
    found = re.match(r"No (filter|test) named '(.*)'", str(error.message))
    if found is None:
        return InputError(f"a template must be one of Jinja2; {error.message}: {shortened(source)}")
    known = environment().filters if found[1] == "filter" else environment().tests
    return UnknownNameError(f"{found[1]} of Jinja2 in {shortened(source)!r}", found[2], known)
