"""Do hints at the failed message lower the rate of repeated failing calls more than learning from the recovery?

    PYTHONPATH=. python benchmarks/quality/hints.py WORK [--worlds tools logs] [--arms hint sft_after ...]
        [--seeds 1 2 3] [--rates .0003 .001] [--logs FILES --model MODEL] [--parallel 2] [--minutes 9] [--tiny]

`tools`: the generated world of `tool_world.py`, and a student from scratch, or `--model`. It learns logs of an agent
with bad habits (`nothing`); every arm goes on from there, on the same failed calls for as many steps, and then
answers at states of new tasks: of tools whose failures the arms saw, of tools with the same faults that they did not,
and of tools that never failed. The environment executes what it writes. Arms are compared at the rate that does best on
one half of the states; the other half is reported.

`logs`: a real model on real logs (`--logs`), in folds of whole tasks, so that every failed call is held out once. It
imitates the failed messages of the other folds first (`nothing`), then learns by the arms.

Every arm is a `limbeck train` run, every figure comes out of `limbeck eval --traces --generate`. A finished run is a
line of `WORK/hints.jsonl` and is not repeated; what does not begin within `--minutes` waits for the next call.
`hints_tables.py` draws the results.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import command, origin
from benchmarks.quality import tool_world as world
from benchmarks.quality.suite import latest, limbeck, train
from limbeck.traces.calls import parse_calls
from limbeck.traces.files import IngestOptions, IngestStats, find_files, ingest
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace
from limbeck.traces.sites import SiteFinder, find_recoveries

FAILED_CALLS = {"policy": False, "preference": False}
RECOVERIES = {"hint": False, "preference": False}

ARMS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "hint": {"channels": FAILED_CALLS},
    "sft_after": {"channels": RECOVERIES, "failed_weight": 0.0},
    "sft_moved": {"file": "moved", "channels": RECOVERIES},
    "hint_sft_after": {"channels": {"preference": False}, "failed_weight": 0.0},
    "preference": {"file": "pairs", "channels": {"policy": False, "hint": False}},
    "hint_raw": {"channels": FAILED_CALLS, "hints": ["raw"]},
    "hint_forward": {"channels": FAILED_CALLS, "loss": {"hint": {"divergence": "forward"}}},
}
"""Settings of `traces` by arm, with the file that it reads (default `sites`) and its `loss`; None: the student itself.

`hint`: the library's hint channel at the failed message, reverse KL to the frozen start that reads the hint.
`sft_after`: likelihood of the recovery where it stands, behind the error. `sft_moved`: of the recovery in the place of
the failed message. `hint_sft_after`: both in one step. `preference`: DPO, the recovery above the failed message.
`hint_raw`: the environment's own words as the hint. `hint_forward`: forward KL."""


@dataclass(frozen=True)
class Sizes:
    """Of one world: the student, what it reads, and for how long."""

    hidden: int
    layers: int
    logs: int
    sites: int
    held_out: int
    base_steps: int
    base_batch: int
    base_rate: float
    steps: int
    batch: int
    context: int
    answer: int


SIZES = {
    "tools": Sizes(256, 4, 8000, 96, 180, 1200, 32, 1e-3, 40, 16, 512, 64),
    "tools_tiny": Sizes(32, 1, 60, 6, 12, 3, 4, 1e-3, 2, 3, 512, 16),
    "logs": Sizes(0, 0, 0, 0, 0, 60, 8, 5e-5, 30, 8, 2048, 320),
    "logs_tiny": Sizes(0, 0, 0, 0, 0, 1, 2, 3e-5, 1, 2, 512, 8),
}
CHATML = "package:limbeck/recipes/data/chatml_tools.jinja"
RATES = {"tools": (1e-4, 3e-4, 1e-3), "logs": (2e-5,)}


# -- what arms read ----------------------------------------------------------------------------------------------------


