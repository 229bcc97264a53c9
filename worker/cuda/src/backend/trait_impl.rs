//! [`Backend`] in terms of the operations of this folder.

use hearth_kernels::{
    AttentionSpec, Backend, BlockId, ExpertCall, ExpertWeights, HostMatrix, KernelError, KvLayout,
    MlaHeads, RopeTable, RouterSpec, Routing, SampleFault, SampleSpec, Span, checks,
};

use super::experts::CudaBank;
use super::{
    Activations, CudaBackend, CudaChosen, CudaKv, CudaTensor, CudaVector, CudaWeight, sampling,
};

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Vector = CudaVector;
    type Kv = CudaKv;
    type Chosen = CudaChosen;
    type ExpertBank = CudaBank;

    fn bind_thread(&self) -> Result<(), KernelError> {
        // The thread owns the steps even if the driver refuses it: then they fail in the driver's words.
        let bound = self.device.bind();
        self.queue.bind_thread()?;
        bound
    }

    fn gpu_uuid(&self) -> Option<String> {
        Some(self.device.info.uuid.clone())
    }

    fn describe(&self) -> String {
        let info = &self.device.info;
        let activations = match self.activations {
            Activations::F32 => "",
            Activations::Bf16 => " bf16 activations",
            Activations::Fp8 => " fp8 activations",
        };
        format!("cuda {}{activations}", info.name)
    }

    fn numerics(&self) -> String {
        let architecture = self.device.info.architecture();
        let wgmma = if self.has_wgmma() { " wgmma" } else { "" };
        format!("cuda {architecture} {:?}{wgmma}", self.activations)
    }

    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        self.measure_read_gbps(bytes)
    }

    fn weight(&self, matrix: &HostMatrix) -> Result<CudaWeight, KernelError> {
        self.load_weight(matrix)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector, KernelError> {
        self.load_vector(values)
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Result<CudaTensor, KernelError> {
        checks::upload((rows, cols), values.len())?;
        self.load_tensor(rows, cols, values)
    }

    fn download(&self, x: &CudaTensor) -> Result<Vec<f32>, KernelError> {
        let floats = |bytes: &[u8]| -> Vec<f32> {
            let words = bytes.as_chunks().0.iter();
            words.map(|word| f32::from_ne_bytes(*word)).collect()
        };
        self.queue.download(x.address(), x.elements() * 4, floats)
    }

    fn shape(&self, x: &CudaTensor) -> (usize, usize) {
        x.shape()
    }

    fn embed(&self, table: &CudaWeight, tokens: &[u32]) -> Result<CudaTensor, KernelError> {
        self.embed_rows(table, tokens)
    }

    fn linear(
        &self,
        x: &CudaTensor,
        w: &CudaWeight,
        bias: Option<&CudaVector>,
    ) -> Result<CudaTensor, KernelError> {
        self.linear_layer(x, w, bias)
    }

    fn rms_norm(
        &self,
        x: &CudaTensor,
        weight: &CudaVector,
        eps: f32,
    ) -> Result<CudaTensor, KernelError> {
        self.norm(x, weight, eps)
    }

    fn add_rms_norm(
        &self,
        residual: &mut CudaTensor,
        delta: &CudaTensor,
        weight: &CudaVector,
        eps: f32,
    ) -> Result<CudaTensor, KernelError> {
        self.add_and_norm(residual, delta, weight, eps)
    }

    fn add_assign(&self, x: &mut CudaTensor, delta: &CudaTensor) -> Result<(), KernelError> {
        self.add(x, delta)
    }

    fn silu_mul(&self, gate: &CudaTensor, up: &CudaTensor) -> Result<CudaTensor, KernelError> {
        self.gated(gate, up)
    }

    fn columns(
        &self,
        x: &CudaTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<CudaTensor, KernelError> {
        self.take_columns(x, groups, first, cols)
    }

    fn interleave(
        &self,
        a: &CudaTensor,
        b: &CudaTensor,
        groups: usize,
    ) -> Result<CudaTensor, KernelError> {
        self.join_columns(a, b, groups)
    }

    fn rows(&self, x: &CudaTensor, rows: &[u32]) -> Result<CudaTensor, KernelError> {
        self.take_rows(x, rows)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<CudaTensor, KernelError> {
        self.zero_tensor(rows, cols)
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        heads: usize,
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        self.rotate(x, heads, positions, table)
    }

    fn mla_absorb(
        &self,
        q_nope: &CudaTensor,
        kv_b: &CudaWeight,
        heads: MlaHeads,
    ) -> Result<CudaTensor, KernelError> {
        self.absorb(q_nope, kv_b, heads)
    }

    fn mla_expand(
        &self,
        latent: &CudaTensor,
        kv_b: &CudaWeight,
        heads: MlaHeads,
    ) -> Result<CudaTensor, KernelError> {
        self.expand(latent, kv_b, heads)
    }

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<CudaKv, KernelError> {
        self.allocate_kv(layout, blocks)
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
        self.append_kv(kv, layer, keys, values, spans)
    }

    fn kv_read(
        &self,
        kv: &CudaKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        self.read_kv(kv, layer, blocks, first_token, tokens)
    }

    fn kv_write(
        &self,
        kv: &mut CudaKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        self.write_kv(kv, layer, blocks, first_token, bytes)
    }

    fn attention(
        &self,
        q: &CudaTensor,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<CudaTensor, KernelError> {
        self.attend(q, kv, layer, spans, spec)
    }

    fn route(
        &self,
        logits: &CudaTensor,
        bias: Option<&CudaVector>,
        spec: RouterSpec,
    ) -> Result<CudaChosen, KernelError> {
        self.choose(logits, bias, spec)
    }

    fn routing(&self, chosen: CudaChosen) -> Result<Routing, KernelError> {
        self.choices(&chosen)
    }

    fn experts(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        calls: &[ExpertCall<'_, CudaWeight>],
    ) -> Result<(), KernelError> {
        self.run_calls(out, x, calls)
    }

    fn expert_bank(
        &self,
        experts: &[ExpertWeights<'_, CudaWeight>],
    ) -> Result<Option<CudaBank>, KernelError> {
        self.bank(experts)
    }

    fn banked_experts(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        chosen: &CudaChosen,
        bank: &CudaBank,
    ) -> Result<(), KernelError> {
        self.run_banked(out, x, chosen, bank)
    }

    fn can_sample(&self, vocab: usize) -> bool {
        sampling::takes(vocab)
    }

    fn sample(
        &self,
        logits: &CudaTensor,
        rows: &[SampleSpec],
    ) -> Result<Vec<Result<u32, SampleFault>>, KernelError> {
        self.choose_tokens(logits, rows)
    }

    fn finish(&self) -> Result<(), KernelError> {
        self.queue.flush()
    }
}
