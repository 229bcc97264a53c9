//! Mixture of experts: runs the chosen experts.
//!
//! Slots (a token and one of its choices) are sorted by expert. The matrix kernels take tiles of slots of one expert,
//! so that an expert's weights are loaded once for up to 64 of them, and tiles of one expert run together. Each
//! token's outputs are then added in the order of its experts.

use hearth_kernels::ops::ExpertOps;
use hearth_kernels::{DType, ExpertCall, ExpertWeights, KernelError, checks};

use super::linear::{DECODE_ROWS, TILE_ROWS};
use super::tensor::{CudaChosen, ExpertArg, Terms, TileArg, WeightData};
use super::{CudaBackend, CudaTensor, CudaWeight, Kernel};
use crate::compile::Variant;
use crate::memory::Buffer;
use crate::queue::Args;

/// Maximum number of slots in moe_sort.cu.
const MOST_SLOTS: usize = 65_536;
/// Minimum working memory of one pass; normally it is half of what the budget leaves.
const LEAST_WORK_BYTES: u64 = 4 << 20;

/// All routed experts of a layer on the device.
pub struct CudaBank {
    /// One `struct Expert` per expert.
    table: Buffer,
    count: usize,
    shape: ExpertShape,
    /// The matrices that the table points to.
    _weights: Vec<[CudaWeight; 3]>,
}

/// Properties that all experts of a pass share.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ExpertShape {
    hidden: usize,
    inter: usize,
    /// Element type of gate and up.
    input: DType,
    /// Element type of down.
    output: DType,
}

/// Sorted slots on the device.
struct Slots {
    /// `[slots]`: row of the input.
    rows: u64,
    /// `[tokens, per_token]`: position in the sorted order, or -1.
    positions: u64,
    /// `[tokens, per_token]`.
    weights: u64,
    tiles: u64,
    tile_count: u64,
    /// Upper bound of the number of tiles.
    most_tiles: usize,
    slots: usize,
    per_token: usize,
    tile_rows: usize,
}

impl ExpertShape {
    fn of(gate: &WeightData, up: &WeightData, down: &WeightData) -> Result<Self, KernelError> {
        checks::ensure(gate.dtype == up.dtype, "experts", || {
            format!(
                "gate is {} and up {}: on a GPU both must be of one type",
                gate.dtype.name(),
                up.dtype.name()
            )
        })?;
        Ok(Self {
            hidden: down.rows,
            inter: gate.rows,
            input: gate.dtype,
            output: down.dtype,
        })
    }

    /// Bytes of working memory per slot.
    fn slot_bytes(self) -> usize {
        self.hidden * 4 + self.inter * 4 + self.inter.next_multiple_of(128) * 6 + 64
    }
}

impl ExpertOps for CudaBackend {
    type ExpertBank = CudaBank;

