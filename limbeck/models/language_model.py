"""A causal language model: loading, forward passes and scoring; whole in one process or laid out over ranks.

The head is never applied to a whole sequence. The body gives hidden states, a loss takes them together with the head
and works in row blocks; scoring does the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import MicrobatchConfig, Microbatches, ProcessedInputs, ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device, to_device
from limbeck.distributed.planner import Layout, Workload
from limbeck.distributed.sharding import Sharding, WholeWeights, shard_model
from limbeck.errors import ConfigError, one_line
from limbeck.losses.contract import StudentLayout
from limbeck.losses.signals import Head
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis, VocabAxis
from limbeck.models.attention import choose_attention, verify_document_isolation
from limbeck.models.budget import Budget, model_shape, ran_out, release_memory, settled
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
from limbeck.utils.progress import say

T = TypeVar("T")
ANY_NUMBER_OF_ROWS = "triton.mix_order_reduction_non_strict_mode"
"""torch's compiler joins the two sums of a norm's backward pass into one kernel where that pays, from 4,096 tokens on,
and compiles the layer anew as soon as a micro-batch has fewer. With this it joins them at every length."""

_PACKED_ATTENTION = ("varlen", "flash", "flex", "limbeck_context")
"""Parts of the names of attention functions to which a packed row costs what its documents cost."""


def compiler_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Options that a mode of torch.compile stands for, and that one graph serves micro-batches of any number of
    tokens."""
    from torch._inductor import list_mode_options, list_options

    options = {} if mode is None else dict(list_mode_options(mode, dynamic))
    return options | ({ANY_NUMBER_OF_ROWS: True} if ANY_NUMBER_OF_ROWS in list_options() else {})


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
        return self._compiles

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
        # over context-parallel ranks the sharding has installed an attention of its own, which must stay
        if self.dims.context.size == 1:
            choose_attention(unwrap(self.model), self.cfg.attn_implementation, self.precision, self.device)
        self._packs = False
        if self.cfg.packed:
            self.allow_packing()
        self._compiles = False
        if self.cfg.compile.enabled:
            self.compile_layers()

    def compile_layers(self, *, dynamic: bool | None = None) -> None:
        """Compile the layers, by the next pass through them. ``dynamic``: where the configuration leaves it open, one
        graph for passes of any length (True), or as torch chooses."""
        options = self.cfg.compile
        dynamic = dynamic if options.dynamic is None else options.dynamic
        chosen = compiler_options(options.mode, dynamic)
        # alike as they are, layers share one compiled graph: it is made sooner, and made anew sooner
        for module in layers_of(self.body):
            module.compile(options=chosen, dynamic=dynamic)
        self._compiles = True

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """For passes whose shapes change with every token, or that are few: nothing is compiled for them.

        Flex attention is slow without, so it stays compiled.
        """
        flex = "flex" in str(unwrap(self.model).config._attn_implementation)
        with torch.compiler.set_stance("force_eager") if self.compiles and not flex else contextlib.nullcontext():
            yield

    def allow_packing(self) -> None:
        """Verify, once, that packed documents do not see each other."""
        if self._packs:
            return
        tolerance = 0.0
        if self.cfg.precision == "fp8" or rounds_rows_together(unwrap(self.model).config):
            # rows share a scale: a neighbour moves the last bit of few, a model that mixes documents all by about 1
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

    # -- batches ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def budget(self) -> Budget:
        """Tokens of a pass, where nobody has named them."""
        parameters = list(self.model.parameters())
        width = self.precision.itemsize
        work = Workload(
            model_shape(self.model.config, sum(p.numel() for p in parameters)),
            kernels=self.device.type == "cuda",
            param_bytes=self.model.dtype.itemsize,
            compute_bytes=width,
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            checkpointing=self.cfg.dtensor_cfg.activation_checkpointing,
        )
        return Budget(work, Layout(self.dims.shape, self.sharding.fsdp), self.device, self.dims.rows)

    @functools.cached_property
    def unpacked(self) -> str:
        """Why rows that nobody said how to batch are not packed; empty where they are."""
        attention = str(unwrap(self.model).config._attn_implementation)
        if self.device.type != "cuda" or not any(name in attention for name in _PACKED_ATTENTION):
            # a mask over a packed row costs the square of its length
            return f"{self.name} attends by {attention} on {self.device.type.upper()}"
        try:
            self.allow_packing()
        except ConfigError:
            return f"{self.name} mixes packed documents"
        return ""

    @property
    def length_round(self) -> int:
        """Multiple to which lengths are rounded up, so that compiled layers and the allocator see the same ones
        again."""
        return 1 if self.device.type == "cpu" else 512 if self.compiles else 64

    def finds_budget(self, micro_batch_size: int | None) -> bool:
        """Whether neither rows nor tokens of a micro-batch are named, so that they are found."""
        named = self.cfg.budgets
        return micro_batch_size is None if named is None else named[1].train_mb_tokens is None

    def found_batching(self, data: BatchedDataDict, room: Mapping[str, int], *, unpacked: str = "") -> MicrobatchConfig:
        """Batching as a run file could have named it: ``room`` tokens by the prefix of their keys, in rows that are
        packed unless something speaks against it (``unpacked``)."""
        named = self.cfg.budgets
        packed = self.packs_found(unpacked) and not (named is None and data.get_multimodal_dict())
        rounding = self.length_round if named is None else named[1].sequence_length_round
        return settled(self.cfg, data, room, packed=packed, rounding=rounding)

    def packs_found(self, unpacked: str = "") -> bool:
        """Whether rows with a budget that is found are packed; ``unpacked``: what speaks against it on another side."""
        return not (unpacked or self.unpacked) if self.cfg.budgets is None else self.cfg.packed

    def make_room(
        self, mb: ProcessedMicrobatch, error: BaseException, *, grad: bool, prefix: str = "", group_size: int = 1
    ) -> None:
        """After ``error``, by which memory ran out in a pass over a micro-batch: take fewer tokens from here on."""
        lengths = mb.data_dict[f"{prefix}input_lengths"]
        longest = int(lengths.max())
        failed = int(lengths.sum()) if mb.processed_inputs.is_packed else len(lengths) * longest
        # rows that must share a micro-batch cannot be taken in parts
        if len(lengths) <= group_size:
            raise ConfigError(
                f"{self.name} has no room for a single row of {longest:,} tokens ({one_line(error, 120)}); lower "
                "max_total_sequence_length, set dtensor_cfg.activation_checkpointing: true, or take a smaller model"
            ) from error
        now = self.budget.lower(grad, failed)
        say(
            f"memory ran out in a pass of {self.name} over {failed:,} tokens: its rows are taken in parts, and "
            f"passes take at most {now:,} tokens from here on"
        )

    def microbatches(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None,
        *,
        prefix: str = "",
        training: bool = True,
        group_size: int = 1,
        cfg: MicrobatchConfig | None = None,
    ) -> Microbatches:
        """Micro-batches of ``data`` on this model's device.

        ``micro_batch_size``: rows of each where no token budget holds; None: tokens are found. ``group_size``:
        neighbours that must not be parted. ``cfg``: budgets that are found already.
        """
        key = "train_mb_tokens" if training or not self._has_logprob_budget() else "logprob_mb_tokens"
        # shards are gathered together, so every rank must take as many forward passes
        ranks = self.dims.data if training or self.sharding.fsdp else Comm.alone()
        if cfg is None and self.finds_budget(micro_batch_size) and (training or not self._has_logprob_budget()):
            cfg = self.found_batching(data, {prefix: self.budget.tokens(training)})
        return Microbatches(
            data,
            self.cfg if cfg is None else cfg,
            micro_batch_size or group_size,
            ranks,
            self.tokenizer,
            self.cfg.dtensor_cfg.context_parallel_size,
            key_prefix=prefix,
            device=self.device,
            tokens_key=key,
            group_size=group_size,
            longer_alone=cfg is not None,
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
        for where, hidden in self._scored(data, prefix, lambda hidden, next_ids: hidden):
            if out is None:
                out = hidden.new_zeros((ids.numel(), hidden.shape[-1]))
            out[where] = hidden
        assert out is not None
        return out.reshape(*ids.shape, -1)

    @torch.no_grad()
    def _scored(
        self, data: BatchedDataDict, prefix: str, work: Callable[[Tensor, Tensor], T]
    ) -> Iterator[tuple[Tensor, T]]:
        """(places in the flattened [B * T], what ``work`` makes of their hidden rows and next ids) of all real tokens,
        by micro-batch."""
        self.model.eval()
        width = data[f"{prefix}input_ids"].shape[1]
        places = torch.arange(data.size)[:, None] * width
        tagged: BatchedDataDict = BatchedDataDict({**data.data, "_row": torch.arange(data.size)})
        rows = self.cfg.logprob_batch_size
        by_budget = self.finds_budget(rows) and not self._has_logprob_budget()
        microbatches = self.microbatches(tagged, rows, prefix=prefix, training=False)
        for mb in microbatches:
            if mb.is_dummy:
                # peers wait for this rank in the collectives of the pass
                self.forward_hidden(mb.processed_inputs)
                continue
            try:
                where, result = self._work_on(mb, prefix, work)
            except Exception as error:
                # a rank of a shared model cannot repeat a pass alone: its collectives need the others
                if not by_budget or self.sharding.is_sharded or not ran_out(error):
                    raise
                self.make_room(mb, error, grad=False, prefix=prefix)
            else:
                yield (
                    to_device((places[mb.data_dict["_row"]] + torch.arange(width)).reshape(-1)[where], self.device),
                    result,
                )
                continue
            # behind the `except`: inside it the traceback still holds the tensors of the pass
            release_memory(self.device)
            microbatches.again(self.found_batching(tagged, {prefix: self.budget.tokens(False)}))

    def _work_on(self, mb: ProcessedMicrobatch, prefix: str, work: Callable[[Tensor, Tensor], T]) -> tuple[Tensor, T]:
        """Places of a micro-batch's real tokens in a padded view of its rows, and what ``work`` makes of them."""
        ids, lengths = mb.data_dict[f"{prefix}input_ids"], mb.data_dict[f"{prefix}input_lengths"]
        assert mb.processed_inputs.row_start is not None
        rows, where = sample_rows(mb.processed_inputs.row_start, lengths, ids.shape[1])
        hidden = self.forward_hidden(mb.processed_inputs).index_select(0, to_device(rows, self.device))
        next_ids = next_tokens(ids, lengths).reshape(-1)[where]
        return where, work(hidden, to_device(next_ids, self.device))

    @torch.no_grad()
    def score(
        self, data: BatchedDataDict, *, prefix: str = "", k: int = 0, classes: Tensor | None = None
    ) -> Iterator[tuple[Tensor, RowScores]]:
        """Scores of all real tokens by micro-batch: (places in the flattened [B * T], scores)."""
        head = self.head(whole=classes is not None)
        classes = None if classes is None else classes.to(self.device)
        yield from self._scored(
            data, prefix, lambda hidden, next_ids: score_rows(hidden, head, next_ids, k=k, classes=classes)
        )
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
        answer: BatchedDataDict = BatchedDataDict({"logprobs": out[:-1].reshape(ids.shape)})
        if classes is not None:
            answer["class_logprobs"] = of_class[:-1].reshape(ids.shape)
        return answer

    def response_log_probs(self, data: BatchedDataDict, *, prefix: str = "") -> Tensor:
        """``[rows]`` float64: log-probability of each row's supervised tokens, in nats."""
        logprobs = self.get_logprobs(data, prefix=prefix)["logprobs"].cpu().double()
        mask = data[f"{prefix}token_mask"] > 0
        # a row's first token has no predictor
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
    # one turn at the least, which gives no rows their empty columns
    for start in range(0, max(hidden.shape[0], 1), block_rows):
        logits = head.logits(hidden[start : start + block_rows])
        ids = next_ids[start : start + block_rows]
        total = head.axis.logsumexp(logits)
        known = (ids >= 0) & (ids < head.vocab_size)
        # clamped to a place that exists; what is found there for ids outside of the head is masked below
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
