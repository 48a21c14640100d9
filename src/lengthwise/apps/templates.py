"""Jinja2 templates and expressions: their names and values. Outputs of models are never parsed as templates."""

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
    """The names in a template or expression: of variables (``plain``), and of the values of ``previous``."""

    plain: frozenset[str]
    previous: frozenset[str]


@dataclass(frozen=True, eq=False)
class Text:
    """A template or expression, its names, and a compiled function from the variables (context) to the value."""

    source: str
    names: Names
    compiled: Any

    def render(self, context: Mapping[str, Any]) -> Any:
        """Return the template's text or the expression's value. Raises InputError on an undefined name or failure."""
        import jinja2

        try:
            return self.compiled(context)
        except jinja2.UndefinedError as error:
            raise InputError(f"{error.message} in {_shortened(self.source)!r}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"{type(error).__name__}: {error} in {_shortened(self.source)!r}") from error


@lru_cache(maxsize=4096)
def template(source: str) -> Text:
    """Return a compiled template. Raises InputError, with the line, for a syntax error or an unknown filter or test."""
    return Text(source, _names(source, source), _environment().from_string(source).render)


@lru_cache(maxsize=4096)
def expression(source: str) -> Text:
    """Return a compiled expression. Raises InputError for a syntax error or an unknown filter or test."""
    names = _names("{{ (" + source + ") }}", source)
    import jinja2

    try:
        compiled = _environment().compile_expression(source, undefined_to_none=False)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"an expression must be one of Jinja2; {error.message} in {_shortened(source)!r}") from error

    def value(context: Mapping[str, Any]) -> Any:
        result = compiled(**context)
        if isinstance(result, jinja2.Undefined):
            str(result)  # raises: undefined names are strict
        return result

    return Text(source, names, value)


@cache
def _environment() -> Any:
    """Return Jinja2's sandbox, in which undefined names are errors. Raises MissingExtraError without Jinja2."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("an application's templates", "apps") from error
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."


def _names(parsed: str, source: str) -> Names:
    environment = _environment()
    import jinja2
    from jinja2 import meta, nodes

    try:
        tree = environment.parse(parsed)
        undeclared = meta.find_undeclared_variables(tree)
    except jinja2.TemplateAssertionError as error:
        unknown = re.match(r"No (filter|test) named '(.*)'", str(error.message))
        if unknown is None:
            raise InputError(f"a template must be one of Jinja2; {error.message}: {_shortened(source)}") from error
        kind, name = unknown.groups()
        known = environment.filters if kind == "filter" else environment.tests
        raise UnknownNameError(f"{kind} of Jinja2 in {_shortened(source)!r}", name, known) from error
    except jinja2.TemplateSyntaxError as error:
        line = source.splitlines()[min(error.lineno, len(source.splitlines())) - 1] if source else ""
        raise InputError(
            f"a template must be one of Jinja2; line {error.lineno}: {error.message}: {_shortened(line)}"
        ) from error
    previous = set()
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node.node, nodes.Name) and node.node.name == PREVIOUS:
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
            if isinstance(name, str):
                previous.add(name)
    return Names(frozenset(undeclared), frozenset(previous))