def site_examples(trace: Trace) -> list[Trace]:
    """One trace per failed call that was put right: it ends with the recovery, and of its messages only the failed one
    and the recovery are learnt from."""
    found, recoveries = [], find_recoveries(trace)
    for site in SiteFinder().find(trace):
        end = recoveries.get(site.cause)
        if end is None:
            continue
        messages = [_weighed(m, i in (site.target, end)) for i, m in enumerate(trace.messages[: end + 1])]
        found.append(_part(trace, site.target, messages))
    return found


def failed_message(example: Trace) -> int:
    """The first message that such a trace learns from."""
    return next(i for i, m in enumerate(example.messages) if m.role == "assistant" and m.weight)


def moved(example: Trace) -> Trace:
    """The recovery of such a trace in the place of its failed message."""
    target = failed_message(example)
    return example.model_copy(update={"messages": [*example.messages[:target], example.messages[-1]]})


def imitated(example: Trace) -> Trace:
    """Such a trace up to its failed message, all messages alike."""
    messages = [_weighed(m, True) for m in example.messages[: failed_message(example) + 1]]
    return example.model_copy(update={"messages": messages})


def paired(example: Trace) -> Trace:
    """Such a trace with the pair of its recovery and its failed message."""
    target = failed_message(example)
    chosen, rejected = (example.messages[i].model_copy(update={"weight": 1.0}) for i in (-1, target))
    pair = PreferencePair(chosen=chosen, rejected=rejected, trace_id=example.id, message_index=target)
    return example.model_copy(update={"preference_pairs": [pair]})


def _weighed(message: Message, learnt: bool) -> Message:
    return message if message.role != "assistant" else message.model_copy(update={"weight": float(learnt)})


def _part(trace: Trace, number: int, messages: list[Message]) -> Trace:
    update = {"id": f"{trace.id}#{number}", "messages": messages, "final_reward": 1.0, "group_id": None,
              "preference_pairs": [], "context_until": 0}  # fmt: skip
    return trace.model_copy(update=update)


def write_examples(folder: Path, examples: Sequence[Trace]) -> None:
    world.write(folder / "sites.jsonl", list(examples))
    world.write(folder / "moved.jsonl", [moved(example) for example in examples])
    world.write(folder / "pairs.jsonl", [paired(example) for example in examples])


