//! The safetensors container: `u64` header length, little-endian; a JSON object from tensor names to
//! `{dtype, shape, data_offsets}`; the tensors' bytes. Format: <https://github.com/huggingface/safetensors#format>.
//!
//! [`Header::parse`] accepts only a file that is valid as a whole: no duplicate names, no overlaps, no holes, no bytes
//! left over, and every shape equal to its bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use hearth_kernels::DType;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use crate::FormatError;
use crate::error::thousands;

/// Largest header accepted, same as in the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

const DOWNLOAD_AGAIN: &str =
    "the file is damaged or not safetensors. Delete it and download it again.";

/// The parsed and checked header of one file.
#[derive(Clone, Debug)]
pub struct Header {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    /// The free-form `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// Offset of the tensor data: 8 + header length.
    pub data_start: u64,
}

/// Type, shape and location of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: StoredType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Offset of the first byte from the beginning of the file.
    pub offset: u64,
    /// Length in bytes.
    pub size_bytes: u64,
}

/// An element type of safetensors; [`StoredType::weight`] returns the ones that a model may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredType {
    /// Name as spelled by the format.
    pub name: &'static str,
    /// Bits of one element.
    pub bits: u32,
}

const STORED_TYPES: [StoredType; 22] = [
    stored("F32", 32),
    stored("BF16", 16),
    stored("F16", 16),
    stored("F8_E4M3", 8),
    stored("BOOL", 8),
    stored("U8", 8),
    stored("I8", 8),
    stored("F8_E5M2", 8),
    stored("F8_E8M0", 8),
    stored("F8_E4M3FNUZ", 8),
    stored("F8_E5M2FNUZ", 8),
    stored("F4", 4),
    stored("F6_E2M3", 6),
    stored("F6_E3M2", 6),
    stored("I16", 16),
    stored("U16", 16),
    stored("I32", 32),
    stored("U32", 32),
    stored("F64", 64),
    stored("I64", 64),
    stored("U64", 64),
    stored("C64", 64),
];

const fn stored(name: &'static str, bits: u32) -> StoredType {
    StoredType { name, bits }
}

impl StoredType {
    /// Returns the type with the given name.
    pub fn from_name(name: &str) -> Option<Self> {
        STORED_TYPES.into_iter().find(|t| t.name == name)
    }

    /// Returns the type as a weight type if kernels can read it.
    pub fn weight(self) -> Option<DType> {
        [DType::F32, DType::F16, DType::Bf16, DType::F8E4m3]
            .into_iter()
            .find(|d| d.name() == self.name)
    }
}

impl Header {
    /// Parses and checks the header of `file` (its name, for messages).
    ///
    /// `start` is the beginning of the file, at least up to the end of the header; `file_bytes` is its total length.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] if the file ends before its data; [`FormatError::Malformed`] for everything else.
    pub fn parse(file: &str, start: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::malformed(file, problem, DOWNLOAD_AGAIN);
        let header = header_json(file, start, file_bytes)?;
        let data_start = 8 + header.len() as u64;
        let text = std::str::from_utf8(&header).map_err(|e| {
            bad(format!(
                "has a header that is not UTF-8 (at byte {})",
                e.valid_up_to()
            ))
        })?;
        if !text.starts_with('{') {
            return Err(bad("has a header that is not a JSON object".into()));
        }
        let raw: RawHeader = serde_json::from_str(text)
            .map_err(|e| bad(format!("has a header that is not valid: {e}")))?;
        let contradicts = |problem: String| bad(format!("contradicts itself: {problem}"));
        let mut tensors = BTreeMap::new();
        for (name, tensor) in raw.tensors {
            let entry = check_entry(&name, tensor, data_start).map_err(contradicts)?;
            tensors.insert(name, entry);
        }
        let end = check_coverage(&tensors, data_start).map_err(contradicts)?;
        if end > file_bytes {
            return Err(FormatError::Truncated {
                file: file.into(),
                have_bytes: file_bytes,
                want_bytes: end,
            });
        }
        if end < file_bytes {
            return Err(bad(format!(
                "has {} bytes after the last tensor",
                thousands(file_bytes - end)
            )));
        }
        Ok(Self {
            tensors,
            metadata: raw.metadata,
            data_start,
        })
    }
}

