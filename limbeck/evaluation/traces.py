"""How probable models find the messages that failed in traces, and better messages in front of the same states.

A better message is the chosen side of the trace's preference pair at that place, else the message that put the error
right later, moved to where the failed one stood. Training on traces should lower the first and raise the second.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from limbeck.errors import TemplateError, TraceError
from limbeck.evaluation.bits import Begin, EvalModel, EvalOptions, unwatched
from limbeck.evaluation.models import find_model
from limbeck.tokens.tokenizer import read_template
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.schema import PreferencePair, Trace
from limbeck.traces.sites import find_recoveries

Row = dict[str, Any]
KINDS = ("failed", "hinted", "better")


def evaluate_traces(
    models: Sequence[str],
    files: Sequence[str | Path],
    options: EvalOptions | None = None,
    *,
    chat_template: str | None = None,
    begin: Begin | None = None,
) -> dict[str, Any]:
    """Score the error sites and preference pairs of trace files by every model, one model in memory at a time.

    Args:
        chat_template: text or ``.jinja`` file for models whose own template writes no tool calls; a run's checkpoints
            carry the template that they were trained with.

    Returns:
        ``{model: {"sites", "pairs", "failed_logprob", "hinted_logprob", "better_logprob", "worse_logprob",
        "better_above_worse", "rows": [...], "dropped": {...}}}``; log-probabilities are means in nats per message. Each
        row is one place: ``trace``, ``message``, ``kind``, and ``failed``, ``hinted``, ``better`` where known.
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
        del model
        gc.collect()
    return results


def _set_template(model: EvalModel, template: str | None) -> None:
    if template is not None and model.source.step is None:
        model.tokenizer.chat_template = read_template(template)


def score_traces(model: EvalModel, traces: Sequence[Trace], advance: Callable[[float], None]) -> dict[str, Any]:
    """Figures of one model, see :func:`evaluate_traces`."""
    from limbeck.traces import CollatorConfig, ComposerDataCollator

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
            found = (model.policy.response_log_probs(hint, prefix=prefix) for prefix in ("", "teacher_"))
            plain, hinted = (sums.tolist() for sums in found)
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
    return _summary(list(rows.values()), worse, collator.dropped)


def _row(rows: dict[tuple[str, int], Row], trace: str, message: int) -> Row:
    return rows.setdefault((trace, message), {"trace": trace, "message": message, "kind": ""})


def _summary(rows: list[Row], pairs: list[tuple[float, float]], dropped: Counter[str]) -> dict[str, Any]:
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
        "dropped": {reason: count for reason, count in sorted(dropped.items()) if count},
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
