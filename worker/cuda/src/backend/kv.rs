//! The paged KV cache on the device: the same bytes at the same offsets as on the
//! CPU, so that workers exchange them as they are.

use hearth_kernels::ops::KvOps;
use hearth_kernels::{BlockId, DType, KernelError, KvDType, KvLayout, MlaHeads, Span, checks};

use super::elementwise::row_grid;
use super::exports::CudaHostCopy;
use super::{CudaBackend, CudaTensor, Kernel};
use crate::compile::Variant;
use crate::driver::Mark;
use crate::memory::Buffer;
use crate::queue::{Args, Command};

/// Paged keys and values of all layers: `[layer][block][token in block][keys, then values]`.
pub struct CudaKv {
    pub(super) layout: KvLayout,
    pub(super) blocks: usize,
    buffer: Buffer,
}

impl CudaKv {
    /// Address of a layer.
    pub(super) fn layer(&self, layer: usize) -> u64 {
        let bytes = layer * self.blocks * self.layout.block_layer_bytes();
        self.buffer.address() + bytes as u64
    }

    /// Byte offset of a token's record in a layer.
    pub(super) fn offset(&self, blocks: &[BlockId], token: usize) -> i64 {
        let block = blocks[token / self.layout.block_tokens].0 as usize;
        let record = block * self.layout.block_tokens + token % self.layout.block_tokens;
        (record * self.layout.token_layer_bytes()) as i64
    }

    fn offsets(&self, blocks: &[BlockId], first_token: usize, tokens: usize) -> Vec<i64> {
        (first_token..first_token + tokens)
            .map(|token| self.offset(blocks, token))
            .collect()
    }

    fn variant(&self) -> Variant {
        Variant::with("kv", &[("KV_TYPE", kv_type(self.layout.dtype))])
    }
}

/// Value of the kernels' `KV_TYPE`.
pub(super) fn kv_type(dtype: KvDType) -> i64 {
    match dtype {
        KvDType::F32 => 0,
        KvDType::Bf16 => 1,
    }
}

impl KvOps for CudaBackend {
    type Kv = CudaKv;

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<CudaKv, KernelError> {
        let kv = self.kv_without_trial(layout, blocks)?;
        // Tried here once, and not in the first prompt.
        self.attends_by_wgmma(&layout);
        Ok(kv)
    }

    fn kv_layout(&self, kv: &CudaKv) -> KvLayout {
        kv.layout
    }

    fn kv_append(
        &self,
        kv: &mut CudaKv,
        layer: usize,
        keys: &CudaTensor,
        values: Option<&CudaTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let layout = kv.layout;
        checks::kv_layer("kv_append", &layout, layer)?;
        checks::kv_append(&layout, keys.shape(), values.map(CudaTensor::shape))?;
        // Rows of the batch that belong to no span are not stored: each run of covered rows is one launch.
        for span in spans {
            checks::span("kv_append", &layout, kv.blocks, span, keys.rows)?;
        }
        for run in runs(spans) {
            self.append_run(kv, layer, keys, values, run)?;
        }
        Ok(())
    }

