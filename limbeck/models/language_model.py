"""A causal language model: loading, forward passes and scoring; whole in one process or laid out over ranks.

The head is never applied to a whole sequence. The body gives hidden states, a loss takes them together with the head
and works in row blocks; scoring does the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedInputs, ProcessedMicrobatch, get_microbatch_iterator
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device, to_device
from limbeck.distributed.sharding import Sharding, WholeWeights, shard_model
from limbeck.losses.contract import StudentLayout
from limbeck.losses.signals import Head
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis, VocabAxis
from limbeck.models.attention import choose_attention, verify_document_isolation
from limbeck.models.causal import body_of, head_of, is_lora, layers_of, unwrap
from limbeck.models.loading import (
    ModelBuilder,
    ModelConfig,
    make_dims,
    model_identity,
    refuse_quantized,
    refuse_unsupported,
    tokenizer_size,
)
from limbeck.models.quantization import rounds_rows_together

ANY_NUMBER_OF_ROWS = "triton.mix_order_reduction_non_strict_mode"
"""torch's compiler joins the two sums of a norm's backward pass into one kernel where that pays, from 4,096 tokens on,
and compiles the layer anew as soon as a micro-batch has fewer. With this it joins them at every length."""


def compiler_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """What a mode of torch.compile stands for, and that one graph serves micro-batches of any number of tokens."""
    from torch._inductor import list_mode_options, list_options

    own = {} if mode is None else dict(list_mode_options(mode, dynamic))
    return own | ({ANY_NUMBER_OF_ROWS: True} if ANY_NUMBER_OF_ROWS in list_options() else {})


class LanguageModel:
    """A transformers causal language model with its tokenizer, ready to run and to score.

    Args:
        cfg: ``ModelConfig`` or a mapping with its keys.
        tokenizer: the model's tokenizer; None for a model that only sees ids (``vocab_size`` is then its head's).
        name: used in messages and metrics.
        device: default: the accelerator if there is one, else the CPU.
        trained: whether its weights will be; False freezes them.
        seed: of random weights and adapters.
        weights_path: folder of weights to start from instead of ``cfg.model_name``.
        dp_group: data-parallel process group or mesh. A layout in ``cfg.dtensor_cfg`` (tensor or context parallel,
            fsdp) makes its own groups over all processes instead.
        model: an instantiated causal model to use instead of loading one.

    Attributes:
        dims: this rank's place among those that share the model's work.
        sharding: what these ranks do together around its passes.
        precision: type of the computation.
    """

    def __init__(
        self,
        cfg: ModelConfig | Mapping[str, Any],
        tokenizer: object,
        *,
        name: str = "model",
        device: torch.device | str | None = None,
        trained: bool = False,
        seed: int | None = None,
        weights_path: str | Path | None = None,
        dp_group: Any = None,
        model: nn.Module | None = None,
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.device = torch.device(device if device is not None else default_device())
        self._cfg = resolve(ModelConfig, cfg).settled(self.device)
        self.precision = self._cfg.compute_type()
        refuse_unsupported(self._cfg, name, trained)
        refuse_quantized(self._cfg, name, trained, model)
        size = tokenizer_size(tokenizer)
        self.dims = make_dims(self._cfg, name, self.device, model, size, Comm.of(dp_group))
        builder = ModelBuilder(self._cfg, trained=trained, size=size, seed=seed, weights=weights_path)
        built, source = builder.build(model, self.dims, self.device)
        self.model: Any = built
        self.vocab_size = head_of(unwrap(self.model), size).vocab_size
        self.body: Any = body_of(self.model)
        self.sharding = self._shard(source)
        self._prepare_body(trained)

    @property
    def cfg(self) -> ModelConfig:
        """The configuration, with all defaults."""
        return self._cfg

    @property
    def compiles(self) -> bool:
        """Whether the layers are compiled, by the first pass through them."""
        return self.cfg.compile.enabled

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _shard(self, source: WholeWeights | None) -> Sharding:
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
        if self.compiles:
            # alike as they are, layers share one compiled graph: it is made sooner, and made anew sooner
            chosen = compiler_options(options.mode, options.dynamic)
            for module in layers_of(self.body):
                module.compile(options=chosen, dynamic=options.dynamic)

    def allow_packing(self) -> None:
        """Verify, once, that packed documents do not see each other."""
        if self._packs:
            return
        tolerance = 1e-3 if self.precision == torch.float32 else 5e-2
        if self.cfg.precision == "fp8" or rounds_rows_together(unwrap(self.model).config):
            # a model that mixes documents moves its outputs by about 1; a last bit that differs moves those of few bits
            tolerance = 0.3
        with self.autocast():
            verify_document_isolation(
                self.body,
                vocab_size=self.vocab_size,
                tolerance=tolerance,
                run=self._hidden,
                layout=self.cfg.dtensor_cfg,
                device=self.device,
            )
        self._packs = True

    @property
    def layout(self) -> StudentLayout:
        """How this model is laid out, for teachers that must serve its rows."""
        bounds = self.axis.bounds if self.axis.sharded else ()
        return StudentLayout(self.dims.shape, self.dims.rows, self.vocab_size, tuple(bounds))

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """In evaluation mode and without gradient; the training flag is put back, also of a student in a step."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

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
        head = head_of(unwrap(self.model), self.vocab_size)
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
            hidden = self._hidden(inputs.model_kwargs(drop_padding_mask=True), inputs.cu_seqlens_host)
        return hidden.reshape(-1, hidden.shape[-1])

    def _hidden(self, kwargs: dict[str, Any], cu_seqlens_host: Sequence[int] | None = None) -> Tensor:
        """Last hidden states [B, T, h] of whole sequences, which may be split over ranks on the way."""
        return self.sharding.run(kwargs, cu_seqlens_host)

    def microbatches(
        self, data: BatchedDataDict, rows: int, *, prefix: str = "", training: bool = True, rows_together: int = 1
    ) -> tuple[Iterator[ProcessedMicrobatch], int]:
        """Micro-batches of ``data`` on this model's device, and how many.

        ``rows``: of each where no token budget holds. ``rows_together``: neighbours that must not be parted.
        """
        key = "train_mb_tokens" if training or not self._has_logprob_budget() else "logprob_mb_tokens"
        # shards are gathered together, so every rank must take as many forward passes
        ranks = self.dims.data if training or self.sharding.fsdp else Comm.alone()
        cp = self.cfg.dtensor_cfg.context_parallel_size
        return get_microbatch_iterator(
            data,
            self.cfg,
            rows,
            ranks,
            self.tokenizer,
            cp,
            key_prefix=prefix,
            device=self.device,
            tokens_key=key,
            rows_together=rows_together,
        )

    def _has_logprob_budget(self) -> bool:
        budgets = self.cfg.budgets
        return budgets is not None and budgets[1].logprob_mb_tokens is not None

    def prepare_for_inference(self) -> None:
        """Move the model to the device in evaluation mode."""
        self._move(self.device)
        self.model.eval()

    prepare_for_lp_inference = prepare_for_inference

    def _move(self, device: torch.device) -> None:
        # offloaded shards live in main memory and visit the device by themselves
        if not self.cfg.dtensor_cfg.cpu_offload:
            self.model.to(device=device)

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
            next_ids = next_tokens(ids, lengths).reshape(-1)[where]
            yield to_device(whole, self.device), hidden, to_device(next_ids, self.device)

    @torch.no_grad()
    def score(
        self, data: BatchedDataDict, *, prefix: str = "", k: int = 0, classes: Tensor | None = None
    ) -> Iterator[tuple[Tensor, RowScores]]:
        """Scores of all real tokens by micro-batch: (places in the flattened [B * T], scores)."""
        head = self.head(whole=classes is not None)
        classes = None if classes is None else classes.to(self.device)
        for where, hidden, next_ids in self._scored(data, prefix):
            yield where, score_rows(hidden, head, next_ids, k=k, classes=classes)
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
    def get_logprobs(
        self, data: BatchedDataDict, *, prefix: str = "", classes: Tensor | None = None
    ) -> BatchedDataDict:
        """``logprobs`` float32 [B, T]: of the token at t given those before it; 0 at t = 0 and in padding.

        ``classes`` [vocab_size], the class of every id, adds ``class_logprobs`` [B, T]: of any token of the same class.
        """
        ids = data[f"{prefix}input_ids"]
        out = torch.zeros(ids.numel() + 1, dtype=torch.float32, device=self.device)
        of_class = torch.zeros_like(out)
        for where, scores in self.score(data, prefix=prefix, classes=classes):
            # a row's last token scores nothing, and must not write into its neighbour's first place
            out[where + 1] = scores.next_logprob.float()
            if scores.class_logprob is not None:
                of_class[where + 1] = scores.class_logprob.float()
        found: BatchedDataDict = BatchedDataDict({"logprobs": out[:-1].reshape(ids.shape)})
        if classes is not None:
            found["class_logprobs"] = of_class[:-1].reshape(ids.shape)
        return found

    def response_log_probs(self, data: BatchedDataDict, *, prefix: str = "") -> Tensor:
        """``[rows]`` float64: log-probability of each row's supervised tokens, in nats."""
        logprobs = self.get_logprobs(data, prefix=prefix)["logprobs"].cpu().double()
        mask = data[f"{prefix}token_mask"] > 0
        mask[:, 0] = False
        total: Tensor = (logprobs * mask).sum(1)
        return total

    def identity(self) -> dict[str, str]:
        """Hashes of configuration and weights, see ``model_identity``."""
        return model_identity(self.model)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass
