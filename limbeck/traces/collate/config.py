"""Inputs of the trace collator: its settings, and the published forms of traces and turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

from limbeck.errors import ConfigError
from limbeck.tokens.chat import PLACEMENTS, Placement
from limbeck.traces.hints import HintGenerator, LayeredHints, as_generators


class TokenizerLike(Protocol):
    """Part of a tokenizer that the collator needs; every transformers fast tokenizer has it."""

    chat_template: Any
    pad_token_id: int | None
    eos_token_id: int | None
    bos_token_id: int | None
    special_tokens_map: Mapping[str, Any]
    backend_tokenizer: Any

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool) -> Any: ...

    def get_added_vocab(self) -> Mapping[str, int]: ...


class TraceTurn(TypedDict, total=False):
    """One turn of a published trace.

    ``tool_call``: the call, or a list of parallel calls, that an assistant turn made (``name``, ``arguments``,
    optionally ``id``; or the OpenAI form). ``tool_error``: on an assistant turn, this message is to be corrected; on a
    tool turn, the assistant message whose call failed is. True, or the kind of the error. ``error_meta``: facts for the
    hint; its ``kind`` names the kind of the error.
    Ours: ``tool_call_id`` and ``name`` of a tool turn, ``reasoning`` of an assistant turn.
    """

    role: str
    content: str
    tool_call: Any
    tool_error: bool | str | None
    error_meta: dict[str, Any] | None
    tool_call_id: str
    name: str
    reasoning: str


class TraceExample(TypedDict, total=False):
    """A published trace. ``dpo_pairs``: dicts with ``state_messages``, ``chosen`` and ``rejected``, each side a text or
    an assistant message, optionally ``weight``. Ours: ``group_id`` and ``tools``."""

    trace_id: str
    turns: list[TraceTurn]
    final_reward: float | None
    dpo_pairs: list[dict[str, Any]]
    group_id: str | None
    tools: list[dict[str, Any]]


HintHook = Callable[[str, dict[str, Any]], str | None]


@dataclass
class CollatorConfig:
    """Settings of :class:`~limbeck.traces.ComposerDataCollator`; the published ones come first.

    Attributes:
        max_seq_len: longest sequence of the policy and the hint channel, in tokens.
        max_dpo_seq_len: longest sequence of the preference channel.
        pad_token_id: padding; by default the tokenizer's, else its end token. Masks never depend on it.
        ignore_index: fills ``target_ids`` where there is no target.
        enable_sdpo: whether the hint channel has rows.
        hint_generator: ``(error_kind, error_meta) -> str | None``, a ``HintGenerator``, or ``LayeredHints``; by default
            a sentence by error kind, then the environment's own error text.
        enable_replay_dpo: whether the preference channel has rows.
        rlvr_reward_key: field of an example (or of a trace's ``meta``) that holds its reward.
        policy_cut: which end of a trace that is too long is left out of its policy row, by whole messages. ``right``
            keeps the full context of all that stays; ``left`` keeps the last messages behind the head, without
            behaviour log-probabilities, which were taken in another context.
        failed_weight: factor of messages whose tool call failed, in the policy channel. A trace's reward says nothing
            about them: 0 leaves them to the hint and preference channels.
        recovery_weight: weight of the message that put an error right, as a second target; 0 leaves it out.
        hint_placement: where a hint stands; by default what the chat template carries out, see ``probe_placement``.
        template_kwargs: further arguments of the chat template. Give ``date_string`` where a template prints today's
            date, or sequences will differ from day to day.
        on_error: ``raise`` stops at a trace that the template refuses; ``skip`` keeps an empty row that takes no part.
        teacher_max_seq_len: longest hinted sequence; by default ``max_seq_len``.
        teacher_template_kwargs: arguments of that teacher's template.
        pad_to_multiple_of: widths are rounded up to a multiple of this.
    """

    max_seq_len: int = 4096
    max_dpo_seq_len: int = 2048
    pad_token_id: int | None = None
    ignore_index: int = -100
    enable_sdpo: bool = True
    hint_generator: HintHook | HintGenerator | LayeredHints | None = None
    enable_replay_dpo: bool = True
    rlvr_reward_key: str = "final_reward"
    policy_cut: Literal["right", "left"] = "right"
    failed_weight: float = 1.0
    recovery_weight: float = 0.0
    hint_placement: Placement | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"
    teacher_max_seq_len: int | None = None
    teacher_template_kwargs: dict[str, Any] = field(default_factory=dict)
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_dpo_seq_len", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.teacher_max_seq_len is not None and self.teacher_max_seq_len < 1:
            raise ConfigError(f"teacher_max_seq_len is {self.teacher_max_seq_len}; it must be at least 1, or left out")
        if self.ignore_index >= 0:
            raise ConfigError(f"ignore_index is {self.ignore_index}; it must be negative, where no token id can be")
        for name in ("failed_weight", "recovery_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.hint_placement is not None and self.hint_placement not in PLACEMENTS:
            raise ConfigError(f"hint_placement is {self.hint_placement!r}; expected one of {list(PLACEMENTS)}")
        if self.policy_cut not in ("right", "left"):
            raise ConfigError(f"policy_cut is {self.policy_cut!r}; expected 'right' or 'left'")
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error is {self.on_error!r}; expected 'raise' or 'skip'")

    def hints(self) -> LayeredHints:
        """The hint generators that ``hint_generator`` stands for."""
        generator = self.hint_generator
        return generator if isinstance(generator, LayeredHints) else LayeredHints(as_generators(generator))
