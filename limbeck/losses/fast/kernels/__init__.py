"""Triton kernels over vocabulary-major logits `[V, n]`: one column per row of the batch, columns contiguous.

With the vocabulary as the slow dimension a token's neighbours in memory are the same token at other rows. So every
gather through a vocabulary map, however scattered, reads whole runs of memory, and every reduction over the vocabulary
is a loop without exchange between threads. Column counts are padded to `COLUMNS`, so no kernel masks columns; what
lands in padding is finite and is given a factor of 0.

Numbers and addresses that change from block to block are not specialised on: whether a count is a multiple of 16 helps
no kernel here, and each new case would be compiled while the device waits.

Each module names the plain torch code that says what it computes. Import these modules only where Triton is installed.
"""

COLUMNS = 128
"""Columns that one program handles; buffers are padded to a multiple of it."""


def padded(columns: int) -> int:
    """Columns rounded up to what the kernels work on; at least one tile."""
    return max(-(-columns // COLUMNS), 1) * COLUMNS
