"""The run file of ``tests.helpers.runs``, under the names that tests of launching know."""

from tests.helpers.runs import rows as figures
from tests.helpers.runs import write_run

__all__ = ["figures", "write_run"]
