//! A model's weights: one safetensors file, or the shards listed in `model.safetensors.index.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use hearth_kernels::{BlockScales, DType, HostMatrix, SCALE_BLOCK};
use memmap2::{Advice, Mmap};
use sha2::{Digest, Sha256};

use crate::FormatError;
use crate::error::without_bom;
use crate::file::{MAX_CONFIG_BYTES, MAX_INDEX_BYTES, read_file};
use crate::safetensors::{Entry, Header, StoredType, StrictMap};

mod parts;

pub(crate) use parts::{matrix_of_scales, scales_name};

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
const GIVE_A_CHECKPOINT: &str =
    "give the folder of a checkpoint: config.json beside model.safetensors or its shards.";
/// Number of samples that a file's fingerprint hashes.
const SAMPLES: usize = 64;
/// Bytes of one sample.
const SAMPLE_BYTES: usize = 4096;
const WRONG_CONFIG: &str =
    "weights and config.json belong to different models; take both from the same checkpoint.";

/// The weights of a model, memory-mapped; clones share the mapping.
///
/// Slices that it hands out keep the mapping alive, so weights may be deleted or replaced (by rename) under
/// a running worker; only truncating a mapped file in place would kill the process.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    files: Vec<CheckpointFile>,
    tensors: BTreeMap<String, Located>,
    total_bytes: u64,
    fingerprint: String,
}

/// One file of a checkpoint.
#[derive(Clone, Debug)]
pub struct CheckpointFile {
    /// Name without directory.
    pub name: String,
    /// Path it was opened at; empty for a checkpoint in memory.
    pub path: PathBuf,
    /// Contents of the whole file.
    pub data: Bytes,
}

#[derive(Debug)]
struct Located {
    file: usize,
    entry: Entry,
}

/// Metadata of a tensor, known without reading it.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Stored element type; [`StoredType::weight`] tells whether a model can use it.
    pub dtype: StoredType,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Length in bytes.
    pub size_bytes: u64,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Offset of the first byte in that file.
    pub offset: u64,
}

