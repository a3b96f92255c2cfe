"""From a batch to the tensors of one forward pass: fixed, token-budget (dynamic) and packed micro-batches.

Only the model's inputs are reshaped. The raw rows stay in ``ProcessedMicrobatch.data_dict``, and ``row_start`` says
where each of them sits in the forward pass: with hidden states viewed as flat rows ``[R, h]``, token t of sample b is
row ``row_start[b] + t``. A loss that indexes rows is therefore the same code for all three kinds.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field

from limbeck.config import FREE, resolve
from limbeck.data.batched_data_dict import BatchedDataDict, SlicedDataDict
from limbeck.data.layout import ChunkLayout
from limbeck.data.packing import ALGORITHM, Bins
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.distributed.mesh import ParallelConfig
from limbeck.errors import ConfigError, DataError


@dataclass
class ProcessedInputs:
    """Inputs of one forward pass.

    Shapes: unpacked ``[B, T]``; packed ``[1, T]`` with all documents one after the other and, where the length is
    rounded up, a tail of padding that is a document of its own.
    """

    input_ids: torch.Tensor
    seq_len: int
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    flash_attn_kwargs: dict[str, Any] = field(default_factory=dict)
    vlm_kwargs: dict[str, Any] = field(default_factory=dict)
    cp_buffers: list[torch.Tensor] = field(default_factory=list)
    seq_index: torch.Tensor | None = None
    row_start: torch.Tensor | None = None
    """LongTensor ``[B]``, always in main memory: flat row of each sample's first token."""
    document_ids: torch.Tensor | None = None
    """LongTensor ``[1, T]``, packed inputs only: the sample each token belongs to, -1 in the tail of padding."""
    cu_seqlens_host: tuple[int, ...] | None = None
    """Packed inputs only: the cumulative lengths once more, for the host, which would have to wait for the tensor."""

    @property
    def has_context_parallel(self) -> bool:
        """Whether there are buffers to shard along the sequence."""
        return len(self.cp_buffers) > 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether variable-length flash attention arguments are set."""
        return bool(self.flash_attn_kwargs)

    @property
    def is_multimodal(self) -> bool:
        """Whether the model gets more than text."""
        return len(self.vlm_kwargs) > 0

    @property
    def is_packed(self) -> bool:
        """Whether several samples share one sequence."""
        return self.document_ids is not None

    def model_kwargs(self, *, drop_padding_mask: bool = False) -> dict[str, Any]:
        """Keyword arguments for a transformers causal model.

        ``use_cache=False`` is part of the packing contract: with a cache transformers does not look for packed
        documents and lets them attend to each other. ``drop_padding_mask`` leaves out the mask of right-padded rows,
        which a causal model's real tokens never see; attention kernels without a mask are faster.
        """
        mask = None if drop_padding_mask and not self.is_multimodal else self.attention_mask
        kwargs: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": mask, "use_cache": False}
        if self.position_ids is not None:
            kwargs["position_ids"] = self.position_ids
        return {**kwargs, **self.flash_attn_kwargs, **self.vlm_kwargs}

    def to(self, device: torch.device | str | None) -> ProcessedInputs:
        """A copy with the model's tensors on ``device``; buffers stay the very tensors that the fields hold."""
        if device is None:
            return self
        return replace(self, **to_device({name: getattr(self, name) for name in _MODEL_FIELDS}, device))


_MODEL_FIELDS = (
    *("input_ids", "attention_mask", "position_ids", "seq_index", "document_ids"),
    *("flash_attn_kwargs", "vlm_kwargs", "cp_buffers"),
)


@dataclass
class ProcessedMicrobatch:
    """A raw micro-batch together with its forward inputs.

    Attributes:
        data_dict: the rows, untouched.
        processed_inputs: the tensors of the forward pass.
        original_batch_size: rows before packing.
        original_seq_len: width of the ids before packing.
        is_dummy: a filler so that all ranks take the same number of steps; its masks are zero.
    """

    data_dict: BatchedDataDict
    processed_inputs: ProcessedInputs
    original_batch_size: int
    original_seq_len: int
    is_dummy: bool = False


