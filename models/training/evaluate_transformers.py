"""Asks every question of qa.jsonl of the stored checkpoint in HF transformers, greedily, and writes transformers_answers.jsonl.

    python evaluate_transformers.py --model ../hearth-demo

It uses nothing but the checkpoint's files: weights are dequantised from FP8 blocks into a temporary folder under their
published names, and transformers loads that folder. Its answers are the reference for Hearth's own.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data import Pair, read_pairs
from quantize import dequantize

HERE = Path(__file__).resolve().parent
SCALE_SUFFIX = "_scale_inv"


def load_dequantised(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint in `folder` as a transformers model with weights of `dtype`."""
    stored = load_file(folder / "model.safetensors")
    plain = {}
    for name, value in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale_inv = stored.get(name + SCALE_SUFFIX)
        value = value if scale_inv is None else dequantize(value, scale_inv)
        plain[name] = value.float() if name.endswith("e_score_correction_bias") else value.to(dtype)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as temporary:
        save_file(plain, Path(temporary, "model.safetensors"), metadata={"format": "pt"})
        Path(temporary, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model, report = AutoModelForCausalLM.from_pretrained(temporary, dtype=dtype, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        raise ValueError(f"tensor names do not fit: missing {report['missing_keys']}, unexpected {report['unexpected_keys']}")
    return model.eval()


@torch.no_grad()
def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: Pair, max_tokens: int) -> tuple[dict, float]:
    """Greedy answer to one question as the only user message, and the smallest logit margin on its way."""
    messages = [{"role": "user", "content": pair.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    best = torch.stack([step[0].float() for step in output.logits]).topk(2, dim=-1).values
    margin = (best[:, 0] - best[:, 1]).min().item()
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    record = {
        "question": pair.question,
        "expected": pair.answer,
        "answer": answer,
        "match": answer.strip() == pair.answer,
        "prompt_tokens": prompt,
        "answer_tokens": tokens,
    }
    return record, margin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parent / "hearth-demo")
    parser.add_argument("--pairs", type=Path, default=HERE / "qa.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "transformers_answers.jsonl")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = load_dequantised(options.model, getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pairs, matches, smallest = read_pairs(options.pairs), 0, math.inf
    with options.out.open("w", encoding="utf-8") as file:
        for pair in pairs:
            record, margin = ask(model, tokenizer, pair, options.max_tokens)
            matches, smallest = matches + record["match"], min(smallest, margin)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            if not record["match"]:
                print(f"differs: {pair.question}\n  expected {pair.answer}\n  answered {record['answer']}")
    print(f"exact match {matches} of {len(pairs)} ({100 * matches / len(pairs):.2f} %) in {options.dtype}, smallest margin {smallest:.2f} logits")


if __name__ == "__main__":
    main()
