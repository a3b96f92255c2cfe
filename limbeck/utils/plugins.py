"""Imports on request: objects that a user names as ``module:name``, and packages that need not be installed."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from limbeck.errors import ConfigError, one_line


def load_package(name: str, why: str) -> Any:
    """An optional package; a ``ConfigError`` with ``why`` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(why) from error


def load_object(name: str, what: str) -> Any:
    """The object of a module of the environment or, where that has none of its name, of the working folder.

    ``what``: what messages call the setting.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{what} is {name!r}; expected module:name")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        # behind all others: a file that lies here must not stand in for an installed module
        sys.path.append(here)
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a module of the user's may raise whatever it likes
        raise ConfigError(f"{what} {name!r} cannot be had: {one_line(error, 200)}") from error
    finally:
        if added:
            sys.path.remove(here)
