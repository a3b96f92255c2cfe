"""A teacher's signals on disk: written once, resumable at any document, mapped by any number of training runs.

Folder of a cache (``rank`` is the data-parallel rank of the process that wrote the file):

    shard_<rank>_<number>.lbk       header and records, see ``format``
    shard_<rank>_<number>.journal   one JSON line per complete document: key, offset, n, crc, prefixes
    index_<rank>.json               sealed shards with their sha256, whether the cache is complete
    head.safetensors                the teacher's head (kind ``hidden`` only)
    weights.json                    samples of the files that the teacher's weights came from, see ``origin``

Both files of a shard only grow. A document counts once its journal line is whole, and that line is written after the
document's record is on the disk; what a killed writer left beyond it is cut off on resume.
"""

from __future__ import annotations

from limbeck.teachers.cache.format import CacheSpec, document_key, estimate_bytes
from limbeck.teachers.cache.shards import CachedDocument, CacheReader, CacheWriter

__all__ = ["CacheReader", "CacheSpec", "CacheWriter", "CachedDocument", "document_key", "estimate_bytes"]
