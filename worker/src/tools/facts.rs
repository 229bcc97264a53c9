//! `hearth-worker facts`: a model's facts for the planner, from config.json and the weights' headers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_crds::{KvShape, ModelFacts, ModuleBytes};
use hearth_formats::{
    AttentionConfig, ChatTemplate, Checkpoint, GenerationConfig, ModelConfig, Tokenizer,
};
use hearth_kernels::CpuBackend;
use hearth_model::{Model, ModuleId, ModuleSpec, TensorShape};
use serde::Serialize;

use crate::logging::print_data;

/// Arguments of `facts`.
#[derive(Args)]
pub(crate) struct FactsArgs {
    /// Directory with config.json and safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Check also what serving needs beside the weights: tokenizer, chat template, generation defaults
    #[arg(long)]
    serving: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Printed<'a> {
    #[serde(flatten)]
    facts: &'a ModelFacts,
    /// Whether the model has a chat template; only with `--serving`.
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template: Option<bool>,
}

/// Reads the facts and prints them.
pub(crate) fn run(args: &FactsArgs) -> anyhow::Result<()> {
    let facts = read(&args.model, args.serving)?;
    if args.json {
        let chat_template = match args.serving {
            true => Some(ChatTemplate::open(&args.model)?.is_some()),
            false => None,
        };
        let printed = Printed {
            facts: &facts,
            chat_template,
        };
        return print_data(&format!("{}\n", serde_json::to_string_pretty(&printed)?));
    }
    print_data(&table(&facts))
}

fn table(facts: &ModelFacts) -> String {
    let mut text = format!(
        "{}  {}  {} layers, hidden {}, vocabulary {}\n\
         parameters      {} ({} a token)\n\
         context         {} tokens\n\
         KV              {} bytes a token in BF16\n",
        facts.architecture,
        facts.dtype,
        facts.layers,
        facts.hidden,
        facts.vocab,
        facts.parameter_count,
        facts.active_parameter_count,
        facts.max_context,
        facts.kv_bytes_per_token(2, 2)
    );
    let ModuleBytes {
        embedding,
        attention,
        dense_ffn,
        shared_expert,
        router,
        routed_experts,
        head,
    } = facts.bytes;
    for (name, bytes) in [
        ("embedding", embedding),
        ("attention", attention),
        ("dense ffn", dense_ffn),
        ("shared experts", shared_expert),
        ("routers", router),
        ("routed experts", routed_experts),
        ("head", head),
    ] {
        text += &format!("{name:<15} {bytes} bytes\n");
    }
    text
}

