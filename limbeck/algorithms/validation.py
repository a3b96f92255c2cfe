"""Held-out quality: of students and teachers on texts, of failed and preferred messages in traces."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from limbeck import __version__
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.monitors import CollapseMonitor
from limbeck.algorithms.observers.samples import sample_row
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import aligned_chunks
from limbeck.data.loader import rank_batches
from limbeck.data.sources import RecordDataset
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError
from limbeck.evaluation.bits import Scorer
from limbeck.evaluation.bos import bos_bits
from limbeck.key_names import near_name
from limbeck.losses.blocks import CHUNK_KINDS
from limbeck.losses.contract import Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.losses.objectives import Objective
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.loading import ModelConfig
from limbeck.models.policy import Policy
from limbeck.teachers.live import key_prefix
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.classes import TEXT_CLASSES
from limbeck.traces.collate.batch import ComposerBatch
from limbeck.traces.dataset import TraceCollate, TraceDataset
from limbeck.utils.files import JsonCache, cache_dir, content_hash
from limbeck.utils.logger import to_means
from limbeck.utils.metrics import Metrics, Pairs
from limbeck.utils.timer import Timer

# -- names -------------------------------------------------------------------------------------------------------------


def check_metric(
    config: MasterConfig, foreign: Sequence[object | None], val: Any | None, objectives: Sequence[Objective]
) -> None:
    """Refuse a metric that ranks checkpoints, or ends the run, and that no validation of this run measures.

    ``foreign``: for each teacher its tokenizer, None where it is the student's; ``val``: the records. What an
    objective of one's own measures is left to the first validation.
    """
    name = logged_name(config.checkpointing.metric_name)
    # scores of tasks are looked at with the run file
    if name is None or name.startswith("val/task/") or val is None:
        return
    parts = val.parts() if isinstance(val, RecordDataset) else {}
    names = ["bpb", "loss", "ce_loss", "accuracy", *(f"{part}/bpb" for part in parts if len(parts) > 1)]
    if foreign:
        names += ["kl_loss", "teacher_bpb", *(f"teacher_{i}_bpb" for i in range(len(foreign)) if len(foreign) > 1)]
        names += [f"{part}/teacher_bpb" for part in parts if len(parts) > 1]
        names += ["coverage"] if foreign[0] is not None else []
        names += ["proj_accuracy"]
    names += ["tokens", "chunks", *(f"ce_loss/{of_class}" for of_class in TEXT_CLASSES)]
    for i, objective in enumerate(objectives):
        if objective.measures is None and name.startswith(f"val/teacher_{i}/"):
            return
        split = [f"kl_loss/{kind}" for kind in (*TEXT_CLASSES, *CHUNK_KINDS)]
        names += [f"teacher_{i}/{one}" for one in ("kl_loss", "gate", "weight", *(objective.measures or ()), *split)]
    if error := unmeasured(name, names):
        raise error


def unmeasured(name: str, measured: Iterable[str]) -> ConfigError | None:
    """The refusal of a metric, by its name as logged, that is not among those that a validation measures."""
    names = list(measured)
    if name.removeprefix("val/") in names:
        return None
    # without what all of them begin with, which would make any two alike
    near = near_name(name.removeprefix("val/"), names)
    shown = [near] if near else names[:_SHOWN]
    return ConfigError(
        f"checkpointing.metric_name is {name!r}, which no validation of this run measures; take "
        + ("one of " if len(shown) > 1 else "")
        + ", ".join(f"val/{one}" for one in shown)
    )


def logged_name(name: str | None) -> str | None:
    """The name of a metric as logged, of its published form."""
    return "val/loss" if name == "val_loss" else None if name is None else name.replace(":", "/", 1)


_SHOWN = 8
"""Names that a refusal lists."""

# -- texts -------------------------------------------------------------------------------------------------------------


def evaluate(
    student: Policy,
    teachers: Sequence[Teacher],
    batches: Iterable[BatchedDataDict],
    loss_fn: CrossTokenizerDistillationLossFn,
    timer: Timer,
    parts: Sequence[str] = (),
) -> Pairs:
    """Metrics of a whole validation set as (sum, count), reduced over ranks.

    ``parts``: the file that each batch is from, for bits per byte by file (``NAME/bpb``).
    """
    sums, counts, by_part = Metrics(), Metrics(), Metrics()
    for number, batch in enumerate(batches):
        result = student.train(batch, loss_fn, teachers=teachers, eval_mode=True, timer=timer)
        sums.add(result["metrics"])
        # data-parallel ranks, per batch: four numbers
        sizes = byte_sums(batch).reduced(student.dims.data)[0]
        sums.add(sizes)
        if parts and "ce_loss" in result["metrics"]:
            bits = float(result["metrics"]["ce_loss"][0]) / math.log(2)
            by_part.add({f"{parts[number]}/bpb": (bits, float(sizes.pairs()["target_bytes"][0]))})
        counts.add({name: (float(value), 1.0) for name, value in result["counts"].items()})
    totals = {name: total for name, (total, _) in counts.pairs().items()}
    metrics = loss_fn.summarize(sums, totals).pairs()
    if "ce_loss" in metrics:
        metrics["bpb"] = (metrics["ce_loss"][0] / math.log(2), metrics.pop("target_bytes")[0])
    return {**metrics, **by_part.pairs()}


def byte_sums(batch: BatchedDataDict) -> Metrics:
    """Bytes behind the batch's cross-entropy, and the share of student tokens that lie in exact chunks."""
    counted = batch["sample_mask"] > 0
    sums = Metrics({"target_bytes": (float(batch["target_bytes"][counted].sum()), 0.0)})
    chunks = aligned_chunks(batch, 0)
    if chunks is not None and chunks.exact_C is not None:
        target = (batch["token_mask"] > 0) & counted[:, None]
        exact_M = chunks.exact_C[chunks.student_chunk_M]
        sample_M, at_M = chunks.sample_C[chunks.student_chunk_M], chunks.student_rows_M + 1
        inside = target[sample_M[exact_M], at_M[exact_M]]
        sums.add({"coverage": (float(inside.sum()), float(target.sum()))})
    return sums


