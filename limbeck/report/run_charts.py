"""Which metrics of a run are drawn together, under which names, in which section of its page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.report.run_data import Points, RunData
from limbeck.report.series import NARROW, WIDE, Series, axis, chart, format_number, wants_log
from limbeck.tokens.classes import TEXT_CLASSES

Chart = dict[str, Any]

PARTS = {
    "boundary_kl": "at chunk starts",
    "root_kl": "cells at chunk starts",
    "inner_student_kl": "inside teacher tokens",
    "inner_teacher_kl": "inside student tokens",
    "chunk_kl": "whole chunks",
    "common_kl": "common tokens",
    "strict_kl": "one-to-one chunks",
    "span_loss": "other chunks, squared log-ratio",
    "child_kl": "sets of completions",
}
"""Terms of a distillation loss in nats, as objectives log them for every teacher."""
KINDS = {
    "kl_loss/one_to_one": "one to one",
    "kl_loss/one_to_many": "one of the student's, several of the teacher's",
    "kl_loss/many_to_one": "several of the student's, one of the teacher's",
    "kl_loss/many_to_many": "several on both sides",
}
"""Distillation loss by the tokens of chunks, as validations count it for every teacher."""
CLASSES = {name: name.replace("_", " ") for name in TEXT_CLASSES}
"""Classes of tokens by which validations count cross-entropy and, by their first tokens, chunks."""
UNCOVERED = {
    "uncovered_mass": "the teacher's, at chunk starts",
    "uncovered_root_student": "the student's, at roots",
    "uncovered_root_teacher": "the teacher's, at roots",
}
"""Shares of probability that a loss does not compare."""
UNSURE = {
    "cell_error": "first tokens in different cells",
    "gate": "chunks that the gate lets through",
    "blank_rows": "rows of white space, masked",
}
"""Shares of chunks."""
_LOG_PROBS = {
    "val/erroneous_logprob": "failed messages",
    "val/erroneous_logprob_hinted": "the same behind hints",
    "val/chosen_logprob": "chosen of pairs",
    "val/rejected_logprob": "rejected of pairs",
}
_CHANNELS = {"train/policy/loss": "policy", "train/hint/loss": "hint", "train/preference/loss": "preference"}
_MONITORS = {
    "Entropy": {"train/monitor/policy/entropy": "policy", "train/monitor/hint/entropy": "hint"},
    "Mass on format tokens": {"train/monitor/policy/format_mass": "policy", "train/monitor/hint/format_mass": "hint"},
    "Mass on an early end": {
        "train/monitor/policy/early_end_mass": "policy",
        "train/monitor/hint/early_end_mass": "hint",
    },
    "KL to the hinted teacher by token class": {
        f"train/monitor/hint/kl_{name}": name for name in ("special", "format", "number", "word", "other")
    },
    "JSD to the hinted teacher": {"train/monitor/hint/jsd": "at most ln 2 = 0.693"},
    "Length of answers": {"val/response_length": "tokens"},
    "Bytes compared with the hinted teacher": {"val/hint_compared": "share"},
}
"""Figures of a run on traces that show a collapse early."""
_SAMPLED = {
    "Length of samples": {"length": "tokens"},
    "Shares of samples": {
        "ended": "ended",
        "cut": "cut off",
        "repeated": "repeated tokens",
        "white_space": "white space",
    },
    "Reward": {"reward": "mean"},
    "Log-probability of samples": {"log_prob": "nats per token"},
    "Lag of the sampler": {"staleness": "steps"},
    "Sampler against trainer": {"engine_gap": "log-probability, nats"},
    "Sampled tokens per second": {"tokens_per_s": "student"},
}
"""Figures of text that the student writes to learn from."""
_TIMES = {
    "data": "waiting for data",
    "teacher": "teacher",
    "forward": "forward",
    "layout": "layout",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait": "waiting for the device",
    "sample": "writing answers",
    "hand_over": "handing prompts over",
}
"""Sections of a step, as its timer calls them."""
_WAITING = ("data", "wait")
_MEMORY = {
    "train/memory/resident_gib": "resident in main memory",
    "train/memory/device_gib": "accelerator, most so far",
    "train/memory/allocated_gib": "accelerator, after a step",
}
"""Memory of the process of rank 0; the last one with ``logger.monitor_gpus``."""


def teacher_levels(run: RunData) -> list[tuple[str, Points]]:
    """Name and values of each teacher's bits per byte."""
    numbered = [f"val/teacher_{i}_bpb" for i in range(len(run.teachers))]
    keys = [k for k in numbered if run.points(k)] or ["val/teacher_bpb"]
    if len(keys) == 1:
        return [("teacher", run.points(keys[0]))]
    names = [short(t) for t in run.teachers]
    return [(f"teacher {i}: {names[i]}", run.points(k)) for i, k in enumerate(keys)]