class BatchingConfig(BaseModel):
    """Micro-batches by token budget instead of by number of rows."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    enabled: bool = False
    """Switch it on; ``dynamic_batching`` and ``sequence_packing`` exclude each other."""
    train_mb_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one training micro-batch, padding included; null: found from the device's memory."""
    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    """The same where a model only scores; default: ``train_mb_tokens``."""
    teacher_mb_tokens: int | list[int] | None = None
    """The same for teachers, one number or one per teacher; default: ``train_mb_tokens``, or found like it."""
    sequence_length_round: int = Field(default=1, ge=1)
    """Lengths are rounded up to a multiple of this, so that shapes repeat (kernels, ``compile``)."""


class PackingConfig(BatchingConfig):
    """Several samples in one sequence, attention within each of them."""

    algorithm: str = ALGORITHM
    """Other names than first-fit decreasing are read and mean it."""


class MicrobatchConfig(BaseModel):
    """The part of a policy's configuration that decides what one forward pass takes."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    dtensor_cfg: ParallelConfig = Field(default=ParallelConfig(), json_schema_extra=FREE)
    """How the model lies over devices: FSDP, tensor and context parallel."""
    # no loss depends on how rows share passes, but for the rounding of sums
    dynamic_batching: BatchingConfig = Field(default=BatchingConfig(), json_schema_extra=FREE)
    """Micro-batches of rows of similar length, up to a budget of tokens."""
    sequence_packing: PackingConfig = Field(default=PackingConfig(), json_schema_extra=FREE)
    """Micro-batches of several samples in one row; attention stays within each sample."""

    @property
    def packed(self) -> bool:
        """Whether sequences are packed; it excludes dynamic batching."""
        if self.sequence_packing.enabled and self.dynamic_batching.enabled:
            raise ConfigError(
                "sequence_packing.enabled and dynamic_batching.enabled are both true; switch one of them off."
            )
        return self.sequence_packing.enabled

    @property
    def budgets(self) -> tuple[str, BatchingConfig] | None:
        """Name and content of the section whose token budgets hold; None: micro-batches have a number of rows."""
        if self.packed:
            return "sequence_packing", self.sequence_packing
        return ("dynamic_batching", self.dynamic_batching) if self.dynamic_batching.enabled else None


Config = MicrobatchConfig | Mapping[str, Any]


def microbatch_config(cfg: Config) -> MicrobatchConfig:
    """A policy's configuration, or the sections of a mapping that count here."""
    if isinstance(cfg, MicrobatchConfig):
        return cfg
    return resolve(MicrobatchConfig, {key: cfg[key] for key in MicrobatchConfig.model_fields if key in cfg})


def teacher_prefixes(data: Mapping[str, Any]) -> list[str]:
    """Key prefixes of the teachers that have token ids of their own, in order: ``teacher_``, ``teacher_1_``, ..."""
    numbers = sorted(int(m.group(1)) for key in data if (m := re.fullmatch(r"teacher_(\d+)_input_ids", key)))
    first = ["teacher_"] if "teacher_input_ids" in data else []
    return first + [f"teacher_{number}_" for number in numbers if number > 0 or not first]


