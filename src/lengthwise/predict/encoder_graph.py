"""The first layers of a BERT as an ONNX graph with 8-bit weights, so that one core runs it in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
_WEIGHT_RANGE = 63
"""Weights take 7 bits: without VNNI, two products of 8 bits overflow the 16 they are added in."""


@dataclass(frozen=True)
class BertShape:
    """What the graph needs to know of a BERT's ``config.json``."""

    hidden: int
    heads: int
    layers: int
    epsilon: float


def bert_graph(weights: Arrays, shape: BertShape) -> bytes:
    """An ONNX model: embedded tokens of one text, x [1, t, hidden], to [1, 2 x hidden].

    What comes out are the means over the tokens of the last two of ``shape.layers`` layers. The weights
    are rounded to 7 bits a column, activations to 8 bits a call: a call is for one text, so that its
    vector is the same whatever is asked beside it.
    """
    import onnx
    from onnx import TensorProto, helper

    graph = _Graph(weights, shape)
    graph.build()
    floats = TensorProto.FLOAT
    made = helper.make_graph(
        graph.nodes,
        "encoder",
        [helper.make_tensor_value_info("x", floats, [1, "t", shape.hidden])],
        [helper.make_tensor_value_info("pooled", floats, [1, 2 * shape.hidden])],
        graph.constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


class _Graph:
    def __init__(self, weights: Arrays, shape: BertShape) -> None:
        self.weights, self.shape = weights, shape
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def build(self) -> None:
        eps, hidden, heads = self.shape.epsilon, self.shape.hidden, self.shape.heads
        self.const("split_heads", np.array([0, 0, heads, hidden // heads], np.int64))
        self.const("join_heads", np.array([0, 0, hidden], np.int64))
        self.const("root", np.float32((hidden / heads) ** -0.5))
        self.const("axis_tokens", np.array([1], np.int64))
        x = self.norm("x", "embeddings.LayerNorm", eps)
        pooled = []
        for layer in range(self.shape.layers):
            x = self.layer(x, f"encoder.layer.{layer}", eps)
            if layer >= self.shape.layers - 2:
                pooled.append(x)
        means = [
            self.node("ReduceMean", x, "axis_tokens", keepdims=0)
            for x in (pooled if len(pooled) == 2 else pooled * 2)
        ]
        self.node("Concat", *means, out="pooled", axis=-1)

    def layer(self, x: str, at: str, eps: float) -> str:
        names = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names])
        bias = np.concatenate([self.weights[f"{name}.bias"] for name in names])
        parts = [f"{at}.{part}" for part in "qkv"]
        self.node("Split", self.linear(x, weight, bias, f"{at}.qkv"), out=parts, axis=-1, num_outputs=3)
        q, k, v = (
            self.node("Transpose", self.node("Reshape", part, "split_heads"), perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scores = self.node("Mul", self.node("MatMul", q, k), "root")
        seen = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        joined = self.node("Reshape", self.node("Transpose", seen, perm=[0, 2, 1, 3]), "join_heads")
        x = self.norm(
            self.node("Add", x, self.dense(joined, f"{at}.attention.output.dense")),
            f"{at}.attention.output.LayerNorm",
            eps,
        )
        inner = self.node("Gelu", self.dense(x, f"{at}.intermediate.dense"))
        return self.norm(
            self.node("Add", x, self.dense(inner, f"{at}.output.dense")), f"{at}.output.LayerNorm", eps
        )

    def dense(self, x: str, name: str) -> str:
        return self.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], name)

    def linear(self, x: str, weight: npt.NDArray[Any], bias: npt.NDArray[Any], name: str) -> str:
        """``x @ weight.T + bias`` in whole numbers: activations and weights are scaled to them and back."""
        scale = np.maximum(np.abs(weight).max(axis=1), 1e-12) / _WEIGHT_RANGE
        rounded = np.rint(weight / scale[:, None]).astype(np.int8).T
        quantised = [f"{name}.x8", f"{name}.scale", f"{name}.zero"]
        self.node("DynamicQuantizeLinear", x, out=quantised)
        product = self.node(
            "MatMulInteger", quantised[0], self.const(f"{name}.weight8", rounded), quantised[2]
        )
        scales = self.node("Mul", quantised[1], self.const(f"{name}.scales", scale.astype(np.float32)))
        back = self.node("Mul", self.node("Cast", product, to=1), scales)
        return self.node("Add", back, self.const(f"{name}.bias", bias))

    def norm(self, x: str, name: str, eps: float) -> str:
        gain, bias = (
            self.const(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias")
        )
        return self.node("LayerNormalization", x, gain, bias, epsilon=eps)

    def const(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        if all(constant.name != name for constant in self.constants):
            self.constants.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name

    def node(self, kind: str, *inputs: str, out: str | list[str] | None = None, **settings: Any) -> str:
        from onnx import helper

        outputs = [f"{kind}_{len(self.nodes)}"] if out is None else [out] if isinstance(out, str) else out
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, **settings))
        return outputs[0]
