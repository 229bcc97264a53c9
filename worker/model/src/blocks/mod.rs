//! Building blocks of architectures. Each lists its tensors and computes its output from a normalised input.

pub(crate) mod ffn;
pub(crate) mod gqa;
pub(crate) mod mla;
pub(crate) mod moe;
pub(crate) mod rope;

use hearth_kernels::ops::KvOps;
use hearth_kernels::{AttentionSpec, Backend, KernelError, Span};

use crate::flight::Sequences;
use crate::{ModelError, ModuleWeights, Observer, Residency};

/// What a block sees of the pass that runs it.
pub(crate) struct Pass<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) residency: &'a dyn Residency<B>,
    pub(crate) sequences: &'a Sequences,
    pub(crate) observer: &'a mut dyn Observer<B>,
    /// Index of the running layer.
    pub(crate) layer: usize,
    /// Index of its KV in the cache.
    pub(crate) cache_layer: usize,
    /// Total number of blocks.
    pub(crate) blocks: usize,
    /// Most rows that attention and dense feed-forward blocks take at once.
    pub(crate) tile_rows: usize,
}

/// What is done once the keys and values of a block's rows are in the cache.
pub(crate) type Cached<'a, B> = &'a mut dyn FnMut(&<B as KvOps>::Kv) -> Result<(), ModelError>;

impl<B: Backend> Pass<'_, B> {
    /// Ends the pass if its result is no longer wanted; called between long operations.
    pub(crate) fn check_cancelled(&mut self) -> Result<(), ModelError> {
        match self
            .observer
            .goes_on(self.sequences.blocks_done, self.blocks)
        {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        }
    }

    /// Shows a named intermediate of this layer to the observer.
    pub(crate) fn show(&mut self, name: &'static str, x: &B::Tensor) {
        self.observer
            .tensor(name, Some(self.layer), self.backend, x);
    }
}

/// Products of `x` `[rows, in]` with several weights of a module, each under the names of its weight and, if it may have one,
/// its bias. Where operations are computed when they are called, the pass can be ended between them.
pub(crate) fn project<B: Backend, const N: usize>(
    pass: &mut Pass<'_, B>,
    weights: &ModuleWeights<B>,
    x: &B::Tensor,
    names: [(&'static str, &'static str); N],
) -> Result<[B::Tensor; N], ModelError> {
    let backend = pass.backend;
    let mut products = Vec::with_capacity(N);
    for (weight, bias) in names {
        products.push((weights.matrix(weight)?, weights.optional_vector(bias)));
    }
    let projected = match backend.longest_operation_products() {
        None => backend.linears(x, &products)?,
        Some(_) => {
            let mut projected = Vec::with_capacity(N);
            for (index, (weight, bias)) in products.into_iter().enumerate() {
                if index > 0 {
                    pass.check_cancelled()?;
                }
                projected.push(backend.linear(x, weight, bias)?);
            }
            projected
        }
    };
    <[B::Tensor; N]>::try_from(projected).map_err(|projected| {
        let detail = format!("{} results of {N} products", projected.len());
        KernelError::Shape {
            op: "linears",
            detail,
        }
        .into()
    })
}

/// Fewest rows in a tile of attention: fewer would read the keys too often.
const LEAST_TILE_ROWS: usize = 64;

/// Attention of the queries `q` `[rows, heads * k_dim]` over a layer of a cache, whose sequences are these, →
/// `[rows, heads * v_dim]`. Where that is long, the pass can be ended between tiles of rows; the bits are the same.
pub(crate) fn attend<B: Backend>(
    pass: &mut Pass<'_, B>,
    (kv, layer, spans): (&B::Kv, usize, &[Span]),
    q: &B::Tensor,
    spec: AttentionSpec,
) -> Result<B::Tensor, ModelError> {
    let backend = pass.backend;
    let layout = backend.kv_layout(kv);
    let rows = backend.shape(q).0;
    let most_products = backend.longest_operation_products();
    let Some(most_products) = most_products.filter(|_| rows > LEAST_TILE_ROWS) else {
        return Ok(backend.attention(q, kv, layer, spans, spec)?);
    };
    let of_pair = (spec.heads * (layout.k_dim + layout.v_dim)) as u64;
    let tiles = tiles(spans, most_products / of_pair.max(1));
    if tiles.len() <= 1 {
        return Ok(backend.attention(q, kv, layer, spans, spec)?);
    }
    let mut out = backend.zeros(rows, spec.heads * layout.v_dim)?;
    for tile in tiles {
        pass.check_cancelled()?;
        backend.attention_rows(&mut out, q, kv, layer, &tile, spec)?;
    }
    Ok(out)
}

