"""A model that is to be sharded is read by one process; the others build it without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from limbeck.distributed.source import Source
from limbeck.utils.errors import ConfigError, LimbeckError


def load_once(
    read: Callable[[], Any], twin: Callable[[Any], Any], *, hidden: Callable[[Any], torch.Tensor] | None = None
) -> tuple[Any, Source]:
    """(a model without weights, where they come from). Every rank must call it; only rank 0 reads.

    Args:
        read: the whole model, in main memory; an error of it is raised on all ranks.
        twin: from the model's configuration, the same model; called on the meta device.
        hidden: what to keep of the whole model for a check of its shards.
    """
    source, error = Source(), None
    if dist.get_rank() == 0:
        try:
            source.model = read()
            source.hidden = None if hidden is None else hidden(source.model)
        except LimbeckError as e:
            error = e
    told = [None if error is None else str(error), getattr(source.model, "config", None)]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise error or ConfigError(told[0])
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = twin(told[1])
    model.tie_weights()
    return model.eval(), source
