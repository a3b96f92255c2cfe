import json
import re

import pytest

from limbeck.errors import ConfigError, DataError
from limbeck.utils import Logger
from limbeck.utils.logger import read_metrics, to_means
from limbeck.utils.metrics import Metrics


def config(tmp_path, **more):
    return {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": False, "progress": False, **more}


def test_one_object_per_step_and_sums_become_means(tmp_path):
    with Logger(config(tmp_path)) as logger:
        logger.log_metrics({"loss": (6.0, 4.0), "empty": (0.0, 0.0)}, 1, "train")
        logger.log_metrics({"bpb": 1.5}, 1, "val")
        logger.log_metrics({"loss": 2.0}, 2, "train")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 1, "train/loss": 1.5, "val/bpb": 1.5},
        {"step": 2, "train/loss": 2.0},
    ]


def test_row_is_on_disk_as_soon_as_it_is_committed(tmp_path):
    logger = Logger(config(tmp_path))
    logger.log_metrics({"loss": 1.0}, 1, "train", step_finished=True)
    assert len(read_metrics(logger.path)) == 1
    logger.log_metrics({"loss": 1.0}, 2, "train")
    assert len(read_metrics(logger.path)) == 1
    logger.commit()
    assert len(read_metrics(logger.path)) == 2
    logger.close()


def test_resume_drops_rows_past_the_step_and_a_torn_line(tmp_path):
    with Logger(config(tmp_path)) as logger:
        for step in range(1, 6):
            logger.log_metrics({"loss": float(step)}, step, "train")
    with open(logger.path, "ab") as f:
        f.write(b'{"step": 6, "train/lo')
    with Logger(config(tmp_path), resume_step=3) as logger:
        logger.log_metrics({"loss": 44.0}, 4, "train")
    rows = read_metrics(logger.path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[-1]["train/loss"] == 44.0
    with Logger(config(tmp_path), resume_step=-1):
        pass
    assert read_metrics(logger.path) == []


def test_a_value_that_is_no_number_keeps_the_file_valid_json(tmp_path):
    with Logger(config(tmp_path)) as logger:
        logger.log_metrics({"loss": float("nan"), "x": float("inf")}, 1)
    assert json.loads(logger.path.read_text()) == {"step": 1, "loss": None, "x": None}


def test_other_ranks_write_nothing(tmp_path):
    with Logger(config(tmp_path), rank=1) as logger:
        logger.log_metrics({"loss": 1.0}, 1)
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_the_same_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Logger(config(tmp_path, tensorboard_enabled=True)) as logger:
        logger.log_hyperparams({"a": 1})
        logger.log_metrics({"loss": (3.0, 2.0)}, 7, "train")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (7, 1.5)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_tracker_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}_enabled .*'limbeck\[{name}\]'"):
        Logger(config(tmp_path, **{f"{name}_enabled": True}))


def test_tracker_protocol(tmp_path, monkeypatch):
    import sys
    import types

    calls = []
    module = types.SimpleNamespace(
        init=lambda **kw: calls.append(("init", kw)),
        log=lambda row, step: calls.append(("log", row, step)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "trackio", module)
    with Logger(config(tmp_path, trackio_enabled=True, trackio={"name": "n"})) as logger:
        logger.log_hyperparams({"a": 1})
        logger.log_metrics({"loss": 1.0}, 1, "train")
    (_, given), *rest = calls
    assert given == {"name": "n", "project": "limbeck", "resume": "allow"}
    assert rest == [("log", {"train/loss": 1.0}, 1), ("finish",)]


def test_a_tracker_has_one_run_with_a_name_over_a_resume(tmp_path, monkeypatch):
    import sys
    import types

    calls = {"wandb": [], "trackio": []}
    for name, made in calls.items():
        module = types.SimpleNamespace(init=lambda made=made, **kw: made.append(kw), log=None, finish=lambda: None)
        monkeypatch.setitem(sys.modules, name, module)
    settings = config(tmp_path, wandb_enabled=True, trackio_enabled=True) | {"log_dir": str(tmp_path / "pair_7")}
    for resume_step in (-1, 12, 40, -1):
        Logger(settings, resume_step=resume_step).close()
    first, second, third, anew = calls["wandb"]
    assert first == second == third
    assert first["name"] == "pair_7"
    assert first["resume"] == "allow"
    # a run that begins anew in an old folder is another one
    assert anew["id"] != first["id"]
    names = [given["name"] for given in calls["trackio"]]
    assert names[:3] == [f"pair_7-{first['id']}"] * 3
    assert names[3] == f"pair_7-{anew['id']}"


def test_progress_prints_lines_where_there_is_no_terminal(tmp_path, capsys):
    with Logger(config(tmp_path, progress=True, print_seconds=0)) as logger:
        logger.start_progress(10, 4)
        logger.update_progress(5, loss=1.25, tokens_per_s=1234.0)
    err = capsys.readouterr().err
    assert "step 5/10" in err
    assert "loss 1.2500" in err
    assert "1,234 tok/s" in err


def test_sums_add_up():
    merged = Metrics.total([{"a": (1.0, 2.0)}, {"a": (3.0, 2.0), "b": (5.0, 5.0)}]).pairs()
    assert merged == {"a": (4.0, 4.0), "b": (5.0, 5.0)}
    assert to_means({**merged, "c": 2, "none": (0.0, 0.0)}) == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_unreadable_rows_and_folders_are_named(tmp_path):
    bad = tmp_path / "metrics.jsonl"
    bad.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 "):
        read_metrics(bad)
    for row in ("[]", "3", "null", '{"step": Infinity}', '{"step": NaN}', '{"step": [1]}', "[" * 100_000, "9" * 5000):
        bad.write_text(f'{{"step": 1}}\n{row}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl:2 "):
            Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}, resume_step=1)
    bad.write_text('{"step": 1, "x": NaN, "y": {"z": [Infinity]}}\n')
    Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}, resume_step=1).close()
    assert read_metrics(bad)[0]["step"] == 1
    with pytest.raises(ConfigError, match=re.escape(repr(str(bad / "below")))):
        Logger({"log_dir": str(bad / "below"), "tensorboard_enabled": False})
