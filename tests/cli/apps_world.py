"""A small application as a file, for the commands that plan and run it."""

from __future__ import annotations

import json
import sys

APP = """
name = "judged"
[inputs]
file = "topics.jsonl"
id = "id"
[models.writer]
model = "opt-125m"
lengths = {{ kind = "uniform", low = 4, high = 20 }}
[models.judge]
model = "opt-1.3b"
lengths = {{ kind = "uniform", low = 4, high = 20 }}
[calls.draft]
model = "writer"
prompt = "Write of {{{{ topic }}}}"
max_tokens = 24
[calls.verdict]
model = "judge"
prompt = "{decision}"
max_tokens = 24
{cluster}
[run]
max_num_seqs = 4
linger = 0.02
command = '''{python} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}} \
--fixed-s {step_s}'''
"""
NODES = '[cluster]\nnodes = ["2xA100-80GB@pairs"]'
VERDICT = "Judge {{ draft }}"


def write_app(folder, *, rows=8, decision=VERDICT, cluster=NODES, step_s=0.002, more=""):
    """The file, with rows beside it."""
    path = folder / "judged.toml"
    text = APP.format(python=sys.executable, decision=decision, cluster=cluster, step_s=step_s)
    path.write_text(text + more, "utf-8")
    lines = [json.dumps({"id": f"r{n}", "topic": f"the sea, part {n}"}) for n in range(rows)]
    (folder / "topics.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return path
