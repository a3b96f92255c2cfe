"""The collator on real agent logs, where they are at hand."""

from __future__ import annotations

import pytest
import torch

from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.files import IngestOptions, IngestStats, ingest
from tests import zoo
from tests.traces.collator_cases import check_hint_rows
from tests.traces.material import real_logs

EXPECTED = {
    "taubench_gpt4o_airline": {},
    "swe_agent_trajs": {},
    "openhands_multi_swe_output": {"healthy_check": 2, "no_call": 2},
    "claude_code_session_8463c716": {"healthy_check": 6, "kind_cancelled": 1},
}
"""Failed results that become no row, by reason; everything else must."""


@pytest.mark.parametrize("name", list(EXPECTED))
def test_every_failed_call_gets_its_row(name: str) -> None:
    paths = real_logs(f"{name}.jsonl")
    stats = IngestStats()
    traces = list(ingest(paths, IngestOptions(), stats))
    # The longest traces hold most of the errors; tau-bench alone has 177 traces.
    traces = sorted(traces, key=lambda t: -sum(m.is_error for m in t.messages))[:24]
    collator = ComposerDataCollator(zoo.tokenizer("qwen3"), CollatorConfig(max_seq_len=8192))
    errors = rows = 0
    for trace in traces:
        batch = collator([trace])
        check_hint_rows(batch)
        for row, target in enumerate(batch["site_target"].tolist()):
            caller = trace.caller_of(batch["site_info"][row]["cause"])
            assert caller is not None
            assert caller[0] == target
        assert torch.equal(batch["response_mask"] & ~batch["attention_mask"], torch.zeros_like(batch["response_mask"]))
        errors += sum(message.is_error for _, message in trace.new_messages())
        rows += len(batch["site_target"])
    left_out = {k: v for k, v in collator.skipped.items() if not k.startswith(("policy_", "straddle", "unrendered"))}
    assert left_out == EXPECTED[name]
    assert rows + sum(left_out.values()) == errors
    assert rows > 5
