//! Checks that operands fit each other: the same result and the same message on every backend.

use std::ops::Range;

use crate::{
    AttentionSpec, BlockId, ExpertProducts, KernelError, KvLayout, MlaHeads, RopeTable, RouterSpec,
    Span,
};

/// `[rows, cols]` of an operand.
pub type Shape = (usize, usize);

/// Returns [`KernelError::Shape`] for operation `op` unless `fits`.
///
/// # Errors
/// As above; `detail` is called only then.
pub fn ensure(
    fits: bool,
    op: &'static str,
    detail: impl FnOnce() -> String,
) -> Result<(), KernelError> {
    if fits {
        Ok(())
    } else {
        Err(KernelError::Shape {
            op,
            detail: detail(),
        })
    }
}

/// Checks that `values` fill a tensor.
///
/// # Errors
/// [`KernelError::Shape`], as for every check in this module.
pub fn upload((rows, cols): Shape, values: usize) -> Result<(), KernelError> {
    ensure(rows.checked_mul(cols) == Some(values), "upload", || {
        format!("{values} values for [{rows}, {cols}]")
    })
}

/// Checks that rows are some of a tensor's.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn rows_read(x: Shape, rows: &Range<usize>) -> Result<(), KernelError> {
    let is_within = rows.start <= rows.end && rows.end <= x.0;
    ensure(is_within, "rows_read", || {
        format!("rows {rows:?} of {}", shape(x))
    })
}

/// Checks that `values` are whole rows of a tensor from row `first` on.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn rows_write((rows, cols): Shape, first: usize, values: usize) -> Result<(), KernelError> {
    let end = first.saturating_add(values / cols.max(1));
    let fits = values.is_multiple_of(cols.max(1)) && end <= rows;
    ensure(fits, "rows_write", || {
        format!("{values} values from row {first} on for [{rows}, {cols}]")
    })
}

/// Checks that tokens are within a vocabulary.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn embed(tokens: &[u32], vocab: usize) -> Result<(), KernelError> {
    tokens.iter().try_for_each(|&token| {
        ensure((token as usize) < vocab, "embed", || {
            format!("token {token} of a vocabulary of {vocab}")
        })
    })
}

/// Checks that there are logits for all choices.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn sample(logits: Shape, choices: usize) -> Result<(), KernelError> {
    ensure(choices <= logits.0, "sample", || {
        format!("{choices} choices from logits {}", shape(logits))
    })
}

/// Checks `x` times a weight, plus a bias.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn linear(x: Shape, w: Shape, bias: Option<usize>) -> Result<(), KernelError> {
    ensure(x.1 == w.1, "linear", || {
        format!("x {} with W {}", shape(x), shape(w))
    })?;
    ensure(bias.is_none_or(|bias| bias == w.0), "linear", || {
        format!("{} biases for {} outputs", bias.unwrap_or(0), w.0)
    })
}

/// Checks that columns divide into groups that share a norm's weight.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn rms_norm(cols: usize, group: usize) -> Result<(), KernelError> {
    ensure(group > 0 && cols.is_multiple_of(group), "rms_norm", || {
        format!("{cols} columns in groups of {group}")
    })
}

/// Checks that two operands have the same shape.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn same(op: &'static str, a: Shape, b: Shape) -> Result<(), KernelError> {
    ensure(a == b, op, || format!("{} and {}", shape(a), shape(b)))
}

/// Checks columns `first..first + take` of each of `groups` groups of `cols` columns in total.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn columns(cols: usize, groups: usize, first: usize, take: usize) -> Result<(), KernelError> {
    let fits = groups > 0
        && cols.is_multiple_of(groups)
        && first
            .checked_add(take)
            .is_some_and(|end| end <= cols / groups);
    ensure(fits, "columns", || {
        format!("columns {first}+{take} of each of {groups} groups in {cols}")
    })
}

/// Checks the groups of two operands.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn interleave(a: Shape, b: Shape, groups: usize) -> Result<(), KernelError> {
    let fits = groups > 0 && a.0 == b.0 && a.1.is_multiple_of(groups) && b.1.is_multiple_of(groups);
    ensure(fits, "interleave", || {
        format!("{} and {} in {groups} groups", shape(a), shape(b))
    })
}

/// Checks that the rows picked from an operand exist.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn rows(rows: &[u32], of: usize) -> Result<(), KernelError> {
    rows.iter()
        .try_for_each(|&row| ensure((row as usize) < of, "rows", || format!("row {row} of {of}")))
}

/// Checks that a tile at a row and column is within an operand.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn put_tile(x: Shape, (row, col): Shape, tile: Shape) -> Result<(), KernelError> {
    let is_within = |first: usize, count, of| first.checked_add(count).is_some_and(|end| end <= of);
    let fits = is_within(row, tile.0, x.0) && is_within(col, tile.1, x.1);
    ensure(fits, "put_tile", || {
        format!(
            "{} from row {row}, column {col} of {}",
            shape(tile),
            shape(x)
        )
    })
}

