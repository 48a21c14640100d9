"""A real vLLM in one process with all requests there from the beginning: run in the engine's environment.

python rra_offline.py MODEL_DIR JSON: the engine's arguments, prompts and lengths; prints what each request got, and
the steps (prompt tokens, decodes) that the workers were given.
"""

import json
import os
import sys
from dataclasses import asdict

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm
from vllm import LLM, SamplingParams, TokensPrompt

REQUESTED = json.loads(sys.argv[2])
if "version" in REQUESTED:
    vllm.__version__ = REQUESTED["version"]


def main(model):
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        disable_log_stats=False,
        **REQUESTED["engine"],
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    steps, plain = [], scheduler.schedule

    def watched(*args, **named):
        decoding = {
            one.request_id
            for one in scheduler.running
            if not one.is_prefill_chunk and one.num_computed_tokens >= one.num_prompt_tokens
        }
        reported = plain(*args, **named)
        tokens = reported.num_scheduled_tokens
        decodes = sum(name in decoding for name in tokens)
        if tokens:
            steps.append([sum(n for name, n in tokens.items() if name not in decoding), decodes])
        return reported

    scheduler.schedule = watched
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in REQUESTED["prompts"]]
    wanted = [
        # Without the penalty random weights repeat one token for ever, and any mistake would look the same.
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, frequency_penalty=2.0)
        for n in REQUESTED["lengths"]
    ]
    reported = engine.generate(prompts, wanted, use_tqdm=False)
    rules = getattr(scheduler, "lengthwise", None)
    metrics = {one.name: getattr(one, "value", None) for one in engine.get_metrics()}
    print(
        json.dumps(
            {
                "outputs": [list(one.outputs[0].token_ids) for one in reported],
                "steps": steps,
                "phases": [asdict(one) for one in rules.tracker.phases] if rules is not None else None,
                "preemptions": metrics.get("vllm:num_preemptions"),
                "cached": metrics.get("vllm:prefix_cache_hits"),
            }
        )
    )


main(sys.argv[1])