def plan_microbatches(
    data: BatchedDataDict,
    cfg: Config,
    mbs: int,
    *,
    tokens_key: str = "train_mb_tokens",
    group_size: int = 1,
    longer_alone: bool = False,
) -> Bins:
    """Row indices of each micro-batch of ``data``; the same for student and teachers, whose budgets all hold.

    ``group_size``: neighbours that must share a micro-batch; where rows are counted, ``mbs`` is a multiple of it.
    ``longer_alone``: rows that exceed a budget have micro-batches of their own instead of being refused.
    """
    config = microbatch_config(cfg)
    budgets = config.budgets
    if isinstance(data, SlicedDataDict) and data.microbatch_bins is not None and budgets is not None:
        # a part that was dealt out with its plan: other ranks' parts have as many micro-batches
        return data._planned()
    if budgets is None:
        if mbs < 1:
            raise ConfigError(f"A micro-batch size of {mbs} is not usable; give a positive number.")
        return [list(range(start, min(start + mbs, data.size))) for start in range(0, data.size, mbs)]
    name, section = budgets
    budget = section.logprob_mb_tokens if tokens_key == "logprob_mb_tokens" else section.train_mb_tokens
    if budget is None:
        raise ConfigError(f"{name}.{tokens_key} is not set; give the number of tokens per micro-batch.")
    prefixes = teacher_prefixes(data)
    teacher_budget = section.teacher_mb_tokens
    teachers = teacher_budget if isinstance(teacher_budget, list) else [teacher_budget or budget] * len(prefixes)
    if len(teachers) != len(prefixes):
        raise ConfigError(
            f"{name}.teacher_mb_tokens has {len(teachers)} numbers for the {len(prefixes)} teachers that have "
            "token ids of their own; give one number for all or one for each."
        )
    rooms = [budget, *teachers]
    keys = [f"{prefix}input_lengths" for prefix in ["", *prefixes]]
    if group_size > 1:
        room = {key: _room_of_groups(data[key].reshape(-1, group_size), packed=config.packed) for key in keys}
        groups: BatchedDataDict = BatchedDataDict(
            # teachers are known by the keys of their ids; what stands there is not read
            {**room, **{f"{prefix}input_ids": room[keys[0]] for prefix in prefixes}}
        )
        plan = plan_microbatches(groups, config, mbs, tokens_key=tokens_key, longer_alone=longer_alone)
        return [[group * group_size + n for group in items for n in range(group_size)] for items in plan]
    if longer_alone:
        lengths = torch.stack([torch.as_tensor(data[key]).cpu() for key in keys])
        fits = (lengths <= torch.tensor(rooms)[:, None]).all(0)
        rest: BatchedDataDict = BatchedDataDict({key: length[fits] for key, length in zip(keys, lengths, strict=True)})
        rest.update({f"{prefix}input_ids": rest[keys[0]] for prefix in prefixes})
        plan = plan_microbatches(rest, config, mbs, tokens_key=tokens_key) if bool(fits.any()) else []
        short_rows = fits.nonzero()[:, 0].tolist()
        return [[row] for row in (~fits).nonzero()[:, 0].tolist()] + [[short_rows[i] for i in items] for items in plan]
    if isinstance(section, PackingConfig):
        return data.plan_packed_batches(
            {"max_tokens_per_microbatch": rooms, "input_lengths_key": keys, "algorithm": section.algorithm}
        )
    rounding = section.sequence_length_round
    return data.plan_dynamic_batches(
        {"max_tokens_per_microbatch": rooms, "input_lengths_key": keys, "sequence_length_round": rounding}
    )


def _room_of_groups(lengths: torch.Tensor, *, packed: bool) -> torch.Tensor:
    """Tokens ``[G]`` that groups of rows ``[G, n]`` take: packed one after the other, otherwise each padded to the
    longest."""
    return lengths.sum(1) if packed else lengths.shape[1] * lengths.max(1).values


def make_processed_microbatch_iterator(
    raw_iterator: Iterable[BatchedDataDict],
    tokenizer: object,
    cfg: Config,
    cp_size: int,
    *,
    key_prefix: str = "",
    device: torch.device | str | None = None,
) -> Iterator[ProcessedMicrobatch]:
    """Process each raw micro-batch; sequence packing is taken from ``cfg.sequence_packing.enabled``.

    Args:
        raw_iterator: micro-batches of raw rows.
        tokenizer: gives the padding id (may be None: padding is 0).
        cfg: ``PolicyConfig``, or a mapping with (some of) its ``sequence_packing``, ``dynamic_batching``,
            ``dtensor_cfg``.
        cp_size: context-parallel size.
        key_prefix: ``"teacher_"``, ``"teacher_1_"``, ... to prepare a teacher's inputs instead of the student's.
        device: where the processed inputs go; the raw rows stay where they are.
    """
    config = microbatch_config(cfg)
    packed = config.packed
    for raw in raw_iterator:
        inputs = process_microbatch(raw, tokenizer, packed, config, cp_size, key_prefix=key_prefix, device=device)
        batch_size, width = raw[f"{key_prefix}input_ids"].shape
        yield ProcessedMicrobatch(
            data_dict=raw,
            processed_inputs=inputs,
            original_batch_size=batch_size,
            original_seq_len=width,
            is_dummy=isinstance(raw, DummyBatch),
        )


