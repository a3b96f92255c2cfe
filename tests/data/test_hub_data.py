"""Data sets on the hub, read by the ``datasets`` package from a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from limbeck.algorithms.origins import check_origins
from limbeck.data.sources import RecordDataset
from limbeck.errors import DataError
from limbeck.utils import hub as client
from tests.helpers.hub import Hub, serving

TEXTS = [f"line {number} of a text" for number in range(5)]
NAME = "acme/books-1.5"


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "root") as served:
        served.use_data(monkeypatch, tmp_path / "home")
        served.add(NAME, {"train.jsonl": lines(TEXTS), "validation.jsonl": lines(["held out"])}, kind="datasets")
        yield served
    client.forget()


def texts(spec: str, **options: str) -> list[str]:
    return [str(record["text"]) for record in RecordDataset(spec, options)]


def refusal(spec: str, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        texts(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_splits_and_revisions(hub: Hub) -> None:
    assert texts(f"hf:{NAME}") == TEXTS
    assert texts(f"hf:{NAME}", hub_split="validation") == ["held out"]
    data = RecordDataset(f"hf:{NAME}")
    assert data[1]["source"] == f"hf:{NAME}:2"
    assert [sizes.tolist() for sizes in data._readers[0].sizes()] == [[len(text) for text in TEXTS]]
    hub.add(NAME, {"train.jsonl": lines(TEXTS[:2])}, kind="datasets", revision="v2")
    assert texts(f"hf:{NAME}@v2") == TEXTS[:2]
    assert "has no revision 'v3'" in refusal(f"hf:{NAME}@v3")


def test_a_selection_of_rows_has_no_sizes_of_its_own(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    shuffled = datasets.Dataset.from_list([{"text": text} for text in TEXTS]).select([4, 2])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: shuffled)
    data = RecordDataset(f"hf:{NAME}")
    assert [record["text"] for record in data] == [TEXTS[4], TEXTS[2]]
    assert np.array_equal(np.concatenate(list(data._readers[0].sizes())), [0, 0])


def test_a_folder_of_that_name_is_not_meant(hub: Hub) -> None:
    Path(NAME).mkdir(parents=True)
    (Path(NAME) / "train.jsonl").write_text(lines(["from here"]))
    assert texts(f"hf:{NAME}") == TEXTS
    assert texts(NAME) == ["from here"]


def test_what_cannot_be_read_is_one_line(hub: Hub) -> None:
    assert refusal("hf:nobody/texts") == (
        f"'hf:nobody/texts' is not on {hub.url}; check the name, and if it is private, log in with "
        "`hf auth login` or set HF_TOKEN"
    )
    assert "names no data set of the hub" in refusal("hf:a/b/c")
    assert f"'hf:{NAME}' (split 'test') cannot be loaded" in refusal(f"hf:{NAME}", hub_split="test")
    hub.gated.add(NAME)
    client.forget()
    hub.add("acme/gated", {"train.jsonl": lines(TEXTS)}, kind="datasets")
    hub.gated.add("acme/gated")
    assert f"'hf:acme/gated' is gated: accept its terms at {hub.url}/datasets/acme/gated" in refusal("hf:acme/gated")


def test_without_a_hub_the_copy_of_the_same_revision_is_used(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, {"train.jsonl": lines(TEXTS[:2])}, kind="datasets", revision="v2")
    texts(f"hf:{NAME}")
    client.forget()
    hub.status = 503
    before = len(hub.seen)
    assert texts(f"hf:{NAME}") == TEXTS
    assert len(hub.seen) == before + 1
    assert f"hf:{NAME}: the copy that was fetched before is used, for {hub.url} answers with" in capsys.readouterr().err
    assert f"'hf:{NAME}@v2' is not on this machine" in refusal(f"hf:{NAME}@v2")
    hub.status = None
    client.forget()
    texts(f"hf:{NAME}@v2")
    client.forget()
    hub.status = 503
    assert texts(f"hf:{NAME}@v2") == TEXTS[:2]
    assert "of this revision no split" in refusal(f"hf:{NAME}"), "the package would give the other revision"


def test_a_run_notices_that_its_data_set_moved_on(hub: Hub, tmp_path: Path) -> None:
    spec = f"hf:{NAME}"
    before = hub.commit(NAME, kind="datasets")
    check_origins(tmp_path, {"data.train": RecordDataset(spec).stamps()}, has_checkpoint=False)
    hub.add(NAME, {"train.jsonl": lines(TEXTS[::-1])}, kind="datasets")
    check_origins(tmp_path, {"data.train": RecordDataset(spec).stamps()}, has_checkpoint=True)
    client.forget()
    now = hub.commit(NAME, kind="datasets")
    with pytest.raises(DataError, match=rf"data\.train: '{spec}' .*{now} .*{before}"):
        check_origins(tmp_path, {"data.train": RecordDataset(spec).stamps()}, has_checkpoint=True)
