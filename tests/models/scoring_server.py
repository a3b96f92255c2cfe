"""The scoring server of ``tests.helpers.servers``, under the name that tests of models know."""

from tests.helpers.servers import HOLD, Lie, ScoringServer, serving

__all__ = ["HOLD", "Lie", "ScoringServer", "serving"]
