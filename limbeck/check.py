"""Is a pair of models worth a run on some data? What `limbeck check` measures before any device is paid for.

Tokenizers alone say how the two sides align and which of the teacher's predictions the student can learn from. Where
the weights lie here, a few rows are scored by both: is the teacher better on this text at all?
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.align.view import merged_summary, view_messages, view_text
from limbeck.data.readers import HUB_PREFIX, expand
from limbeck.data.rows import Row, sample_rows
from limbeck.doctor import Finding, has_weights
from limbeck.errors import ConfigError, LimbeckError, TemplateError
from limbeck.projection import audit_pair, audit_projection, count_pairs, load_or_build
from limbeck.projection.audit import REACHED, audit_masses
from limbeck.projection.rules import role_partners
from limbeck.tokens import ByteTokenizer, read_tokenizer, render_chat
from limbeck.tokens.classes import TEXT_CLASSES, text_class
from limbeck.tokens.vocab import KNOWN_ROLES
from limbeck.utils.files import model_path
from limbeck.utils.hub import model_files
from limbeck.utils.progress import Progress, Silent, duration

MOST_SCORED_BYTES = 20_000
"""Supervised bytes that both models score; enough to see a gap of some hundredths of a bit."""
MOST_SECONDS = 60.0
"""For which rows are scored; one row is, however long it takes."""
CLEAR_GAP = 0.05
"""Bits per byte below which a teacher has little to tell."""
ENOUGH_COVERED = 0.5
MODE = "tree_kl"
"""The loss to use: a run's default, which needs nothing of the teacher to be within the projection's reach."""
_ROLES = ("bos", "eos", "eot", "start_of_turn", "pad")
_THINK = ("<think>", "</think>")
_PROBE = ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."})
_SHOWN_TEMPLATE = 1200

Report = dict[str, Any]


def check_pair(
    student: str,
    teacher: str,
    data: Sequence[str],
    *,
    rows: int = 64,
    text_key: str = "text",
    score: bool = True,
    scored_bytes: int = MOST_SCORED_BYTES,
    seconds: float = MOST_SECONDS,
    memory_gib: float | None = None,
    progress: Progress | None = None,
    run: Any = None,
) -> Report:
    """Everything that is known about a pair before a run.

    ``student``, ``teacher``: model folders, run folders, tokenizer files or hub ids. ``data``: files, of which ``rows``
    are read. ``score``: load the weights, where they lie here, and score ``scored_bytes`` bytes of the rows,
    for ``seconds`` at most.
    ``memory_gib``: of a GPU that the estimate is for; None: of this machine's device.
    ``run``: configuration of a run of the pair, by whose tokenizers and batches it goes; None: the models' own, and the
    usual ones.

    Returns plain data: ``alignment``, ``vocabulary``, ``roles``, ``templates``, ``headroom``, ``estimate`` (the last
    two None where they were skipped), ``pilot`` (None, see `check_run`), ``views`` (the rows as `limbeck.align.view`
    gives them), ``findings`` (as those of ``limbeck doctor``), ``skipped`` (what was left out, and why) and ``verdict``
    (``worth``: nothing speaks against a run; ``mode``, ``sentence``).
    """
    progress = progress or Silent()
    student, teacher = model_path(student), model_path(teacher)
    bar = progress.begin("reading tokenizers and rows")
    if run is None:
        tokenizers = read_tokenizer(student), read_tokenizer(teacher)
    else:
        tokenizers = _tokenizer_of(run.policy), _tokenizer_of(run.all_teachers[0])
    sample = sample_rows(list(data), rows, text_key=text_key)
    bar.close()
    report: Report = {"student": student, "teacher": teacher, "data": list(data), "rows": len(sample), "skipped": {}}
    report["tokenizers"] = _tokenizers(tokenizers)
    report["templates"] = _templates(tokenizers, sample)
    report["views"] = _views(tokenizers, sample, progress)
    report["alignment"] = _alignment(report["views"])
    report["vocabulary"] = _vocabulary(tokenizers, sample, progress)
    report["roles"] = _roles(tokenizers)
    report["headroom"] = _headroom(report, tokenizers, score, scored_bytes, seconds, progress)
    report["estimate"] = _estimate(report, memory_gib, run)
    report["pilot"] = None
    report["findings"] = _findings(report)
    report["verdict"] = verdict(report)
    return report


def check_run(
    config: Any,
    *,
    pilot: bool | None = None,
    pilot_seconds: float = 60.0,
    pilot_write: bool | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """The audit of a run file's student and first teacher on its data, and a pilot of the run.

    ``config``: its validated configuration. ``pilot``: train both ways for a few steps, see
    `limbeck.tools.pilot.run_pilot`; None: where that seems to cost less than ``pilot_seconds``. ``pilot_write``: a
    further arm on text that the teacher writes. ``options``: of `check_pair`.
    """
    from limbeck.tools.pilot import refuse

    refuse(config, pilot=bool(pilot))
    student, teacher = config.policy, config.all_teachers[0]
    without_weights = [name for name, model in (("student", student), ("teacher", teacher)) if model.init == "random"]
    train = config.data.train
    files = [train] if isinstance(train, str) else list(train)
    options = {"text_key": config.data.text_key, **options, "score": options.get("score", True) and not without_weights}
    report = check_pair(spec_of(student), spec_of(teacher), files, progress=progress, run=config, **options)
    if without_weights:
        report["skipped"]["headroom"] = f"the {' and the '.join(without_weights)} begins with random weights"
    if len(config.all_teachers) > 1:
        report["skipped"]["other teachers"] = "only the first one is audited"
    return add_pilot(report, config, pilot=pilot, seconds=pilot_seconds, write=pilot_write, progress=progress)


def spec_of(model: Any) -> str:
    """What a run file's model is audited by: its folder or hub id, or the tokenizer of one with random weights."""
    return str((model.tokenizer.name if model.init == "random" else None) or model.model_name or model.tokenizer.name)


