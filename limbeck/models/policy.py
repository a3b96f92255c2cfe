"""The published policy: a language model together with the trainer of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.errors import ConfigError, DataError
from limbeck.losses.contract import Loss, Teacher
from limbeck.models.checkpoint import load_trainer, save_policy
from limbeck.models.language_model import LanguageModel
from limbeck.models.loading import ModelConfig
from limbeck.models.lora import LoraConfig
from limbeck.models.trainer import StepInput, StepResult, Trainer, TrainingConfig, evaluate
from limbeck.utils.logger import to_means
from limbeck.utils.timer import Timer

__all__ = ["Policy", "PolicyConfig", "published_metrics"]


def published_metrics(result: Mapping[str, Any], loss_fn: Any = None) -> dict[str, float]:
    """Means by the names of NeMo RL: ``loss``, ``kl_loss``, ``ce_loss``, ``accuracy``, ``proj_accuracy``,
    ``kl_common``, ``l1_uncommon``, ``kl_loss_scale``, ``num_valid_samples``, ``selected_teacher``, ``weight_t0``, ...,
    as far as the loss has them.

    Args:
        result: what `Policy.train` returns, or the metrics of a validation.
        loss_fn: the distillation loss, for ``kl_loss_scale``: the factor of the KL as it stands.
    """
    metrics = to_means(result.get("metrics", result))
    out = {name: value for name, value in metrics.items() if "/" not in name}
    for name, metric in (("kl_common", "common_kl"), ("l1_uncommon", "uncommon_l1")):
        values = [value for key, value in metrics.items() if re.fullmatch(rf"teacher_\d+/{metric}", key)]
        if values:
            out[name] = sum(values) / len(values)
    weights = {int(m[1]): v for key, v in metrics.items() if (m := re.fullmatch(r"teacher_(\d+)/weight", key))}
    out |= {f"weight_t{number}": value for number, value in weights.items()}
    if loss_fn is not None:
        out["kl_loss_scale"] = loss_fn.scale.ratio() if loss_fn.cfg.dynamic_loss_scaling else loss_fn.cfg.kl_loss_weight
        if loss_fn.cfg.teacher_combination == "select_teacher" and weights:
            out["selected_teacher"] = float(max(weights, key=weights.__getitem__))
    if "global_valid_seqs" in result:
        out["num_valid_samples"] = float(result["global_valid_seqs"])
        out["global_valid_seqs"], out["global_valid_toks"] = (
            out["num_valid_samples"],
            float(result["global_valid_toks"]),
        )
        out["loss"] = float(result["loss"])
        out |= {name: float(result[name]) for name in ("grad_norm", "lr") if result.get(name) is not None}
    return out


class PolicyConfig(ModelConfig, TrainingConfig):
    """A causal language model and how to train or score with it."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""

    @property
    def adapters(self) -> LoraConfig | None:
        return self.lora if self.lora is not None and self.lora.enabled else None

    @classmethod
    def scoring(cls, model: ModelConfig) -> PolicyConfig:
        """The configuration of a model that only scores."""
        return cls(**{name: getattr(model, name) for name in ModelConfig.model_fields})


