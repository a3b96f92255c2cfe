"""Meanings of the counted reasons, in one sentence each."""

from __future__ import annotations

import re

_REASONS = {
    "truncated": "records cut at the last boundary that both contexts can hold",
    "truncated_tokens": "tokens behind such a cut",
    "prefix_of_document": "documents of which only the part that fits a context was read",
    "no_target": "records without a token to learn from",
    "skipped_record": "records that could not be rendered",
    "inexact_tokens": "tokens whose bytes the tokenizer's normaliser changed",
    "inexact_chunks": "chunks whose bytes differ between the two sides, kept out of the loss",
    "added_space_chunks": "chunks behind a space that one tokenizer writes by itself, kept out of losses that compare "
    "tokens; alm and the policy gradient compare their probabilities",
    "segment_missing": "messages or parts that only one side's template renders",
    "segment_differs": "messages that the two templates render differently",
    "call_fields_differ": "names, keys and values of tool calls that the two templates write differently",
    "written_short_ids": "conversations with call ids of nine letters, which the template insists on",
    "written_apart": "conversations in which texts and calls of one message stand one after another",
    "written_text": "conversations whose calls and results the template reads as text",
    "written_alternate": "the same, with turns joined so that user and assistant alternate",
    "unencoded_bytes": "bytes for which the tokenizer has no token",
    "segment_stripped": "messages whose outer white space one template strips; the rest is compared",
    "no_shared_boundary": "tokens at an edge where the two sides never cut at one place",
    "straddle": "tokens across the edge of a supervised span",
    "unrendered_content": "assistant messages that the template leaves out",
    "unrendered_reasoning": "reasoning that the template leaves out",
    "unrendered_context": "other messages that the template leaves out",
    "context_in_question": "contexts that stand in the first question, for the template leaves the instructions out",
    "unrendered_tools": "tools given to a template that reads none",
    "no_end_of_turn": "answers without an end-of-turn token",
    "outside_generation": "answers outside the template's generation markers",
    "edge_whitespace": "strings whose outer white space could not be distinguished from the template's",
    "blank_chunks": "chunks of the student's own text that are nothing but spaces and tabs",
    "cut_chunks": "last chunks of answers that the length limit cut off",
    "special_in_answer": "answers with a special token inside; what follows it is not compared",
    "unspelled_bytes": "bytes of answers that a teacher's vocabulary cannot write, and what follows them",
    "stop_without_partner": "ends of answers for which the teacher has no token",
    "cut_messages": "earliest messages of conversations that would leave no room for an answer",
    "prompt_too_long": "conversations whose last messages alone leave no room for an answer",
    "calls_in_student_markup": "answers with tool calls that a teacher read in the student's bytes",
    "empty": "empty records",
    "too_long": "records over the size limit",
    "missing_key": "records without the key that holds the text",
    "wrong_type": "records whose value has the wrong type",
    "malformed_json": "lines that are no JSON",
    "invalid_utf8": "records that are not UTF-8",
    "invalid_unicode": "records with half a surrogate pair",
    "bad_message": "conversations with a message that has no role",
    "not_an_object": "lines that are no JSON object",
    "healthy_check": "failed results of tests, linters and searches that did their work",
    "user_interruption": "calls that the user interrupted or declined",
    "kind_cancelled": "calls that were cancelled because another one failed",
    "no_call": "failures that belong to no recorded call",
    "no_hint": "failures for which no generator has a hint",
    "hint_leaks": "failures whose hint gives away what came later",
    "unsupervised_target": "messages with a weight of 0",
    "target_in_shared_context": "messages that stand in another trace of the same log",
    "teacher_template_refused": "traces that the teacher's template cannot read",
    "hint_refused": "hints that the template refuses",
    "hint_not_separable": "hints that no token divides from the target",
    "hint_not_shown": "hints that the template does not write",
    "hint_does_not_fit": "hint and target are longer than the window",
    "target_too_long": "messages longer than the window",
    "target_rendered_differently": "messages that the template writes differently behind a hint",
    "no_shared_text": "messages of which the two templates write nothing alike",
    "no_target_tokens": "messages that the template does not show",
    "empty_message": "messages of which the template shows only the end of turn",
}


def explain(reason: str) -> str:
    """A sentence about a reason; a teacher's number in front is kept apart. Empty for one that is not known."""
    match = re.fullmatch(r"(?:.*: )?teacher_(\d+)_(\w+)", reason)
    if match:
        base = _REASONS.get(match[2], "")
        return f"teacher {match[1]}: {base}" if base else ""
    return _REASONS.get(reason.rpartition(": ")[2], "")
