"""A causal language model that trains and scores: global batch in, one optimizer step out.

The head is never applied to a whole sequence. The body gives hidden states, the loss takes them together with the head
and works in row blocks; scoring does the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedInputs, ProcessedMicrobatch, get_microbatch_iterator
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device, to_device
from limbeck.distributed.sharding import (
    Sharding,
    Source,
    empty_optimizer_state,
    load_optimizer_state,
    optimizer_state,
    scheduler_state,
    shard_model,
)
from limbeck.losses.signals import Head
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis, VocabAxis
from limbeck.models.attention import choose_attention, verify_document_isolation
from limbeck.models.checkpoint import save_weights
from limbeck.models.loading import (
    ModelBuilder,
    ModelConfig,
    body_of,
    make_dims,
    model_identity,
    parse_dtype,
    refuse_unsupported,
    tokenizer_size,
)
from limbeck.models.lora import adapter_state, is_lora, load_adapter_state, unwrap
from limbeck.models.optim import OptimizerConfig, SchedulerConfig, build_optimizer, build_scheduler
from limbeck.models.scoring import RowScores, next_tokens, sample_rows, score_rows
from limbeck.models.trainer import TeacherSource, train_on_batches
from limbeck.utils.errors import CheckpointError, ConfigError
from limbeck.utils.state import load_state, save_state
from limbeck.utils.timer import Timer

__all__ = ["Policy", "PolicyConfig"]


class PolicyConfig(ModelConfig):
    """A causal language model and how to train or score with it."""

    train_global_batch_size: int = Field(default=32, ge=1)
    train_micro_batch_size: int = Field(default=1, ge=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-5, "weight_decay": 0.0})
    scheduler: SchedulerConfig | list[SchedulerConfig] | None = None


class Policy:
    """A transformers causal language model with its optimizer, schedule and tokenizer.

    Args:
        cfg: ``PolicyConfig`` or a mapping with its keys.
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
        extra_parameters: trained along with the model, such as a loss function's learnable projections.
    """

    def __init__(
        self,
        cfg: PolicyConfig | Mapping[str, Any],
        tokenizer: Any,
        *,
        name: str = "policy",
        device: torch.device | str | None = None,
        init_optimizer: bool = True,
        seed: int | None = None,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        dp_group: Any = None,
        model: nn.Module | None = None,
        extra_parameters: Iterable[nn.Parameter] = (),
    ) -> None:
        if isinstance(cfg, Mapping) and model is not None:
            cfg = {"model_name": type(model).__name__, **cfg}
        self.cfg = resolve(PolicyConfig, cfg)
        self.name, self.tokenizer = name, tokenizer
        self.device = torch.device(device if device is not None else default_device())
        self.precision = parse_dtype(self.cfg.precision)
        refuse_unsupported(self.cfg, name, init_optimizer)
        size = tokenizer_size(tokenizer)
        self.dims = make_dims(self.cfg, name, self.device, model, size, Comm.of(dp_group))
        builder = ModelBuilder(self.cfg, trained=init_optimizer, size=size, seed=seed, weights=weights_path)
        built, source = builder.build(model, self.dims, self.device)
        self.model: Any = built
        self.vocab_size = Head.from_model(unwrap(self.model), size).vocab_size
        self.body: Any = body_of(self.model)
        self.sharding = self._shard(source)
        self._prepare_body(init_optimizer)
        self._trained = [p for p in (*self.model.parameters(), *extra_parameters) if p.requires_grad]
        self.optimizer = build_optimizer(self._trained, self.cfg.optimizer) if init_optimizer else None
        self.scheduler = build_scheduler(self.optimizer, self.cfg.scheduler) if self.optimizer else None
        self.steps = 0
        if optimizer_path is not None:
            self.load_train_state(optimizer_path)

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _shard(self, source: Source | None) -> Sharding:
        narrow = self.precision != torch.float32 and self.model.dtype != self.precision
        layout = self.cfg.dtensor_cfg
        return shard_model(
            unwrap(self.model),
            self.body,
            self.dims,
            fsdp=layout.fsdp,
            param_dtype=self.precision if narrow else None,
            sequence_parallel=layout.sequence_parallel,
            cpu_offload=layout.cpu_offload,
            source=source,
        )

    @functools.cached_property
    def axis(self) -> VocabAxis:
        """Which columns of the vocabulary ``head`` has on this rank."""
        if self.dims.tensor.size == 1:
            return WHOLE
        rows = unwrap(self.model).get_output_embeddings().weight.shape[0]
        return ShardedAxis.of_rows(self.dims.tensor, rows, self.vocab_size)

    def _prepare_body(self, trained: bool) -> None:
        if trained and self.cfg.dtensor_cfg.activation_checkpointing:
            unwrap(self.model).gradient_checkpointing_enable({"use_reentrant": False})
            if is_lora(self.model):
                unwrap(self.model).enable_input_require_grads()
        if self.dims.context.size == 1:
            choose_attention(unwrap(self.model), self.cfg.attn_implementation, self.precision, self.device)
        self._packs = False
        if self.cfg.packed:
            self.allow_packing()
        options = self.cfg.compile
        if options.enabled:
            # alike as they are, layers share one compiled graph: it is made sooner, and made anew sooner
            for module in getattr(self.body, "layers", None) or [self.body]:
                module.compile(mode=options.mode, dynamic=options.dynamic)

    def allow_packing(self) -> None:
        """Verify, once, that packed documents do not see each other."""
        if self._packs:
            return
        with self.autocast():
            verify_document_isolation(
                self.body,
                vocab_size=self.vocab_size,
                tolerance=1e-3 if self.precision == torch.float32 else 5e-2,
                run=self._hidden,
                layout=self.cfg.dtensor_cfg,
                device=self.device,
            )
        self._packs = True

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Computation in ``precision`` where the parameters are of a wider type; nothing otherwise."""
        narrow = self.precision != torch.float32 and self.model.dtype != self.precision
        with torch.autocast(self.device.type, self.precision) if narrow else contextlib.nullcontext():
            yield

    # -- forward ----------------------------------------------------------------------------------------------------

    def head(self, *, whole: bool = False) -> Head:
        """The head as the loss uses it, in ``precision``; a fresh view of the present weights, with gradient.

        ``whole``: all rows on every rank, without gradient, also where tensor parallelism splits them.
        """
        head = Head.from_model(unwrap(self.model), self.vocab_size)
        if head.weight is not None:
            weight = self.sharding.head_weight(head.weight, whole=whole)
            head = replace(head, weight=weight, axis=WHOLE if whole else self.axis)
        if head.weight is not None and head.weight.dtype != self.precision and self.precision != torch.float32:
            head.weight = head.weight.to(self.precision)
            head.bias = None if head.bias is None else head.bias.to(self.precision)
        return head

    def forward_hidden(self, inputs: ProcessedInputs) -> Tensor:
        """Hidden states of one forward pass as flat rows [R, h]."""
        with self.autocast():
            hidden = self._hidden(inputs.model_kwargs(drop_padding_mask=True), inputs.borders)
        return hidden.reshape(-1, hidden.shape[-1])

    def _hidden(self, kwargs: dict[str, Any], borders: Sequence[int] | None = None) -> Tensor:
        """Last hidden states [B, T, h] of whole sequences, which may be split over ranks on the way."""
        return self.sharding.run(kwargs, borders)

    def microbatches(
        self, data: BatchedDataDict, mbs: int, *, prefix: str = "", training: bool = True
    ) -> tuple[Iterator[ProcessedMicrobatch], int]:
        """Micro-batches of ``data`` on this policy's device, and how many."""
        key = "train_mb_tokens" if training or not self._has_logprob_budget() else "logprob_mb_tokens"
        # shards are gathered together, so every rank must take as many forward passes
        ranks = self.dims.data if training or self.sharding.fsdp else Comm.alone()
        cp = self.cfg.dtensor_cfg.context_parallel_size
        return get_microbatch_iterator(
            data, self.cfg, mbs, ranks, self.tokenizer, cp, key_prefix=prefix, device=self.device, tokens_key=key
        )

    def _has_logprob_budget(self) -> bool:
        budgets = self.cfg.budgets
        return budgets is not None and budgets[1].logprob_mb_tokens is not None

    # -- train ------------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        *,
        teachers: Sequence[TeacherSource] = (),
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per global batch of ``data`` (none with ``eval_mode``), over this rank's rows.

        Args:
            data: rows of this rank; one global batch, or several of ``gbs`` rows (over all ranks) each.
            loss_fn: has ``counts``, ``prepare`` and ``compute``, see ``limbeck.losses``.
            teachers: one source per teacher of the loss, in order.
            eval_mode: loss and metrics only; no gradient, no step.
            gbs: rows per step over all ranks; default: all of ``data``.
            mbs: rows per micro-batch where neither dynamic batching nor packing is on.
            timer: sections ``teacher``, ``forward``, ``loss``, ``backward``, ``optimizer``, and ``wait``: for a device
                that works behind the host.

        Returns:
            ``loss`` (global), ``grad_norm`` (before clipping), ``lr``, ``metrics`` (name -> (sum, count), reduced over
            ranks), ``tokens`` (real student tokens over all ranks), ``microbatches``, ``counts``.

        Raises:
            LossError: a loss or gradient is not finite; weights and optimizer are as before the step.
        """
        if self.optimizer is None and not eval_mode:
            raise ConfigError(f"policy {self.name!r} is frozen (init_optimizer=False) and cannot be trained")
        mbs = mbs or self.cfg.train_micro_batch_size
        self.model.train(not eval_mode)
        try:
            return train_on_batches(
                self, data, loss_fn, list(teachers), eval_mode=eval_mode, gbs=gbs, mbs=mbs, timer=timer or Timer()
            )
        finally:
            self.model.eval()

    def prepare_for_training(self) -> None:
        """Move model and optimizer to the device; the model is then ready to train."""
        self._move(self.device)
        self.model.train()

    def prepare_for_inference(self) -> None:
        """Move the model to the device in evaluation mode."""
        self._move(self.device, optimizer=False)
        self.model.eval()

    prepare_for_lp_inference = prepare_for_inference

    def offload(self) -> None:
        """Move model and optimizer to main memory until they are needed again."""
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device, *, optimizer: bool = True) -> None:
        if self.cfg.dtensor_cfg.cpu_offload:
            # shards live in main memory and visit the device by themselves
            return
        self.model.to(device=device)
        if self.optimizer is None or not optimizer:
            return
        for state in self.optimizer.state.values():
            for key, value in state.items():
                # step counters stay where the optimizer keeps them
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    # -- score ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_hidden(self, data: BatchedDataDict, *, prefix: str = "") -> Tensor:
        """Last hidden states [B, T, h] of right-padded rows, zeros in padding."""
        ids = data[f"{prefix}input_ids"]
        out: Tensor | None = None
        for where, hidden, _ in self._scored(data, prefix):
            if out is None:
                out = hidden.new_zeros((ids.numel(), hidden.shape[-1]))
            out[where] = hidden
        assert out is not None
        return out.reshape(*ids.shape, -1)

    @torch.no_grad()
    def _scored(self, data: BatchedDataDict, prefix: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(places in the flattened [B * T], hidden rows, next ids) of all real tokens, by micro-batch."""
        self.model.eval()
        width = data[f"{prefix}input_ids"].shape[1]
        places = torch.arange(data.size)[:, None] * width
        tagged: BatchedDataDict = BatchedDataDict({**data.data, "_row": torch.arange(data.size)})
        iterator, _ = self.microbatches(tagged, self.cfg.logprob_batch_size, prefix=prefix, training=False)
        for mb in iterator:
            if mb.is_dummy:
                self.forward_hidden(mb.processed_inputs)
                continue
            ids, lengths = mb.data_dict[f"{prefix}input_ids"], mb.data_dict[f"{prefix}input_lengths"]
            assert mb.processed_inputs.row_start is not None
            rows, where = sample_rows(mb.processed_inputs.row_start, lengths, width)
            hidden = self.forward_hidden(mb.processed_inputs).index_select(0, to_device(rows, self.device))
            whole = (places[mb.data_dict["_row"]] + torch.arange(width)).reshape(-1)[where]
            following = next_tokens(ids, lengths).reshape(-1)[where]
            yield to_device(whole, self.device), hidden, to_device(following, self.device)

    @torch.no_grad()
    def score(self, data: BatchedDataDict, *, prefix: str = "", k: int = 0) -> Iterator[tuple[Tensor, RowScores]]:
        """Scores of all real tokens by micro-batch: (places in the flattened [B * T], scores)."""
        head = self.head()
        for where, hidden, following in self._scored(data, prefix):
            yield where, score_rows(hidden, head, following, k=k)
        self.sharding.release()

    @torch.no_grad()
    def get_topk_logits(self, data: BatchedDataDict, k: int, *, prefix: str = "") -> BatchedDataDict:
        """``topk_logits`` float32 and ``topk_indices`` int64, both [B, T, k], most likely first; zeros in padding.

        The entry at position t is about the token at t + 1. ``prefix``: ``teacher_`` and so on, for the rows' keys.
        """
        ids = data[f"{prefix}input_ids"]
        k = min(k, self.vocab_size)
        logits = torch.zeros((ids.numel(), k), dtype=torch.float32, device=self.device)
        indices = torch.zeros((ids.numel(), k), dtype=torch.int64, device=self.device)
        for where, scores in self.score(data, prefix=prefix, k=k):
            logits[where], indices[where] = scores.topk_logits.float(), scores.topk_ids
        shape = (*ids.shape, k)
        return BatchedDataDict({"topk_logits": logits.reshape(shape), "topk_indices": indices.reshape(shape)})

    @torch.no_grad()
    def get_logprobs(self, data: BatchedDataDict, *, prefix: str = "") -> BatchedDataDict:
        """``logprobs`` float32 [B, T]: of the token at t given those before it; 0 at t = 0 and in padding."""
        ids = data[f"{prefix}input_ids"]
        out = torch.zeros(ids.numel() + 1, dtype=torch.float32, device=self.device)
        for where, scores in self.score(data, prefix=prefix):
            # a row's last token scores nothing, and must not write into its neighbour's first place
            out[where + 1] = scores.next_logprob.float()
        return BatchedDataDict({"logprobs": out[:-1].reshape(ids.shape)})

    def identity(self) -> dict[str, str]:
        """Hashes of configuration and weights, see ``model_identity``."""
        return model_identity(self.model)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def train_state(self) -> dict[str, Any]:
        """All that a resumed run needs beside the weights: optimizer, schedule, adapters, steps."""
        return {
            "optimizer": optimizer_state(self.optimizer, self._trained) if self.optimizer else None,
            "scheduler": scheduler_state(self.scheduler.state_dict()) if self.scheduler else None,
            "adapter": adapter_state(self.model) if is_lora(self.model) else None,
            "steps": self.steps,
        }

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Write a transformers folder (adapters merged) with its tokenizer, and the train state where asked for.

        Every rank must call it. Weights are whole from any layout; the train state may be read under another one.
        """
        whole = self.sharding.full_state()
        if Comm.world().rank == 0:
            save_weights(self.model, weights_path, self.tokenizer, tokenizer_path, state=whole)
        if optimizer_path is not None:
            save_state(optimizer_path, self.train_state())

    def load_train_state(self, optimizer_path: str | Path) -> None:
        """Go on from a train state; the weights come from the ``weights_path`` given at construction."""
        template = None
        if self.sharding.is_sharded and self.optimizer is not None:
            empty_optimizer_state(self.optimizer)
            template = {"optimizer": optimizer_state(self.optimizer, self._trained)}
            if is_lora(self.model):
                template["adapter"] = adapter_state(self.model)
        state = load_state(optimizer_path, template=template)
        if (state["optimizer"] is None) != (self.optimizer is None) or (state["adapter"] is None) == is_lora(
            self.model
        ):
            raise CheckpointError(
                f"train state {str(optimizer_path)!r} comes from another kind of run (optimizer or adapters differ); "
                "resume with the configuration that wrote it"
            )
        if is_lora(self.model):
            load_adapter_state(self.model, state["adapter"])
        if self.optimizer is not None:
            try:
                load_optimizer_state(self.optimizer, self._trained, state["optimizer"])
            except ValueError as e:
                raise CheckpointError(f"train state {str(optimizer_path)!r} does not fit this model: {e}") from e
        if self.scheduler is not None and state["scheduler"] is not None:
            groups = len(self.optimizer.param_groups) if self.optimizer else 1
            self.scheduler.load_state_dict(scheduler_state(state["scheduler"], groups))
        self.steps = int(state["steps"])