def get_microbatch_iterator(
    data: BatchedDataDict,
    cfg: Config,
    mbs: int,
    dp_mesh: Any,
    tokenizer: object,
    cp_size: int = 1,
    *,
    key_prefix: str = "",
    device: torch.device | str | None = None,
    tokens_key: str = "train_mb_tokens",
    group_size: int = 1,
) -> tuple[Iterator[ProcessedMicrobatch], int]:
    """Micro-batches of this rank's ``data`` by the strategy that ``cfg`` enables, and how many there are.

    The number is the largest over the data-parallel ranks; a rank with fewer gets dummies at the end (masks zero,
    ``is_dummy`` set), because a rank that stops early would leave the others waiting in a collective. The plan does not
    depend on ``key_prefix``: student and teacher iterators of the same data go in lockstep.

    Args:
        data: the rows of this rank, possibly none.
        cfg: policy config, see :func:`make_processed_microbatch_iterator`; the token budgets are
            ``<section>.train_mb_tokens`` for the student and ``<section>.teacher_mb_tokens`` (a number or one per
            teacher, default: the student's) for the teachers.
        mbs: rows per micro-batch where neither dynamic batching nor packing is on.
        dp_mesh: data-parallel ``DeviceMesh`` or process group; None for a single rank.
        tokenizer: gives the padding id.
        cp_size: context-parallel size.
        tokens_key: the budget to use, e.g. ``"logprob_mb_tokens"`` for scoring.
        group_size: neighbouring rows that must share a micro-batch.
    """
    microbatches = Microbatches(
        data,
        microbatch_config(cfg),
        mbs,
        Comm.of(dp_mesh),
        tokenizer,
        cp_size,
        key_prefix=key_prefix,
        device=device,
        tokens_key=tokens_key,
        group_size=group_size,
    )
    return iter(microbatches), microbatches.total


class Microbatches:
    """The micro-batches of one rank's rows, each made when it is taken; what is left can be planned anew.

    For the arguments see :func:`get_microbatch_iterator` and :func:`plan_microbatches`.

    Attributes:
        total: how many there are, those that were taken already among them; the largest number over ``ranks`` until a
            plan is made anew.
        tag: of the micro-batch that was taken last, see ``again``.
    """

    def __init__(
        self,
        data: BatchedDataDict,
        cfg: MicrobatchConfig,
        mbs: int,
        ranks: Comm,
        tokenizer: object,
        cp_size: int = 1,
        *,
        key_prefix: str = "",
        device: torch.device | str | None = None,
        tokens_key: str = "train_mb_tokens",
        group_size: int = 1,
        longer_alone: bool = False,
    ) -> None:
        self._data, self._cfg, self._mbs = data, cfg, mbs
        self._group_size, self._longer_alone = group_size, longer_alone
        self._tokenizer, self._cp_size, self._tokens_key = tokenizer, cp_size, tokens_key
        self._prefix, self._device = key_prefix, device
        bins = self._plan(data)
        # data-parallel ranks before their first micro-batch: one number each, since all must take as many
        self.total = int(ranks.max(torch.tensor(len(bins))))
        self._fillers = self.total - len(bins)
        self._waiting: deque[tuple[list[int], Any]] = deque((items, None) for items in bins)
        self._taken: list[int] = []
        self._done = 0
        self.tag: Any = None

    def __iter__(self) -> Iterator[ProcessedMicrobatch]:
        while self._waiting:
            self._taken, self.tag = self._waiting.popleft()
            yield self._processed(self._data.select_indices(self._taken))
            self._done += 1
        self.tag = None
        dummy = make_dummy_batch(self._data) if self._fillers else None
        for _ in range(self._fillers):
            assert dummy is not None
            yield self._processed(dummy)

    def again(self, cfg: MicrobatchConfig, tag: Any = None) -> None:
        """Plan the micro-batch that was taken last once more, and those that are left, by other budgets; no row moves
        to a micro-batch of other rows. ``tag``: for the parts of the one that was taken."""
        self._cfg = cfg
        # the one that was taken last is not done: `__iter__` counts it, or what took its place, once it goes on
        self._done -= 1
        left = [(self._taken, tag), *self._waiting]
        self._waiting = deque((part, mark) for items, mark in left for part in self._parts(items))
        self.total = self._done + 1 + len(self._waiting) + self._fillers

    def _plan(self, rows: BatchedDataDict) -> Bins:
        return plan_microbatches(
            rows,
            self._cfg,
            self._mbs,
            tokens_key=self._tokens_key,
            group_size=self._group_size,
            longer_alone=self._longer_alone,
        )

    def _parts(self, items: list[int]) -> Bins:
        rows: BatchedDataDict = BatchedDataDict(self._data.select_indices(items).data)
        return [[items[i] for i in part] for part in self._plan(rows)]

    def _processed(self, rows: BatchedDataDict) -> ProcessedMicrobatch:
        microbatches = make_processed_microbatch_iterator(
            [rows], self._tokenizer, self._cfg, self._cp_size, key_prefix=self._prefix, device=self._device
        )
        return next(microbatches)


