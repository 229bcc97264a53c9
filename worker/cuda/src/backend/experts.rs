//! Mixture of experts: runs the chosen experts.
//!
//! Slots (a token and one of its choices) are sorted by expert. The matrix kernels take tiles of slots of one expert,
//! so that an expert's weights are loaded once for up to 64 or 128 of them, and tiles of one expert run together. Each
//! token's outputs are then added in the order of [`expert_sum`](hearth_kernels::expert_sum), in registers; partial sums
//! are in memory only between two invocations.

use hearth_kernels::expert_sum::{ExpertOrder, LEAVES, PARTIAL_SUMS, leaf_of};
use hearth_kernels::ops::ExpertOps;
use hearth_kernels::{DType, ExpertCall, ExpertProducts, ExpertWeights, KernelError, checks};

use super::elementwise::row_grid;
use super::host_order::{HostOrder, ListedCall, SlotAddresses, chunks, tile_rows};
use super::linear::{DECODE_ROWS, TILE_ROWS, WGMMA_TILE_ROWS};
use super::tensor::{CudaChosen, ExpertArg, Terms, WeightData};
use super::{Activations, CudaBackend, CudaTensor, CudaWeight, Kernel, argument_bytes};
use crate::compile::Variant;
use crate::memory::Buffer;
use crate::queue::Args;

/// Maximum number of slots in moe_sort.cu.
const MOST_SLOTS: usize = 65_536;
/// Tokens from which blocks of a sum take whole rows where most of them have nothing to add: enough to fill any device.
const SPARSE_TOKENS: usize = 1024;
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

/// Sum of the outputs of a layer's experts.
pub struct CudaExpertSum {
    order: ExpertOrder,
    tokens: usize,
    hidden: usize,
    /// The total, or the first partial sum.
    total: Option<CudaTensor>,
    /// `[PARTIAL_SUMS - 1, tokens, hidden]`: the others, once calls were added that were not the last.
    partial: Option<Buffer>,
    /// The leaf of the partial sums, if there are any.
    begin: Option<usize>,
}

/// Destination of the outputs of a pass: the rows `first..first + tokens` of a sum.
struct Destination {
    /// The total, or the first partial sum.
    out: u64,
    /// The second partial sum; 0 if this pass is the first and the last.
    partial: u64,
    /// Elements from one partial sum to the next.
    stride: usize,
    first: usize,
    tokens: usize,
    /// Leaf of the partial sums that an earlier pass left.
    begin: Option<usize>,
    /// Leaf of the partial sums that this pass leaves; [`LEAVES`] if it gives the total.
    end: usize,
    experts: usize,
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
#[derive(Default)]
struct Slots {
    /// `[slots]`: row of the input.
    rows: u64,
    /// `[tokens, per_token]`: position in the sorted order, or -1.
    positions: u64,
    /// `[tokens, per_token]`.
    weights: u64,
    /// `[tokens, per_token]`: index of the expert, ascending for each token.
    chosen: u64,
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
    type ExpertSum = CudaExpertSum;

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
        let bytes = argument_bytes(&table);
        self.modules.prepare(
            ["route", "route_sort", "moe_sort", "experts_combine"]
                .map(Variant::plain)
                .into_iter()
                .chain(
                    [shape.input, shape.output]
                        .into_iter()
                        .flat_map(|d| self.matrix_variants_of("experts", d)),
                ),
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
        x: &CudaTensor,
        chosen: &CudaChosen,
        bank: &CudaBank,
    ) -> Result<CudaTensor, KernelError> {
        let ExpertShape { hidden, inter, .. } = bank.shape;
        let matrices = [(inter, x.cols), (inter, x.cols), (hidden, inter)];
        checks::expert((x.rows, hidden), x.shape(), matrices)?;
        checks::ensure(chosen.tokens == x.rows, "experts", || {
            format!("choices of {} tokens for {}", chosen.tokens, x.rows)
        })?;
        let out = self.tensor(x.rows, hidden)?;
        let terms = self.terms(x, self.activations_for(bank.shape.input))?;
        let chunk = (self.most_slots(bank.shape) / chosen.spec.top_k).max(1);
        for first in (0..x.rows).step_by(chunk) {
            let destination = Destination {
                out: out.output(),
                partial: 0,
                stride: 0,
                first,
                tokens: chunk.min(x.rows - first),
                begin: None,
                end: LEAVES,
                experts: bank.count,
            };
            let slots = self.sort(chosen, bank, first, destination.tokens)?;
            self.run_slots(
                &destination,
                &terms,
                bank.table.address(),
                bank.shape,
                &slots.0,
            )?;
        }
        Ok(out)
    }

