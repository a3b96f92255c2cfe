"""Settings that must hold before any test module is imported."""

from __future__ import annotations

import os
import shutil

# Triton reads this when a kernel is defined: without a GPU its kernels run in the interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