def process_microbatch(
    mb: BatchedDataDict,
    tokenizer: object,
    enable_seq_packing: bool,
    cfg: Config,
    cp_size: int,
    *,
    key_prefix: str = "",
    device: torch.device | str | None = None,
) -> ProcessedInputs:
    """The forward inputs of one micro-batch; see :func:`make_processed_microbatch_iterator` for the arguments.

    Unpacked rows get a 2-D mask and positions 0.. each; dynamic batching cuts them to the longest row, rounded up to
    ``dynamic_batching.sequence_length_round``. Packed rows get positions that restart at 0 in every document and the
    cumulative lengths for flash attention; the length is rounded up to ``sequence_packing.sequence_length_round`` (set
    it to the budget for one constant shape). With ``cp_size > 1`` the length is a multiple of ``2 * cp_size`` and
    ``cp_buffers`` holds what to shard along dim 1.
    """
    ids, lengths = _ids_and_lengths(mb, key_prefix, packed=enable_seq_packing)
    vlm_kwargs = _multimodal(mb, key_prefix, device)
    if cp_size < 1:
        raise ConfigError(f"A context-parallel size of {cp_size} is not usable; give 1 or more.")
    config = microbatch_config(cfg)
    split = config.dtensor_cfg.sequence_parallel and config.dtensor_cfg.tensor_parallel_size > 1
    if vlm_kwargs and (enable_seq_packing or cp_size > 1 or split):
        other = "sequence packing" if enable_seq_packing else f"context parallelism (size {cp_size})"
        other = "sequence parallelism" if split else other
        raise ConfigError(f"Multimodal inputs {sorted(vlm_kwargs)} do not go with {other}; switch it off.")
    multiple = _length_multiple(config.dtensor_cfg, cp_size)
    pad_id = _pad_id(tokenizer)
    if enable_seq_packing:
        rounding = config.sequence_packing.sequence_length_round
        inputs = _packed(ids, lengths, math.lcm(multiple, rounding), pad_id)
    else:
        inputs = _padded(ids, lengths, _padded_width(ids, lengths, config.dynamic_batching, multiple), pad_id)
    if vlm_kwargs:
        # Multimodal models derive positions from the media grid.
        inputs = replace(inputs, position_ids=None, vlm_kwargs=vlm_kwargs)
    if cp_size > 1:
        inputs.seq_index = torch.arange(inputs.seq_len, device=ids.device)[None]
        # Attention over ranks is causal and takes no mask; right padding is never seen by a real token.
        inputs.attention_mask = None
        assert inputs.position_ids is not None
        inputs.cp_buffers = [inputs.input_ids, inputs.position_ids, inputs.seq_index]
    return inputs.to(device)


@runtime_checkable
class CountingLoss(Protocol):
    """A loss with denominators of its own, as every `limbeck.losses.contract.Loss` has."""

    def denominators(self, batch: Any, /) -> Mapping[str, torch.Tensor]:
        """This rank's part of what the losses of a global batch are divided by."""
        ...


def check_sequence_dim(data: BatchedDataDict, *, skip_keys: Iterable[str] | None = None) -> tuple[int, int]:
    """The sequence dimension, which is 1, and its size: that of ``input_ids``. A tensor of two or more dimensions with
    another size there is refused, except for ``skip_keys``."""
    size, skipped = int(data["input_ids"].shape[1]), set(skip_keys or ())
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim > 1 and key not in skipped and value.shape[1] != size:
            raise DataError(
                f"the batch entry {key!r} is {value.shape[1]} wide, but input_ids are {size}; what does not lie along "
                "the student's sequence must be one of XTOKEN_NON_STUDENT_SEQ_KEYS, or of skip_keys"
            )
    return 1, size


