"""Conversations: rendered with a chat template, tokenised once, what the assistant wrote found and proven."""

from limbeck.tokens.chat.adapt import RULES, Rule
from limbeck.tokens.chat.pieces import ChatRenderer, Conversation, Piece, Target
from limbeck.tokens.chat.placement import PLACEMENTS, Placement, insert_hint, probe_placement
from limbeck.tokens.chat.render import render_chat
from limbeck.tokens.chat.template import ChatTemplate, Message

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
    "render_chat",
]
