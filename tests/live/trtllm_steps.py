"""TensorRT-LLM's own scheduler, stepped without a model: python trtllm_steps.py SOURCES WORLDS.

SOURCES is a folder with TensorRT-LLM's package ``tensorrt_llm``. Of it only
``_torch/pyexecutor/scheduler/scheduler.py`` is executed, as it is. What that imports from compiled code, the requests
and the counts of KV blocks, are plain objects here, with the formulas of ``kvCacheManager.cpp`` (no reuse of blocks, no
sliding window) and ``llmRequest.h``. Reads a JSON list of worlds and prints a JSON list of their steps. A step is
[[[request, prompt tokens], ...], [decoding request, ...], [paused request, ...], free blocks], each list by request.
"""

import enum
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace

PACKAGE = "tensorrt_llm._torch.pyexecutor.scheduler"
WINDOW = 1 << 20


class State(enum.Enum):
    """States of a request, in TensorRT-LLM's order."""

    ENCODER_INIT = 1
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class Capacity(enum.Enum):
    """TensorRT-LLM's ``CapacitySchedulerPolicy``."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class Anything:
    """Stands for compiled classes that no world uses, and for the logger."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {"__getattr__": Anything.__getattr__}) if name[0].isupper() else Anything()

    def __call__(self, *_, **__):
        return None


def scheduler_of(sources):
    """Return the module of TensorRT-LLM's scheduler, executed with stand-ins for what it imports."""
    names = {"LlmRequest": object, "LlmRequestState": State}
    for unused in ("get_multimodal_encoder_token_lengths", "is_multimodal_encoder_ready"):
        names[unused] = None
    stand_ins = {
        "strenum": {"StrEnum": enum.StrEnum},
        "tensorrt_llm.bindings": {"internal": Anything()},
        "tensorrt_llm.llmapi.llm_args": {"CapacitySchedulerPolicy": Capacity},
        "tensorrt_llm.logger": {"logger": Anything()},
        "tensorrt_llm._torch.pyexecutor.llm_request": names,
        "tensorrt_llm": {}, "tensorrt_llm.llmapi": {}, "tensorrt_llm._torch": {}, "tensorrt_llm._torch.pyexecutor": {},
        PACKAGE: {}, f"{PACKAGE}.scheduler": {},
    }  # fmt: skip
    for name, members in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members, __path__=[])
    made = sys.modules[f"{PACKAGE}.scheduler"]
    made.__package__ = PACKAGE
    path = sources / "tensorrt_llm" / "_torch" / "pyexecutor" / "scheduler" / "scheduler.py"
    exec(compile("from __future__ import annotations\n" + path.read_text(), str(path), "exec"), vars(made))
    return made


class Request:
    """A request (``llmRequest.h``): a pause makes its tokens the prompt of a new context phase."""

    is_encoder_init_state = is_disagg_generation_init_state = False
    estimated_reusable_tokens = num_draft_tokens = 0
    lora_task_id = py_encoder_output_ready_event = None
    expect_snapshot_points = ()

    def __init__(self, number, arrival, prompt, output, cap):
        self.request_id = self.py_request_id = number
        self.arrival, self.prompt_len, self.left, self.max_new_tokens = arrival, prompt, output, cap
        self.num_tokens, self.context_current_position, self.context_chunk_size = prompt, 0, prompt
        self.state = State.CONTEXT_INIT

    state_value = property(lambda self: self.state.value)
    is_context_init_state = property(lambda self: self.state is State.CONTEXT_INIT)
    is_generation_in_progress_state = property(lambda self: self.state is State.GENERATION_IN_PROGRESS)
    is_first_context_chunk = property(lambda self: self.is_context_init_state and self.context_current_position == 0)
    context_remaining_length = property(lambda self: self.prompt_len - self.context_current_position)
    is_last_context_chunk = property(lambda self: self.context_chunk_size == self.context_remaining_length)

    def get_num_tokens(self, _beam):
        return self.num_tokens

    def has_draft_tokens(self):
        return False

    def get_beam_width_by_iter(self, *, for_next_iteration):
        return 1

    def add_token(self):
        """Sample a token. Return whether the request has ended."""
        self.state = State.GENERATION_IN_PROGRESS
        self.num_tokens += 1
        self.left -= 1
        return self.left == 0

    def pause(self):
        self.max_new_tokens -= self.num_tokens - self.prompt_len
        self.prompt_len = self.context_chunk_size = self.num_tokens
        self.context_current_position, self.state = 0, State.CONTEXT_INIT