def make_tools(folder: Path, seed: int, sizes: Sizes) -> None:
    """Logs, examples and held-out states of the generated world."""
    dice = random.Random(seed)
    every = world.SEEN + world.UNSEEN + world.NEUTRAL
    held = [
        trace
        for name, tools in (("seen", world.SEEN), ("unseen", world.UNSEEN))
        for trace in world.traces(tools, sizes.held_out, world.ALWAYS_WRONG, dice, set(), name=name)
    ]
    kept = world.kept_traces(sizes.held_out // 2, dice, set())
    used = world.asked([*held, *kept])
    failed = world.traces(world.SEEN, sizes.sites, world.ALWAYS_WRONG, dice, used, name="site")
    logs = world.traces(every, sizes.logs, world.Habits(), dice, used | world.asked(failed), name="log")
    logs += world.echoes(sizes.logs // 3, dice)
    world.train_tokenizer(logs[:2000], folder / "tokenizer")
    (folder / "template.jinja").write_text(world.TEMPLATE)
    world.write(folder / "base.jsonl", [trace.model_copy(update={"tools": []}) for trace in logs])
    world.write(folder / "held_out.jsonl", [*held, *kept])
    world.write(folder / "hinted.jsonl", [world.hinted(trace) for trace in held])
    write_examples(folder, [example for trace in failed for example in site_examples(trace)])


def make_logs(folder: Path, fold: int, folds: int, files: Sequence[Path], most: int | None) -> None:
    """Examples of all folds but one, and the traces of that one. Traces of one task are never parted."""
    traces = [t for t in ingest(files, IngestOptions(), IngestStats()) if SiteFinder().find(t)]
    names = sorted({_task(trace) for trace in traces})
    random.Random(0).shuffle(names)
    out = set(names[fold % folds :: folds])
    held = _shortest([trace for trace in traces if _task(trace) in out], most)
    examples = _shortest([e for trace in traces if _task(trace) not in out for e in site_examples(trace)], most)
    world.write(folder / "base.jsonl", [imitated(example) for example in examples])
    world.write(folder / "held_out.jsonl", held)
    write_examples(folder, examples)


def _shortest(traces: list[Trace], most: int | None) -> list[Trace]:
    return traces if most is None else sorted(traces, key=lambda trace: len(trace.to_json()))[:most]


def _task(trace: Trace) -> str:
    """Traces of one task have one group, or begin with the same user's words."""
    first = next((m.content for m in trace.messages if m.role == "user"), trace.id)
    return trace.group_id or first


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """One world of one seed (or fold), in a folder of its own."""

    name: str
    seed: int
    folder: Path
    sizes: Sizes
    model: str | None = None
    named: str | None = None
    """The model's name, as tables show it."""

    @property
    def template(self) -> str:
        return str(self.folder / "template.jinja") if self.name == "tools" else CHATML

    def student(self, rate: float, steps: int, batch: int, start: str | None) -> dict[str, Any]:
        """The student: `start`, or random weights of the world's size, under a cosine schedule."""
        sizes, warmup = self.sizes, max(steps // 10, 1)
        policy: dict[str, Any] = {
            "max_total_sequence_length": sizes.context,
            "train_micro_batch_size": batch if self.name == "tools" else 4,
            "precision": "float32" if self.name == "tools" else "auto",
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW", "kwargs": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.01},
            },
            "scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": warmup}},
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": max(steps - warmup, 1)}},
                {"milestones": [warmup]},
            ],
        }  # fmt: skip
        tokenizer = {"name": self.model or str(self.folder / "tokenizer"), "chat_template": self.template}
        if start is not None:
            return policy | {"model_name": start, "tokenizer": tokenizer}
        return policy | {
            "init": "random",
            "tokenizer": tokenizer,
            "model_overrides": {
                "model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": sizes.context,
                "hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden, "num_hidden_layers": sizes.layers,
                "num_attention_heads": 4, "num_key_value_heads": 4,
            },
        }  # fmt: skip

    def run(
        self, name: str, traces: dict[str, Any], loss: dict[str, Any], start: str | None, rate: float, steps: int,
        batch: int,
    ) -> Path:  # fmt: skip
        """Trains one student; its weights."""
        settings = {
            "algorithm": "trace_distillation",
            "policy": self.student(rate, steps, batch, start),
            "traces": {"redact": False, "policy_cut": "left", "max_seq_length": self.sizes.context,
                       "max_pair_seq_length": self.sizes.context, **traces},
            "loss": {"policy": {"mode": "reward_weighted"}, **loss},
            "distillation": {
                "num_prompts_per_step": batch, "max_num_steps": steps, "max_num_epochs": 1000, "seed": self.seed,
                "val_at_start": False, "val_at_end": False, "monitor": {"period": 0, "generate": 0},
            },
            "checkpointing": {"keep_top_k": 1},
            "logger": {"log_dir": str(self.folder / name), "tensorboard_enabled": False},
        }  # fmt: skip
        train(settings, self.folder / name)
        return latest(self.folder / name)

    def base(self) -> str:
        """The student that imitates the logs, trained once."""
        done = self.folder / "base" / "done"
        if not done.exists():
            sizes, file = self.sizes, str(self.folder / "base.jsonl")
            shutil.rmtree(self.folder / "base", ignore_errors=True)
            self.run("base", {"train": file, "channels": RECOVERIES}, {}, self.model, sizes.base_rate,
                     sizes.base_steps, sizes.base_batch)  # fmt: skip
            done.touch()
        return str(latest(self.folder / "base"))

    def arm(self, arm: str, rate: float) -> dict[str, Any]:
        """Measures of one arm; its weights are not kept."""
        how = ARMS[arm]
        if how is None:
            found = self.measure(self.base(), "held_out", self.folder / "base")
            if self.name == "tools":
                found |= _named("hinted_", self.measure(self.base(), "hinted", self.folder / "base"))
            else:
                assert self.model is not None, "logs are for a real model"
                found |= _named("as_it_came_", self.measure(self.model, "held_out", self.folder / "base"))
            return found
        name = f"{arm}_{rate:g}"
        shutil.rmtree(self.folder / name, ignore_errors=True)
        traces = {key: value for key, value in how.items() if key not in ("file", "loss")}
        traces["train"] = str(self.folder / f"{how.get('file', 'sites')}.jsonl")
        weights = self.run(name, traces, how.get("loss", {}), self.base(), rate, self.sizes.steps, self.sizes.batch)
        found = self.measure(str(weights), "held_out", self.folder / name)
        shutil.rmtree(self.folder / name / "checkpoints")
        return found

    def measure(self, model: str, file: str, folder: Path) -> dict[str, Any]:
        """What a model writes at the failed states of a file."""
        sizes = self.sizes
        out = limbeck(
            "eval", model, "--traces", str(self.folder / f"{file}.jsonl"), "--generate", "100000", "--json",
            "--max-new-tokens", str(sizes.answer), "--context", str(sizes.context - sizes.answer), "--precision",
            "float32", "--chat-template", self.template, log=folder / "log",
        )  # fmt: skip
        (figures,) = json.loads(out)["traces"].values()
        answers = figures["behaviour"]["answers"]
        if self.name == "tools":
            lines = (self.folder / f"{file}.jsonl").read_text().splitlines()
            traces = {trace.id: trace for trace in map(Trace.model_validate_json, lines)}
            answers = [answer | judged(answer, traces[answer["trace"]]) for answer in answers]
        measures = grouped(answers, group_of_task if self.name == "tools" else group_of_log)
        return measures | {key: figures[key] for key in ("failed_logprob", "hinted_logprob", "better_logprob")}


