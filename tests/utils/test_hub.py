"""What a name stands for, and a hub that answers, refuses, is slow, or is not there: the real client against a server
on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from limbeck.errors import ConfigError, TokenizerError
from limbeck.tokens import read_tokenizer
from limbeck.utils import hub as client
from limbeck.utils.hub import HubId, kept_files, locate, model_files, parse_id
from tests.helpers.hub import Hub, serving
from tests.helpers.tokenizers import tiny

NAME = "acme/Tiny-3.2-1B"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    tiny(300).save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "root") as served:
        served.use(monkeypatch, tmp_path / "home")
        served.add(NAME, tmp_path / "tokenizer")
        yield served
    client.forget()


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        model_files(name, "tokenizer")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("meta-llama/Llama-3.2-1B", HubId("meta-llama/Llama-3.2-1B")),
        ("Qwen/Qwen2.5-0.5B", HubId("Qwen/Qwen2.5-0.5B")),
        ("gpt2", HubId("gpt2")),
        ("a.b/c_d-1.5", HubId("a.b/c_d-1.5")),
        ("acme/name.json", HubId("acme/name.json")),
        ("acme/name@v1.0", HubId("acme/name", "v1.0")),
        ("acme/name@refs/pr/1", HubId("acme/name", "refs/pr/1")),
        ("acme/name/q/small.Q4_0.gguf@main", HubId("acme/name", "main", "q/small.Q4_0.gguf")),
        *((text, None) for text in ("acme//name", "a/b/c", "/a/b", "./a", "../a/b", "~/a", "a--b/c", "x@", "a b", "")),
        ("here/name.json", None),
        ("tokenizer.json", None),
    ],
)
def test_names_that_the_client_takes(
    text: str, found: HubId | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_id(text) == found
    assert found is None or str(found) == text


def test_a_folder_of_that_name_goes_before_and_is_said_once(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(340).save_pretrained(NAME)
    assert locate(NAME) == Path(NAME)
    assert read_tokenizer(NAME).vocab.size == 340
    assert read_tokenizer(f"./{NAME}").vocab.size == 340
    assert capsys.readouterr().err == f"{NAME}: the folder here is used, not the hub's repository of that name\n"
    assert read_tokenizer(f"{NAME}@main").vocab.size == 300
    assert hub.seen


def test_a_tokenizer_is_fetched_once_and_named_as_it_was_given(hub: Hub, tmp_path: Path) -> None:
    from limbeck.tokens import load_tokenizer

    assert read_tokenizer(NAME).name == NAME
    assert len(hub.asked("GET", "/resolve/")) == 2
    assert load_tokenizer(NAME).name_or_path == NAME
    assert len(hub.asked("GET", "api/models")) == 1
    client.forget()
    before = len(hub.seen)
    read_tokenizer(NAME)
    assert [path for _, path, _ in hub.seen[before:]] == [f"api/models/{NAME}"], "no file is sent a second time"


def test_a_revision_is_another_model(hub: Hub, tmp_path: Path) -> None:
    tiny(340).save_pretrained(tmp_path / "other")
    first = hub.commit(NAME)
    hub.add(NAME, tmp_path / "other", revision="refs/pr/1")
    assert read_tokenizer(f"{NAME}@refs/pr/1").vocab.size == 340
    assert read_tokenizer(NAME).vocab.size == 300
    assert "has no revision 'v9'" in refusal(f"{NAME}@v9")
    hub.add(NAME, tmp_path / "other")
    assert read_tokenizer(NAME).vocab.size == 300, "a process stays with the commit that it began with"
    client.forget()
    assert read_tokenizer(NAME).vocab.size == 340
    hub.add(NAME, tmp_path / "tokenizer", revision=first)
    assert read_tokenizer(f"{NAME}@{first}").vocab.size == 300


def test_what_the_hub_refuses_is_one_line_after_one_question(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("nobody/here") == (
        f"'nobody/here' is neither a local path nor on {hub.url}; check the name, and if it is private, log in "
        "with `hf auth login` or set HF_TOKEN"
    )
    assert len(hub.seen) == 1
    hub.private.add(NAME)
    assert "if it is private, log in" in refusal(NAME)
    hub.private.clear()
    hub.gated.add(NAME)
    gated = f"'{NAME}' is gated: accept its terms at {hub.url}/{NAME}, then log in with `hf auth login` or set HF_TOKEN"
    assert refusal(NAME) == gated
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert refusal(NAME) == gated, "status 403: the token is good, the terms are not accepted"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert f"{hub.url} does not take the token that is set here (status 401)" in refusal(NAME)
    hub.status = 503
    client.forget()
    before = len(hub.seen)
    assert f"{hub.url} answers with status 503; check the network" in refusal(NAME)
    assert len(hub.seen) == before + 1


def test_a_private_repository_with_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert read_tokenizer(NAME).vocab.size == 300


def test_a_hub_that_never_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_SECONDS", 0.3)
    hub.silent = True
    assert f"and {hub.url} cannot be reached (no answer for 0.3 s)" in refusal(NAME)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.4")
    assert "no answer for 0.4 s" in refusal(NAME)


def test_a_connection_that_is_cut_again_and_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_SECONDS", 1.5)
    hub.cut["tokenizer.json"] = 2000
    said = refusal(NAME)
    assert said.startswith(f"'{NAME}': tokenizer.json stopped arriving from {hub.url} (nothing came for 1.5 s)")
    hub.cut.clear()
    client.forget()
    assert read_tokenizer(NAME).vocab.size == 300


def test_a_connection_that_is_cut_once_is_no_error(hub: Hub) -> None:
    hub.cut["tokenizer.json"], hub.cuts = 2000, 1
    assert read_tokenizer(NAME).vocab.size == 300
    assert len(hub.asked("GET", "tokenizer.json")) == 2


def test_without_a_hub_the_copy_that_is_here_is_used(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_tokenizer(NAME)
    client.forget()
    hub.status = 502
    assert read_tokenizer(NAME).vocab.size == 300
    assert capsys.readouterr().err == (
        f"{NAME}: the copy that was fetched before is used, for {hub.url} answers with status 502\n"
    )
    with pytest.raises(ConfigError, match=r"without config\.json"):
        model_files(NAME, "weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.forget()
    assert read_tokenizer(NAME).vocab.size == 300
    assert capsys.readouterr().err == ""
    assert refusal("acme/other") == (
        "'acme/other' is not on this machine, and HF_HUB_OFFLINE is set; unset it, or give a model folder"
    )


def test_a_copy_that_was_not_finished_is_not_taken_for_a_tokenizer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_SECONDS", 0.5)
    hub.cut["tokenizer.json"] = 10
    refusal(NAME)
    client.forget()
    hub.status = 503
    with pytest.raises(TokenizerError, match=f"{NAME}.* tokenizer, .*{re.escape(hub.url)}"):
        read_tokenizer(NAME)


def test_only_the_files_that_a_part_needs(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    files = {
        "config.json": "{}",
        "model.safetensors.index.json": json.dumps(index),
        "model-1.safetensors": "1",
        "model-2.safetensors": "2",
        "consolidated.safetensors": "both again",
        "pytorch_model.bin": "a pickle",
        "adapter_config.json": "{}",
        "modeling.py": "code",
    }
    hub.add("acme/sharded", files)
    assert {p.name for p in model_files("acme/sharded", "config").iterdir()} == {"config.json"}
    assert kept_files("acme/sharded") == model_files("acme/sharded", "config")
    folder = model_files("acme/sharded", "weights")
    assert {p.name for p in folder.iterdir()} == set(files) - {
        "consolidated.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
        "modeling.py",
    }
    assert (model_files("acme/sharded", "config", code=True) / "modeling.py").is_file()
    assert kept_files("acme/never") is None
    hub.add("acme/pickled", {"config.json": "{}", "pytorch_model.bin": "a pickle"})
    with pytest.raises(ConfigError, match=r"no model\.safetensors .*config\.json, pytorch_model\.bin"):
        model_files("acme/pickled", "weights")


@pytest.mark.parametrize("named", ["../../stolen.safetensors", "/etc/passwd", "model.bin", "not-there.safetensors"])
def test_an_index_that_names_what_the_repository_does_not_hold(hub: Hub, named: str) -> None:
    index = json.dumps({"weight_map": {"a": named}})
    hub.add("acme/odd", {"config.json": "{}", "model.safetensors.index.json": index})
    with pytest.raises(ConfigError, match=f"acme/odd.*{re.escape(repr(named))}"):
        model_files("acme/odd", "weights")


def test_gguf_files(hub: Hub) -> None:
    hub.add("acme/one-GGUF", {"small.Q4_0.gguf": "x", "README.md": "y"})
    assert model_files("acme/one-GGUF", "weights").name == "small.Q4_0.gguf"
    assert kept_files("acme/one-GGUF") == model_files("acme/one-GGUF", "config")
    hub.add("acme/two-GGUF", {"small.Q4_0.gguf": "x", "small.Q8_0.gguf": "y"})
    with pytest.raises(ConfigError, match=r"2 GGUF files.*'acme/two-GGUF/small\.Q4_0\.gguf'"):
        model_files("acme/two-GGUF", "weights")
    assert model_files("acme/two-GGUF/small.Q8_0.gguf", "tokenizer").read_text() == "y"
    assert kept_files("acme/two-GGUF/small.Q4_0.gguf") is None
