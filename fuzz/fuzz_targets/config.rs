//! Any text as config.json and as generation_config.json; a config that is accepted has sane sizes.

#![no_main]

use hearth_formats::{AttentionConfig, GenerationConfig, ModelConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = GenerationConfig::parse(data);
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(config) = ModelConfig::parse(text) else {
        return;
    };
    assert!(config.layers > 0 && config.hidden_size > 0 && config.vocab_size > 0);
    assert!((0..config.layers).all(|layer| config.is_moe_layer(layer) || config.intermediate_size > 0));
    if let AttentionConfig::Gqa { heads, kv_heads, head_dim, .. } = config.attention {
        assert!(heads % kv_heads == 0 && head_dim % 2 == 0);
    }
    if let Some(moe) = &config.moe {
        assert!(moe.experts % moe.groups == 0);
        assert!(moe.experts_per_token <= moe.experts / moe.groups * moe.top_groups);
    }
});
