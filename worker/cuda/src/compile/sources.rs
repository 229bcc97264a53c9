//! The kernels' sources, embedded, and the variants that models need.

use sha2::{Digest, Sha256};

/// Every kernel file: its name without `.cu`, and its text.
pub const SOURCES: &[(&str, &str)] = &[
    ("add", include_str!("../../kernels/add.cu")),
    ("attention", include_str!("../../kernels/attention.cu")),
    (
        "attention_any",
        include_str!("../../kernels/attention_any.cu"),
    ),
    (
        "attention_sm90",
        include_str!("../../kernels/attention_sm90.cu"),
    ),
    ("cache_heads", include_str!("../../kernels/cache_heads.cu")),
    (
        "cache_latents",
        include_str!("../../kernels/cache_latents.cu"),
    ),
    ("columns", include_str!("../../kernels/columns.cu")),
    ("embed", include_str!("../../kernels/embed.cu")),
    ("experts", include_str!("../../kernels/experts.cu")),
    (
        "experts_combine",
        include_str!("../../kernels/experts_combine.cu"),
    ),
    ("find_nan", include_str!("../../kernels/find_nan.cu")),
    (
        "gemm_fp8_sm90",
        include_str!("../../kernels/gemm_fp8_sm90.cu"),
    ),
    ("kv", include_str!("../../kernels/kv.cu")),
    ("linear", include_str!("../../kernels/linear.cu")),
    ("mla", include_str!("../../kernels/mla.cu")),
    ("moe_sort", include_str!("../../kernels/moe_sort.cu")),
    (
        "read_bandwidth",
        include_str!("../../kernels/read_bandwidth.cu"),
    ),
    ("rms_norm", include_str!("../../kernels/rms_norm.cu")),
    ("rope", include_str!("../../kernels/rope.cu")),
    ("route", include_str!("../../kernels/route.cu")),
    ("route_sort", include_str!("../../kernels/route_sort.cu")),
    ("hand_over", include_str!("../../kernels/hand_over.cu")),
    ("rows", include_str!("../../kernels/rows.cu")),
    ("sample", include_str!("../../kernels/sample.cu")),
    ("silu_mul", include_str!("../../kernels/silu_mul.cu")),
    ("split", include_str!("../../kernels/split.cu")),
];

/// Headers that the kernels include, by the names used in `#include`.
pub(super) const HEADERS: &[(&str, &str)] = &[
    ("attention.cuh", include_str!("../../kernels/attention.cuh")),
    ("common.cuh", include_str!("../../kernels/common.cuh")),
    ("kv.cuh", include_str!("../../kernels/kv.cuh")),
    ("matmul.cuh", include_str!("../../kernels/matmul.cuh")),
    (
        "matmul_sm90.cuh",
        include_str!("../../kernels/matmul_sm90.cuh"),
    ),
    (
        "matmul_sync.cuh",
        include_str!("../../kernels/matmul_sync.cuh"),
    ),
    ("moe_sort.cuh", include_str!("../../kernels/moe_sort.cuh")),
    ("norm.cuh", include_str!("../../kernels/norm.cuh")),
    ("norm_row.cuh", include_str!("../../kernels/norm_row.cuh")),
    ("ptx.cuh", include_str!("../../kernels/ptx.cuh")),
    ("quads.cuh", include_str!("../../kernels/quads.cuh")),
    ("rotate.cuh", include_str!("../../kernels/rotate.cuh")),
    ("route.cuh", include_str!("../../kernels/route.cuh")),
    ("sample.cuh", include_str!("../../kernels/sample.cuh")),
    ("select.cuh", include_str!("../../kernels/select.cuh")),
    ("terms.cuh", include_str!("../../kernels/terms.cuh")),
    (
        "weight_element.cuh",
        include_str!("../../kernels/weight_element.cuh"),
    ),
    ("wgmma.cuh", include_str!("../../kernels/wgmma.cuh")),
];

/// Options of every compilation. Contraction is NVRTC's default; where the order of
/// rounding matters, the sources are explicit.
pub(super) const OPTIONS: &[&str] = &["-default-device", "--std=c++17"];

