"""All random number generators of a process: seed, capture, restore."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from limbeck.utils.errors import CheckpointError


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (CPU and every CUDA device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every generator, as plain values and tensors (see ``state_io``)."""
    version, keys, gauss = random.getstate()
    name, np_keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "keys": torch.tensor(keys, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(np_keys).astype(np.int64)),
            "pos": int(pos),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to a captured state; CUDA states are used where there are as many devices as then."""
    try:
        py, nps = state["python"], state["numpy"]
        random.setstate((int(py["version"]), tuple(int(k) for k in py["keys"]), py["gauss"]))
        keys = nps["keys"].numpy().astype(np.uint32)
        np.random.set_state((nps["name"], keys, int(nps["pos"]), int(nps["has_gauss"]), float(nps["cached"])))
        torch.set_rng_state(state["torch"].to(torch.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"the stored random state is not usable ({e}); take another checkpoint") from e
    cuda = state.get("cuda")
    if cuda is not None and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.to(torch.uint8) for s in cuda])
