"""``lengthwise profile``: imports, shows and checks, and reports what is wrong with its input."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.cost.profiles import read_profile, write_profile
from lengthwise.schema.profile import Profile, ProfileFacts


@pytest.fixture
def folder(tmp_path):
    """A profile of LLMServingSim's second profiler."""
    root = tmp_path / "bf16"
    (root / "tp1").mkdir(parents=True)
    (root / "meta.yaml").write_text("gpu: H100\nmodel: meta-llama/Llama-3.1-8B\nvariant: bf16\n")
    lines = [f"gate_up_proj,{n},{100 + n}" for n in range(1, 65)]
    (root / "tp1" / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *lines]))
    return root


@pytest.fixture
def old(tmp_path):
    tokens = np.arange(1, 65)
    columns = {"operator": ["mlp up"] * 64, "tp": [1] * 64, "tokens": tokens, "seconds": (100 + tokens) / 1e6}
    metadata = ProfileFacts("own", "lengthwise", "H100", "llama-3.1-8b", notes=("made by hand",))
    write_profile(Profile(metadata, columns | {"dtype": ["bfloat16"] * 64}), tmp_path / "old.parquet")
    return tmp_path / "old.parquet"


def slowed(path, factor):
    profile = read_profile(path)
    new = path.with_name("new.parquet")
    write_profile(replace(profile, columns=profile.columns | {"seconds": profile["seconds"] * factor}), new)
    return new


def test_import_writes_a_profile_and_reports_its_content(cli, folder, tmp_path):
    finished = cli("profile", "import", "llmservingsim", folder, "--out", tmp_path / "p.parquet")
    assert finished.code == 0
    assert "64 points of 1 operator: llama-3.1-8b at TP 1 on H100" in finished.out
    assert "tp 1 has no attention.csv" in finished.out
    profile = read_profile(tmp_path / "p.parquet")
    assert profile["seconds"][0] == pytest.approx(101e-6)


def test_a_missing_import_source_exits_with_2(cli, folder, tmp_path):
    out = tmp_path / "p.parquet"
    finished = cli("profile", "import", "llmservingsim", tmp_path / "none", "--out", out)
    assert (finished.code, out.exists()) == (2, False)
    assert "must be a folder with tp1/" in finished.err
    finished = cli("profile", "import", "vidur", folder, "--model", "llama-2-7b", "--device", "a100", "--out", out)
    assert finished.code == 2
    assert "must hold a folder for a100; it holds none" in finished.err
    finished = cli("profile", "import", "vidur", folder, "--model", "lama-2-7b", "--device", "a100", "--out", out)
    assert finished.code == 2
    assert "Did you mean: llama-2-7b" in finished.err
    finished = cli("profile", "import", "aiconfigurator", folder, "--system", "h200_sxm", "--out", out)
    assert finished.code == 2
    assert "there is no system named 'h200_sxm'. Known are: tp1" in finished.err


def test_import_into_a_missing_folder_ends_with_2_before_it_reads(cli, tmp_path):
    finished = cli("profile", "import", "llmservingsim", tmp_path / "none", "--out", tmp_path / "no" / "p.parquet")
    assert finished.code == 2
    assert "create it first" in finished.err


def test_show_prints_sizes_times_and_gaps(cli, old):
    finished = cli("profile", "show", old)
    assert finished.code == 0
    assert "tokens 1 to 64" in finished.out
    assert "101 us to 164 us" in finished.out
    assert "no points at tokens 65 to 8,192: mlp up" in finished.out
    assert "note: made by hand" in finished.out


def test_show_fits_a_hundred_columns_however_much_it_contains(cli, folder, tmp_path):
    """Sizes and gaps are broken between words; names and times stay whole."""
    out = tmp_path / "long.parquet"
    cli("profile", "import", "llmservingsim", folder, "--out", out)
    profile = read_profile(out)
    long = replace(profile.metadata, name="name " * 30)
    write_profile(replace(profile, metadata=long), out)
    finished = cli("profile", "show", out)
    assert finished.code == 0
    lines = finished.out.splitlines()
    table = [line for line in lines if re.search(r"\S {2,}\S.* {2,}\S", line)]
    assert len(table) > 1
    assert 60 < max(map(len, table)) <= 100
    assert "101 us to 164 us" in finished.out


