"""`limbeck project`: build, audit and store the projection between two vocabularies."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import JsonOption, StudentOption, TeacherOption, console, model_files, print_json, short_name
from limbeck.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from limbeck.projection.audit import Audit, Masses, PairAudit
    from limbeck.projection.counted import PairCounter
    from limbeck.projection.matrix import Projection
    from limbeck.projection.published import Conversion
    from limbeck.projection.trees import VocabTrees
    from limbeck.utils.progress import Progress


class Rule(str, Enum):
    """How the weights are made."""

    rules = "rules"
    counted = "counted"


OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to store the matrix (.safetensors); without it, audit only.")
]
CorpusOption = Annotated[
    list[Path] | None,
    typer.Option("--corpus", help="Text or .jsonl file, repeatable: adds the share of its tokens to the audit."),
]
RuleOption = Annotated[
    Rule, typer.Option(help="rules: from the vocabularies alone; counted: from the corpus, smoothed towards rules.")
]
ReverseOption = Annotated[
    bool, typer.Option("--reverse", help="Also spell teacher tokens with the student and add their weight.")
]
WidthOption = Annotated[
    int | None, typer.Option("--k", min=1, max=1024, help="Teacher tokens per student token (rules: 4, counted: 16).")
]
SmoothingOption = Annotated[
    float | None, typer.Option(help="Pseudo-count with which `counted` leans on `rules` (default: 10).")
]
EpsilonOption = Annotated[
    float | None,
    typer.Option("--cell-epsilon", help="Finer cells for tree_kl: cut links below this share of --corpus; try 0.001."),
]
ConvertOption = Annotated[
    Path | None, typer.Option(help="Convert this published .pt matrix instead of building one; code in it is refused.")
]


HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Also write a page: search tokens, spellings, cells and trees.")
]


def project_command(
    student: StudentOption,
    teacher: TeacherOption,
    out: OutOption = None,
    corpus: CorpusOption = None,
    rule: RuleOption = Rule.rules,
    reverse: ReverseOption = False,
    k: WidthOption = None,
    smoothing: SmoothingOption = None,
    convert: ConvertOption = None,
    cell_epsilon: EpsilonOption = None,
    html: HtmlOption = None,
    json_output: JsonOption = False,
) -> None:
    """Build, audit and store the projection from the student's vocabulary to the teacher's.

    Shows how many tokens are the same on both sides, by class of token, and how much of the teacher the student
    reaches. A run builds the projection it needs by itself; a stored one is given as loss_fn.projection_matrix_path.

    Example:

        limbeck project --student models/llama-3.2-1b --teacher models/qwen3-4b -o W.safetensors
    """
    started = time.perf_counter()
    _check_options(rule, corpus, convert, reverse, k)
    if cell_epsilon is not None and not corpus:
        raise ConfigError("--cell-epsilon needs text to count: add --corpus FILE (text or .jsonl).")
    for written in filter(None, (out, html)):
        from limbeck.utils.files import refuse_inputs

        refuse_inputs(written, [*model_files(student, teacher), *(corpus or []), *([convert] if convert else [])])

    from limbeck.cli.progress import display
    from limbeck.projection.audit import audit_masses, audit_pair, audit_projection
    from limbeck.projection.published import convert_published
    from limbeck.projection.rules import build_trees
    from limbeck.tokens import ByteVocab, read_tokenizer

    student_tokenizer, teacher_tokenizer = read_tokenizer(student), read_tokenizer(teacher)
    conversion: Conversion | None = None
    counter: PairCounter | None = None
    with display(quiet=json_output) as shown:
        bar = shown.begin("spelling tokens on both sides")
        trees = build_trees(student_tokenizer, teacher_tokenizer, progress=lambda n, total: bar.update(n, total=total))
        bar.close()
        if corpus:
            counter = _count(student_tokenizer, teacher_tokenizer, corpus, trees, shown)
        if convert is not None:
            conversion = convert_published(convert, student_tokenizer, teacher_tokenizer)
            projection = conversion.projection
        else:
            projection = _build(student_tokenizer, teacher_tokenizer, rule, reverse, k, smoothing, counter, shown)
    if cell_epsilon is not None and counter is not None:
        trees = trees.refined(*counter.pairs(), cell_epsilon)
        projection = replace(projection, details={**projection.details, "cell_epsilon": repr(cell_epsilon)})
    projection = replace(projection, trees=trees)
    vocabularies = ByteVocab.from_tokenizer(student_tokenizer), ByteVocab.from_tokenizer(teacher_tokenizer)
    tokens = None if counter is None else counter.student_tokens
    report = audit_projection(projection, *vocabularies, corpus_tokens=tokens)
    pair = audit_pair(projection, vocabularies[1], counter)
    masses = audit_masses(projection, *vocabularies, counter)
    if out is not None:
        _save(projection, out)
    if html is not None:
        from limbeck.report.vocabulary import vocabulary_page

        names = short_name(student), short_name(teacher)
        vocabulary_page(projection, vocabularies, names, report, pair, masses, counter).write(html)
    seconds, memory = time.perf_counter() - started, peak_rss_mb()
    if json_output:
        facts = {**report.to_dict(), **pair.to_dict(), **masses.to_dict(), **_facts(projection, conversion, out)}
        print_json({**facts, "seconds": round(seconds, 3), "peak_rss_mb": memory})
        return
    out_console = console()
    _print_report(out_console, report)
    _print_pair(out_console, pair)
    if counter is not None:
        _print_masses(out_console, masses)
    _print_facts(out_console, projection, conversion, out)
    if html is not None:
        out_console.print(f"page: {html}", markup=False, highlight=False)
    used = "" if memory is None else f", {memory:.0f} MB at peak"
    out_console.print(f"[dim]{seconds:.1f} s{used}[/dim]")


def peak_rss_mb() -> float | None:
    """Largest resident memory of this process so far, in MB (2**20 bytes); None where the system does not say."""
    try:
        # getrusage would also count what the parent process held when it started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def _check_options(rule: Rule, corpus: list[Path] | None, convert: Path | None, reverse: bool, k: int | None) -> None:
    if rule is Rule.counted and not corpus:
        raise ConfigError("--rule counted needs text to count: add --corpus FILE (text or .jsonl).")
    if convert is not None and (rule is not Rule.rules or reverse or k is not None):
        raise ConfigError("--convert takes the weights from the file: leave out --rule, --reverse and --k.")


def _build(
    student_tokenizer: object,
    teacher_tokenizer: object,
    rule: Rule,
    reverse: bool,
    k: int | None,
    smoothing: float | None,
    counter: PairCounter | None,
    shown: Progress,
) -> Projection:
    from limbeck.projection import counted, rules

    bar = shown.begin("spelling tokens")
    built = rules.build_rules(
        student_tokenizer,
        teacher_tokenizer,
        k=k if k is not None and rule is Rule.rules else rules.DEFAULT_K,
        reverse=reverse,
        progress=lambda done, total: bar.update(done, total=total),
    )
    bar.close()
    if rule is Rule.rules or counter is None:
        return built
    weight = counted.DEFAULT_SMOOTHING if smoothing is None else smoothing
    return counted.build_counted(counter, built, k=k or counted.DEFAULT_K, smoothing=weight)


def _count(
    student_tokenizer: object, teacher_tokenizer: object, corpus: list[Path], trees: VocabTrees, shown: Progress
) -> PairCounter:
    from limbeck.projection.counted import count_pairs, iter_texts

    bar = shown.begin("counting corpus", sum(path.stat().st_size for path in corpus if path.is_file()))
    return count_pairs(student_tokenizer, teacher_tokenizer, iter_texts(corpus), trees=trees, progress=bar.update)


def _save(projection: Projection, out: Path) -> None:
    try:
        projection.save(out)
    except OSError as error:
        raise ConfigError(f"the projection cannot be written to {out}: {error}.") from error


def _facts(projection: Projection, conversion: Conversion | None, out: Path | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rule": projection.rule,
        "k": projection.k,
        "student_fingerprint": projection.student_fingerprint,
        "teacher_fingerprint": projection.teacher_fingerprint,
        "details": dict(projection.details),
        "out": None if out is None else str(out),
    }
    if conversion is not None:
        names = ("rows_cut", "rows_missing", "entries_cut", "rows_rescaled")
        facts["conversion"] = {name: getattr(conversion, name) for name in names}
    return facts


def _print_report(console: Console, report: Audit) -> None:
    from rich.markup import escape
    from rich.table import Table

    from limbeck.projection.audit import CLASSES

    corpus = report.corpus_share is not None
    table = Table(title="student tokens that are teacher tokens", title_justify="left")
    table.add_column("class")
    for heading in ("total", "exact", "share", *(("corpus share",) if corpus else ())):
        table.add_column(heading, justify="right")
    for name in (*CLASSES, "other"):
        coverage = report.classes[name]
        share = f"{coverage.share:.1%}" if coverage.total else "-"
        cells = [name, f"{coverage.total:,}", f"{coverage.exact:,}", share]
        if corpus:
            cells.append(f"{coverage.corpus_share:.1%}" if coverage.corpus_tokens else "-")
        table.add_row(*cells, style="red" if name.startswith("digits") and coverage.share < 0.9 else None)
    total = ["all", f"{report.student_tokens:,}", f"{report.exact_tokens:,}", f"{report.exact_share:.1%}"]
    table.add_row(*total, *([f"{report.corpus_share:.1%}"] if corpus else []), style="bold")
    console.print(table)
    console.print(
        f"overlap {report.overlap:.4f} (shared byte strings / the smaller of {report.student_tokens:,} and "
        f"{report.teacher_tokens:,}); {report.unmapped_tokens:,} text tokens without a mapping"
    )
    examples = Table(title="examples", title_justify="left")
    for heading in ("class", "student token", "teacher tokens (weight)"):
        examples.add_column(heading)
    for example in report.examples:
        pieces = "  ".join(f"{escape(piece)} {weight:.4f}" for piece, weight in example.pieces)
        examples.add_row(example.token_class, escape(example.token), pieces)
    console.print(examples)
    if report.recommendation == "none":
        console.print(f"[bold]no projection is needed[/bold]: {escape(report.reason)}")
        return
    console.print(f"[bold]loss_fn.mode: {report.mode}[/bold], the default, suits every pair")
    console.print(f"of the published losses recommended: {report.recommendation}: {escape(report.reason)}")


def _print_pair(console: Console, pair: PairAudit) -> None:
    from rich.markup import escape

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    mass = "" if pair.teacher_reached_mass is None else f", {pair.teacher_reached_mass:.1%} of its tokens in the corpus"
    console.print(
        f"the student reaches {pair.teacher_reached_ids:,} teacher tokens ({pair.teacher_reached_share:.1%}{mass})"
    )
    console.print(
        f"{pair.cells:,} cells, {pair.one_to_one_cells:.1%} one to one, the largest of {pair.largest_cell:,} tokens"
    )
    if pair.cell_agreement is not None:
        console.print(
            f"chunks whose first tokens share a cell {share(pair.cell_agreement)}; inner tokens on a tree: "
            f"student {share(pair.inner_student_on_tree)}, teacher {share(pair.inner_teacher_on_tree)}"
        )
    if pair.warning is not None:
        console.print(f"[yellow]{escape(pair.warning)}[/yellow]")


def _print_masses(console: Console, masses: Masses) -> None:
    """Where the teacher's mass goes in the corpus, by class and script."""
    from rich.table import Table

    for title, groups in (("class", masses.classes), ("script", masses.scripts)):
        table = Table(
            title=f"teacher tokens of the corpus by {title} (shares of tokens, no model)", title_justify="left"
        )
        table.add_column(title)
        for heading in ("chunks", "share", "unreached", "in no cell", "cells differ", "excluded"):
            table.add_column(heading, justify="right")
        total = sum(group.starts or 0 for group in groups.values())
        for name, group in groups.items():
            if not group.starts:
                continue
            shares = (
                group.starts / total,
                *((x or 0) / group.starts for x in (group.unreached, group.lost, group.apart)),
            )
            excluded = "-" if group.excluded is None else f"{group.excluded:.1%}"
            table.add_row(name, f"{group.starts:,}", *(f"{share:.1%}" for share in shares), excluded)
        console.print(table)
    if masses.excluded_student is not None and masses.excluded_teacher is not None:
        console.print(
            f"condition: cheap would exclude {masses.excluded_student:.1%} of the student's and "
            f"{masses.excluded_teacher:.1%} of the teacher's mass"
        )
    if masses.lost_tokens:
        shown = ", ".join(f"{token.token} {token.share:.2%}" for token in masses.lost_tokens[:10])
        console.print(f"out of reach most often: {shown}", markup=False, highlight=False)


def _print_facts(console: Console, projection: Projection, conversion: Conversion | None, out: Path | None) -> None:
    from rich.markup import escape

    if conversion is not None:
        console.print(
            f"converted: {conversion.rows_cut:,} rows cut, {conversion.rows_missing:,} rows missing, "
            f"{conversion.entries_cut:,} entries cut, {conversion.rows_rescaled:,} rows rescaled"
        )
    if out is not None:
        console.print(f"stored {escape(str(out))}: rule {projection.rule}, k = {projection.k}")
        console.print(
            f"a run uses it with loss_fn.projection_matrix_path={escape(str(out))}; without that key it builds its own"
        )