class Policy(LanguageModel):
    """A transformers causal language model with its optimizer, schedule and tokenizer.

    Args:
        cfg: ``PolicyConfig`` or a mapping with its keys; ``ModelConfig`` for a model that only scores.
        tokenizer: the model's tokenizer; None for a model that only sees ids (``vocab_size`` is then its head's).
        name: used in messages and metrics.
        device: default: the accelerator if there is one, else the CPU.
        init_optimizer: False for a frozen teacher.
        seed: of random weights and adapters.
        weights_path: folder written by ``save_checkpoint`` to start from instead of ``cfg.model_name``.
        optimizer_path: train state written by ``save_checkpoint`` to go on from.
        dp_group: data-parallel process group or mesh; gradients are summed over it. A layout in ``cfg.dtensor_cfg``
            (tensor or context parallel, fsdp) makes its own groups over all processes instead.
        model: an instantiated causal model to use instead of loading one.
    """

    def __init__(
        self,
        cfg: ModelConfig | Mapping[str, Any],
        tokenizer: object,
        *,
        name: str = "policy",
        device: torch.device | str | None = None,
        init_optimizer: bool = True,
        seed: int | None = None,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        dp_group: Any = None,
        model: nn.Module | None = None,
    ) -> None:
        if isinstance(cfg, Mapping) and model is not None:
            # validation wants a name, though nothing is loaded by it
            cfg = {"model_name": type(model).__name__, **cfg}
        if isinstance(cfg, ModelConfig) and not isinstance(cfg, PolicyConfig):
            cfg = PolicyConfig.scoring(cfg)
        config = resolve(PolicyConfig, cfg)
        super().__init__(
            config,
            tokenizer,
            name=name,
            device=device,
            trained=init_optimizer,
            seed=seed,
            weights_path=weights_path,
            dp_group=dp_group,
            model=model,
        )
        self.trainer = Trainer(self, config) if init_optimizer else None
        if optimizer_path is not None:
            load_trainer(self.trainer, optimizer_path)

    @property
    def cfg(self) -> PolicyConfig:
        assert isinstance(self._cfg, PolicyConfig)
        return self._cfg

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self.trainer is None else self.trainer.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        return None if self.trainer is None else self.trainer.scheduler

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.trainer is None else self.trainer.steps

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Loss[Any],
        *,
        teachers: Sequence[Teacher] = (),
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per global batch of ``data`` (none with ``eval_mode``), over this rank's rows.

        Args:
            data: rows of this rank; one global batch, or several of ``gbs`` rows (over all ranks) each.
            loss_fn: has ``denominators``, ``build_layout`` and ``compute_loss``, see ``limbeck.losses``.
            teachers: one source per teacher of the loss, in order.
            eval_mode: loss and metrics only; no gradient, no step.
            gbs: rows per step over all ranks; default: all of ``data``.
            mbs: rows per micro-batch where neither dynamic batching nor packing is on; default: as configured, or
                found.
            timer: sections ``teacher``, ``forward``, ``layout``, ``loss``, ``backward``, ``optimizer``, and ``wait``:
                for a device that works behind the host.

        Returns:
            ``loss`` (global), ``grad_norm`` (before clipping), ``lr``, ``metrics`` (name -> (sum, count), reduced over
            ranks), ``tokens`` (real student tokens over all ranks), ``microbatches``, ``counts``.

        Raises:
            LossError: a loss or gradient is not finite; weights and optimizer are as before the step.
        """
        if self.trainer is None and not eval_mode:
            raise ConfigError(f"policy {self.name!r} is frozen (init_optimizer=False) and cannot be trained")
        if len(teachers) != loss_fn.num_teachers:
            raise ConfigError(
                f"the loss takes {loss_fn.num_teachers} teachers, and {len(teachers)} are given; pass teachers=[...], "
                "one Teacher each, such as LiveTeacher(policy)"
            )
        for number, teacher in enumerate(teachers):
            teacher.number = number
        ranks, timer = self.dims.data.size, timer or Timer()
        # among several ranks one may have no rows; it still takes part
        local = max(data.size, int(ranks > 1)) if gbs is None else gbs // ranks
        if local < 1 or (gbs is not None and gbs % ranks):
            raise DataError(
                f"a global batch of {gbs} rows over {ranks} ranks is not usable; give a multiple of {ranks}"
            )
        rows = mbs or self.cfg.train_micro_batch_size
        results: list[StepResult] = []
        updates = max(1, math.ceil(data.size / local))
        if gbs is not None and ranks > 1:
            # data-parallel ranks, per call, one number: all take the same updates, though records that are split give
            # some ranks more rows than others
            updates = int(self.dims.data.max(torch.tensor(updates)))
        for index in range(updates):
            # behind its last row, which get_batch refuses, a rank still takes part
            part = data.get_batch(index, local) if index * local <= max(data.size - 1, 0) else data.slice(0, 0)
            step_input = StepInput(part, loss_fn, teachers)
            if eval_mode or self.trainer is None:
                results.append(evaluate(self, [step_input], timer, micro_batch_size=rows))
            else:
                results.append(self.trainer.step([step_input], timer, micro_batch_size=rows))
        result = StepResult.merged(results)
        if self.optimizer is not None and result.lr is None:
            result = replace(result, lr=self.optimizer.param_groups[0]["lr"])
        return result.as_dict()

    def prepare_for_training(self) -> None:
        """Move model and optimizer to the device; the model is then ready to train."""
        self._move(self.device)
        self._move_optimizer(self.device)
        self.model.train()

    def offload(self) -> None:
        """Move model and optimizer to main memory until they are needed again."""
        self._move(torch.device("cpu"))
        self._move_optimizer(torch.device("cpu"))

    def _move_optimizer(self, device: torch.device) -> None:
        if self.optimizer is None or self.cfg.dtensor_cfg.cpu_offload:
            return
        for state in self.optimizer.state.values():
            for key, value in state.items():
                # step counters stay where the optimizer keeps them
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Write a transformers folder (adapters merged) with its tokenizer, and the train state where asked for.

        Every rank must call it. Weights are whole from any layout; the train state may be read under another one.
        """
        save_policy(self, self.trainer, weights_path, optimizer_path, tokenizer_path)
