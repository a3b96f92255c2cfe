"""How long a test may wait. Limits are there to end what hangs; no test's outcome may depend on one."""

from __future__ import annotations

import os

TEST_SECONDS = 1200.0 * float(os.environ.get("LIMBECK_TEST_PATIENCE", "1"))
"""Seconds that one test, and so anything that it waits for, may take; the environment's factor is for slow machines."""