/// Cuts spans into tiles of rows, in order, so that a tile has at most `most_pairs` pairs of a query and a position that it
/// sees, but not fewer than [`LEAST_TILE_ROWS`] rows if there are as many.
fn tiles(spans: &[Span], most_pairs: u64) -> Vec<Vec<Span>> {
    let mut tiles = Vec::new();
    let mut tile: Vec<Span> = Vec::new();
    let (mut rows, mut pairs) = (0, 0);
    for span in spans {
        let mut first = 0;
        while first < span.rows {
            let position = (span.start + first) as u64;
            let left = most_pairs.saturating_sub(pairs);
            if rows >= LEAST_TILE_ROWS && left <= position {
                tiles.push(std::mem::take(&mut tile));
                (rows, pairs) = (0, 0);
                continue;
            }
            // Rows that see up to `position + rows` positions each: rows * (position + rows) <= left.
            let by_pairs = ((position * position + 4 * left).isqrt() - position) / 2;
            let taken = (by_pairs as usize)
                .max(LEAST_TILE_ROWS.saturating_sub(rows))
                .clamp(1, span.rows - first);
            tile.push(Span {
                first_row: span.first_row + first,
                rows: taken,
                start: span.start + first,
                blocks: span.blocks.clone(),
            });
            rows += taken;
            pairs += taken as u64 * (position + taken as u64);
            first += taken;
        }
    }
    if !tile.is_empty() {
        tiles.push(tile);
    }
    tiles
}

/// Returns `model.layers.{layer}.{rest}`, the name that all published checkpoints use for a layer's tensors.
pub(crate) fn layer_name(layer: u32, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first_row: usize, rows: usize, start: usize) -> Span {
        Span {
            first_row,
            rows,
            start,
            blocks: Vec::new(),
        }
    }

    fn cut(spans: &[Span], most_pairs: u64) -> Vec<Vec<(usize, usize, usize)>> {
        let of = |span: &Span| (span.first_row, span.rows, span.start);
        tiles(spans, most_pairs)
            .iter()
            .map(|tile| tile.iter().map(of).collect())
            .collect()
    }

    #[test]
    fn tiles_hold_all_rows_once_and_no_more_pairs_than_allowed() {
        // A decode step of a few sequences, and short prompts, stay whole.
        let decode = [span(0, 1, 900), span(1, 1, 7), span(2, 30, 0)];
        assert_eq!(cut(&decode, 10).len(), 1);
        let prompt = [span(0, 1, 5000), span(1, 300, 1000)];
        let tiles = cut(&prompt, 100_000);
        assert_eq!(tiles[0], [(0, 1, 5000), (1, 87, 1000)]);
        let mut next = (1, 1000);
        for (index, tile) in tiles.iter().enumerate() {
            let parts = if index == 0 { &tile[1..] } else { &tile[..] };
            for &(first_row, rows, start) in parts {
                assert_eq!((first_row, start), next, "{tiles:?}");
                next = (first_row + rows, start + rows);
            }
            let rows: usize = tile.iter().map(|part| part.1).sum();
            let pairs: usize = tile.iter().map(|part| part.1 * (part.2 + part.1)).sum();
            assert!(rows <= LEAST_TILE_ROWS || pairs <= 100_001, "{tiles:?}");
        }
        assert_eq!(next, (301, 1300));
        assert_eq!(cut(&[span(0, 640, 0)], 30_000).len(), 8);
        assert_eq!(
            cut(&[span(0, 200, 0)], 1),
            [
                [(0, 64, 0)],
                [(64, 64, 64)],
                [(128, 64, 128)],
                [(192, 8, 192)]
            ]
        );
    }
}
