"""The one family of errors that Limbeck raises on purpose.

Every message is a single sentence that shows the value, what was expected and what to do; the command line prints it
alone, without a traceback.
"""

from __future__ import annotations


class LimbeckError(Exception):
    """Base of all errors that a user can cause and mend."""


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
