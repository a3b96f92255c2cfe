"""One run file, started alone and by torchrun: the same losses; and what the launcher does with each setting."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from limbeck.distributed.launch import ClusterConfig, _connect, launch, number_of_workers, worker_resources
from limbeck.errors import ConfigError
from tests.helpers import runs
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def train(path: Path, run_dir: Path, *launcher: str) -> None:
    command = [sys.executable, "-m", *launcher, "limbeck", "train", str(path), f"logger.log_dir={run_dir}", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_torchrun_computes_what_one_process_does(tmp_path):
    """Two processes share the records of each step, so losses and gradient norms are those of one."""
    path = runs.write_run(tmp_path, distillation={"num_prompts_per_step": 4, "max_num_steps": 3, "val_at_start": False})
    train(path, tmp_path / "alone")
    train(path, tmp_path / "two", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    alone, two = runs.rows(tmp_path / "alone"), runs.rows(tmp_path / "two")
    assert [row["step"] for row in two] == [1, 2, 3]
    for one, other in zip(alone, two, strict=True):
        assert one.keys() == other.keys()
        for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/ce_loss"):
            assert other[name] == pytest.approx(one[name], rel=2e-4), name


def test_local_simply_calls(tmp_path):
    config = SimpleNamespace(cluster=SimpleNamespace(launcher="local"))
    assert launch(lambda c: tmp_path if c is config else None, config) == tmp_path


@pytest.mark.parametrize(
    ("cluster", "workers"),
    [({}, 1), ({"num_workers": 3}, 3), ({"num_nodes": 2, "gpus_per_node": 8}, 16), ({"gpus_per_node": 0}, 1)],
)
def test_number_of_workers(cluster, workers):
    assert number_of_workers(ClusterConfig(**cluster)) == workers


class Cluster:
    def __init__(self, **resources: float) -> None:
        self.resources = resources

    def cluster_resources(self) -> dict[str, float]:
        return self.resources


def test_workers_take_gpus_where_there_are_enough():
    both = Cluster(CPU=16.0, GPU=4.0)
    assert worker_resources(both, ClusterConfig(), 4) == {"CPU": 1.0, "GPU": 1.0}
    assert worker_resources(both, ClusterConfig(), 8) == {"CPU": 1.0}
    assert worker_resources(both, ClusterConfig(gpus_per_node=0), 4) == {"CPU": 1.0}
    with pytest.raises(ConfigError, match="has 4 GPU, but 8 workers of 1 each need 8"):
        worker_resources(both, ClusterConfig(gpus_per_node=8), 8)


def test_an_unreachable_cluster():
    class Unreachable:
        def init(self, **options: object) -> None:
            raise ConnectionError("nobody\nthere")

    # somebody listens there, but Ray does not come to terms with it
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"'{address}' .*nobody there"):
            _connect(Unreachable(), address)