/// Checks that rows are within a weight of `of` rows.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn weight_rows(first: usize, rows: usize, of: usize) -> Result<(), KernelError> {
    let fits = first.checked_add(rows).is_some_and(|end| end <= of);
    ensure(fits, "weight_rows", || {
        format!("rows {first}+{rows} of {of}")
    })
}

/// Checks the heads that rotate.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn rope(
    x: Shape,
    (heads, first): (usize, usize),
    positions: usize,
    table: &RopeTable,
) -> Result<(), KernelError> {
    let half = table.inv_freq.len();
    let fits = heads > 0
        && x.1.is_multiple_of(heads)
        && first + 2 * half <= x.1 / heads
        && positions == x.0;
    ensure(fits, "rope", || {
        format!(
            "{} with {heads} heads, {positions} positions, {half} frequencies from column {first} on",
            shape(x)
        )
    })
}

/// Checks a cache for expanded heads with their `product` and `latents`.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_append_expanded(
    layout: &KvLayout,
    product: Shape,
    latents: Shape,
    dims: MlaHeads,
) -> Result<(), KernelError> {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let fits = !layout.value_in_key
        && latents.1 >= rank
        && (layout.kv_heads, layout.v_dim) == (heads, v)
        && rank + layout.k_dim == latents.1 + nope
        && product == (latents.0, heads * (nope + v));
    ensure(fits, "kv_append_expanded", || {
        format!(
            "{} of latents {} with {heads} heads, nope {nope}, v {v}, rank {rank} for {}",
            shape(product),
            shape(latents),
            layout.fingerprint()
        )
    })
}

/// Checks `x` `[tokens, heads * width]` with `kv_b` `[heads * (nope + v), rank]`.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn mla(
    op: &'static str,
    x: Shape,
    width: usize,
    kv_b: Shape,
    dims: MlaHeads,
) -> Result<(), KernelError> {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let fits = kv_b == (heads * (nope + v), rank) && x.1 == heads * width;
    ensure(fits, op, || {
        format!(
            "x {} and kv_b {} with {heads} heads, nope {nope}, v {v}, rank {rank}",
            shape(x),
            shape(kv_b)
        )
    })
}

/// Checks a router's logits and parameters.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn route(experts: usize, bias: Option<usize>, spec: &RouterSpec) -> Result<(), KernelError> {
    let RouterSpec {
        top_k,
        groups,
        top_groups,
        ..
    } = *spec;
    let fits = groups > 0
        && experts > 0
        && experts.is_multiple_of(groups)
        && (1..=groups).contains(&top_groups)
        && (1..=top_groups * (experts / groups)).contains(&top_k);
    ensure(fits, "route", || {
        format!("{top_k} of {experts} experts in the best {top_groups} of {groups} groups")
    })?;
    ensure(bias.is_none_or(|bias| bias == experts), "route", || {
        format!("{} biases for {experts} experts", bias.unwrap_or(0))
    })
}

/// Checks a cache's dimensions.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_alloc(layout: &KvLayout) -> Result<(), KernelError> {
    let KvLayout {
        layers: _,
        kv_heads,
        k_dim,
        v_dim,
        value_in_key,
        block_tokens,
        dtype: _,
    } = *layout;
    let sound = kv_heads > 0
        && k_dim > 0
        && v_dim > 0
        && block_tokens.is_power_of_two()
        && (!value_in_key || v_dim <= k_dim);
    ensure(sound, "kv_alloc", || layout.fingerprint())
}

/// Checks keys and values to be stored.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_append(layout: &KvLayout, keys: Shape, values: Option<Shape>) -> Result<(), KernelError> {
    let fits = keys.1 == layout.kv_heads * layout.k_dim
        && values.is_none() == layout.value_in_key
        && values.is_none_or(|v| v == (keys.0, layout.kv_heads * layout.v_dim));
    ensure(fits, "kv_append", || {
        format!(
            "keys {} and values {values:?} in {}",
            shape(keys),
            layout.fingerprint()
        )
    })
}

/// Checks queries and keys on their way to a cache of heads of `head_dim` elements.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn cache_heads(layout: &KvLayout, q: Shape, head_dim: usize) -> Result<(), KernelError> {
    let fits = !layout.value_in_key
        && head_dim > 0
        && (layout.k_dim, layout.v_dim) == (head_dim, head_dim)
        && q.1.is_multiple_of(head_dim);
    ensure(fits, "cache_heads", || {
        format!(
            "queries {} in heads of {head_dim} for {}",
            shape(q),
            layout.fingerprint()
        )
    })
}

/// Checks that a cache has the layer.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_layer(op: &'static str, layout: &KvLayout, layer: usize) -> Result<(), KernelError> {
    ensure(layer < layout.layers, op, || {
        format!("layer {layer} of {}", layout.layers)
    })
}

/// Checks that bytes are whole token records.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_records(layout: &KvLayout, bytes: usize) -> Result<usize, KernelError> {
    let size = layout.token_layer_bytes();
    ensure(bytes.is_multiple_of(size), "kv_write", || {
        format!("{bytes} bytes in records of {size}")
    })?;
    Ok(bytes / size)
}

