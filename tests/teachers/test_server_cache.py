"""``limbeck cache`` from a server: what the model itself would have stored, once per document, failures counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from limbeck.algorithms.caching import CacheJob, cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher, run
from limbeck.config import load_config, resolve
from limbeck.errors import CacheError, ConfigError, ServerError
from limbeck.teachers.cache import CacheReader, CacheSpec, CacheWriter
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.server.protocol import KNOWN_TEXT
from limbeck.teachers.server.teacher import REPEATED
from limbeck.tokens import ByteTokenizer
from tests.helpers import runs, tiny
from tests.helpers.servers import ScoringServer, serving
from tests.patience import WAIT_SECONDS

SHORT = {"max_num_steps": 2, "num_prompts_per_step": 4, "val_at_start": False}


def load(path: Path, *overrides: str) -> MasterConfig:
    return resolve(MasterConfig, load_config(path, overrides))


def refuse(number: int, body: dict[str, Any], answer: Any) -> Any:
    """No scores for two of the records, nor for a request that holds one of them."""
    texts = [tiny.tokenizer(340).decode(p) for p in body["prompt"] if isinstance(p, list)]
    bad = any(text.startswith(("(0) def", "(2) def")) for text in texts)
    return (400, {"error": {"message": "not this one"}}) if bad else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return runs.write_run(tmp_path, distillation=SHORT, teacher={"cache": str(tmp_path / "near"), "cache_k": 12})


def far(path: Path, url: str, folder: str, *more: str) -> MasterConfig:
    server = [f"teacher.server.url={url}", "teacher.server.k=12", "teacher.server.concurrency=2"]
    patient = f"teacher.server.timeout={WAIT_SECONDS}"
    return load(path, *server, patient, f"teacher.cache={path.parent / folder}", *more)


def documents(folder: Path, *, allow_incomplete: bool = False) -> dict[str, dict[str, np.ndarray]]:
    reader = CacheReader(folder, allow_incomplete=allow_incomplete)
    assert reader.verify() == len(reader)
    return {key: reader._read(key) for key in list(reader.keys())}


def test_the_same_cache_as_from_the_weights(path: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (near,) = cache_teachers(load(path), say=lines.append)
    policy = live_teacher(load(path), 0, tiny.tokenizer(340))
    with serving(ScoringServer(policy, max_k=12)) as server:
        config = far(path, server.url, "far")
        (told,) = cache_teachers(config, say=lines.append)
        asked = len(server.requests)
        assert cache_teachers(config, say=lines.append) == [told]
        # the second time only the probe asks
        assert len(server.requests) - asked < asked / 2
    assert told == {**near, "folder": str(tmp_path / "far")}
    assert told["documents"] == 24
    ours, theirs = documents(tmp_path / "near"), documents(tmp_path / "far")
    assert set(ours) == set(theirs)
    for key, expected in ours.items():
        found = theirs[key]
        np.testing.assert_array_equal(found["ids"], expected["ids"])
        np.testing.assert_allclose(found["next_logprob"], expected["next_logprob"], atol=1e-5)
        np.testing.assert_allclose(found["topk_logprobs"], expected["topk_logprobs"], atol=4e-3)
        assert (found["topk_ids"] == expected["topk_ids"]).mean() > 0.99
        assert not found["logsumexp"].any()
    # training reads the cache alone: the server is gone
    for name in ("near", "far"):
        overrides = [f"teacher.cache={tmp_path / name}", f"logger.log_dir={tmp_path / ('run_' + name)}"]
        run(load(path, *overrides) if name == "near" else far(path, server.url, name, overrides[1]))
    for one, two in zip(runs.rows(tmp_path / "run_near"), runs.rows(tmp_path / "run_far"), strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-3)


def test_failures_are_counted_and_asked_for_again(path: Path, tmp_path: Path) -> None:
    policy = live_teacher(load(path), 0, tiny.tokenizer(340))
    lines: list[str] = []
    with serving(ScoringServer(policy, max_k=12)) as server:
        server.lie = refuse
        config = far(path, server.url, "far", "teacher.server.on_failure=skip")
        (told,) = cache_teachers(config, say=lines.append)
        assert told["failed"] == {"http_400": 2}
        assert told["documents"] == 22
        assert lines[-1].startswith("teacher 0: 2 documents could not be scored (http_400: 2), so the cache is not")
        assert len(documents(tmp_path / "far", allow_incomplete=True)) == 22
        with pytest.raises(CacheError, match=r"not complete \(22 documents"):
            run(far(path, server.url, "far"))
        server.lie, before = None, len(server.requests)
        (told,) = cache_teachers(config, say=lines.append)
        sent = [p for body in server.requests[before:] for p in body["prompt"] if isinstance(p, list)]
    assert (told["documents"], told["failed"]) == (24, {})
    # the texts of the checks before a run aside, only what was missing
    checks = [ByteTokenizer.of(policy.tokenizer).encode(text).ids.tolist() for text in (KNOWN_TEXT, REPEATED)]
    assert len([p for p in sent if p not in checks]) == 2
    assert len(documents(tmp_path / "far")) == 24


def test_a_run_that_stops_keeps_what_came(path: Path, tmp_path: Path) -> None:
    policy = live_teacher(load(path), 0, tiny.tokenizer(340))
    with serving(ScoringServer(policy, max_k=12)) as server:
        server.lie = refuse
        with pytest.raises(ServerError, match=r" row .*http_400: not this one"):
            cache_teachers(far(path, server.url, "far"), say=lambda line: None)
        stored = len(documents(tmp_path / "far", allow_incomplete=True))
        assert 0 < stored < 24
        server.lie = None
        (told,) = cache_teachers(far(path, server.url, "far"), say=lambda line: None)
    assert told["documents"] == 24


def test_what_a_server_cannot_give(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"hidden.*cache_kind.*topk"):
        CacheJob(far(path, "http://127.0.0.1:9/v1", "far", "teacher.cache_kind=hidden"))
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1.*teacher\.server\.url"):
        CacheJob(far(path, "http://127.0.0.1:9/v1", "far", "teacher.server.backoff=0.001"))


@pytest.mark.parametrize("vocab", [340, 70_000])
def test_empty_places_stay_empty(tmp_path: Path, vocab: int) -> None:
    spec = CacheSpec("topk", vocab_size=vocab, teacher_fingerprint="f" * 64, k=2)
    with CacheWriter(tmp_path, spec) as writer:
        top = np.array([[5, -1], [7, 8]], np.int32)
        numbers = np.full((2, 2), -1.0, np.float32)
        writer.add([1, 2, 3], topk_ids=top, topk_logprobs=numbers, next_logprob=numbers[0], logsumexp=numbers[0])
    data = tiny.collator(False)([{"text": "x", "idx": 0, "loss_multiplier": 1.0}])

    data["input_ids"], data["input_lengths"] = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    (microbatch,) = tiny.student().microbatches(data, 1)
    signal = CachedTeacher(tmp_path).signal(microbatch, torch.device("cpu"))
    assert signal.topk_ids.tolist() == [[5, -1], [7, 8], [-1, -1]]  # type: ignore[union-attr]
