"""Reading a tokenizer without transformers gives what transformers gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from limbeck.errors import TemplateError, TokenizerError
from limbeck.tokens import ByteTokenizer, load_tokenizer, read_tokenizer, render_chat
from tests import zoo
from tests.helpers.tokenizers import byte_level
from tests.texts import TEXTS
from tests.tokens.chat_cases import PLAIN


def check_same(own: ByteTokenizer, theirs: ByteTokenizer) -> None:
    a, b = own.vocab, theirs.vocab
    assert a.token_bytes == b.token_bytes
    assert np.array_equal(a.special, b.special)
    assert np.array_equal(a.present, b.present)
    assert (a.roles, a.family, a.lossless, a.fingerprint) == (b.roles, b.family, b.lossless, b.fingerprint)
    for name in ("named", "templates", "adds_bos", "bos_id", "eos_id", "pad_id", "special_ids"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert set(own.added) == set(theirs.added)
    texts = list(TEXTS.values())
    for mine, other in zip(own.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(mine.ids, other.ids)
        assert np.array_equal(mine.byte_ends, other.byte_ends)


# Of each family one in the fast tests: building the largest vocabularies twice takes many seconds.
QUICK = {"smollm2", "llama2", "minilm"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NAMES]
)
def test_a_folder_is_read_as_transformers_reads_it(name: str) -> None:
    folder = zoo.tokenizer_dir(name)
    own, theirs = read_tokenizer(folder), ByteTokenizer.of(load_tokenizer(folder))
    check_same(own, theirs)
    if name in zoo.CHAT_NAMES:
        assert np.array_equal(render_chat(own, PLAIN).ids, render_chat(theirs, PLAIN).ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a real tokenizer that a test may change."""
    return Path(shutil.copytree(zoo.tokenizer_dir("smollm2"), tmp_path / "model"))


def _change(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(config), encoding="utf-8")


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    _change(
        folder,
        added_tokens_decoder={"49152": {"content": "<new>", "special": True, **flags}},
        pad_token="<unheard>",
    )
    check_same(read_tokenizer(folder), ByteTokenizer.of(load_tokenizer(folder)))


def test_names_in_a_file_of_their_own_and_templates_in_files(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|im_end|>"}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    own = read_tokenizer(folder)
    assert own.templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    check_same(own, ByteTokenizer.of(load_tokenizer(folder)))


def test_a_bare_file(folder: Path) -> None:
    bare = folder / "other.json"
    shutil.copy(folder / "tokenizer.json", bare)
    own, theirs = read_tokenizer(bare), ByteTokenizer.of(load_tokenizer(bare))
    assert own.named == theirs.named == {}
    check_same(own, theirs)


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path))
    own = read_tokenizer(zoo.smollm2_dir())
    check_same(own, ByteTokenizer.of(zoo.tokenizer("smollm2")))
    monkeypatch.setattr("limbeck.tokens.loading._load_file", lambda path: pytest.fail("converted again"))
    assert read_tokenizer(zoo.smollm2_dir()).vocab.same_tokens(own.vocab)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere/tokenizer\.json.*exist"):
        read_tokenizer(tmp_path / "nowhere" / "tokenizer.json")
    for content in ("{not json", "[]", "{}", '{"model": {"vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"read from .*tokenizer\.json|family") as caught:
            read_tokenizer(tmp_path / "tokenizer.json")
        assert "\n" not in str(caught.value)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(TokenizerError, match=r"notes\.txt .*tekken\.json"):
        read_tokenizer(tmp_path / "notes.txt")


def test_alignment_without_torch_and_transformers() -> None:
    sides = [str(zoo.tokenizer_dir(name)) for name in ("smollm2", "gpt2")]
    code = (
        "import sys\nfor n in ('torch', 'transformers'): sys.modules[n] = None\n"
        "from limbeck.align.view import view_text, view_messages\nfrom limbeck.tokens import read_tokenizer\n"
        f"a, b = map(read_tokenizer, {sides!r})\nprint(view_text(a, b, 'In 2011.')['summary']['coverage'])\n"
        "print(view_messages(a, a, [dict(role='user', content='q'), dict(role='assistant', content='x')])"
        "['summary']['coverage'])\n"
        "try: read_tokenizer(sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code, str(zoo.smollm2_dir())]
    environment = {"PATH": "", "LIMBECK_CACHE": "/nonexistent", "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    text, chat, missing = result.stdout.splitlines()
    assert (text, chat) == ("1.0", "1.0")
    assert missing.startswith("TokenizerError")
    assert "pip install 'limbeck[train]'" in missing


@pytest.mark.parametrize("name", ["smollm2", pytest.param("llama2", marks=pytest.mark.slow)])
def test_back_to_transformers(name: str) -> None:
    folder = zoo.tokenizer_dir(name)
    own, theirs = read_tokenizer(folder), load_tokenizer(folder)
    back = own.to_transformers()
    check_same(own, ByteTokenizer.of(back))
    assert back.chat_template == theirs.chat_template
    assert back("In 2011.")["input_ids"] == theirs("In 2011.")["input_ids"]


def test_merges_that_spell_a_special_token_are_in_the_description() -> None:
    spec = json.loads(byte_level(["the", "then"]).backend_tokenizer.to_str())
    known = spec["model"]["vocab"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": known["th"], "content": "th", **flags}]
    assert ByteTokenizer(spec).describe()["model"]["merges"] == spec["model"]["merges"]


def test_another_template(tmp_path: Path) -> None:
    own = read_tokenizer(zoo.tokenizer_dir("smollm2"))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    other = own.with_template(tmp_path / "mine.jinja")
    assert other.templates == own.with_template("{{ messages[0].content }}").templates
    assert own.templates != other.templates
    assert np.array_equal(other.encode("a").ids, own.encode("a").ids)
    with pytest.raises(TemplateError, match=r"none\.jinja"):
        own.with_template(tmp_path / "none.jinja")
