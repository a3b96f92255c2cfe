from __future__ import annotations

import pytest
import torch

from limbeck.models.policy import Policy
from tests.helpers.tiny import student


@pytest.fixture(scope="module")
def model() -> Policy:
    """A student that is far from uniform."""
    made = student()
    with torch.no_grad():
        made.model.get_output_embeddings().weight.mul_(20)
    return made
