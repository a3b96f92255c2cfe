"""The data of the recipe ``capitals``: questions about capitals, with a tokenizer trained on them.

    python benchmarks/capitals.py

writes ``prompts.jsonl`` (four questions for each country), ``held_out.jsonl`` (a fifth, worded otherwise) and the
student's tokenizer to ``limbeck/recipes/data/capitals``. No answer of a model is among them.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parents[1] / "limbeck" / "recipes" / "data" / "capitals"
CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota",
    "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Lebanon": "Beirut",
    "Malaysia": "Kuala Lumpur", "Mexico": "Mexico City", "Nepal": "Kathmandu", "Norway": "Oslo", "Peru": "Lima",
    "Philippines": "Manila", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest", "Russia": "Moscow",
    "Serbia": "Belgrade", "Spain": "Madrid", "Sweden": "Stockholm", "Syria": "Damascus", "Thailand": "Bangkok",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Venezuela": "Caracas", "Vietnam": "Hanoi",
}  # fmt: skip
ASKED = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital city of {}.",
    "What is the name of the capital of {}?",
)
HELD_OUT = "Name the capital city of {}."
TEMPLATE = """\
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}
"""
VOCABULARY = 640


def questions(wordings: tuple[str, ...]) -> list[dict[str, str]]:
    """One record for each wording and country; the verifier ``regex`` looks for the answer, and the fact is what
    a teacher may read."""
    return [
        {
            "question": wording.format(country),
            "answer": capital,
            "fact": f"The capital of {country} is {capital}.",
        }
        for wording in wordings
        for country, capital in CAPITALS.items()
    ]


def tokenizer() -> Tokenizer:
    """A byte-level BPE of the questions and of sentences such as answers are."""
    made = Tokenizer(models.BPE())
    words = Regex(r"\s?\p{L}+|\s?\p{N}|\s?[^\s\p{L}\p{N}]+|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = [f"The capital of {country} is {capital}." for country, capital in CAPITALS.items()]
    made.train_from_iterator([row["question"] for row in questions((*ASKED, HELD_OUT))] + answers, trainer)
    return made


def write(folder: Path) -> None:
    """All files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, wordings in (("prompts", ASKED), ("held_out", (HELD_OUT,))):
        lines = [json.dumps(row) for row in questions(wordings)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # as conversations whose answer is the whole sentence
        lines = [json.dumps({"question": row["question"], "answer": row["fact"]}) for row in questions(wordings)]
        facts = {"prompts": "facts", "held_out": "facts_held_out"}[name]
        (folder / f"{facts}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
