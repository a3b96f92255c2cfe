"""The BOS token in front of a text: some models are lost without it, some are worse with it, and none complains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import processors

from limbeck.errors import TokenizerError


def adds_bos(tokenizer: Any) -> bool:
    """Whether a transformers tokenizer puts its BOS token in front of a text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def set_bos(tokenizer: Any, wanted: bool) -> None:
    """Make a transformers tokenizer put its BOS token in front of every text, or none; saved copies do the same."""
    if adds_bos(tokenizer) == wanted:
        return
    bos = tokenizer.bos_token
    if bos is None:
        raise TokenizerError(f"the tokenizer {tokenizer.name_or_path!r} has no BOS token; leave bos at auto")
    backend = tokenizer.backend_tokenizer
    if wanted:
        template = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        before = [backend.post_processor] if backend.post_processor is not None else []
        backend.post_processor = processors.Sequence([*before, template])
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)


def gguf_adds_bos(path: Path) -> bool | None:
    """Setting of the BOS token in a GGUF file (``tokenizer.ggml.add_bos_token``); None: nothing."""
    from gguf import GGUFReader  # of limbeck[train], as all that converts such a file

    field = GGUFReader(path).get_field("tokenizer.ggml.add_bos_token")
    return None if field is None else bool(field.contents())
