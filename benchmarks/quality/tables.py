"""Tables of the results of `suite.py`, `real.py` and `leaderboard.py`: mean and spread over seeds.

    PYTHONPATH=. python benchmarks/quality/tables.py            # fills the tables of RESULTS.md and docs/results.md
    PYTHONPATH=. python benchmarks/quality/tables.py --check    # says which of them differ from the rows
    PYTHONPATH=. python benchmarks/quality/tables.py --all [ROWS.jsonl ...]    # prints everything: domains, classes

A page is written by hand; the table behind `<!-- table: NAME -->` is that of `TABLES`. Of two rows of the same run the
later one counts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality import trl_gold
from benchmarks.quality.real import FIRST, SOONER, best_rates, is_alone, sweep_of, swept_by
from benchmarks.quality.suite import ARMS, PAIRS, STEPS, Pair

Row = dict[str, Any]
Figures = dict[str, float]
Setting = tuple[tuple[int, ...], str]
"""Sizes and precision."""

HERE = Path(__file__).parent
STORED = [HERE / "results.jsonl", HERE / "real.jsonl"]
NAMES = [*SOONER, *ARMS, *trl_gold.ARMS]
"""All arms, in the order of tables."""
LIGHT = "_ce_.3"
"""Arms beside cross-entropy of that weight."""
DEFAULT = f"tree_kl{LIGHT}"
"""What a student from scratch has by default."""
PRETRAINED = "tree_kl_soft"
"""What a pretrained student has by default."""


# -- figures -----------------------------------------------------------------------------------------------------------


def by_class(row: Row) -> Figures:
    """Bits per byte of every class of token over all domains."""
    bits, size = defaultdict[str, float](float), defaultdict[str, int](int)
    for domain in row["measures"].values():
        for name, figures in domain["classes"].items():
            bits[name] += figures["bpb"] * figures["bytes"]
            size[name] += figures["bytes"]
    return {name: bits[name] / size[name] for name in bits}


def by_domain(row: Row) -> Figures:
    """Bits per byte of every domain, behind their mean."""
    domains = {name: figures["bpb"] for name, figures in row["measures"].items()}
    return {"mean": statistics.mean(domains.values()), **domains}


def numeral_mass(row: Row) -> float | None:
    """Probability on numerals where a numeral follows, over all domains; None where it was not measured."""
    digits = [domain["classes"].get("digits", {}) for domain in row["measures"].values()]
    known = [(own["mass"], own["tokens"]) for own in digits if "mass" in own]
    return sum(mass * tokens for mass, tokens in known) / sum(tokens for _, tokens in known) if known else None


def skills(row: Row) -> Figures:
    """Of what was measured: share of sums written right, mass on numerals, multiple choice."""
    found = {}
    if "answers" in row:
        found["sums right"] = row["answers"]["sums"]["exact"]
    mass = numeral_mass(row)
    if mass is not None:
        found["numeral mass"] = mass
    for name, own in row.get("choices", {}).items():
        found |= {f"{name} acc": own["acc_norm"], f"{name} bits": own["bpb"]}
    return found


def gap_closed(value: float, alone: float, teacher: float) -> float | None:
    """Share of what cross-entropy alone leaves open towards the teacher that is closed; None where nothing is open.

    >>> gap_closed(1.8, alone=2.0, teacher=1.6)
    0.5
    """
    return round((alone - value) / (alone - teacher), 9) if alone > teacher else None


def unique(rows: Iterable[Row]) -> list[Row]:
    """One row per run, the last one."""
    settings = ("pair", "arm", "seed", "sizes", "precision", "epochs", "learning_rate", "swept")
    last = {str([models(row), *(row.get(name) for name in settings)]): row for row in rows}
    return list(last.values())


def setting(row: Row) -> Setting:
    """Sizes and precision of a run from scratch; what differs in them is never in one table."""
    return tuple(row["sizes"]), row.get("precision", "float32")


def teaches(row: Row, pair: Pair, of: Setting) -> bool:
    """Whether a row is of a teacher of that pair at those sizes: how long its student reads is not its own."""
    sizes, precision = setting(row)
    return row["arm"] in pair.teachers and (sizes[:2], precision) == (of[0][:2], of[1])


def alike(row: Row, name: str, of: Setting) -> bool:
    """Whether a row's student has the tokenizer, the text, the documents per step and the precision of a pair."""
    own, pair = PAIRS[row["pair"]], PAIRS[name]
    sizes, precision = setting(row)
    text = own.student, own.domain_bytes, own.board
    return (*text, sizes[3], precision) == (pair.student, pair.domain_bytes, pair.board, of[0][3], of[1])


