"""What a run leaves is a plain transformers folder: load it, write with it, compare it with where it started.

python examples/use_result.py RUN_FOLDER TEXTS.txt "A prompt"
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

run, texts, prompt = sys.argv[1:4]
weights = max(Path(run).glob("checkpoints/step_*/policy/weights"), key=lambda p: int(p.parts[-3].removeprefix("step_")))
tokenizer, model = AutoTokenizer.from_pretrained(weights), AutoModelForCausalLM.from_pretrained(weights).eval()

bits = size = 0.0
with torch.no_grad():
    for line in filter(None, Path(texts).read_text(encoding="utf-8").splitlines()):
        ids = torch.tensor([tokenizer.encode(line)])
        scores = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        bits -= scores.sum().item() / torch.log(torch.tensor(2.0)).item()
        size += len(line.encode())
    start = torch.tensor([tokenizer.encode(prompt)])
    written = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20, do_sample=False)
print(f"{weights}: {bits / size:.3f} bits per byte (the first token of a line is not scored)")
print(tokenizer.decode(written[0]))