def teacher_bits(
    student: Policy, teachers: Sequence[Teacher], batches: Iterable[BatchedDataDict], parts: Sequence[str] = ()
) -> Pairs:
    """Bits per byte of every teacher over its own tokens of the same texts; the first also without its number.

    ``parts``: as for ``evaluate``; the first teacher's are then there by file (``NAME/teacher_bpb``).
    """
    total = Metrics()
    for teacher in teachers:
        teacher.attach(student.layout)
    for number, batch in enumerate(batches):
        sums = Metrics()
        for i, teacher in enumerate(teachers):
            prefix = key_prefix(batch, teacher.number)
            with student.dims.data.fail_together():
                logprobs = teacher.log_probs(batch)
            # NaN marks rows that a remote teacher could not score
            counted = ((batch["sample_mask"] > 0) & ~logprobs.isnan().any(1))[:, None]
            mask = ((batch[f"{prefix}token_mask"] > 0) & counted)[:, 1:]
            # chosen, not multiplied: 0 x NaN is NaN; float64, since it is a sum over a whole batch
            nats = -float(logprobs[:, 1:][mask].double().sum())
            size = float(batch[f"{prefix}target_bytes"][counted[:, 0]].sum())
            sums.add({f"teacher_{i}_bpb": (nats / math.log(2), size)})
            if parts and i == 0:
                sums.add({f"{parts[number]}/teacher_bpb": (nats / math.log(2), size)})
        # data-parallel ranks, per batch: two numbers per teacher
        total.add(sums.reduced(student.dims.data)[0])
    metrics = total.pairs()
    if "teacher_0_bpb" in metrics:
        metrics["teacher_bpb"] = metrics["teacher_0_bpb"] if len(teachers) > 1 else metrics.pop("teacher_0_bpb")
    return metrics