/// `WEIGHT_TYPE`s: F32, F16, BF16, FP8 E4M3.
const WEIGHT_TYPES: std::ops::Range<i64> = 0..4;
/// `WEIGHT_TYPE` of FP8.
const FP8_WEIGHT: i64 = 3;
/// `ACTIVATIONS` of FP8.
const FP8_ACTIVATIONS: i64 = 2;
/// Products of many rows by wgmma.
pub(crate) const BY_WGMMA: (&str, i64) = ("BY_WGMMA", 1);
/// `WEIGHT_TYPE`s and `ACTIVATIONS` of which there are such variants.
const WGMMA_WEIGHTS: [i64; 2] = [2, FP8_WEIGHT];
const BF16_ACTIVATIONS: i64 = 1;
/// `(K_DIM, V_DIM, VALUE_IN_KEY)` of published models: GQA with heads of 64, 96, 128, 256; MLA absorbed and expanded.
const ATTENTION_DIMS: [(i64, i64, bool); 6] = [
    (64, 64, false),
    (96, 96, false),
    (128, 128, false),
    (256, 256, false),
    (192, 128, false),
    (576, 512, true),
];

/// One compilation: a file and its `-D` options.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Name in [`SOURCES`].
    pub file: &'static str,
    /// Options in the order given.
    pub defines: Vec<(&'static str, i64)>,
}

impl Variant {
    /// A file without options.
    pub(crate) fn plain(file: &'static str) -> Self {
        Self {
            file,
            defines: Vec::new(),
        }
    }

    /// A file with options.
    pub(crate) fn with(file: &'static str, defines: &[(&'static str, i64)]) -> Self {
        Self {
            file,
            defines: defines.to_vec(),
        }
    }

    /// The same with one more option.
    pub(crate) fn and(mut self, define: (&'static str, i64)) -> Self {
        self.defines.push(define);
        self
    }

    /// The source's text; empty for an unknown name.
    pub(super) fn source(&self) -> &'static str {
        let found = SOURCES.iter().find(|(name, _)| *name == self.file);
        found.map_or("", |(_, text)| text)
    }

    /// Yields `-DNAME=VALUE` for each option.
    pub(super) fn options(&self) -> impl Iterator<Item = String> + '_ {
        let defines = self.defines.iter();
        defines.map(|(name, value)| format!("-D{name}={value}"))
    }

    /// Whether the architecture has the instructions that this variant uses: FP8 tensor cores start with
    /// sm_89, and only sm_90a has wgmma.
    pub fn runs_on(&self, architecture: &str) -> bool {
        if matches!(self.file, "attention_sm90" | "gemm_fp8_sm90")
            || self.defines.contains(&BY_WGMMA)
        {
            return architecture == "sm_90a";
        }
        if self.file == "attention" && i64::from(self.shared_bytes("attention")) > SHARED_BYTES {
            return matches!(architecture, "sm_90a" | "sm_100a" | "sm_103a");
        }
        let fp8 = self.defines.contains(&("ACTIVATIONS", FP8_ACTIVATIONS));
        // Quantisation needs no FP8 instruction, but is useless without them.
        !fp8 || !matches!(architecture, "sm_80" | "sm_86" | "sm_87")
    }

    /// Most threads of a block of its entry points.
    pub fn threads(&self) -> u32 {
        match self.file {
            "moe_sort" => 1024,
            "read_bandwidth" | "route_sort" | "sample" => 512,
            _ => 256,
        }
    }

    /// Bytes of dynamic shared memory of a block of this entry point.
    pub fn shared_bytes(&self, entry_point: &str) -> u32 {
        let value = |name| {
            let mut defines = self.defines.iter();
            defines.find(|(n, _)| *n == name).map_or(0, |(_, v)| *v)
        };
        let bytes = match entry_point {
            "attention" => {
                let dims = (value("K_DIM"), value("V_DIM"), value("VALUE_IN_KEY") == 1);
                let options = ["BUFFERS", "QUERIES_SHARED", "ATTENTION_TERMS"].map(value);
                attention_bytes(dims, value("ROWS"), options)
            }
            "attention_sm90" => wgmma_attention_bytes(value("K_DIM"), value("V_DIM")),
            "linear_tiled" | "experts_gate_up_tiled" | "experts_down_tiled"
                if self.defines.contains(&BY_WGMMA) =>
            {
                WGMMA_TILED_BYTES
            }
            "linear_tiled" | "experts_gate_up_tiled" | "experts_down_tiled" => {
                tiled_bytes(value("WEIGHT_TYPE"), value("ACTIVATIONS"))
            }
            "gemm_fp8_sm90" => WGMMA_BYTES,
            _ => 0,
        };
        bytes as u32
    }

    /// Hash of everything that the compiled kernel depends on: text, headers, options, architecture, and this
    /// program's version of the format.
    pub fn cache_key(&self, architecture: &str) -> String {
        let mut hash = Sha256::new();
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        part(self.source());
        for (name, text) in HEADERS {
            part(name);
            part(text);
        }
        OPTIONS.iter().for_each(|option| part(option));
        self.options().for_each(|option| part(&option));
        part(architecture);
        let digest = hash.finalize();
        let hex: String = digest[..12].iter().map(|b| format!("{b:02x}")).collect();
        format!("{}-{architecture}-{hex}", self.file)
    }
}

