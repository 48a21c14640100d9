"""The gateway's guide names the versions of vLLM that the plug-in was tested with."""

from __future__ import annotations

import re

from documents import ROOT

from lengthwise.gateway.plugin.vllm_adapter import TESTED

INSTALLED = ROOT / "tests" / "backend" / "engine" / "install.sh"


def test_the_guide_names_the_tested_versions():
    text = " ".join((ROOT / "docs" / "guide-gateway.md").read_text("utf-8").split())
    (named,) = re.findall(r"The plug-in was tested on vLLM (.+?)\. On every other version", text)
    assert tuple(named.split(", ")) == TESTED


def test_the_tested_version_is_installed():
    assert tuple(re.findall(r"^vllm=([\d.]+)$", INSTALLED.read_text("utf-8"), re.MULTILINE)) == TESTED
