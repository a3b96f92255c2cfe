"""The one family of errors that Limbeck raises on purpose, and the exit codes they end a command with.

Every message is a single sentence that shows the value, what was expected and what to do; the command line prints it
alone, without a traceback.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "AlignmentError",
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExitCode",
    "LimbeckError",
    "LossError",
    "PartlyDone",
    "ProjectionError",
    "ServerError",
    "StoppedEarly",
    "TemplateError",
    "TokenizerError",
    "TraceError",
    "one_line",
]


class ExitCode(IntEnum):
    """Meaning of the command's exit status."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    PARTLY_DONE = 3
    NOT_WORTH_IT = 4
    # EX_TEMPFAIL of sysexits.h; the two below are 128 + the number of the signal
    STOPPED_EARLY = 75
    INTERRUPTED = 130
    TERMINATED = 143


class LimbeckError(Exception):
    """Base of all errors that a user can cause and correct."""

    exit_code = ExitCode.ERROR


class PartlyDone(LimbeckError):
    """The result is there and usable, but some of the files, models or teachers asked for are not in it."""

    exit_code = ExitCode.PARTLY_DONE


class StoppedEarly(LimbeckError):
    """A signal ended the work before its time; what can be saved is saved. ``interrupted``: it was Ctrl-C."""

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.STOPPED_EARLY


class ConfigError(LimbeckError):
    """A run file, an override or an argument is not usable."""


class DataError(LimbeckError):
    """A data file or record is not usable; the message names file and line where there is one."""


class TokenizerError(LimbeckError):
    """A tokenizer cannot be loaded or its tokens cannot be read as bytes."""


class TemplateError(LimbeckError):
    """A chat template refuses a conversation, or its message spans cannot be located."""


class AlignmentError(LimbeckError):
    """Two renderings cannot be aligned."""


class ProjectionError(LimbeckError):
    """A vocabulary projection does not fit the tokenizers or is not usable."""


class LossError(LimbeckError):
    """A loss was given values it must not accept, such as NaN logits or ids that were not scored."""


class CacheError(LimbeckError):
    """A teacher cache is damaged, incomplete or belongs to another teacher."""


class CheckpointError(LimbeckError):
    """A checkpoint is missing, damaged or belongs to another run."""


class TraceError(LimbeckError):
    """An agent trace cannot be read or used."""


class ServerError(LimbeckError):
    """A remote teacher cannot be reached, refuses to answer, or its answers are not usable."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Text of another library's exception, without line ends and cut to ``limit`` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