def _tokenizer_of(section: Any) -> ByteTokenizer:
    """The tokenizer of a run file's model, with its BOS token and its template."""
    from limbeck.algorithms.build import chat_tokenizer_of, tokenizer_of

    make = tokenizer_of if section.tokenizer.chat_template is None else chat_tokenizer_of
    return ByteTokenizer.of(make(section))


def add_pilot(
    report: Report,
    config: Any,
    *,
    pilot: bool | None,
    seconds: float,
    write: bool | None = None,
    progress: Progress | None = None,
) -> Report:
    """A report with the pilot of a run of its pair; see `check_run`."""
    why = "not asked for" if pilot is False else "" if pilot else _too_dear(report, seconds)
    if not why:
        from limbeck.tools.pilot import run_pilot

        try:
            outcome = run_pilot(config, seconds=seconds, write=write, progress=progress)
        except LimbeckError as error:
            if pilot:
                raise
            outcome = {"skipped": str(error)}
        why = outcome.get("skipped", "")
        report["pilot"] = None if why else outcome
    if why:
        report["skipped"]["pilot"] = why
    # both again: `check_pair` made them without a pilot
    report["findings"] = _findings(report)
    report["verdict"] = verdict(report)
    return report


def _too_dear(report: Report, seconds: float) -> str:
    """Why a pilot that nobody asked for is left out, by the time that scoring took; empty where it is cheap."""
    from limbeck.tools.pilot import LEAST_RECORDS

    headroom = report["headroom"]
    if headroom is None:
        return "nothing was scored that tells its time; ask for it with --pilot"
    each = headroom["seconds"] / headroom["rows"]
    # a step costs three forward passes, of three arms; held-out records are scored five times
    expected = each * LEAST_RECORDS * (3 * 3 + 5 / 2)
    if expected <= seconds:
        return ""
    return (
        f"it would take {duration(expected)} or more; ask for it with --pilot, and for more time with --pilot-seconds"
    )


# -- tokenizers --------------------------------------------------------------------------------------------------------


def _tokenizers(pair: tuple[ByteTokenizer, ByteTokenizer]) -> Report:
    sides = {
        name: {"family": t.vocab.family, "ids": t.vocab.size, "lossless": t.vocab.lossless, "adds_bos": t.adds_bos}
        for name, t in zip(("student", "teacher"), pair, strict=True)
    }
    return {"same": pair[0].vocab.same_tokens(pair[1].vocab), **sides}


