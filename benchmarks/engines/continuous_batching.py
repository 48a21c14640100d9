# ruff: noqa: SLF001
"""transformers' continuous batching as an engine: reads runs from stdin, writes their records to files.

    python continuous_batching.py CONFIG [FLAGS]

CONFIG is a model's folder, or a config.json, of which a model of random weights is made on the device. A run is a line
of JSON: {"out": file, "arrival_s", "prompt_tokens", "output_tokens": [...], "concurrency": null or a number}; its file
gets a JSON object, then stdout the line "done". The first line is "ready" and the engine's metadata. Only torch and
transformers are needed.
"""

import argparse
import gc
import inspect
import json
import os
import platform
import random
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

try:
    from transformers import ContinuousBatchingConfig
except ImportError:
    from transformers.generation import ContinuousBatchingConfig

now = time.perf_counter
WAIT_S = 60.0
OPTIONS = {"device": "cpu", "dtype": "float32", "attention": "paged|sdpa,sdpa", "blocks": 512, "block-size": 32}
OPTIONS |= {"batch-tokens": 512, "seqs": 32, "threads": 1}
"""Kinds of attention are tried in their order."""


def accepted(function, **words):
    """Return the arguments that this version accepts."""
    return {name: value for name, value in words.items() if name in inspect.signature(function).parameters}


def made_model(given):
    """Return the model on its device, and its attention, whose names differ between versions."""
    dtype, path = getattr(torch, given.dtype), Path(given.config)
    errors = []
    for attention in given.attention.split(","):
        try:
            if (path / "model.safetensors").exists():
                model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
            else:
                config = AutoConfig.from_pretrained(path)
                torch.manual_seed(0)
                with torch.device(given.device):
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
            model = model.to(given.device).eval()
            manager = model.init_continuous_batching(**settings(given))
        except (ValueError, ImportError, KeyError) as error:
            errors.append(f"{attention}: {error}")
        else:
            return model, manager, attention
        model = None  # or two of them would be on the device
        gc.collect()
    sys.exit("no attention that continuous batching takes: " + "; ".join(errors))


def settings(given):
    """Return the manager's settings: greedy, no end of sequence, no optimization that hides the cost of a step."""
    sizes = {"num_blocks": given.blocks, "page_size": given.block_size, "block_size": given.block_size}
    sizes |= {"max_batch_tokens": given.batch_tokens, "max_requests_per_batch": given.seqs}
    off = ("use_async_batching", "auto_switch_to_flash", "use_cuda_graph", "allow_block_sharing")
    words = sizes | {"scheduler_type": "fifo"} | dict.fromkeys(off, False)
    words = accepted(ContinuousBatchingConfig, **words)
    if "page_size" in words:
        words.pop("block_size", None)
    greedy = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    init, batching = continuous_api.ContinuousMixin.init_continuous_batching, ContinuousBatchingConfig(**words)
    return accepted(init, generation_config=greedy, continuous_batching_config=batching)


def end_with_parent():
    """End this process soon after its parent, in any state."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


class Steps:
    """A row per step, recorded by wrapping two methods of the engine's loop."""

    def __init__(self):
        self.rows, self.done, self.prompts, self.current = [], {}, {}, None
        loop, work = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
        self._body, self._step = loop._generation_loop_body, work._generation_step
        steps = self
        loop._generation_loop_body = lambda *args, **words: steps._loop(*args, **words)  # noqa: PLW0108 - binds
        work._generation_step = lambda *args, **words: steps._work(*args, **words)  # noqa: PLW0108 - binds

    def _loop(self, manager, *args, **words):
        self.current, start_s, cpu_s = None, now(), time.thread_time()
        result = self._body(manager, *args, **words)
        if self.current is not None:
            self.rows.append([start_s, now(), time.thread_time() - cpu_s, *self.current])
        return result

    def _work(self, processor, *args, **words):
        prefill_seqs = prefill_tokens = decode_seqs = kv_tokens = pairs = 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            name, chunk = future.state.request_id, future.query_length
            context = self.done.get(name, 0)
            if context < self.prompts.get(name, 0):
                prefill_seqs, prefill_tokens = prefill_seqs + 1, prefill_tokens + chunk
            else:
                decode_seqs += 1
            kv_tokens += context + chunk
            pairs += chunk * context + chunk * (chunk + 1) // 2
            self.done[name] = context + chunk
        self.current = (prefill_seqs, prefill_tokens, decode_seqs, kv_tokens, pairs)
        return self._step(processor, *args, **words)

    COLUMNS = ("start_s", "end_s", "cpu_s", "prefill_seqs", "prefill_tokens", "decode_seqs", "kv_tokens", "pairs")


