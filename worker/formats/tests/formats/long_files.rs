//! Sparse oversized files: a file far larger than any published model's is never read whole.

use std::fs::File;
use std::path::Path;

use hearth_formats::{
    ChatTemplate, Checkpoint, FormatError, GenerationConfig, ModelConfig, Tokenizer,
};

const MIB: u64 = 1 << 20;

/// Creates a file of zeros that takes no disk space.
fn long(dir: &Path, name: &str, bytes: u64) {
    File::create(dir.join(name))
        .unwrap()
        .set_len(bytes)
        .unwrap();
}

#[test]
fn a_file_that_is_too_long_is_named_with_its_size_and_the_bound() {
    type Read = fn(&Path) -> FormatError;
    let kinds: [(&str, u64, Read); 7] = [
        ("config.json", 16, |dir| ModelConfig::read(dir).unwrap_err()),
        ("generation_config.json", 16, |dir| {
            GenerationConfig::read(dir).unwrap_err()
        }),
        ("tokenizer_config.json", 16, template),
        ("chat_template.jinja", 16, template),
        ("additional_chat_templates/tool_use.jinja", 16, template),
        ("model.safetensors.index.json", 64, |dir| {
            Checkpoint::open(dir).err().unwrap()
        }),
        ("tokenizer.json", 256, |dir| {
            Tokenizer::open(dir).err().unwrap()
        }),
    ];
    for (name, bound_mib, read) in kinds {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join(name);
        std::fs::create_dir_all(parent.parent().unwrap()).unwrap();
        if name.contains('/') {
            std::fs::write(dir.path().join("chat_template.jinja"), "x").unwrap();
        }
        let bytes = bound_mib * MIB + 1;
        long(dir.path(), name, bytes);
        let error = read(dir.path());
        let FormatError::TooLarge {
            file,
            bytes: told,
            max_bytes,
        } = &error
        else {
            panic!("{name}: {error}")
        };
        assert!(name.ends_with(file.as_str()), "{name}: {error}");
        assert_eq!((*told, *max_bytes), (bytes, bound_mib * MIB), "{name}");
        assert!(error.to_string().contains(file.as_str()), "{error}");
    }
}

fn template(dir: &Path) -> FormatError {
    ChatTemplate::open(dir).err().unwrap()
}
