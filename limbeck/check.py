"""Is a pair of models worth a run on some data? What `limbeck check` measures before any device is paid for.

Tokenizers alone say how the two sides align and what of the teacher the student can be told. Where the weights lie
here, a few rows are scored by both: is the teacher better on this text at all?
"""

from __future__ import annotations

import importlib.util
import math
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
from limbeck.tokens import Tokenizer, read_tokenizer, render_chat
from limbeck.tokens.classes import TEXT_CLASSES, text_class
from limbeck.tokens.vocab import KNOWN_ROLES
from limbeck.utils.files import model_path
from limbeck.utils.progress import Progress, Silent

MOST_SCORED_BYTES = 20_000
"""Supervised bytes that both models score; enough to see a gap of some hundredths of a bit."""
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
    memory_gib: float = 80.0,
    shown: Progress | None = None,
) -> Report:
    """Everything that is known about a pair before a run.

    ``student``, ``teacher``: model folders, run folders, tokenizer files or hub ids. ``data``: files, of which ``rows``
    are read. ``score``: load the weights, where they lie here, and score ``scored_bytes`` bytes of the rows.
    ``memory_gib``: of the device that the estimate is for.

    Returns plain data: ``alignment``, ``vocabulary``, ``roles``, ``templates``, ``headroom``, ``estimate`` (the last
    two None where they were skipped), ``views`` (the rows as `limbeck.align.view` gives them), ``findings`` (as those
    of ``limbeck doctor``), ``skipped`` (what was left out, and why) and ``verdict`` (``worth``, ``mode``,
    ``sentence``).
    """
    shown = shown or Silent()
    student, teacher = model_path(student), model_path(teacher)
    bar = shown.begin("reading tokenizers and rows")
    tokenizers = read_tokenizer(student), read_tokenizer(teacher)
    sample = sample_rows(list(data), rows, text_key=text_key)
    bar.close()
    report: Report = {"student": student, "teacher": teacher, "data": list(data), "rows": len(sample), "skipped": {}}
    report["tokenizers"] = _tokenizers(tokenizers)
    report["templates"] = _templates(tokenizers, sample)
    report["views"] = _views(tokenizers, sample, shown)
    report["alignment"] = _alignment(report["views"])
    report["vocabulary"] = _vocabulary(tokenizers, sample, shown)
    report["roles"] = _roles(tokenizers)
    report["headroom"] = _headroom(report, score, scored_bytes, shown)
    report["estimate"] = _estimate(report, memory_gib)
    report["findings"] = _findings(report)
    report["verdict"] = verdict(report)
    return report


# -- tokenizers --------------------------------------------------------------------------------------------------------


def _tokenizers(pair: tuple[Tokenizer, Tokenizer]) -> Report:
    sides = {
        name: {"family": t.vocab.family, "ids": t.vocab.size, "lossless": t.vocab.lossless, "adds_bos": t.adds_bos}
        for name, t in zip(("student", "teacher"), pair, strict=True)
    }
    return {"same": pair[0].vocab.same_tokens(pair[1].vocab), **sides}


def _templates(pair: tuple[Tokenizer, Tokenizer], sample: Sequence[Row]) -> Report:
    """What each side's chat template makes of the first conversation, or of a small one where the data has none."""
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
            "supervised": int(rendering.target.sum()),
            "dropped": dict(rendering.dropped),
            "text": "".join(tokenizer.vocab.display(rendering.ids.tolist()))[:_SHOWN_TEMPLATE],
        }
    return out


def _views(pair: tuple[Tokenizer, Tokenizer], sample: Sequence[Row], shown: Progress) -> list[Report]:
    bar = shown.begin("aligning rows", len(sample))
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
                own = classes[text_class(bytes.fromhex(chunk["bytes"]))]
                own["chunks"] += 1
                own["one_to_one"] += chunk["kind"] == "1:1"
    return {
        **summary,
        "strict": summary["kinds"]["1:1"] / summary["chunks"] if summary["chunks"] else 0.0,
        "classes": {name: own for name, own in classes.items() if own["chunks"]},
        "refused_rows": len(views) - len(usable),
    }


