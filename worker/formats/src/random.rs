//! Random checkpoints of any size, for benchmarks: the shapes and types of a real model, with numbers that keep
//! activations in a sane range, written as a stream.

use std::fs;
use std::path::Path;

use half::bf16;
use hearth_kernels::{DType, SCALE_BLOCK};
use serde_json::{Map, Value, json};

use crate::FormatError;
use crate::checkpoint::{matrix_of_scales, scales_name};
use crate::writer::{CheckpointWriter, TensorPlan};

/// Description of the checkpoint to write.
#[derive(Clone, Debug)]
pub struct RandomCheckpoint<'a> {
    /// Text of a config.json; `quantization_config` and `torch_dtype` are set to match what is written.
    pub config_json: &'a str,
    /// All tensors of the model: checkpoint name and shape, without scales.
    pub tensors: &'a [(String, Vec<usize>)],
    /// Whether linear weights are FP8 with block scales (otherwise everything is BF16).
    pub fp8: bool,
    /// Seed; the same seed and tensor name give the same numbers.
    pub seed: u64,
    /// Largest size of the tensors in one file, in bytes.
    pub max_shard_bytes: u64,
}

/// Kind of a tensor, which determines its numbers and whether it can be FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// Linear layer: N(0, 0.02), FP8 if requested.
    Linear,
    /// Embedding, head or router: N(0, 0.02), always BF16, as in published FP8 models.
    Plain,
    /// Norm weight: near 1, BF16.
    Norm,
    /// Bias: N(0, 0.02), BF16.
    Bias,
    /// Correction bias of the router: N(0, 0.01), F32.
    CorrectionBias,
}

impl TensorKind {
    /// Derives the kind from the names that all supported architectures use.
    pub fn of(name: &str) -> Self {
        const PLAIN: [&str; 3] = ["embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"];
        if name.ends_with("e_score_correction_bias") {
            Self::CorrectionBias
        } else if name.ends_with(".bias") {
            Self::Bias
        } else if name.ends_with("norm.weight") {
            Self::Norm
        } else if PLAIN.iter().any(|plain| name.ends_with(plain)) {
            Self::Plain
        } else {
            Self::Linear
        }
    }

    fn dtype(self, fp8: bool) -> DType {
        match self {
            Self::Linear if fp8 => DType::F8E4m3,
            Self::CorrectionBias => DType::F32,
            Self::Linear | Self::Plain | Self::Norm | Self::Bias => DType::Bf16,
        }
    }
}

