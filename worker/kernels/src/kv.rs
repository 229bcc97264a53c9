//! The physical layout of the paged KV cache. It owns the byte arithmetic; offsets are computed nowhere else.

/// Index of a physical block of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Element type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDType {
    /// bfloat16, round to nearest even on append.
    Bf16,
    /// IEEE binary32, exact.
    F32,
}

impl KvDType {
    /// Bytes per element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of the cache: what one token stores in one layer, and how tokens are grouped into blocks.
///
/// Grouped-query attention stores `kv_heads` keys of `k_dim` and values of `v_dim`. Multi-head latent
/// attention stores one latent of `k_dim = kv_lora_rank + rope_dim` whose first `v_dim = kv_lora_rank`
/// elements are the value (`value_in_key`), so nothing is stored twice.
///
/// In memory: `[layer][block][token in block][keys of all heads, then values of all heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Layers that hold a cache.
    pub layers: usize,
    /// Heads of keys and values (1 for latent attention).
    pub kv_heads: usize,
    /// Elements of one key.
    pub k_dim: usize,
    /// Elements of one value.
    pub v_dim: usize,
    /// Whether the value is the key's prefix and not stored separately.
    pub value_in_key: bool,
    /// Tokens per block; a power of two.
    pub block_tokens: usize,
    /// Element type.
    pub dtype: KvDType,
}

impl KvLayout {
    /// Elements that one token stores in one layer.
    pub const fn token_elements(&self) -> usize {
        let values = if self.value_in_key { 0 } else { self.v_dim };
        self.kv_heads * (self.k_dim + values)
    }

    /// Bytes that one token stores in one layer.
    pub const fn token_layer_bytes(&self) -> usize {
        self.token_elements() * self.dtype.size_bytes()
    }

    /// Bytes of one block in one layer.
    pub const fn block_layer_bytes(&self) -> usize {
        self.block_tokens * self.token_layer_bytes()
    }

    /// Bytes of one block over all layers: the unit of the KV budget.
    pub const fn block_bytes(&self) -> usize {
        self.layers * self.block_layer_bytes()
    }

    /// Bytes of one token over all layers.
    pub const fn token_bytes(&self) -> usize {
        self.layers * self.token_layer_bytes()
    }

    /// Number of blocks that hold `tokens` tokens.
    pub const fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// A line that two workers compare before they exchange KV: equal lines mean equal byte layouts.
    pub fn fingerprint(&self) -> String {
        let Self {
            layers,
            kv_heads,
            k_dim,
            v_dim,
            value_in_key,
            block_tokens,
            dtype,
        } = self;
        format!(
            "layers={layers} kv_heads={kv_heads} k={k_dim} v={v_dim} latent={value_in_key} block={block_tokens} {dtype:?}"
        )
    }
}
