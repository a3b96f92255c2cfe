"""Weights out of an ONNX file: the few fields of its protobuf that hold tensors and nodes; no graph is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from limbeck.errors import DataError

Array = npt.NDArray[np.generic]

_TYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
"""numpy's names of the element types of a TensorProto."""


@dataclass(frozen=True)
class Node:
    """One operation of a graph: its kind, its name, and the names of the tensors that it reads."""

    kind: str
    name: str
    inputs: tuple[str, ...]


@dataclass
class OnnxGraph:
    """What a graph stores: tensors by name, and its nodes."""

    tensors: dict[str, Array] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


def read_onnx(path: str | Path) -> OnnxGraph:
    """Tensors and nodes of an ONNX file that holds its weights itself."""
    graph = OnnxGraph()
    try:
        for number, value in _fields(memoryview(Path(path).read_bytes())):
            if number == _MODEL_GRAPH:
                _read_graph(_message(value), graph)
    except (IndexError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{str(path)!r} is no ONNX file that can be read ({error}); fetch it again") from error
    if not graph.nodes:
        raise DataError(f"{str(path)!r} is no ONNX file that can be read (it holds no graph); fetch it again")
    return graph


def linear_weights(graph: OnnxGraph) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of an exported transformers model under its own names, float32 ``[out, in]``.

    A ``MatMulInteger`` called ``/model/layers.0/mlp/up_proj/MatMul_quant`` multiplies by the transposed weight of
    ``model.layers.0.mlp.up_proj``, stored as small integers: ``(stored - zero_point) * scale``. Norms are stored as
    they are. An embedding is left out: where it is tied to the head, the head says the same with its own rounding.
    """
    weights = {}
    for node in graph.nodes:
        if node.kind != "MatMulInteger":
            continue
        base = node.inputs[1].removesuffix("_quantized")
        try:
            stored, scale, zero = (graph.tensors[base + part] for part in ("_quantized", "_scale", "_zero_point"))
        except KeyError as error:
            raise DataError(f"node {node.name!r} of the ONNX file lacks its tensor {error}") from error
        module = node.name.strip("/").rpartition("/")[0].replace("/", ".")
        whole = (stored.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
        weights[f"{module}.weight"] = np.ascontiguousarray(whole.T)
    for name, tensor in graph.tensors.items():
        if name.endswith("norm.weight") and tensor.dtype.kind == "f":
            weights[name] = tensor.astype(np.float32)
    return weights


# numbers of the fields in ModelProto, GraphProto, NodeProto and TensorProto
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_TENSOR = 1, 5
_NODE_INPUT, _NODE_NAME, _NODE_KIND = 1, 3, 4
_DIMS, _TYPE, _FLOATS, _INT32S, _INT64S, _NAME, _RAW, _DOUBLES, _LOCATION = 1, 2, 4, 5, 7, 8, 9, 10, 14


def _read_graph(data: memoryview, graph: OnnxGraph) -> None:
    for number, value in _fields(data):
        if number == _GRAPH_NODE:
            graph.nodes.append(_node(_message(value)))
        elif number == _GRAPH_TENSOR:
            name, tensor = _tensor(_message(value))
            graph.tensors[name] = tensor


def _node(data: memoryview) -> Node:
    inputs, texts = [], {_NODE_NAME: "", _NODE_KIND: ""}
    for number, value in _fields(data):
        if number == _NODE_INPUT:
            inputs.append(_text(value))
        elif number in texts:
            texts[number] = _text(value)
    return Node(texts[_NODE_KIND], texts[_NODE_NAME], tuple(inputs))


def _tensor(data: memoryview) -> tuple[str, Array]:
    dims: list[int] = []
    integers: list[int] = []
    kind, name, raw = 0, "", b""
    for number, value in _fields(data):
        if number == _DIMS:
            dims += _integers(value)
        elif number == _TYPE:
            kind = _integers(value)[0]
        elif number == _NAME:
            name = _text(value)
        elif number in (_INT32S, _INT64S):
            integers += _integers(value)
        elif number in (_RAW, _FLOATS, _DOUBLES):
            raw += bytes(_message(value))
        elif number == _LOCATION and value != 0:
            raise ValueError(f"tensor {name!r} lies in another file")
    if kind not in _TYPES:
        raise ValueError(f"tensor {name!r} has the element type {kind}, which is none of {sorted(_TYPES)}")
    dtype = np.dtype(_TYPES[kind])
    if integers and dtype.kind == "f":
        raise ValueError(f"tensor {name!r} of {dtype} is stored as integers")
    flat = np.array(integers, dtype=np.int64).astype(dtype) if integers else np.frombuffer(raw, dtype)
    return name, flat.reshape(dims)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            integer, at = _varint(data, at)
            yield number, integer
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field {number} has the unknown wire type {wire}")
        if at + size > len(data):
            raise ValueError(f"field {number} is longer than the file")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer has more than ten bytes")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("an integer where bytes were expected")
    return value


def _text(value: int | memoryview) -> str:
    return str(_message(value), "utf-8")


def _integers(value: int | memoryview) -> list[int]:
    """One integer, or a packed list of them; negative ones are stored as those of 64 bits."""
    found, at = [], 0
    if isinstance(value, int):
        found = [value]
    else:
        while at < len(value):
            number, at = _varint(value, at)
            found.append(number)
    return [number - (1 << 64) if number >> 63 else number for number in found]
