"""From the hub to a trained student: tiny models under real names, served to the real client on this machine."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from limbeck.export import export_run
from limbeck.models.loading import load_model
from limbeck.utils import hub as client
from tests.helpers import runs
from tests.helpers.hub import Hub, serving
from tests.helpers.runs import limbeck, refused
from tests.helpers.tiny import LLAMA, QWEN3
from tests.helpers.tokenizers import tiny
from tests.patience import WAIT_SECONDS

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
STUDENT, TEACHER, DATA = "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "acme/books-1.5"
RECIPES = {
    "llama_from_qwen": (STUDENT, "Qwen/Qwen3-4B-Base"),
    "cached_teacher": (STUDENT, "Qwen/Qwen3-4B-Base"),
    "chat": ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-4B"),
    "two_teachers": (STUDENT, "microsoft/Phi-4-mini-instruct", "meta-llama/Llama-3.2-3B"),
}


def stand_in(hub: Hub, folder: Path, name: str, size: int, arch: dict[str, Any]) -> None:
    """A tiny model of random weights under the name of a real one."""
    tokenizer = copy.deepcopy(tiny(size))  # others share this object
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    overrides = {**arch, "max_position_embeddings": 4096}
    load_model({"init": "random", "model_overrides": overrides}, vocab_size=size, seed=size).save_pretrained(folder)
    hub.add(name, folder)


def records(*texts: str, chat: bool = False) -> str:
    turn = {"role": "user", "content": "What?"}
    rows = [{"messages": [turn, {"role": "assistant", "content": t}]} if chat else {"text": t} for t in texts]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "root") as served:
        served.use_data(monkeypatch, tmp_path / "home")
        yield served
    client.forget()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_start_from_the_hub(hub: Hub, tmp_path: Path, recipe: str) -> None:
    chat = recipe == "chat"
    texts = runs.documents(300, 1)
    files = {f"{part}.jsonl": records(*texts, chat=chat) for part in ("train", "validation")}
    hub.add(DATA, files, kind="datasets")
    student, *teachers = RECIPES[recipe]
    stand_in(hub, tmp_path / "s", student, 300, LLAMA)
    for name in teachers:
        stand_in(hub, tmp_path / name.replace("/", "-"), name, 340, QWEN3)
    data = (f"data.train=hf:{DATA}", f"data.validation=hf:{DATA}", "data.num_workers=0")
    for command in (("cache", recipe), ("train", recipe, "--dry-run")):
        if command[0] == "train" or recipe == "cached_teacher":
            code, said, err = limbeck(*command, *data)
            assert code == 0, (said, err)


def test_a_first_run_file_goes_by_what_the_hub_says_of_its_models(hub: Hub, tmp_path: Path) -> None:
    stand_in(hub, tmp_path / "s", STUDENT, 300, LLAMA)
    stand_in(hub, tmp_path / "t", TEACHER, 340, QWEN3)
    Path("train.jsonl").write_text(records(*runs.documents(60, 1)), encoding="utf-8")
    pair = ("--teacher", TEACHER, "--data", "train.jsonl")
    texts = []
    for name, student in (("hub.yaml", STUDENT), ("here.yaml", str(tmp_path / "s"))):
        code, said, err = limbeck("init", name, "--yes", "--student", student, *pair)
        assert code == 0, (said, err)
        assert "not looked at" not in said + err
        texts.append(Path(name).read_text(encoding="utf-8").replace(student, "STUDENT"))
    rates = [next(line for line in text.splitlines() if " lr: " in line) for text in texts]
    assert rates[0].partition("#")[0] == rates[1].partition("#")[0]
    assert "million parameters" in rates[0]
    assert "the models take 4,096" in texts[0]
    assert not [path for path in hub.asked("GET", "") if path.endswith(".safetensors")]
    hub.add(DATA, {"train.jsonl": records(*runs.documents(60, 1))}, kind="datasets")
    assert limbeck("init", "data.yaml", "--yes", "--student", STUDENT, "--data", f"hf:{DATA}")[0] == 0
    text = Path("data.yaml").read_text(encoding="utf-8")
    assert "holdout: 0.1" in text
    assert "one pass over 54 records" in text
    hub.add("acme/Gated-1.5", tmp_path / "s")
    hub.gated.add("acme/Gated-1.5")
    assert "'acme/Gated-1.5' is gated" in refused("train", "--student", "acme/Gated-1.5", *pair)
    _, said, err = limbeck("init", "other.yaml", "--yes", "--student", "acme/Gated-1.5", *pair)
    assert "'acme/Gated-1.5' was not looked at: " in said + err
    assert "is gated" in said + err


@pytest.mark.slow
def test_the_whole_road(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(hub, tmp_path / "s", STUDENT, 300, LLAMA)
    stand_in(hub, tmp_path / "t", TEACHER, 340, QWEN3)
    files = {"train.jsonl": records(*runs.documents(24, 1)), "validation.jsonl": records(*runs.documents(4, 2))}
    hub.add(DATA, files, kind="datasets", revision="v2")
    hub.add(DATA, {"README.md": "no data here"}, kind="datasets")
    settings = {
        "policy": {"model_name": STUDENT, "max_total_sequence_length": 64, "train_micro_batch_size": 2},
        "teacher": {"model_name": f"{TEACHER}@main", "max_total_sequence_length": 64},
        "data": {"train": f"hf:{DATA}@v2", "validation": f"hf:{DATA}@v2"},
        "distillation": {"num_prompts_per_step": 4, "max_num_steps": 2},
        "checkpointing": {"save_period": 2},
        "logger": {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": False},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(settings), encoding="utf-8")

    def train(steps: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "limbeck", "train", str(run_file), f"distillation.max_num_steps={steps}"]
        environment = hub.environment(tmp_path / "cache")
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=WAIT_SECONDS
        )

    done = train(2)
    assert done.returncode == 0, done.stderr
    sent = [
        path
        for path in hub.asked("GET", "")
        if path.endswith((".safetensors", ".json", ".jsonl")) and "/api/" not in path
    ]
    assert len(sent) == len(set(sent)), "every file is sent once"
    assert not any(token for _, path, token in hub.seen if path.startswith("cdn/"))
    before = len(hub.seen)
    done = train(3)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 2" in done.stderr
    assert not [
        path
        for verb, path, _ in hub.seen[before:]
        if verb == "GET" and "/resolve/" in path and path.endswith(".safetensors")
    ]

    card = (export_run(tmp_path / "run", tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["base_model"] == STUDENT
    assert f"`hf:{DATA}@v2`" in card

    load_model({"init": "random", "model_overrides": QWEN3}, vocab_size=340, seed=9).save_pretrained(tmp_path / "t")
    hub.add(TEACHER, tmp_path / "t")
    done = train(4)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"limbeck: teacher_0: 'hf:{TEACHER}@main' is at commit ")
