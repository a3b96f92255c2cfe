"""Text that the teacher wrote: which loss teaches most from it, and does a task's score say so?

    PYTHONPATH=. python benchmarks/quality/written.py WORK --pair calls --student FOLDER --teacher MODEL --bfcl FOLDER
        [--arms truth ce soft_1 none_.3 ...] [--seeds 1 2 3] [--lr 1e-4 3e-4] [--parallel 5] [--minutes 9]
    PYTHONPATH=. python benchmarks/quality/written.py WORK --pair gsm8k --student ... --teacher ... --questions FILE

Pair `calls`: function calls of the Berkeley leaderboard (FOLDER is `bfcl_eval/data` of PyPI's `bfcl-eval`). The teacher
answers the prompts of live_simple, live_multiple and parallel with `limbeck write`, and the verifier `function_call`
keeps what is right. Reported are simple_python and multiple; a prompt with a function that occurs there
is left out. Pair `gsm8k`: the teacher answers questions of a JSON-lines file, and everything it ends is kept.

Every arm is a `limbeck train` run from the same weights on the same records, in the same number of steps; the teacher's
hidden states are cached once, so that the loss is that of a live teacher. Learning rates are chosen on prompts that
nobody reports on, for cross-entropy and for the default apart; other arms take the rate of the one they are like.
`truth` reads the leaderboard's own answers instead. `half` continues the default's student with half of the records
sampled; `trl_gold_ce` is TRL's own trainer on the same conversations.

A finished run is a line of `WORK/written.jsonl` with the score of every problem, and is not repeated. `--table` prints
the rows of such files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import trl_gold
from benchmarks.quality.real import warmup
from benchmarks.quality.suite import Key, Results, Row, latest, limbeck, run_module, schedule, train, write_run
from limbeck.utils.paired import paired

TRAIN, REPORTED = ("live_simple", "live_multiple", "parallel"), ("simple_python", "multiple")
MOST_CHARACTERS = 5000
"""Of the functions of a prompt."""
DEV = 120
CONTEXT = {"calls": 2048, "gsm8k": 640}
NEW_TOKENS = {"calls": 192, "gsm8k": 256}
LOSSES: dict[str, dict[str, Any]] = {
    "truth": {"kl_loss_weight": 0},
    "ce": {"kl_loss_weight": 0},
    "soft_1": {"ce_loss_scale": 1.0, "gate": "soft"},
    "soft_.3": {"ce_loss_scale": 0.3, "gate": "soft"},
    "none_1": {"ce_loss_scale": 1.0, "gate": "none"},
    "none_.3": {"ce_loss_scale": 0.3, "gate": "none"},
    "none_0": {"ce_loss_scale": 0.0, "gate": "none"},
}
"""Arms by weight of cross-entropy and gate; `soft_1` is the default of a pretrained student."""
DEFAULT = "soft_1"
TOOLS_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are a helpful AI assistant.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- '\\n\\nFunctions that you may call, one JSON schema a line:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor %}
{{- '\\n</tools>\\nAnswer with the calls alone: <tool_call>[{"name": ..., "arguments": {...}}]</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}
{{- '<tool_call>[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""For a ChatML student whose own template knows no tools; its markup is another than Qwen's."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


# -- data --------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def json_schema(value: Any) -> Any:
    """A function's description with the names of types that JSON schemas have."""
    if isinstance(value, list):
        return [json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    out = {key: json_schema(one) for key, one in value.items()}
    if isinstance(out.get("type"), str):
        out["type"] = _TYPES.get(out["type"], out["type"])
    return out


def first_accepted(value: Any) -> Any:
    """One value of those that a ground truth accepts; objects list them for each key."""
    if isinstance(value, dict):
        named = {key: values[0] if isinstance(values, list) and values else values for key, values in value.items()}
        return {key: first_accepted(one) for key, one in named.items() if one != ""}
    return [first_accepted(one) for one in value] if isinstance(value, list) else value


def bfcl_prompts(data: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts with tools and ground truth, as `limbeck write` and tasks read them."""
    rows = []
    for kind in kinds:
        truths = {
            row["id"]: row["ground_truth"] for row in read_lines(data / "possible_answer" / f"BFCL_v4_{kind}.json")
        }
        for row in read_lines(data / f"BFCL_v4_{kind}.json"):
            tools = [{"type": "function", "function": json_schema(function)} for function in row["function"]]
            if len(json.dumps(tools)) <= MOST_CHARACTERS and row["id"] in truths:
                rows.append({"messages": row["question"][0], "tools": tools, "ground_truth": truths[row["id"]]})
    return rows


def right_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt with the calls of its ground truth as an answer."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": first_accepted(arguments)}}
        for call in row["ground_truth"]
        for name, arguments in call.items()
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [*row["messages"], answer], "tools": row["tools"]}


def names(row: Mapping[str, Any]) -> set[str]:
    """Names of a prompt's functions."""
    return {tool["function"]["name"] for tool in row["tools"]}


def write_calls(data: Path, work: Path, most: int | None) -> None:
    """prompts, truth, dev and test of the pair `calls`."""
    test = bfcl_prompts(data, REPORTED)
    reported = set[str]().union(*map(names, test))
    rest = [row for row in bfcl_prompts(data, TRAIN) if not names(row) & reported]
    random.Random(0).shuffle(rest)
    if most:
        test, rest = test[:most], rest[: 2 * most]
    dev = min(DEV, len(rest) // 2)
    write_lines(work / "test.jsonl", test)
    write_lines(work / "dev.jsonl", rest[:dev])
    write_lines(work / "prompts.jsonl", rest[dev:])
    write_lines(work / "truth.jsonl", map(right_answer, rest[dev:]))


def write_questions(questions: Path, work: Path, most: int | None) -> None:
    """prompts and dev of the pair `gsm8k`; dev is what is reported, for rates are another's."""
    rows = [{"messages": [{"role": "user", "content": row["question"]}]} for row in read_lines(questions)]
    random.Random(0).shuffle(rows)
    rows = rows[: most or 2200]
    dev = max(2, len(rows) // 11)
    write_lines(work / "dev.jsonl", rows[:dev])
    write_lines(work / "prompts.jsonl", rows[dev:])


# -- runs --------------------------------------------------------------------------------------------------------------


def optimizer(lr: float) -> dict[str, Any]:
    """AdamW as all arms have it."""
    return {"name": "torch.optim.AdamW", "kwargs": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}}


class Written:
    """One pair: its data, what the teacher wrote, and runs on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.pair, self.work = args, str(args.pair), args.work / args.pair
        self.tiny = bool(args.tiny)
        self.work.mkdir(parents=True, exist_ok=True)
        if not (self.work / "prompts.jsonl").exists():
            if self.pair == "calls":
                write_calls(args.bfcl, self.work, 6 if self.tiny else None)
            else:
                write_questions(args.questions, self.work, 16 if self.tiny else None)
        self.student = self._student()

    def _student(self) -> Path:
        """The student's folder, where its template must know tools a copy with one that does."""
        source = Path(self.args.student)
        if self.pair != "calls":
            return source
        folder = self.work / "student"
        if not folder.exists():
            shutil.copytree(source, folder)
            (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE, encoding="utf-8")
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config.pop("chat_template", None)
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def write(self) -> dict[str, Any]:
        """Let the teacher write, and cache its hidden states; figures of `limbeck write`."""
        said: dict[str, Any] = {}
        judged = ["--verify", "function_call"] if self.pair == "calls" else ["--keep", "all"]
        new = "16" if self.tiny else str(NEW_TOKENS[self.pair])
        for part, answers in (("prompts", self.args.answers), ("dev", 1)):
            out = self.work / f"written_{part}.jsonl"
            if self.tiny:
                judged = ["--keep", "all"]
            start = time.time()
            temperature = "0.7" if answers > 1 or self.pair != "calls" else "0"
            said[part] = json.loads(
                limbeck("write", str(self.work / f"{part}.jsonl"), "-o", str(out), "--teacher", str(self.args.teacher),
                        "-n", str(answers), "--temperature", temperature, "--max-new-tokens", new, "--json", *judged,
                        log=self.work / "write.log")
            ) | {"seconds": round(time.time() - start, 1)}  # fmt: skip
            # cut answers are no text to learn to end from
            write_lines(out, [row for row in read_lines(out) if self.tiny or row["provenance"]["ended"]])
        if not (self.work / "cache.done").exists():
            settings = self.settings("none_1", 1, 1e-4, self.work / "cache_run")
            limbeck(
                "cache", write_run(settings, self.work / "cache_run"), "--json", log=self.work / "cache_run" / "log"
            )
            (self.work / "cache.done").touch()
        return said

    def steps(self) -> int:
        """Steps of every arm: so many passes over what was written."""
        records = len(read_lines(self.work / "written_prompts.jsonl"))
        return 2 if self.tiny else math.ceil(records * self.args.epochs / self.args.batch)

    def batches(self) -> dict[str, Any]:
        """Micro-batches, where several runs share a GPU and none may take all of its memory."""
        tokens = self.args.tokens
        return {"sequence_packing": {"enabled": True, "train_mb_tokens": tokens}} if tokens else {}

    def tasks(self) -> list[dict[str, Any]]:
        """Tasks of the pair, all of their problems."""
        if self.pair != "calls":
            return []
        common = {"verifier": "function_call", "max_new_tokens": 8 if self.tiny else NEW_TOKENS["calls"]}
        return [
            {"name": part, "data": str(path), "problems": len(read_lines(path)), **common}
            for part in ("test", "dev")
            for path in [self.work / f"{part}.jsonl"]
        ]

    def settings(self, arm: str, seed: int, lr: float, folder: Path) -> dict[str, Any]:
        """The run file of an arm."""
        text = "truth" if arm == "truth" else "written_prompts"
        context, steps = CONTEXT[self.pair], self.steps()
        run: dict[str, Any] = {
            "policy": {"model_name": str(self.student), "max_total_sequence_length": context, "max_grad_norm": 1.0,
                       "optimizer": optimizer(lr), "scheduler": schedule(steps, warmup(steps)), **self.batches()},
            "data": {"mode": "chat", "train": str(self.work / f"{text}.jsonl"),
                     "validation": str(self.work / "written_dev.jsonl")},
            "loss_fn": dict(LOSSES.get(arm, {})),
            "distillation": {"num_prompts_per_step": self.args.batch, "max_num_steps": steps, "max_num_epochs": 1000,
                             "seed": seed, "val_at_start": False, "tasks": self.tasks(), "samples": {"number": 0}},
            "checkpointing": {"keep_top_k": 1},
            "logger": {"log_dir": str(folder), "tensorboard_enabled": False},
        }  # fmt: skip
        if LOSSES.get(arm, {}).get("kl_loss_weight") != 0:
            cache = {"cache": str(self.work / "cache"), "cache_kind": "hidden"}
            run["teacher"] = {
                "model_name": str(self.args.teacher),
                "max_total_sequence_length": context,
                **(self.batches() if arm == "half" else cache),
            }
        if arm == "half":
            third = max(1, steps // 3)
            run["algorithm"] = "on_policy_distillation"
            run["policy"]["model_name"] = str(latest(self.work / f"{self.pair}_{DEFAULT}_{seed}"))
            run["policy"]["tokenizer"] = {"name": str(self.student)}
            run["policy"]["scheduler"] = schedule(third, warmup(third))
            run["distillation"] |= {"max_num_steps": third}
            run["on_policy"] = {"fraction": 0.5, "top_p": 0.95, "max_new_tokens": NEW_TOKENS[self.pair],
                                "loss_fn": {"direction": "forward"}}  # fmt: skip
        return run

    def run(self, arm: str, seed: int, lr: float) -> Row:
        """Train one student and read what its run measured."""
        folder = (
            self.work / f"{self.pair}_{arm}_{seed}_{lr:g}" if seed == 0 else self.work / f"{self.pair}_{arm}_{seed}"
        )
        shutil.rmtree(folder, ignore_errors=True)
        row: Row = {"pair": self.pair, "arm": arm, "seed": seed, "learning_rate": lr, "steps": self.steps()}
        settings = self.settings(arm, seed, lr, folder)
        start = time.time()
        if arm in trl_gold.ARMS:
            run_module(trl_gold.__name__, write_run(settings, folder), arm, log=folder / "log")
            row |= {"seconds": round(time.time() - start)} | self.evaluated(trl_gold.student_folder(folder))
        else:
            row |= {"seconds": train(settings, folder)} | self.validated(folder)
        if arm != DEFAULT or seed == 0:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return row

    def validated(self, folder: Path) -> Row:
        """Bits per byte and scores of a run's last validation."""
        bits = [row["val/bpb"] for row in read_lines(folder / "metrics.jsonl") if "val/bpb" in row]
        path = folder / "tasks.jsonl"
        last = {row["task"]: row for row in (read_lines(path) if path.exists() else [])}
        return _figures(
            bits[-1] if bits else math.nan, {name: (row["problems"], row["scores"]) for name, row in last.items()}
        )

    def evaluated(self, model: Path) -> Row:
        """The same of a model folder, by the validation before a run's first step."""
        folder = self.work / f"eval_{re.sub(r'[^A-Za-z0-9]+', '_', str(model))[-60:]}"
        shutil.rmtree(folder, ignore_errors=True)
        run = self.settings("ce", 0, 1e-6, folder)
        run["policy"] |= {"model_name": str(model), "tokenizer": {"name": self._reads_as(model)}}
        # without the moments of Adam a teacher fits beside other runs
        run["policy"] |= {"scheduler": None, "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-6}}}
        run["distillation"] |= {"max_num_steps": 1, "val_at_start": True, "val_at_end": False}
        train(run, folder)
        found = self.validated(folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return found

    def _reads_as(self, model: Path) -> str:
        return str(model) if str(model) == str(self.args.teacher) else str(self.student)


def _figures(bits: float, tasks: Mapping[str, tuple[list[int], list[float]]]) -> Row:
    answers = {name: {"exact": statistics.mean(scores)} for name, (_, scores) in tasks.items()}
    scores = {name: dict(zip(map(str, problems), scores, strict=True)) for name, (problems, scores) in tasks.items()}
    return {"measures": {"written": {"bpb": bits}}, "answers": answers, "scores": scores}


def best_rate(rows: Iterable[Row], arm: str) -> float:
    """The rate of an arm's sweep with the best dev score, or, without a task, with the fewest bits."""

    def order(row: Row) -> tuple[float, float]:
        return row["answers"].get("dev", {}).get("exact", 0.0), -row["measures"]["written"]["bpb"]

    swept = [row for row in rows if row["seed"] == 0 and row["arm"].split(":")[0] == arm]
    return float(max(swept, key=order)["learning_rate"])


# -- tables ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], pair: str) -> str:
    """Markdown: score and bits per byte of each arm, and the paired difference to cross-entropy."""
    mine = [row for row in rows if row["pair"] == pair]
    arms = list(dict.fromkeys(row["arm"] for row in mine if row["seed"] > 0 or row["arm"] in ("student", "teacher")))
    scored = any(row["scores"] for row in mine)
    head = ["arm", *(["right"] if scored else []), "bits per byte", "seeds"] + (["to cross-entropy"] if scored else [])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    base = _by_problem([row for row in mine if row["arm"] == "ce" and row["seed"] > 0])
    for arm in arms:
        own = [row for row in mine if row["arm"] == arm and (row["seed"] > 0 or arm in ("student", "teacher"))]
        bits = [row["measures"]["written"]["bpb"] for row in own]
        cells = [f"`{arm}`"]
        if scored:
            cells.append(_spread([100 * row["answers"]["test"]["exact"] for row in own], 1) + "%")
        cells += [_spread(bits, 4), str(len(own))]
        if scored and base:
            gain = paired(base, _by_problem(own))
            assert gain is not None
            cells.append(f"{100 * gain['difference']:+.1f} ± {100 * gain['standard_error']:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_problem(rows: Sequence[Row]) -> dict[int, float]:
    """Mean score of every problem over the seeds."""
    problems = rows[0]["scores"].get("test", {}) if rows else {}
    return {int(one): statistics.mean(row["scores"]["test"][one] for row in rows) for one in problems}


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--pair", choices=CONTEXT, required=True)
    parser.add_argument("--student", type=Path)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--bfcl", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--arms", nargs="*", default=["ce", "soft_1", "none_.3", "none_1", "soft_.3", "truth"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-4, 3e-4])
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--tokens", type=int, help="of a micro-batch; else each run takes what it finds free")
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="try the machinery: two steps, few prompts")
    parser.add_argument("--table", nargs="+", type=Path, help="print the rows of these files, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table([row for path in args.table for row in read_lines(path)], args.pair))
        return
    bench = Written(args)
    results = Results(args.work / "written.jsonl", args.minutes, parallel=args.parallel)
    figures = bench.write()
    print(json.dumps(figures), flush=True)

    def measured(pair: str, arm: str, seed: int) -> Row:
        if arm in ("student", "teacher"):
            row = {"pair": pair, "arm": arm, "seed": 0, "seconds": 0, "written": figures}
            return row | bench.evaluated(bench.student if arm == "student" else Path(args.teacher))
        if seed == 0:
            name, lr = arm.split(":")
            return bench.run(name, 0, float(lr)) | {"arm": arm}
        like = "ce" if arm in ("ce", "truth", *trl_gold.ARMS) else DEFAULT
        return bench.run(arm, seed, best_rate(results.rows(), like) / (3 if arm == "half" else 1))

    sweep: list[Key] = [(args.pair, f"{arm}:{lr:g}", 0) for arm in ("ce", DEFAULT) for lr in args.lr]
    ends: list[Key] = [(args.pair, "student", 0)] + [(args.pair, "teacher", 0)] * (args.pair == "calls")
    results.fill([*ends, *sweep], measured, lambda row: row, args.parallel)
    late = {arm for arm in args.arms if arm == "half" or arm in trl_gold.ARMS}
    for arms in ([arm for arm in args.arms if arm not in late], [arm for arm in args.arms if arm in late]):
        keys = [(args.pair, arm, seed) for seed in args.seeds for arm in arms]
        results.fill(keys, measured, lambda row: row, args.parallel)
    print(table(results.rows(), args.pair))


if __name__ == "__main__":
    main()