def _templates(pair: tuple[ByteTokenizer, ByteTokenizer], sample: Sequence[Row]) -> Report:
    """Renderings by each side's chat template of the first conversation, or of a small one where the data has none."""
    chats = [row for row in sample if row.messages is not None]
    messages, tools = (chats[0].messages, chats[0].tools) if chats else (_PROBE, None)
    out: Report = {"needed": bool(chats)}
    for name, tokenizer in zip(("student", "teacher"), pair, strict=True):
        if not tokenizer.templates:
            out[name] = {"usable": False, "problem": "the tokenizer has no chat template"}
            continue
        try:
            rendering = render_chat(tokenizer, messages or (), tools=tools, name=name)
        except LimbeckError as error:
            out[name] = {"usable": False, "problem": str(error)}
            continue
        out[name] = {
            "usable": True,
            "tokens": len(rendering),
            "supervised": int(rendering.loss_mask.sum()),
            "skipped": dict(rendering.skipped),
            "text": "".join(tokenizer.vocab.display(rendering.ids.tolist()))[:_SHOWN_TEMPLATE],
        }
    return out


def _views(pair: tuple[ByteTokenizer, ByteTokenizer], sample: Sequence[Row], progress: Progress) -> list[Report]:
    bar = progress.begin("aligning rows", len(sample))
    views: list[Report] = []
    for row in sample:
        try:
            if row.messages is not None:
                view = view_messages(*pair, row.messages, row.tools)
            else:
                view = view_text(*pair, row.text or "")
        except TemplateError as error:
            view = {"problem": str(error)}
        views.append({"source": row.source, **view})
        bar.advance()
    bar.close()
    return views


def _alignment(views: Sequence[Report]) -> Report:
    """Chunks of all rows, and by class of text how many are one to one."""
    usable = [view for view in views if "problem" not in view]
    summary = merged_summary(usable)
    classes = {name: {"chunks": 0, "one_to_one": 0} for name in TEXT_CLASSES}
    for view in usable:
        for chunk in view["chunks"]:
            if not chunk["role"]:
                counts = classes[text_class(bytes.fromhex(chunk["bytes"]))]
                counts["chunks"] += 1
                counts["one_to_one"] += chunk["kind"] == "1:1"
    return {
        **summary,
        "strict": summary["kinds"]["1:1"] / summary["chunks"] if summary["chunks"] else 0.0,
        "classes": {name: counts for name, counts in classes.items() if counts["chunks"]},
        "refused_rows": len(views) - len(usable),
    }


def _vocabulary(pair: tuple[ByteTokenizer, ByteTokenizer], sample: Sequence[Row], progress: Progress) -> Report:
    """Cells and reach of the pair; masses are shares of the rows' tokens."""
    vocabs = pair[0].vocab, pair[1].vocab
    bar = progress.begin("spelling tokens on both sides")
    projection = load_or_build(*pair, trees=True, progress=lambda done, total: bar.update(done, total=total))
    bar.close()
    counter = count_pairs(*pair, [text for row in sample for text in _texts(row)], trees=projection.trees)
    coverage = audit_projection(projection, *vocabs, corpus_tokens=counter.student_tokens)
    reach = audit_pair(projection, vocabs[1], counter)
    masses = audit_masses(projection, *vocabs, counter, most=20)
    reached = reach.teacher_reached_mass
    return {
        "overlap": coverage.overlap,
        **reach.to_dict(),
        "uncovered_mass": None if reached is None else 1 - reached,
        **masses.to_dict(),
    }


def _texts(row: Row) -> list[str]:
    if row.messages is None:
        return [row.text or ""]
    taught = (message for message in row.messages if message.get("role") == "assistant")
    return [message["content"] for message in taught if isinstance(message.get("content"), str)]


def _roles(pair: tuple[ByteTokenizer, ByteTokenizer]) -> Report:
    """Which special token stands for which, and whether thinking has tags of one token."""
    vocabs = pair[0].vocab, pair[1].vocab
    partners = role_partners(*vocabs)
    table = []
    for role in _ROLES:
        mine = vocabs[0].ids_with_role(role)
        theirs = [partners[i] for i in mine if i in partners] or list(vocabs[1].ids_with_role(role))
        their_role = vocabs[1].roles[theirs[0]] if theirs else role
        sides = {"student": _special(pair[0], role, mine), "teacher": _special(pair[1], their_role, theirs)}
        table.append({"role": role, **sides, "meets": any(i in partners for i in mine)})
    think = [{"tag": tag, "student": len(pair[0].encode(tag)), "teacher": len(pair[1].encode(tag))} for tag in _THINK]
    return {"table": table, "think": think}