class Blocks:
    """Counts of KV blocks (``kvCacheManager.cpp``). A sequence has the blocks of all its tokens in the cache."""

    enable_block_reuse = is_variable_window = False
    max_attention_window_vec = (WINDOW,)

    def __init__(self, size, blocks):
        self.size, self.free, self.tokens = size, blocks, {}

    def blocks_for(self, tokens):
        return -(-tokens // self.size)

    def blocks_of(self, number):
        return self.blocks_for(self.tokens.get(number, 0))

    def get_kv_cache_stats(self):
        return SimpleNamespace(num_free_blocks_per_window_size={WINDOW: self.free})

    def get_remaining_blocks_to_completion(self, req, _window):
        context, total = req.prompt_len // self.size, self.blocks_for(req.prompt_len + req.max_new_tokens)
        allocated = self.blocks_of(req.request_id)
        return context - allocated + (total - context) if allocated < context else total - allocated

    def get_needed_blocks_one_step(self, req, two_steps, _window):
        if req.is_first_context_chunk:
            return self.blocks_for(req.prompt_len)
        if req.is_generation_in_progress_state:
            now = self.tokens[req.request_id]
            more = min(2 if two_steps else 1, req.max_new_tokens - (now - req.prompt_len))
            return self.blocks_for(now + more) - self.blocks_for(now)
        return 0

    def start_scheduling(self):
        self.scheduling_free = self.free

    def scheduling_remove_sequence(self, number):
        self.scheduling_free += self.blocks_of(number)

    def scheduling_has_free_blocks(self, blocks, _window):
        return blocks <= self.scheduling_free

    def resize(self, number, tokens):
        self.free -= self.blocks_for(tokens) - self.blocks_of(number)
        self.tokens[number] = tokens
        assert self.free >= 0, "TensorRT-LLM allocates more than the pool has"

    def remove(self, number):
        self.resize(number, 0)
        del self.tokens[number]


def run(made, world):
    """Return the steps of a world, by the loop of ``PyExecutor``. A request enters at the step of its arrival."""
    blocks = Blocks(world["block_size"], world["blocks"])
    chunking = world["chunking"]
    scheduler = made.SimpleUnifiedScheduler(
        world["max_num_seqs"], world["max_num_tokens"], blocks, None, Capacity[world["policy"]],
        (chunking, world["block_size"]) if chunking else None,
    )  # fmt: skip
    waiting = [Request(i, *spec) for i, spec in enumerate(world["requests"])]
    active, lines = [], []
    while waiting or active:
        while waiting and waiting[0].arrival <= len(lines) and len(active) < world["max_num_seqs"]:
            active.append(waiting.pop(0))
        step = scheduler.schedule_request(active, set())
        for q in step.paused_requests:
            q.pause()
            blocks.remove(q.request_id)
        for q in step.context_requests:
            if q.is_first_context_chunk:
                blocks.resize(q.request_id, q.prompt_len)
        for q in step.generation_requests:
            blocks.resize(q.request_id, blocks.tokens[q.request_id] + 1)
        prompts = [[q.request_id, q.context_chunk_size] for q in step.context_requests]
        decodes, paused = ([q.request_id for q in each] for each in (step.generation_requests, step.paused_requests))
        finished = [q for q in step.generation_requests if q.add_token()]
        for q in step.context_requests:
            q.context_current_position += q.context_chunk_size
            if q.context_remaining_length == 0 and q.add_token():
                finished.append(q)
        for q in finished:
            blocks.remove(q.request_id)
            active.remove(q)
        lines.append([sorted(prompts), sorted(decodes), sorted(paused), blocks.free])
        assert len(lines) < 20 * sum(sum(spec) for spec in world["requests"]) + 100, "TensorRT-LLM is stuck"
    return lines


def main():
    made = scheduler_of(Path(sys.argv[1]))
    print(json.dumps([run(made, world) for world in json.loads(Path(sys.argv[2]).read_text())]))


if __name__ == "__main__":
    main()
