"""The trace collator: agent traces in, one batch for the three training channels out.

    collate = ComposerDataCollator(tokenizer, CollatorConfig(max_seq_len=4096))
    batch = collate(traces)
    policy, hint, preference = (batch.channel(name) for name in ("policy", "hint", "preference"))

**Policy**: every trace as the chat template writes it, all assistant tokens supervised. **Hint**: one row per error
site; the student reads the trace up to the message that failed, the teacher the same with a hint directly before it,
and both end with the same target tokens. **Preference**: two answers to one state. All keys are listed in
``docs/trace_training.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from limbeck.errors import LimbeckError, TemplateError, TraceError
from limbeck.tokens import Tokenizer
from limbeck.tokens.chat import ChatRenderer, Conversation, Placement
from limbeck.traces.collate.config import CollatorConfig, TokenizerLike
from limbeck.traces.collate.examples import Example, HintTarget, to_example
from limbeck.traces.collate.rows import HintSide, PairRow, PolicyRow, SiteRow, TargetInContext, pair_row, site_row
from limbeck.traces.schema import Message, Trace
from limbeck.traces.sites import Site, SiteFinder

if TYPE_CHECKING:
    from limbeck.traces.collate.batch import ComposerBatch


class ComposerDataCollator:
    """Turns traces into one :class:`ComposerBatch`.

    Args:
        tokenizer: of the student.
        config: see :class:`CollatorConfig`.
        teacher_tokenizer: of a hinted teacher with another tokenizer or template; by default the teacher is the student
            itself and reads the student's own ids.
        sites: trace id -> its error sites (a site file, see ``read_sites``) or ``HintTarget``; by default they are
            found here, and the hint generator is asked for every one of them.

    Attributes:
        dropped: reason -> count, over all batches of this process.
        tokens_tokenized: tokens that went through the tokenizers so far.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        config: CollatorConfig | None = None,
        *,
        teacher_tokenizer: TokenizerLike | None = None,
        sites: Mapping[str, Sequence[Site | HintTarget]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config = CollatorConfig() if config is None else config
        self.sites = sites
        self.student = ChatRenderer(tokenizer, template_kwargs=config.template_kwargs)
        self.teacher = self.student
        if teacher_tokenizer is not None and teacher_tokenizer is not tokenizer:
            kwargs = config.teacher_template_kwargs
            self.teacher = ChatRenderer(teacher_tokenizer, template_kwargs=kwargs, name="teacher")
        self.finder = SiteFinder(hints=config.hints(), recovery_weight=config.recovery_weight)
        own = _pad_id(self.student.tokenizer, config.pad_token_id)
        self.pad_ids = own, own if self.teacher is self.student else _pad_id(self.teacher.tokenizer)
        self.dropped: Counter[str] = Counter()
        self._hint_side: HintSide | None = None

    @property
    def tokens_tokenized(self) -> int:
        return self.student.tokens + (0 if self.teacher is self.student else self.teacher.tokens)

    def __call__(self, examples: Sequence[Any]) -> ComposerBatch:
        """Collate ``TraceExample`` dicts, canonical traces, or their JSON forms."""
        dropped: Counter[str] = Counter()
        self.student.forget()
        self.teacher.forget()
        policy: list[PolicyRow] = []
        sites: list[tuple[int, SiteRow]] = []
        pairs: list[tuple[int, PairRow]] = []
        for row, record in enumerate(examples):
            found = self._example(record, dropped)
            policy.append(found[0])
            sites += [(row, site) for site in found[1]]
            pairs += [(row, pair) for pair in found[2]]
        # The one place where torch is imported: reading and listing traces must not wait for it.
        from limbeck.traces.collate.batch import tensors

        batch = tensors(policy, sites, pairs, self.pad_ids, self.config.pad_to_multiple_of, self.config.ignore_index)
        batch["dropped"] = {reason: count for reason, count in sorted(dropped.items()) if count}
        self.dropped.update(dropped)
        return batch

    # -- one trace --------------------------------------------------------------------------------------------------

    def _example(self, record: Any, dropped: Counter[str]) -> tuple[PolicyRow, list[SiteRow], list[PairRow]]:
        name = record.id if isinstance(record, Trace) else None
        try:
            example = to_example(record, self.config.rlvr_reward_key)
            name = example.trace.id
            tools = example.trace.tools or None
            plain = self.student.conversation(example.trace.to_messages(), tools)
        except LimbeckError as error:
            if self.config.on_error == "raise":
                raise TraceError(f"trace {name!r} cannot be collated: {error}") from error
            dropped["skipped_trace"] += 1
            return PolicyRow(str(name), None, None, np.array([self.pad_ids[0]], dtype=np.int64)), [], []
        dropped.update(plain.dropped)
        sites = self._sites(example, plain, dropped) if self.config.enable_sdpo else []
        pairs = self._pairs(example.trace, dropped) if self.config.enable_replay_dpo else []
        return self._policy(example, plain, dropped), sites, pairs

    def _policy(self, example: Example, plain: Conversation, dropped: Counter[str]) -> PolicyRow:
        """The trace, or as many whole pieces as fit, from its beginning or from its end."""
        trace, limit = example.trace, self.config.max_seq_len
        kept = self._kept(plain, limit)
        if len(kept) < len(plain.pieces):
            dropped["policy_rows_cut"] += 1
        parts = [self.student.ids(plain.pieces[number]) for number in kept]
        start = dict(zip(kept, accumulate(map(len, parts), initial=0), strict=False))
        ids = np.concatenate(parts) if parts else self.student.ids(plain.pieces[0])[:limit]
        row = PolicyRow(trace.id, trace.group_id, example.reward, ids, from_start=kept == list(range(len(kept))))
        found: list[tuple[Any, Any, Any]] = []
        failed = example.failed(self.finder.ignored_kinds) if self.config.failed_weight != 1 else set()
        for message, turn in trace.new_messages():
            if turn.role != "assistant" or turn.weight == 0 or message not in plain.turns:
                continue
            if plain.piece_of[message] not in start:
                dropped["policy_messages_cut"] += 1
                continue
            weight = turn.weight * (self.config.failed_weight if message in failed else 1.0)
            if weight == 0:
                dropped["policy_failed_messages"] += 1
                continue
            target = self.student.target(plain, message)
            if target is None:
                dropped["no_target_tokens"] += 1
                continue
            dropped.update(target.dropped)
            weights = np.full(len(target.ids), weight, dtype=np.float32)
            logprobs = _behavior(turn, target.ids, dropped)
            if not row.from_start:
                logprobs[:] = np.nan
            found.append((target.places + start[plain.piece_of[message]], weights, logprobs))
        if found:
            row.places, row.weights, row.logprobs = (np.concatenate(column) for column in zip(*found, strict=True))
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

    def _sites(self, example: Example, plain: Conversation, dropped: Counter[str]) -> list[SiteRow]:
        before = Counter(self.finder.dropped)
        known = None if self.sites is None else self.sites.get(example.trace.id, ())
        targets = example.targets(self.finder, known)
        dropped.update(self.finder.dropped - before)
        if not targets:
            return []
        rows: list[SiteRow] = []
        for _, found in self._outcomes(example.trace, plain, targets):
            if isinstance(found, str):
                dropped[found] += 1
            else:
                rows.append(found)
        return rows

    def _outcomes(
        self, trace: Trace, plain: Conversation, targets: Sequence[HintTarget]
    ) -> list[tuple[HintTarget, SiteRow | str]]:
        _check_targets(targets, trace)
        side = self._side()
        tools = trace.tools or None
        try:
            theirs = plain if side.renderer is self.student else side.renderer.conversation(plain.messages, tools)
        except TemplateError:
            return [(target, "teacher_template_refused") for target in targets]
        return [
            (target, hinted if isinstance(hinted, str) else self._site(target, plain, hinted))
            for target, hinted in zip(targets, side.hinted(theirs, tools, targets), strict=True)
        ]

    def site_outcomes(self, trace: Trace, sites: Sequence[Site]) -> list[tuple[HintTarget, SiteRow | str]]:
        """Every target of a trace's sites with its row in the hint channel, or the reason why it has none."""
        example = to_example(trace, self.config.rlvr_reward_key)
        plain = self.student.conversation(trace.to_messages(), trace.tools or None)
        return self._outcomes(trace, plain, example.targets(self.finder, sites))

    def placement(self) -> Placement:
        """Where the hinted teacher's template shows a hint."""
        return self._side().placement

    def _site(self, target: HintTarget, plain: Conversation, hinted: TargetInContext) -> SiteRow | str:
        own = self.student.target(plain, target.message)
        if own is None:
            return "no_target_tokens"
        if bool(own.rendering.special[own.places].all()):
            return "empty_message"
        limit = self.config.max_seq_len
        return site_row(
            target, TargetInContext(self.student, plain, plain.piece_of[target.message], own, limit), hinted
        )

    def _side(self) -> HintSide:
        """The hinted teacher; its template is probed when the first hint is due."""
        if self._hint_side is None:
            limit = self.config.teacher_max_seq_len or self.config.max_seq_len
            foreign = self.teacher is not self.student
            self._hint_side = HintSide(self.teacher, limit, self.config.hint_placement, foreign=foreign)
        return self._hint_side

    def _pairs(self, trace: Trace, dropped: Counter[str]) -> list[PairRow]:
        rows: list[PairRow] = []
        for pair in trace.preference_pairs:
            try:
                found = pair_row(self.student, pair, trace, trace.tools or None, self.config.max_dpo_seq_len)
            except TemplateError:
                found = "pair_refused"
            if isinstance(found, str):
                dropped[found] += 1
            else:
                rows.append(found)
        return rows


def _pad_id(tokenizer: Tokenizer, given: int | None = None) -> int:
    known = (i for i in (given, tokenizer.pad_id, tokenizer.eos_id) if i is not None)
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
                f"trace {trace.id!r}: message {target.message} is {what}, but a site's target is an assistant message; "
                "the site file belongs to other traces"
            )


def _behavior(message: Message, ids: Any, dropped: Counter[str]) -> Any:
    """The behaviour policy's log-probabilities of a message's tokens, NaN where they are not known.

    They count only where the sampled ids are the rendered ones; a log may leave out the end of turn.
    """
    out = np.full(len(ids), np.nan, dtype=np.float32)
    if message.sampled_ids is None or message.logprobs is None:
        return out
    sampled = np.array(message.sampled_ids, dtype=np.int64)
    if len(sampled) not in (len(ids), len(ids) - 1) or not np.array_equal(sampled, ids[: len(sampled)]):
        dropped["sampled_ids_differ"] += 1
        return out
    out[: len(sampled)] = message.logprobs
    return out