def compared(
    student: Policy,
    teachers: Sequence[Teacher],
    batch: BatchedDataDict,
    loss_fn: CrossTokenizerDistillationLossFn,
    timer: Timer,
    config: MasterConfig,
) -> dict[str, float]:
    """Means of :func:`evaluate` and :func:`teacher_bits` on one batch, as :func:`compared_bits` reads them.

    Of loaded models they are kept in the cache folder under what identifies weights, rows and settings, so that a run
    which is started again does not ask again.
    """

    def measured() -> dict[str, float]:
        metrics = evaluate(student, teachers, [batch], loss_fn, timer)
        return to_means({**metrics, **teacher_bits(student, teachers, [batch])})

    models = [student, *(t.model for t in teachers)]
    # several ranks score together, so none of them may find an answer that another does not
    if Comm.world().size > 1 or None in models or list(loss_fn.parameters()):
        return measured()
    rows = {name: value.tolist() for name, value in batch.items() if isinstance(value, Tensor)}
    # the same weights give other numbers in another precision
    widths = [str(next(model.model.parameters()).dtype) for model in models]
    loss = [config.loss_fn.model_dump(mode="json"), config.modes, *(str(t.loss_fn) for t in config.all_teachers)]
    kept = JsonCache(cache_dir("compared"))
    key = content_hash([__version__, [model.identity() for model in models], widths, rows, loss])
    stored = kept.get(key)
    if stored and all(type(value) is float for value in stored.values()):
        return stored
    means = measured()
    with suppress(OSError):  # a cache that cannot be written to costs time and nothing else
        kept.put(key, means)
    return means


def compared_bits(means: Mapping[str, float]) -> str:
    """One line with the bits per byte of the student and its teachers and the share of a teacher's probability that the
    loss does not cover, and a warning where a teacher is the worse."""
    student_bits = means.get("bpb", math.nan)
    numbered = {name: bits for name, bits in means.items() if re.fullmatch(r"teacher_\d+_bpb", name)}
    teachers = list(numbered.values()) or [means[name] for name in ("teacher_bpb",) if name in means]
    line = ", ".join([f"{student_bits:.4f} bits per byte", *(f"teacher {bits:.4f}" for bits in teachers)])
    uncovered = [share for name, share in means.items() if re.fullmatch(r"teacher_\d+/uncovered_mass", name)]
    if uncovered:
        line += f", {' and '.join(f'{share:.1%}' for share in uncovered)} of its probability not covered by the loss"
    # rounded: a teacher that is as good as the student is not called worse
    worse = [str(i) for i, bits in enumerate(teachers) if round(bits - student_bits, 3) > 0]
    if not worse:
        return line
    which = f"teacher {' and '.join(worse)}" if len(teachers) > 1 else "the teacher"
    return f"{line}\nwarning: {which} is worse than the student on this text and pulls it back"


def check_bos(student: Policy, teachers: Sequence[Teacher], config: MasterConfig) -> list[str]:
    """One sentence for every loaded model whose texts begin otherwise than it expects."""
    sections: list[tuple[str, Policy, ModelConfig]] = [("policy", student, config.policy)]
    several = len(teachers) > 1
    for i, (teacher, teacher_config) in enumerate(zip(teachers, config.all_teachers, strict=True)):
        if teacher.model is not None:
            sections.append((f"teachers.{i}" if several else "teacher", teacher.model, teacher_config))
    # one of random weights expects nothing yet
    warnings = [
        bos_warning(name, policy, policy.tokenizer) for name, policy, section in sections if section.init != "random"
    ]
    return [line for line in warnings if line]


def bos_warning(name: str, model: Scorer, tokenizer: object) -> str:
    """Sentence about a model whose texts begin otherwise than it expects; empty where they do not. ``name``: its
    section."""
    own = ByteTokenizer.of(tokenizer)
    bits = bos_bits(model, own)
    if bits is None or bits.expected in (None, own.adds_bos):
        return ""
    return f"the model of {name} scores a plain text at {bits}; set {name}.tokenizer.bos={str(bits.expected).lower()}"


# -- traces ------------------------------------------------------------------------------------------------------------


NAMES = (
    "erroneous_logprob",
    "erroneous_logprob_hinted",
    "chosen_logprob",
    "rejected_logprob",
    "margin",
    "preference_accuracy",
    "supervised_logprob",
    "response_length",
    "hint_compared",
)
_PROMPT_CHARACTERS = 600


