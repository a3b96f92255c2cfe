import json
import os
import re
import signal
import sys

import pytest
import torch

from limbeck.errors import CheckpointError, ConfigError
from limbeck.utils import CheckpointManager, load_state, save_state
from limbeck.utils.checkpoint import parse_duration


def manager(tmp_path, **more):
    return CheckpointManager({"checkpoint_dir": str(tmp_path / "ckpt"), **more})


def fill(folder, value):
    (folder / "policy").mkdir()
    for name in ("a", "b"):
        (folder / "policy" / name).write_text(f"{value}:{name}")


def save(m, step, **info):
    with m.saving(step, info) as folder:
        fill(folder, step)


def is_whole(path):
    step = path.name.removeprefix("step_")
    info = json.loads((path / "training_info.json").read_text())
    return info["step"] == int(step) and all((path / "policy" / n).read_text() == f"{step}:{n}" for n in ("a", "b"))


def steps(m):
    return [int(p.name.removeprefix("step_")) for p in m.checkpoints()]


def test_best_k_and_the_latest_are_kept(tmp_path):
    m = manager(tmp_path, metric_name="val:bpb", keep_top_k=2)
    for step, value in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)]:
        save(m, step, **{"val/bpb": value})
    assert steps(m) == [2, 3, 4]
    assert m.best().name == "step_2"
    assert m.latest().name == "step_4"
    assert m.get_best_checkpoint_path() == m.best()
    assert m.load_training_info()["val/bpb"] == 9.0


def test_higher_is_better_and_a_checkpoint_without_the_metric_ranks_last(tmp_path):
    m = manager(tmp_path, metric_name="acc", higher_is_better=True, keep_top_k=1)
    save(m, 1, acc=0.2)
    save(m, 2, acc=0.9)
    save(m, 3)
    assert steps(m) == [2, 3]
    assert m.best().name == "step_2"


def test_without_a_metric_the_latest_k_are_kept(tmp_path):
    m = manager(tmp_path, keep_top_k=2)
    for step in (9, 10, 11):
        save(m, step)
    assert steps(m) == [10, 11]


def test_keep_all(tmp_path):
    m = manager(tmp_path, keep_top_k=None)
    for step in range(1, 6):
        save(m, step)
    assert steps(m) == [1, 2, 3, 4, 5]


def die_at(n):
    """From now on, end the process (as kill -9 would) before its n-th file system operation."""
    left = [n]
    watched = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}

    def hook(event, args):
        if event in watched:
            left[0] -= 1
            if left[0] < 0:
                os._exit(137)

    sys.addaudithook(hook)


@pytest.mark.parametrize(
    ("case", "stride"),
    [("next", 4), pytest.param("next", 1, marks=pytest.mark.slow), pytest.param("replace", 1, marks=pytest.mark.slow)],
)
def test_a_kill_before_any_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path, case, stride):
    """Every operation in turn, or every fourth; 'replace' saves a step that exists already (a resumed run that repeats
    it)."""
    target = 3 if case == "next" else 2
    kills = 0
    for n in range(0, 400, stride):
        root = tmp_path / str(n)
        m = manager(root, keep_top_k=1)
        save(m, 1)
        save(m, 2)
        pid = os.fork()
        if pid == 0:
            die_at(n)
            try:
                save(m, target)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        again = manager(root, keep_top_k=1)
        assert all(p.name.startswith("step_") for p in again.checkpoint_dir.iterdir())
        assert all(is_whole(p) for p in again.checkpoints())
        assert again.latest().name in ("step_2", f"step_{target}")
        if os.waitstatus_to_exitcode(status) == 0:
            assert steps(again) == [target]
            break
        kills += 1
        save(again, 4)
        assert steps(again) == [4]
    else:
        pytest.fail("the save never ran to its end")
    assert kills > 15 // stride


