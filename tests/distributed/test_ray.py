"""The same run under Ray: two workers, one of them killed on the way; and a cache filled by workers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms import caching as ray_cache
from limbeck.algorithms.caching import CacheJob, cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher, run
from limbeck.config import load_config, resolve
from limbeck.distributed.launch import launch
from limbeck.errors import CacheError, ConfigError, DataError, ExitCode
from limbeck.teachers.cache import CacheReader
from tests.cli.command import run as command
from tests.distributed.ray_cases import HeldPartCacher, gate_beside, held_run
from tests.gates import Gate
from tests.helpers import runs, tiny
from tests.helpers.ray_cluster import ROOT, cluster, give_back
from tests.helpers.servers import ScoringServer, serving
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow
RAY = ["cluster.launcher=ray", "cluster.num_workers=2"]


@pytest.fixture(scope="module")
def two_cores() -> Iterator[Any]:
    with cluster(2) as ray:
        yield ray


@pytest.fixture(autouse=True)
def whole_cluster(two_cores: Any) -> Iterator[None]:
    yield
    give_back(two_cores, 2)


def config(path: Path, **cluster) -> MasterConfig:
    overrides = [f"cluster.{k}={v}" for k, v in {"launcher": "ray", "num_workers": 2, **cluster}.items()]
    return resolve(MasterConfig, load_config(path, overrides))


@contextmanager
def killing(gate: Gate, number: int) -> Iterator[list[int]]:
    """Kills one worker, without warning, once ``number`` of them wait at the gate, and lets the others go; gives the
    list of the killed. The gate is open behind the block, whatever happened in it, so that nobody is left waiting."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while len(gate.arrived()) < number:
            if ended.wait(0.01):
                return
        os.kill(gate.arrived()[-1], signal.SIGKILL)
        killed.append(gate.arrived()[-1])
        gate.open()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()
        gate.open()


def test_a_killed_worker_costs_no_step(tmp_path):
    """The whole run ends with the same figures as two processes that nobody killed."""
    path = runs.write_run(tmp_path, distillation={"max_num_steps": 6, "num_prompts_per_step": 4, "val_at_start": False})
    with killing(gate_beside(tmp_path / "run"), 2) as killed:
        folder = launch(held_run, config(path))
    assert killed
    assert folder == tmp_path / "run"
    calm = tmp_path / "calm"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "limbeck", "train", str(path), f"logger.log_dir={calm}", "-q"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert runs.rows(folder) == runs.rows(calm)
    assert [row["step"] for row in runs.rows(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_stopped_early_ends_with_75(tmp_path, capsys):
    """The workers' deadline has passed when they begin: they save after one step, and the driver says so."""
    steps = {"max_num_steps": 4, "num_prompts_per_step": 4, "val_at_start": False}
    path = runs.write_run(tmp_path, distillation=steps, checkpointing={"checkpoint_must_save_by": "00:00"})
    code, out, err = command(capsys, "train", path, *RAY, "-q", "--json")
    assert code == ExitCode.STOPPED_EARLY, err
    assert json.loads(out.splitlines()[-1])["stopped_early"]
    assert (tmp_path / "run" / "report.html").is_file()
    assert {row["step"] for row in runs.rows(tmp_path / "run")} == {1}


def test_an_error_of_the_run_is_told_and_not_retried(tmp_path):
    path = runs.write_run(tmp_path, data={"train": str(tmp_path / "nothing.jsonl"), "max_input_seq_length": 64})
    with pytest.raises(DataError, match=r"nothing\.jsonl") as caught:
        launch(run, config(path, num_workers=1))
    assert "\n" not in str(caught.value)


def test_more_workers_than_the_cluster_holds(tmp_path):
    with pytest.raises(ConfigError, match=r"has 2 CPU, but 3 workers of 1 each need 3"):
        launch(run, config(runs.write_run(tmp_path), num_workers=3))


def test_without_ray_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'limbeck\[ray\]'"):
        launch(run, config(runs.write_run(tmp_path)))


def test_a_cache_by_workers_that_die(tmp_path, monkeypatch):
    """Every record is stored exactly once, with the scores of a single process; complete parts are not done again."""
    path = runs.write_run(tmp_path, teacher={"cache": str(tmp_path / "cache"), "cache_k": 8})
    monkeypatch.setattr(ray_cache, "PartCacher", HeldPartCacher)
    lines: list[str] = []
    with killing(gate_beside(tmp_path / "cache"), 1) as killed:
        (summary,) = cache_teachers(config(path, cache_parts=6), say=lines.append)
    assert killed
    assert summary["documents"] == 24
    assert sum("complete with 4 documents" in line for line in lines) == 6
    far = CacheReader(tmp_path / "cache")
    journals = [line for p in (tmp_path / "cache").glob("*.journal") for line in p.read_text().splitlines()]
    assert len(journals) == far.verify() == 24
    alone = resolve(MasterConfig, load_config(path, [f"teacher.cache={tmp_path / 'alone'}"]))
    cache_teachers(alone, say=lines.append)
    assert sorted(far.keys()) == sorted(CacheReader(tmp_path / "alone").keys())
    lines.clear()
    assert cache_teachers(config(path, cache_parts=9), say=lines.append) == [summary]
    assert "0 of 6 parts are to be done" in lines[0]


def test_a_worker_that_dies_too_often_ends_the_cache(tmp_path, monkeypatch):
    """Ray alone would start it again without end."""
    path = runs.write_run(tmp_path, teacher={"cache": str(tmp_path / "cache"), "cache_k": 8})
    monkeypatch.setattr(ray_cache, "PartCacher", HeldPartCacher)
    once = config(path, num_workers=1, cache_parts=6, max_restarts=0)
    with (
        killing(gate_beside(tmp_path / "cache"), 1) as killed,
        pytest.raises(CacheError, match="max_restarts=0") as told,
    ):
        cache_teachers(once, say=lambda line: None)
    assert killed
    assert "\n" not in str(told.value)


def test_a_cache_from_a_server(tmp_path):
    """Workers ask a server instead of holding the teacher; what it refused is asked for again, and nothing else."""
    path = runs.write_run(tmp_path, teacher={"cache": str(tmp_path / "cache")})
    policy = live_teacher(config(path), 0, tiny.tokenizer(340))
    lines: list[str] = []

    def refuse(number, body, answer):
        texts = [tiny.tokenizer(340).decode(p) for p in body["prompt"] if isinstance(p, list)]
        return (400, {}) if any(text.startswith("(1) def") for text in texts) else None

    with serving(ScoringServer(policy, max_k=8)) as server:
        server.lie = refuse
        far = [f"teacher.server.url={server.url}", "teacher.server.k=8", "teacher.server.on_failure=skip"]
        far.append(f"teacher.server.timeout={WAIT_SECONDS}")
        job = resolve(MasterConfig, load_config(path, [*far, *RAY, "cluster.cache_parts=4"]))
        (summary,) = cache_teachers(job, say=lines.append)
        assert (summary["documents"], summary["failed"]) == (23, {"http_400": 1})
        assert sum("complete with 6 documents" in line for line in lines) == 3
        assert "run the same command again" in lines[-1]
        server.lie = None
        lines.clear()
        (summary,) = cache_teachers(job, say=lines.append)
    assert (summary["documents"], summary["failed"]) == (24, {})
    assert "1 of 4 parts are to be done" in lines[0]
    assert CacheReader(tmp_path / "cache").verify() == 24


def test_cache_jobs_say_what_they_lack(tmp_path):
    with pytest.raises(ConfigError, match="no teacher has a cache folder"):
        CacheJob(config(runs.write_run(tmp_path)))
