"""The ``limbeck`` command: all of typer and rich. Each command imports what it needs when it runs.

Exit codes: 0 done; 1 an expected error, in one line (``--debug`` adds the traceback); 2 wrong usage; 3 done in part,
some files or teachers failed; 4 checked, and not worth a run; 75 stopped early, the same command goes on; 130 Ctrl-C;
143 SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from limbeck import __version__
from limbeck.errors import ExitCode, LimbeckError, one_line

if TYPE_CHECKING:
    import typer


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that ``arguments`` (by default those of the process) ask for, and exit with its code."""
    try:
        _run(arguments)
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 and isinstance(end.code, int):
            _leave(end.code)
        raise


def _leave(code: int) -> NoReturn:
    """End one of several ranks, without tearing down the interpreter: a thread of gloo that lets go of its last tensor
    meanwhile would abort a process whose work is done, and its launcher would call the run failed."""
    # os._exit calls none of these and drops what is buffered
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str] | None) -> NoReturn:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        # answered before anything is loaded
        print(f"limbeck {__version__}")
        raise SystemExit(ExitCode.DONE)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    # both are read when the libraries are imported, which commands do later
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        with _terminable():
            application()(args=arguments, prog_name="limbeck")
    except LimbeckError as error:
        if debug:
            raise
        print(f"limbeck: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(name)
        if debug or extra is None:
            raise
        print(f"limbeck: {name} is not installed; pip install 'limbeck[{extra}]' brings it", file=sys.stderr)
        raise SystemExit(ExitCode.ERROR) from None
    except KeyboardInterrupt:
        print("limbeck: interrupted", file=sys.stderr)
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except _Terminated:
        print("limbeck: ended by SIGTERM", file=sys.stderr)
        raise SystemExit(ExitCode.TERMINATED) from None
    except Exception as error:
        line = _of_the_machine(error)
        if debug or line is None:
            raise
        print(f"limbeck: {line}", file=sys.stderr)
        raise SystemExit(ExitCode.ERROR) from None
    raise SystemExit(ExitCode.DONE)


# no Exception: an `except Exception` on the way would swallow it
class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _terminable() -> Iterator[None]:
    """A block that SIGTERM leaves as an exception does, so that what is half written is removed; a second one kills.

    One of several ranks ends at once, as it may be waiting for another for ever.
    """
    # only the main thread may set a handler; one that somebody else has set stays
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1 and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def leave(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != pid:
            # a forked worker, which has nothing of its own to remove
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise _Terminated

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _of_the_machine(error: BaseException) -> str | None:
    """One sentence about memory or a file that this machine refuses; None for a fault of another kind."""
    from limbeck.utils.files import is_disk_full

    if is_disk_full(error):
        where = getattr(error, "filename", None)
        what = "a file" if where is None else repr(str(where))
        return f"{what} cannot be written ({one_line(error, 200)}); free some space or write elsewhere"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        # of a renaming, the name that was wanted
        return f"{str(error.filename2 or error.filename)!r} cannot be used: {error.strerror}"
    # by name, as torch need not be there; its allocator for the CPU raises a plain RuntimeError
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        why = one_line(error, 200)
        return f"memory ran out ({why}); use smaller batches, shorter sequences or a smaller model"
    return None


_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "torchdata", "datasets", "pyarrow", "tensorboard", "gguf"), "train"),
    "httpx": "server",
    "lm_eval": "eval",
    "peft": "peft",
    "ray": "ray",
}
"""Which extra of the package brings a module that the core does without."""


_HELP = """Distil any language model into any other, across tokenizers and across contexts.

\b
Examples:
  limbeck demo                        # a first run on this machine
  limbeck check STUDENT TEACHER       # is a pair worth a run?
  limbeck init run.yaml               # asks for models and data
  limbeck train run.yaml lr=2e-5      # or a recipe (limbeck recipes list)
  limbeck docs --search KEY           # the documentation, offline

Every command has --help with an example; --debug, anywhere, adds the traceback to an error.
"""


def application() -> typer.Typer:
    import typer

    from limbeck.cli import (
        align,
        check,
        demo,
        docs,
        doctor,
        evaluate,
        export,
        init,
        plan,
        project,
        recipes,
        report,
        schema,
        traces,
        train,
        write,
    )

    app = typer.Typer(
        name="limbeck",
        help=_HELP,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error (anywhere in a command)."),
    ) -> None:
        if version:
            typer.echo(f"limbeck {__version__}")
            raise typer.Exit

    app.command("align")(align.align_command)
    app.command("check")(check.check_command)
    app.command("train")(train.train_command)
    app.command("cache")(train.cache_command)
    app.command("demo")(demo.demo_command)
    app.command("doctor")(doctor.doctor_command)
    app.command("project")(project.project_command)
    app.command("eval")(evaluate.eval_command)
    app.command("write")(write.write_command)
    app.command("report")(report.report_command)
    app.command("export")(export.export_command)
    app.command("plan")(plan.plan_command)
    app.command("docs")(docs.docs_command)
    app.command("init")(init.init_command)
    app.command("schema")(schema.schema_command)
    app.add_typer(recipes.recipes_app, name="recipes")
    app.add_typer(traces.traces_app, name="traces")
    return app


if __name__ == "__main__":
    main()