def _special(tokenizer: ByteTokenizer, role: str, ids: Sequence[int]) -> str | None:
    """How a tokenizer writes a role, as far as families' names are known."""
    if not ids:
        return None
    named = [content for content in tokenizer.aliases if KNOWN_ROLES.get(content) == role]
    return f"{named[0] if len(named) == 1 else f'[{role}]'} {ids[0]}"


# -- weights -----------------------------------------------------------------------------------------------------------


def _headroom(
    report: Report,
    tokenizers: tuple[ByteTokenizer, ByteTokenizer],
    score: bool,
    most: int,
    seconds: float,
    progress: Progress,
) -> Report | None:
    """Bits per byte of both models on the same chunks of the rows; adds scores to the views that were read."""
    specs = report["student"], report["teacher"]
    missing = [spec for spec in specs if not has_weights(spec)]
    if not score:
        report["skipped"]["headroom"] = "not asked for"
    elif missing:
        report["skipped"]["headroom"] = f"no weights at {' and '.join(missing)}"
    elif importlib.util.find_spec("torch") is None:
        report["skipped"]["headroom"] = "torch is not installed; pip install 'limbeck[train]' brings it"
    if "headroom" in report["skipped"]:
        return None
    from limbeck.evaluation.chunks import ChunkScorer

    views = [view for view in report["views"] if "problem" not in view]
    total = min(most, sum(view["summary"]["target_bytes"] for view in views))
    bar = progress.begin("loading both models")
    scorer = ChunkScorer(*specs, tokenizers=tokenizers)
    bar.close()
    bar = progress.begin("scoring bytes with both models", total)
    # behind the loading: the time of a pilot is estimated by what scoring takes
    read, begun = 0, time.monotonic()
    for number, view in enumerate(views):
        if read >= most:
            break
        if number and time.monotonic() - begun >= seconds:
            report["skipped"]["more rows"] = f"{seconds:g} s were used for {number} of {len(views)} rows (--seconds)"
            break
        scorer.score(view)
        read += view["summary"]["target_bytes"]
        bar.update(min(read, total))
    bar.close()
    # rows, each by its first chunk; `_too_dear` divides by their number
    scored = sum("student_logprob" in chunk for view in views for chunk in view["chunks"][:1])
    return {"notes": scorer.notes, "seconds": time.monotonic() - begun, "rows": max(scored, 1), **chunk_bits(views)}


def chunk_bits(views: Sequence[Mapping[str, Any]]) -> Report:
    """Bits per byte of student and teacher over the exact chunks that both have scored, also by class of text, with the
    mean divergence (nats) and the teacher's mean mass out of reach."""
    sums: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {"divergence": [], "uncovered_by_projection": [], "uncovered_by_cells": []}
    for view in views:
        for chunk in view["chunks"]:
            both = chunk.get("student_logprob"), chunk.get("teacher_logprob")
            # special tokens have no bytes that their bits could be counted for
            if chunk["role"] or not chunk["exact"] or both[0] is None or both[1] is None:
                continue
            data = bytes.fromhex(chunk["bytes"])
            for name in ("all", text_class(data)):
                total = sums.setdefault(name, [0.0, 0.0, 0.0])
                total[:] = [total[0] - both[0], total[1] - both[1], total[2] + len(data)]
            for name, values in means.items():
                if chunk.get(name) is not None:
                    values.append(chunk[name])

    def bits(total: Sequence[float]) -> Report:
        student, teacher = (value / math.log(2) / total[2] for value in total[:2])
        return {"student": student, "teacher": teacher, "gap": student - teacher, "bytes": int(total[2])}

    if not sums:
        raise ConfigError("no chunk of the rows could be scored by both models; give data with longer texts.")
    return {
        **bits(sums["all"]),
        "classes": {name: bits(sums[name]) for name in TEXT_CLASSES if name in sums},
        **{name: sum(values) / len(values) if values else None for name, values in means.items()},
    }