impl Checkpoint {
    /// Maps the checkpoint in `dir`: `model.safetensors` if it exists, else the shards listed in
    /// `model.safetensors.index.json`, else the only `*.safetensors` file.
    ///
    /// Only headers are read. All of them are checked, and each name in the index against its shard.
    ///
    /// # Errors
    /// [`FormatError::Io`], [`FormatError::Missing`] (directory without weights, missing shard, tensor absent from
    /// its shard), [`FormatError::Truncated`], [`FormatError::TooLarge`], [`FormatError::Malformed`].
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        fs::read_dir(dir).map_err(|e| FormatError::io(dir, e, GIVE_A_CHECKPOINT))?;
        // An unreadable config.json is reported by the code that needs its contents.
        let config = read_file(&dir.join("config.json"), MAX_CONFIG_BYTES, "");
        let config = config.unwrap_or_default();
        if dir.join(SINGLE_FILE).exists() {
            return Self::from_files(vec![map_file(dir, SINGLE_FILE)?], None, &config);
        }
        if dir.join(INDEX_FILE).exists() {
            let index = read_index(dir)?;
            let names: BTreeSet<&str> = index.values().map(String::as_str).collect();
            let missing: Vec<&str> = names
                .iter()
                .copied()
                .filter(|name| !dir.join(name).exists())
                .collect();
            if let [first, rest @ ..] = missing.as_slice() {
                return Err(missing_shard(dir, first, rest.len()));
            }
            let files = names
                .iter()
                .map(|name| map_file(dir, name))
                .collect::<Result<Vec<_>, _>>()?;
            return Self::from_files(files, Some(&index), &config);
        }
        Self::from_files(
            vec![map_file(dir, &only_weights_file(dir)?)?],
            None,
            &config,
        )
    }

    /// Opens a checkpoint in memory, given the bytes of one safetensors file.
    ///
    /// # Errors
    /// Same as [`Checkpoint::open`].
    pub fn from_bytes(name: &str, data: Bytes) -> Result<Self, FormatError> {
        let file = CheckpointFile {
            name: name.into(),
            path: PathBuf::new(),
            data,
        };
        Self::from_files(vec![file], None, &[])
    }

    fn from_files(
        files: Vec<CheckpointFile>,
        index: Option<&BTreeMap<String, String>>,
        config: &[u8],
    ) -> Result<Self, FormatError> {
        let mut tensors = BTreeMap::new();
        let mut hash = Sha256::new();
        hash.update(config);
        for (file, source) in files.iter().enumerate() {
            let header = Header::parse(&source.name, &source.data, source.data.len() as u64)?;
            hash.update(source.name.as_bytes());
            hash.update(&source.data[..header.data_start as usize]);
            sample(&source.data[header.data_start as usize..], &mut hash);
            for (name, entry) in header.tensors {
                // A tensor that the index places in another file, or does not list, is not part of the model.
                if index.is_none_or(|index| index.get(&name) == Some(&source.name)) {
                    tensors.insert(name, Located { file, entry });
                }
            }
        }
        if let Some((name, shard)) =
            index.and_then(|index| index.iter().find(|(name, _)| !tensors.contains_key(*name)))
        {
            return Err(FormatError::Missing {
                what: format!("tensor {name}"),
                needed_by: format!("{INDEX_FILE} places it in {shard}, which does not hold it"),
                remedy: "index and shards belong to different checkpoints; download both again."
                    .into(),
            });
        }
        if tensors.is_empty() {
            return Err(FormatError::malformed(
                files.first().map_or(INDEX_FILE, |f| &f.name),
                "holds no tensors",
                GIVE_A_CHECKPOINT,
            ));
        }
        let total_bytes = tensors.values().map(|t| t.entry.size_bytes).sum();
        let fingerprint = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self {
            inner: Arc::new(Inner {
                files,
                tensors,
                total_bytes,
                fingerprint,
            }),
        })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.tensors.keys().map(String::as_str)
    }

    /// Whether the checkpoint has a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.inner.tensors.contains_key(name)
    }

    /// Type, shape and location of a tensor.
    pub fn tensor_info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let Located { file, entry } = self.inner.tensors.get(name)?;
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: &entry.shape,
            size_bytes: entry.size_bytes,
            file: *file,
            offset: entry.offset,
        })
    }

    /// Returns a tensor's mapped bytes.
    ///
    /// # Errors
    /// [`FormatError::Missing`].
    pub fn bytes(&self, name: &str) -> Result<Bytes, FormatError> {
        let located = self.find(name)?;
        Ok(self.slice(located))
    }

    /// Returns the matrix `[rows, cols]` of that name, backed by the mapped bytes. The scales of an FP8 matrix are a
    /// tensor of their own, F32, F16 or BF16, `[ceil(rows / 128), ceil(cols / 128)]`.
    ///
    /// # Errors
    /// [`FormatError::Missing`] (tensor or scales), [`FormatError::Tensor`] (wrong type or shape).
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostMatrix, FormatError> {
        let (located, dtype) = self.find_matrix(name, rows, cols)?;
        let scales = match dtype.format().scales_apart {
            true => Some(self.scales(name, rows, cols)?),
            false => None,
        };
        HostMatrix::new(self.slice(located), dtype, rows, cols, scales)
            .map_err(|e| self.mismatch(name, located, format!("cannot be used: {e}")))
    }

    /// Returns the vector of that name as f32 (exact from F16 and BF16).
    ///
    /// # Errors
    /// [`FormatError::Missing`], [`FormatError::Tensor`] (wrong type or length, or FP8).
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, FormatError> {
        let located = self.find_vector(name, len)?;
        Ok(self.floats(located))
    }

    /// Checks type and shape of the matrix `[rows, cols]` of that name and of its scales from the headers; reads no
    /// weights.
    ///
    /// # Errors
    /// Same as [`Checkpoint::matrix`], except for invalid scale values.
    pub fn check_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<(), FormatError> {
        let (_, dtype) = self.find_matrix(name, rows, cols)?;
        match dtype.format().scales_apart {
            true => self.find_scales(name, rows, cols).map(drop),
            false => Ok(()),
        }
    }

    /// Checks type and length of the vector of that name from the headers.
    ///
    /// # Errors
    /// Same as [`Checkpoint::vector`].
    pub fn check_vector(&self, name: &str, len: usize) -> Result<(), FormatError> {
        self.find_vector(name, len).map(drop)
    }

    /// Total size of all tensors in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.inner.total_bytes
    }

    /// Total size in bytes of the tensors whose names `accept` accepts.
    pub fn bytes_of(&self, mut accept: impl FnMut(&str) -> bool) -> u64 {
        let accepted = self.inner.tensors.iter().filter(|(name, _)| accept(name));
        accepted.map(|(_, t)| t.entry.size_bytes).sum()
    }

    /// The mapped files.
    pub fn files(&self) -> &[CheckpointFile] {
        &self.inner.files
    }

    /// SHA-256 of config.json, of all headers and of 64 samples of each file's weights, in hexadecimal: distinguishes
    /// checkpoints, even those of equal shape, without reading all weights.
    pub fn fingerprint(&self) -> String {
        self.inner.fingerprint.clone()
    }

    fn find(&self, name: &str) -> Result<&Located, FormatError> {
        self.inner
            .tensors
            .get(name)
            .ok_or_else(|| FormatError::Missing {
                what: format!("tensor {name}"),
                needed_by: "config.json implies it, and no safetensors file holds it".into(),
                remedy: WRONG_CONFIG.into(),
            })
    }

    fn find_matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(&Located, DType), FormatError> {
        let located = self.find(name)?;
        let dtype = self.weight_type(name, located)?;
        self.expect_shape(name, located, &[rows, cols])?;
        Ok((located, dtype))
    }

    fn find_vector(&self, name: &str, len: usize) -> Result<&Located, FormatError> {
        let located = self.find(name)?;
        self.expect_shape(name, located, &[len])?;
        self.expect_floats(name, located)?;
        Ok(located)
    }

    /// Finds the scales of an FP8 matrix by their own name.
    fn find_scales(
        &self,
        weight: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(String, &Located), FormatError> {
        let name = scales_name(weight);
        let Some(located) = self.inner.tensors.get(&name) else {
            return Err(FormatError::Missing {
                what: format!("tensor {name}"),
                needed_by: format!("{weight} is F8_E4M3 and needs its block scales"),
                remedy: "take a checkpoint with 128×128 block scales, or one in BF16.".into(),
            });
        };
        let blocks = [rows.div_ceil(SCALE_BLOCK), cols.div_ceil(SCALE_BLOCK)];
        self.expect_shape(&name, located, &blocks)?;
        self.expect_floats(&name, located)?;
        Ok((name, located))
    }

    fn slice(&self, Located { file, entry }: &Located) -> Bytes {
        // `Header::parse` proved that the range lies within the file, whose length is a usize.
        let start = entry.offset as usize;
        self.inner.files[*file]
            .data
            .slice(start..start + entry.size_bytes as usize)
    }

    fn mismatch(&self, name: &str, located: &Located, problem: String) -> FormatError {
        FormatError::Tensor {
            name: name.into(),
            file: self.inner.files[located.file].name.clone(),
            problem,
            remedy: WRONG_CONFIG.into(),
        }
    }

    fn weight_type(&self, name: &str, located: &Located) -> Result<DType, FormatError> {
        located
            .entry
            .dtype
            .weight()
            .ok_or_else(|| FormatError::Tensor {
                name: name.into(),
                file: self.inner.files[located.file].name.clone(),
                problem: format!("is {}", located.entry.dtype.name),
                remedy: "weights may be F32, F16, BF16, or F8_E4M3 with 128×128 block scales."
                    .into(),
            })
    }

    fn expect_shape(
        &self,
        name: &str,
        located: &Located,
        want: &[usize],
    ) -> Result<(), FormatError> {
        if located.entry.shape == want {
            return Ok(());
        }
        let problem = format!(
            "has shape {:?}, but the model needs {want:?}",
            located.entry.shape
        );
        Err(self.mismatch(name, located, problem))
    }

    fn scales(&self, weight: &str, rows: usize, cols: usize) -> Result<BlockScales, FormatError> {
        let (name, located) = self.find_scales(weight, rows, cols)?;
        let values = self.floats(located);
        if let Some(value) = values.iter().find(|v| !v.is_finite()) {
            return Err(FormatError::Tensor {
                name,
                file: self.inner.files[located.file].name.clone(),
                problem: format!("holds the scale {value}"),
                remedy: "the file is damaged; delete it and download it again.".into(),
            });
        }
        Ok(BlockScales {
            values: values.into(),
            blocks_per_row: cols.div_ceil(SCALE_BLOCK),
        })
    }

    fn expect_floats(&self, name: &str, located: &Located) -> Result<(), FormatError> {
        match located.entry.dtype.weight() {
            Some(DType::F32 | DType::F16 | DType::Bf16) => Ok(()),
            Some(DType::F8E4m3) | None => Err(FormatError::Tensor {
                name: name.into(),
                file: self.inner.files[located.file].name.clone(),
                problem: format!("is {}", located.entry.dtype.name),
                remedy: "norms, biases and scales may be F32, F16 or BF16.".into(),
            }),
        }
    }

    /// Returns the values of a tensor that has passed [`Self::expect_floats`].
    fn floats(&self, located: &Located) -> Vec<f32> {
        let data = self.slice(located);
        match located.entry.dtype.weight() {
            Some(DType::F32) => data
                .as_chunks()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect(),
            Some(DType::F16) => data
                .as_chunks()
                .0
                .iter()
                .map(|b| f16::from_le_bytes(*b).to_f32())
                .collect(),
            Some(DType::Bf16) => data
                .as_chunks()
                .0
                .iter()
                .map(|b| bf16::from_le_bytes(*b).to_f32())
                .collect(),
            Some(DType::F8E4m3) | None => Vec::new(),
        }
    }
}