def usual(rows: Sequence[Row]) -> list[Row]:
    """Rows of students from scratch, and their teachers, at the setting that most rows of their pair have."""
    students = [row for row in rows if row["pair"] in PAIRS]
    counted = Counter((row["pair"], setting(row)) for row in students)
    chosen = {name: own for (name, own), _ in reversed(counted.most_common())}
    teachers = [
        row
        for row in rows
        if row["pair"] == "teacher" and any(teaches(row, PAIRS[name], own) for name, own in chosen.items())
    ]
    return teachers + [row for row in students if setting(row) == chosen[row["pair"]]]


# -- experiments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One line of a summary; bits per byte, `gap` closed and `spread`s over seeds."""

    name: str
    seeds: int
    mean: float
    spread: float | None
    gap: float | None
    gap_spread: float | None
    worst: tuple[str, float]
    """The domain that fares worst beside cross-entropy alone, and by how much."""
    skills: Figures


@dataclass(frozen=True)
class Experiment:
    """Runs of one pair at one setting, cross-entropy alone and the teachers among them. alone: where it was given
    several numbers of steps, those of the best of which others have no fewer; the rest is among `rows`."""

    name: str
    title: str
    rows: list[Row]
    alone: list[Row]
    teachers: list[Row]

    @property
    def reference(self) -> str:
        """The arm that the others are compared with."""
        return str(self.alone[0]["arm"]) if self.alone else "ce"

    def arms(self) -> list[Arm]:
        """Summaries of all arms, in the order of `NAMES`."""
        by_arm = group(self.alone + self.rows)
        alone = mean_figures(map(by_domain, self.alone)) if self.alone else {}
        taught = [by_domain(row) for row in self.teachers]
        # of several teachers the better one in each domain
        teacher = {name: min(own[name] for own in taught) for name in taught[0] if name != "mean"} if taught else {}
        target = statistics.mean(teacher.values()) if teacher else None
        found = []
        for name, rows in by_arm.items():
            means = [by_domain(row)["mean"] for row in rows]
            own = mean_figures(map(by_domain, rows))
            open_gap = alone["mean"] - target if alone and target is not None else 0.0
            behind = {domain: own[domain] - alone[domain] for domain in alone if domain != "mean"} or {"-": 0.0}
            spread = statistics.stdev(means) if len(means) > 1 else None
            found.append(
                Arm(
                    name,
                    len(rows),
                    own["mean"],
                    spread,
                    gap_closed(own["mean"], alone["mean"], target) if alone and target is not None else None,
                    spread / open_gap if spread is not None and open_gap > 0 else None,
                    max(behind.items(), key=lambda pair: pair[1]),
                    mean_figures(map(skills, rows)),
                )
            )
        return found