/// Reads the facts of the model in `directory`; with `serving`, also checks everything else that serving needs:
/// tokenizer, chat template, generation defaults.
///
/// # Errors
/// An error that names the missing or invalid file, tensor or field.
pub(crate) fn read(directory: &Path, serving: bool) -> anyhow::Result<ModelFacts> {
    let config = ModelConfig::read(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    let facts = facts(&config, &checkpoint)?;
    if serving {
        Tokenizer::open(directory)?.check_vocab(&config)?;
        ChatTemplate::open(directory)?;
        GenerationConfig::read(directory)?;
    }
    Ok(facts)
}

fn facts(config: &ModelConfig, checkpoint: &Checkpoint) -> anyhow::Result<ModelFacts> {
    let modules = Model::<CpuBackend>::modules(config)?;
    let mut bytes = ModuleBytes::default();
    let mut layers: Vec<ModuleBytes> = vec![ModuleBytes::default(); config.layers];
    let (mut largest_dense_module_bytes, mut largest_expert_bytes) = (0, 0);
    let mut parameters = Parameters::default();
    let mut stored: BTreeMap<&'static str, u64> = BTreeMap::new();
    for module in &modules {
        let size = module_bytes(module, checkpoint, &mut stored)?;
        *class(&mut bytes, module.id) += size;
        match module.id {
            ModuleId::Attention(_) | ModuleId::DenseFfn(_) | ModuleId::SharedExpert(_) => {
                largest_dense_module_bytes = size.max(largest_dense_module_bytes);
            }
            ModuleId::Expert(..) => largest_expert_bytes = size.max(largest_expert_bytes),
            ModuleId::Embedding | ModuleId::Router(_) | ModuleId::Head => {}
        }
        if let Some(bytes) = layer(module.id).and_then(|layer| layers.get_mut(layer as usize)) {
            *class(bytes, module.id) += size;
        }
        parameters.count(module);
    }
    let moe = config.moe.as_ref();
    let (experts, experts_per_token) = moe.map_or((0, 0), |moe| {
        (moe.experts as u32, moe.experts_per_token as u32)
    });
    let routers = modules
        .iter()
        .filter(|module| matches!(module.id, ModuleId::Router(_)));
    if config.tie_word_embeddings {
        // One table serves both; the head reads all of it at every step.
        bytes.embedding = 0;
        parameters.all -= std::mem::take(&mut parameters.embedding);
    }
    let (heads, kv) = kv_shape(&config.attention);
    let facts = ModelFacts {
        architecture: config.model_type.clone(),
        dtype: dtype_name(&stored),
        parameter_count: parameters.all,
        active_parameter_count: parameters.active(experts, experts_per_token),
        layers: config.layers as u32,
        hidden: config.hidden_size as u32,
        vocab: config.vocab_size as u32,
        max_context: config.max_position_embeddings as u32,
        experts,
        experts_per_token,
        expert_layers: routers.count() as u32,
        expert_hidden: moe.map_or(0, |moe| moe.intermediate_size as u32),
        heads,
        kv,
        bytes,
        largest_layer_bytes: layers.iter().map(ModuleBytes::total).max().unwrap_or(0),
        largest_dense_module_bytes,
        largest_expert_bytes,
        layer_kinds: None,
    };
    Ok(facts.with_layers(&layers))
}

#[derive(Default)]
struct Parameters {
    all: u64,
    routed: u64,
    embedding: u64,
}

impl Parameters {
    fn count(&mut self, module: &ModuleSpec) {
        let count: u64 = module
            .tensors
            .iter()
            .map(|tensor| match tensor.shape {
                TensorShape::Matrix { rows, cols } => (rows * cols) as u64,
                TensorShape::Vector { len } => len as u64,
            })
            .sum();
        self.all += count;
        match module.id {
            ModuleId::Expert(..) => self.routed += count,
            ModuleId::Embedding => self.embedding += count,
            _ => {}
        }
    }

    fn active(&self, experts: u32, experts_per_token: u32) -> u64 {
        let routed = match experts {
            0 => 0,
            experts => self.routed / u64::from(experts) * u64::from(experts_per_token),
        };
        self.all - self.routed - self.embedding + routed
    }
}

/// Size of a module as stored, including scales; adds its tensors, without scales, to the sums by element type.
fn module_bytes(
    module: &ModuleSpec,
    checkpoint: &Checkpoint,
    stored: &mut BTreeMap<&'static str, u64>,
) -> anyhow::Result<u64> {
    let mut sum = 0;
    for tensor in &module.tensors {
        // Checked as a worker would, so that a model that cannot be loaded is not planned either.
        match tensor.shape {
            TensorShape::Matrix { rows, cols } => {
                checkpoint.check_matrix(&tensor.name, rows, cols)?;
            }
            TensorShape::Vector { len } => checkpoint.check_vector(&tensor.name, len)?,
        }
        if let Some(info) = checkpoint.tensor_info(&tensor.name) {
            *stored.entry(info.dtype.name).or_default() += info.size_bytes;
        }
        sum += checkpoint.stored_bytes(&tensor.name)?;
    }
    Ok(sum)
}

fn class(bytes: &mut ModuleBytes, id: ModuleId) -> &mut u64 {
    match id {
        ModuleId::Embedding => &mut bytes.embedding,
        ModuleId::Attention(_) => &mut bytes.attention,
        ModuleId::DenseFfn(_) => &mut bytes.dense_ffn,
        ModuleId::Router(_) => &mut bytes.router,
        ModuleId::SharedExpert(_) => &mut bytes.shared_expert,
        ModuleId::Expert(..) => &mut bytes.routed_experts,
        ModuleId::Head => &mut bytes.head,
    }
}

fn layer(id: ModuleId) -> Option<u32> {
    match id {
        ModuleId::Embedding | ModuleId::Head => None,
        ModuleId::Attention(layer)
        | ModuleId::DenseFfn(layer)
        | ModuleId::Router(layer)
        | ModuleId::SharedExpert(layer)
        | ModuleId::Expert(layer, _) => Some(layer),
    }
}

fn kv_shape(attention: &AttentionConfig) -> (u32, KvShape) {
    match *attention {
        AttentionConfig::Gqa {
            heads,
            kv_heads,
            head_dim,
            ..
        } => {
            let dim = head_dim as u32;
            (
                heads as u32,
                KvShape::Heads {
                    kv_heads: kv_heads as u32,
                    key_dim: dim,
                    value_dim: dim,
                },
            )
        }
        AttentionConfig::Mla {
            heads,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        } => (
            heads as u32,
            KvShape::Latent {
                rank: kv_lora_rank as u32,
                rope_dim: qk_rope_head_dim as u32,
                nope_dim: qk_nope_head_dim as u32,
                value_dim: v_head_dim as u32,
            },
        ),
    }
}

/// Common name of the element type that accounts for most bytes.
fn dtype_name(stored: &BTreeMap<&'static str, u64>) -> String {
    let most = stored
        .iter()
        .max_by_key(|(_, bytes)| **bytes)
        .map_or("", |(name, _)| *name);
    if most == "F8_E4M3" {
        "FP8".to_owned()
    } else {
        most.to_owned()
    }
}
