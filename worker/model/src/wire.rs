//! Numbers on their way between ranks: f32, little-endian, unrounded.

/// Numbers as bytes.
pub(crate) fn to_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Numbers of which the bytes are.
pub(crate) fn values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().map(|value| f32::from_le_bytes(*value))
}