def group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by arm, in the order of `NAMES`."""
    arms = defaultdict[str, list[Row]](list)
    for row in rows:
        arms[row["arm"]].append(row)
    return {name: arms[name] for name in sorted(arms, key=lambda name: NAMES.index(name) if name in NAMES else -1)}


def mean_figures(found: Iterable[Figures]) -> Figures:
    """Means of all figures, each over those that have it."""
    columns = defaultdict[str, list[float]](list)
    for own in found:
        for name, value in own.items():
            columns[name].append(value)
    return {name: statistics.mean(values) for name, values in columns.items()}


def experiments(rows: Sequence[Row]) -> list[Experiment]:
    """Of students from scratch, then of real models."""
    found: list[Experiment] = []
    for name, pair in PAIRS.items():
        for own in sorted({setting(row) for row in rows if row["pair"] == name}):
            here = [row for row in rows if row["pair"] in PAIRS and setting(row) == own]
            (*_, steps, documents), precision = own
            plain = defaultdict[int, list[Row]](list)
            for row in rows:
                # whoever teaches, cross-entropy alone is the same run
                if row["pair"] in PAIRS and ARMS.get(row["arm"], {}) is None and alike(row, name, own):
                    plain[STEPS.get(row["arm"], row["sizes"][2])].append(row)
            known = [own for number, own in plain.items() if number <= steps]
            alone = min(known, key=lambda own: (len(own) == 1, mean_bits(own)), default=[])
            others = [row for row in here if row["pair"] == name and row not in alone]
            teachers = [row for row in rows if row["pair"] == "teacher" and teaches(row, pair, own)]
            said = f"student {pair.student}, {' and '.join(pair.teachers)} teaching"
            if pair.domain_bytes:
                said += f", {pair.domain_bytes / 1e3:g} kB of every domain"
            these = [row for row in here if row["pair"] == name]
            run = f"{steps} steps of {documents} documents, {precision}; {device(these)}. Bits per byte, held out."
            if len(plain) > 1:
                best = STEPS.get(alone[0]["arm"], alone[0]["sizes"][2])
                run += f" Compared with the best of cross-entropy alone, {best} steps."
            found.append(Experiment(name, f"## {name}: {said}\n\n{run}", others, alone, teachers))
    return found + real_experiments(rows)


def real_experiments(rows: Sequence[Row]) -> list[Experiment]:
    """Of real models by amount of text: first every arm at the learning rate that its sweep chose, then those at other
    rates, one rate after the other. Cross-entropy alone is the same whoever teaches, and at its own best beside chosen
    rates."""
    alike, alone = defaultdict[tuple[Any, ...], list[Row]](list), defaultdict[tuple[Any, ...], list[Row]](list)
    for row in rows:
        if row["pair"].startswith("real_"):
            how = amount(row["pair"]), *step_of(row)
            alike[(models(row), *how)].append(row)
            if is_alone(row["arm"]):
                alone[(student_of(models(row)), *how)].append(row)
    chosen, found = chosen_rates(rows), []
    for (who, size, *step), these in sorted(alike.items(), key=lambda own: (own[0][0] != FIRST, own[0])):
        taught = [row for row in these if not is_alone(row["arm"])]
        plain = alone[(student_of(who), size, *step)]
        (best, *others) = sorted(best_alone(plain), key=mean_bits) or [[]]
        domains = these[0]["measures"].keys()
        came = [row for row in rows if row["pair"] == "real" and row["measures"].keys() == domains]
        students = [row for row in came if row["arm"] == "student" and student_of(models(row)) == student_of(who)]
        teachers = [row for row in came if row["arm"] == "teacher" and models(row) == who]
        by_rate = defaultdict[float, list[Row]](list)
        for row in taught or best:
            # an arm without a sweep has the rate of the defaults
            sweeps = ((who, row["batch"], sweep_of(arm, f"{size:g}")) for arm in (row["arm"], PRETRAINED, DEFAULT))
            own = next((chosen[sweep] for sweep in sweeps if sweep in chosen), None)
            by_rate[0.0 if row["learning_rate"] == own else row["learning_rate"]].append(row)
        for rate, here in sorted(by_rate.items()):
            # where nobody chose a rate, all that have one are compared at it
            reference = [row for row in plain if (row["arm"], row["learning_rate"]) == ("ce", rate)] or best
            beside = students[-1:] + (here if taught else []) + [row for rows in others for row in rows]
            title = f"## {who}, {size:g} MB of text\n\n{said_of(here, reference, step)}"
            found.append(Experiment(f"real_{size:g}", title, beside, reference, teachers[-1:]))
    return found


def said_of(rows: Sequence[Row], alone: Sequence[Row], step: Sequence[Any]) -> str:
    """How the rows of a table were run."""
    precision, batch, most, _ = step
    first = rows[0]
    rates = sorted({row["learning_rate"] for row in rows})
    said = f"{first['steps']} steps of {batch} documents" + (f" of up to {most} bytes" if most else "")
    said += f", {first['epochs']} epochs, AdamW at {' and '.join(f'{rate:g}' for rate in rates)}"
    said += f" behind {first['warmup']} steps of warm-up" if "warmup" in first else ""
    said += f", {precision}; {device(rows)}."
    if alone and (alone[0]["steps"], [alone[0]["learning_rate"]]) != (first["steps"], rates):
        said += f" Cross-entropy alone is at its best: {alone[0]['steps']} steps at {alone[0]['learning_rate']:g}."
    return said


def step_of(row: Row) -> tuple[Any, ...]:
    """What a step of a real run is: precision, documents and bytes of one, domains."""
    return row.get("precision", "float32"), row["batch"], row.get("document_bytes", 0), tuple(sorted(row["measures"]))


def chosen_rates(rows: Iterable[Row]) -> dict[tuple[str, int, str], float]:
    """The learning rate that every sweep chose, by models, documents per step and the sweep's name."""
    runs = defaultdict[tuple[str, int], list[Row]](list)
    for row in rows:
        runs[models(row), row.get("batch", 0)].append(row)
    return {(*run, pair): rate for run, own in runs.items() for pair, rate in best_rates(own).items()}


