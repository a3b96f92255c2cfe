"""An exported student is what other programs read: transformers, peft, and the readers of llama.cpp's converter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.errors import ConfigError
from limbeck.export import describe_for_version_4, export_run, missing_parts, model_card, push_folder
from limbeck.models.loading import load_model
from limbeck.report.run_data import read_run
from tests.helpers import runs, tiny
from tests.helpers.disk import files_of_at_most
from tests.helpers.hub import serving
from tests.helpers.runs import limbeck, refused

IDS = torch.arange(12)[None] % 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``student`` (a model folder with a card), and ``run``: three steps of LoRA on it."""
    place = tmp_path_factory.mktemp("export")
    runs.write_tokenizers(place)
    runs.write_data(place)
    student = load_model({"init": "random", "model_overrides": tiny.LLAMA}, vocab_size=300, seed=0)
    student.save_pretrained(place / "student")
    (place / "student" / "README.md").write_text("---\nlicense: mit\n---\n# A student\n", encoding="utf-8")
    policy = {"init": "pretrained", "model_name": str(place / "student"), "model_overrides": {}}
    settings = runs.settings(
        place,
        place / "run",
        policy=policy | {"lora": {"r": 2, "modules_to_save": ["norm"]}},
        distillation={"max_num_steps": 3, "val_period": 0},
    )
    run(runs.resolved(settings))
    return place


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    return export_run(folder / "run", folder / "out")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def test_it_loads_in_transformers(out: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert logits(model).shape == (1, 12, 300)
    assert tokenizer.encode("the quick") == tiny.tokenizer(300).encode("the quick")
    assert missing_parts(out) == []


def test_adapters_load_in_peft_and_say_what_the_merged_weights_say(folder: Path, out: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder / "student")
    before = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, out / "adapter")
    assert {p.name for p in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    merged = logits(AutoModelForCausalLM.from_pretrained(out))
    torch.testing.assert_close(logits(adapted), merged, rtol=1e-4, atol=1e-5)
    assert (merged - before).abs().max() > 1e-3


def test_the_card(folder: Path, out: Path) -> None:
    text = (out / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---")[1])
    assert head["license"] == "mit"
    assert head["base_model"] == "student"
    assert head["library_name"] == "transformers"
    rows = runs.rows(folder / "run")
    for value in (rows[0]["val/bpb"], rows[-1]["val/bpb"], rows[0]["val/teacher_bpb"]):
        assert f"| {value:.3f} |" in text
    for said in ("`boundary_kl`", "`train.jsonl`", "3 of 3", "LoRA adapters of student"):
        assert said in text
    assert str(folder) not in text


def test_the_card_of_a_student_that_began_with_random_weights(folder: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load((folder / "run" / "config.yaml").read_bytes())
    settings["policy"] |= {"init": "random", "model_name": None, "model_overrides": {"model_type": "llama"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n', encoding="utf-8")
    text = model_card(read_run(tmp_path), step=1, license=None, adapter=False)
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert text.splitlines()[-1].startswith("The licences of ")
    assert "new llama" not in text.splitlines()[-1]


def test_what_the_converter_of_llama_cpp_reads(out: Path) -> None:
    gguf = pytest.importorskip("gguf")
    layers = json.loads((out / "config.json").read_bytes())["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert all(names.get_name(key, try_suffixes=(".weight", ".bias")) for key in file.keys())  # noqa: SIM118
    special = gguf.SpecialVocab(out, load_merges=True)
    assert special.merges
    assert special.special_token_ids["eos"] == AutoTokenizer.from_pretrained(out).eos_token_id


def test_version_4_of_transformers_reads_it_too(out: Path, tmp_path: Path) -> None:
    """It knows neither the tokenizer's class nor ``rope_parameters``; version 5 reads the same as before."""
    tokenizer = json.loads((out / "tokenizer_config.json").read_bytes())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = json.loads((out / "config.json").read_bytes())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    scaled = {"rope_type": "linear", "factor": 4.0}
    config = {key: value for key, value in config.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 500_000.0, **scaled}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": ["<call>"]}', encoding="utf-8")
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    describe_for_version_4(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before
    found = json.loads((tmp_path / "config.json").read_bytes())
    assert (found["rope_theta"], found["rope_scaling"]) == (500_000.0, scaled)
    special = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    assert special == {"additional_special_tokens": ["<call>"]}


def test_what_other_programs_would_miss(out: Path, tmp_path: Path) -> None:
    assert missing_parts(tmp_path)[0] == "config.json is missing"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert len(missing_parts(tmp_path)) == 3


def test_a_checkpoint_that_is_not_whole_leaves_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limbeck.export.missing_parts", lambda _: ["a part is missing"])
    with pytest.raises(ConfigError, match="a part is missing"):
        export_run(folder / "run", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    with files_of_at_most(5000):
        line = refused("export", folder / "run", "-o", tmp_path / "out")
    assert "cannot be written" in line
    assert str(tmp_path / "out") in line
    assert list(tmp_path.iterdir()) == []


def test_the_command(folder: Path, out: Path, tmp_path: Path) -> None:
    code, said, _ = limbeck("export", folder / "run", "-o", tmp_path / "new", "-c", "latest", "--license", "apache-2.0")
    assert code == 0
    assert said.splitlines() == [f"folder: {tmp_path / 'new'}"]
    assert "license: apache-2.0" in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert "is not empty" in refused("export", folder / "run", "-o", out)
    assert "is no run folder" in refused("export", tmp_path, "-o", tmp_path / "other")


def test_push(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "hub") as hub:
        hub.use(monkeypatch, tmp_path / "home")
        arguments = ("export", folder / "run", "-o", tmp_path / "new", "--push", "me/student-1.5B")
        assert "no token for the hub" in refused(*arguments)
        assert not (tmp_path / "new").exists()
        monkeypatch.setenv("HF_TOKEN", hub.token)
        code, out, err = limbeck(*arguments)
        assert code == 0
        assert out.splitlines()[-1] == f"pushed: {hub.url}/me/student-1.5B"
        assert hub.created == {"me/student-1.5B": True}, "private unless it is said"
        written = {p.relative_to(tmp_path / "new").as_posix(): p for p in (tmp_path / "new").rglob("*") if p.is_file()}
        assert hub.pushed["me/student-1.5B"] == {name: path.read_bytes() for name, path in written.items()}
        assert "adapter/adapter_model.safetensors" in written
        monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
        with pytest.raises(ConfigError, match=r"'me/other' .*401") as caught:
            push_folder(tmp_path / "new", "me/other")
        assert "hf_wrong" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"'me/x/y' .*Repo id"):
            push_folder(tmp_path / "new", "me/x/y")
        hub.silent = True
        monkeypatch.setattr("limbeck.export._PUSH_SECONDS", 0.3)
        with pytest.raises(ConfigError, match=r"'me/other' .* 0\.3 s"):
            push_folder(tmp_path / "new", "me/other")
    with pytest.raises(ConfigError, match="'me/other' "):
        push_folder(tmp_path / "new", "me/other")
    said = "".join((out, err, *capfd.readouterr()))
    assert hub.token not in said
    assert "hf_wrong" not in said


def test_the_files_have_the_modes_of_new_files(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        out = export_run(folder / "run", tmp_path / "new")
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in out.rglob("*") if p.is_file()} == {"0o640"}
    assert {oct(p.stat().st_mode & 0o777) for p in (out, *out.rglob("*")) if p.is_dir()} == {"0o750"}


@pytest.mark.parametrize("chat", [False, True])
def test_the_lines_of_the_card_generate(
    folder: Path, out: Path, chat: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(out)
    text = model_card(read_run(folder / "run"), step=3, license=None, adapter=False, chat=chat)
    code = text.split("```python\n")[1].split("```")[0]
    if chat:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        code = code.replace("\nids", f"\ntokenizer.chat_template = {template!r}\nids")
    exec(code.replace("max_new_tokens=64", "max_new_tokens=4"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B@refs/pr/1"])
def test_the_card_of_a_student_of_the_hub(folder: Path, tmp_path: Path, name: str) -> None:
    settings = yaml.safe_load((folder / "run" / "config.yaml").read_bytes())
    settings["policy"]["model_name"] = name
    settings["teacher"]["model_name"] = "Qwen/Qwen2.5-0.5B"
    settings["data"]["train"] = ["hf:acme/books-1.5@v2", "/data/x/some.jsonl"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n', encoding="utf-8")
    text = model_card(read_run(tmp_path), step=1, license=None, adapter=False)
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "meta-llama/Llama-3.2-1B"
    assert f"{name} was trained from Qwen/Qwen2.5-0.5B with" in text
    assert "`hf:acme/books-1.5@v2`, `some.jsonl`" in text
