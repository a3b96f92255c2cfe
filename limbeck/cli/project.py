"""`limbeck project`: build, audit and store the projection between two vocabularies."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import JsonOption, StudentOption, TeacherOption, console, model_files, print_json
from limbeck.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from limbeck.projection.audit import Audit, PairAudit
    from limbeck.projection.matrix import Projection
    from limbeck.projection.published import Conversion
    from limbeck.utils.progress import Progress


OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to store the matrix (.safetensors); without it, audit only.")
]
ConvertOption = Annotated[
    Path | None, typer.Option(help="Convert this published .pt matrix instead of building one; code in it is refused.")
]


def project_command(
    student: StudentOption,
    teacher: TeacherOption,
    out: OutOption = None,
    convert: ConvertOption = None,
    json_output: JsonOption = False,
) -> None:
    """Build, audit and store the projection from the student's vocabulary to the teacher's.

    Shows how many tokens are the same on both sides, by class of token, and how much of the teacher the student
    reaches; `limbeck check` adds what that is of a text. A run builds the projection it needs by itself; a stored one
    is given as loss_fn.projection_matrix_path.

    Example:

        limbeck project --student models/llama-3.2-1b --teacher models/qwen3-4b -o W.safetensors
    """
    started = time.perf_counter()
    if out is not None:
        from limbeck.utils.files import refuse_inputs

        refuse_inputs(out, [*model_files(student, teacher), *([convert] if convert else [])])

    from limbeck.cli.progress import display
    from limbeck.projection.audit import audit_pair, audit_projection
    from limbeck.projection.published import convert_published
    from limbeck.projection.rules import build_trees
    from limbeck.tokens import ByteVocab, read_tokenizer

    tokenizers = read_tokenizer(student), read_tokenizer(teacher)
    conversion: Conversion | None = None
    with display(quiet=json_output) as screen:
        bar = screen.begin("spelling tokens on both sides")
        trees = build_trees(*tokenizers, progress=lambda n, total: bar.update(n, total=total))
        bar.close()
        if convert is not None:
            conversion = convert_published(convert, *tokenizers)
            projection = conversion.projection
        else:
            projection = _build(*tokenizers, screen)
    projection = replace(projection, trees=trees)
    vocabularies = ByteVocab.from_tokenizer(tokenizers[0]), ByteVocab.from_tokenizer(tokenizers[1])
    audit, pair = audit_projection(projection, *vocabularies), audit_pair(projection, vocabularies[1])
    if out is not None:
        _save(projection, out)
    seconds, memory = time.perf_counter() - started, peak_rss_mb()
    if json_output:
        facts = {**audit.to_dict(), **pair.to_dict(), **_facts(projection, conversion, out)}
        print_json({**facts, "seconds": round(seconds, 3), "peak_rss_mb": memory})
        return
    terminal = console()
    _print_report(terminal, audit)
    _print_pair(terminal, pair)
    _print_facts(terminal, projection, conversion, out)
    used = "" if memory is None else f", {memory:.0f} MB at peak"
    terminal.print(f"[dim]{seconds:.1f} s{used}[/dim]")


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
    # macOS says it in bytes, others in KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def _build(student_tokenizer: object, teacher_tokenizer: object, screen: Progress) -> Projection:
    from limbeck.projection.rules import build_rules

    bar = screen.begin("spelling tokens")
    built = build_rules(
        student_tokenizer, teacher_tokenizer, progress=lambda done, total: bar.update(done, total=total)
    )
    bar.close()
    return built


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

    table = Table(title="student tokens that are teacher tokens", title_justify="left")
    table.add_column("class")
    for heading in ("total", "exact", "share"):
        table.add_column(heading, justify="right")
    for name in (*CLASSES, "other"):
        coverage = report.classes[name]
        share = f"{coverage.share:.1%}" if coverage.total else "-"
        cells = [name, f"{coverage.total:,}", f"{coverage.exact:,}", share]
        table.add_row(*cells, style="red" if name.startswith("digits") and coverage.share < 0.9 else None)
    total = ("all", f"{report.student_tokens:,}", f"{report.exact_tokens:,}", f"{report.exact_share:.1%}")
    table.add_row(*total, style="bold")
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
    if report.same_vocabulary:
        console.print("[bold]no projection is needed[/bold]: both sides have the same vocabulary")


def _print_pair(console: Console, pair: PairAudit) -> None:
    from rich.markup import escape

    console.print(f"the student reaches {pair.teacher_reached_ids:,} teacher tokens ({pair.teacher_reached_share:.1%})")
    console.print(
        f"{pair.cells:,} cells, {pair.one_to_one_cells:.1%} one to one, the largest of {pair.largest_cell:,} tokens"
    )
    if pair.warning is not None:
        console.print(f"[yellow]{escape(pair.warning)}[/yellow]")


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