def process_global_batch(
    data: BatchedDataDict,
    loss_fn: Any,
    dp_group: Any,
    *,
    batch_idx: int,
    batch_size: int,
) -> dict[str, Any]:
    """Take one global batch and count, over all data-parallel ranks, what its losses are divided by.

    Args:
        data: this rank's rows.
        loss_fn: the counts of a `CountingLoss` are summed over ranks as well.
        dp_group: data-parallel process group or mesh; None for a single rank.
        batch_idx: which batch of ``data``.
        batch_size: rows of this rank per batch.

    Returns:
        ``batch``; ``global_valid_seqs`` (rows that count); ``global_valid_toks`` (supervised tokens that have a
        predictor, so a row's first token is none; without ``token_mask`` all of a row's tokens are supervised);
        ``counts``, where the loss has denominators of its own.
    """
    batch = data.get_batch(batch_idx, batch_size)
    local = valid_counts(batch)
    extra = loss_fn.denominators(batch) if isinstance(loss_fn, CountingLoss) else {}
    values = {**local, **{name: torch.as_tensor(extra[name]) for name in sorted(extra)}}
    # data-parallel ranks, once per global batch: a few numbers, by which every rank divides its losses
    summed = Comm.of(dp_group).sum_named(values)
    result: dict[str, Any] = {"batch": batch, **{name: summed.pop(name) for name in local}}
    if isinstance(loss_fn, CountingLoss):
        result["counts"] = summed
    return result