def student_of(who: str) -> str:
    """The student of `TEACHER teaches STUDENT`."""
    return who.rpartition(" teaches ")[2]


def best_alone(rows: Iterable[Row]) -> list[list[Row]]:
    """Cross-entropy alone, its arms each at the best of its learning rates."""
    rates = defaultdict[str, dict[float, list[Row]]](lambda: defaultdict(list))
    for row in rows:
        rates[row["arm"]][row["learning_rate"]].append(row)
    return [min(own.values(), key=mean_bits) for own in rates.values()]


def mean_bits(rows: Sequence[Row]) -> float:
    """Bits per byte over domains and rows."""
    return statistics.mean(by_domain(row)["mean"] for row in rows)


def models(row: Row) -> str:
    """Which real models a row is of."""
    return str(row.get("models", FIRST))


def amount(pair: str) -> float:
    """Megabytes of a pair `real_MB`."""
    return float(pair.removeprefix("real_"))


def device(rows: Sequence[Row]) -> str:
    """Where rows were measured, and how many runs shared the machine."""
    last = rows[-1]
    shared = f", {last['parallel']} runs at a time" if "parallel" in last else ""
    return f"{last['origin']['device']}{shared}"


# -- tables ------------------------------------------------------------------------------------------------------------


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of markdown."""
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def number(value: float | None, spread: float | None = None, *, percent: bool = False) -> str:
    """A figure with its spread, or a dash."""
    if value is None:
        return "-"
    text = f"{value:.0%}" if percent else f"{value:.3f}"
    if spread is None:
        return text
    return f"{text} ± {spread:.0%}" if percent else f"{text} ± {spread:.3f}"


def summary(experiment: Experiment) -> str:
    """One line per arm: bits per byte, gap closed, worst domain beside cross-entropy, and what else was measured."""
    arms = experiment.arms()
    names = list(dict.fromkeys(name for arm in arms for name in arm.skills))
    # a student as it comes is no arm
    best = min((arm.mean for arm in arms if arm.name in NAMES), default=0.0)
    lines = [
        [
            "the teacher" if len(experiment.teachers) == 1 else f"teacher {row['arm']}",
            str(1),
            number(by_domain(row)["mean"]),
            "",
            "",
            *(number(skills(row).get(name)) for name in names),
        ]
        for row in experiment.teachers
    ]
    for arm in arms:
        mean = number(arm.mean, arm.spread)
        lines.append(
            [
                arm.name,
                str(arm.seeds),
                f"**{mean}**" if arm.mean == best else mean,
                "" if arm.name == experiment.reference else number(arm.gap, arm.gap_spread, percent=True),
                "" if arm.name == experiment.reference else f"{arm.worst[0]} {arm.worst[1]:+.3f}",
                *(number(arm.skills.get(name)) for name in names),
            ]
        )
    return grid(["arm", "seeds", "bits per byte", "gap closed", "worst domain beside ce", *names], lines)


def table(rows: Iterable[Row], figures: Callable[[Row], Figures]) -> str:
    """One line per arm: mean over seeds, and in the first column the spread; bold where an arm is best."""
    arms = {name: list(map(figures, own)) for name, own in group(rows).items()}
    means = {name: mean_figures(found) for name, found in arms.items()}
    columns = list(dict.fromkeys(column for own in means.values() for column in own))
    best = {c: min((own[c] for arm, own in means.items() if arm in NAMES and c in own), default=None) for c in columns}
    lines = []
    for arm, found in arms.items():
        cells = []
        for column in columns:
            values = [own[column] for own in found if column in own]
            spread = statistics.stdev(values) if column == columns[0] and len(values) > 1 else None
            text = number(means[arm].get(column), spread)
            cells.append(f"**{text}**" if values and means[arm][column] == best[column] else text)
        lines.append([arm if arm in NAMES or arm == "student" else f"teacher {arm}", str(len(found)), *cells])
    return grid(["arm", "seeds", *columns], lines)


def probes(rows: Iterable[Row]) -> str:
    """One line per arm of what the second half of its runs was asked for, about its first teacher: how much of pair and
    text is one to one, and how the gradients of a loss's parts lie to each other. Empty where nothing was."""
    lines = []
    for arm, own in group(row for row in rows if "probes" in row).items():
        last = ({name: halves[-1] for name, halves in row["probes"].items() if halves} for row in own)
        found = {
            name.removeprefix("teacher_0/"): value
            for name, value in mean_figures(last).items()
            if name.startswith("teacher_0/")
        }
        parts = [name.removeprefix("cosine_") for name in found if name.startswith("cosine_")]
        said = (f"{part} {found['cosine_' + part]:+.2f} ({found.get('norm_ratio_' + part, 0.0):.2g})" for part in parts)
        shown = ("strict_student_tokens", "strict_teacher_tokens", "shared_mass_student", "shared_mass_teacher")
        lines.append([arm, str(len(own)), *(number(found.get(name)) for name in shown), ", ".join(said)])
    head = ["arm", "seeds", "student tokens 1:1", "teacher tokens 1:1", "student's mass on shared tokens",
            "teacher's mass on shared tokens", "cosine between parts (ratio of norms)"]  # fmt: skip
    return grid(head, lines) if lines else ""


