//! Fields that several architectures read the same way.

use super::fields::{Fields, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH};
use crate::FormatError;

impl Fields<'_> {
    /// Reads `num_key_value_heads`, which must divide the number of query heads; defaults to that number.
    pub(super) fn kv_heads(&self, heads: usize) -> Result<usize, FormatError> {
        let kv_heads = self.size_or("num_key_value_heads", MAX_HEADS, heads)?;
        if heads.is_multiple_of(kv_heads) {
            return Ok(kv_heads);
        }
        Err(self.error(
            "num_attention_heads",
            format!("is {heads}, no multiple of num_key_value_heads {kv_heads}"),
            "each key head serves equally many query heads; download the file again.",
        ))
    }

    /// Reads `head_dim`; defaults to `default`, or to hidden size over heads.
    pub(super) fn head_dim(
        &self,
        heads: usize,
        default: Option<usize>,
    ) -> Result<usize, FormatError> {
        let written = self.optional_size("head_dim", MAX_HEAD_DIM)?;
        if let Some(dim) = written.or(default) {
            self.expect_even("head_dim", dim)?;
            return Ok(dim);
        }
        let hidden = self.size("hidden_size", MAX_WIDTH)?;
        let dim = hidden / heads;
        if !hidden.is_multiple_of(heads) || dim > MAX_HEAD_DIM {
            return Err(self.error(
                "hidden_size",
                format!("is {hidden}, which makes no head_dim with num_attention_heads {heads}"),
                "write head_dim, or download the file again.",
            ));
        }
        self.expect_even("hidden_size / num_attention_heads", dim)?;
        Ok(dim)
    }

    /// Rejects an odd dimension: rotary embedding rotates pairs.
    pub(super) fn expect_even(&self, field: &str, dim: usize) -> Result<(), FormatError> {
        if dim.is_multiple_of(2) {
            return Ok(());
        }
        Err(self.error(
            field,
            format!("is {dim}, and rotary embedding needs pairs"),
            "it must be even; download the file again.",
        ))
    }

    /// Reads a size that may have either of two names.
    pub(super) fn size_either(
        &self,
        field: &str,
        other: &str,
        limit: usize,
    ) -> Result<usize, FormatError> {
        match self.get(field) {
            None if self.get(other).is_some() => self.size(other, limit),
            _ => self.size(field, limit),
        }
    }

    /// Rejects configurations in which a layer attends only to a window (Qwen).
    pub(super) fn refuse_sliding_window(&self) -> Result<(), FormatError> {
        let layer_types = self.get("layer_types").and_then(|v| v.as_array());
        if let Some(other) = layer_types
            .into_iter()
            .flatten()
            .find(|t| t.as_str() != Some("full_attention"))
        {
            return Err(self.error(
                "layer_types",
                format!("holds {other}; only \"full_attention\" is supported"),
                "use a model with full attention in all layers.",
            ));
        }
        if layer_types.is_some() || !self.bool_or("use_sliding_window", false)? {
            return Ok(());
        }
        let layers = self.size("num_hidden_layers", MAX_LAYERS)?;
        let first_windowed = self
            .optional_count("max_window_layers", MAX_POSITIONS)?
            .unwrap_or(0);
        if self.get("sliding_window").is_none() || first_windowed >= layers {
            return Ok(());
        }
        Err(self.error(
            "use_sliding_window",
            "is true, and sliding windows are not supported",
            "set it to false: texts within the window come out the same; or use a model with full attention.",
        ))
    }
}
