"""The guide to calibration, walked as a new user would: its own file and commands, on a vLLM of this machine.

What a reader has to fill in is filled in (URL, model, device, limits, rates as shares of what the engine can take), and
budgets are cut: a tiny model, tens of requests, seconds of profiling.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lengthwise import Status, config
from lengthwise.measure import read_records
from lengthwise.usecases import variants

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))
from documents import blocks, prose  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.usefixtures("engine_python", "torch")]

GUIDE = ROOT / "docs" / "guide-calibrate.md"
PROGRAM = Path(sys.executable).with_name("lengthwise")
SLOTS, STEP_TOKENS, LONGEST, BLOCK, NUM_BLOCKS = 16, 512, 512, 32, 256
LOW, LOADED, FULL, TWICE = 60, 80, 64, 30
"""Requests of the low load, of the others, of the run that tells what the engine can take, and of a repeated one."""
SHARES = {"half": 0.5, "high": 0.85}
SMALL_SEARCH = "--set search.precision=0.3 --set search.seeds=2 --set search.sensitivity=false"

FILE = {
    'preset = "chat-1m"': 'isl = { kind = "lognormal", mean = 60, cv = 0.7 }\n'
    'osl = { kind = "lognormal", mean = 24, cv = 0.5 }',
    "num_requests = 300": f"num_requests = {LOADED}",
    'model = "llama-3.1-8b"': 'model = "tiny/config.json"',
    'gpu = "H100"': 'gpu = "cpu.toml"',
    "num_blocks = 28331": f"num_blocks = {NUM_BLOCKS}",
    "max_num_seqs = 256": f"max_num_seqs = {SLOTS}",
    "max_num_batched_tokens = 2048": f"max_num_batched_tokens = {STEP_TOKENS}",
    "max_model_len = 8192": f"max_model_len = {LONGEST}\nblock_size = {BLOCK}",
}
"""What stands in the guide's file, and what an engine here needs instead."""
COMMANDS = {
    "http://localhost:8000": "{url}",
    "--concurrency 4 --num-requests 100": f"--concurrency 4 --num-requests {LOW}",
    "--request-rate 3 ": "--request-rate {half} ",
    "--request-rate 5 ": "--request-rate {high} ",
    # client and engine share two cores: the guide's way for a first look
    "--out cost.npz": "--out cost.npz --allow-warnings --json calibration.json",
    "--limit ttft.p90=1s": f"--limit ttft.p90=1s {SMALL_SEARCH} --json capacity.json",
    "simulate mine.toml --cost tables:cost.npz": "simulate mine.toml --cost tables:cost.npz --json calibrated.json",
    # How close they are depends on what else this machine does between the profile and the load.
    "jct.p50=0.10": "jct.p50=3",
    "tpot.p50=0.05": "tpot.p50=3",
    "--model llama-3.1-8b --tp 1,2,4 --budget 5m": "--model tiny/config.json --device cpu --threads 1 --budget 12s "
    f"--max-tokens {STEP_TOKENS} --max-seqs {SLOTS} --max-context {LONGEST}",
    "--model llama-3.1-8b --gpu H100 --tp 2": "--model tiny/config.json --gpu cpu.toml "
    f"--max-num-seqs {SLOTS} --max-num-batched-tokens {STEP_TOKENS} --max-model-len {LONGEST}",
}
"""The same for its commands."""
CAPACITY = "--concurrency 256 --num-requests 600"
"""Of the run that the guide's prose asks for once."""
AS_READERS_HAVE_IT = ("--enable-prefix-caching",)
"""vLLM's default, which ours for a simulated deployment takes away."""
AGAIN, REPEATED = ("once", "twice"), f"--concurrency 4 --num-requests {TWICE} --salt 1"
"""What the guide warns of: the same prompts twice."""
NOT_HERE = "profile import"
"""Others' measurements: their files are not the reader's, and tests of importers read them."""


