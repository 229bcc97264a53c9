//! Choice of experts.

use hearth_kernels::ops::{MemoryOps, RouterOps};
use hearth_kernels::{KernelError, RouterScore, RouterSpec, Routing, checks};

use super::elementwise::{QUAD, QUAD_COLS};
use super::host_order::{SlotAddresses, tile_rows};
use super::linear::TILE_ROWS;
use super::tensor::SortedSlots;
use super::weights::floats;
use super::{CudaBackend, CudaChosen, CudaTensor, CudaVector, Kernel};
use crate::compile::Variant;
use crate::queue::{Args, MOST_LANDING_BYTES};

/// Limits of route.cu.
const MOST_EXPERTS: usize = 512;
const MOST_CHOICES: usize = 32;
const MOST_GROUPS: usize = 32;
/// Maximum tokens of route_sort.cu: those of a recorded step.
const MOST_SORTED_TOKENS: usize = super::MOST_RECORDED_ROWS;

impl RouterOps for CudaBackend {
    type Chosen = CudaChosen;

    fn route(
        &self,
        logits: &CudaTensor,
        bias: Option<&CudaVector>,
        spec: RouterSpec,
    ) -> Result<CudaChosen, KernelError> {
        let (tokens, experts) = logits.shape();
        checks::route(experts, bias.map(|b| b.len), &spec)?;
        let fits =
            experts <= MOST_EXPERTS && spec.top_k <= MOST_CHOICES && spec.groups <= MOST_GROUPS;
        checks::ensure(fits, "route", || {
            format!(
                "{} of {experts} experts in {} groups: the GPU's router takes {MOST_CHOICES} of {MOST_EXPERTS} in {MOST_GROUPS}",
                spec.top_k, spec.groups
            )
        })?;
        let slots = tokens * spec.top_k;
        let sorted = match (1..=MOST_SORTED_TOKENS).contains(&tokens) {
            true => {
                let tile_rows = tile_rows(slots, experts, || TILE_ROWS);
                let bytes = SlotAddresses::bytes(slots, experts, tile_rows);
                Some(SortedSlots {
                    buffer: self.buffer(bytes, "sorted slots")?,
                    experts,
                    tile_rows,
                })
            }
            false => None,
        };
        let chosen = CudaChosen {
            experts: self.buffer(slots * 4, "choices of experts")?,
            weights: self.buffer(slots * 4, "weights of experts")?,
            tokens,
            spec,
            sorted,
        };
        let args = Args::new()
            .with(self.rows_of(logits)?)
            .with(bias.map_or(0, |b| b.data.address()))
            .with(chosen.experts.address())
            .with(chosen.weights.address())
            .with(tokens as i32)
            .with(experts as i32)
            .with(spec.top_k as i32)
            .with(spec.groups as i32)
            .with(spec.top_groups as i32)
            .with(i32::from(spec.score == RouterScore::Sigmoid))
            .with(i32::from(spec.normalize))
            .with(spec.scaling);
        match &chosen.sorted {
            Some(sorted) => {
                let at = SlotAddresses::new(&sorted.buffer, slots, experts, sorted.tile_rows);
                let args = args
                    .with(at.tile_rows as i32)
                    .with(at.rows)
                    .with(at.positions)
                    .with(at.tiles)
                    .with(at.tile_count);
                let variant = Variant::plain("route_sort");
                let kernel = Kernel::new(&variant, "route_sort");
                self.launch(kernel, [1, 1, 1], args)?;
            }
            None => {
                let variant = Variant::plain("route");
                let kernel = Kernel::new(&variant, "route").threads(128);
                self.launch(kernel, [tokens.div_ceil(4), 1, 1], args)?;
            }
        }
        Ok(chosen)
    }

    fn routing(&self, chosen: CudaChosen) -> Result<Routing, KernelError> {
        let bytes = chosen.choices() * 4;
        let download = |address| self.queue.download(address, bytes, |bytes| bytes.to_vec());
        let experts = download(chosen.experts.address())?;
        let weights = download(chosen.weights.address())?;
        Ok(routing(&chosen, &experts, &weights))
    }

    /// One round trip: a kernel writes both to the host's memory. Only what exceeds the memory that is kept for it is
    /// copied in pieces.
    fn routing_and_rows(
        &self,
        chosen: CudaChosen,
        x: &CudaTensor,
    ) -> Result<(Routing, Vec<f32>), KernelError> {
        let (rows, cols) = x.shape();
        let choices = chosen.choices();
        let first = (2 * choices).next_multiple_of(QUAD);
        let bytes = (first + x.elements()) * 4;
        if bytes > MOST_LANDING_BYTES {
            let rows = self.download(x)?;
            return Ok((self.routing(chosen)?, rows));
        }
        let values = self.values(x)?;
        let write = |to: u64| {
            let args = Args::new()
                .with(to)
                .with(chosen.experts.address())
                .with(chosen.weights.address())
                .with(values)
                .with(choices as i32)
                .with(first as i32)
                .with(rows as i32)
                .with(cols as i32);
            let variant = Variant::plain("hand_over");
            let grid = [rows + 1, cols.div_ceil(QUAD_COLS), 1];
            self.launch(Kernel::new(&variant, "hand_over"), grid, args)
        };
        self.queue.collect(bytes, write, |bytes| {
            let (listed, values) = bytes.split_at(first * 4);
            let (experts, weights) = listed[..8 * choices].split_at(4 * choices);
            (routing(&chosen, experts, weights), floats(values))
        })
    }
}

/// The routing from its arrays as they are on the device.
fn routing(chosen: &CudaChosen, experts: &[u8], weights: &[u8]) -> Routing {
    let experts = experts.as_chunks().0.iter();
    Routing {
        top_k: chosen.spec.top_k,
        experts: experts.map(|word| u32::from_ne_bytes(*word)).collect(),
        weights: floats(weights),
    }
}
