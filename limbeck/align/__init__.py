"""Two renderings of one text, aligned on shared byte boundaries."""

from limbeck.align.aligner import AlignmentBatch, AlignmentPair, TokenAligner
from limbeck.align.boundaries import Chunks
from limbeck.align.pairing import align_renderings

__all__ = ["AlignmentBatch", "AlignmentPair", "Chunks", "TokenAligner", "align_renderings"]