    fn kv_read_begin(
        &self,
        kv: &CudaKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<CudaHostCopy, KernelError> {
        checks::kv_layer("kv_read", &kv.layout, layer)?;
        checks::kv_blocks(
            "kv_read",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let record = kv.layout.token_layer_bytes();
        let gathered = self.leaving(tokens * record, "KV on its way")?;
        let args = Args::new()
            .with(gathered.address())
            .with(kv.layer(layer))
            .with(self.host(&kv.offsets(blocks, first_token, tokens))?)
            .with(tokens as i32)
            .with(record as i32);
        let variant = kv.variant();
        let kernel = Kernel::new(&variant, "kv_gather").threads(128);
        self.launch(kernel, [tokens, 1, 1], args)?;
        self.export(gathered, tokens * record)
    }

    fn kv_rows(
        &self,
        kv: &CudaKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<CudaTensor, KernelError> {
        checks::kv_layer("kv_rows", &kv.layout, layer)?;
        checks::kv_blocks(
            "kv_rows",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let cols = kv.layout.token_elements();
        let rows = self.tensor(tokens, cols)?;
        let args = Args::new()
            .with(rows.output())
            .with(kv.layer(layer))
            .with(self.host(&kv.offsets(blocks, first_token, tokens))?)
            .with(tokens as i32)
            .with(cols as i32);
        let variant = kv.variant();
        let kernel = Kernel::new(&variant, "kv_rows");
        self.launch(kernel, row_grid(tokens, cols), args)?;
        Ok(rows)
    }

    fn kv_write(
        &self,
        kv: &mut CudaKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        checks::kv_layer("kv_write", &kv.layout, layer)?;
        let tokens = checks::kv_records(&kv.layout, bytes.len())?;
        checks::kv_blocks(
            "kv_write",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let arrived = self.send_bytes(bytes, "KV on its way")?;
        let args = Args::new()
            .with(kv.layer(layer))
            .with(arrived.address())
            .with(self.host(&kv.offsets(blocks, first_token, tokens))?)
            .with(tokens as i32)
            .with(kv.layout.token_layer_bytes() as i32);
        let variant = kv.variant();
        let kernel = Kernel::new(&variant, "kv_scatter").threads(128);
        self.launch(kernel, [tokens, 1, 1], args)
    }
}

impl CudaBackend {
    /// Memory for bytes that leave the device.
    pub(super) fn leaving(&self, bytes: usize, what: &'static str) -> Result<Buffer, KernelError> {
        // Where the link is slower than the device, what is computed from here on waits for it, and not the host.
        let wait = |mark: &Mark| self.queue.wait_for(mark);
        self.exports.make_room(wait)?;
        self.buffer(bytes, what)
    }

    /// Queues the copy of bytes to the host that were gathered by what was queued last.
    pub(super) fn export(
        &self,
        gathered: Buffer,
        bytes: usize,
    ) -> Result<CudaHostCopy, KernelError> {
        let ready = self.queue.mark(&self.marks)?;
        self.exports.copy(gathered, bytes, &ready)
    }

    /// As `kv_alloc`, and nothing is attended to.
    pub(super) fn kv_without_trial(
        &self,
        layout: KvLayout,
        blocks: usize,
    ) -> Result<CudaKv, KernelError> {
        checks::kv_alloc(&layout)?;
        let bytes = layout.block_bytes().checked_mul(blocks);
        let bytes = bytes.ok_or_else(|| KernelError::OutOfMemory {
            device: self.device.label(),
            what: format!("{blocks} KV blocks"),
            needed_bytes: u64::MAX,
        })?;
        let buffer = self.buffer(bytes, "the KV cache")?;
        // Kernels read whole tiles and mask everything past a sequence's end: it must hold finite numbers.
        self.queue.push(Command::Zero {
            address: buffer.address(),
            bytes: bytes.max(1),
        })?;
        self.modules.prepare(self.attention_variants(&layout));
        self.modules.prepare([self.input_variant(&layout)]);
        if layout.value_in_key {
            let mla = [DType::Bf16, DType::F8E4m3].map(|dtype| self.mla_variant(dtype));
            self.modules.prepare(mla);
        }
        Ok(CudaKv {
            layout,
            blocks,
            buffer,
        })
    }

    /// Stores the keys and values of expanded latents.
    pub(super) fn append_expanded(
        &self,
        kv: &CudaKv,
        (product, latents): (&CudaTensor, &CudaTensor),
        dims: MlaHeads,
        to: &Span,
    ) -> Result<(), KernelError> {
        let layout = &kv.layout;
        checks::kv_append_expanded(layout, product.shape(), latents.shape(), dims)?;
        checks::span("kv_append_expanded", layout, kv.blocks, to, product.rows)?;
        let row = |x: &CudaTensor| -> Result<u64, KernelError> {
            Ok(self.values(x)? + (to.first_row * x.cols * 4) as u64)
        };
        let args = Args::new()
            .with(kv.layer(0))
            .with(row(product)?)
            .with(row(latents)?)
            .with(self.host(&kv.offsets(&to.blocks, to.start, to.rows))?)
            .with(to.rows as i32)
            .with(dims.heads as i32)
            .with(dims.nope as i32)
            .with(dims.v as i32)
            .with(dims.rank as i32)
            .with((latents.cols - dims.rank) as i32);
        let grid = row_grid(to.rows, layout.token_elements());
        self.launch(Kernel::new(&kv.variant(), "kv_append_expanded"), grid, args)
    }

    /// Stores spans whose rows are contiguous.
    fn append_run(
        &self,
        kv: &CudaKv,
        layer: usize,
        keys: &CudaTensor,
        values: Option<&CudaTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let offsets: Vec<i64> = spans
            .iter()
            .flat_map(|span| kv.offsets(&span.blocks, span.start, span.rows))
            .collect();
        let first_row = spans.first().map_or(0, |span| span.first_row);
        let row = |x: &CudaTensor| -> Result<u64, KernelError> {
            Ok(self.values(x)? + (first_row * x.cols * 4) as u64)
        };
        let value_cols = values.map_or(0, |v| v.cols);
        let args = Args::new()
            .with(kv.layer(layer))
            .with(row(keys)?)
            .with(values.map_or(Ok(0), row)?)
            .with(self.host(&offsets)?)
            .with(offsets.len() as i32)
            .with(keys.cols as i32)
            .with(value_cols as i32);
        let grid = row_grid(offsets.len(), keys.cols + value_cols);
        self.launch(Kernel::new(&kv.variant(), "kv_append"), grid, args)
    }
}

/// Groups spans into runs without a gap between their rows.
fn runs(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    spans.chunk_by(|a, b| a.first_row + a.rows == b.first_row)
}