class Walk:
    """A folder in which commands are run, and how long they took."""

    def __init__(self, place: Path) -> None:
        self.place, self.seconds = place, {}

    def run(self, words: str) -> str:
        """What a command prints; it must end with 0."""
        started = time.monotonic()
        done = self._done(words)
        self.seconds[words] = time.monotonic() - started
        assert done.returncode == 0, f"lengthwise {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def refused(self, words: str) -> str:
        """The message of a command that refuses its arguments; it must not end with 0."""
        done = self._done(words)
        assert done.returncode == 2, f"lengthwise {words}\n{done.stdout}\n{done.stderr}"
        return " ".join(done.stderr.split())

    def _done(self, words: str) -> subprocess.CompletedProcess:
        command = [str(PROGRAM), *shlex.split(words)]
        return subprocess.run(command, cwd=self.place, capture_output=True, text=True, timeout=400, check=False)

    def numbers(self, name: str) -> dict:
        """A file of JSON that a command wrote."""
        return json.loads((self.place / name).read_text("utf-8"))


def filled(text: str, table: dict[str, str]) -> str:
    """The text with what the table names put in its place."""
    for reported, folder in table.items():
        text = text.replace(reported, folder)
    return text


def walked() -> list[str]:
    """The guide's commands in their order, without what is installed and what others measured."""
    lines = [line for b in blocks(GUIDE) if b.language == "sh" for line in b.text.splitlines()]
    words = [line.removeprefix("lengthwise ") for line in lines if line.startswith("lengthwise ")]
    return [line for line in words if not line.startswith(NOT_HERE)]


def parts() -> tuple[list[str], list[str], list[str]]:
    """The guide's commands before the engine is put under load, those that do so, and those after."""
    lines = walked()
    loads = [i for i, line in enumerate(lines) if line.startswith("bench ")]
    return lines[: loads[0]], lines[loads[0] : loads[-1] + 1], lines[loads[-1] + 1 :]