/// Hashes [`SAMPLES`] evenly spread pieces of `data`, or all of it if it is small.
fn sample(data: &[u8], hash: &mut Sha256) {
    if data.len() <= SAMPLES * SAMPLE_BYTES {
        return hash.update(data);
    }
    for start in samples(data.len()) {
        hash.update(&data[start..start + SAMPLE_BYTES]);
    }
}

/// Where the pieces that [`sample`] hashes begin, of so many bytes.
fn samples(len: usize) -> impl Iterator<Item = usize> {
    let last = len.saturating_sub(SAMPLE_BYTES);
    // Computed in u128, since files may have any size.
    (0..SAMPLES).map(move |piece| (last as u128 * piece as u128 / (SAMPLES as u128 - 1)) as usize)
}

/// Has the kernel read what will be hashed of a file all at once: one page after the other, each of them would wait for the disk, and
/// for the megabytes around it.
fn read_samples_ahead(map: &Mmap) {
    let Some((header_len, _)) = map.split_first_chunk() else {
        return;
    };
    let header_len = usize::try_from(u64::from_le_bytes(*header_len)).unwrap_or(usize::MAX);
    let data_start = header_len.saturating_add(size_of::<u64>());
    for start in samples(map.len().saturating_sub(data_start)) {
        // Advice that is not taken costs time alone.
        _ = map.advise_range(
            Advice::WillNeed,
            data_start.saturating_add(start),
            SAMPLE_BYTES,
        );
    }
}

