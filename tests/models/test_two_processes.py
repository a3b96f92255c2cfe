"""Two data-parallel processes (gloo): the same step as one process, checkpoints written together, shards re-read."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from limbeck.teachers.live import LiveTeacher
from limbeck.utils import CheckpointManager, load_state, save_state
from tests.helpers.processes import free_port, ranks
from tests.helpers.tiny import batch, loss_fn, student, teacher

ROWS = [[0, 1, 2, 3], [4, 5]]
# plain descent: Adam would blow up the last bits of gradients that are almost zero
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}


def _sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(20.0).reshape(5, 4)
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(full.clone(), mesh, [Shard(0)]), full


def _work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        policy = student(dp_group=dist.group.WORLD, max_grad_norm=0.5, train_micro_batch_size=1, optimizer=SGD)
        results = [policy.train(batch(ROWS[rank]), loss_fn(), teachers=[LiveTeacher(teacher())]) for _ in range(2)]
        shard, full = _sharded(rank)
        manager = CheckpointManager({"checkpoint_dir": f"{folder}/ckpt"})
        stop = manager.should_stop()
        if rank == 1:
            manager.save_on_signal = True
        with manager.saving(2, {"loss": results[-1]["loss"]}) as path:
            policy.save_checkpoint(path / "policy" / "weights", path / "train_state")
            save_state(path / "sharded", {"w": shard, "plain": torch.ones(3), "n": 7})
            save_state(path / f"rank_{rank:05d}", {"rank": torch.tensor(rank)}, local=True)
        target = _sharded(rank)[0]
        target.to_local().zero_()
        back = load_state(manager.latest() / "sharded", template={"w": target, "plain": torch.zeros(3), "n": 0})
        same = torch.equal(back["w"].full_tensor(), full)
        if rank == 0:
            numbers = [{k: r[k] for k in ("loss", "grad_norm", "tokens", "microbatches", "metrics")} for r in results]
            with open(f"{folder}/result.json", "w") as f:
                json.dump({"steps": numbers, "stop": [stop, manager.should_stop()], "same": same}, f)
        else:
            manager.should_stop()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    ranks(2, _work, free_port(), str(folder))
    return folder, json.loads((folder / "result.json").read_text())


def test_two_processes_take_the_step_of_one(outcome):
    folder, result = outcome
    policy = student(max_grad_norm=0.5, optimizer=SGD)
    for found in result["steps"]:
        expected = policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert found["tokens"] == expected["tokens"]
        # the rank with two rows waits through two fillers
        assert found["microbatches"] == 4
        for name, pair in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(list(pair), rel=1e-5, abs=1e-9), name
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(folder / "ckpt" / "step_2" / "policy" / "weights")
    for x, y in zip(saved.parameters(), policy.model.parameters(), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_checkpoints_are_written_together(outcome):
    folder, result = outcome
    assert result["same"]
    assert result["stop"] == [False, True]
    assert [p.name for p in (folder / "ckpt").iterdir()] == ["step_2"]
    step = folder / "ckpt" / "step_2"
    assert [int(load_state(step / f"rank_{r:05d}")["rank"]) for r in (0, 1)] == [0, 1]
    alone = load_state(step / "sharded")
    assert torch.equal(alone["w"], torch.arange(20.0).reshape(5, 4))
    assert torch.equal(alone["plain"], torch.ones(3))
    assert alone["n"] == 7
    assert len(list((step / "sharded").glob("*.safetensors"))) == 2
    assert load_state(step / "train_state")["steps"] == 2
