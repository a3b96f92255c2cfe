"""What is attacked: data files, teacher caches, checkpoints, agent logs, servers' answers, run folders."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.data.sources import ReadingConfig, RecordDataset
from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page, write_comparison
from limbeck.teachers.cache import CacheReader, CacheSpec, CacheWriter
from limbeck.teachers.cache.format import load_head, save_head
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.protocol import ScoredDocument
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.traces.endpoint import EndpointConfig, EndpointProposer
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, ingest
from limbeck.utils.manifest import write_manifest
from tests.fuzz.mutate import spoilt_bytes, spoilt_json
from tests.fuzz.runner import Target
from tests.helpers.runs import checkpoint, resolved, settings, weight_bytes, write_data, write_tokenizers
from tests.helpers.servers import ScoringServer, completion, listening
from tests.helpers.tiny import teacher, tokenizer
from tests.report.runs import write_run
from tests.traces.material import EXAMPLES


def spoil_file(rng: random.Random, path: Path) -> None:
    """Change a file as its kind suggests."""
    raw = path.read_bytes()
    try:
        changed = _spoilt_text(rng, path.suffix, raw) if rng.random() < 0.7 else None
    except (ValueError, RecursionError):
        changed = None  # spoilt before
    path.write_bytes(spoilt_bytes(rng, raw) if changed is None else changed.encode("utf-8", "surrogatepass"))


def _spoilt_text(rng: random.Random, kind: str, raw: bytes) -> str | None:
    if kind == ".json":
        return spoilt_json(rng, json.loads(raw))
    if kind not in (".jsonl", ".journal") or not raw:
        return None
    lines = raw.decode().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = spoilt_json(rng, json.loads(lines[at]))
    return "\n".join(lines) + "\n"


class Arrow(Target):
    """Data files: Arrow in both forms, plain and compressed, and JSON lines."""

    name = "arrow"

    def prepare(self, folder: Path) -> None:
        texts = [f"text {i} " + "wörter " * (i % 7) for i in range(60)]
        talks = [[{"role": "user", "content": t}, {"role": "assistant", "content": "so"}] for t in texts]
        table = pa.table({"text": texts, "n": list(range(60)), "messages": talks})
        self.files: dict[str, bytes] = {}
        for codec in (None, "lz4", "zstd"):
            options = pa.ipc.IpcWriteOptions(compression=codec)
            for form, make in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
                sink = pa.BufferOutputStream()
                with make(sink, table.schema, options=options) as writer:
                    writer.write_table(table, max_chunksize=25)
                self.files[f"{form}_{codec}.arrow"] = sink.getvalue().to_pybytes()
        rows = [{"text": text, "messages": talk} for text, talk in zip(texts, talks, strict=True)]
        self.files["lines.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()

    def attack(self, rng: random.Random, folder: Path) -> None:
        name = rng.choice(list(self.files))
        path = folder / name
        path.write_bytes(self.files[name])
        spoil_file(rng, path)
        options = ReadingConfig(
            mode=rng.choice(("text", "chat")),
            on_bad_record=rng.choice(("error", "skip")),
            check_records=rng.choice(("at_start", "on_read")),
            cache_dir=str(folder / "cache"),
        )
        for record in RecordDataset(str(path), options):
            assert record["loss_multiplier"] == 0 or record["text"] or record["messages"]


class Cache(Target):
    """A teacher cache, read and continued. What it gives out must be what went in."""

    name = "cache"

    def prepare(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.specs = {
            "topk": CacheSpec("topk", vocab_size=500, teacher_fingerprint="f" * 64, k=4),
            "hidden": CacheSpec("hidden", vocab_size=500, teacher_fingerprint="f" * 64, hidden_size=6),
        }
        self.documents: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self.specs}
        self.folder = folder
        for kind, spec in self.specs.items():
            for n in (2, 9, 30, 17, 80, 3):
                rows = n - 1
                document: dict[str, Any] = {
                    "ids": rng.integers(0, 500, n),
                    "next_logprob": -rng.random(rows).astype(np.float32),
                    "logsumexp": rng.random(rows).astype(np.float32),
                }
                if kind == "topk":
                    document["topk_ids"] = np.stack([rng.permutation(500)[:4] for _ in range(rows)])
                    document["topk_logprobs"] = -rng.random((rows, 4)).astype(np.float16)
                else:
                    document["hidden"] = rng.integers(0, 0x4000, (rows, 6)).astype(np.uint16)
                self.documents[kind].append(document)
            for state in ("whole", "begun"):
                writer = CacheWriter(folder / f"{kind}_{state}", spec, shard_bytes=1500)
                for document in self.documents[kind][:5]:
                    writer.add(**document)
                writer.close(complete=state == "whole")
                if kind == "hidden":
                    save_head(folder / f"{kind}_{state}", teacher().head())

    def attack(self, rng: random.Random, folder: Path) -> None:
        kind, state = rng.choice(("topk", "topk", "hidden")), rng.choice(("whole", "begun"))
        cache = shutil.copytree(self.folder / f"{kind}_{state}", folder / "cache")
        files = sorted(p for p in cache.iterdir() if not p.name.startswith("."))
        victim = rng.choice(files)
        if rng.random() < 0.1:
            victim.unlink()
        elif rng.random() < 0.1:
            victim.write_bytes(rng.choice(files).read_bytes())
        else:
            spoil_file(rng, victim)
        if rng.random() < 0.5:
            with CacheWriter(cache, self.specs[kind], shard_bytes=1500) as writer:
                for document in self.documents[kind]:
                    writer.add(**document)
        reader = CacheReader(cache, allow_incomplete=True)
        for document in self.documents[kind]:
            if document["ids"] in reader:
                found = reader.get(document["ids"])
                for name, value in document.items():
                    assert np.array_equal(getattr(found, name), value), f"{name} changed unnoticed"
        if kind == "hidden":
            load_head(cache, "cpu")
        reader.verify()


class Checkpoints(Target):
    """A run that resumes from its checkpoints. With their manifests it must end where it would have ended."""

    name = "checkpoint"

    def prepare(self, folder: Path) -> None:
        write_tokenizers(folder)
        write_data(folder)
        self.folder = folder
        run(self._config(folder / "run"))

    def _config(self, run_dir: Path) -> Any:
        more = {
            "checkpointing": {"save_period": 2},
            "distillation": {"max_num_steps": 4, "val_period": 0, "val_at_start": False, "val_at_end": False},
        }
        return resolved(settings(self.folder, run_dir, **more))

    def attack(self, rng: random.Random, folder: Path) -> None:
        run_dir = shutil.copytree(self.folder / "run", folder / "run")
        bound = rng.random() < 0.3
        for _ in range(rng.choice((1, 1, 2))):
            files = sorted(p for p in run_dir.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not bound:
                files = [p for p in files if p.suffix in (".json", ".jsonl", ".yaml")]
            victim = rng.choice(files)
            if rng.random() < 0.1:
                victim.unlink()
            else:
                spoil_file(rng, victim)
        if not bound:
            for manifest in list(run_dir.rglob("manifest.json")):
                # values that are wrong in files that are as they were saved
                manifest.unlink()
                write_manifest(manifest.parent, int(manifest.parent.name.removeprefix("step_")))
        run(self._config(run_dir))
        if bound:
            same = weight_bytes(run_dir, 4) == weight_bytes(self.folder / "run", 4)
            assert same, "the run went on from damaged weights"
        assert (checkpoint(run_dir, 4) / "policy" / "weights" / "model.safetensors").is_file()


class Logs(Target):
    """Agent logs of every format, through reading, redaction, failed calls and writing."""

    name = "logs"

    def prepare(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(EXAMPLES.glob("*.jsonl"))}

    def attack(self, rng: random.Random, folder: Path) -> None:
        name = rng.choice(list(self.files))
        lines = self.files[name].splitlines(keepends=True)
        start = rng.randrange(len(lines)) if rng.random() < 0.3 else 0
        path = folder / name
        path.write_bytes(b"".join(lines[start : start + 12]))
        spoil_file(rng, path)
        stats = IngestStats()
        options = IngestOptions(LogReadingConfig(detectors=rng.choice(("standard", "extended"))))
        traces = list(ingest([path], options, stats))
        finder = FailedCallFinder()
        for trace in traces:
            list(finder.find(trace))
        again = folder / "again.jsonl"
        again.write_text("".join(f"{trace.to_json()}\n" for trace in traces), encoding="utf-8")
        assert len(list(ingest([again], IngestOptions(LogReadingConfig(format="limbeck")), IngestStats()))) == len(
            traces
        )


class Server(Target):
    """Answers of a scoring server and of a chat endpoint."""

    name = "server"

    def prepare(self, folder: Path) -> None:
        self.scoring = ScoringServer(teacher(), max_k=400)
        rng = np.random.default_rng(0)
        self.documents = [rng.integers(0, 339, n) for n in (2, 9, 17)]

    def attack(self, rng: random.Random, folder: Path) -> None:
        lying = rng.random() < 0.3

        def handle(path: str, body: Any, headers: dict[str, str]) -> Any:
            status, answer = self.scoring.handle(path, body, headers)
            return self._lie(rng, status, answer) if lying else (status, answer)

        if rng.random() < 0.3:
            self._chat(rng)
            return
        with listening(handle) as url:
            config = ServerConfig(url=url, k=5, retries=0, backoff=0.001, timeout=20.0, on_failure="skip")
            remote = ServerTeacher(config, tokenizer(340))
            lying = True
            try:
                found = remote.score(self.documents)
            finally:
                remote.close()
        for ids, one in zip(self.documents, found, strict=True):
            if isinstance(one, ScoredDocument):
                assert one.topk_ids.shape == (len(ids) - 1, 5)
                assert ((one.topk_ids >= -1) & (one.topk_ids < 340)).all()
                assert np.isfinite(one.topk_logprobs).all()
                assert (one.topk_logprobs <= 0).all()
                assert np.isfinite(one.next_logprob).all()

    def _chat(self, rng: random.Random) -> None:
        good = completion("fine", [("read", {"path": "a"})] if rng.random() < 0.5 else None)
        answer = self._lie(rng, 200, good)
        with listening(lambda *request: answer) as url:
            config = EndpointConfig(url=url, model="m", max_retries=0, timeout=20.0, price_in=1.0, price_out=1.0)
            asyncio.run(self._ask(EndpointProposer(config)))

    @staticmethod
    async def _ask(proposer: EndpointProposer) -> None:
        try:
            await proposer.propose([{"role": "user", "content": "q"}], [])
            assert proposer.budget.spent >= 0
        finally:
            await proposer.close()

    @staticmethod
    def _lie(rng: random.Random, status: int, answer: Any) -> Any:
        raw = spoilt_json(rng, answer).encode("utf-8", "replace")
        if rng.random() < 0.1:
            raw = spoilt_bytes(rng, raw)
        status = rng.choice((status, status, status, 200, 204, 301, 400, 404, 418, 500))
        kinds = ("application/json", "text/html", "application/json; charset=utf-16", "")
        return status, raw, {"content-type": rng.choice(kinds)}


class Report(Target):
    """Run folders as pages: whatever they hold, the page is whole and nothing in it is markup."""

    name = "report"

    def prepare(self, folder: Path) -> None:
        self.run = write_run(folder / "run", steps=60)

    def attack(self, rng: random.Random, folder: Path) -> None:
        run_dir = shutil.copytree(self.run, folder / "run")
        for _ in range(rng.choice((1, 1, 3))):
            victim = rng.choice(sorted(p for p in run_dir.iterdir() if p.is_file()))
            if victim.suffix == ".yaml" and rng.random() < 0.6:
                # JSON is YAML
                victim.write_text(spoilt_json(rng, read_run(self.run).config), encoding="utf-8", errors="replace")
            else:
                spoil_file(rng, victim)
        pages = [run_page(read_run(run_dir)).render()]
        pages.append(write_comparison([run_dir, self.run], folder / "both.html").read_text(encoding="utf-8"))
        for page in pages:
            assert page.startswith("<!doctype html>")
            assert page.count("<script>") == 1
            assert page.rstrip().endswith("</html>")


TARGETS: dict[str, type[Target]] = {target.name: target for target in (Arrow, Cache, Checkpoints, Logs, Server, Report)}