def _vocabulary(pair: tuple[Tokenizer, Tokenizer], sample: Sequence[Row], shown: Progress) -> Report:
    """Cells and reach of the pair; masses are shares of the rows' tokens."""
    vocabs = pair[0].vocab, pair[1].vocab
    bar = shown.begin("spelling tokens on both sides")
    projection = load_or_build(*pair, trees=True, progress=lambda done, total: bar.update(done, total=total))
    bar.close()
    counter = count_pairs(*pair, [text for row in sample for text in _texts(row)], trees=projection.trees)
    coverage = audit_projection(projection, *vocabs, corpus_tokens=counter.student_tokens)
    found = audit_pair(projection, vocabs[1], counter)
    masses = audit_masses(projection, *vocabs, counter, most=20)
    reached = found.teacher_reached_mass
    return {
        "overlap": coverage.overlap,
        **found.to_dict(),
        "unreached_mass": None if reached is None else 1 - reached,
        **masses.to_dict(),
    }


def _texts(row: Row) -> list[str]:
    if row.messages is None:
        return [row.text or ""]
    taught = (message for message in row.messages if message.get("role") == "assistant")
    return [message["content"] for message in taught if isinstance(message.get("content"), str)]


def _roles(pair: tuple[Tokenizer, Tokenizer]) -> Report:
    """Which special token stands for which, and whether thinking has tags of one token."""
    vocabs = pair[0].vocab, pair[1].vocab
    partners = role_partners(*vocabs)
    table = []
    for role in _ROLES:
        mine = vocabs[0].ids_with_role(role)
        theirs = [partners[i] for i in mine if i in partners] or list(vocabs[1].ids_with_role(role))
        their_role = vocabs[1].roles[theirs[0]] if theirs else role
        own = {"student": _special(pair[0], role, mine), "teacher": _special(pair[1], their_role, theirs)}
        table.append({"role": role, **own, "meets": any(i in partners for i in mine)})
    think = [{"tag": tag, "student": len(pair[0].encode(tag)), "teacher": len(pair[1].encode(tag))} for tag in _THINK]
    return {"table": table, "think": think}


def _special(tokenizer: Tokenizer, role: str, ids: Sequence[int]) -> str | None:
    """How a tokenizer writes a role, as far as families' names are known."""
    if not ids:
        return None
    named = [content for content in tokenizer.aliases if KNOWN_ROLES.get(content) == role]
    return f"{named[0] if len(named) == 1 else f'[{role}]'} {ids[0]}"


# -- weights -----------------------------------------------------------------------------------------------------------


def _headroom(report: Report, score: bool, most: int, shown: Progress) -> Report | None:
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
    bar = shown.begin("scoring rows with both models", len(views))
    scorer = ChunkScorer(*specs)
    read = 0
    for view in views:
        if read >= most:
            break
        scorer.score(view)
        read += view["summary"]["target_bytes"]
        bar.advance()
    bar.close()
    return {"notes": scorer.notes, **chunk_bits(views)}


def chunk_bits(views: Sequence[Mapping[str, Any]]) -> Report:
    """Bits per byte of student and teacher over the exact chunks that both have scored, also by class of text, with the
    mean divergence (nats) and the teacher's mean mass out of reach."""
    sums: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {"divergence": [], "unreached": [], "lost": []}
    for view in views:
        for chunk in view["chunks"]:
            both = chunk.get("student_logprob"), chunk.get("teacher_logprob")
            if chunk["role"] or not chunk["exact"] or both[0] is None or both[1] is None:
                continue
            data = bytes.fromhex(chunk["bytes"])
            for name in ("all", text_class(data)):
                own = sums.setdefault(name, [0.0, 0.0, 0.0])
                own[:] = [own[0] - both[0], own[1] - both[1], own[2] + len(data)]
            for name, values in means.items():
                if chunk.get(name) is not None:
                    values.append(chunk[name])

    def bits(own: Sequence[float]) -> Report:
        student, teacher = (value / math.log(2) / own[2] for value in own[:2])
        return {"student": student, "teacher": teacher, "gap": student - teacher, "bytes": int(own[2])}

    if not sums:
        raise ConfigError("no chunk of the rows could be scored by both models; give data with longer texts.")
    return {
        **bits(sums["all"]),
        "classes": {name: bits(sums[name]) for name in TEXT_CLASSES if name in sums},
        **{name: sum(values) / len(values) if values else None for name, values in means.items()},
    }