class Engine:
    """Sends requests at their times and records the times of their tokens."""

    def __init__(self, given):
        self.steps = Steps()
        self.model, self.manager, self.attention = made_model(given)
        self.vocab = self.model.config.vocab_size
        self.random = random.Random(0)
        self.runs = 0
        self.manager.start()

    def run(self, desired):
        """Return records of the requests and steps of a run; times count from its start."""
        self.runs += 1
        prompt, output = desired["prompt_tokens"], desired["output_tokens"]
        n, most = len(prompt), desired.get("concurrency") or len(prompt)
        names = {f"{self.runs}:{i}": i for i in range(n)}
        prompts = [[self.random.randrange(self.vocab // 8, self.vocab) for _ in range(length)] for length in prompt]
        self.steps.rows, self.steps.done, self.steps.prompts = [], {}, dict(zip(names, prompt, strict=True))
        words = accepted(self.manager.add_request, record_timestamps=True, eos_token_id=-1)
        rows, sent_s, sent, finished, start_s = [None] * n, [0.0] * n, 0, 0, now()
        deadline_s = [start_s + s for s in desired["arrival_s"]]
        while finished < n:
            while sent < n and sent - finished < most and now() >= deadline_s[sent]:
                sent_s[sent] = now() - start_s
                name = f"{self.runs}:{sent}"
                self.manager.add_request(prompts[sent], request_id=name, max_new_tokens=output[sent], **words)
                sent += 1
            waits = sent < n and sent - finished < most
            result = self.manager.get_result(timeout=max(0.0, deadline_s[sent] - now()) if waits else WAIT_S)
            if result is None:
                if not self.manager.is_running():
                    sys.exit(f"the engine's loop exited: {self.manager.background_thread_status.fatal_error}")
            elif result.is_finished() and result.request_id in names:
                rows[names[result.request_id]] = {
                    "output_tokens": len(result.generated_tokens),
                    "token_s": [s - start_s for s in (result.timestamps or [])],
                    "error": result.error,
                }
                finished += 1
        return {
            "requests": rows, "sent_s": sent_s, "end_s": now() - start_s, "step_columns": Steps.COLUMNS,
            "steps": [[row[0] - start_s, row[1] - start_s, *row[2:]] for row in self.steps.rows],
        }  # fmt: skip


def metadata(given, engine):
    names = ("dtype", "batch_tokens", "seqs", "blocks", "block_size")
    cpu = platform.processor() or platform.machine()
    found = {"engine": f"transformers {transformers.__version__} continuous batching", "torch": torch.__version__}
    found["device"] = cpu if given.device == "cpu" else torch.cuda.get_device_name()
    found |= {"attention": engine.attention, "threads": torch.get_num_threads()}
    return found | {"python": platform.python_version()} | {name: getattr(given, name) for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    end_with_parent()
    torch.set_num_threads(given.threads)
    engine = Engine(given)
    print("ready " + json.dumps(metadata(given, engine)), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        Path(wanted["out"]).write_text(json.dumps(engine.run(wanted)))
        print("done", flush=True)
    engine.manager.stop(block=True)


if __name__ == "__main__":
    main()
