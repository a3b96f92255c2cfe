"""A whole run with a teacher behind a server: same losses as with its weights, and no key anywhere in the folder."""

from __future__ import annotations

import pytest

from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher, run
from limbeck.config import load_config, resolve
from limbeck.errors import ConfigError, ServerError
from tests.helpers import runs
from tests.helpers.servers import ScoringServer, serving
from tests.helpers.tiny import tokenizer
from tests.patience import WAIT_SECONDS

KEY = "sk-a-very-secret-key"


def load(path, *overrides):
    return resolve(MasterConfig, load_config(path, overrides))


@pytest.mark.slow
def test_a_whole_run(tmp_path, monkeypatch, capfd):
    steps = {"num_prompts_per_step": 4, "max_num_steps": 3, "val_period": 2, "val_batch_size": 4}
    path = runs.write_run(tmp_path, distillation=steps)
    config = load(path, f"data.validation={tmp_path / 'train.jsonl'}")
    run(config)
    monkeypatch.setenv("LIMBECK_API_KEY", KEY)
    policy = live_teacher(config, 0, tokenizer(340))
    with serving(ScoringServer(policy, max_k=400, key=KEY)) as server:
        far = load(
            path,
            f"teacher.server.url={server.url}",
            "teacher.server.k=340",
            f"teacher.server.timeout={WAIT_SECONDS}",
            f"data.validation={tmp_path / 'train.jsonl'}",
            f"logger.log_dir={tmp_path / 'far'}",
        )
        run(far)
    for near, remote in zip(runs.rows(tmp_path / "run"), runs.rows(tmp_path / "far"), strict=True):
        for name in (n for n in near if n.endswith(("loss", "bpb"))):
            assert remote[name] == pytest.approx(near[name], rel=1e-4), name
        if "train/loss" in remote:
            assert remote["train/teacher_0/rows_failed"] == 0
    files = [f for f in (tmp_path / "far").rglob("*") if f.is_file()]
    assert len(files) > 5
    assert not [f for f in files if KEY.encode() in f.read_bytes()]
    seen = capfd.readouterr()
    assert KEY not in seen.out + seen.err


def test_a_run_without_its_server_ends_before_any_model(tmp_path, monkeypatch):
    path = runs.write_run(tmp_path)
    monkeypatch.setattr("limbeck.algorithms.xtoken_off_policy_distillation.Policy", None)
    config = load(path, "teacher.server.url=http://127.0.0.1:9/v1", "teacher.server.backoff=0.001")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1.*teacher\.server\.url"):
        run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "dry run", "cache", "on policy"])
def test_a_server_that_varies_is_refused_before_anything_is_learnt(tmp_path, command):
    """Its logits have another scale for each request, as if it were set anew each time."""
    path = runs.write_run(tmp_path)
    policy = live_teacher(load(path), 0, tokenizer(340))

    def scaled(number, body, answer):
        for choice in answer[1]["choices"]:
            for place in choice.get("prompt_logprobs") or []:
                for entry in (place or {}).values():
                    entry["logprob"] *= 1 + number / 80
        return answer

    with serving(ScoringServer(policy)) as server:
        server.lie = scaled
        values = [f"teacher.server.url={server.url}", "teacher.server.k=16"]
        if command == "cache":
            values.append(f"teacher.cache={tmp_path / 'cache'}")
        if command == "on policy":
            values += ["algorithm=on_policy_distillation", "on_policy.max_new_tokens=8"]
        verb = ["train", "--dry-run"] if command == "dry run" else ["cache" if command == "cache" else "train"]
        code, _, err = runs.limbeck(*verb, path, *values)
    assert code in (1, 2)  # of a dry run: 2
    assert "scored the same text twice" in err.splitlines()[-1]
    assert not (tmp_path / "cache").exists()


def test_temperature_needs_logits(tmp_path):
    path = runs.write_run(tmp_path, loss_fn={"mode": "boundary_kl", "temperature": 2.0})
    with pytest.raises(ConfigError, match=r"loss_fn.temperature is 2.0, but a server"):
        run(load(path, "teacher.server.url=http://127.0.0.1:9/v1"))