def short(model: str) -> str:
    """The last part of a path, so that heads stay readable; the configuration has the whole."""
    return Path(model).name or model


def run_axis(run: RunData) -> dict[str, list[float]]:
    """Tokens and seconds behind the steps of a run."""
    return axis(run.points("train/tokens_per_s"), run.points("train/seconds"))


class RunCharts:
    """The charts of one run, section by section; what no section asks for is left for the last one."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self._shown: set[str] = set()

    def sections(self) -> list[dict[str, Any]]:
        """``title``, ``note`` and ``charts`` of every section that has any, then ``further`` for what is left."""
        run = self.run
        parts: list[tuple[str, str, bool, Sequence[Chart | None]]] = [
            ("Quality", "on held-out text", False, self._quality()),
            ("Losses", "", False, self._losses()),
            ("Reach", "what of the two models is compared", True, self._reach()),
            ("Sampled text", "what the student writes to learn from", True, self._sampled()),
            ("Optimizer", "", True, self._optimizer()),
            ("Time and memory", "", True, self._machine()),
        ]
        if run.on_traces:
            parts.insert(0, ("Traces", "failed and rejected should fall, chosen should rise", False, self._traces()))
        sections = [
            {"title": title, "note": note, "small": small, "charts": [c for c in charts if c]}
            for title, note, small, charts in parts
        ]
        return [section for section in sections if section["charts"]]

    def further(self) -> list[Chart]:
        """All metrics that no section has shown, small; call it after :meth:`sections`."""
        charts = []
        for key in self.run.metric_names:
            if key in self._shown:
                continue
            points = self.run.points(key)
            colour = 2 if key.startswith("val/") else 7
            one = Series(key.partition("/")[0], points, colour, smooth=len(points) > 60, markers=True)
            charts.append(chart(key.partition("/")[2] or key, [one], width=NARROW, height=200, log=wants_log(points)))
        return [drawn for drawn in charts if drawn]

    # -- curves -------------------------------------------------------------------------------------------------------

    def _points(self, key: str) -> Points:
        self._shown.add(key)
        return self.run.points(key)

    def _train(self, name: str, key: str, colour: int = 0) -> Series:
        return Series(name, self._points(key), colour, smooth=True)

    def _val(self, name: str, key: str, colour: int = 2) -> Series:
        return Series(name, self._points(key), colour, markers=True)

    def _both(self, title: str, name: str, note: str = "") -> Chart | None:
        """A metric in training and in validation."""
        return chart(title, [self._train("train", f"train/{name}"), self._val("validation", f"val/{name}")], note=note)

    def _named(self, names: Mapping[str, str], prefix: str) -> list[Series]:
        """A series for every metric of a teacher that is there; several teachers are distinguished by number."""
        teachers = _numbers(self.run, prefix)
        series_list: list[Series] = []
        for name, title in names.items():
            for i in teachers:
                label = title if len(teachers) == 1 else f"{title}, teacher {i}"
                make = self._train if prefix == "train" else self._val
                series = make(label, f"{prefix}/teacher_{i}/{name}", len(series_list) % 8)
                # a part that is switched off is logged as 0
                if any(value for _, value in series.points):
                    series_list.append(series)
        return series_list

    # -- sections -----------------------------------------------------------------------------------------------------

    def _quality(self) -> list[Chart | None]:
        run = self.run
        bits = [self._val("student", "val/bpb", 0)]
        for i, (name, points) in enumerate(teacher_levels(run)):
            bits.append(Series(name, _level(points, run), 1 + i, dashed=True))
        self._shown |= {key for key in run.metric_names if re.fullmatch(r"val/teacher_(\d+_)?bpb", key)}
        if run.baseline is not None:
            bits.append(Series("cross-entropy alone", run.baseline.points("val/bpb"), 7))
        charts = [chart("Bits per byte", bits, width=WIDE, height=300, note="less is better")] if bits[0].points else []
        for name, student, teacher in sources(run):
            teachers = [Series("teacher", _level(self._points(teacher), run), 1, dashed=True)] if teacher else []
            charts.append(chart(f"Bits per byte, {name}", [self._val("student", student, 0), *teachers]))
        accuracy = [self._val("next token", "val/accuracy"), self._val("teacher's choice", "val/proj_accuracy", 1)]
        charts.append(chart("Accuracy", accuracy, note="share of tokens; of chunks for the teacher's choice"))
        return self._of_tasks() + charts

    def _of_tasks(self) -> list[Chart | None]:
        names = dict.fromkeys(str(row.get("task")) for row in self.run.tasks)
        figures = {"solved": "", "cut off": "_cut", "no answer": "_no_answer"}
        charts = []
        for name in names:
            lines = [self._val(title, f"val/task/{name}{end}", i) for i, (title, end) in enumerate(figures.items())]
            last = self.run.last(f"val/task/{name}_se")
            error = "" if last is None else f"; standard error at the end {last:.1%}"
            charts.append(
                chart(f"Task {name}", lines, note=f"share of problems solved by the verifier's verdict{error}")
            )
            self._shown |= {key for key in self.run.metric_names if key.startswith(f"val/task/{name}")}
        return charts

    def _losses(self) -> list[Chart | None]:
        run = self.run
        charts = [self._both("Loss", "loss", _sum_note(run))]
        if run.objective == "cross-entropy alone" and run.points("train/ce_loss"):
            charts = []  # the next one is the loss
        charts.append(self._both("Cross-entropy", "ce_loss", "nats per token"))
        if run.divergence is not None:
            charts.append(self._both("Distillation loss", "kl_loss", f"{run.divergence}, per chunk"))
        charts += self._of_teachers()
        for prefix, where in (("train", "training"), ("val", "validation")):
            parts = self._named(PARTS, prefix)
            note = f"{where}, nats where each of them counts"
            wide = any(wants_log([*a.points, *b.points]) for a in parts for b in parts)
            if len(parts) > 1:
                charts.append(chart("Parts of the distillation loss", parts, note=note, log=wide))
            charts.append(chart("L1 of uncommon tokens", self._named({"uncommon_l1": "L1"}, prefix), note=where))
        return charts + self._by_kind()

    def _by_kind(self) -> list[Chart | None]:
        """Losses of a validation by kind of chunk and by class of token, where there is more than one."""
        plain = [self._val(title, f"val/ce_loss/{name}", i) for i, (name, title) in enumerate(CLASSES.items())]
        groups = {
            "Distillation loss by kind of chunk": self._named(KINDS, "val"),
            "Distillation loss by class of token": self._named(
                {f"kl_loss/{name}": title for name, title in CLASSES.items()}, "val"
            ),
            "Cross-entropy by class of token": [series for series in plain if any(v for _, v in series.points)],
        }
        note = "validation, nats per chunk or token of that kind"
        return [chart(title, series, note=note) for title, series in groups.items() if len(series) > 1]

    def _of_teachers(self) -> list[Chart | None]:
        """Each teacher's own loss and weight, where there are several; one teacher's is the loss itself."""
        for prefix in ("train", "val"):
            numbers = _numbers(self.run, prefix)
            self._shown |= {f"{prefix}/teacher_{i}/proj_accuracy" for i in numbers}
            if len(numbers) == 1:
                self._shown.add(f"{prefix}/teacher_{numbers[0]}/kl_loss")
        numbers = _numbers(self.run, "train")
        if len(numbers) < 2:
            return []
        names = [f"teacher {i}" for i in numbers]
        return [
            chart(
                title, [self._train(n, f"train/teacher_{i}/{key}", i % 8) for i, n in zip(numbers, names, strict=True)]
            )
            for title, key in (("Distillation loss by teacher", "kl_loss"), ("Weight of teachers", "weight"))
        ]

    def _reach(self) -> list[Chart | None]:
        coverage = [self._val("target tokens in exact chunks", "val/coverage", 3)]
        prefix = "val" if any(k.startswith("val/teacher_") for k in self.run.metric_names) else "train"
        other = "train" if prefix == "val" else "val"
        uncovered, unsure = self._named(UNCOVERED, prefix), self._named(UNSURE, prefix)
        for names in (UNCOVERED, UNSURE):
            # for what it marks as shown: `further` would draw the same metrics of the other part once more
            self._named(names, other)
        where = "validation" if prefix == "val" else "training"
        return [
            chart("Alignment coverage", coverage, width=NARROW, height=210, note="validation"),
            chart("Uncovered probability", uncovered, width=NARROW, height=210, zero=True, note=where),
            chart("Shares of chunks", unsure, width=NARROW, height=210, zero=True, note=where),
            self._skipped(),
        ]

    def _skipped(self) -> Chart | None:
        """Skipped records so far, by reason; the eight largest."""
        logged = [key for key in self.run.metric_names if key.startswith("train/skipped/")]
        counts = {key: [(step, n) for step, n in self._points(key) if n > 0] for key in logged}
        keys = sorted((key for key in logged if counts[key]), key=lambda key: -counts[key][-1][1])[:8]
        names = [key.removeprefix("train/skipped/").replace("_", " ") for key in keys]
        lines = [
            Series(name, counts[key], i, markers=True) for i, (key, name) in enumerate(zip(keys, names, strict=True))
        ]
        # tokens, chunks and records in one chart
        wide = bool(keys) and counts[keys[0]][-1][1] > 30 * counts[keys[-1]][-1][1]
        return chart("Left out so far", lines, width=NARROW, height=210, zero=not wide, log=wide, note="by reason")

    def _sampled(self) -> list[Chart | None]:
        return [
            chart(
                title,
                [self._train(label, f"train/sample/{key}", i) for i, (key, label) in enumerate(keys.items())],
                width=NARROW,
                height=210,
            )
            for title, keys in _SAMPLED.items()
        ]

    def _optimizer(self) -> list[Chart | None]:
        norm = self._train("before clipping", "train/grad_norm", 4)
        rate = Series("lr", self._points("train/lr"), 6)
        weights = [Series(name, self._points(f"train/{name}"), i) for i, name in enumerate(("alpha", "beta"))]
        return [
            chart("Gradient norm", [norm], width=NARROW, height=210, log=wants_log(norm.points)),
            chart("Learning rate", [rate], width=NARROW, height=210, zero=True),
            chart("Weights of the channels", weights, width=NARROW, height=210, zero=True),
        ]

    def _machine(self) -> list[Chart | None]:
        speed = self._train("student", "train/tokens_per_s", 5)
        seconds = self._points("train/seconds")
        memory = [Series(name, self._points(key), i) for i, (key, name) in enumerate(_MEMORY.items())]
        parts = self._times(seconds)
        took: dict[float, float] = dict(seconds)
        waits = [
            Series(
                part.name, [(step, 100 * v / took[step]) for step, v in part.points if took[step] > 0], i, smooth=True
            )
            for i, part in enumerate(part for part in parts if part.name in {_TIMES[name] for name in _WAITING})
        ]
        return [
            chart("Tokens per second", [speed], width=NARROW, height=210, zero=True),
            chart("Where a step's time goes", parts, width=NARROW, height=210, stack=True, note="seconds"),
            chart("Waiting", waits, width=NARROW, height=210, zero=True, note="percent of a step"),
            chart("Memory", memory, width=NARROW, height=210, zero=True, note="GiB, rank 0"),
        ]

    def _times(self, seconds: Points) -> list[Series]:
        """Parts of every step, the last one what no section of the timer counts."""
        logged = [key for key in self.run.metric_names if key.startswith("train/time/")]
        order = {name: i for i, name in enumerate(_TIMES)}
        logged.sort(key=lambda key: order.get(key.removeprefix("train/time/"), len(order)))
        parts, rest = [], dict(seconds)
        for i, key in enumerate(logged):
            name, values = key.removeprefix("train/time/"), dict(self._points(key))
            part = [(step, max(0.0, values.get(step, 0.0))) for step, _ in seconds]
            for step, value in part:
                rest[step] -= value
            parts.append(Series(_TIMES.get(name, name), part, i % 8))
        if parts:
            parts.append(Series("other", [(step, max(0.0, value)) for step, value in rest.items()], 7))
        return parts

    def _traces(self) -> list[Chart | None]:
        """Figures that a run on traces is judged by, and that show early when it collapses."""
        four = [self._val(name, key, i) for i, (key, name) in enumerate(_LOG_PROBS.items())]
        losses = [self._train(name, key, i) for i, (key, name) in enumerate(_CHANNELS.items())]
        charts = [chart("Log-probability of messages", four, width=WIDE, height=300, note="nats per message")]
        charts.append(chart("Losses of the channels", losses, note="training"))
        for title, keys in _MONITORS.items():
            charts.append(chart(title, [self._val(name, key, i) for i, (key, name) in enumerate(keys.items())]))
        return charts


def sources(run: RunData) -> list[tuple[str, str, str | None]]:
    """Name, metric of the student and metric of the teacher for every data source that is validated by itself."""
    rows = []
    for key in run.metric_names:
        # a teacher's own metrics have the form of a source's
        match = re.fullmatch(r"val/(?!teacher_\d+/)(.+)/bpb", key)
        if match:
            teacher = f"{key.removesuffix('bpb')}teacher_bpb"
            rows.append((match[1], key, teacher if run.points(teacher) else None))
    return rows


def _numbers(run: RunData, prefix: str) -> list[int]:
    """Numbers of the teachers that have metrics of their own."""
    matches = (re.match(rf"{prefix}/teacher_(\d+)/", key) for key in run.metric_names)
    return sorted({int(match[1]) for match in matches if match})


def _level(points: Points, run: RunData) -> Points:
    """A teacher does not change, so its level is drawn over the whole run."""
    return [(min(run.history.steps), points[-1][1]), (run.last_step, points[-1][1])] if points else []


def _sum_note(run: RunData) -> str:
    """Terms of the loss."""
    if run.on_traces or run.divergence is None:
        return ""
    if run.setting("loss_fn.dynamic_loss_scaling", False):
        return "cross-entropy + the distillation loss, scaled to it"
    distil, plain = run.setting("loss_fn.kl_loss_weight", 1.0), run.setting("loss_fn.ce_loss_scale", 1.0)
    if not all(isinstance(factor, int | float) for factor in (distil, plain)):
        return ""
    return f"{format_number(plain)} × cross-entropy + {format_number(distil)} × distillation loss"
