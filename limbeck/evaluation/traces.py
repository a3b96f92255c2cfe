"""How probable models find the messages that failed in traces, and better messages in front of the same states.

A better message is the chosen side of the trace's preference pair at that place, else the message that put the error
right later, moved to where the failed one stood. Training on traces should lower the first and raise the second.

What models then do is another question: in front of the same states they write an answer of their own, which is held
against the failed call, the tools' schemas and the message that put things right (``behaviour``).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from limbeck.errors import ConfigError, TemplateError, TraceError
from limbeck.evaluation.bits import Begin, EvalModel, EvalOptions, unwatched
from limbeck.evaluation.models import find_model
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.tokens.tokenizer import read_template
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.calls import parse_calls
from limbeck.traces.errors import check_call
from limbeck.traces.failed_calls import find_recoveries
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.replay import with_text_action
from limbeck.traces.schema import Message, PreferencePair, Trace

if TYPE_CHECKING:
    from limbeck.traces import ComposerDataCollator

Row = dict[str, Any]
KINDS = ("failed", "hinted", "better")


def evaluate_traces(
    models: Sequence[str],
    files: Sequence[str | Path],
    options: EvalOptions | None = None,
    *,
    chat_template: str | None = None,
    generate: int = 0,
    max_new_tokens: int = 256,
    begin: Begin | None = None,
) -> dict[str, Any]:
    """Score the failed calls and preference pairs of trace files by every model, one model in memory at a time.

    Args:
        chat_template: text or ``.jinja`` file for models whose own template writes no tool calls; a run's checkpoints
            carry the template that they were trained with.
        generate: number of failed states at which each model writes an answer; 0 for none.
        max_new_tokens: longest answer.

    Returns:
        ``{model: {"sites", "pairs", "failed_logprob", "hinted_logprob", "better_logprob", "worse_logprob",
        "better_above_worse", "rows": [...], "skipped": {...}}}``; log-probabilities are means in nats per message. Each
        row is one place: ``trace``, ``message``, ``kind``, and ``failed``, ``hinted``, ``better`` where known. With
        ``generate`` also ``behaviour``, see :func:`behaviour_at_failures`.
    """
    options = options or EvalOptions()
    log = ReadLog()
    traces = list(read_traces([Path(f) for f in files], log=log))[: options.max_documents]
    if not traces:
        raise TraceError(f"no trace was found in {', '.join(map(str, files))}; check the files")
    results: dict[str, Any] = {}
    for source in [find_model(spec, options.checkpoint) for spec in dict.fromkeys(models)]:
        model = EvalModel(source, options)
        _set_template(model, chat_template)
        advance = begin(model.name, str(files[0]), len(traces)) if begin else unwatched
        results[source.spec] = score_traces(model, traces, advance)
        if generate:
            results[source.spec]["behaviour"] = behaviour_at_failures(
                model, traces, states=generate, max_new_tokens=max_new_tokens
            )
        del model
        gc.collect()
    return results


def _set_template(model: EvalModel, template: str | None) -> None:
    if template is not None and model.source.step is None:
        model.tokenizer.chat_template = read_template(template)


def score_traces(model: EvalModel, traces: Sequence[Trace], advance: Callable[[float], None]) -> dict[str, Any]:
    """Figures of one model, see :func:`evaluate_traces`."""
    settings = CollatorConfig(max_seq_len=model.context, max_dpo_seq_len=model.context)
    collator = ComposerDataCollator(model.tokenizer, settings)
    rows: dict[tuple[str, int], Row] = {}
    worse: list[tuple[float, float]] = []
    for trace in map(with_better, traces):
        try:
            batch = collator([trace])
        except (TemplateError, TraceError) as error:
            raise TraceError(
                f"{model.name} cannot read trace {trace.id!r}: {error} (--chat-template gives it a template)"
            ) from error
        hint, pairs = batch.channel("hint"), batch.channel("preference")
        if hint.size:
            channels = (model.policy.response_log_probs(hint, prefix=prefix) for prefix in ("", "teacher_"))
            plain, hinted = (sums.tolist() for sums in channels)
            for info, failed, with_hint in zip(batch["site_info"], plain, hinted, strict=True):
                row = _row(rows, trace.id, info["message"])
                row |= {"kind": info["error_kind"], "failed": failed, "hinted": with_hint}
        if pairs.size:
            sums = model.policy.response_log_probs(pairs).reshape(-1, 2).tolist()
            for info, (better, rejected) in zip(batch["dpo_info"], sums, strict=True):
                worse.append((better, rejected))
                if info["message_index"] is not None:
                    _row(rows, trace.id, info["message_index"])["better"] = better
        advance(1)
    return _summary(list(rows.values()), worse, collator.skipped)


def behaviour_at_failures(
    model: EvalModel, traces: Sequence[Trace], *, states: int, max_new_tokens: int
) -> dict[str, Any]:
    """Answers that a model writes, greedily, where the recorded agent made a call that failed.

    Returns:
        ``states`` (answers written), ``calls`` (share that holds a call which parses), ``repeated`` (makes the failed
        call again), ``known_tool`` and ``valid`` (share of the answers with calls that name existing tools, and fit
        their schemas; None where no trace has tools), ``recovered`` (share, of the states that were put right later,
        that makes the calls which did it), ``unended`` (cut off by the length), and ``answers``: one row per state.
    """
    room = min(model.context, model.limit() - max_new_tokens)
    if room < 1:
        raise ConfigError(f"answers of {max_new_tokens} tokens leave no room in the context of {model.name!r}")
    collator = ComposerDataCollator(model.tokenizer, CollatorConfig(max_seq_len=room, enable_replay_dpo=False))
    prompts: list[Tensor] = []
    failures: list[tuple[Trace, int, int]] = []
    for trace in traces:
        batch = collator([trace])
        for row, info in enumerate(batch["site_info"]):
            # a message with several failed calls is several sites, and one state
            if len(failures) < states and (trace.id, info["message"]) not in {(t.id, m) for t, m, _ in failures}:
                first = int(batch["student_response_idx"][row, 0])
                prompts.append(batch["sdpo_student_input_ids"][row, :first])
                failures.append((trace, info["message"], info["cause"]))
        if len(failures) == states:
            break
    vocab = collator.student.tokenizer.vocab
    greedy = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0)
    written = LocalSampler(model.policy, greedy, vocab.end_ids()).sample(prompts) if prompts else []
    return _behaviour(
        [_judged(p, _text(collator, sample.ids_T), sample.ended) for p, sample in zip(failures, written, strict=True)]
    )


def _text(collator: ComposerDataCollator, ids: Tensor) -> str:
    vocab = collator.student.tokenizer.vocab
    # Markers of calls may be special tokens, which stand for no bytes but part what they stand between.
    parts = [b"\n" if vocab.special[i] else vocab.token_bytes[i] for i in ids.tolist()]
    return b"".join(parts).decode("utf-8", "replace")


def _judged(state: tuple[Trace, int, int], text: str, ended: bool) -> Row:
    """One answer held against the trace: every figure True or False, None where the trace cannot tell."""
    trace, message, cause = state
    failed = trace.messages[message]
    calls = parse_calls(text)
    if not calls and any(call.in_content for call in failed.tool_calls):
        calls = with_text_action(Message(role="assistant", content=text)).tool_calls
    recovery = find_recoveries(trace).get(cause)
    caller = trace.callers().get(cause)
    wrong = failed.tool_calls[caller[1]].key() if caller is not None else None
    problems = [check_call(call, trace.tools) for call in calls]
    tools = bool(trace.tools) and bool(calls)
    done = None if recovery is None else sorted(call.key() for call in trace.messages[recovery].tool_calls)
    return {
        "trace": trace.id,
        "message": message,
        "text": text,
        "calls": bool(calls),
        "repeated": any(call.key() == wrong for call in calls),
        "known_tool": all(p is None or p[0] != "unknown_tool" for p in problems) if tools else None,
        "valid": all(problem is None for problem in problems) if tools else None,
        "recovered": None if done is None else sorted(call.key() for call in calls) == done,
        "unended": not ended,
    }


def _behaviour(answers: list[Row]) -> dict[str, Any]:
    shares: dict[str, Any] = {}
    for name in ("calls", "repeated", "known_tool", "valid", "recovered", "unended"):
        known = [answer[name] for answer in answers if answer[name] is not None]
        shares[name] = sum(known) / len(known) if known else None
    return {"states": len(answers), **shares, "answers": answers}


def _row(rows: dict[tuple[str, int], Row], trace: str, message: int) -> Row:
    return rows.setdefault((trace, message), {"trace": trace, "message": message, "kind": ""})


def _summary(rows: list[Row], pairs: list[tuple[float, float]], skipped: Counter[str]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for kind in KINDS:
        values = [row[kind] for row in rows if kind in row]
        means[f"{kind}_logprob"] = sum(values) / len(values) if values else None
    n = len(pairs)
    return {
        "sites": sum("failed" in row for row in rows),
        "pairs": n,
        **means,
        "better_logprob": sum(b for b, _ in pairs) / n if n else None,
        "worse_logprob": sum(w for _, w in pairs) / n if n else None,
        "better_above_worse": sum(b > w for b, w in pairs) / n if n else None,
        "rows": rows,
        "skipped": {reason: count for reason, count in sorted(skipped.items()) if count},
    }


def with_better(trace: Trace) -> Trace:
    """The trace with a pair (better, failed) for every failed message that was put right and has no pair yet."""
    known = {pair.message_index for pair in trace.preference_pairs}
    pairs = list(trace.preference_pairs)
    callers, recoveries = trace.callers(), find_recoveries(trace)
    for index, message in trace.new_messages():
        caller = callers.get(index) if message.role == "tool" and message.is_error else None
        if caller is None or caller[0] in known:
            continue
        target, recovery = caller[0], recoveries.get(index)
        if recovery is not None:
            known.add(target)
            pair = PreferencePair(
                chosen=trace.messages[recovery],
                rejected=trace.messages[target],
                trace_id=trace.id,
                message_index=target,
                provenance={"source": "recovery"},
            )
            pairs.append(pair)
    return trace.model_copy(update={"preference_pairs": pairs})