class TraceValidation:
    """Measures a policy on traces, as (sum, count) over all ranks.

    ``erroneous_logprob``: nats of the messages whose call failed, each over the whole message; ``_hinted``: the same
    where the model reads the hint (a self-teacher's view). ``chosen_logprob``, ``rejected_logprob``, ``margin``,
    ``preference_accuracy``: of the pairs. ``supervised_logprob``: per token, all assistant messages.
    ``response_length``: tokens of greedy answers in front of the first failed calls. ``hint_compared``: share of the
    bytes of failed messages (texts, names, keys and values) on which a hinted teacher of another family is compared.

    Attributes:
        written: the greedy answers of the last measurement, as ``Logger.log_samples`` takes them.
    """

    def __init__(
        self, policy: Policy, dataset: TraceDataset, collate: TraceCollate, monitor: CollapseMonitor, *, rows: int = 8
    ) -> None:
        self.policy, self.dataset, self.collate, self.monitor, self.rows = policy, dataset, collate, monitor, rows
        self._prompts: list[Tensor] | None = None
        self.written: list[dict[str, Any]] = []

    def measure(self) -> Pairs:
        """All figures that the traces allow."""
        ranks = self.policy.dims.data
        sums = Metrics(dict.fromkeys(NAMES, (0.0, 0.0)))
        for mine in rank_batches(range(len(self.dataset)), rank=ranks.rank, world=ranks.size, rows=self.rows):
            self._add(sums, self.collate([self.dataset[i] for i in mine]))
        # the ranks of a sharded model can only write together
        if self.monitor.config.generate and (ranks.rank == 0 or self.policy.sharding.is_sharded):
            greedy = SamplingConfig(max_new_tokens=self.monitor.config.max_new_tokens, temperature=0)
            written = LocalSampler(self.policy, greedy, self.monitor.end_ids).sample(self.prompts())
            tokenizer = ByteTokenizer.of(self.policy.tokenizer)
            texts = [tokenizer.vocab.join(ids.tolist()).decode("utf-8", "replace") for ids in self.prompts()]
            self.written = [
                sample_row("student", s.prompt, texts[s.prompt][-_PROMPT_CHARACTERS:], s, tokenizer) for s in written
            ]
            if ranks.rank == 0:
                sums.add({"response_length": (float(sum(len(w.ids_T) for w in written)), len(written))})
        return sums.reduced(ranks)[0].pairs()

    def prompts(self) -> list[Tensor]:
        """Context in front of the first failed calls, ``[T]`` each; the same on all ranks and every time."""
        if self._prompts is None:
            self._prompts = []
            for mine in rank_batches(range(len(self.dataset)), rank=0, world=1, rows=self.rows):
                batch = self.collate([self.dataset[i] for i in mine])
                for row in range(min(self.monitor.config.generate, len(batch["student_response_idx"]))):
                    first = int(batch["student_response_idx"][row, 0])
                    self._prompts.append(batch["sdpo_student_input_ids"][row, :first])
                if self._prompts:
                    break
        return self._prompts

    def _add(self, sums: Metrics, batch: ComposerBatch) -> None:
        # a channel without rows is scored too: the ranks of a sharded model must make the same calls
        policy = self.policy
        hint = batch.channel("hint")
        sums.add({"erroneous_logprob": (policy.response_log_probs(hint).sum(), hint.size)})
        if self.collate.collator.teacher is self.collate.collator.student:
            hinted = policy.response_log_probs(hint, prefix="teacher_")
            sums.add({"erroneous_logprob_hinted": (hinted.sum(), hint.size)})
        else:
            compared, said = batch["site_compared"].sum(0).tolist()
            sums.add({"hint_compared": (compared, said)})
        chosen, rejected = policy.response_log_probs(batch.channel("preference")).reshape(-1, 2).unbind(1)
        for name, values in (
            ("chosen_logprob", chosen),
            ("rejected_logprob", rejected),
            ("margin", chosen - rejected),
            ("preference_accuracy", (chosen > rejected).double()),
        ):
            sums.add({name: (values.sum(), len(values))})
        whole = batch.channel("policy")
        tokens = (whole["token_mask"][:, 1:] > 0).sum()
        sums.add({"supervised_logprob": (policy.response_log_probs(whole).sum(), tokens)})
