"""Two sources of requests in one scenario: an error, or the later one with a note; never in silence."""

from __future__ import annotations

import pytest

from lengthwise.config import load, loads
from lengthwise.schema.errors import InputError, ScenarioError
from lengthwise.usecases.variants import build

SERVED = '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "H100"\n'
TRACE = '[workload]\ntrace = "t.csv"\n'
SIDES = "isl = 100\nosl = 20\n"


@pytest.fixture
def scenario(tmp_path):
    def written(workload):
        path = tmp_path / "s.toml"
        path.write_text(workload + SERVED)
        return path

    return written


def test_a_trace_with_distributions_is_an_error_that_names_both_and_the_remedy(scenario):
    with pytest.raises(ScenarioError, match=r"trace, prompt and output cannot all .* --set workload.trace=null"):
        load(scenario(TRACE + SIDES))


def test_either_of_them_is_dropped_by_null_and_the_other_stays(scenario):
    path = scenario(TRACE + SIDES + "request_rate = 2\n")
    retained = load(path, ["workload.trace=null"]).workload
    assert (retained.trace, retained.prompt is None) == (None, False)
    retained = load(path, ["workload.isl=null", "workload.osl=null"]).workload
    assert (retained.trace, retained.prompt) == ("t.csv", None)
    assert retained.request_rate == 2


def test_an_override_that_replaces_another_source_is_noted(scenario):
    path = scenario("[workload]\nrequest_rate = 2\n" + SIDES)
    changed = load(path, ["workload.trace=t.csv"])
    assert changed.workload.trace == "t.csv"
    (note,) = changed.notes
    assert "--set workload.trace takes the place of workload.prompt and workload.output" in note
    assert changed.with_run(seeds=2).notes == changed.notes
    assert [side.notes for side in changed.variant_scenarios()] == [changed.notes]
    assert load(path, ["workload.num_requests=5"]).notes == ()
    assert load(path, ["workload.request_rate=3"]).notes == ()
    (load_note,) = load(path, ["workload.concurrency=3"]).notes
    assert "workload.request_rate" in load_note


def test_a_setting_that_variants_set_themselves_is_noted():
    text = """
    [deployment]
    model = "llama-3-8b"
    gpu = "H100"
    [workload]
    isl = 10
    osl = 10
    request_rate = 1
    [[variants]]
    name = "a"
    deployment.tp = 2
    [[variants]]
    name = "b"
    """
    (note,) = loads(text, overrides=["deployment.tp=4", "deployment.replicas=2"]).notes
    assert note == "--set deployment.tp does not change the variants that set it themselves: 'a'"


def test_a_table_that_an_override_gives_changes_variants_that_set_other_keys_of_it():
    text = "[workload]\nisl = 9\nosl = 9\nrequest_rate = 1\n" + SERVED
    variants = '[[variants]]\nname = "a"\nengine.max_num_seqs = 8\n[[variants]]\nname = "b"\nengine.name = "vllm"\n'
    found = loads(text + variants, overrides=["engine=sglang", "engine={block_size=32}"])
    assert found.notes == ("--set engine does not change the variants that set it themselves: 'b'",)
    engines = [(one.engine.name, one.engine.block_size) for one in found.variant_scenarios()]
    assert engines == [("sglang", 32), ("vllm", 32)]


def test_variants_give_the_size_of_a_cpu_memory_whose_other_keys_are_shared():
    text = "[workload]\nisl = 9\nosl = 9\nrequest_rate = 1\n" + SERVED
    variants = '[[variants]]\nname = "a"\nengine.kv_offloading.size_gb = 64\n[[variants]]\nname = "b"\n'
    shared = ["engine.kv_offloading.load=if_faster", "engine.kv_offloading.storage.shared=true"]
    found = loads(text + variants, overrides=shared)
    assert found.notes == ("engine.kv_offloading has no size_gb, and thus no effect, in 'b'",)
    memory = found.only("a").engine.kv_offloading
    assert (memory.size_gb, memory.load, memory.storage.shared) == (64, "if_faster", True)
    for lacking in (text, text + '[[variants]]\nname = "b"\n'):
        with pytest.raises(ScenarioError, match=r"^scenario: engine.kv_offloading.size_gb: is missing$"):
            loads(lacking, overrides=shared)


def test_the_error_of_a_variant_without_cpu_memory_names_it():
    text = "[workload]\nisl = 9\nosl = 9\nrequest_rate = 1\n" + SERVED + "[engine]\nenable_prefix_caching = true\n"
    variants = '[[variants]]\nname = "a"\nengine.kv_offloading.size_gb = 64\n[[variants]]\nname = "b"\n'
    with pytest.raises(InputError, match=r"storage needs CPU memory") as caught:
        build(loads(text + variants, overrides=["engine.kv_offloading.storage.shared=true"]))
    assert caught.value.__notes__ == ["in variant 'b' of scenario"]
