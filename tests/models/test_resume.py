"""A run that stops at any step and goes on ends with the same bits: weights, losses, batches, random numbers."""

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.data.loader import ShardSampler
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from limbeck.utils import CheckpointManager, capture_rng, load_state, restore_rng, save_state, seed_everything
from tests.helpers.tiny import TEXTS, collator, config, loss_fn, teacher, tokenizer

# dropout draws from the global generator in every step, so a resume that loses its place there shows
CONFIG = config(
    lora={"r": 4, "dropout": 0.2},
    scheduler={"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 6}},
)


class Run:
    def __init__(self, checkpoint=None):
        seed_everything(3 if checkpoint is None else 4)
        records = [{"text": t, "idx": i, "loss_multiplier": 1.0} for i, t in enumerate(TEXTS)]
        self.loader = StatefulDataLoader(
            records,
            batch_size=2,
            sampler=ShardSampler(len(records), seed=1, multiple=2),
            collate_fn=collator(),
            # without a generator of its own, every new iterator draws from the global one
            generator=torch.Generator().manual_seed(1),
        )
        self.loss = loss_fn(dynamic_loss_scaling=True)
        self.teacher = LiveTeacher(teacher())
        paths = {}
        if checkpoint is not None:
            paths = {"weights_path": checkpoint / "weights", "optimizer_path": checkpoint / "policy"}
        self.policy = Policy(CONFIG, tokenizer(300), device="cpu", seed=0, **paths)
        self.log = []
        if checkpoint is not None:
            own = load_state(checkpoint / "rank_0")
            self.loader.sampler.set_epoch(own["epoch"])
            if own["loader"] is not None:
                self.loader.load_state_dict(own["loader"])
            self.loss.load_state_dict(own["loss"])
            restore_rng(own["rng"])

    def _save(self, manager, ended):
        step = self.policy.steps
        with manager.saving(step, {}) as folder:
            self.policy.save_checkpoint(folder / "weights", folder / "policy")
            own = {
                "loader": None if ended else self.loader.state_dict(),
                "epoch": step // 3,
                "loss": self.loss.state_dict(),
                "rng": capture_rng(),
            }
            save_state(folder / "rank_0", own)

    def steps(self, until, manager=None):
        while self.policy.steps < until:
            self.loader.sampler.set_epoch(self.policy.steps // 3)
            for data in self.loader:
                result = self.policy.train(data, self.loss, teachers=[self.teacher])
                step = self.policy.steps
                self.log.append((step, list(data["idx"]), result["loss"], result["lr"]))
                if manager is not None:
                    self._save(manager, step % 3 == 0)


def test_resume_from_every_step_is_bit_identical(tmp_path):
    whole = Run()
    whole.steps(6, CheckpointManager({"checkpoint_dir": str(tmp_path), "keep_top_k": None}))
    assert len({tuple(idx) for _, idx, _, _ in whole.log}) > 3
    for step in range(1, 6):
        again = Run(tmp_path / f"step_{step}")
        again.steps(6)
        assert again.log == whole.log[step:]
        for (name, x), y in zip(whole.policy.model.named_parameters(), again.policy.model.parameters(), strict=True):
            assert torch.equal(x, y), name
        for x, y in zip(whole.loss.state_dict().values(), again.loss.state_dict().values(), strict=True):
            assert torch.equal(x, y)