/// Checks the blocks, in a cache of `total`, that cover `tokens` tokens from `first_token`.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn kv_blocks(
    op: &'static str,
    layout: &KvLayout,
    total: usize,
    blocks: &[BlockId],
    first_token: usize,
    tokens: usize,
) -> Result<(), KernelError> {
    let covered = first_token
        .checked_add(tokens)
        .is_some_and(|end| layout.blocks_for(end) <= blocks.len());
    ensure(covered, op, || {
        format!(
            "tokens {first_token}+{tokens} in {} blocks of {}",
            blocks.len(),
            layout.block_tokens
        )
    })?;
    blocks.iter().try_for_each(|block| {
        ensure((block.0 as usize) < total, op, || {
            format!("block {} of {total}", block.0)
        })
    })
}

/// Checks that a span lies in the batch and that its blocks cover it.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn span(
    op: &'static str,
    layout: &KvLayout,
    total_blocks: usize,
    span: &Span,
    batch_rows: usize,
) -> Result<(), KernelError> {
    let in_batch = span
        .first_row
        .checked_add(span.rows)
        .is_some_and(|end| end <= batch_rows);
    ensure(in_batch, op, || {
        format!(
            "span of rows {}+{} in a batch of {batch_rows}",
            span.first_row, span.rows
        )
    })?;
    kv_blocks(
        op,
        layout,
        total_blocks,
        &span.blocks,
        span.start,
        span.rows,
    )
}

/// Checks that attention's output has a row for each query.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn attention_out(
    layout: &KvLayout,
    q: Shape,
    out: Shape,
    spec: AttentionSpec,
) -> Result<(), KernelError> {
    let want = (q.0, spec.heads * layout.v_dim);
    ensure(out == want, "attention", || {
        format!("output {} for {}", shape(out), shape(want))
    })
}

/// Checks queries, and that no row belongs to two spans.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn attention(
    layout: &KvLayout,
    total_blocks: usize,
    q: Shape,
    layer: usize,
    spans: &[Span],
    spec: AttentionSpec,
) -> Result<(), KernelError> {
    let heads = spec.heads;
    let fits = heads > 0
        && heads.is_multiple_of(layout.kv_heads)
        && q.1 == heads * layout.k_dim
        && layer < layout.layers;
    ensure(fits, "attention", || {
        format!(
            "q {} with {heads} heads in layer {layer} of {}",
            shape(q),
            layout.fingerprint()
        )
    })?;
    for one in spans {
        span("attention", layout, total_blocks, one, q.0)?;
    }
    let mut ranges: Vec<(usize, usize)> = spans.iter().map(|s| (s.first_row, s.rows)).collect();
    ranges.sort_unstable();
    ranges.windows(2).try_for_each(|pair| {
        ensure(pair[0].0 + pair[0].1 <= pair[1].0, "attention", || {
            format!(
                "spans of rows {}+{} and {}+{} overlap",
                pair[0].0, pair[0].1, pair[1].0, pair[1].1
            )
        })
    })
}

/// Checks a routed expert's matrices (gate, up, down) with input and output.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn expert(out: Shape, x: Shape, [gate, up, down]: [Shape; 3]) -> Result<(), KernelError> {
    let fits = out.0 == x.0 && gate.1 == x.1 && up == gate && down == (out.1, gate.0);
    ensure(fits, "experts", || {
        let [x, out, gate, up, down] = [x, out, gate, up, down].map(shape);
        format!("x {x}, out {out}, gate {gate}, up {up}, down {down}")
    })
}

/// Checks the rows of an expert with their weights.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn expert_rows(rows: &[u32], weights: usize, of: usize) -> Result<(), KernelError> {
    ensure(rows.len() == weights, "experts", || {
        format!("{} rows with {weights} weights", rows.len())
    })?;
    rows.iter().try_for_each(|&row| {
        ensure((row as usize) < of, "experts", || {
            format!("row {row} of {of}")
        })
    })
}

/// Checks the places of experts' products; returns the number of tokens. `products`: their rows.
///
/// # Errors
/// [`KernelError::Shape`].
pub fn product_sum(products: usize, of: &ExpertProducts<'_>) -> Result<usize, KernelError> {
    let (routing, experts) = (of.routing, of.experts);
    let choices = routing.experts.len();
    let fits = of.rows.len() == choices && choices.is_multiple_of(routing.top_k.max(1));
    ensure(fits, "product_sum", || {
        let (rows, top_k) = (of.rows.len(), routing.top_k);
        format!("{rows} rows for {choices} choices, {top_k} a token")
    })?;
    for row in of.rows {
        ensure((*row as usize) < products, "product_sum", || {
            format!("row {row} of {products}")
        })?;
    }
    for chosen in routing.experts.chunks(routing.top_k.max(1)) {
        let ascends = chosen.is_sorted_by(|a, b| a < b);
        let has_all = chosen.iter().all(|expert| (*expert as usize) < experts);
        ensure(ascends && has_all, "product_sum", || {
            format!("a token chose {chosen:?} of {experts} experts: they must ascend")
        })?;
    }
    Ok(choices / routing.top_k.max(1))
}

fn shape((rows, cols): Shape) -> String {
    format!("[{rows}, {cols}]")
}
