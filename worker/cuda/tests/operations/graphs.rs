//! Small steps go by a CUDA graph from the second one on, with the bits of the first.

use hearth_cuda::{CudaBackend, CudaKv, CudaVector, CudaWeight};
use hearth_kernels::KvDType::Bf16;
use hearth_kernels::{
    AttentionSpec, Backend, BlockId, DType, ExpertWeights, RopeLayout, RopeTable, Span,
};

use crate::common::*;
use crate::route::SIGMOID;
use crate::sequence::layout;
use crate::support::{options, own};

const HIDDEN: usize = 32;
const VOCAB: usize = 50;

/// A layer of a tiny model with its cache.
struct Model {
    table: CudaWeight,
    norm: CudaVector,
    qkv: [CudaWeight; 3],
    router: CudaWeight,
    experts: Vec<[CudaWeight; 3]>,
    kv: CudaKv,
}

/// A token of a sequence: its value, its position, and the block of its sequence.
#[derive(Clone, Copy)]
struct Token(u32, u32, u32);

impl Model {
    fn new(gpu: &CudaBackend) -> Self {
        let mut rng = Rng(1);
        let mut load = |rows, cols, dtype| {
            let matrix = random_matrix(&mut rng, rows, cols, dtype);
            gpu.weight(&matrix).unwrap()
        };
        let mut expert = || [0, 1, 2].map(|_| load(HIDDEN, HIDDEN, DType::F8E4m3));
        let experts = vec![expert(), expert(), expert()];
        let square = |load: &mut dyn FnMut(usize, usize, DType) -> CudaWeight| {
            load(HIDDEN, HIDDEN, DType::Bf16)
        };
        Self {
            table: load(VOCAB, HIDDEN, DType::Bf16),
            norm: gpu.vector(&[0.5; HIDDEN]).unwrap(),
            qkv: [0, 1, 2].map(|_| square(&mut load)),
            router: load(experts.len(), HIDDEN, DType::F32),
            experts,
            kv: gpu.kv_alloc(layout(2, 16, 16, false, Bf16), 8).unwrap(),
        }
    }

    /// One step of `layers` layers; what each token's head would be computed from.
    fn step(&mut self, gpu: &CudaBackend, tokens: &[Token], layers: usize) -> Vec<f32> {
        let ids: Vec<u32> = tokens.iter().map(|t| t.0).collect();
        let mut residual = gpu.embed(&self.table, &ids).unwrap();
        let mut x = gpu.rms_norm(&residual, &self.norm, 1e-6).unwrap();
        for _ in 0..layers {
            let attended = self.attend(gpu, &x, tokens);
            x = gpu
                .add_rms_norm(&mut residual, &attended, &self.norm, 1e-6)
                .unwrap();
            let routed = self.route(gpu, &x);
            x = gpu
                .add_rms_norm(&mut residual, &routed, &self.norm, 1e-6)
                .unwrap();
        }
        gpu.download(&x).unwrap()
    }

    fn attend(
        &mut self,
        gpu: &CudaBackend,
        x: &hearth_cuda::CudaTensor,
        tokens: &[Token],
    ) -> hearth_cuda::CudaTensor {
        let [mut q, mut k, v] = self.qkv.each_ref().map(|w| gpu.linear(x, w, None).unwrap());
        let positions: Vec<u32> = tokens.iter().map(|t| t.1).collect();
        let rope = RopeTable {
            inv_freq: (0..8).map(|i| 0.3f32.powi(i)).collect(),
            magnitude: 1.0,
            layout: RopeLayout::Half,
        };
        gpu.rope(&mut q, 2, &positions, &rope).unwrap();
        gpu.rope(&mut k, 2, &positions, &rope).unwrap();
        let span = |(row, token): (usize, &Token)| Span {
            first_row: row,
            rows: 1,
            start: token.1 as usize,
            blocks: vec![BlockId(token.2)],
        };
        let spans: Vec<Span> = tokens.iter().enumerate().map(span).collect();
        gpu.kv_append(&mut self.kv, 0, &k, Some(&v), &spans)
            .unwrap();
        let spec = AttentionSpec {
            heads: 2,
            scale: 0.25,
        };
        gpu.attention(&q, &self.kv, 0, &spans, spec).unwrap()
    }

    fn route(&self, gpu: &CudaBackend, x: &hearth_cuda::CudaTensor) -> hearth_cuda::CudaTensor {
        let logits = gpu.linear(x, &self.router, None).unwrap();
        let chosen = gpu.route(&logits, None, SIGMOID).unwrap();
        let experts: Vec<_> = self
            .experts
            .iter()
            .map(|[gate, up, down]| ExpertWeights { gate, up, down })
            .collect();
        let mut out = gpu.zeros(gpu.shape(x).0, HIDDEN).unwrap();
        if experts.is_empty() {
            return out;
        }
        let bank = gpu.expert_bank(&experts).unwrap().unwrap();
        gpu.banked_experts(&mut out, x, &chosen, &bank).unwrap();
        out
    }
}