def valid_counts(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """``global_valid_seqs`` and ``global_valid_toks`` of one rank's rows, see :func:`process_global_batch`."""
    if "sample_mask" not in batch:
        raise DataError(f"The batch has no 'sample_mask', which the loss is normalised with; it has {sorted(batch)}.")
    sample_mask = batch["sample_mask"]
    token_mask = batch["token_mask"] if "token_mask" in batch else _real_tokens(batch)
    # float64 holds counts exactly; a row's first token has no predictor
    valid_toks = (token_mask[:, 1:] * sample_mask.unsqueeze(-1)).sum(dtype=torch.float64)
    return {"global_valid_seqs": sample_mask.sum(dtype=torch.float64), "global_valid_toks": valid_toks}


def _real_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """``[B, T]`` bool: what is no padding."""
    ids, lengths = _ids_and_lengths(batch, "", packed=False)
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


class DummyBatch(BatchedDataDict):
    """A filler micro-batch: one row that counts for nothing."""


def make_dummy_batch(data: BatchedDataDict) -> DummyBatch:
    """One row shaped like ``data``'s with all masks zero: its cheapest real row, or zeros where ``data`` has none."""
    keys = [key for key in data if key.endswith("input_lengths")]
    size = data.size
    if size and keys:
        cost = torch.stack([torch.as_tensor(data[key]).cpu() for key in keys])
        # a row that is empty on some side comes last: a forward pass needs a token
        cost = torch.where((cost > 0).all(dim=0), cost.sum(dim=0), torch.iinfo(torch.long).max)
        row = DummyBatch(data.select_indices([int(cost.argmin())]).data)
    else:
        row = DummyBatch({key: _empty_row(key, value) for key, value in data.items()})
    for key, value in row.items():
        if isinstance(value, torch.Tensor) and key.endswith(("sample_mask", "token_mask", "pair_valid")):
            row[key] = torch.zeros_like(value)
        elif isinstance(value, ChunkLayout):
            row[key] = value.blank(1)
    return row


def _empty_row(key: str, value: Any) -> Any:
    if isinstance(value, ChunkLayout):
        return value.blank(1)
    if not isinstance(value, torch.Tensor):
        return [-1 if key == "idx" else None]
    if key.endswith("input_lengths"):
        return value.new_ones(1)
    # A forward pass needs at least one token.
    return value.new_zeros([1, *(max(1, dim) for dim in value.shape[1:])])


def _ids_and_lengths(mb: Mapping[str, Any], prefix: str, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and lengths of the rows; rows that are not packed may come without lengths and are then full."""
    required = (f"{prefix}input_ids", f"{prefix}input_lengths")[: 2 if packed else 1]
    for name in required:
        if name not in mb:
            hint = "; a teacher that reads the student's ids has none of its own: use key_prefix=''" if prefix else ""
            raise DataError(f"The micro-batch has no {name!r}, only {sorted(mb)}{hint}.")
    ids = mb[f"{prefix}input_ids"]
    lengths = mb.get(f"{prefix}input_lengths")
    if lengths is None:
        lengths = torch.full(ids.shape[:1], ids.shape[-1], device=ids.device)
    lengths = lengths.to(torch.long)
    if ids.ndim != 2 or lengths.shape != ids.shape[:1]:
        raise DataError(
            f"{prefix}input_ids {tuple(ids.shape)} and lengths {tuple(lengths.shape)} must be [B, T] and [B]."
        )
    if len(ids) == 0:
        raise DataError("The micro-batch has no rows; give at least one.")
    if int(lengths.max()) > ids.shape[1] or int(lengths.min()) < 0:
        raise DataError(
            f"{prefix}input_lengths {int(lengths.min())}..{int(lengths.max())} do not fit ids of width {ids.shape[1]}."
        )
    return ids, lengths


def _multimodal(mb: Mapping[str, Any], prefix: str, device: torch.device | str | None) -> dict[str, Any]:
    if prefix or not isinstance(mb, BatchedDataDict):
        return {}
    return mb.get_multimodal_dict(as_tensors=True, device=device)


@runtime_checkable
class _Pads(Protocol):
    pad_token_id: int | None


@runtime_checkable
class _Ends(Protocol):
    eos_token_id: int | None


def _pad_id(tokenizer: object) -> int:
    """Token that rows are filled up with, to which nothing attends: the tokenizer's padding, else its end token, else
    0."""
    if isinstance(tokenizer, _Pads) and tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if isinstance(tokenizer, _Ends) and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return 0


def _length_multiple(layout: ParallelConfig, cp_size: int) -> int:
    parts = layout.tensor_parallel_size if layout.sequence_parallel else 1
    # a context-parallel rank has two pieces, which tensor-parallel ranks may cut once more
    return cp_size * math.lcm(2, parts) if cp_size > 1 else parts


def _padded_width(ids: torch.Tensor, lengths: torch.Tensor, batching: BatchingConfig, multiple: int) -> int:
    width = ids.shape[1]
    if batching.enabled:
        multiple = math.lcm(multiple, batching.sequence_length_round)
        width = int(lengths.max())
    return max(1, -(-width // multiple)) * multiple


def _padded(ids: torch.Tensor, lengths: torch.Tensor, width: int, pad_id: int) -> ProcessedInputs:
    rows = ids.shape[0]
    ids = ids[:, :width] if width <= ids.shape[1] else F.pad(ids, (0, width - ids.shape[1]), value=pad_id)
    positions = torch.arange(width, device=ids.device)
    # An empty row sees its first padding token: a softmax over nothing would be NaN.
    mask = positions < lengths.clamp(min=1)[:, None]
    return ProcessedInputs(
        input_ids=ids,
        seq_len=width,
        attention_mask=mask,
        position_ids=positions.repeat(rows, 1),
        row_start=torch.arange(rows, device=ids.device) * width,
    )


def _packed(ids: torch.Tensor, lengths: torch.Tensor, multiple: int, pad_id: int) -> ProcessedInputs:
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    samples = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    total = int(lengths.sum())
    width = max(1, -(-total // multiple)) * multiple
    tail = width - total
    documents = lengths[lengths > 0]
    if tail:
        documents = torch.cat([documents, documents.new_tensor([tail])])
    cu_seq_lens = F.pad(documents.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(documents.max())
    tail_positions = torch.arange(tail, device=ids.device)
    return ProcessedInputs(
        input_ids=F.pad(ids[real], (0, tail), value=pad_id)[None],
        seq_len=width,
        attention_mask=None,
        position_ids=torch.cat([positions[real], tail_positions])[None],
        flash_attn_kwargs={
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
        },
        row_start=lengths.cumsum(0) - lengths,
        document_ids=F.pad(samples[real], (0, tail), value=-1)[None],
        cu_seqlens_host=tuple(cu_seq_lens.tolist()),
    )