def by_amount(found: Iterable[Experiment]) -> dict[str, list[Experiment]]:
    """Of real models one experiment by amount of text, where several amounts have steps alike: the first of them, in
    which every arm has its own learning rate, unless another is better for cross-entropy alone."""
    alike = defaultdict[tuple[Any, ...], dict[str, Experiment]](dict)
    for experiment in found:
        if experiment.name.startswith("real_") and experiment.alone:
            who = experiment.title.splitlines()[0].removeprefix("## ").rpartition(", ")[0]
            have = alike[(who, *step_of(experiment.alone[0]))].setdefault(experiment.name, experiment)
            if mean_bits(experiment.alone) < mean_bits(have.alone):
                alike[(who, *step_of(experiment.alone[0]))][experiment.name] = experiment
    curves = dict[str, list[Experiment]]()
    for (who, *_), own in alike.items():
        if len(own) > max(1, len(curves.get(who, []))):
            curves[who] = sorted(own.values(), key=lambda experiment: amount(experiment.name))
    return curves


def curve(real: Sequence[Experiment]) -> str:
    """One line per arm, one column per amount of text: bits per byte, and the difference to cross-entropy alone."""
    columns = [{arm.name: arm for arm in experiment.arms()} for experiment in real]
    lines = []
    for name in group(row for experiment in real for row in experiment.alone + experiment.rows):
        cells = []
        for experiment, arms in zip(real, columns, strict=True):
            arm = arms.get(name)
            text = number(arm.mean, arm.spread) if arm else "-"
            beside = experiment.reference
            cells.append(text if arm is None or name == beside else f"{text} ({arm.mean - arms[beside].mean:+.3f})")
        lines.append([name, *cells])
    return grid(["arm", *(f"{amount(experiment.name):g} MB" for experiment in real)], lines)


def sweep(rows: Iterable[Row]) -> str:
    """Bits per byte of cross-entropy alone and of what is taught, by amount of text and learning rate, on documents of
    no other table."""
    swept = defaultdict[tuple[str, str, float, int], dict[float, Row]](dict)
    for row in rows:
        if row["pair"].startswith("sweep_"):
            arm, size = swept_by(row["pair"])
            swept[models(row), arm, float(size), row.get("steps", 0)][float(row["arm"])] = row
    rates = sorted({rate for own in swept.values() for rate in own})
    lines = []
    for (who, arm, size, steps), own in sorted(swept.items(), key=lambda pair: (pair[0][0] != FIRST, pair[0])):
        bits = {rate: by_domain(row)["mean"] for rate, row in own.items()}
        cells = {rate: number(bits.get(rate)) for rate in rates}
        best = min(bits, key=bits.__getitem__)
        cells[best] = f"**{cells[best]}**"
        lines.append([who, arm, f"{size:g}", str(steps or "-"), *cells.values()])
    return grid(["models", "arm", "MB", "steps", *(f"{rate:g}" for rate in rates)], lines)


def everything(rows: Sequence[Row]) -> str:
    """All that was measured: every experiment by arm, domain and class of token."""
    rows = unique(rows)
    found = experiments(rows)
    parts = [__doc__.strip().split("\n")[0]]
    if real := by_amount(found):
        said = "Bits per byte, held out, and the difference to cross-entropy alone; every arm at its own learning rate."
        parts.append(f"## Real models by amount of text\n\n{said}")
        parts += [f"{who}:\n\n{curve(own)}" for who, own in real.items()]
    if any(row["pair"].startswith("sweep_") for row in rows):
        said = "On documents of no other table; bold: the rate that `real.py` gives to the arm."
        parts.append(f"## Real models: learning rates by amount of text\n\n{said}\n\n{sweep(rows)}")
    for experiment in found:
        rows_here = experiment.teachers + experiment.alone + experiment.rows
        parts += [experiment.title, summary(experiment)]
        if all(ARMS.get(row["arm"], {}) is None for row in experiment.rows):
            continue  # nothing is taught: what would be compared
        parts.append("By domain:\n\n" + table(rows_here, by_domain))
        said = "By class of the student's (the teacher's own) tokens, all domains together:"
        parts.append(f"{said}\n\n{table(rows_here, by_class)}")
        if probed := probes(experiment.rows):
            parts.append(f"What the loss was asked for, every hundredth step of the second half:\n\n{probed}")
    return "\n\n".join(parts) + "\n"