def _estimate(report: Report, memory_gib: float) -> Report | None:
    """Memory and time of a plain run of the pair on one device, from the formulas of `limbeck plan`."""
    configs = [Path(spec).expanduser() for spec in (report["student"], report["teacher"])]
    missing = [str(path) for path in configs if not (path / "config.json").is_file() and path.suffix != ".gguf"]
    if missing:
        report["skipped"]["memory and time"] = f"no config.json at {' and '.join(missing)}"
    elif importlib.util.find_spec("torch") is None:
        report["skipped"]["memory and time"] = "torch is not installed; pip install 'limbeck[train]' brings it"
    if "memory and time" in report["skipped"]:
        return None
    from limbeck.algorithms.config import MasterConfig
    from limbeck.algorithms.workload import workload_of
    from limbeck.config import resolve
    from limbeck.distributed.planner import GIB, Machine, plan

    settings = {
        "policy": {"model_name": report["student"], "precision": "bfloat16"},
        "teacher": {"model_name": report["teacher"], "precision": "bfloat16"},
        "data": {"train": report["data"]},
    }
    work = workload_of(resolve(MasterConfig, settings))
    best = plan(work, 1, Machine(memory=memory_gib * GIB))[0]
    speed = work.tokens_per_step / best.step_seconds
    files = [Path(path) for path in expand(report["data"]) if not path.startswith(HUB_PREFIX)]
    size = sum(path.stat().st_size for path in files if path.is_file())
    tokens = size * report["alignment"]["student_tokens_per_byte"]
    return {
        "device_gib": memory_gib,
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


def _finding(level: str, what: str, found: str, remedy: str = "") -> Finding:
    return {"level": level, "what": what, "found": found, "remedy": remedy}


def _findings(report: Report) -> list[Finding]:
    found = [_about_tokenizers(report), *_about_chunks(report["alignment"]), *_about_reach(report)]
    found += [
        _about_begin(report["tokenizers"]),
        *_about_roles(report["roles"], report["templates"]["needed"]),
        *_about_templates(report["templates"]),
    ]
    if report["headroom"] is not None:
        found += _about_headroom(report["headroom"])
    if report["estimate"] is not None:
        found.append(_about_estimate(report["estimate"]))
    return found


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
    found = [
        _finding("ok", "strict coverage", f"{alignment['strict']:.1%} of {alignment['chunks']:,} chunks ({kinds})")
    ]
    exact = f"{alignment['coverage']:.1%} of the supervised bytes lie in exact chunks"
    if alignment["coverage"] < ENOUGH_COVERED:
        found.append(_finding("bad", "exact coverage", exact, "a normaliser or the templates change the text"))
    else:
        found.append(_finding("ok" if alignment["coverage"] > 0.95 else "note", "exact coverage", exact))
    if alignment["refused_rows"]:
        found.append(_finding("note", "rows", f"{alignment['refused_rows']} rows cannot be rendered by both templates"))
    for name, label in (("digits", "digits"), ("white_space", "white space")):
        own = alignment["classes"].get(name)
        if own is not None:
            share = own["one_to_one"] / own["chunks"]
            level, remedy = ("ok", "") if share >= 0.5 else ("note", "the two sides cut them differently")
            found.append(_finding(level, label, f"{share:.1%} of {own['chunks']:,} chunks one to one", remedy))
    return found


def _about_reach(report: Report) -> list[Finding]:
    vocabulary, headroom = report["vocabulary"], report["headroom"]
    found = [
        _finding(
            "ok",
            "cells",
            f"{vocabulary['cells']:,}, {vocabulary['one_to_one_cells']:.1%} one to one, "
            f"the largest of {vocabulary['largest_cell']:,} tokens",
        )
    ]
    value, basis = unreached(report)
    if value is not None:
        more = "" if headroom is None or headroom["lost"] is None else f"; lost to tree_kl {headroom['lost']:.1%}"
        level, remedy = ("ok", "") if 1 - value >= REACHED else ("note", "losses on the projection would drop it")
        found.append(_finding(level, "unreached mass", f"{value:.1%} of the teacher's {basis}{more}", remedy))
    return found


def unreached(report: Report) -> tuple[float | None, str]:
    """The teacher's mass that no student token maps to, by its own probabilities where it was scored; and by what."""
    headroom = report["headroom"]
    if headroom is not None and headroom["unreached"] is not None:
        return headroom["unreached"], "probability"
    return report["vocabulary"]["unreached_mass"], "tokens in these rows"


def _about_begin(tokenizers: Report) -> Finding:
    """What the tokenizers do; whether the weights agree is measured with the headroom."""
    sides = [f"{name} {'set' if tokenizers[name]['adds_bos'] else 'not set'}" for name in ("student", "teacher")]
    return _finding("ok", "begin token", f"{' and '.join(sides)} in front of plain text")


def _about_roles(roles: Report, chat: bool) -> list[Finding]:
    found = []
    for row in roles["table"]:
        if row["role"] not in ("eos", "eot"):
            continue
        label = {"eos": "end of document", "eot": "end of turn"}[row["role"]]
        text = f"{row['student'] or 'none'} and {row['teacher'] or 'none'}"
        wanting = row["role"] == "eot" and chat and not row["meets"]
        remedy = "the student is not taught to end its turn" if wanting else ""
        found.append(_finding("note" if wanting else "ok", label, text, remedy))
    counts = [(tag["student"], tag["teacher"]) for tag in roles["think"]]
    if any(1 in pair for pair in counts) and any(len(set(pair)) > 1 for pair in counts):
        text = f"<think> takes {counts[0][0]} student and {counts[0][1]} teacher tokens"
        found.append(_finding("note", "think tags", text, "as text they are aligned by bytes"))
    return found


def _about_templates(templates: Report) -> list[Finding]:
    found = []
    for name in ("student", "teacher"):
        own = templates[name]
        if own["usable"]:
            text = f"usable; {own['supervised']} of {own['tokens']} tokens supervised"
            found.append(_finding("ok", f"{name}'s template", text))
        else:
            level, remedy = ("bad", "give a template in the run file") if templates["needed"] else ("ok", "")
            more = "" if templates["needed"] else " (the data has no conversation)"
            found.append(_finding(level, f"{name}'s template", own["problem"] + more, remedy))
    return found


def _about_headroom(headroom: Report) -> list[Finding]:
    gap = headroom["gap"]
    bits = f"student {headroom['student']:.3f}, teacher {headroom['teacher']:.3f} bits per byte"
    text = f"{bits} ({headroom['bytes']:,} bytes)"
    if gap <= 0:
        found = [_finding("bad", "headroom", text, "the teacher is no better here: take another, or other text")]
    else:
        remedy = "" if gap >= CLEAR_GAP else "little to learn; expect little"
        found = [_finding("ok" if gap >= CLEAR_GAP else "note", "headroom", text, remedy)]
    worse = [name for name, own in headroom["classes"].items() if own["gap"] < 0 < gap]
    if worse:
        remedy = "loss_fn.gate: hard leaves out chunks at which the teacher is behind"
        text = f"the teacher is behind on {', '.join(name.replace('_', ' ') for name in worse)}"
        found.append(_finding("note", "by class", text, remedy))
    remedy = "set policy.tokenizer.bos or teacher.tokenizer.bos in the run file"
    found += [_finding("note", "begin token", note.rstrip("."), remedy) for note in headroom["notes"]]
    return found


def _about_estimate(estimate: Report) -> Finding:
    speed = f"about {estimate['tokens_per_second']:,.0f} tokens/s, {_duration(estimate['epoch_hours'])} an epoch"
    text = f"{estimate['gib']:.1f} GiB on one device of {estimate['device_gib']:g}, {speed}"
    if estimate["fits"]:
        return _finding("ok", "memory and time", text)
    return _finding("note", "memory and time", text, "it does not fit: limbeck plan finds a layout of several")


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{hours * 60:.0f} min" if hours >= 1 / 60 else f"{max(hours * 3600, 1):.0f} s"


def verdict(report: Report) -> Report:
    """``worth``, ``mode`` (the loss to use) and one ``sentence``."""
    headroom, alignment, templates = report["headroom"], report["alignment"], report["templates"]
    value, _ = unreached(report)
    coarse = value is not None and 1 - value < REACHED and not report["tokenizers"]["same"]
    blocked = [name for name in ("student", "teacher") if templates["needed"] and not templates[name]["usable"]]
    against = ""
    if headroom is not None and headroom["gap"] <= 0:
        bits = f"{headroom['teacher']:.3f} bits per byte, the student {headroom['student']:.3f}"
        against = f"on this text the teacher needs {bits}"
    elif blocked:
        against = f"the {blocked[0]} has no chat template for this data"
    elif alignment["coverage"] < ENOUGH_COVERED:
        against = f"only {alignment['coverage']:.0%} of the supervised bytes can be compared"
    if against:
        return {"worth": False, "mode": MODE, "sentence": f"Not worth a run as it is: {against}."}
    if headroom is None:
        known = "The tokenizers fit; whether the teacher is better here was not measured"
    elif headroom["gap"] < CLEAR_GAP:
        known = f"Worth little: the teacher is ahead by {headroom['gap']:.3f} bits per byte only"
    else:
        known = f"Worth it: the teacher is ahead by {headroom['gap']:.2f} bits per byte"
    why = f": {value:.0%} of the teacher is out of the projection's reach" if coarse else ""
    return {"worth": True, "mode": MODE, "sentence": f"{known}; use loss_fn.mode: {MODE}, the default{why}."}
