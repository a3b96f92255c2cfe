"""What an engine writes per second beside the library's own samplers, and what a hand-over of weights to it costs.

    PYTHONPATH=. python benchmarks/gpu/sampling.py --parts engines [--stages own vllm server sleep] [--tiny]

Random weights of SmolLM2-135M's and Llama-3.2-1B's shape; 64, 256 and 1,024 prompts of 16 to 127 tokens, 256 new ones
each. `own` is `generate` with all prompts in one batch, and continuous batching with 256 at most in work; `vllm` is
vLLM in this process, `server` behind its server, both through the samplers that a run takes. `unseeded` leaves out the
seeds of requests. A hand-over writes the trainer's float32 weights and has the engine read them; gaps are mean
distances of its log-probabilities from the trainer's, with fresh weights, after a change, and once that is handed over.
`sleep` is the device memory that vLLM gives back while it sleeps.

A stage is a process of its own. All start at once, since most of that is importing and compiling; then one at a time
measures, while the others wait. Every row is tried apart and written at once (`engine_SHAPE_STAGE_ROW`); what fails is
a row with its text, and logs lie in `--logs`. No stage takes longer than `--limit`, and all end after `--seconds`.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.common import GIB, random_weights_on_the_device, save_row
from benchmarks.gpu.first_run import SHAPES
from benchmarks.gpu.step import ROPE
from limbeck.algorithms.engine import EngineConfig, EngineSampler
from limbeck.algorithms.served_sampler import ServedSampler
from limbeck.algorithms.vllm_sampler import VllmSampler
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.models.continuous import ContinuousSampler
from limbeck.models.generate import LocalSampler, Sample, Sampler, SamplingConfig
from limbeck.models.policy import Policy
from limbeck.tokens import load_tokenizer

STAGES = ("vllm", "sleep", "server", "own")
MODELS = {"135m": SHAPES["smollm2"], "1b": SHAPES["llama3_2"]}
# vLLM's attention has no smaller heads on a CPU
TINY = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
PROMPTS = {"135m": (64, 256, 1024), "1b": (64, 1024)}
IN_WORK = 256
"""Answers that continuous batching has in work at most."""
CACHE = 14 << 30
"""Bytes of vLLM's cache: all 1,024 answers at once."""
SCORED = 64
"""Answers that a gap is taken over."""
END = "<eos>"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""vLLM without a network and without FlashInfer."""


def tokenizer(size: int, folder: str) -> Any:
    """Bytes, an end, and names for all other ids: a server wants a text for everything that is sampled."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    names += [f"<{number}>" for number in range(len(names), size)]
    made = Tokenizer(BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder)
    return load_tokenizer(folder)


