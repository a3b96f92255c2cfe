"""Two renderings of one text, aligned on shared byte boundaries."""

from limbeck.align.aligner import AlignmentPair, TokenAligner, align_renderings
from limbeck.align.batches import AlignmentBatch
from limbeck.align.boundaries import Chunks

__all__ = ["AlignmentBatch", "AlignmentPair", "Chunks", "TokenAligner", "align_renderings"]