# -- the page ----------------------------------------------------------------------------------------------------------


def bits(arm: Arm | None, alone: Arm | None = None, *, gap: bool = False, best: bool = False) -> str:
    """A cell: bits per byte with their spread, and in brackets the gap that is closed or the difference to
    cross-entropy alone; the number of seeds where it is not three."""
    if arm is None:
        return ""
    text = f"{arm.mean:.3f}"
    if arm.spread is not None:
        text += f" ± {arm.spread:.3f}".replace("± 0", "± ")
    if gap and arm.gap is not None:
        text += f" ({arm.gap:.0%})".replace("(-0%", "(0%")
    elif alone is not None and alone is not arm:
        beside = f"{arm.mean - alone.mean:+.3f}".replace("0.", ".", 1)
        text += f" ({beside if beside.strip('+-.0') else '.000'})"
    text = f"**{text}**" if best else text
    return text if arm.seeds == 3 else f"{text} [{arm.seeds}]"


def by_pair(
    rows: Sequence[Row],
    pairs: dict[str, str],
    lines: dict[str, str],
    *,
    first: str = "loss",
    gap: bool = True,
    teacher: bool = True,
    least: int = 3,
) -> str:
    """Students from scratch: one line per arm below cross-entropy alone, one column per pair, the best of `least`
    seeds bold. first: what the arms are; gap: with the share that they close; teacher: with the teachers."""
    found = {own.name: own for own in experiments(usual(rows))}
    arms = {name: {arm.name: arm for arm in found[name].arms()} for name in pairs}
    shown = {name: [own[arm] for arm in lines if arm in own and own[arm].seeds >= least] for name, own in arms.items()}
    best = {name: min(own, key=lambda arm: arm.mean).name if own else "" for name, own in shown.items()}
    table = [[ALONE, *(bits(arms[name][found[name].reference]) for name in pairs)]]
    for arm, said in lines.items():
        table.append([said, *(bits(arms[n].get(arm), gap=gap, best=best[n] == arm) for n in pairs)])
    if teacher:
        taught = ([by_domain(row)["mean"] for row in found[name].teachers] for name in pairs)
        table.append(["the teacher", *(", ".join(f"{value:.3f}" for value in own) for own in taught)])
    return grid([first, *pairs.values()], table)


def by_megabyte(rows: Sequence[Row], lines: Sequence[tuple[str, str, str]]) -> str:
    """Pretrained students: one line per (models, arm, words), one column per amount of text."""
    curves = by_amount(experiments(rows))
    amounts = sorted({amount(own.name) for experiments_ in curves.values() for own in experiments_})
    table = []
    for who, name, said in lines:
        arms = {amount(own.name): ({arm.name: arm for arm in own.arms()}, own.reference) for own in curves[who]}
        cells = (arms.get(size, ({}, "")) for size in amounts)
        table.append([said, *(bits(own.get(name), own.get(reference)) for own, reference in cells)])
    return grid(["student, loss", *(f"{size:g} MB" for size in amounts)], table)


def rates(rows: Sequence[Row]) -> str:
    """The best rate of every sweep by amount of text, and in brackets what the highest one that was tried cost."""
    swept = defaultdict[tuple[str, str], dict[float, dict[float, float]]](dict)
    for row in rows:
        if row["pair"].startswith("sweep_") and row.get("batch") == SWEPT_BATCH:
            arm, size = swept_by(row["pair"])
            swept[models(row), arm].setdefault(float(size), {})[float(row["arm"])] = by_domain(row)["mean"]
    amounts = sorted({size for own in swept.values() for size in own})
    table = []
    for (who, arm), own in sorted(swept.items(), key=lambda pair: (pair[0][0] != FIRST, pair[0])):
        cells = []
        for size in amounts:
            found = own.get(size, {})
            if len(found) < 2:
                cells.append("")
                continue
            best, most = min(found, key=found.__getitem__), max(found)
            text = f"{best:.0e}".replace("e-0", "e-")
            if most != best:
                cost = f"{found[most] - found[best]:.3f}".lstrip("0")
                text += f" ({most:.0e}: +{cost})".replace("e-0", "e-")
            cells.append(text)
        names = who.replace("-Instruct", "").replace(" teaches ", " to ")
        table.append([names, WORDS.get(arm, arm), *cells])
    return grid(["models", "loss", *(f"{size:g} MB" for size in amounts)], table)