def _has_numbers(spec: str) -> bool:
    """Whether the sizes of a model are known, as those of a lone tokenizer file are not."""
    path = model_files(spec, "tokenizer")
    return path.suffix == ".gguf" or (path / "config.json").is_file()


def _estimate(report: Report, memory_gib: float | None, run: Any) -> Report | None:
    """Memory and time of a run, or of a plain one of the pair, on one device, from the formulas of `limbeck plan`."""
    specs = (report["student"], report["teacher"]) if run is None else ()
    missing = [spec for spec in specs if not _has_numbers(spec)]
    if missing:
        report["skipped"]["memory and time"] = f"no config.json at {' and '.join(missing)}"
    elif importlib.util.find_spec("torch") is None:
        report["skipped"]["memory and time"] = "torch is not installed; pip install 'limbeck[train]' brings it"
    if "memory and time" in report["skipped"]:
        return None
    from limbeck.algorithms.config import MasterConfig
    from limbeck.config import resolve
    from limbeck.distributed.planner import GIB, plan
    from limbeck.tools.machine import assumed_machine
    from limbeck.tools.workload import workload_of

    machine, device = assumed_machine(memory_gib, None)
    settings = {
        "policy": {"model_name": report["student"], "precision": "bfloat16"},
        "teacher": {"model_name": report["teacher"], "precision": "bfloat16"},
        "data": {"train": report["data"]},
    }
    work = workload_of(resolve(MasterConfig, settings) if run is None else run)
    # not only one that fits: how much is missing is worth telling
    best = plan(work, 1, machine)[0]
    speed = work.tokens_per_step / best.step_seconds
    files = [Path(path) for path in expand(report["data"]) if not path.startswith(HUB_PREFIX)]
    size = sum(path.stat().st_size for path in files if path.is_file())
    tokens = size * report["alignment"]["student_tokens_per_byte"]
    return {
        "device": device,
        "device_gib": machine.memory / GIB,
        "gib": best.total / GIB,
        "fits": not best.problem,
        "tokens_per_second": speed,
        "sequence": work.tokens_per_sequence,
        "student_parameters": work.student.parameters,
        "teacher_parameters": work.teachers[0].shape.parameters if work.teachers[0].shape else None,
        "epoch_tokens": tokens,
        "epoch_hours": tokens / speed / 3600,
    }


# -- what it means -----------------------------------------------------------------------------------------------------


def _finding(level: str, what: str, text: str, remedy: str = "") -> Finding:
    return {"level": level, "what": what, "found": text, "remedy": remedy}


def _findings(report: Report) -> list[Finding]:
    findings = [_about_tokenizers(report), *_about_chunks(report["alignment"]), *_about_reach(report)]
    findings += [
        _about_bos(report["tokenizers"]),
        *_about_roles(report["roles"], report["templates"]["needed"]),
        *_about_templates(report["templates"]),
    ]
    if report["headroom"] is not None:
        findings += _about_headroom(report["headroom"])
    if report["estimate"] is not None:
        findings.append(_about_estimate(report["estimate"]))
    if report["pilot"] is not None:
        findings += _about_pilot(report["pilot"])
    return findings


def _about_tokenizers(report: Report) -> Finding:
    sides = report["tokenizers"]
    if sides["same"]:
        return _finding("ok", "tokenizers", "the same: models are compared position by position, no projection needed")
    kinds = " from ".join(f"{sides[n]['family']} {sides[n]['ids']:,}" for n in ("student", "teacher"))
    lossy = [name for name in ("student", "teacher") if not sides[name]["lossless"]]
    if lossy:
        return _finding("note", "tokenizers", kinds, f"the {lossy[0]}'s is lossy: most chunks will not be exact")
    return _finding("ok", "tokenizers", kinds)


