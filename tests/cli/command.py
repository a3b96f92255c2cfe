"""The command in this process."""

from __future__ import annotations

from typing import Any

import pytest

from limbeck.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``limbeck ARGUMENTS``."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err