def test_a_failed_save_leaves_the_previous_one_and_no_rubbish(tmp_path):
    m = manager(tmp_path)
    save(m, 1)

    def save_and_fail():
        with m.saving(2, {}) as folder:
            fill(folder, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    assert [p.name for p in m.checkpoint_dir.iterdir()] == ["step_1"]
    assert is_whole(m.latest())


def test_full_disk_is_a_clear_error_and_the_previous_one_stays(tmp_path):
    m = manager(tmp_path)
    save(m, 1)
    with (
        pytest.raises(CheckpointError, match=r"step 2 .*step_1 is intact"),
        m.saving(2, {}),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert [p.name for p in m.checkpoint_dir.iterdir()] == ["step_1"]


def test_full_disk_below_the_tensor_writer(tmp_path, monkeypatch):
    """The writer of distributed checkpoint wraps the system's error; it must be recognised all the same."""
    m = manager(tmp_path)
    real = open

    def full(path, mode="r", *a, **k):
        return real("/dev/full" if "safetensors" in str(path) and "w" in mode else path, mode, *a, **k)

    from pathlib import Path

    monkeypatch.setattr(Path, "open", lambda self, mode="r", *a, **k: full(self, mode, *a, **k))
    with pytest.raises(CheckpointError, match=r"step 2 .*no earlier"), m.saving(2, {}) as folder:
        save_state(folder / "train_state", {"w": torch.randn(100_000)})
    assert m.latest() is None
    assert not list(m.checkpoint_dir.iterdir())


def test_sigterm_asks_for_a_save_and_a_stop(tmp_path):
    m = manager(tmp_path, save_period=100)
    before = signal.getsignal(signal.SIGTERM)
    try:
        m.install_signal_handler()
        assert not m.should_stop()
        assert not m.should_save(7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert m.should_stop()
        assert m.should_save(7, stop=m.should_stop())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_when_to_save(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("limbeck.utils.checkpoint.time.monotonic", lambda: now[0])
    m = manager(tmp_path, save_period=10, save_every_minutes=2, checkpoint_must_save_by="00:00:10:00")
    assert [s for s in range(1, 31) if m.should_save(s)] == [10, 20, 30]
    assert m.should_save(7, last=True)
    now[0] = 121.0
    assert m.should_save(7)
    save(m, 7)
    assert not m.should_save(8)
    assert not m.should_stop()
    now[0] = 600.0
    assert m.should_stop()
    off = manager(tmp_path, enabled=False, save_period=1)
    assert not off.should_save(1, last=True)


@pytest.mark.parametrize(("text", "seconds"), [("01:30", 90), ("02:00:00", 7200), ("01:00:00:01", 86401)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["90", "1:2:3:4:5", "a:b", "-1:00"])
def test_bad_durations(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        parse_duration(text)


def test_unusable_folders_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=re.escape(repr(str(tmp_path / "file" / "x")))):
        CheckpointManager({"checkpoint_dir": str(tmp_path / "file" / "x")})
    with pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_dir"):
        CheckpointManager({})
    assert CheckpointManager({}, run_dir=tmp_path).checkpoint_dir == tmp_path / "checkpoints"


def test_damaged_info_is_named(tmp_path):
    m = manager(tmp_path)
    save(m, 1)
    (m.latest() / "training_info.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"training_info.json.* cannot be read"):
        m.load_training_info()


def _loop(model, opt, sched, start, stop):
    for _ in range(start, stop):
        x = torch.randn(4, 3)
        loss = (torch.nn.functional.dropout(model(x), 0.5) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()


def test_a_resumed_loop_ends_with_the_same_bits(tmp_path):
    from limbeck.utils import capture_rng, restore_rng, seed_everything

    def parts():
        model = torch.nn.Linear(3, 2)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, opt, torch.optim.lr_scheduler.LinearLR(opt, total_iters=10)

    seed_everything(3)
    model, opt, sched = parts()
    _loop(model, opt, sched, 0, 4)
    m = manager(tmp_path)
    state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "rng": capture_rng()}
    with m.saving(4, {}) as folder:
        save_state(folder / "train_state", state)
    _loop(model, opt, sched, 4, 10)

    seed_everything(99)
    model2, opt2, sched2 = parts()
    back = load_state(m.latest() / "train_state")
    model2.load_state_dict(back["model"])
    opt2.load_state_dict(back["opt"])
    sched2.load_state_dict(back["sched"])
    restore_rng(back["rng"])
    _loop(model2, opt2, sched2, 4, 10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters(), strict=True))