def _about_chunks(alignment: Report) -> list[Finding]:
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in alignment["kinds"].items() if n)
    findings = [
        _finding("ok", "strict coverage", f"{alignment['strict']:.1%} of {alignment['chunks']:,} chunks ({kinds})")
    ]
    exact = f"{alignment['coverage']:.1%} of the supervised bytes lie in chunks of the same text"
    if alignment["coverage"] < ENOUGH_COVERED:
        findings.append(_finding("bad", "exact coverage", exact, "a normaliser or the templates change the text"))
    else:
        findings.append(_finding("ok" if alignment["coverage"] > 0.95 else "note", "exact coverage", exact))
    if alignment["refused_rows"]:
        text = f"{alignment['refused_rows']} rows cannot be rendered by both templates"
        findings.append(_finding("note", "rows", text))
    for name, label in (("digits", "digits"), ("white_space", "white space")):
        counts = alignment["classes"].get(name)
        if counts is not None:
            share = counts["one_to_one"] / counts["chunks"]
            level, remedy = ("ok", "") if share >= 0.5 else ("note", "the two sides cut them differently")
            findings.append(_finding(level, label, f"{share:.1%} of {counts['chunks']:,} chunks one to one", remedy))
    return findings


def _about_reach(report: Report) -> list[Finding]:
    vocabulary, headroom = report["vocabulary"], report["headroom"]
    findings = [
        _finding(
            "ok",
            "cells",
            f"{vocabulary['cells']:,}, {vocabulary['one_to_one_cells']:.1%} one to one, "
            f"the largest of {vocabulary['largest_cell']:,} tokens",
        )
    ]
    value, basis = uncovered(report)
    if value is not None:
        in_no_cell = None if headroom is None else headroom["uncovered_by_cells"]
        more = "" if in_no_cell is None else f"; by tree_kl {in_no_cell:.1%}"
        level, remedy = ("ok", "") if 1 - value >= REACHED else ("note", "losses on the projection do not cover it")
        findings.append(_finding(level, "uncovered mass", f"{value:.1%} of the teacher's {basis}{more}", remedy))
    return findings


def uncovered(report: Report) -> tuple[float | None, str]:
    """The teacher's mass that no student token maps to, by its own probabilities where it was scored; and by what."""
    headroom = report["headroom"]
    if headroom is not None and headroom["uncovered_by_projection"] is not None:
        return headroom["uncovered_by_projection"], "probability"
    return report["vocabulary"]["uncovered_mass"], "tokens in these rows"


def _about_bos(tokenizers: Report) -> Finding:
    """BOS tokens as the tokenizers set them; whether the weights agree is measured with the headroom."""
    sides = [f"{name} {'set' if tokenizers[name]['adds_bos'] else 'not set'}" for name in ("student", "teacher")]
    return _finding("ok", "BOS token", f"{' and '.join(sides)} in front of plain text")


def _about_roles(roles: Report, chat: bool) -> list[Finding]:
    findings = []
    for row in roles["table"]:
        if row["role"] not in ("eos", "eot"):
            continue
        label = {"eos": "end of document", "eot": "end of turn"}[row["role"]]
        text = f"{row['student'] or 'none'} and {row['teacher'] or 'none'}"
        wanting = row["role"] == "eot" and chat and not row["meets"]
        remedy = "the student is not taught to end its turn" if wanting else ""
        findings.append(_finding("note" if wanting else "ok", label, text, remedy))
    counts = [(tag["student"], tag["teacher"]) for tag in roles["think"]]
    if any(1 in pair for pair in counts) and any(len(set(pair)) > 1 for pair in counts):
        text = f"<think> takes {counts[0][0]} student and {counts[0][1]} teacher tokens"
        findings.append(_finding("note", "think tags", text, "as text they are aligned by bytes"))
    return findings


def _about_templates(templates: Report) -> list[Finding]:
    findings = []
    for name in ("student", "teacher"):
        side = templates[name]
        if side["usable"]:
            text = f"usable; {side['supervised']} of {side['tokens']} tokens supervised"
            findings.append(_finding("ok", f"{name}'s template", text))
        else:
            level, remedy = ("bad", "give a template in the run file") if templates["needed"] else ("ok", "")
            more = "" if templates["needed"] else " (the data has no conversation)"
            findings.append(_finding(level, f"{name}'s template", side["problem"] + more, remedy))
    return findings


