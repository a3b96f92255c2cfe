"""Conversations: rendered with a chat template, tokenised once, what the assistant wrote found and proven."""

from limbeck.tokens.chat.hint_placement import PLACEMENTS, Placement, insert_hint, probe_placement
from limbeck.tokens.chat.pieces import ChatRenderer, Conversation, Piece, Target
from limbeck.tokens.chat.render import render_ahead, render_chat
from limbeck.tokens.chat.template import ChatTemplate, Message
from limbeck.tokens.chat.template_compat import RULES, Rule

__all__ = [
    "PLACEMENTS",
    "RULES",
    "ChatRenderer",
    "ChatTemplate",
    "Conversation",
    "Message",
    "Piece",
    "Placement",
    "Rule",
    "Target",
    "insert_hint",
    "probe_placement",
    "render_ahead",
    "render_chat",
]