def write_device(path: Path) -> None:
    """One thread of this machine as in the guide: described like a GPU, in a file of its own."""
    import _circle

    spec = _circle.this_thread()
    keys = ("memory_bytes", "bandwidth_bytes_per_s", "tdp_w", "idle_w", "price_per_hour_usd", "price_source", "source")
    keys = (*keys, "is_cpu")
    lines = [f"[{json.dumps(spec.name)}]", f"peak_flops = {{ float32 = {spec.peak_flops['float32']} }}"]
    path.write_text("\n".join([*lines, *(f"{key} = {json.dumps(getattr(spec, key))}" for key in keys), ""]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny, torch):
    """The guide's commands up to the last load on the engine, run; what they wrote lies in the folder."""
    import _vllm

    place = tmp_path_factory.mktemp("guide")
    (place / "tiny").symlink_to(tiny)
    write_device(place / "cpu.toml")
    (file,) = (block for block in blocks(GUIDE) if block.title == "mine.toml")
    (place / "mine.toml").write_text(filled(file.text, FILE))
    served, log = variants.deployment(config.load(place / "mine.toml")), place / "engine" / "vllm.log"
    log.parent.mkdir()
    made, (before, loads, _) = Walk(place), parts()
    for line in before:
        made.run(filled(line, COMMANDS))
    with _vllm.served(served, tiny, log, *AS_READERS_HAVE_IT) as engine:
        full = CAPACITY.replace("256", str(SLOTS)).replace("600", str(FULL))
        made.run(f"bench {engine.url} mine.toml {full} --json full.json")
        rate_rps = made.numbers("full.json")["results"][0]["summary"]["rates"]["requests_per_s"]["value"]
        values = {"{url}": engine.url} | {f"{{{load}}}": f"{share * rate_rps:.3g}" for load, share in SHARES.items()}
        for line in loads:
            made.run(filled(filled(line, COMMANDS), values))
        for name in AGAIN:
            made.run(f"bench {engine.url} mine.toml {REPEATED} --records {name}.parquet")
        engine.check()
    return made


@pytest.fixture(scope="module")
def walk(measured):
    """All of the guide's commands, run."""
    for line in parts()[2]:
        measured.run(filled(line, COMMANDS))
    measured.run(
        "search mine.toml --cost tables:cost.npz --set search.max_gpus=1 --set search.limits.ttft.p90=1s "
        f"--set search.space.max_num_seqs=[8,{SLOTS}] {SMALL_SEARCH} --json plan.json"
    )
    took = "\n".join(f"{seconds:6.1f} s  {words}" for words, seconds in measured.seconds.items())
    print(f"the guide's commands took {sum(measured.seconds.values()) / 60:.1f} min\n{took}")
    return measured


def test_all_that_is_filled_in_stands_in_the_guide():
    """A guide that changes is noticed here, before anything is left as it stands there."""
    (file,) = (block for block in blocks(GUIDE) if block.title == "mine.toml")
    assert [reported for reported in FILE if reported not in file.text] == []
    assert [reported for reported in COMMANDS if reported not in "\n".join(walked())] == []
    assert CAPACITY in prose(GUIDE)
    names = {" ".join(line.split()[: 1 + line.startswith("profile")]) for line in walked()}
    steps = {"bench", "calibrate", "capacity", "compare", "simulate"}
    assert names == steps | {f"profile {step}" for step in ("fit", "run", "show")}


@pytest.mark.parametrize(("load", "requests"), [("low", LOW), ("half", LOADED), ("high", LOADED), ("prefix", LOADED)])
def test_every_sent_request_is_answered_to_the_token(measured, load, requests):
    one = read_records(measured.place / f"{load}.parquet")
    r = one.records.requests
    assert len(one.workload) == requests
    assert (r.status == Status.FINISHED).all(), one.errors
    np.testing.assert_array_equal(r.prompt_tokens, one.workload.prompt_tokens)
    np.testing.assert_array_equal(r.output_tokens, one.workload.output_tokens)


@pytest.mark.parametrize("load", ["low", "half", "high"])
def test_the_engines_prefix_cache_answers_none_of_the_guides_loads(measured, load):
    one = read_records(measured.place / f"{load}.parquet")
    reported, requested = one.metadata["prefix_cache"], one.records.requests.prompt_tokens.sum()
    assert reported["looked_up_tokens"] == requested  # it is on
    assert reported["found_tokens"] <= 0.01 * requested


def test_prompts_cached_by_the_engine_are_found_warned_about_and_refused(measured):
    once, twice = (read_records(measured.place / f"{name}.parquet") for name in AGAIN)
    assert once.metadata["prefix_cache"]["found_tokens"] <= 0.01 * once.records.requests.prompt_tokens.sum()
    assert twice.metadata["prefix_cache"]["found_tokens"] > 0.3 * twice.records.requests.prompt_tokens.sum()
    assert any("in its prefix cache" in warning for warning in twice.warnings)
    message = measured.refused("calibrate mine.toml low.parquet high.parquet --holdout twice.parquet --out no.npz")
    assert "in its prefix cache" in message
    assert not (measured.place / "no.npz").exists()


def test_the_very_requests_that_were_measured_are_simulated(walk):
    real, message = (read_records(walk.place / f"{name}.parquet").records for name in ("half", "simulated"))
    assert (message.requests.status == Status.FINISHED).all()
    for column in ("prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(message.requests, column), getattr(real.requests, column))


def test_on_the_held_out_run_calibrated_errors_are_smaller(walk):
    found = walk.numbers("calibration.json")
    scores = [score for score in found["scores"] if score["statistic"] != "each"]
    assert {score["metric"] for score in scores} == {"ttft", "tpot", "jct"}
    middle = {when: statistics.median(abs(score[when]) for score in scores) for when in ("before", "after")}
    assert middle["after"] < middle["before"], middle


def test_the_cost_file_is_taken_and_brings_intervals_of_the_model(walk):
    (reported,) = walk.numbers("calibrated.json")["results"]
    assert "calibrated to 3 measured runs" in reported["deployment"]["cost_source"]
    assert reported["model_error"]["parts"]
    jct = reported["summary"]["jct_s"]["p50"]
    assert jct["model_low"] < jct["value"] < jct["model_high"]


def test_the_cost_file_gives_search_and_capacity_the_same_result(walk):
    (alone,) = walk.numbers("capacity.json")["capacities"]
    choices = {one["settings"]["engine.max_num_seqs"]: one for one in walk.numbers("plan.json")["plans"][0]["choices"]}
    assert set(choices) == {8, SLOTS}
    assert choices[SLOTS]["status"] == "ranked"
    assert choices[SLOTS]["capacity_rps"]["value"] == pytest.approx(alone["requests_per_s"]["value"])


def test_pages_requested_by_the_guide_are_written(walk):
    for page in ("errors.html", "profile.html"):
        assert "<html" in (walk.place / page).read_text("utf-8")
