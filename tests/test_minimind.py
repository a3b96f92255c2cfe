"""MiniMind2-Small out of its package: tensors of an ONNX file, the names of their modules, and the package itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import minimind
from benchmarks.onnx_weights import linear_weights, read_onnx
from limbeck.errors import ConfigError, DataError
from tests.helpers.tokenizers import trained_bpe

Quantised = tuple[np.ndarray, float, int]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def block(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: np.ndarray, *, listed: bool = False) -> bytes:
    """A TensorProto; ``listed``: its integers one by one, not as raw bytes."""
    kind = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}[array.dtype.name]
    flat = [int(x) for x in array.reshape(-1)] if listed else []
    body = block(7 if kind == 7 else 5, b"".join(map(varint, flat))) if listed else block(9, array.tobytes())
    return b"".join(integer(1, size) for size in array.shape) + integer(2, kind) + block(8, name) + body


def node(kind: str, name: str, inputs: Sequence[str]) -> bytes:
    return b"".join(block(1, text) for text in inputs) + block(2, f"{name}_out") + block(3, name) + block(4, kind)


def model(tensors: Sequence[bytes], nodes: Sequence[bytes]) -> bytes:
    graph = b"".join([block(1, n) for n in nodes] + [block(5, t) for t in tensors])
    return integer(1, 8) + block(2, "pytorch") + block(7, graph)


def quantised(weight: torch.Tensor) -> Quantised:
    """``[in, out]`` as eight bits with one scale, and a zero point that is not zero."""
    scale = float(weight.abs().max()) / 100
    return (weight.T.numpy() / scale).round().astype(np.int8) + np.int8(3), scale, 3


def test_tensors_in_every_form(tmp_path: Path) -> None:
    wanted = {
        "raw": np.array([[1.5, -2.0], [0.25, 3.0]], dtype=np.float32),
        "bytes": np.array([0, 255], dtype=np.uint8),
        "listed": np.array([-3, 4], dtype=np.int8),
        "long": np.array([-(1 << 40), 7], dtype=np.int64),
        "scalar": np.array(5, dtype=np.int32),
    }
    path = tmp_path / "m.onnx"
    parts = [tensor(name, array, listed=name in ("listed", "long")) for name, array in wanted.items()]
    path.write_bytes(model(parts, [node("Add", "/a", ["raw", "bytes"])]))
    graph = read_onnx(path)
    assert graph.nodes[0].inputs == ("raw", "bytes")
    assert graph.nodes[0].kind == "Add"
    for name, array in wanted.items():
        assert graph.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(graph.tensors[name], array)


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    whole = model([tensor("t", np.ones((4, 4), dtype=np.float32))], [node("Add", "/a", ["t"])])
    other = tensor("t", np.ones((4, 4), dtype=np.float32)).replace(integer(1, 4), integer(1, 5))
    outside = tensor("t", np.ones(4, dtype=np.float32)) + integer(14, 1)
    for damaged in (b"", whole[:-3], whole[:20], b"\xff" * 40, b"plain text", model([other], []), model([outside], [])):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"m\.onnx' is no ONNX file"):
            read_onnx(path)


def test_a_node_without_its_scale(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    stored = tensor("w_quantized", np.ones((2, 2), dtype=np.int8))
    path.write_bytes(model([stored], [node("MatMulInteger", "/lm_head/MatMul_quant", ["x", "w_quantized"])]))
    with pytest.raises(DataError, match="w_scale"):
        linear_weights(read_onnx(path))


def test_a_package_becomes_the_same_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    made = LlamaForCausalLM(config).eval()
    tensors, nodes = [], []
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
                tensors.append(tensor(name, weight.numpy()))
                continue
            module = "lm_head" if "embed" in name else name.removesuffix(".weight")
            stored, scale, zero = quantised(weight)
            weight.copy_(torch.from_numpy((stored.astype(np.float32) - zero) * np.float32(scale)).T)
            base = f"onnx::MatMul_{len(nodes)}"
            tensors += [tensor(f"{base}_quantized", stored), tensor(f"{base}_scale", np.array(scale, dtype=np.float32))]
            tensors.append(tensor(f"{base}_zero_point", np.array(zero, dtype=np.int8), listed=True))
            nodes.append(node("MatMulInteger", f"/{module.replace('.', '/')}/MatMul_quant", ["x", f"{base}_quantized"]))
    package = tmp_path / "package"
    package.mkdir()
    (package / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "float16"}))
    (package / "model_quantized.onnx").write_bytes(model(tensors, nodes))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (package / name).write_text("{}")
    minimind.convert(package, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, made(ids).logits)
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_texts_begin_with_the_token_that_the_model_expects(tmp_path: Path) -> None:
    plain = trained_bpe(["some text"], 300, specials=["<|im_start|>"], bos_token="<|im_start|>")
    plain.save_pretrained(tmp_path)
    minimind.begin_texts(tmp_path)
    begun = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert begun("some text").input_ids == [begun.bos_token_id, *plain("some text").input_ids]


def test_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="install npm"):
        minimind.minimind()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_another_package_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho other > found.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="sha256"):
        minimind.minimind()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.slow
def test_the_real_package_writes_english() -> None:
    try:
        folder = minimind.minimind()
    except ConfigError as missing:
        pytest.skip(str(missing))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = "Return the largest item in an iterable or the largest of two or more arguments."
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]])
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(network(ids).logits[0, :-1], ids[0, 1:])
    # norms of one give 6.59, rotary angles of another base 6.11
    assert float(nats) / np.log(2) == pytest.approx(5.738, abs=0.02)