def _about_headroom(headroom: Report) -> list[Finding]:
    gap = headroom["gap"]
    bits = f"student {headroom['student']:.3f}, teacher {headroom['teacher']:.3f} bits per byte"
    text = f"{bits} ({headroom['bytes']:,} bytes)"
    if gap <= 0:
        findings = [_finding("bad", "headroom", text, "the teacher is no better here: take another, or other text")]
    else:
        remedy = "" if gap >= CLEAR_GAP else "little to learn; expect little"
        findings = [_finding("ok" if gap >= CLEAR_GAP else "note", "headroom", text, remedy)]
    worse = [name for name, by_class in headroom["classes"].items() if by_class["gap"] < 0 < gap]
    if worse:
        remedy = "loss_fn.gate: soft leaves out chunks at which the teacher is behind"
        text = f"the teacher is behind on {', '.join(name.replace('_', ' ') for name in worse)}"
        findings.append(_finding("note", "by class", text, remedy))
    remedy = "set policy.tokenizer.bos or teacher.tokenizer.bos in the run file"
    findings += [_finding("note", "BOS token", note.rstrip("."), remedy) for note in headroom["notes"]]
    return findings


def _about_estimate(estimate: Report) -> Finding:
    speed = f"about {estimate['tokens_per_second']:,.0f} tokens/s, {_duration(estimate['epoch_hours'])} an epoch"
    text = f"{estimate['gib']:.1f} GiB on {estimate['device']}, {speed}"
    if estimate["fits"]:
        return _finding("ok", "memory and time", text)
    return _finding("note", "memory and time", text, "it does not fit: limbeck plan finds a layout of several")


def _about_pilot(pilot: Report) -> list[Finding]:
    """An arm a line; the lead that counts is the one over a student that has read some of the text."""
    size = f"{pilot['steps']} steps of {pilot['records']} records, {pilot['held_out']} held out"
    alone, before = pilot["arms"][0], pilot["before"]
    text = f"{size}: {alone['name']} {before['student']:.4f} to {alone['bits']:.4f} bits per byte"
    if before["teacher"] is not None:
        text += f", teacher {before['teacher']:.4f}"
    findings = [_finding("ok", "pilot", text)]
    for arm in pilot["arms"][1:]:
        name = " ".join(f"{key}={value}" for key, value in arm["settings"].items()) or arm["name"]
        level = "ok" if arm["difference"] < 0 else "note"
        text = f"{name}: {arm['difference']:+.4f} ± {arm['standard_error']:.4f} to {alone['name']}"
        findings.append(_finding(level, "", text))
    return findings


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{hours * 60:.0f} min" if hours >= 1 / 60 else f"{max(hours * 3600, 1):.0f} s"


def verdict(report: Report) -> Report:
    """``worth``, ``mode`` (the loss to use) and one ``sentence``."""
    headroom, alignment, templates = report["headroom"], report["alignment"], report["templates"]
    value, _ = uncovered(report)
    coarse = value is not None and 1 - value < REACHED and not report["tokenizers"]["same"]
    blocked = [name for name in ("student", "teacher") if templates["needed"] and not templates[name]["usable"]]
    pilot = report["pilot"]
    against = ""
    if blocked:
        against = f"the {blocked[0]} has no chat template for this data"
    elif alignment["coverage"] < ENOUGH_COVERED:
        against = f"only {alignment['coverage']:.0%} of the supervised bytes can be compared"
    elif pilot is not None:
        return {"worth": pilot["choice"] != "cross_entropy", "mode": MODE, "sentence": pilot["sentence"]}
    elif headroom is not None and headroom["gap"] <= 0:
        bits = f"{headroom['teacher']:.3f} bits per byte, the student {headroom['student']:.3f}"
        against = f"on this text the teacher needs {bits}"
    if against:
        return {"worth": False, "mode": MODE, "sentence": f"Not worth a run as it is: {against}."}
    if headroom is None:
        known = "The tokenizers fit; whether the teacher is better here was not measured"
    elif headroom["gap"] < CLEAR_GAP:
        known = f"Worth little: the teacher is ahead by {headroom['gap']:.3f} bits per byte only"
    else:
        known = (
            f"The teacher is ahead by {headroom['gap']:.2f} bits per byte, which says little of a student that has not "
            "read such text yet: limbeck check RUN_FILE --pilot trains it both ways for a minute"
        )
    why = f": {value:.0%} of the teacher is out of the projection's reach" if coarse else ""
    return {"worth": True, "mode": MODE, "sentence": f"{known}; use loss_fn.mode: {MODE}, the default{why}."}