FROM_SCRATCH = {
    "little_coarse": "32k vocabulary teaches 8k",
    "little_fine": "8k teaches 32k",
    "little_digits": "Qwen3's tokenizer teaches Llama-3.2's",
    "little_gemma": "Gemma-3's teaches 8k",
}
"""Pairs of students from scratch with little text, as tables call them."""
ALONE = "cross-entropy alone, its best number of steps"
WEIGHED = ("uld", "alm", "gold", "h_kl", "p_kl", "boundary_kl", "tree_kl")
"""What `leaderboard.py` measures beside cross-entropy of weight .3."""
SWEPT_BATCH = 16
"""Documents per step of the sweeps; those of others are of runs that read their text more often."""
WORDS = {"ce": "cross-entropy alone", "tree_kl_soft": "default", "tree_kl_ce_.3": "weight .3, no gate"}
MINIMIND, QWEN = (
    "SmolLM2-135M-Instruct{} teaches MiniMind2-Small",
    "Qwen2.5-Coder-0.5B-Instruct{} teaches SmolLM2-135M-Instruct",
)
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "losses": lambda rows: by_pair(
        rows,
        FROM_SCRATCH,
        {
            **{f"{mode}_ce_.3": f"`{mode}`" for mode in ("uld", "gold", "h_kl", "p_kl", "alm", "simct", "escd")},
            "bpm_forward_ce_.3": "`bpm`, forward",
            **{f"{mode}_ce_.3": f"`{mode}`" for mode in ("partition", "strict", "boundary_kl")},
            DEFAULT: "**`tree_kl`** (default)",
        },
    ),
    "parts": lambda rows: by_pair(
        rows,
        FROM_SCRATCH,
        {
            "tree_kl_root_ce_.3": "the root alone",
            "tree_kl_inner_student_ce_.3": "inside the teacher's tokens alone",
            "tree_kl_inner_teacher_ce_.3": "inside the student's tokens alone",
            "tree_kl_outer_ce_.3": "without inside the student's tokens",
            DEFAULT: "all (default)",
            "tree_kl_counted_ce_.3": "all, `condition: counted`",
        },
        teacher=False,
        first="part of `tree_kl`",
    ),
    "lists": lambda rows: by_pair(
        rows,
        {"little_coarse": "32k teaches 8k", "little_fine": "8k teaches 32k"},
        {
            "tree_kl_top64_ce_.3": "the 64 likeliest tokens",
            "tree_kl_top256_ce_.3": "the 256 likeliest tokens",
            DEFAULT: "whole distributions",
        },
        teacher=False,
        first="the teacher gives",
    ),
    "weights": lambda rows: by_pair(
        rows,
        {
            "little_coarse": "32k teaches 8k, read 18 times",
            "long_coarse": "the same, 54 times",
            "little_fine": "8k teaches 32k, 18 times",
            "long_fine": "the same, 54 times",
            "coarse": "32k teaches 8k, 8 MB once",
            "fine": "8k teaches 32k, 8 MB once",
        },
        {
            "boundary_kl": "`boundary_kl`, weight 1",
            "tree_kl": "`tree_kl`, weight 1",
            DEFAULT: "weight .3 (default)",
            "tree_kl_ce_0": "weight 0",
            "tree_kl_soft_ce_.3": "weight .3, soft gate",
        },
        teacher=False,
        first="weight of cross-entropy, gate",
    ),
    "pretrained": lambda rows: by_megabyte(
        rows,
        [
            (MINIMIND.format(""), "ce", "MiniMind2-Small: cross-entropy alone"),
            (MINIMIND.format(""), "trl_gold_ce", "TRL's GOLD and cross-entropy"),
            (MINIMIND.format(""), "trl_gold_ce_bayesian", "the same, strategy `bayesian`"),
            (MINIMIND.format(""), PRETRAINED, "**default** (`tree_kl`, weight 1, soft gate)"),
            (MINIMIND.format(""), DEFAULT, "`tree_kl`, weight .3, no gate"),
            (QWEN.format(""), "ce", "SmolLM2-135M: cross-entropy alone"),
            (QWEN.format(""), PRETRAINED, "**default**"),
            (QWEN.format(""), DEFAULT, "`tree_kl`, weight .3, no gate"),
        ],
    ),
    "adapted": lambda rows: by_megabyte(
        rows,
        [
            (MINIMIND.format(""), PRETRAINED, "MiniMind2-Small, default: teacher as it comes"),
            (MINIMIND.format(", adapted,"), PRETRAINED, "teacher adapted"),
            (MINIMIND.format(""), DEFAULT, "weight .3, no gate: teacher as it comes"),
            (MINIMIND.format(", adapted,"), DEFAULT, "teacher adapted"),
            (QWEN.format(""), PRETRAINED, "SmolLM2-135M, default: teacher as it comes"),
            (QWEN.format(", adapted,"), PRETRAINED, "teacher adapted"),
        ],
    ),
    "rates": lambda rows: rates(rows),
    "teachers": lambda rows: by_pair(
        rows,
        {
            "little_prose": "the one of prose",
            "little_formal": "the one of code, GSM8K and arithmetic",
            "little_both": "both",
        },
        {
            DEFAULT: "equal weights",
            "tree_kl_by_ce_ce_.3": "weighed by their cross-entropy (default)",
            "tree_kl_select_ce_.3": "the better one for each text",
        },
        first="how teachers are weighed",
        gap=False,
    ),
    "board": lambda rows: by_pair(
        rows,
        {"board_coarse": "2k vocabulary teaches 512", "board_fine": "512 teaches 2k"},
        {**{f"{mode}{LIGHT}": f"`{mode}`" for mode in WEIGHED[:-1]}, DEFAULT: "**`tree_kl`** (default)"},
        least=1,
    ),
}
"""Tables of the pages by name."""
PAGES = (HERE / "RESULTS.md", HERE.parents[1] / "docs" / "results.md")