/// Writes `spec` into `dir`, which must be empty or absent. `progress` is called with (bytes written, total bytes).
///
/// Returns the size of all tensors in bytes.
///
/// # Errors
/// [`FormatError::Malformed`] (directory not empty, config not JSON, duplicate name), [`FormatError::Io`].
pub fn write_random(
    dir: &Path,
    spec: &RandomCheckpoint<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, FormatError> {
    let config = config_json(spec)?;
    prepare_folder(dir)?;
    let tables = Tables::new();
    let plans: Vec<TensorPlan> = spec
        .tensors
        .iter()
        .flat_map(|t| plan(t, spec.fp8))
        .collect();
    let mut writer = CheckpointWriter::create(dir, &plans, spec.max_shard_bytes)?;
    let total_bytes = writer.total_bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut buffers = vec![vec![0; CHUNK_BYTES]; threads];
    let mut chunks = plans.iter().flat_map(|plan| chunks(plan, spec.seed));
    let mut written_bytes = 0;
    loop {
        let now: Vec<Chunk> = chunks.by_ref().take(threads).collect();
        if now.is_empty() {
            break;
        }
        std::thread::scope(|scope| {
            for (chunk, buffer) in now.iter().zip(&mut buffers) {
                scope.spawn(|| chunk.fill(buffer, &tables));
            }
        });
        for (chunk, buffer) in now.iter().zip(&buffers) {
            writer.write(buffer.get(..chunk.bytes).unwrap_or_default())?;
            written_bytes += chunk.bytes as u64;
            progress(written_bytes, total_bytes);
        }
    }
    writer.finish()?;
    let path = dir.join("config.json");
    fs::write(&path, config).map_err(|e| FormatError::io(path, e, CHECK_DISK))?;
    Ok(total_bytes)
}

const CHECK_DISK: &str = "check the free space of the disk and the permissions of the folder.";
/// A multiple of 8, so that chunks end between random words and elements.
const CHUNK_BYTES: usize = 1 << 20;
const WEIGHT_STD: f32 = 0.02;
/// Standard deviation of the stored E4M3 numbers; the largest of them is 448.
const FP8_STD: f32 = 64.0;

/// A part of a tensor that one thread fills.
struct Chunk {
    fill: Fill,
    /// As it is where the chunk begins.
    random: SplitMix,
    bytes: usize,
}

impl Chunk {
    fn fill(&self, buffer: &mut [u8], tables: &Tables) {
        let part = buffer.get_mut(..self.bytes).unwrap_or_default();
        self.fill.fill(part, tables, &mut self.random.clone());
    }
}

/// The chunks of a tensor, in their order.
fn chunks(plan: &TensorPlan, seed: u64) -> impl Iterator<Item = Chunk> + use<> {
    let random = SplitMix::for_tensor(seed, &plan.name);
    let (fill, bytes) = (Fill::of(plan), plan.size_bytes().unwrap_or(0));
    (0..bytes.div_ceil(CHUNK_BYTES as u64)).map(move |index| {
        let first = index * CHUNK_BYTES as u64;
        Chunk {
            fill,
            random: random.after(first / 8),
            bytes: (bytes - first).min(CHUNK_BYTES as u64) as usize,
        }
    })
}

fn plan((name, shape): &(String, Vec<usize>), fp8: bool) -> Vec<TensorPlan> {
    let dtype = match TensorKind::of(name).dtype(fp8) {
        // Scales belong to matrices; an FP8 vector does not exist.
        dtype if dtype.format().scales_apart && shape.len() != 2 => DType::Bf16,
        dtype => dtype,
    };
    let weight = TensorPlan {
        name: name.clone(),
        dtype,
        shape: shape.clone(),
    };
    let scales = dtype.format().scales_apart.then(|| TensorPlan {
        name: scales_name(name),
        dtype: DType::F32,
        shape: shape.iter().map(|d| d.div_ceil(SCALE_BLOCK)).collect(),
    });
    std::iter::once(weight).chain(scales).collect()
}

fn config_json(spec: &RandomCheckpoint<'_>) -> Result<String, FormatError> {
    let mut config: Map<String, Value> = serde_json::from_str(spec.config_json).map_err(|e| {
        FormatError::malformed(
            "config.json",
            format!("is not a JSON object: {e}"),
            "give the config.json of a model.",
        )
    })?;
    config.remove("quantization_config");
    config.remove("dtype");
    config.insert("torch_dtype".into(), "bfloat16".into());
    if spec.fp8 {
        let fp8 = json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        });
        config.insert("quantization_config".into(), fp8);
    }
    Ok(format!("{:#}\n", Value::Object(config)))
}

fn prepare_folder(dir: &Path) -> Result<(), FormatError> {
    fs::create_dir_all(dir).map_err(|e| FormatError::io(dir, e, CHECK_DISK))?;
    let mut entries = fs::read_dir(dir).map_err(|e| FormatError::io(dir, e, CHECK_DISK))?;
    if entries.next().is_some() {
        return Err(FormatError::malformed(
            dir.display().to_string(),
            "is not empty",
            "give a new folder: nothing is overwritten.",
        ));
    }
    Ok(())
}

/// Distribution of a tensor's numbers.
#[derive(Clone, Copy)]
enum Fill {
    Bf16 { mean: f32, std: f32 },
    F32 { mean: f32, std: f32 },
    Fp8,
}

impl Fill {
    fn of(plan: &TensorPlan) -> Self {
        let scales = matrix_of_scales(&plan.name).is_some();
        match (plan.dtype, TensorKind::of(&plan.name)) {
            (DType::F8E4m3, _) => Self::Fp8,
            (DType::F32, _) if scales => {
                let mean = WEIGHT_STD / FP8_STD;
                Self::F32 {
                    mean,
                    std: mean * 0.05,
                }
            }
            (DType::F32, _) => Self::F32 {
                mean: 0.0,
                std: 0.01,
            },
            (_, TensorKind::Norm) => Self::Bf16 {
                mean: 1.0,
                std: 0.05,
            },
            _ => Self::Bf16 {
                mean: 0.0,
                std: WEIGHT_STD,
            },
        }
    }