/// All variants that published models of supported architectures use.
/// Models with other dimensions compile theirs at first use.
pub fn all_variants() -> Vec<Variant> {
    let mut out: Vec<Variant> = [
        "add",
        "attention_any",
        "columns",
        "experts_combine",
        "find_nan",
        "gemm_fp8_sm90",
        "hand_over",
        "moe_sort",
        "read_bandwidth",
        "rope",
        "route",
        "route_sort",
        "rows",
        "sample",
    ]
    .into_iter()
    .map(Variant::plain)
    .collect();
    for weight in WEIGHT_TYPES {
        out.push(Variant::with("embed", &[("WEIGHT_TYPE", weight)]));
        for activations in 0..=FP8_ACTIVATIONS {
            if activations == FP8_ACTIVATIONS && weight != FP8_WEIGHT {
                continue;
            }
            let defines = [("WEIGHT_TYPE", weight), ("ACTIVATIONS", activations)];
            out.extend(["linear", "experts"].map(|file| Variant::with(file, &defines)));
            if activations == BF16_ACTIVATIONS && WGMMA_WEIGHTS.contains(&weight) {
                let by_wgmma = |file| Variant::with(file, &defines).and(BY_WGMMA);
                out.extend(["linear", "experts"].map(by_wgmma));
            }
            if activations != FP8_ACTIVATIONS {
                out.push(Variant::with("mla", &defines));
            }
        }
    }
    for activations in 0..=FP8_ACTIVATIONS {
        let defines = [("ACTIVATIONS", activations)];
        out.extend(["rms_norm", "silu_mul", "split"].map(|file| Variant::with(file, &defines)));
    }
    for kv in 0..2 {
        let kv = ("KV_TYPE", kv);
        out.extend(["kv", "cache_heads"].map(|file| Variant::with(file, &[kv])));
        let latents = |a| Variant::with("cache_latents", &[kv, ("ACTIVATIONS", a)]);
        out.extend((0..=FP8_ACTIVATIONS).map(latents));
    }
    for dims in ATTENTION_DIMS {
        for terms in [3, 1] {
            let rows = [16, AttentionShape::prefill_rows(dims, terms)];
            for most_bytes in [SHARED_BYTES, LARGER_SHARED_BYTES] {
                for rows in rows {
                    let variant = AttentionShape::new(dims, rows, terms, most_bytes).variant;
                    if !out.contains(&variant) {
                        out.push(variant);
                    }
                }
            }
            let (k, v, in_key) = dims;
            let by_wgmma = AttentionShape::by_wgmma((k as usize, v as usize, in_key), terms);
            out.extend(by_wgmma.map(|shape| shape.variant));
        }
    }
    out
}

/// Maximum dynamic shared memory of a block, so that all GPUs use the same shapes: 99 KiB is what each has since compute
/// capability 8.6, less 1 KiB of static, and 1 KiB for what tools and drivers may take.
const SHARED_BYTES: i64 = 97 << 10;
/// The same of GPUs of compute capability 9.0 and 10.0.
const LARGER_SHARED_BYTES: i64 = 225 << 10;
/// Dynamic shared memory of `gemm_fp8_sm90`: six stages of two tiles of 128 × 128, aligned to 1 KiB.
const WGMMA_BYTES: i64 = 6 * 2 * 128 * 128 + 1024;

