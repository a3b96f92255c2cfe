"""The corpus of the quality benchmark: real text of seven domains, cut into documents and three parts.

    PYTHONPATH=. python benchmarks/quality/corpus.py OUT --handbooks FOLDER --gsm8k FILE --wiki enwik8

Writes `OUT/{teacher,student,held_out}/DOMAIN.jsonl` (`text`) and two byte-level BPE tokenizers over the teacher's part,
`OUT/bpe_8k` and `OUT/bpe_32k`. The parts share no document: a teacher that has read the student's text would teach
one-hot targets. `corpus_handbook_LANGUAGE.txt` and `gsm8k_train_4000.jsonl` are names of published text collections;
code is the standard library of the running Python, arithmetic is generated.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCUMENT_BYTES = 1_200
HELD_OUT_BYTES = 60_000
STUDENT_SHARE = 0.25
LANGUAGES = {"english": "en-US", "chinese": "zh-CN", "japanese": "ja-JP", "russian": "ru-RU"}


def cut(text: str, size: int = DOCUMENT_BYTES) -> Iterator[str]:
    """Pieces of about `size` bytes that end at line ends."""
    piece, length = list[str](), 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line.encode())
        if length >= size:
            yield "".join(piece)
            piece, length = [], 0
    if length > size // 4:
        yield "".join(piece)


def wiki(path: Path, limit: int) -> Iterator[str]:
    """Articles without markup, as far as a few rules go."""
    with path.open(encoding="utf-8", errors="ignore") as file:
        raw = file.read(limit)
    for article in re.findall(r'<text xml:space="preserve">(.*?)</text>', raw, flags=re.DOTALL):
        if article.startswith("#REDIRECT") or len(article) < 1_000:
            continue
        text = html.unescape(html.unescape(article))
        text = re.sub(
            r"\{\{[^{}]*\}\}|\{\|.*?\|\}|<[^>]{0,200}>|\[\[[a-z-]{2,12}:[^\]]*\]\]", "", text, flags=re.DOTALL
        )
        text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
        yield from cut(re.sub(r"'{2,}", "", text).strip())


def code(limit: int) -> Iterator[str]:
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or total > limit:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        yield from cut(text)


def gsm8k(path: Path) -> Iterator[str]:
    lines = (json.loads(line) for line in path.read_text().splitlines())
    yield from cut("\n\n".join(f"{row['question']}\n{row['answer']}" for row in lines))


def arithmetic(documents: int, seed: int = 0) -> Iterator[str]:
    """Sums, differences and products of up to five digits, one in a line."""
    rng = random.Random(seed)
    for _ in range(documents):
        lines = []
        for _ in range(60):
            a, b = (rng.randrange(10 ** rng.randint(1, 5)) for _ in range(2))
            sign = rng.choice("+-*")
            b = b % 100 if sign == "*" else b
            lines.append(f"{a} {sign} {b} = {a + b if sign == '+' else a - b if sign == '-' else a * b}")
        yield "\n".join(lines) + "\n"


def documents(args: argparse.Namespace) -> dict[str, list[str]]:
    found = {
        name: list(cut((args.handbooks / f"corpus_handbook_{tag}.txt").read_text())) for name, tag in LANGUAGES.items()
    }
    found["wiki"] = list(wiki(args.wiki, args.wiki_bytes)) if args.wiki else []
    found["code"] = list(code(args.code_bytes))
    found["gsm8k"] = list(gsm8k(args.gsm8k))
    found["arithmetic"] = list(arithmetic(1_500))
    return {name: texts for name, texts in found.items() if texts}


def train_tokenizer(texts: list[str], size: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


SMALL_DOMAINS = ("english", "gsm8k")
SMALL_BYTES = {"teacher": None, "student": 30_000, "held_out": 20_000}
SMALL_VOCABULARIES = {"bpe_512": 512, "bpe_2k": 2_048}


def write_small(corpus: Path, out: Path, domains: Iterable[str] = SMALL_DOMAINS) -> None:
    """A corpus for runs that a processor can make, out of a whole one: documents of about 400 bytes, all of the
    teacher's, so many bytes of a domain of the other parts."""
    read: list[str] = []
    for domain in domains:
        for part, limit in SMALL_BYTES.items():
            texts, size = list[str](), 0
            for piece in (piece for text in read_texts(corpus / part / f"{domain}.jsonl") for piece in cut(text, 400)):
                if limit is not None and size >= limit:
                    break
                texts.append(piece)
                size += len(piece.encode())
            write_texts(texts, out / part / f"{domain}.jsonl")
            read += texts if part == "teacher" else []
    for name, vocabulary in SMALL_VOCABULARIES.items():
        train_tokenizer(read, vocabulary, out / name)


def read_texts(path: Path) -> list[str]:
    """Documents of a file."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]


def write_texts(texts: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))


def write_parts(domain: str, texts: list[str], out: Path) -> dict[str, list[str]]:
    """`out/{held_out,student,teacher}/DOMAIN.jsonl`, which share no document; the documents of each."""
    random.Random(domain).shuffle(texts)
    held = 0
    while sum(len(text.encode()) for text in texts[:held]) < HELD_OUT_BYTES:
        held += 1
    split = held + int((len(texts) - held) * STUDENT_SHARE)
    parts = {"held_out": texts[:held], "student": texts[held:split], "teacher": texts[split:]}
    for part, own in parts.items():
        write_texts(own, out / part / f"{domain}.jsonl")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--handbooks", type=Path, required=True, help="folder with corpus_handbook_*.txt")
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--wiki", type=Path, help="enwik8")
    parser.add_argument("--wiki-bytes", type=int, default=22_000_000)
    parser.add_argument("--code-bytes", type=int, default=7_000_000)
    args = parser.parse_args()
    teacher_texts: list[str] = []
    for domain, texts in documents(args).items():
        parts = write_parts(domain, texts, args.out)
        sizes = {part: f"{sum(len(text.encode()) for text in own) / 1e6:.2f} MB" for part, own in parts.items()}
        print(f"{domain:12}", sizes)
        teacher_texts += parts["teacher"]
    for name, size in (("bpe_8k", 8_192), ("bpe_32k", 32_768)):
        train_tokenizer(teacher_texts, size, args.out / name)


if __name__ == "__main__":
    main()
