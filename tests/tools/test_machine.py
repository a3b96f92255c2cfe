"""An estimate names the device that it is for, which is this machine's unless another is described."""

from __future__ import annotations

import json

import pytest
import torch

from limbeck.distributed.planner import GIB
from limbeck.tools.machine import assumed_machine
from tests.helpers.runs import limbeck


def test_a_described_gpu() -> None:
    machine, name = assumed_machine(24, 100, gpus=2, utilisation=0.5)
    assert (machine.memory, machine.flops, machine.utilisation) == (24 * GIB, 1e14, 0.5)
    assert name == "a GPU of 24 GiB and 100 Tflop/s (--memory, --tflops)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_the_cpu_of_this_machine() -> None:
    machine, name = assumed_machine(None, None)
    assert name.startswith("this machine's CPU (torch on ")
    assert 1e8 < machine.flops < 1e14
    code, out, _ = limbeck("plan", "cpu_smoke", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["device"].startswith("this machine's CPU")
    assert found["tokens_per_second"] < 1e6
    assert "a GPU of 80 GiB" in json.loads(limbeck("plan", "cpu_smoke", "--json", "--gpus", "2")[1])["device"]
