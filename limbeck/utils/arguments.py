"""Arguments that have a second name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from limbeck.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def also_named(**names: str) -> Callable[[F], F]:
    """Lets a function take arguments by other names as well: ``also_named(second="first")``.

    >>> @also_named(plural="singular")
    ... def call(singular):
    ...     return singular
    >>> call(plural=[1])
    [1]
    """

    def wrapped(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise ConfigError(f"{name!r} and {other!r} are two names of one argument; give one of them")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return wrapped