/// The same of the tiled kernels by wgmma: 144 KiB of stages, aligned to 1 KiB, and the totals of 128 × 128 sums.
const WGMMA_TILED_BYTES: i64 = (144 << 10) + 1024 + 4 * 128 * 128;

/// Dynamic shared memory of the tiled kernels: `STAGES * STAGE_BYTES` of matmul.cuh.
fn tiled_bytes(weight_type: i64, activations: i64) -> i64 {
    let weight_bytes = match weight_type {
        0 => 4,
        FP8_WEIGHT => 1,
        _ => 2,
    };
    let (term_bytes, terms) = match activations {
        0 => (2, 3),
        FP8_ACTIVATIONS => (1, 1),
        _ => (2, 1),
    };
    let cols = match (activations, weight_type) {
        (FP8_ACTIVATIONS, _) => 128,
        (_, 0) => 32,
        _ => 64,
    };
    let stage = 128 * cols * weight_bytes + 64 * terms * cols * term_bytes;
    ((96 << 10) / stage).min(4) * stage
}

/// Compilation and launch parameters of attention for one shape (the head of attention.cu).
pub(crate) struct AttentionShape {
    pub(crate) variant: Variant,
    /// Threads per block.
    pub(crate) threads: u32,
}

impl AttentionShape {
    /// Chooses the shape for `(K_DIM, V_DIM, VALUE_IN_KEY)` with `rows` rows of work per block: as many tiles in
    /// shared memory as fit, then the queries as well. `terms`: bf16 terms of queries and probabilities, 3 or 1; `most_bytes`: of
    /// shared memory of a block on the device, which latents of hundreds of elements may take.
    pub(crate) fn new(
        (k, v, in_key): (i64, i64, bool),
        rows: i64,
        terms: i64,
        most_bytes: i64,
    ) -> Self {
        // One of two, so that an image has every variant that a GPU may ask for.
        let most_bytes = match in_key && most_bytes >= LARGER_SHARED_BYTES {
            true => LARGER_SHARED_BYTES,
            false => SHARED_BYTES,
        };
        let choices = [(2, 1), (2, 0), (1, 1), (1, 0)];
        let fitting = choices.into_iter().find(|&(buffers, queries)| {
            attention_bytes((k, v, in_key), rows, [buffers, queries, terms]) <= most_bytes
        });
        let (buffers, queries) = match rows == ROWS_IN_REGISTERS {
            true => (2, 0),
            false => fitting.unwrap_or((1, 0)),
        };
        let defines = [
            ("K_DIM", k),
            ("V_DIM", v),
            ("VALUE_IN_KEY", i64::from(in_key)),
            ("ATTENTION_TERMS", terms),
            ("ROWS", rows),
            ("BUFFERS", buffers),
            ("QUERIES_SHARED", queries),
        ];
        Self {
            variant: Variant::with("attention", &defines),
            threads: if rows == 16 { 128 } else { 256 },
        }
    }

    /// The kernel of prompts by wgmma, if it takes heads of these dimensions and as many terms.
    pub(crate) fn by_wgmma((k, v, in_key): (usize, usize, bool), terms: i64) -> Option<Self> {
        let is_whole = |dim: usize| dim > 0 && dim.is_multiple_of(WGMMA_COLS);
        let fits = is_whole(k) && is_whole(v) && k <= 192 && v <= 128 && !in_key && terms == 1;
        fits.then(|| Self {
            variant: Variant::with(
                "attention_sm90",
                &[("K_DIM", k as i64), ("V_DIM", v as i64)],
            ),
            threads: 256,
        })
    }

    /// Rows of work of a block that reads a prompt: more where a warp has registers for its queries and scores.
    pub(crate) fn prefill_rows((k, v, in_key): (i64, i64, bool), terms: i64) -> i64 {
        match terms == 1 && k <= 192 && v <= 128 && !in_key {
            true => ROWS_IN_REGISTERS,
            false => 64,
        }
    }

    /// Whether heads of these dimensions fit into shared memory.
    pub(crate) fn fits(k: usize, v: usize, in_key: bool) -> bool {
        k <= 1024
            && v <= 1024
            && attention_bytes((k as i64, v as i64, in_key), 64, [1, 0, 3]) <= SHARED_BYTES
    }
}

