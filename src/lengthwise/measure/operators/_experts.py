"""The experts' GEMMs: rows sorted by expert, one grouped kernel where torch has one, else one GEMM an expert."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._memory import Memory, translated
from lengthwise.measure.operators._rows import Rows
from lengthwise.measure.operators.points import LostError, NoRoomError, Operator

NAMES = frozenset({"experts up", "experts down"})


def build(operator: Operator, tokens: int, memory: Memory, rows: Rows, into: int) -> Kernel:
    """The kernel over so many tokens, each sent to ``topk`` experts evenly at random.

    Up has ``into`` times the experts' width (2: gated) and gathers the tokens' rows by expert first; down
    adds the results to the tokens at last.
    """
    shape = operator.shape
    is_up = operator.name == "experts up"
    n, k = (into * shape["n"], shape["k"]) if is_up else (shape["k"], shape["n"])
    weights = rows.weights(operator, shape["experts"], n, k)
    who, ends = _routing(memory, tokens, shape["experts"], shape["topk"])
    multiply, backend = _multiply(memory, weights, ends, n)
    if is_up:
        x = memory.real(tokens, k)
        return Kernel(lambda i: multiply(x.index_select(0, who), weights[i]), len(weights), backend)
    x = memory.real(len(who), k)

    def down(i: int) -> object:
        out = x.new_zeros(tokens, n)
        return out.index_add_(0, who, multiply(x, weights[i]))

    return Kernel(down, len(weights), backend)


def _routing(memory: Memory, tokens: int, experts: int, topk: int) -> tuple[Any, list[int]]:
    """The token of each row, rows sorted by expert; and where each expert's rows end."""
    torch = memory.torch
    chosen = torch.rand(tokens, experts, generator=memory.generator).topk(topk, dim=1).indices.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).tolist()
    return (order // topk).to(memory.device), [int(end) for end in ends]


def _multiply(memory: Memory, weights: list[Any], ends: list[int], width: int) -> tuple[Any, str]:
    torch = memory.torch
    bounds = [(e, a, b) for e, (a, b) in enumerate(pairwise([0, *ends])) if b > a]

    def one_by_one(x: Any, weight: Any) -> Any:
        out = x.new_empty(len(x), width)
        for expert, first, last in bounds:
            torch.mm(x[first:last], weight[expert].t(), out=out[first:last])
        return out

    if memory.device != "cuda" or not hasattr(torch, "_grouped_mm"):
        return one_by_one, "torch, a GEMM an expert"
    offsets = torch.tensor(ends, device=memory.device, dtype=torch.int32)

    def grouped(x: Any, weight: Any) -> Any:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)  # noqa: SLF001 - tried before use

    try:
        translated(torch, lambda: grouped(memory.real(ends[-1], weights[0].shape[2]), weights[0]))
        torch.cuda.synchronize()
    except (NoRoomError, LostError):
        raise
    except Exception:  # noqa: BLE001 - not of this device, dtype or shape
        return one_by_one, "torch, a GEMM an expert"
    return grouped, "torch grouped_mm"
