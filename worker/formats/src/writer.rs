//! Writes sharded safetensors checkpoints as a stream: no tensor is ever held in memory as a whole.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use hearth_kernels::DType;
use serde_json::{Map, Value, json};

use crate::FormatError;
use crate::checkpoint::{INDEX_FILE, SINGLE_FILE};

const CHECK_DISK: &str = "check the free space of the disk and the permissions of the folder.";

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorPlan {
    /// Length in bytes; `None` on overflow.
    pub fn size_bytes(&self) -> Option<u64> {
        // A scalar is a row of one element.
        let (&cols, rows) = self.shape.split_last().unwrap_or((&1, &[]));
        let row_bytes = self.dtype.format().checked_row_bytes(cols)? as u64;
        rows.iter()
            .try_fold(row_bytes, |n, &d| n.checked_mul(d as u64))
    }
}

/// Writes the planned tensors in order, over as many files as the size limit requires, and an index if there are
/// several. Files get their final names only when everything is written.
#[derive(Debug)]
pub struct CheckpointWriter {
    dir: PathBuf,
    shards: Vec<Shard>,
    total_bytes: u64,
    /// The shard being written, and how many of its bytes are still missing.
    open: Option<(BufWriter<File>, u64)>,
    next_shard: usize,
}

#[derive(Debug)]
struct Shard {
    name: String,
    header: Vec<u8>,
    data_bytes: u64,
    tensors: Vec<String>,
}

impl CheckpointWriter {
    /// Begins a checkpoint in `dir`, which must exist, with at most `max_shard_bytes` of tensors per file (a larger
    /// tensor gets a file of its own).
    ///
    /// # Errors
    /// [`FormatError::Malformed`] for a plan with a duplicate name or a size beyond u64; [`FormatError::Io`].
    pub fn create(
        dir: &Path,
        tensors: &[TensorPlan],
        max_shard_bytes: u64,
    ) -> Result<Self, FormatError> {
        let shards = plan_shards(tensors, max_shard_bytes)?;
        let total_bytes = shards.iter().map(|s| s.data_bytes).sum();
        let mut writer = Self {
            dir: dir.to_owned(),
            shards,
            total_bytes,
            open: None,
            next_shard: 0,
        };
        writer.advance()?;
        Ok(writer)
    }

    /// Total size of all planned tensors in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Appends bytes, row-major and little-endian, of the planned tensors in order; a call may end within
    /// a tensor or span several.
    ///
    /// # Errors
    /// [`FormatError::Io`]; [`FormatError::Malformed`] if more is written than planned.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), FormatError> {
        while !bytes.is_empty() {
            let Some((file, left)) = &mut self.open else {
                return Err(wrong_length("more bytes were written than planned"));
            };
            let now = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (head, tail) = bytes.split_at(now);
            file.write_all(head)
                .map_err(|e| FormatError::io(&self.dir, e, CHECK_DISK))?;
            *left -= now as u64;
            bytes = tail;
            if *left == 0 {
                self.advance()?;
            }
        }
        Ok(())
    }

    /// Completes the checkpoint: writes the index, and renames all files to their final names.
    ///
    /// # Errors
    /// [`FormatError::Io`]; [`FormatError::Malformed`] if less was written than planned.
    pub fn finish(self) -> Result<(), FormatError> {
        if self.open.is_some() {
            return Err(wrong_length("fewer bytes were written than planned"));
        }
        for shard in &self.shards {
            let to = self.dir.join(&shard.name);
            fs::rename(self.partial(shard), &to)
                .map_err(|e| FormatError::io(&to, e, CHECK_DISK))?;
        }
        if self.shards.len() < 2 {
            return Ok(());
        }
        let weight_map: BTreeMap<&str, &str> = self
            .shards
            .iter()
            .flat_map(|s| s.tensors.iter().map(|t| (t.as_str(), s.name.as_str())))
            .collect();
        let index = json!({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map});
        let path = self.dir.join(INDEX_FILE);
        fs::write(&path, format!("{index:#}\n")).map_err(|e| FormatError::io(&path, e, CHECK_DISK))
    }

    /// Closes the full shard and opens the next one that has data.
    fn advance(&mut self) -> Result<(), FormatError> {
        if let Some((mut file, _)) = self.open.take() {
            file.flush()
                .map_err(|e| FormatError::io(&self.dir, e, CHECK_DISK))?;
        }
        while let Some(shard) = self.shards.get(self.next_shard) {
            self.next_shard += 1;
            let path = self.partial(shard);
            let failed = |e| FormatError::io(&path, e, CHECK_DISK);
            let mut file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(failed)?);
            file.write_all(&shard.header).map_err(failed)?;
            if shard.data_bytes > 0 {
                self.open = Some((file, shard.data_bytes));
                return Ok(());
            }
            file.flush().map_err(failed)?;
        }
        Ok(())
    }

    fn partial(&self, shard: &Shard) -> PathBuf {
        self.dir.join(format!("{}.partial", shard.name))
    }
}

impl Drop for CheckpointWriter {
    /// Removes partial files if writing was abandoned; after [`CheckpointWriter::finish`] there are none.
    fn drop(&mut self) {
        for shard in &self.shards {
            // A file that was never begun or is already renamed does not exist.
            let _ = fs::remove_file(self.partial(shard));
        }
    }
}

fn wrong_length(problem: &str) -> FormatError {
    FormatError::malformed(
        "checkpoint",
        problem,
        "this is a fault of the program that writes; report it.",
    )
}

fn plan_shards(tensors: &[TensorPlan], max_shard_bytes: u64) -> Result<Vec<Shard>, FormatError> {
    let mut groups: Vec<(Vec<(&TensorPlan, u64)>, u64)> = vec![(Vec::new(), 0)];
    let mut names = std::collections::BTreeSet::new();
    for tensor in tensors {
        let invalid = |problem: &str| {
            FormatError::malformed(
                format!("tensor {}", tensor.name),
                problem,
                "correct the list of tensors.",
            )
        };
        if !names.insert(&tensor.name) {
            return Err(invalid("is planned twice"));
        }
        let size_bytes = tensor.size_bytes().ok_or_else(|| invalid("is too large"))?;
        let full = groups.last().is_some_and(|(group, bytes)| {
            !group.is_empty() && bytes.saturating_add(size_bytes) > max_shard_bytes
        });
        if full {
            groups.push((Vec::new(), 0));
        }
        if let Some((group, bytes)) = groups.last_mut() {
            *bytes = bytes
                .checked_add(size_bytes)
                .ok_or_else(|| invalid("is too large"))?;
            group.push((tensor, size_bytes));
        }
    }
    let count = groups.len();
    let shards = groups
        .into_iter()
        .enumerate()
        .map(|(at, (group, data_bytes))| Shard {
            name: match count {
                1 => SINGLE_FILE.into(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
            },
            header: header(&group),
            data_bytes,
            tensors: group.iter().map(|(t, _)| t.name.clone()).collect(),
        });
    Ok(shards.collect())
}

/// Builds the header: length and JSON, padded with spaces so that the data begin at a multiple of 8.
fn header(tensors: &[(&TensorPlan, u64)]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut begin = 0;
    for (tensor, size_bytes) in tensors {
        let end = begin + size_bytes;
        entries.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [begin, end]}),
        );
        begin = end;
    }
    let mut text = Value::Object(entries).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    header
}
