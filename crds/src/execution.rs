//! What the planner counts on and workers do: sizes that a plan's memory and predictions are made for, but that are the same
//! in every plan. A worker asserts at compile time that its parts agree.

/// Rows of a prompt that pass through attention at a time where experts are streamed: prompts are long there, and the
/// device's memory is short.
pub const STREAMED_TILE_ROWS: u32 = 512;
/// Most such tiles of a prompt: those of a longer one have more rows, which what its experts take has room for.
pub const STREAMED_TILES: u32 = 8;
/// Room for expanded heads of latent attention, and as much again for a tile of what they are made of: enough for every
/// product to be large, and little beside a tile of rows of the largest models.
pub const EXPANSION_BYTES: u64 = 64 << 20;
/// Most positions, or rows, of a tile that is expanded.
pub const EXPANSION_TILE_ROWS: u32 = 2048;
/// Most rows of a step that uses experts cached on its device: with more, the host needs most experts anyway.
pub const CACHED_STEP_ROWS: u32 = 32;
/// Slots of the shortest ring of experts: one computes while the next is copied.
pub const LEAST_RING_SLOTS: u32 = 2;
/// Slots that dense modules pass through where they stream with the experts.
pub const DENSE_SLOTS: u32 = 2;
/// Groups of experts that a ring has room for; a group is computed together.
pub const RING_GROUPS: u32 = 16;
