"""What the host does for a decode step beside launching kernels, as far as a few lines of torch can tell.

Measured: from Python lists to the step's tensors (token ids, positions, slots, lengths, block tables), their
way to the device, the sampled tokens' way back, one append and one stop check a sequence. Not measured: a
scheduler, sampling parameters, detokenising, HTTP. So it is a lower bound of an engine's overhead, which a
calibration finds. Launches are not counted: on a GPU engines replay graphs; on a CPU they are within each
operator's own seconds.
"""

from __future__ import annotations

from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._memory import Memory

_BLOCK_TOKENS, _CONTEXT, _STOP = 16, 1024, -1

NOTE = (
    "host: lists to tensors, to the device, sampled tokens back, an append and a stop check a sequence; no "
    "scheduler, detokeniser or HTTP: a lower bound of a real engine's, which a calibration must find"
)


def build(memory: Memory, seqs: int) -> Kernel:
    """One step's bookkeeping of so many sequences with contexts of 1,024 tokens."""
    torch, device = memory.torch, memory.device
    outputs: list[list[int]] = [[0] for _ in range(seqs)]
    blocks = [list(range(i, i + _CONTEXT // _BLOCK_TOKENS)) for i in range(seqs)]
    sampled = memory.whole(1000, seqs)

    def run(_: int) -> object:
        lengths = [_CONTEXT + len(one) % _BLOCK_TOKENS for one in outputs]
        table = torch.tensor(blocks, dtype=torch.int32)
        slots = [row[-1] * _BLOCK_TOKENS + n % _BLOCK_TOKENS for row, n in zip(blocks, lengths, strict=True)]
        columns = torch.tensor([[one[-1] for one in outputs], lengths, slots], dtype=torch.int64)
        on_device = (columns.to(device), table.to(device))
        alive = 0
        for one, token in zip(outputs, sampled.tolist(), strict=True):
            one.append(token)
            alive += token != _STOP
            if len(one) > _CONTEXT:
                one[:] = one[-1:]
        return on_device, alive

    return Kernel(run, on_host=True)
