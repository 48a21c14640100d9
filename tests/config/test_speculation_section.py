"""``[deployment.speculation]``: from a file to a deployment, what it costs, and where it is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from lengthwise import backend, catalog, config, metrics
from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.search.bounds import ceiling
from lengthwise.usecases import simulate as usecase
from lengthwise.usecases.explain import explain
from lengthwise.usecases.variants import build, speculation

TEXT = """
[workload]
prompt = 300
output = 100
request_rate = 2.0
num_requests = 60
[deployment]
model = "llama-3.1-8b"
gpu = "H100"
[deployment.speculation]
method = "%s"
num_speculative_tokens = 3
acceptance = [0.7, 0.6, 0.5, 0.4]
[engine]
max_num_seqs = 64
max_model_len = 4096
[run]
model_draws = 0
"""
RATES = (0.7, 0.6, 0.5)


def built(method="eagle", *over):
    return build(config.loads(TEXT % method, overrides=over))[0].deployment


def test_a_file_describes_the_drafter_and_its_acceptance():
    made = built().speculation
    assert (made.method, made.num_speculative_tokens, made.rates) == ("eagle", 3, RATES)
    assert made.tokens_per_step == pytest.approx(1 + 0.7 + 0.42 + 0.21)
    assert built("eagle", "deployment.speculation.num_speculative_tokens=0").speculation is None
    ranges = built("eagle", "deployment.speculation.num_speculative_tokens_per_batch_size=[[1, 4, 3], [8, 16, 1]]")
    assert ranges.speculation.drafts_by_seqs(20).tolist() == [3] * 8 + [1] * 13


def test_acceptance_has_a_default_for_mtp_alone():
    text = TEXT.replace("acceptance = [0.7, 0.6, 0.5, 0.4]\n", "")
    made = speculation(config.loads(text % "mtp", overrides=["deployment.model=deepseek-v3"]))
    assert made.tokens_per_step == pytest.approx(2.5, abs=0.01)  # what was published
    with pytest.raises(InputError, match='method = "eagle" needs acceptance, which is missing'):
        speculation(config.loads(text % "eagle"))


def test_the_drafter_takes_memory():
    without = deploy("llama-3.1-8b", "H100", limits=EngineLimits(max_num_seqs=64, max_model_len=4096))
    ngram, eagle, draft = (
        built("ngram"),
        built(),
        built("draft_model", "deployment.speculation.draft_model=llama-3.2-1b"),
    )
    assert ngram.kv.num_blocks == without.kv.num_blocks
    layer = without.kv.kv_bytes_per_block / 32
    assert eagle.kv.kv_bytes_per_block == pytest.approx(33 * layer)
    assert eagle.kv.weight_bytes - without.kv.weight_bytes == pytest.approx(218e6 * 2, rel=0.02)
    assert draft.kv.weight_bytes - without.kv.weight_bytes == pytest.approx(1.24e9 * 2, rel=0.02)
    assert draft.kv.num_blocks < eagle.kv.num_blocks < ngram.kv.num_blocks
    assert built("eagle", "deployment.num_blocks=500").kv.num_blocks == 500


def test_a_step_costs_more_and_gives_more():
    requests = Workload(np.zeros(8), np.full(8, 300), np.full(8, 200))
    made = built()
    found = [simulate(requests, one) for one in (dataclasses.replace(made, speculation=None), made)]
    steps = [(one.steps.end_s - one.steps.start_s)[one.steps.prefill_seqs == 0] for one in found]
    assert 1.1 * steps[0].mean() < steps[1].mean() < 1.7 * steps[0].mean()
    assert found[1].speculation.tokens_per_step == pytest.approx(made.speculation.tokens_per_step, rel=0.05)
    assert found[1].end_s < 0.8 * found[0].end_s
    hardware = metrics.hardware_of(found[1], made)
    assert hardware.tokens_per_step.value == found[1].speculation.tokens_per_step
    assert sum(share.value for share in hardware.time_shares.values()) == pytest.approx(1)
    assert hardware.time_shares["drafter"].value > 0.05


def test_many_sequences_make_verification_expensive():
    """Where steps are limited by computing, four tokens of a sequence cost four times one."""
    limits = EngineLimits(max_num_seqs=2048, max_num_batched_tokens=8192, max_model_len=600)
    chosen = Speculation("ngram", 3, 0.0)
    seconds = []
    for one in (None, chosen):
        made = deploy("llama-3.1-8b", "H100", limits=limits, speculation=one, num_blocks=2**18)
        steps = simulate(Workload(np.zeros(2048), np.full(2048, 4), np.full(2048, 60)), made).steps
        seconds.append(float((steps.end_s - steps.start_s)[steps.decode_seqs == 2048].mean()))
    assert 2.5 * seconds[0] < seconds[1] < 4.2 * seconds[0]


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_hits_by_hand(method):
    """The second of two equal prompts finds two blocks before its last token; EAGLE computes the last of them again."""
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=600, enable_prefix_caching=True)
    made = deploy("llama-3.1-8b", "H100", limits=limits, speculation=Speculation(method, 3, 0.0), num_blocks=99)
    prompts = SharedPrefixes(16, np.array([0, 2, 4]), np.array([0, 1, 0, 1]), np.full(2, -1))
    requests = Workload(np.array([0.0, 100.0]), np.full(2, 33), np.full(2, 1), prefixes=prompts)
    for engine in ("kernel", "reference"):
        found = simulate(requests, made, engine=engine)
        assert found.requests.cached_tokens.tolist() == [0, 32 if method == "ngram" else 16]
        # vLLM pads a single token to the size of a verification.
        assert found.steps.prefill_tokens.tolist() == [33, 1 + 3 if method == "ngram" else 17]


REFUSED = {
    "engine={ enable_prefix_caching = true, kv_offloading = { size_gb = 64.0 } }": "kv_offloading",
    "scheduler.async_scheduling=true": "async_scheduling",
    "deployment.pp=2": "pipeline parallelism",
    'scheduler.policy="sglang"': 'scheduler "sglang"',
    'scheduler.policy="vllm_v0"': "batching 'prefill_first'",
    "deployment.decode={ replicas = 1, preemption_mode = 'swap' }": "preemption_mode 'swap'",
    "engine.max_num_batched_tokens=200": "max_num_batched_tokens must be at least",
}  # fmt: skip


@pytest.mark.parametrize("setting", REFUSED)
def test_what_is_not_modelled_is_refused(setting):
    more = ["engine.max_num_batched_tokens=4096"] if "sglang" in setting else []
    with pytest.raises(InputError, match=re.escape(REFUSED[setting])) as caught:
        usecase.run(config.loads(TEXT % "eagle", overrides=[*more, setting]))
    assert "sglang" not in setting or "memory '" not in str(caught.value), "only what the user set"


MISTAKES = {
    "num_speculative_tokens=5": "at least 5 rates",
    "acceptance=1.5": "must be at most 1",
    "length_correlation=0.5": "needs a request_effect",
    "draft_model=llama-3.2-1b": "excludes a draft_model",
    "num_speculative_tokens_per_batch_size=[[2, 4, 3]]": "the first begins at 1",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_mistakes_are_named(setting):
    with pytest.raises(InputError, match=MISTAKES[setting]):
        built("eagle", f"deployment.speculation.{setting}")


CONFIGS = Path(__file__).parents[1] / "catalog/configs"
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def test_mtp_needs_a_model_with_its_modules():
    with pytest.raises(InputError, match=r'"mtp" needs a model with modules of .*llama-3.1-8b has none'):
        built("mtp")
    modules = {name: model.metadata.mtp_modules for name, model in catalog.models().items()}
    for name in filter(modules.get, modules):
        found = config.loads(TEXT % "mtp", overrides=[f"deployment.model={name}"])
        assert speculation(found).method == "mtp"
    for path in CONFIGS.glob("*.json"):
        table = json.loads(path.read_text())
        given = table | table.get("text_config", {})
        if path.stem not in ("qwen3-next-80b-a3b", "deepseek-v2-lite"):  # keys that the published files lack, or add
            assert max(given.get(key, 0) for key in MTP_KEYS) == modules[path.stem], path.stem


def test_a_draft_model_must_have_the_same_vocabulary():
    with pytest.raises(InputError, match="must have the vocabulary"):
        built("draft_model", "deployment.speculation.draft_model=opt-125m")
    with pytest.raises(InputError, match="needs a draft_model"):
        built("draft_model")


def test_explain_and_other_engines_refuse_it():
    (variant,) = build(config.loads(TEXT % "eagle3"))
    with pytest.raises(InputError, match="explain does not model speculative decoding"):
        explain(variant)
    for launch in (backend.sglang_launch, backend.trtllm_launch):
        with pytest.raises(InputError, match="does not model speculative decoding"):
            launch(variant.deployment)


def test_vllm_is_launched_with_it():
    def settings(deployment):
        command = backend.vllm_launch(deployment).command
        return json.loads(command[command.index("--speculative-config") + 1])

    assert settings(built()) == {"method": "eagle", "num_speculative_tokens": 3, "model": "DRAFTER"}
    assert settings(built("ngram")) == {"method": "ngram", "num_speculative_tokens": 3}
    draft = settings(built("draft_model", "deployment.speculation.draft_model=llama-3.2-1b"))
    assert draft["model"].startswith("meta-llama/")
    ranges = settings(
        built("eagle3", "deployment.speculation.num_speculative_tokens_per_batch_size=[[1, 4, 3], [8, 16, 1]]")
    )
    assert ranges["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [8, 16, 1]]


def test_a_decode_side_has_the_drafter_and_both_commands_name_it():
    made, alone = built("eagle", "deployment.decode={ tp = 2 }"), built("eagle")
    drafter = made.decode.speculation.drafter
    assert Speculation.are_alike(made.speculation, made.decode.speculation)
    assert drafter.layers == 1.0
    # EAGLE's layer of the KV cache is transferred, too.
    plain = built("eagle", "deployment.decode={ tp = 2 }", "deployment.speculation.num_speculative_tokens=0")
    share = made.decode.kv_transfer.bytes_per_token / plain.decode.kv_transfer.bytes_per_token
    assert share == pytest.approx(33 / 32)
    for launch in backend.split_launches(*made.sides):
        assert "--speculative-config" in launch.command
    other = dataclasses.replace(alone.speculation, num_speculative_tokens=2)
    for one in (other, None):
        different = dataclasses.replace(made, decode=dataclasses.replace(made.decode, speculation=one))
        with pytest.raises(InputError, match="both sides must have the same speculation"):
            simulate(Workload(np.zeros(1), np.ones(1, int), np.ones(1, int)), different)


def test_no_run_exceeds_the_bound_of_the_rate():
    made = built("ngram", "deployment.speculation.acceptance=1.0", "engine.max_num_seqs=16")
    requests = Workload(np.zeros(3000), np.full(3000, 20), np.full(3000, 101))
    found = simulate(requests, made)
    assert len(requests) / found.end_s < ceiling(made, requests).rate_rps
    assert found.speculation.tokens_per_step == 4.0


def test_a_search_varies_the_number_of_tokens():
    space = 'search.space={ "deployment.speculation.num_speculative_tokens" = [0, 1, 3] }'
    assert config.loads(TEXT % "eagle", overrides=[space]).search is not None
    with pytest.raises(InputError, match="must be at most 64"):
        config.loads(TEXT % "eagle", overrides=[space.replace("3]", "99]")])