class RowScores:
    """Scores of N rows. ``topk_ids``, ``topk_logits`` [N, k]; ``logsumexp`` and ``next_logprob`` [N], float32.

    ``topk_logits`` are the raw logits, most likely first; minus ``logsumexp`` they are log-probabilities.
    ``next_logprob`` is 0 where the next token's id lies outside of the head, and so is ``class_logprob`` [N], the
    log-probability of all tokens of the next one's class, where classes were given.
    """

    topk_ids: Tensor
    topk_logits: Tensor
    logsumexp: Tensor
    next_logprob: Tensor
    class_logprob: Tensor | None = None

    @property
    def topk_logprobs(self) -> Tensor:
        """Log-probabilities [N, k] over the teacher's vocabulary."""
        return self.topk_logits - self.logsumexp[:, None]


@torch.no_grad()
def score_rows(
    hidden: Tensor,
    head: Head,
    next_ids: Tensor,
    *,
    k: int = 0,
    classes: Tensor | None = None,
    block_rows: int = 512,
) -> RowScores:
    """Score the rows of ``hidden`` [N, h]; ``next_ids`` [N]: the token that came after each (-1: none).

    ``classes`` [vocabulary], which a whole head needs: the class of every id. Only ``block_rows`` x vocabulary logits
    exist at a time.
    """
    parts: list[tuple[Tensor, ...]] = []
    k = min(k, head.vocab_size)
    for start in range(0, max(hidden.shape[0], 1), block_rows):
        logits = head.logits(hidden[start : start + block_rows])
        ids = next_ids[start : start + block_rows]
        total = head.axis.logsumexp(logits)
        known = (ids >= 0) & (ids < head.vocab_size)
        next_logprob = head.axis.gather(logits, ids.clamp(0, head.vocab_size - 1)[:, None])[:, 0] - total
        top, top_ids = head.axis.topk(logits, k)
        parts.append((top_ids, top, total, next_logprob.masked_fill(~known, 0.0)))
        if classes is not None:
            others = classes != classes[ids.clamp(0, head.vocab_size - 1)][:, None]
            of_class = logits.masked_fill(others, -torch.inf).logsumexp(-1) - total
            parts[-1] += (of_class.masked_fill(~known, 0.0),)
    return RowScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def next_tokens(ids: Tensor, lengths: Tensor) -> Tensor:
    """Token after each position of right-padded ``ids`` [B, T]: [B, T], -1 at a row's last token and in padding."""
    out = torch.full_like(ids, -1)
    out[:, :-1] = ids[:, 1:]
    places = torch.arange(ids.shape[1], device=ids.device)
    return out.masked_fill(places >= lengths[:, None] - 1, -1)


def sample_rows(row_start: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Flat rows [N] of all real tokens and their places [N] in a padded [B * width] view."""
    places = torch.arange(width, device=row_start.device)
    real = places < lengths[:, None]
    rows = (row_start[:, None] + places)[real]
    return rows, real.reshape(-1).nonzero().squeeze(1)