/// Copies the JSON bytes of the header: what is checked must not change under a mapped file.
fn header_json(file: &str, start: &[u8], file_bytes: u64) -> Result<Vec<u8>, FormatError> {
    let bad = |problem: String| FormatError::malformed(file, problem, DOWNLOAD_AGAIN);
    if start.starts_with(b"version https://git-lfs") {
        return Err(FormatError::malformed(
            file,
            "is a git-lfs pointer, not the weights themselves",
            "fetch the weights with `git lfs pull` in the folder it came from, or download the file.",
        ));
    }
    let Some(length) = start.first_chunk::<8>() else {
        return Err(bad(format!(
            "has {file_bytes} bytes, too few for safetensors"
        )));
    };
    let length = u64::from_le_bytes(*length);
    if length > file_bytes.saturating_sub(8) {
        return Err(bad(format!(
            "says its header has {} bytes, but the whole file has {}",
            thousands(length),
            thousands(file_bytes)
        )));
    }
    if length > MAX_HEADER_BYTES {
        return Err(bad(format!(
            "says its header has {} bytes; at most {} are allowed",
            thousands(length),
            thousands(MAX_HEADER_BYTES)
        )));
    }
    usize::try_from(length)
        .ok()
        .and_then(|length| start.get(8..)?.get(..length))
        .map(<[u8]>::to_vec)
        .ok_or_else(|| bad("has a header that could not be read whole".into()))
}

fn check_entry(name: &str, raw: RawEntry, data_start: u64) -> Result<Entry, String> {
    let dtype = StoredType::from_name(&raw.dtype)
        .ok_or_else(|| format!("tensor {name} has the unknown dtype {:?}", raw.dtype))?;
    let [begin, end] = raw.data_offsets;
    if begin > end {
        return Err(format!(
            "tensor {name} ends at {end}, before it begins at {begin}"
        ));
    }
    let size_bytes = byte_size(&raw.shape, dtype.bits)
        .ok_or_else(|| format!("tensor {name} has the impossible shape {:?}", raw.shape))?;
    if size_bytes != end - begin {
        return Err(format!(
            "tensor {name} is {} {:?}, which takes {} bytes, but its offsets {begin}..{end} span {}",
            dtype.name,
            raw.shape,
            thousands(size_bytes),
            thousands(end - begin)
        ));
    }
    let offset = data_start
        .checked_add(begin)
        .filter(|o| o.checked_add(size_bytes).is_some());
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    match (offset, shape) {
        (Some(offset), Some(shape)) => Ok(Entry {
            dtype,
            shape,
            offset,
            size_bytes,
        }),
        _ => Err(format!(
            "tensor {name} lies at the impossible offsets {begin}..{end}"
        )),
    }
}

/// Size of a shape in bytes; `None` on overflow, or if sub-byte elements do not fill the last byte.
fn byte_size(shape: &[u64], bits: u32) -> Option<u64> {
    // A zero dimension must not hide an overflow of the others.
    shape
        .iter()
        .try_fold(u64::from(bits), |n, &d| n.checked_mul(d.max(1)))?;
    let bits = shape.iter().product::<u64>() * u64::from(bits);
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Checks that tensors cover the data without overlaps or holes; returns the end of the last one.
fn check_coverage(tensors: &BTreeMap<String, Entry>, data_start: u64) -> Result<u64, String> {
    let mut by_offset: Vec<(&String, &Entry)> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, e)| (e.offset, e.size_bytes));
    let mut end = data_start;
    let mut previous: Option<&String> = None;
    for (name, entry) in by_offset {
        if entry.offset < end {
            let other = previous.map_or("the header", |p| p.as_str());
            return Err(format!("tensor {name} overlaps {other}"));
        }
        if entry.offset > end {
            return Err(format!(
                "{} bytes before tensor {name} belong to no tensor",
                thousands(entry.offset - end)
            ));
        }
        end = entry.offset + entry.size_bytes;
        previous = Some(name);
    }
    Ok(end)
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawEntry>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata = None;
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let repeated = if name == "__metadata__" {
                        let strings: StrictMap<String> = map.next_value()?;
                        metadata.replace(strings.0).is_some()
                    } else {
                        let entry = map
                            .next_value::<RawEntry>()
                            .map_err(|e| de::Error::custom(format!("tensor {name}: {e}")))?;
                        tensors.insert(name.clone(), entry).is_some()
                    };
                    if repeated {
                        return Err(duplicate(&name));
                    }
                }
                Ok(RawHeader {
                    metadata: metadata.unwrap_or_default(),
                    tensors,
                })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// A JSON object whose keys must be unique.
pub(crate) struct StrictMap<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for StrictMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for MapVisitor<V> {
            type Value = StrictMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StrictMap<V>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, V>()? {
                    if entries.contains_key(&name) {
                        return Err(duplicate(&name));
                    }
                    entries.insert(name, value);
                }
                Ok(StrictMap(entries))
            }
        }
        deserializer.deserialize_map(MapVisitor(PhantomData))
    }
}

fn duplicate<E: de::Error>(name: &str) -> E {
    E::custom(format!("{name} appears twice"))
}
