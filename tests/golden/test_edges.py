"""Ids, targets, segments, chunks and trace batches are what they were when `edges.json` was recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import zoo
from tests.golden import edges

KNOWN: dict[str, Any] = json.loads(edges.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_texts(name: str) -> None:
    assert edges.texts(name) == KNOWN["texts"][name]


@pytest.mark.parametrize(("student", "teacher"), edges.RING)
def test_chunks_of_texts(student: str, teacher: str) -> None:
    assert edges.text_pairs(student, teacher) == KNOWN["text_pairs"][f"{student} {teacher}"]


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_conversations(name: str) -> None:
    assert edges.chats(name) == KNOWN["chats"][name]


@pytest.mark.parametrize("name", zoo.trl_templates())
def test_templates(name: str) -> None:
    assert edges.chats("smollm2", name) == KNOWN["templates"][name]


@pytest.mark.parametrize(("student", "teacher"), edges.CHAT_RING)
def test_chunks_of_conversations(student: str, teacher: str) -> None:
    assert edges.chat_pairs(student, teacher) == KNOWN["chat_pairs"][f"{student} {teacher}"]


@pytest.mark.train
@pytest.mark.parametrize("name", edges.COLLATORS)
def test_batches_of_traces(name: str) -> None:
    assert edges.batches(*edges.COLLATORS[name]) == KNOWN["batches"][name]