fn map_file(dir: &Path, name: &str) -> Result<CheckpointFile, FormatError> {
    let path = dir.join(name);
    let failed =
        |e: io::Error| FormatError::io(&path, e, "make the weights readable for this user.");
    let file = File::open(&path).map_err(failed)?;
    // SAFETY: the mapping is private and read-only, and lives in the `Bytes` as long as any slice of it. If another
    // process writes to the file, the numbers change, but no code here relies on their validity
    // (all header text was copied and checked). Truncation in place raises SIGBUS, as the type's docs say.
    let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
    read_samples_ahead(&map);
    Ok(CheckpointFile {
        name: name.into(),
        path,
        data: Bytes::from_owner(map),
    })
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: StrictMap<String>,
}

/// Reads the index as a map from tensor name to shard.
fn read_index(dir: &Path) -> Result<BTreeMap<String, String>, FormatError> {
    let path = dir.join(INDEX_FILE);
    let remedy = "make the index readable for this user.";
    let text = read_file(&path, MAX_INDEX_BYTES, remedy)?;
    let bad = |problem: String| {
        FormatError::malformed(
            INDEX_FILE,
            problem,
            "delete the file and download it again.",
        )
    };
    let index: Index = serde_json::from_slice(without_bom(&text))
        .map_err(|e| bad(format!("is not a valid index: {e}")))?;
    let index = index.weight_map.0;
    if index.is_empty() {
        return Err(bad("names no tensors".into()));
    }
    for (tensor, shard) in &index {
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(bad(format!(
                "places tensor {tensor} in {shard:?}, which is not a plain file name"
            )));
        }
    }
    Ok(index)
}

fn missing_shard(dir: &Path, shard: &str, others: usize) -> FormatError {
    let and_others = match others {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    };
    FormatError::Missing {
        what: format!("{shard}{and_others}"),
        needed_by: format!(
            "{INDEX_FILE} names it, and {} does not hold it",
            dir.display()
        ),
        remedy: "the download is incomplete; run it again.".into(),
    }
}

/// Finds the only `*.safetensors` file in a directory without the usual names.
fn only_weights_file(dir: &Path) -> Result<String, FormatError> {
    let entries = fs::read_dir(dir).map_err(|e| FormatError::io(dir, e, GIVE_A_CHECKPOINT))?;
    let names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let weights: Vec<&String> = names
        .iter()
        .filter(|n| n.ends_with(".safetensors"))
        .collect();
    match weights.as_slice() {
        [only] => Ok((*only).clone()),
        [] => Err(no_weights(dir, &names)),
        several => Err(FormatError::Missing {
            what: INDEX_FILE.into(),
            needed_by: format!(
                "{} holds {} safetensors files, and the index tells which tensor is in which",
                dir.display(),
                several.len()
            ),
            remedy: "download the index from where the shards came from.".into(),
        }),
    }
}

fn no_weights(dir: &Path, names: &[String]) -> FormatError {
    let other = names.iter().find(|n| {
        [".gguf", ".bin", ".pt", ".pth"]
            .iter()
            .any(|end| n.ends_with(end))
    });
    FormatError::Missing {
        what: "model.safetensors".into(),
        needed_by: match other {
            Some(other) => format!("{} holds {other} and no safetensors weights", dir.display()),
            None => format!("{} holds no weights", dir.display()),
        },
        remedy: match other {
            Some(_) => "take the model's safetensors version, or convert it.".into(),
            None => GIVE_A_CHECKPOINT.into(),
        },
    }
}
