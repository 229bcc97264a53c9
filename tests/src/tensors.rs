//! Safetensors files, read and written without any of the code under test.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

/// All tensors of a file, by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors(pub BTreeMap<String, Tensor>);

/// One tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its element type as the file names it, such as `BF16`.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its bytes, little endian.
    pub bytes: Vec<u8>,
}

impl Tensors {
    /// Reads a file.
    ///
    /// # Panics
    /// When it is not a safetensors file.
    pub fn read(path: &Path) -> Self {
        let file =
            std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (header, data) = split(&file);
        let number = |value: &Value| value.as_u64().unwrap_or_default() as usize;
        let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
        let tensors = tensors.map(|(name, entry)| {
            let offsets = &entry["data_offsets"];
            let shape = entry["shape"].as_array().cloned().unwrap_or_default();
            let tensor = Tensor {
                dtype: entry["dtype"].as_str().unwrap_or_default().to_owned(),
                shape: shape.iter().map(number).collect(),
                bytes: data[number(&offsets[0])..number(&offsets[1])].to_vec(),
            };
            (name.clone(), tensor)
        });
        Self(tensors.collect())
    }

    /// Writes a file without gaps between tensors.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, path: &Path) {
        let mut header = Map::new();
        let mut data = Vec::new();
        for (name, tensor) in &self.0 {
            let from = data.len();
            data.extend(&tensor.bytes);
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [from, data.len()]});
            header.insert(name.clone(), entry);
        }
        write_parts(path, &header, &data);
    }

    fn get(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Dimensions of a tensor.
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.get(name).shape
    }

    /// Values of an F32 tensor.
    ///
    /// # Panics
    /// When it is of another type.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.get(name);
        assert_eq!(tensor.dtype, "F32", "{name}");
        let (values, _) = tensor.bytes.as_chunks();
        values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    }

    /// Values of an I32 tensor, none of them negative.
    ///
    /// # Panics
    /// When it is of another type.
    pub fn integers(&self, name: &str) -> Vec<u32> {
        let tensor = self.get(name);
        assert_eq!(tensor.dtype, "I32", "{name}");
        let (values, _) = tensor.bytes.as_chunks();
        values
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect()
    }

    /// Returns the values of an I32 tensor in the form that programs accept: `1,2,3`.
    pub fn list(&self, name: &str) -> String {
        let values: Vec<String> = self.integers(name).iter().map(u32::to_string).collect();
        values.join(",")
    }
}

/// Changes only the header of a file.
///
/// # Panics
/// When it is not a safetensors file or cannot be written.
pub fn edit_header(path: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let file = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (mut header, data) = split(&file);
    edit(&mut header);
    write_parts(path, &header, data);
}

fn split(file: &[u8]) -> (Map<String, Value>, &[u8]) {
    let (length, rest) = file
        .split_first_chunk()
        .unwrap_or_else(|| panic!("too short"));
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = serde_json::from_slice(header).unwrap_or_else(|error| panic!("header: {error}"));
    (header, data)
}

fn write_parts(path: &Path, header: &Map<String, Value>, data: &[u8]) {
    let header = Value::from(header.clone()).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length[..], header.as_bytes(), data].concat();
    std::fs::write(path, file).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
