"""Failures that are no mistakes: checks that did their work, and the user's own decisions.

A test run that finds a failing test, a linter that finds a fault, a search without a match end with an exit code other
than 0 and have done what they were called for. That the user interrupted or declined a call says nothing about it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from limbeck.traces.schema import Message, ToolCall

# Program -> exit codes by which it says that it found something; other codes mean that it could not do its work.
_ANY: frozenset[int] = frozenset(range(1, 124))  # from 124 on: of `timeout`, the shell and signals
_ONE: frozenset[int] = frozenset({1})
_VERDICTS: dict[str, frozenset[int]] = {
    **dict.fromkeys(("grep", "egrep", "fgrep", "rg", "ag", "diff", "cmp", "test", "[", "[["), _ONE),
    **dict.fromkeys(
        ("pytest", "py.test", "tox", "nox", "unittest", "ctest", "jest", "vitest", "mocha", "doctest"), _ONE
    ),
    **dict.fromkeys(("ruff", "flake8", "mypy", "pyright", "black", "isort", "eslint", "prettier"), _ONE),
    **dict.fromkeys(("shellcheck", "golangci-lint", "rubocop", "stylelint", "markdownlint"), _ONE),
    # pylint's code is a mask of the kinds of messages that it gave
    **dict.fromkeys(("pylint", "tsc", "bandit", "clippy", "pre-commit"), _ANY),
}
# Sub-commands and targets that make a general program a check, and the codes by which it says what it found.
_SCRIPTS = re.compile(r"(?:run(?:-script)?\s+)?(?:test|lint|check|typecheck)\b")
_CHECKING: dict[str, tuple[re.Pattern[str], frozenset[int]]] = {
    **dict.fromkeys(("npm", "yarn", "pnpm", "bun", "deno"), (_SCRIPTS, _ANY)),
    "cargo": (re.compile(r"(?:test|clippy|check|fmt\s+.*--check)\b"), _ANY),
    "go": (re.compile(r"(?:test|vet)\b"), _ONE),
    # what ExUnit exits with by default when tests fail
    "mix": (re.compile(r"test\b"), frozenset({2})),
    "make": (re.compile(r"(?:.*\s)?(?:test|tests|lint|check)\b"), _ANY),
    "gradle": (re.compile(r"(?:.*\s)?(?:test|check)\b"), _ONE),
    "mvn": (re.compile(r"(?:.*\s)?(?:test|verify)\b"), _ONE),
    "dotnet": (re.compile(r"test\b"), _ONE),
    "git": (re.compile(r"(?:diff\s+.*--(?:exit-code|check|quiet)|grep)\b"), _ONE),
    "python": (re.compile(r"\S*manage\.py\s+test\b"), _ONE),
}
_SETTING_UP = frozenset({"cd", "export", "source", ".", "set", "pushd", "popd", "true", "echo", "sleep", "pwd"})
_STARTS_ANOTHER = re.compile(
    r"\w+=.*|[\d.]+[smh]?|env|time|nice|sudo|npx|uv|poetry|pipenv|bundle|run|xvfb-run|timeout|exec", re.DOTALL
)
_PART = re.compile(r"\|\||&&|[;\n]")
_INTERRUPTED = re.compile(r"\[?Request interrupted by (?:the )?user|^\^C$", re.IGNORECASE | re.MULTILINE)


def expected_failure(call: ToolCall, result: Message) -> str | None:
    """Why a failed call is no mistake (``healthy_check``, ``user_interruption``); None where it may be one."""
    code = result.error_meta.get("exit_code")
    # 130: ended by SIGINT, as Ctrl-C sends it
    if result.error_kind == "declined" or code == 130 or _INTERRUPTED.search(result.content[:200]):
        return "user_interruption"
    if result.error_kind == "nonzero_exit" and isinstance(code, int):
        command = shell_command(call)
        if command is not None and is_check(command, code):
            return "healthy_check"
    return None


def shell_command(call: ToolCall) -> str | None:
    """The command line that a call runs; None for calls that run none."""
    arguments = call.arguments
    if isinstance(arguments, str):
        return arguments if call.in_content else None
    for name in ("command", "cmd", "script"):
        command: Any = arguments.get(name)
        if isinstance(command, list) and all(isinstance(word, str) for word in command):
            # ["bash", "-lc", "..."]: the command is the last word
            return command[-1] if len(command) > 2 and command[1].startswith("-") else shlex.join(command)
        if isinstance(command, str):
            return command
    return None


def is_check(command: str, code: int) -> bool:
    """Whether a command line did nothing but check, and ended with a code by which such a check says what it found.

    What only sets the scene (``cd``, ``export``) may stand in front. Of several checks any may have failed.
    """
    seen = False
    for words in _programs(command):
        program = words[0].rsplit("/", 1)[-1]
        if program in _SETTING_UP:
            continue
        verdict = _verdict(program, " ".join(words[1:]))
        if verdict is None or code not in verdict:
            return False
        seen = True
    return seen


def _verdict(program: str, rest: str) -> frozenset[int] | None:
    if re.fullmatch(r"python[\d.]*", program):
        module = re.match(r"-m\s+(\S+)\s*(.*)", rest, re.DOTALL)
        if module is not None:
            return _verdict(module[1], module[2])
        program = "python"
    if program in _VERDICTS:
        return _VERDICTS[program]
    pattern, codes = _CHECKING.get(program, (None, _ANY))
    return codes if pattern is not None and pattern.match(rest) else None


def _programs(command: str) -> Iterator[list[str]]:
    """The first program of every pipeline in a command line, without what merely starts it."""
    for part in _PART.split(command):
        try:
            words = shlex.split(part.partition("|")[0], comments=True)
        except ValueError:
            # _PART cuts within quotes too, and leaves them open
            words = part.partition("|")[0].split()
        while words and _STARTS_ANOTHER.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield words
