"""Writes the checkpoint folder in the published layout of DeepSeek-V3: tensor names, FP8 blocks, config, tokenizer, template."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from data import BEGIN, END, PAD, SPECIAL_TOKENS
from model import DemoModel, ModelConfig, Moe
from quantize import BLOCK, quantize

# The template is kept with the model, and is written by hand.
CHAT_TEMPLATE = (Path(__file__).parent.parent / "hearth-demo" / "chat_template.jinja").read_text(encoding="utf-8")


def published_matrices(masters: dict[str, torch.Tensor], model: DemoModel) -> dict[str, torch.Tensor]:
    """Maps the training parameters to published names; expert stacks become one tensor per projection."""
    tensors = {}
    for name, value in masters.items():
        value = value.detach()
        if name == "lm_head":
            tensors["lm_head.weight"] = value
        elif name.endswith("gate_up_proj") and value.dim() == 3:
            for half, part in zip(("gate_proj", "up_proj"), value, strict=True):
                tensors[f"model.{name.removesuffix('gate_up_proj')}{half}.weight"] = part
        elif name.endswith("experts_gate_up_proj"):
            for index, expert in enumerate(value):
                for half, part in zip(("gate_proj", "up_proj"), expert, strict=True):
                    tensors[f"model.{name.removesuffix('_gate_up_proj')}.{index}.{half}.weight"] = part
        elif name.endswith("experts_down_proj"):
            for index, expert in enumerate(value):
                tensors[f"model.{name.removesuffix('_down_proj')}.{index}.down_proj.weight"] = expert
        else:
            tensors[f"model.{name}.weight"] = value
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mlp, Moe):
            tensors[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = layer.mlp.e_score_correction_bias.clone()
    return tensors


def stored_tensors(masters: dict[str, torch.Tensor], model: DemoModel, is_quantised: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Published names with stored values: FP8 with `weight_scale_inv`, BF16, and the router's bias in float32."""
    stored = {}
    for name, value in published_matrices(masters, model).items():
        stem = name.removesuffix(".weight").removeprefix("model.")
        if name.endswith("e_score_correction_bias"):
            stored[name] = value.float().contiguous()
        elif is_quantised(stem):
            stored[name], stored[f"{name}_scale_inv"] = quantize(value.float().contiguous())
        else:
            stored[name] = value.to(torch.bfloat16).contiguous()
    return stored


def config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict:
    """config.json in the published style, `rope_theta` beside `rope_scaling`."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **config.as_dict(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def tokenizer_config_json(config: ModelConfig) -> dict:
    """tokenizer_config.json; the chat template is in chat_template.jinja."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BEGIN, END, PAD)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    masters: dict[str, torch.Tensor],
    model: DemoModel,
    is_quantised: Callable[[str], bool],
) -> None:
    """Writes all files of the checkpoint but its README.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = stored_tensors(masters, model, is_quantised)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    generation = {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": False,
        "max_new_tokens": 256,
    }
    documents = {
        "config.json": config_json(config, tokenizer),
        "tokenizer_config.json": tokenizer_config_json(config),
        "generation_config.json": generation,
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
