"""Commands as POSIX shell scripts, one line a flag, the notes as comments."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping

from lengthwise.backend.launch import PLACEHOLDER, Launch

WIDTH = 100


def script(title: str, launch: Launch, body: str) -> str:
    """A whole script: the title and the notes as comments, then the body."""
    said = "\n#\n".join(comment(note) for note in (title, *launch.notes))
    return f"#!/bin/sh\n{said}\nset -eu\n\n{body}"


def comment(text: str) -> str:
    """Text as comment lines. A line break in it cannot end the comment."""
    words = " ".join(text.split())
    # Names and addresses stay whole, as long as they are.
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.wrap(words))


def default_model(model: str) -> str:
    """The line that lets ``MODEL`` be set from outside, and says so where nothing is known."""
    if model == PLACEHOLDER:
        return "MODEL=${MODEL:?set MODEL to a checkpoint: a Hugging Face id or a folder}\n"
    return f"MODEL=${{MODEL:-{shlex.quote(model)}}}\n"


def exports(environment: Mapping[str, str]) -> str:
    """Lines that set and export variables, by name."""
    return "".join(
        f"{name}={shlex.quote(value)}\nexport {name}\n" for name, value in sorted(environment.items())
    )


def invocation(command: tuple[str, ...], replaced: Mapping[str, str], indent: str = "") -> str:
    """The command, quoted, one line a flag.

    Args:
        command: The words of the command.
        replaced: Shell text for the word after this one; written as it is.
        indent: Before every line.
    """
    lines: list[str] = []
    previous = ""
    for word in command:
        shown = replaced.get(previous) or shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(shown)
        else:
            lines[-1] += f" {shown}"
        previous = word
    return f" \\\n{indent}  ".join(lines)