CPU = """
[one-thread]
peak_flops = { float32 = 1e11 }
memory_bytes = 16e9
bandwidth_bytes_per_s = 4e10
tdp_w = 10
idle_w = 1
price_per_hour_usd = 0.1
price_source = "none"
source = "a test"
"""


def test_show_draws_the_roofline_of_a_device_and_a_model_that_are_given(cli, old, tmp_path):
    """A profile of neither in the catalog, as one of this machine is."""
    profile, cpu, config = read_profile(old), tmp_path / "cpu.toml", tmp_path / "config.json"
    metadata = replace(profile.metadata, gpu="AMD EPYC", model="small")
    columns = profile.columns | {"dtype": np.array(["float32"] * 64), "seconds": profile["seconds"] * 1000}
    write_profile(Profile(metadata, columns), old)
    cpu.write_text(CPU)
    keys = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
    keys["max_position_embeddings"] = 1024
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, "torch_dtype": "float32"} | keys))
    finished = cli("profile", "show", old)
    assert "no roofline: the catalog has no GPU 'AMD EPYC'; give it (--gpu" in finished.out
    finished = cli("profile", "show", old, "--gpu", cpu)
    assert "no roofline: the catalog has no model 'small'; give it (--model" in finished.out
    finished = cli("profile", "show", old, "--gpu", cpu, "--model", config, "--json", tmp_path / "p.json")
    assert finished.code == 0, finished.err
    assert "no roofline" not in finished.out
    (one,) = json.loads((tmp_path / "p.json").read_text())["operators"]
    flops = 2 * 64 * 512 * 2 * 2048
    assert one["best"]["roofline"] == pytest.approx(flops / 1e11 / 0.164, rel=0.01)
    finished = cli("profile", "show", old, "--gpu", "H1000")
    assert finished.code == 2
    assert "H1000" in finished.err


def test_show_writes_a_page_and_json(cli, old, tmp_path):
    finished = cli("profile", "show", old, "--report", tmp_path / "p.html", "--json", "-")
    assert finished.code == 0
    assert json.loads(finished.out)["operators"][0]["seconds"] == [pytest.approx(101e-6), pytest.approx(164e-6)]
    assert "Matrix products, TP 1" in (tmp_path / "p.html").read_text()


def test_show_of_no_profile_ends_with_2(cli, tmp_path):
    (tmp_path / "p.parquet").write_text("nothing")
    for path in (tmp_path / "p.parquet", tmp_path / "none.parquet"):
        finished = cli("profile", "show", path)
        assert finished.code == 2
        assert path.name in finished.err


def test_check_ends_with_0_where_nothing_moved(cli, old):
    finished = cli("profile", "check", slowed(old, 1.01), old)
    assert finished.code == 0
    assert "no operator changed by more than 5 %" in finished.out


def test_check_ends_with_1_and_names_what_moved(cli, old):
    finished = cli("profile", "check", slowed(old, 1.2), old)
    assert finished.code == 1
    assert "changed by more than 5 %: mlp up" in finished.out
    assert cli("profile", "check", slowed(old, 1.2), old, "--tolerance", "0.3").code == 0


def test_check_writes_json(cli, old):
    finished = cli("profile", "check", slowed(old, 1.2), old, "--json", "-")
    assert finished.code == 1
    assert json.loads(finished.out)["changed"] == 2


def test_check_of_another_model_ends_with_2(cli, old, tmp_path):
    profile = read_profile(old)
    other = replace(profile, metadata=replace(profile.metadata, model="qwen3-8b"))
    write_profile(other, tmp_path / "other.parquet")
    finished = cli("profile", "check", tmp_path / "other.parquet", old)
    assert finished.code == 2
    assert "both profiles must be of one model" in finished.err
    assert cli("profile", "check", old, old, "--tolerance", "-1").code == 2


def test_the_help_lists_the_exit_codes(cli):
    assert "with 1 if some did" in " ".join(cli("profile", "check", "--help").out.split())