class Stage:
    """One process: a student of one shape, and what is measured with it."""

    def __init__(self, args: argparse.Namespace, kind: str, shape: str) -> None:
        self.args, self.kind, self.shape = args, kind, shape
        self.new = 8 if args.tiny else 256
        self.numbers = (2, 4) if args.tiny else PROMPTS[shape]
        self.folder = tempfile.mkdtemp(prefix="limbeck-engine-")
        own = {**MODELS[shape], **(TINY if args.tiny else {"rope_parameters": ROPE})}
        cuda = torch.cuda.is_available()
        # a run's student has float32 parameters; `own` is measured as in the rows `sampling_*`
        narrow = {"param_dtype": "bfloat16"} if cuda and kind == "own" else {}
        settings = {
            "init": "random",
            "precision": "bfloat16" if cuda else "float32",
            "model_overrides": {**own, "tie_word_embeddings": True, "max_position_embeddings": 1024},
            "logprob_batch_size": 8,
            **narrow,
        }
        made = tokenizer(own["vocab_size"], tempfile.mkdtemp(prefix="limbeck-tokenizer-"))
        self.model = Policy(settings, made, name="student", init_optimizer=False, seed=0)
        self.ends = [made.convert_tokens_to_ids(END)]
        dice = torch.Generator().manual_seed(0)
        sizes = torch.randint(16, 128, (max(self.numbers),), generator=dice).tolist()
        self.prompts = [torch.randint(300, own["vocab_size"], (size,), generator=dice) for size in sizes]
        self.sampling = SamplingConfig(max_new_tokens=self.new)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and write; an exception becomes the row."""
        try:
            found = measure()
        except Exception as error:  # the other rows are worth having
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:600]}
        print(f"ROW {self.shape} {self.kind} {name}", found, flush=True)
        save_row(f"engine_{self.shape}_{self.kind}_{name}", found, self.args.out)

    def speed(self, sampler: Sampler, number: int) -> dict[str, Any]:
        """Of continuing so many prompts."""
        _wait()
        start = time.perf_counter()
        found = sampler.sample(self.prompts[:number], seed=1)
        _wait()
        seconds = time.perf_counter() - start
        tokens = sum(len(sample.ids_T) for sample in found)
        return {
            "tokens_per_s": round(tokens / seconds, 1),
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "prompts": number,
        }

    def gap(self, samples: Sequence[Sample]) -> float:
        """Mean distance of the samples' log-probabilities from the trainer's."""
        rows = [torch.cat([self.prompts[sample.prompt], sample.ids_T]) for sample in samples]
        lengths = torch.tensor([len(row) for row in rows])
        batch: BatchedDataDict = BatchedDataDict(
            {"input_ids": pad_sequence(rows, batch_first=True), "input_lengths": lengths}
        )
        mine = self.model.get_logprobs(batch)["logprobs"].cpu()
        gaps = [
            (own[length - len(sample.ids_T) : length] - sample.log_probs_T).abs()
            for own, length, sample in zip(mine, lengths.tolist(), samples, strict=True)
        ]
        return round(float(torch.cat(gaps).double().mean()), 5)

    def change(self) -> None:
        """Other weights, about as far from the old ones as those are from zero."""
        with torch.no_grad():
            for weight in self.model.model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.02)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def own(self, go: Callable[[], None]) -> None:
        """`generate` and continuous batching."""
        go()
        for number in self.numbers:

            def generated(number: int = number) -> dict[str, Any]:
                config = SamplingConfig(max_new_tokens=self.new, batch_size=number)
                LocalSampler(self.model, config.model_copy(update={"max_new_tokens": 4}), self.ends).sample(
                    self.prompts[:number]
                )
                return self.speed(LocalSampler(self.model, config, self.ends), number)

            def continuous(number: int = number) -> dict[str, Any]:
                batch = min(number, IN_WORK)
                config = SamplingConfig(max_new_tokens=self.new, batch_size=batch)
                sampler = ContinuousSampler(self.model, config, self.ends)
                # graphs of every size that occurs are made in the first round
                sampler.sample(self.prompts[:batch], seed=0)
                return self.speed(sampler, number) | {"batch_size": batch, "attention": sampler.attention}

            self.row(f"continuous_{number}", continuous)
            self.row(f"generate_{number}", generated)

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of vLLM. The cache's size is given: while others start beside it, it cannot be found."""
        small = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 8}
        large = {"kv_cache_memory_bytes": CACHE}
        memory = {"gpu_memory_utilization": 0.1, "max_model_len": 512}
        return memory | (small if self.args.tiny else large) | more

    def engine(self, sampler: EngineSampler) -> None:
        """Speed, hand-over and gaps of an engine that has the weights of step 0."""
        short = self.sampling.model_copy(update={"max_new_tokens": 4})
        assert isinstance(sampler, VllmSampler | ServedSampler)
        sampler.sampling = short
        sampler.sample(self.prompts)
        sampler.sampling = self.sampling
        for number in self.numbers:
            self.row(str(number), lambda number=number: self.speed(sampler, number))

        def handed_over() -> dict[str, Any]:
            few = self.prompts[:SCORED]
            found = {"gap_fresh": self.gap(sampler.sample(few, seed=2))}
            self.change()
            found["gap_old_weights"] = self.gap(sampler.sample(few, seed=2))
            seconds = []
            for step in (1, 2):
                _wait()
                start = time.perf_counter()
                sampler.sync(self.model, step)
                _wait()
                seconds.append(round(time.perf_counter() - start, 3))
            start = time.perf_counter()
            self.model.save_checkpoint(self.folder)
            found |= {"seconds": seconds, "of_it_writing_s": round(time.perf_counter() - start, 3)}
            found["gap_handed_over"] = self.gap(sampler.sample(few, seed=2))
            return found

        self.row("hand_over", handed_over)

    def vllm(self, go: Callable[[], None]) -> None:
        """vLLM in this process."""
        config = EngineConfig.model_validate({"vllm": self.options(), "weights": self.folder})
        sampler = VllmSampler(config, self.sampling, self.ends, self.model.vocab_size)
        start = time.perf_counter()
        sampler.sync(self.model, 0)
        ready = round(time.perf_counter() - start, 1)
        go()
        self.row("start", lambda: {"seconds_beside_others": ready, "vllm": sampler._vllm.__version__})
        self.engine(sampler)

        def unseeded() -> dict[str, Any]:
            params = sampler._vllm.SamplingParams

            class Unseeded:
                SamplingParams = staticmethod(lambda **asked: params(**{**asked, "seed": None}))

            kept, sampler._vllm = sampler._vllm, Unseeded
            try:
                return self.speed(sampler, max(self.numbers))
            finally:
                sampler._vllm = kept

        self.row(f"unseeded_{max(self.numbers)}", unseeded)

    def sleep(self, go: Callable[[], None]) -> None:
        """Device memory that vLLM gives back."""
        options = self.options(enable_sleep_mode=True, enforce_eager=True)
        config = EngineConfig.model_validate({"vllm": options, "weights": self.folder})
        sampler = VllmSampler(config, self.sampling, self.ends, self.model.vocab_size)
        sampler.sync(self.model, 0)
        go()
        few = self.prompts[:SCORED]

        def slept(level: int) -> dict[str, Any]:
            found: dict[str, Any] = {"gap_fresh": self.gap(sampler.sample(few, seed=2))}
            torch.cuda.empty_cache()
            used = [_used()]
            start = time.perf_counter()
            sampler._engine.sleep(level=level)
            found["sleep_s"] = round(time.perf_counter() - start, 3)
            used.append(_used())
            start = time.perf_counter()
            sampler._engine.wake_up()
            found["wake_up_s"] = round(time.perf_counter() - start, 3)
            used.append(_used())
            self.change()
            sampler.hand_over(self.model)
            found["gap_handed_over"] = self.gap(sampler.sample(few, seed=2))
            return found | {"used_gib_awake_asleep_awake": [round(one / GIB, 2) for one in used]}

        # 1 keeps the weights in main memory, 2 forgets them: they are handed over anyway
        for level in (1, 2):
            self.row(f"level_{level}", lambda level=level: slept(level))

    def server(self, go: Callable[[], None]) -> None:
        """vLLM behind its server."""
        self.model.save_checkpoint(self.folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [text for name, value in self.options().items() for text in _flag(name, value)]
        dtype = str(self.model.precision).removeprefix("torch.")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.folder, "--dtype", dtype]
        command += ["--host", "127.0.0.1", "--port", str(port), *flags]
        most = max(self.numbers)
        own, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(own, min(hard, 65536)), hard))
        start = time.perf_counter()
        process = subprocess.Popen(command)
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None:
                    raise RuntimeError(f"vllm serve ended with {process.returncode}; see the log")
                time.sleep(0.5)
            ready = round(time.perf_counter() - start, 1)
            server = {"url": f"http://127.0.0.1:{port}/v1", "concurrency": most, "retries": 1}
            config = EngineConfig.model_validate({"server": server, "weights": self.folder})
            sampler = ServedSampler(config, self.sampling, self.ends, self.model.vocab_size)
            sampler.sync(self.model, 0)
            go()
            self.row("start", lambda: {"seconds_beside_others": ready, "concurrency": most})
            self.engine(sampler)
            sampler.close()
        finally:
            process.terminate()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def stage(args: argparse.Namespace) -> None:
    """The process of one stage; the files beside its log say when it is ready and when it may measure."""
    kind, shape = args.stage
    begin = Path(args.logs, f"{kind}_{shape}")

    def go() -> None:
        begin.with_suffix(".ready").touch()
        while not begin.with_suffix(".go").exists():
            time.sleep(0.2)

    random_weights_on_the_device()
    try:
        getattr(Stage(args, kind, shape), kind)(go)
    except BaseException as error:
        traceback.print_exc()
        begin.with_suffix(".failed").write_text(f"{type(error).__name__}: {error}"[:600])
        raise