def filled(text: str, rows: Sequence[Row]) -> str:
    """A page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise SystemExit(f"{match[2]!r} is no table; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](rows)}\n\n"

    return re.sub(r"(<!-- table: (\w+) -->\n)\n?(?:\|.*\n)*\n?", made, text)


# -- plots -------------------------------------------------------------------------------------------------------------


PUBLISHED = ("tree_kl_ce_.3", "boundary_kl_ce_.3", "p_kl_ce_.3", "gold_ce_.3", "h_kl_ce_.3", "uld_ce_.3", "alm_ce_.3")


def draw_objectives(found: Sequence[Experiment], path: Path) -> None:
    """Bars for README: the gap that the default and the published objectives close, one panel for each pair."""
    from matplotlib.figure import Figure

    by_name = {experiment.name: experiment for experiment in found}
    # two rows, so that the text can be read at a phone's width
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots(2, len(FROM_SCRATCH) // 2, sharex=True, sharey=True).flat
    labels = [name.removesuffix("_ce_.3") for name in PUBLISHED][::-1]
    for axis, (name, title) in zip(axes, FROM_SCRATCH.items(), strict=True):
        gaps = {arm.name: arm.gap or 0.0 for arm in by_name[name].arms()}
        values = [round(100 * gaps.get(arm, 0.0)) for arm in PUBLISHED][::-1]
        colours = ["tab:blue" if label == "tree_kl" else "tab:gray" for label in labels]
        axis.bar_label(axis.barh(labels, values, color=colours), fmt="%.0f", padding=2, fontsize=11)
        axis.set_title(title.replace(" tokenizer", ""), fontsize=12)
        axis.tick_params(labelsize=11)
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_xlim(-45, 105)
    figure.supxlabel("share of the gap between cross-entropy alone and the teacher, %", fontsize=11)
    figure.savefig(path, dpi=130)


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Rows of results files, in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", default=STORED, help="files of rows; default: the stored ones")
    parser.add_argument("--all", action="store_true", help="print every experiment by arm, domain and class of token")
    parser.add_argument("--check", action="store_true", help="fail where a page differs from the rows")
    args = parser.parse_args()
    rows = unique(read_rows(args.results))
    if args.all:
        print(everything(rows), end="")
        return
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        if (new := filled(old, rows)) == old:
            continue
        if args.check:
            raise SystemExit(f"{path.name}: a table differs from the rows; run tables.py")
        path.write_text(new, encoding="utf-8")
    if not args.check:
        draw_objectives(experiments(usual(rows)), PAGES[1].parent / "images" / "objectives.png")


if __name__ == "__main__":
    main()