    fn expert_bank(
        &self,
        experts: &[ExpertWeights<'_, CudaWeight>],
    ) -> Result<Option<CudaBank>, KernelError> {
        let Some(first) = experts.first() else {
            return Ok(None);
        };
        let shape = ExpertShape::of(&first.gate.0, &first.up.0, &first.down.0)?;
        let mut table = Vec::with_capacity(experts.len() * size_of::<ExpertArg>());
        for expert in experts {
            let (gate, up, down) = (&*expert.gate.0, &*expert.up.0, &*expert.down.0);
            if ExpertShape::of(gate, up, down)? != shape {
                return Ok(None); // Experts of different shapes are run by the host's choice, in groups of equal shape.
            }
            table.push(expert_arg(gate, up, down));
        }
        // SAFETY: every byte of an `Argument` is initialised.
        let bytes = unsafe {
            std::slice::from_raw_parts(table.as_ptr().cast::<u8>(), size_of_val(&*table))
        };
        self.modules.prepare(
            ["route", "moe_sort"]
                .map(Variant::plain)
                .into_iter()
                .chain([shape.input, shape.output].map(|d| self.matrix_variant("experts", d))),
        );
        let held =
            |e: &ExpertWeights<'_, CudaWeight>| [e.gate.clone(), e.up.clone(), e.down.clone()];
        Ok(Some(CudaBank {
            table: self.send_bytes(bytes, "a table of experts")?,
            count: experts.len(),
            shape,
            _weights: experts.iter().map(held).collect(),
        }))
    }

    fn banked_experts(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        chosen: &CudaChosen,
        bank: &CudaBank,
    ) -> Result<(), KernelError> {
        let ExpertShape { hidden, inter, .. } = bank.shape;
        let matrices = [(inter, x.cols), (inter, x.cols), (hidden, inter)];
        checks::expert(out.shape(), x.shape(), matrices)?;
        checks::ensure(chosen.tokens == x.rows, "experts", || {
            format!("choices of {} tokens for {}", chosen.tokens, x.rows)
        })?;
        super::elementwise::changed(out);
        let terms = self.terms(x, bank.shape.input)?;
        let top_k = chosen.spec.top_k;
        let chunk = (self.most_slots(bank.shape) / top_k).max(1);
        for first in (0..x.rows).step_by(chunk) {
            let tokens = chunk.min(x.rows - first);
            let slots = self.sort(chosen, bank.count, first, tokens)?;
            self.run_slots(
                out,
                first,
                tokens,
                &terms,
                bank.table.address(),
                bank.shape,
                &slots.0,
            )?;
        }
        Ok(())
    }

    fn experts(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        calls: &[ExpertCall<'_, CudaWeight>],
    ) -> Result<(), KernelError> {
        for call in calls {
            let matrices = [call.gate, call.up, call.down].map(|m| m.0.shape());
            checks::expert(out.shape(), x.shape(), matrices)?;
            checks::expert_rows(call.rows, call.weights.len(), x.rows)?;
        }
        super::elementwise::changed(out);
        let mut rest: Vec<&ExpertCall<'_, CudaWeight>> =
            calls.iter().filter(|call| !call.rows.is_empty()).collect();
        while let Some(first) = rest.first() {
            let shape = call_shape(first)?;
            let most = self.most_slots(shape);
            let (mut slots, mut count) = (0, 0);
            for call in &rest {
                slots += call.rows.len();
                if count > 0 && (slots > most || call_shape(call)? != shape) {
                    break;
                }
                count += 1;
            }
            let later = rest.split_off(count);
            self.run_alike(out, x, &rest, shape)?;
            rest = later;
        }
        Ok(())
    }
}

impl CudaBackend {
    /// Runs calls of the same shape, sorted by the host.
    fn run_alike(
        &self,
        out: &CudaTensor,
        x: &CudaTensor,
        calls: &[&ExpertCall<'_, CudaWeight>],
        shape: ExpertShape,
    ) -> Result<(), KernelError> {
        let table: Vec<ExpertArg> = calls
            .iter()
            .map(|call| expert_arg(&call.gate.0, &call.up.0, &call.down.0))
            .collect();
        let total: usize = calls.iter().map(|call| call.rows.len()).sum();
        let tile_rows = tile_rows(total, calls.len());
        let order = HostOrder::new(calls, x.rows, tile_rows);
        let slots = Slots {
            rows: self.host(&order.rows)?,
            positions: self.host(&order.positions)?,
            weights: self.host(&order.weights)?,
            tiles: self.host(&order.tiles)?,
            tile_count: self.host(&[order.tiles.len() as i32])?,
            most_tiles: order.tiles.len(),
            slots: total,
            per_token: order.per_token,
            tile_rows,
        };
        let terms = self.terms(x, shape.input)?;
        self.run_slots(out, 0, x.rows, &terms, self.host(&table)?, shape, &slots)
    }

    /// Sorts the choices of `tokens` tokens from `first` on the device;
    /// the returned buffer holds the data that the slots point to.
    fn sort(
        &self,
        chosen: &CudaChosen,
        experts: usize,
        first: usize,
        tokens: usize,
    ) -> Result<(Slots, Buffer), KernelError> {
        let top_k = chosen.spec.top_k;
        let slots = tokens * top_k;
        let tile_rows = tile_rows(slots, experts.min(slots));
        let most_tiles = slots.min(experts + slots / tile_rows);
        // tiles, then rows, positions and the count.
        let tile_bytes = most_tiles * size_of::<TileArg>();
        let buffer = self.buffer(tile_bytes + (2 * slots + 1) * 4, "sorted slots")?;
        let rows = buffer.address() + tile_bytes as u64;
        let positions = rows + slots as u64 * 4;
        let tile_count = positions + slots as u64 * 4;
        let offset = (first * top_k * 4) as u64;
        let args = Args::new()
            .with(chosen.experts.address() + offset)
            .with(tokens as i32)
            .with(top_k as i32)
            .with(experts as i32)
            .with(tile_rows as i32)
            .with(rows)
            .with(positions)
            .with(buffer.address())
            .with(tile_count);
        let variant = Variant::plain("moe_sort");
        let kernel = Kernel::new(&variant, "moe_sort").threads(1024);
        self.launch(kernel, [1, 1, 1], args)?;
        let slots = Slots {
            rows,
            positions,
            weights: chosen.weights.address() + offset,
            tiles: buffer.address(),
            tile_count,
            most_tiles,
            slots,
            per_token: top_k,
            tile_rows,
        };
        Ok((slots, buffer))
    }

    /// Runs sorted slots of `tokens` tokens from `first`: gate and up, down, and the sum into `out`.
    #[allow(clippy::too_many_arguments)] // the operands of one pass, each of another kind
    fn run_slots(
        &self,
        out: &CudaTensor,
        first: usize,
        tokens: usize,
        x: &Terms,
        table: u64,
        shape: ExpertShape,
        slots: &Slots,
    ) -> Result<(), KernelError> {
        let ExpertShape { hidden, inter, .. } = shape;
        let is_decode = slots.tile_rows == DECODE_ROWS;
        let h = self.buffer(slots.slots * inter * 4, "experts' activations")?;
        // Rows of the terms are counted from `first`.
        let element_bytes = if x.scales.is_some() { 1 } else { 2 };
        let values = x.values.address() + (first * x.padded * element_bytes) as u64;
        let scales = match &x.scales {
            Some(scales) => scales.address() + (first * (x.padded / 128) * 4) as u64,
            None => 0,
        };
        let args = Args::new()
            .with(h.address())
            .with(values)
            .with(scales)
            .with(x.rows as i32)
            .with(table)
            .with(slots.tiles)
            .with(slots.tile_count)
            .with(slots.rows)
            .with(inter as i32)
            .with(x.padded as i32);
        let names = ["experts_gate_up_decode", "experts_gate_up_tiled"];
        let grid = [inter.div_ceil(64), slots.most_tiles, 1];
        self.grouped(names, is_decode, shape.input, grid, args)?;

        let activations = self.activations_for(shape.output);
        let h_terms = self.split(h.address(), slots.slots, inter, activations)?;
        let d = self.buffer(slots.slots * hidden * 4, "experts' outputs")?;
        let args = Args::new()
            .with(d.address())
            .with(h_terms.values.address())
            .with(h_terms.scales_address())
            .with(slots.slots as i32)
            .with(table)
            .with(slots.tiles)
            .with(slots.tile_count)
            .with(hidden as i32)
            .with(h_terms.padded as i32);
        let names = ["experts_down_decode", "experts_down_tiled"];
        let grid = [hidden.div_ceil(128), slots.most_tiles, 1];
        self.grouped(names, is_decode, shape.output, grid, args)?;

        let args = Args::new()
            .with(out.address() + (first * hidden * 4) as u64)
            .with(d.address())
            .with(slots.positions)
            .with(slots.weights)
            .with(tokens as i32)
            .with(slots.per_token as i32)
            .with(hidden as i32);
        let variant = self.matrix_variant("experts", shape.output);
        let blocks = (tokens * hidden).div_ceil(256).min(4096);
        self.launch(
            Kernel::new(&variant, "experts_combine"),
            [blocks, 1, 1],
            args,
        )
    }

    fn grouped(
        &self,
        [decode, tiled]: [&'static str; 2],
        is_decode: bool,
        dtype: DType,
        grid: [usize; 3],
        args: Args,
    ) -> Result<(), KernelError> {
        let variant = self.matrix_variant("experts", dtype);
        let kernel = if is_decode {
            Kernel::new(&variant, decode)
        } else {
            Kernel::new(&variant, tiled).shared(self.tiled_shared(dtype))
        };
        self.launch(kernel, grid, args)
    }

    /// Maximum slots per pass.
    fn most_slots(&self, shape: ExpertShape) -> usize {
        let bytes = (self.memory.room_bytes() / 2).max(LEAST_WORK_BYTES) as usize;
        (bytes / shape.slot_bytes()).clamp(1, MOST_SLOTS)
    }
}

/// Rows of a tile: those of the decode kernel, which is bound by the weights, for few tokens per expert; else those of
/// the tiled one. The bits are the same.
fn tile_rows(slots: usize, experts: usize) -> usize {
    if slots <= experts * DECODE_ROWS {
        DECODE_ROWS
    } else {
        TILE_ROWS
    }
}

fn call_shape(call: &ExpertCall<'_, CudaWeight>) -> Result<ExpertShape, KernelError> {
    ExpertShape::of(&call.gate.0, &call.up.0, &call.down.0)
}

fn expert_arg(gate: &WeightData, up: &WeightData, down: &WeightData) -> ExpertArg {
    ExpertArg {
        gate: gate.argument(),
        up: up.argument(),
        down: down.argument(),
    }
}

/// Arrays as moe_sort.cu leaves them on the device, built from calls that are already in order.
struct HostOrder {
    rows: Vec<i32>,
    positions: Vec<i32>,
    weights: Vec<f32>,
    tiles: Vec<TileArg>,
    per_token: usize,
}

impl HostOrder {
    fn new(calls: &[&ExpertCall<'_, CudaWeight>], tokens: usize, tile_rows: usize) -> Self {
        let listed: Vec<(&[u32], &[f32])> = calls.iter().map(|c| (c.rows, c.weights)).collect();
        Self::of(&listed, tokens, tile_rows)
    }

    /// `calls`: rows and weights of each expert.
    fn of(calls: &[(&[u32], &[f32])], tokens: usize, tile_rows: usize) -> Self {
        let mut of_token: Vec<Vec<(i32, f32)>> = vec![Vec::new(); tokens];
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        for (expert, (call_rows, weights)) in calls.iter().enumerate() {
            for first in (0..call_rows.len()).step_by(tile_rows) {
                tiles.push(TileArg {
                    expert: expert as i32,
                    first: (rows.len() + first) as i32,
                    count: tile_rows.min(call_rows.len() - first) as i32,
                    reserved: 0,
                });
            }
            for (&row, &weight) in call_rows.iter().zip(*weights) {
                of_token[row as usize].push((rows.len() as i32, weight));
                rows.push(row as i32);
            }
        }
        let per_token = of_token.iter().map(Vec::len).max().unwrap_or(0);
        let padded = |token: &Vec<(i32, f32)>| {
            let rest = per_token - token.len();
            let filler = std::iter::repeat_n((-1, 0.0), rest);
            token.clone().into_iter().chain(filler).collect::<Vec<_>>()
        };
        let (positions, weights) = of_token.iter().flat_map(padded).unzip();
        Self {
            rows,
            positions,
            weights,
            tiles,
            per_token,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_become_slots_tiles_and_places() {
        let order = HostOrder::of(
            &[(&[1, 2, 3], &[0.1, 0.2, 0.3]), (&[0, 2], &[0.4, 0.5])],
            5,
            2,
        );
        assert_eq!(order.rows, [1, 2, 3, 0, 2]);
        assert_eq!(order.per_token, 2);
        assert_eq!(order.positions, [3, -1, 0, -1, 1, 4, 2, -1, -1, -1]);
        assert_eq!(
            order.weights,
            [0.4, 0.0, 0.1, 0.0, 0.2, 0.5, 0.3, 0.0, 0.0, 0.0]
        );
        let tile = |expert, first, count| TileArg {
            expert,
            first,
            count,
            reserved: 0,
        };
        assert_eq!(order.tiles, [tile(0, 0, 2), tile(0, 2, 1), tile(1, 3, 2)]);
    }

    #[test]
    fn few_tokens_an_expert_take_the_decode_kernel() {
        assert_eq!(tile_rows(64, 8), DECODE_ROWS);
        assert_eq!(tile_rows(65, 8), TILE_ROWS);
    }
}
