//! Model files: safetensors, config.json, tokenizer, chat template; bytes become typed views.