def form(call: ToolCall) -> tuple[Any, ...]:
    """A call without its values: name, types of arguments, and what the generated world says to it."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    types = sorted((key, type(value).__name__) for key, value in arguments.items())
    return call.name, types, world.judge(call) is None


def judged(answer: dict[str, Any], trace: Trace) -> dict[str, bool]:
    """What the generated world makes of an answer's first call: refused; the same mistake as the recorded one, whatever
    values it has; of the form of the call that put things right."""
    calls, recovery = parse_calls(answer["text"])[:1], find_recoveries(trace).get(answer["message"] + 1)
    wrong = form(trace.messages[answer["message"]].tool_calls[0])
    right = None if recovery is None else form(trace.messages[recovery].tool_calls[0])
    own = [form(call) for call in calls]
    return {"failing": own[:1] != [] and not own[0][2], "same_form": own == [wrong], "right_form": own == [right]}


def _named(prefix: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in figures.items()}


def group_of_task(answer: dict[str, Any]) -> str:
    """Which states an answer belongs to: `seen_first_test` and the like; a state behind a failed call is `again`."""
    group, number = answer["trace"].removeprefix("hinted-").split("-")
    if group == "kept":
        return "kept"
    when = "again" if answer["message"] - answer["trace"].startswith("hinted-") > 1 else "first"
    return f"{group}_{when}_{'test' if int(number) // len(world.SEEN) % 2 else 'dev'}"


def group_of_log(answer: dict[str, Any]) -> str:
    return "all"


def grouped(answers: Iterable[dict[str, Any]], group: Any) -> dict[str, Any]:
    """By group: number of states, and how many answers hold a call that parses, make the failed call again, make the
    calls that put things right (`recoverable`: states of which that is known), and what `judged` says."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(int))
    for answer in answers:
        own = found[group(answer)]
        own["states"] += 1
        own["calls"] += answer["calls"]
        own["repeated"] += answer["repeated"]
        own["recoverable"] += answer["recovered"] is not None
        own["right"] += bool(answer["recovered"])
        for name in ("failing", "same_form", "right_form"):
            own[name] += answer.get(name, False)
    return {name: dict(own) for name, own in found.items()}