/// Rows of work of a block whose warps have queries and scores in registers, with one term.
const ROWS_IN_REGISTERS: i64 = 128;

/// Columns of a matrix of `attention_sm90`.
const WGMMA_COLS: usize = 64;

/// Dynamic shared memory of `attention_sm90`: `SHARED_BYTES` of the file.
fn wgmma_attention_bytes(k: i64, v: i64) -> i64 {
    let stages = if k + v <= 256 { 4 } else { 3 };
    let kept = 256 * 2 * (v / 8 + 1) * 8;
    stages * 128 * (k + v) + kept + 1024
}

/// `options`: `BUFFERS`, `QUERIES_SHARED` and `ATTENTION_TERMS`.
fn attention_bytes((k, v, in_key): (i64, i64, bool), rows: i64, options: [i64; 3]) -> i64 {
    let [buffers, queries, terms] = options;
    let values = if in_key { 0 } else { v + 8 };
    let query_bytes = match (terms, k % 32) {
        (1, _) => 2 * (k + 8),
        (_, 0) => 4 * (k + 8),
        _ => 4 * (k + 24),
    };
    let tiles = 128 * buffers * (k + 8 + values);
    match rows == ROWS_IN_REGISTERS {
        true => tiles,
        false => tiles + rows * (4 * 72 + queries * query_bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_gpu_s_shape_of_attention_is_among_the_variants() {
        let variants = all_variants();
        for shared_kib in [97, 98, 161, 225, 226] {
            for (dims, terms) in ATTENTION_DIMS.into_iter().flat_map(|d| [(d, 3), (d, 1)]) {
                for rows in [16, AttentionShape::prefill_rows(dims, terms)] {
                    let shape = AttentionShape::new(dims, rows, terms, shared_kib << 10);
                    assert!(variants.contains(&shape.variant), "{:?}", shape.variant);
                }
            }
        }
    }

    #[test]
    fn every_source_has_a_variant_and_every_variant_a_source() {
        let variants = all_variants();
        let used: HashSet<&str> = variants.iter().map(|v| v.file).collect();
        let there: HashSet<&str> = SOURCES.iter().map(|(name, _)| *name).collect();
        assert_eq!(used, there);
        let distinct: HashSet<&Variant> = variants.iter().collect();
        assert_eq!(distinct.len(), variants.len());
    }

    #[test]
    fn every_header_that_is_included_is_embedded() {
        let texts = SOURCES.iter().chain(HEADERS).map(|(_, text)| text);
        let included = texts.flat_map(|text| {
            text.lines()
                .filter_map(|line| line.strip_prefix("#include \""))
        });
        let mut count = 0;
        for line in included {
            let name = line.trim_end().trim_end_matches('"');
            let is_embedded = HEADERS.iter().any(|(header, _)| *header == name);
            // The host model's own headers are found where it compiles.
            assert!(is_embedded || name.starts_with("hearth_host"), "{name}");
            count += 1;
        }
        assert!(count > 20, "{count}");
    }

    /// Consumer GPUs have 1/64 of their f32 rate in f64.
    #[test]
    fn no_kernel_computes_in_f64() {
        for (name, text) in SOURCES.iter().chain(HEADERS) {
            assert!(!text.contains("double"), "{name}");
        }
    }

    #[test]
    fn the_key_follows_options_and_architecture() {
        let keys: HashSet<String> = all_variants()
            .iter()
            .flat_map(|v| ["sm_80", "sm_89"].map(|arch| v.cache_key(arch)))
            .collect();
        assert_eq!(keys.len(), all_variants().len() * 2);
    }

    #[test]
    fn variants_know_their_hardware() {
        let runs =
            |variant: &Variant| ["sm_80", "sm_89", "sm_90a", "sm_120a"].map(|a| variant.runs_on(a));
        for file in ["attention_sm90", "gemm_fp8_sm90"] {
            assert_eq!(runs(&Variant::plain(file)), [false, false, true, false]);
        }
        let fp8 = [
            ("WEIGHT_TYPE", FP8_WEIGHT),
            ("ACTIVATIONS", FP8_ACTIVATIONS),
        ];
        assert_eq!(
            runs(&Variant::with("linear", &fp8)),
            [false, true, true, true]
        );
        assert_eq!(runs(&Variant::plain("rope")), [true; 4]);
    }
}