    fn expert_sum(
        &self,
        tokens: usize,
        hidden: usize,
        experts: usize,
    ) -> Result<CudaExpertSum, KernelError> {
        Ok(CudaExpertSum {
            order: ExpertOrder::new(experts),
            tokens,
            hidden,
            partial: None,
            begin: None,
            total: None,
        })
    }

    fn experts(
        &self,
        sum: &mut CudaExpertSum,
        x: &CudaTensor,
        calls: &[ExpertCall<'_, CudaWeight>],
        is_last: bool,
    ) -> Result<(), KernelError> {
        for call in calls {
            let matrices = [call.gate, call.up, call.down].map(|m| m.0.shape());
            checks::expert((sum.tokens, sum.hidden), x.shape(), matrices)?;
            checks::expert_rows(call.rows, call.weights.len(), x.rows)?;
        }
        let mut rest: Vec<&ExpertCall<'_, CudaWeight>> =
            calls.iter().filter(|call| !call.rows.is_empty()).collect();
        let mut groups = Vec::new();
        while let Some(first) = rest.first() {
            let shape = call_shape(first)?;
            let mut count = 0;
            for call in &rest {
                if call_shape(call)? != shape {
                    break;
                }
                count += 1;
            }
            let later = rest.split_off(count);
            groups.push((shape, std::mem::replace(&mut rest, later)));
        }
        sum.order.take(calls, is_last)?;
        let count = groups.len();
        for (index, (shape, alike)) in groups.iter().enumerate() {
            self.run_alike(sum, x, alike, *shape, is_last && index + 1 == count)?;
        }
        if is_last && groups.is_empty() {
            let destination = self.destination(sum, LEAVES)?;
            self.combine(&destination, 0, &Slots::default(), sum.hidden)?;
        }
        Ok(())
    }

    fn product_sum(
        &self,
        products: &CudaTensor,
        of: ExpertProducts<'_>,
    ) -> Result<CudaTensor, KernelError> {
        let tokens = checks::product_sum(products.rows, &of)?;
        let out = self.tensor(tokens, products.cols)?;
        let words = |values: &[u32]| values.iter().map(|v| *v as i32).collect::<Vec<_>>();
        let destination = Destination {
            out: out.output(),
            partial: 0,
            stride: 0,
            first: 0,
            tokens,
            begin: None,
            end: LEAVES,
            experts: of.experts,
        };
        let slots = Slots {
            positions: self.host(&words(of.rows))?,
            chosen: self.host(&words(&of.routing.experts))?,
            // The products have their weights.
            weights: self.host(&vec![1.0_f32; of.rows.len()])?,
            per_token: of.routing.top_k,
            ..Slots::default()
        };
        self.combine(&destination, self.values(products)?, &slots, products.cols)?;
        Ok(out)
    }

    fn expert_total(&self, sum: CudaExpertSum) -> Result<CudaTensor, KernelError> {
        let total = sum.total.filter(|_| sum.begin == Some(LEAVES));
        total.ok_or_else(|| KernelError::Shape {
            op: "experts",
            detail: "the total of a sum without its last calls".to_owned(),
        })
    }
}

impl CudaBackend {
    /// Runs calls of the same shape, sorted by the host, as many tokens at once as the budget has room for: a token's
    /// sum then stays in registers, and the experts' weights are read once for each such range of tokens.
    fn run_alike(
        &self,
        sum: &mut CudaExpertSum,
        x: &CudaTensor,
        calls: &[&ExpertCall<'_, CudaWeight>],
        shape: ExpertShape,
        is_last: bool,
    ) -> Result<(), KernelError> {
        let leaf =
            |call: &&ExpertCall<'_, CudaWeight>| leaf_of(call.expert as usize, sum.order.experts());
        let end = match calls.last() {
            Some(call) if !is_last => leaf(call),
            _ => LEAVES,
        };
        let mut destination = self.destination(sum, end)?;
        let table: Vec<ExpertArg> = calls
            .iter()
            .map(|call| expert_arg(&call.gate.0, &call.up.0, &call.down.0))
            .collect();
        let listed: Vec<ListedCall<'_>> = calls.iter().map(|call| ListedCall::of(call)).collect();
        let terms = self.terms(x, self.activations_for(shape.input))?;
        for tokens in chunks(&listed, x.rows, self.most_slots(shape)) {
            destination.first = tokens.start;
            destination.tokens = tokens.len();
            let order = HostOrder::new(&listed, tokens, || self.tiled_rows(shape));
            self.queue.forget_host_data()?;
            let slots = Slots {
                rows: self.host_once(&order.rows)?,
                positions: self.host_once(&order.positions)?,
                weights: self.host_once(&order.weights)?,
                chosen: self.host_once(&order.chosen)?,
                tiles: self.host_once(&order.tiles)?,
                tile_count: self.host_once(&[order.tiles.len() as i32])?,
                most_tiles: order.tiles.len(),
                slots: order.rows.len(),
                per_token: order.per_token,
                tile_rows: order.tile_rows,
            };
            self.run_slots(&destination, &terms, self.host(&table)?, shape, &slots)?;
        }
        Ok(())
    }

    /// Prepares the memory of all rows of a sum for the next pass, which ends in leaf `end`.
    fn destination(&self, sum: &mut CudaExpertSum, end: usize) -> Result<Destination, KernelError> {
        let stride = sum.tokens * sum.hidden;
        if sum.total.is_none() {
            sum.total = Some(self.tensor(sum.tokens, sum.hidden)?);
        }
        if end != LEAVES && sum.partial.is_none() {
            let bytes = (PARTIAL_SUMS - 1) * stride * 4;
            sum.partial = Some(self.buffer(bytes, "partial sums of experts")?);
        }
        let begin = sum.begin.replace(end);
        Ok(Destination {
            out: sum.total.as_ref().map_or(0, CudaTensor::output),
            partial: sum.partial.as_ref().map_or(0, Buffer::address),
            stride,
            first: 0,
            tokens: sum.tokens,
            begin,
            end,
            experts: sum.order.experts(),
        })
    }

    /// Sorts the choices of `tokens` tokens from `first` on the device, unless the router has done so;
    /// the returned buffer holds the data that the slots point to.
    fn sort(
        &self,
        chosen: &CudaChosen,
        bank: &CudaBank,
        first: usize,
        tokens: usize,
    ) -> Result<(Slots, Option<Buffer>), KernelError> {
        let (top_k, experts) = (chosen.spec.top_k, bank.count);
        let slots = tokens * top_k;
        let offset = (first * top_k * 4) as u64;
        let is_all = tokens == chosen.tokens;
        let sorted = chosen.sorted.as_ref();
        let (at, buffer) = match sorted.filter(|sorted| is_all && sorted.experts == experts) {
            Some(sorted) => {
                let at = SlotAddresses::new(&sorted.buffer, slots, experts, sorted.tile_rows);
                (at, None)
            }
            None => {
                let tile_rows = tile_rows(slots, experts, || self.tiled_rows(bank.shape));
                let bytes = SlotAddresses::bytes(slots, experts, tile_rows);
                let buffer = self.buffer(bytes, "sorted slots")?;
                let at = SlotAddresses::new(&buffer, slots, experts, tile_rows);
                let args = Args::new()
                    .with(chosen.experts.address() + offset)
                    .with(tokens as i32)
                    .with(top_k as i32)
                    .with(experts as i32)
                    .with(at.tile_rows as i32)
                    .with(at.rows)
                    .with(at.positions)
                    .with(at.tiles)
                    .with(at.tile_count);
                let variant = Variant::plain("moe_sort");
                let kernel = Kernel::new(&variant, "moe_sort");
                self.launch(kernel, [1, 1, 1], args)?;
                (at, Some(buffer))
            }
        };
        let slots = Slots {
            rows: at.rows,
            positions: at.positions,
            weights: chosen.weights.address() + offset,
            chosen: chosen.experts.address() + offset,
            tiles: at.tiles,
            tile_count: at.tile_count,
            most_tiles: at.most_tiles,
            slots,
            per_token: top_k,
            tile_rows: at.tile_rows,
        };
        Ok((slots, buffer))
    }

    /// Runs sorted slots: gate and up, down, and the sum.
    fn run_slots(
        &self,
        destination: &Destination,
        x: &Terms,
        table: u64,
        shape: ExpertShape,
        slots: &Slots,
    ) -> Result<(), KernelError> {
        let (hidden, is_decode) = (shape.hidden, slots.tile_rows == DECODE_ROWS);
        let h_terms = self.gate_up(destination, x, table, shape, slots)?;
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

        self.combine(destination, d.address(), slots, hidden)
    }

    /// Runs gate and up of sorted slots, and splits the result.
    fn gate_up(
        &self,
        destination: &Destination,
        x: &Terms,
        table: u64,
        shape: ExpertShape,
        slots: &Slots,
    ) -> Result<Terms, KernelError> {
        let inter = shape.inter;
        let is_decode = slots.tile_rows == DECODE_ROWS;
        // Few slots' activations are stored as the next product takes them, unless that form needs whole blocks of columns.
        let of_output = self.activations_for(shape.output);
        let is_split = is_decode && self.activations != Activations::Fp8;
        let stored = match is_split {
            true => Some(self.new_terms(slots.slots, inter)?),
            false => None,
        };
        let h = match is_split {
            true => None,
            false => Some(self.buffer(slots.slots * inter * 4, "experts' activations")?),
        };
        let h = h.as_ref().map_or(0, Buffer::address);
        // Rows of the slots are counted from the destination's first.
        let element_bytes = if x.scales.is_some() { 1 } else { 2 };
        let values = x.values.address() + (destination.first * x.padded * element_bytes) as u64;
        let scales = match &x.scales {
            Some(scales) => scales.address() + (destination.first * (x.padded / 128) * 4) as u64,
            None => 0,
        };
        let mut args = Args::new().with(h);
        if is_decode {
            args = args
                .with(stored.as_ref().map_or(0, |terms| terms.values.address()))
                .with(slots.slots as i32)
                .with(stored.as_ref().map_or(0, |terms| terms.padded) as i32);
        }
        let args = args
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
        let columns = stored.as_ref().map_or(inter, |terms| terms.padded);
        let grid = [columns.div_ceil(64), slots.most_tiles, 1];
        self.grouped(names, is_decode, shape.input, grid, args)?;

        match stored {
            Some(terms) => Ok(terms),
            None => self.split(h, slots.slots, inter, of_output),
        }
    }

    /// Adds the outputs `d` of slots to a sum.
    fn combine(
        &self,
        destination: &Destination,
        d: u64,
        slots: &Slots,
        hidden: usize,
    ) -> Result<(), KernelError> {
        let offset = (destination.first * hidden * 4) as u64;
        let leaf = |leaf: Option<usize>| leaf.map_or(-1, |leaf| leaf as i32);
        let args = Args::new()
            .with(destination.out + offset)
            .with(destination.partial + offset)
            .with(d)
            .with(slots.positions)
            .with(slots.chosen)
            .with(slots.weights)
            .with(destination.tokens as i32)
            .with(slots.per_token as i32)
            .with(hidden as i32)
            .with(destination.experts as i32)
            .with(leaf(destination.begin))
            .with(leaf(Some(destination.end)))
            .with(destination.stride as i64);
        let variant = Variant::plain("experts_combine");
        let kernel = Kernel::new(&variant, "experts_combine");
        // Most of many tokens have not chosen the few experts of one leaf.
        let is_sparse =
            destination.begin == Some(destination.end) && destination.tokens >= SPARSE_TOKENS;
        let grid = match is_sparse {
            true => [destination.tokens, 1, 1],
            false => row_grid(destination.tokens, hidden),
        };
        self.launch(kernel, grid, args)
    }

    fn grouped(
        &self,
        [decode, tiled]: [&'static str; 2],
        is_decode: bool,
        dtype: DType,
        grid: [usize; 3],
        args: Args,
    ) -> Result<(), KernelError> {
        let (variant, name) = match is_decode {
            true => (self.matrix_variant("experts", dtype), decode),
            false => (self.tiled_variant("experts", dtype), tiled),
        };
        let kernel = Kernel::new(&variant, name);
        self.launch(kernel, grid, args)
    }

    /// Rows of a tile of the tiled kernels. Both products of an expert take the same tiles.
    fn tiled_rows(&self, shape: ExpertShape) -> usize {
        let by_wgmma = |dtype| self.multiplies_by_wgmma(dtype);
        match by_wgmma(shape.input) && by_wgmma(shape.output) {
            true => WGMMA_TILE_ROWS,
            false => TILE_ROWS,
        }
    }

    /// Maximum slots per pass.
    fn most_slots(&self, shape: ExpertShape) -> usize {
        let bytes = (self.memory.room_bytes() / 2).max(LEAST_WORK_BYTES) as usize;
        (bytes / shape.slot_bytes()).clamp(1, MOST_SLOTS)
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
