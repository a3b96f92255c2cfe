"""The trace collator: agent traces in, one batch for the three training channels out.

    collate = ComposerDataCollator(tokenizer, CollatorConfig(max_seq_len=4096))
    batch = collate(traces)
    policy, hint, preference = (batch.channel(name) for name in ("policy", "hint", "preference"))

**Policy**: every trace as the chat template writes it, all assistant tokens supervised. **Hint**: one row per failed
call; the student reads the trace up to the message that failed, the teacher the same with a hint directly before it,
and both end with the same target tokens. **Preference**: two answers to one state. All keys are listed
at the collator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from limbeck.errors import LimbeckError, TemplateError, TraceError
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.chat import ChatRenderer, Conversation, Placement
from limbeck.traces.collate.config import CollatorConfig, TokenizerLike
from limbeck.traces.collate.examples import Example, HintTarget, to_example
from limbeck.traces.collate.rows import (
    HintRow,
    HintSide,
    PairRow,
    PolicyRow,
    Skipped,
    TargetInContext,
    hint_row,
    pair_row,
)
from limbeck.traces.failed_calls import FailedCall, FailedCallFinder
from limbeck.traces.schema import Message, Trace

if TYPE_CHECKING:
    from limbeck.traces.collate.batch import ComposerBatch


class ComposerDataCollator:
    """Turns traces into one :class:`ComposerBatch`.

    ``B`` traces, ``N`` failed calls, ``P`` pairs. Every key is in every batch, with zero rows if need be, so that ranks
    never disagree. Sequences are right padded; masks come from lengths, never from ids. ``*_pred_pos`` is the position
    whose logits predict a token, one before it.

    | key | shape | meaning |
    |---|---|---|
    | `input_ids`, `attention_mask`, `input_lengths` | `[B, T]`, `[B]` | policy rows |
    | `response_mask` | `[B, T]` 0/1 | tokens the assistant wrote |
    | `response_weights` | `[B, T]` | weight of each token's message |
    | `rewards`, `reward_valid` | `[B]` | reward; whether the trace has one |
    | `sample_mask` | `[B]` | 1 where there is a reward and a response |
    | `group_index`, `group_ids`, `trace_ids` | `[B]`, lists | group number in this batch (-1: none); names |
    | `behavior_logprobs`, `behavior_valid` | `[B, T]` | of the sampling policy, where its ids are the rendered ones |
    | `ctx_teacher_*` | `[N, T_t]`, `[N]` | `input_ids`, `attention_mask`, `lengths` of hinted sequences |
    | `sdpo_student_*` | `[N, T_s]`, `[N]` | the same without the hint |
    | `sdpo_loss_mask` | `[N, T_t]` 0/1 | target tokens of the teacher's sequence |
    | `student_response_idx`, `student_response_valid` | `[N, K]` | target positions of the student; -1: none |
    | `teacher_response_idx`, `teacher_response_valid` | `[N, K]` | the same in the teacher's |
    | `student_pred_pos`, `teacher_pred_pos` | `[N, K]` | positions whose logits predict them |
    | `target_ids`, `teacher_target_ids` | `[N, K]` | the target tokens; `ignore_index`: none |
    | `weights`, `site_weight` | `[N, K]`, `[N]` | the weight of a failed call, spread over its tokens |
    | `site_row`, `site_target`, `site_info` | `[N]`, `[N]`, list | trace row, message index, hint and cause |
    | `site_compared` | `[N, 2]` | bytes of texts, names, keys and values that are compared, and all of these |
    | `site_in_row` | `[N]` bool | the student's positions are valid in `input_ids[site_row]` too |
    | `sdpo_alignment_*` | see `AlignmentBatch` | which target tokens of the two sequences correspond |
    | `dpo_chosen_*`, `dpo_rejected_*` | `[P, T_c]`, `[P, T_r]` | ids, masks and lengths of both sides |
    | `dpo_weights`, `dpo_row`, `dpo_info` | `[P]`, `[P]`, list | weight, row of the trace, provenance |
    | `skipped` | dict | what was left out, by reason |

    Args:
        tokenizer: of the student.
        config: see :class:`CollatorConfig`.
        teacher_tokenizer: of a hinted teacher with another tokenizer or template; by default the teacher is the student
            itself and reads the student's own ids.
        failed_calls: trace id -> its failed calls (of a file, see ``read_failed_calls``) or ``HintTarget``; by
            default they are found here, and the hint generator is asked for every one of them.

    Attributes:
        skipped: reason -> count, over all batches of this process.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        config: CollatorConfig | None = None,
        *,
        teacher_tokenizer: TokenizerLike | None = None,
        failed_calls: Mapping[str, Sequence[FailedCall | HintTarget]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config = CollatorConfig() if config is None else config
        self.failed_calls = failed_calls
        self.student = ChatRenderer(tokenizer, template_kwargs=config.template_kwargs)
        self.teacher = self.student
        if teacher_tokenizer is not None and teacher_tokenizer is not tokenizer:
            kwargs = config.teacher_template_kwargs
            self.teacher = ChatRenderer(teacher_tokenizer, template_kwargs=kwargs, name="teacher")
        self.finder = FailedCallFinder(hints=config.hints(), recovery_weight=config.recovery_weight)
        pad_id = _pad_id(self.student.tokenizer, config.pad_token_id)
        self.pad_ids = pad_id, pad_id if self.teacher is self.student else _pad_id(self.teacher.tokenizer)
        self.skipped: Counter[str] = Counter()
        self._hint_side: HintSide | None = None

    def __call__(self, examples: Sequence[Any]) -> ComposerBatch:
        """Collate ``TraceExample`` dicts, canonical traces, or their JSON forms."""
        skipped: Counter[str] = Counter()
        self.student.forget()
        self.teacher.forget()
        policy: list[PolicyRow] = []
        hints: list[tuple[int, HintRow]] = []
        pairs: list[tuple[int, PairRow]] = []
        for row, record in enumerate(examples):
            example = self._example(record, skipped)
            policy.append(example[0])
            hints += [(row, hint) for hint in example[1]]
            pairs += [(row, pair) for pair in example[2]]
        # The one place where torch is imported: reading and listing traces must not wait for it.
        from limbeck.traces.collate.batch import tensors

        batch = tensors(policy, hints, pairs, self.pad_ids, self.config.pad_to_multiple_of, self.config.ignore_index)
        batch["skipped"] = {reason: count for reason, count in sorted(skipped.items()) if count}
        self.skipped.update(skipped)
        return batch

    # -- one trace --------------------------------------------------------------------------------------------------

    def _example(self, record: Any, skipped: Counter[str]) -> tuple[PolicyRow, list[HintRow], list[PairRow]]:
        known = record if isinstance(record, Mapping) else {}
        name = record.id if isinstance(record, Trace) else known.get("trace_id", known.get("id"))
        try:
            example = to_example(record, self.config.rlvr_reward_key)
            name = example.trace.id
            tools = example.trace.tools or None
            plain = self.student.conversation(example.trace.to_messages(), tools)
        except LimbeckError as error:
            if self.config.on_error == "raise":
                raise TraceError(f"trace {name!r} cannot be collated: {error}") from error
            skipped["skipped_trace"] += 1
            return PolicyRow(str(name), None, None, np.array([self.pad_ids[0]], dtype=np.int64)), [], []
        skipped.update(plain.skipped)
        hints = self._hint_rows(example, plain, skipped) if self.config.enable_sdpo else []
        pairs = self._pairs(example.trace, skipped) if self.config.enable_replay_dpo else []
        return self._policy(example, plain, skipped), hints, pairs

    def _policy(self, example: Example, plain: Conversation, skipped: Counter[str]) -> PolicyRow:
        """The trace, or as many whole pieces as fit, from its beginning or from its end."""
        trace, limit = example.trace, self.config.max_seq_len
        kept = self._kept(plain, limit)
        if len(kept) < len(plain.pieces):
            skipped["policy_rows_cut"] += 1
        parts = [self.student.ids(plain.pieces[number]) for number in kept]
        start = dict(zip(kept, accumulate(map(len, parts), initial=0), strict=False))
        ids = np.concatenate(parts) if parts else self.student.ids(plain.pieces[0])[:limit]
        row = PolicyRow(trace.id, trace.group_id, example.reward, ids, from_start=kept == list(range(len(kept))))
        rendered: list[tuple[Any, Any, Any]] = []
        failed = example.failed(self.finder.ignored_kinds) if self.config.failed_weight != 1 else set()
        for message, turn in trace.new_messages():
            if turn.role != "assistant" or turn.weight == 0 or message not in plain.turns:
                continue
            if plain.piece_of[message] not in start:
                skipped["policy_messages_cut"] += 1
                continue
            weight = turn.weight * (self.config.failed_weight if message in failed else 1.0)
            if weight == 0:
                skipped["policy_failed_messages"] += 1
                continue
            target = self.student.target(plain, message)
            if target is None:
                skipped["no_target_tokens"] += 1
                continue
            skipped.update(target.skipped)
            weights = np.full(len(target.ids), weight, dtype=np.float32)
            logprobs = _behavior(turn, target.ids, skipped)
            if not row.from_start:
                logprobs[:] = np.nan
            rendered.append((target.positions + start[plain.piece_of[message]], weights, logprobs))
        if rendered:
            row.positions, row.weights, row.logprobs = (
                np.concatenate(column) for column in zip(*rendered, strict=True)
            )
        return row

    def _kept(self, plain: Conversation, limit: int) -> list[int]:
        """Numbers of the pieces that a policy row holds."""
        if self.config.policy_cut == "right":
            return self._fitting(plain, range(len(plain.pieces)), limit)
        # as in windows of hints: a head that leaves no room for any message gives way
        for head in (plain.head, plain.preamble, 0):
            kept = self._fitting(plain, [*range(head), *range(len(plain.pieces) - 1, plain.head - 1, -1)], limit)
            # What a cut from the left leaves must begin with a whole message.
            while len(kept) > head and kept[head] != plain.head and not plain.pieces[kept[head]].clean:
                del kept[head]
            if len(kept) > head:
                break
        return kept

    def _fitting(self, plain: Conversation, order: Iterable[int], limit: int) -> list[int]:
        """As many of these pieces, in this order, as fit together; sorted."""
        kept: list[int] = []
        for number in order:
            limit -= len(self.student.ids(plain.pieces[number]))
            if limit < 0:
                break
            kept.append(number)
        return sorted(kept)

    def _hint_rows(self, example: Example, plain: Conversation, skipped: Counter[str]) -> list[HintRow]:
        before = Counter(self.finder.skipped)
        known = None if self.failed_calls is None else self.failed_calls.get(example.trace.id, ())
        targets = example.targets(self.finder, known)
        skipped.update(self.finder.skipped - before)
        if not targets:
            return []
        rows: list[HintRow] = []
        for _, outcome in self._outcomes(example.trace, plain, targets):
            if isinstance(outcome, Skipped):
                skipped[outcome.reason] += 1
            else:
                rows.append(outcome)
        return rows

    def _outcomes(
        self, trace: Trace, plain: Conversation, targets: Sequence[HintTarget]
    ) -> list[tuple[HintTarget, HintRow | Skipped]]:
        _check_targets(targets, trace)
        side = self._side()
        tools = trace.tools or None
        try:
            theirs = plain if side.renderer is self.student else side.renderer.conversation(plain.messages, tools)
        except TemplateError:
            return [(target, Skipped("teacher_template_refused")) for target in targets]
        return [
            (target, hinted if isinstance(hinted, Skipped) else self._hint_row(target, plain, hinted))
            for target, hinted in zip(targets, side.hinted(theirs, tools, targets), strict=True)
        ]

    def hint_outcomes(
        self, trace: Trace, failed_calls: Sequence[FailedCall]
    ) -> list[tuple[HintTarget, HintRow | Skipped]]:
        """Every target of a trace's failed calls with its row in the hint channel, or the reason why it has none."""
        example = to_example(trace, self.config.rlvr_reward_key)
        plain = self.student.conversation(trace.to_messages(), trace.tools or None)
        return self._outcomes(trace, plain, example.targets(self.finder, failed_calls))

    def placement(self) -> Placement:
        """Where the hinted teacher's template shows a hint."""
        return self._side().placement

    def _hint_row(self, target: HintTarget, plain: Conversation, hinted: TargetInContext) -> HintRow | Skipped:
        student_target = self.student.target(plain, target.message)
        if student_target is None:
            return Skipped("no_target_tokens")
        if bool(student_target.rendering.special[student_target.positions].all()):
            return Skipped("empty_message")
        limit = self.config.max_seq_len
        return hint_row(
            target, TargetInContext(self.student, plain, plain.piece_of[target.message], student_target, limit), hinted
        )

    def _side(self) -> HintSide:
        """The hinted teacher; its template is probed when the first hint is due."""
        if self._hint_side is None:
            limit = self.config.teacher_max_seq_len or self.config.max_seq_len
            foreign = self.teacher is not self.student
            self._hint_side = HintSide(self.teacher, limit, self.config.hint_placement, foreign=foreign)
        return self._hint_side

    def _pairs(self, trace: Trace, skipped: Counter[str]) -> list[PairRow]:
        rows: list[PairRow] = []
        for pair in trace.preference_pairs:
            row: PairRow | Skipped
            try:
                row = pair_row(self.student, pair, trace, trace.tools or None, self.config.max_dpo_seq_len)
            except TemplateError:
                row = Skipped("pair_refused")
            if isinstance(row, Skipped):
                skipped[row.reason] += 1
            else:
                rows.append(row)
        return rows


def _pad_id(tokenizer: ByteTokenizer, configured: int | None = None) -> int:
    known = (i for i in (configured, tokenizer.pad_id, tokenizer.eos_id) if i is not None)
    pad_id = next(known, 0)
    size = tokenizer.vocab.size
    if not 0 <= pad_id < size:
        raise TraceError(f"pad_token_id is {pad_id}, outside the tokenizer's {size} ids; give one of them")
    return pad_id


def _check_targets(targets: Sequence[HintTarget], trace: Trace) -> None:
    for target in targets:
        there = 0 <= target.message < len(trace.messages)
        if not there or trace.messages[target.message].role != "assistant":
            what = f"a {trace.messages[target.message].role} message" if there else "not there"
            raise TraceError(
                f"trace {trace.id!r}: message {target.message} is {what}, but an assistant message makes a failed "
                "call; the file of failed calls belongs to other traces"
            )


def _behavior(message: Message, ids: Any, skipped: Counter[str]) -> Any:
    """The behaviour policy's log-probabilities of a message's tokens, NaN where they are not known.

    They count only where the sampled ids are the rendered ones; a log may leave out the end of turn.
    """
    out = np.full(len(ids), np.nan, dtype=np.float32)
    if message.sampled_ids is None or message.logprobs is None:
        return out
    sampled = np.array(message.sampled_ids, dtype=np.int64)
    if len(sampled) not in (len(ids), len(ids) - 1) or not np.array_equal(sampled, ids[: len(sampled)]):
        skipped["sampled_ids_differ"] += 1
        return out
    out[: len(sampled)] = message.logprobs
    return out