class Rows:
    """Finished runs, one line each, and the clock of this call."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.end, self.failed = path, time.time() + 60 * minutes, 0
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.have = {(row["experiment"], row["arm"], row["rate"], row["seed"]) for row in rows}

    def add(self, place: World, arm: str, rate: float) -> None:
        """One run, unless it is there already, or too late to begin; one that fails costs its own row alone."""
        if (place.name, arm, rate, place.seed) in self.have or time.time() > self.end:
            return
        begun = time.time()
        try:
            measures = place.arm(arm, rate)
        except RuntimeError as error:
            self.failed += 1
            print(place.name, arm, rate, place.seed, error, flush=True)
            return
        row = {"experiment": place.name, "arm": arm, "rate": rate, "seed": place.seed, "measures": measures,
               "model": place.named, "sizes": asdict(place.sizes), "seconds": round(time.time() - begun), **origin(),
               "command": command()}  # fmt: skip
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(place.name, arm, f"{rate:g}", place.seed, summary(measures), f"({row['seconds']} s)", flush=True)


def summary(measures: dict[str, Any]) -> str:
    """Mistakes made again and right calls of a run's groups, for the eye."""
    shown = []
    for name, own in measures.items():
        if isinstance(own, dict) and not name.endswith("dev"):
            shown.append(f"{name} {own['same_form']}+{own['right_form']}/{own['states']}")
    return ", ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--worlds", nargs="+", choices=("tools", "logs"), default=["tools"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of `logs`: which folds, of three")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of the arms (default: by world)")
    parser.add_argument("--logs", nargs="+", default=[], help="agent logs, files or globs, for `logs`")
    parser.add_argument("--model", help="model folder or GGUF file; `tools` goes without")
    parser.add_argument("--name", help="the model's name, as tables show it (default: that of its folder or file)")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="one seed, one rate, smallest sizes: does it run?")
    parser.add_argument("--sizes", nargs="+", default=[], metavar="NAME=N", help="fields of `Sizes` to change")
    args = parser.parse_args()
    if "logs" in args.worlds and not (args.logs and args.model):
        parser.error("the world `logs` needs --logs and --model")
    args.work.mkdir(parents=True, exist_ok=True)
    seeds, tiny = args.seeds[:1] if args.tiny else args.seeds, "_tiny" if args.tiny else ""
    pairs, places = [given.split("=") for given in args.sizes], []
    for name in args.worlds:
        sizes = replace(SIZES[name + tiny], **{key: yaml.safe_load(value) for key, value in pairs})
        named = args.name or (args.model and Path(args.model).stem)
        places += [World(name, seed, args.work / f"{name}_{seed}", sizes, args.model, named) for seed in seeds]
    rows = Rows(args.work / "hints.jsonl", args.minutes)

    def begin(place: World) -> None:
        if not (place.folder / "sites.jsonl").exists():
            if place.name == "tools":
                make_tools(place.folder, place.seed, place.sizes)
            else:
                make_logs(place.folder, place.seed, 3, find_files(args.logs), 2 if args.tiny else None)
        try:
            place.base()
        except RuntimeError as error:
            rows.failed += 1
            print(place.name, "base", place.seed, error, flush=True)

    def one(job: tuple[World, str, float]) -> None:
        rows.add(*job)

    wanted = []
    for arm in args.arms:
        for place in places:
            rates = args.rates or RATES[place.name]
            rates = [0.0] if ARMS[arm] is None else rates[:1] if args.tiny else rates
            wanted += [(place, arm, rate) for rate in rates]
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(begin, places))
        list(pool.map(one, [job for job in wanted if (job[0].folder / "base" / "done").exists()]))
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "on the CPU", f"{rows.failed} failed")
    sys.exit(1 if rows.failed else 0)


if __name__ == "__main__":
    main()
