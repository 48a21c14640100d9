"""The page: one document that fetches nothing but its own data."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib.resources import files


@lru_cache(maxsize=1)
def page() -> tuple[bytes, str]:
    """The document, and the content security policy that lets exactly its own style and script run."""
    style = _asset("admin.css")
    script = "\n".join(_asset(name) for name in ("charts.js", "sections.js", "admin.js"))
    text = _asset("admin.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("lengthwise.gateway.admin").joinpath("_assets", name).read_text(encoding="utf-8")