def engines(args: argparse.Namespace) -> None:
    """Rows `engine_*`."""
    began = time.monotonic()
    args.logs.mkdir(parents=True, exist_ok=True)
    shapes = ("135m",) if args.tiny else tuple(MODELS)
    # one size is enough of what a sleeping engine gives back
    names = [(kind, shape) for shape in shapes for kind in args.stages if kind != "sleep" or shape == "135m"]
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    places = {name: args.logs / "_".join(name) for name in names}
    for name, place in places.items():
        for suffix in (".ready", ".go", ".failed"):
            place.with_suffix(suffix).unlink(missing_ok=True)
        command = [sys.executable, sys.argv[0], "--parts", "engines", "--stage", *name, "--out", str(args.out),
                   "--logs", str(args.logs), *(["--tiny"] if args.tiny else [])]  # fmt: skip
        with place.with_suffix(".log").open("wb") as log:
            # a group of its own, so that a server goes with its stage
            running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **OFFLINE}, start_new_session=True
            )

    def failed(name: tuple[str, str], text: str) -> None:
        said = places[name].with_suffix(".failed")
        text = f"{text}: {said.read_text()}" if said.exists() else text
        print("FAILED", *name, text, flush=True)
        save_row(f"engine_{name[1]}_{name[0]}_failed", {"failed": text}, args.out)

    def is_settled(name: tuple[str, str]) -> bool:
        return places[name].with_suffix(".ready").exists() or running[name].poll() is not None

    try:
        while not all(map(is_settled, names)) and time.monotonic() - began < args.start:
            time.sleep(0.2)
        print(f"after {time.monotonic() - began:.0f} s: ready", *filter(is_settled, names), flush=True)
        for name in names:
            process = running[name]
            if not places[name].with_suffix(".ready").exists():
                failed(name, "ended before it was ready" if is_settled(name) else f"not ready in {args.start:g} s")
            else:
                left = min(args.limit, args.seconds - (time.monotonic() - began))
                places[name].with_suffix(".go").touch()
                try:
                    if process.wait(max(left, 0.1)):
                        failed(name, f"ended with {process.returncode}")
                except subprocess.TimeoutExpired:
                    failed(name, f"ended by hand after {max(left, 0):.0f} s")
            _end(process)
            print(f"after {time.monotonic() - began:.0f} s:", *name, "is done", flush=True)
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
