"""What is wrong with a server is said before the run, in one line."""

from __future__ import annotations

import re
import socket

import pytest

from limbeck.algorithms.config import MasterConfig
from limbeck.config import resolve
from limbeck.errors import ConfigError, ServerError
from limbeck.teachers.build import TeacherConfig
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.teacher import ServerTeacher
from tests.helpers.servers import ScoringServer, serving
from tests.helpers.tiny import teacher, tokenizer
from tests.patience import WAIT_SECONDS


@pytest.fixture(scope="module")
def policy():
    return teacher()


def refusal(server, tok=None, **more):
    cfg = ServerConfig(url=server.url, timeout=WAIT_SECONDS, **{"backoff": 0.001, "k": 8, **more})
    with pytest.raises(ServerError) as caught:
        ServerTeacher(cfg, tok or tokenizer(340), longest=64)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nobody_there():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}/v1"
    with pytest.raises(ServerError, match=rf"{re.escape(url)}.*teacher\.server\.url"):
        ServerTeacher(ServerConfig(url=url, backoff=0.001), tokenizer(340))


def test_wrong_key(policy, monkeypatch):
    with serving(ScoringServer(policy, key="right")) as server:
        monkeypatch.delenv("LIMBECK_API_KEY", raising=False)
        assert "refused the key (HTTP 401)" in (line := refusal(server))
        assert "LIMBECK_API_KEY, which is not set" in line
        monkeypatch.setenv("LIMBECK_API_KEY", "wrong-secret")
        assert "which is set" in (line := refusal(server))
        assert "wrong-secret" not in line
        monkeypatch.setenv("LIMBECK_API_KEY", "right")
        ServerTeacher(ServerConfig(url=server.url, k=8, timeout=WAIT_SECONDS), tokenizer(340))


def test_wrong_model(policy):
    with serving(ScoringServer(policy)) as server:
        assert "serves ['tiny']; teacher.server.model is 'big'" in refusal(server, model="big")


def test_no_list_of_models(policy):
    with serving(ScoringServer(policy)) as server:
        real = server.handle
        server.handle = lambda path, body, headers: (404, {}) if body is None else real(path, body, headers)
        assert "lists no models (HTTP 404)" in refusal(server)
        named = ServerConfig(url=server.url, k=8, model="tiny", timeout=WAIT_SECONDS)
        assert ServerTeacher(named, tokenizer(340)).facts.model == "tiny"


@pytest.mark.parametrize("echo", [False, True])
def test_k_beyond_the_servers_limit(policy, echo):
    with serving(ScoringServer(policy, max_k=20, echo_only=echo)) as server:
        line = refusal(server, k=64)
    assert "gives at most 20 log-probabilities per position and teacher.server.k is 64" in line
    assert "--max-logprobs 64" in line


def test_no_prompt_logprobs_at_all(policy):
    def lie(number, body, answer):
        return 200, {"choices": [{"index": 0, "text": "x"}]}

    with serving(ScoringServer(policy)) as server:
        server.lie = lie
        assert "gives no log-probabilities of the prompt" in refusal(server)


def test_tokens_by_text_are_refused(policy):
    def lie(number, body, answer):
        body.pop("return_tokens_as_token_ids", None)
        return server.complete(body)

    with serving(ScoringServer(policy, echo_only=True)) as server:
        server.lie = lie
        assert "names tokens by their text" in refusal(server)


def test_another_tokenizer(policy):
    """Trained on other text, so that the known text falls into another number of tokens."""
    with serving(ScoringServer(policy)) as server:
        line = refusal(server, tok=tokenizer(300))
    assert "has another tokenizer" in line or "does not score the token ids" in line


def test_same_ids_for_other_text(policy):
    """Two ids change places: lengths agree, ids do not."""

    def lie(number, body, answer):
        status, made = answer
        if isinstance(body["prompt"], str):
            for choice in made["choices"]:
                choice.pop("prompt_token_ids")
                for place in choice["prompt_logprobs"][1:]:
                    for entry in place.values():
                        entry["decoded_token"] = "q" + entry["decoded_token"]
        return status, made

    with serving(ScoringServer(policy)) as server:
        server.lie = lie
        assert "has another tokenizer: its token" in refusal(server)


def test_rows_longer_than_the_server_takes(policy):
    with serving(ScoringServer(policy)) as server:
        server.max_model_len = 64
        line = refusal(server)
    assert "takes up to 63 tokens at a time and the run's rows have up to 64" in line


def test_a_server_that_only_fails(policy):
    with serving(ScoringServer(policy)) as server:
        server.lie = lambda number, body, answer: (500, {"error": {"message": "out of memory"}})
        assert "http_500: out of memory" in refusal(server)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"url": "localhost:8000"}, "no server address"),
        ({"url": "http://user:sk-secret@host/v1"}, "must not carry a key"),
        ({"url": "http://host/v1?key=sk-secret"}, "must not carry a key"),
        ({"url": "http://host/v1", "api_key_env": "sk-secret"}, "names no environment variable"),
        ({"url": "http://host:99999/v1"}, "no server address"),
        ({"url": "http://host/v1", "modle": "x"}, "did you mean 'model'"),
    ],
)
def test_run_files_without_keys(section, line):
    with pytest.raises(ConfigError, match=line) as caught:
        resolve(TeacherConfig, {"model_name": "x", "server": section})
    assert "sk-secret" not in str(caught.value)


def test_a_remote_teacher_needs_no_model_name():
    server = {"url": "http://host/v1/", "model": "Qwen/Qwen3-4B"}
    found = resolve(TeacherConfig, {"server": server})
    assert found.model_name == "Qwen/Qwen3-4B"
    assert found.source.url == "http://host/v1"
    named = resolve(TeacherConfig, {"server": {"url": "http://host/v1"}, "tokenizer": {"name": "./tok"}})
    assert named.model_name == "./tok"
    with pytest.raises(ConfigError, match="model_name is missing"):
        resolve(
            MasterConfig,
            {"policy": {"model_name": "x"}, "data": {"train": "a"}, "teacher": {"server": {"url": "http://h/v1"}}},
        )
