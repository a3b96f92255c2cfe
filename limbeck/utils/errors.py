"""The errors under their published path; they live in ``limbeck.errors``."""

from limbeck.errors import *  # noqa: F403