    fn fill(self, bytes: &mut [u8], tables: &Tables, random: &mut SplitMix) {
        match self {
            Self::Fp8 => {
                for word in bytes.chunks_mut(8) {
                    let drawn = random.next().to_le_bytes();
                    for (byte, draw) in word.iter_mut().zip(drawn) {
                        *byte = tables.fp8[usize::from(draw)];
                    }
                }
            }
            Self::Bf16 { mean, std } => {
                let scaled = tables
                    .normal
                    .map(|z| bf16::from_f32(mean + std * z).to_le_bytes());
                for word in bytes.chunks_mut(8) {
                    let drawn = random.next().to_le_bytes();
                    for (element, draw) in word.chunks_mut(2).zip(drawn.chunks(2)) {
                        element.copy_from_slice(&scaled[table_index(draw)][..element.len()]);
                    }
                }
            }
            Self::F32 { mean, std } => {
                for word in bytes.chunks_mut(8) {
                    let drawn = random.next().to_le_bytes();
                    for (element, draw) in word.chunks_mut(4).zip(drawn.chunks(4)) {
                        let value = mean + std * tables.normal[table_index(draw)];
                        element.copy_from_slice(&value.to_le_bytes()[..element.len()]);
                    }
                }
            }
        }
    }
}

const NORMAL_TABLE: usize = 4096;

fn table_index(draw: &[u8]) -> usize {
    let pair = [
        draw.first().copied().unwrap_or(0),
        draw.get(1).copied().unwrap_or(0),
    ];
    usize::from(u16::from_le_bytes(pair)) % NORMAL_TABLE
}

/// Precomputed samples to draw from: an index is cheaper than a normal deviate.
struct Tables {
    /// N(0, 1), mirrored about 0.
    normal: [f32; NORMAL_TABLE],
    /// E4M3 codes of N(0, [`FP8_STD`]).
    fp8: [u8; 256],
}

impl Tables {
    fn new() -> Self {
        let mut random = SplitMix(0x5EED);
        let mut normal = [0.0; NORMAL_TABLE];
        for pair in normal.chunks_mut(2) {
            // The sum of twelve uniform numbers has variance 1 and, centred, stays within ±6.
            let sum: f64 = (0..12)
                .map(|_| random.next() as f64 / u64::MAX as f64)
                .sum();
            let z = (sum - 6.0) as f32;
            for (place, sign) in pair.iter_mut().zip([1.0, -1.0]) {
                *place = sign * z;
            }
        }
        let mut fp8 = [0; 256];
        for (code, z) in fp8.iter_mut().zip(normal) {
            *code = e4m3_from_f32(z * FP8_STD);
        }
        Self { normal, fp8 }
    }
}

/// Returns the nearest E4M3FN code, saturating at ±448; ties go to the even code.
fn e4m3_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(448.0);
    // Codes of one sign ascend with their values, so comparing with midpoints finds the nearest.
    let mut best = 0;
    for code in 1..=0x7E {
        let (low, high) = (e4m3_to_f32(code - 1), e4m3_to_f32(code));
        let middle = (low + high) / 2.0;
        if magnitude > middle || (magnitude == middle && code % 2 == 0) {
            best = code;
        }
    }
    sign | best
}

/// Returns the value of a non-negative code below NaN (0x7F).
fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
    match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a counter and a mixing function, which compilers vectorise.
#[derive(Clone)]
struct SplitMix(u64);

impl SplitMix {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// The generator after so many numbers.
    fn after(&self, numbers: u64) -> Self {
        Self(self.0.wrapping_add(Self::STEP.wrapping_mul(numbers)))
    }

    fn for_tensor(seed: u64, name: &str) -> Self {
        // FNV-1a over the name.
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3)
        });
        Self(Self(seed ^ hash).next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::{e4m3_from_f32, e4m3_to_f32};

    #[test]
    fn every_code_is_nearest_to_its_own_value() {
        for code in 0..=0x7E {
            assert_eq!(e4m3_from_f32(e4m3_to_f32(code)), code);
            assert_eq!(e4m3_from_f32(-e4m3_to_f32(code)), code | 0x80);
        }
        assert_eq!(e4m3_to_f32(0x7E), 448.0);
        assert_eq!(e4m3_to_f32(0x38), 1.0);
        assert_eq!(e4m3_from_f32(1e9), 0x7E);
    }
}
