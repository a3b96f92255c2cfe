"""How long a test may wait. Limits are there to end what hangs; no test's outcome may depend on one."""

from __future__ import annotations

import os

_FACTOR = float(os.environ.get("LIMBECK_TEST_PATIENCE", "1"))

TEST_SECONDS = 900.0 * _FACTOR
"""Seconds that one test may take; the environment's factor is for slow machines."""
WAIT_SECONDS = 360.0 * _FACTOR
"""Seconds that anything inside of a test may wait, so that it says what did not come before the test is ended."""
