//! The bits are the CPU's, and every byte of the device is counted.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

use hearth_kernels::ops::*;
use hearth_kernels::{
    AttentionSpec, BlockId, CpuBackend, CpuOptions, DType, ExpertCall, HostMatrix, KernelError,
    KvDType, KvLayout, RouterScore, RouterSpec, Span, quantize_fp8_block,
};
use hearth_virtual::{VirtualBackend, VirtualOptions};

const HIDDEN: usize = 96;
const INNER: usize = 160;
const EXPERTS: usize = 6;
const TOKENS: usize = 5;
const LAYOUT: KvLayout = KvLayout {
    layers: 1,
    kv_heads: 2,
    k_dim: 48,
    v_dim: 48,
    value_in_key: false,
    block_tokens: 4,
    dtype: KvDType::Bf16,
};

fn options() -> CpuOptions {
    CpuOptions {
        threads: 2,
        ..CpuOptions::default()
    }
}

fn device(memory_bytes: u64) -> VirtualBackend {
    VirtualBackend::new(VirtualOptions::exact(memory_bytes, options())).unwrap()
}

/// Numbers between -1 and 1 that depend on `seed`.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((seed * 7919 + i * 104_729) % 2003) as f32 / 1001.5 - 1.0)
        .collect()
}

fn matrix(seed: usize, rows: usize, cols: usize) -> HostMatrix {
    let (codes, values) = quantize_fp8_block(&numbers(seed, rows * cols), rows, cols);
    let scales = hearth_kernels::BlockScales {
        values: values.into(),
        blocks_per_row: cols.div_ceil(hearth_kernels::SCALE_BLOCK),
    };
    HostMatrix::new(codes.into(), DType::F8E4m3, rows, cols, Some(scales)).unwrap()
}

/// A layer of attention and experts.
struct Layer<B: Backend> {
    q: B::Weight,
    norm: B::Vector,
    router: B::Weight,
    experts: Vec<[B::Weight; 3]>,
}

impl<B: Backend> Layer<B> {
    fn new(backend: &B) -> Result<Self, KernelError> {
        let load = |seed, rows, cols| backend.weight(&matrix(seed, rows, cols));
        let expert = |e: usize| {
            Ok([
                load(10 * e, INNER, HIDDEN)?,
                load(10 * e + 1, INNER, HIDDEN)?,
                load(10 * e + 2, HIDDEN, INNER)?,
            ])
        };
        Ok(Self {
            q: load(900, HIDDEN, HIDDEN)?,
            norm: backend.vector(&numbers(901, HIDDEN))?,
            router: load(902, EXPERTS, HIDDEN)?,
            experts: (0..EXPERTS)
                .map(expert)
                .collect::<Result<_, KernelError>>()?,
        })
    }

    /// Runs the experts in invocations of `group` experts.
    fn run(&self, backend: &B, group: usize) -> Result<Vec<f32>, KernelError> {
        let mut kv = backend.kv_alloc(LAYOUT, 2)?;
        let mut x = backend.upload(TOKENS, HIDDEN, &numbers(1, TOKENS * HIDDEN))?;
        let q = backend.linear(&x, &self.q, None)?;
        let span = Span {
            first_row: 0,
            rows: TOKENS,
            start: 0,
            blocks: vec![BlockId(1), BlockId(0)],
        };
        let spans = [span];
        backend.kv_append(&mut kv, 0, &q, Some(&q), &spans)?;
        let spec = AttentionSpec {
            heads: 2,
            scale: 0.1,
        };
        let attended = backend.attention(&q, &kv, 0, &spans, spec)?;
        let x = backend.add_rms_norm(&mut x, &attended, &self.norm, 1e-6)?;
        let logits = backend.linear(&x, &self.router, None)?;
        let spec = RouterSpec {
            score: RouterScore::Softmax,
            top_k: 3,
            groups: 1,
            top_groups: 1,
            normalize: true,
            scaling: 1.0,
        };
        let routing = backend.routing(backend.route(&logits, None, spec)?)?;
        let mut chosen = vec![(Vec::new(), Vec::new()); EXPERTS];
        for (slot, (&expert, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
            chosen[expert as usize].0.push((slot / 3) as u32);
            chosen[expert as usize].1.push(weight);
        }
        let calls: Vec<_> = chosen
            .iter()
            .zip(&self.experts)
            .enumerate()
            .map(|(expert, ((rows, weights), [gate, up, down]))| ExpertCall {
                expert: expert as u32,
                gate,
                up,
                down,
                rows,
                weights,
            })
            .collect();
        let mut sum = backend.expert_sum(TOKENS, HIDDEN, EXPERTS)?;
        for (index, calls) in calls.chunks(group).enumerate() {
            let is_last = (index + 1) * group >= EXPERTS;
            backend.experts(&mut sum, &x, calls, is_last)?;
        }
        backend.download(&backend.expert_total(sum)?)
    }
}

fn memory(device: &VirtualBackend) -> DeviceMemory {
    device.device_memory().unwrap()
}

#[test]
fn bits_are_those_of_the_cpu_and_all_memory_comes_back() {
    let cpu = CpuBackend::new(options()).unwrap();
    let device = device(1 << 30);
    assert_eq!(device.numerics(), cpu.numerics());
    let layer = Layer::new(&device).unwrap();
    let matrices = [(HIDDEN, HIDDEN), (EXPERTS, HIDDEN)]
        .into_iter()
        .chain([(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)].repeat(EXPERTS));
    let stored =
        |(rows, cols): (usize, usize)| rows * cols + 4 * rows.div_ceil(128) * cols.div_ceil(128);
    let weights = (matrices.map(stored).sum::<usize>() + HIDDEN * 4) as u64;
    assert_eq!(memory(&device).used_bytes, weights);
    for group in [1, 2, EXPERTS] {
        let want = Layer::new(&cpu).unwrap().run(&cpu, EXPERTS).unwrap();
        let got = layer.run(&device, group).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "groups of {group}");
    }
    assert_eq!(memory(&device).used_bytes, weights);
    assert!(memory(&device).peak_bytes > weights + 2 * LAYOUT.block_bytes() as u64);
    drop(layer);
    assert_eq!(memory(&device).used_bytes, 0);
}

#[test]
fn a_run_fits_the_peak_of_another_and_not_a_byte_less() {
    let wide = device(1 << 30);
    let want = Layer::new(&wide).unwrap().run(&wide, 2).unwrap();
    let peak = memory(&wide).peak_bytes;
    let enough = device(peak);
    assert_eq!(Layer::new(&enough).unwrap().run(&enough, 2).unwrap(), want);
    let short = device(peak - 1);
    let error = Layer::new(&short).unwrap().run(&short, 2).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, KernelError::OutOfMemory { .. }), "{text}");
    assert!(
        text.contains(&format!("budget {} bytes", peak - 1)),
        "{text}"
    );
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let small = device(1000);
    let text = |result: Result<(), KernelError>| result.unwrap_err().to_string();
    let weight = text(small.weight(&matrix(1, HIDDEN, HIDDEN)).map(drop));
    assert!(
        weight.contains("too little memory for weights (9220 bytes)"),
        "{weight}"
    );
    let cache = text(small.kv_alloc(LAYOUT, usize::MAX).map(drop));
    assert!(cache.contains("the KV cache"), "{cache}");
    assert_eq!(memory(&small).used_bytes, 0);
    let none = VirtualBackend::new(VirtualOptions::exact(0, options()));
    assert!(
        none.err()
            .unwrap()
            .to_string()
            .contains("memory is 0 bytes")
    );
}

#[test]
fn a_weight_is_of_no_use_once_its_slot_was_given_away() {
    let device = device(1 << 20);
    let (first, second) = (matrix(1, HIDDEN, HIDDEN), matrix(2, HIDDEN, HIDDEN));
    let bytes = device.slot_bytes(&first);
    let slots = device.slots(bytes, 2).unwrap();
    assert_eq!(memory(&device).used_bytes, 2 * bytes as u64);
    let x = device.upload(1, HIDDEN, &numbers(3, HIDDEN)).unwrap();
    device.reuse(&slots[0], None).unwrap();
    let weight = device.load(&first, &slots[0], 0).unwrap();
    device.after(&device.copied().unwrap()).unwrap();
    let y = device.linear(&x, &weight, None).unwrap();
    let own = device.weight(&first).unwrap();
    let want = device.linear(&x, &own, None).unwrap();
    let values = |y| device.download(y).unwrap();
    assert_eq!(values(&y), values(&want));
    // The other slot is none of its business.
    device.reuse(&slots[1], None).unwrap();
    assert!(device.linear(&x, &weight, None).is_ok());
    let read = device.computed().unwrap();
    device.reuse(&slots[0], Some(&read)).unwrap();
    device.load(&second, &slots[0], 0).unwrap();
    let error = device.linear(&x, &weight, None).err().unwrap().to_string();
    assert!(error.contains("given to another one"), "{error}");
    let error = device
        .load(&second, &slots[1], 1)
        .err()
        .unwrap()
        .to_string();
    assert!(error.starts_with("load: bytes 1 to"), "{error}");
}

/// A fault on demand: from then on nothing succeeds, whatever becomes of the file.
#[test]
fn a_lost_device_answers_nothing_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("fault");
    let options = || VirtualOptions {
        fault: Some(file.clone()),
        ..VirtualOptions::exact(64 << 20, options())
    };
    let device = VirtualBackend::new(options()).unwrap();
    let weight = device.weight(&matrix(1, INNER, HIDDEN)).unwrap();
    let input = device.zeros(1, HIDDEN).unwrap();
    let slots = device.slots(1 << 20, 1).unwrap();
    device.linear(&input, &weight, None).unwrap();
    let kv = device.kv_alloc(LAYOUT, 1).unwrap();
    let copy = device.kv_read_begin(&kv, 0, &[BlockId(0)], 0, 3).unwrap();
    std::fs::write(&file, "Xid 79: it has fallen off the bus\n").unwrap();
    let lost = |error: KernelError| {
        assert!(matches!(error, KernelError::DeviceLost { .. }), "{error}");
        assert!(error.to_string().contains("fallen off the bus"), "{error}");
    };
    lost(device.linear(&input, &weight, None).err().unwrap());
    lost(VirtualBackend::new(options()).err().unwrap());
    lost(device.host_copy_is_done(&copy).err().unwrap());
    lost(device.host_copy_wait(&copy).err().unwrap());
    std::fs::remove_file(&file).unwrap();
    lost(device.linear(&input, &weight, None).err().unwrap());
    lost(
        device
            .load(&matrix(1, INNER, HIDDEN), &slots[0], 0)
            .err()
            .unwrap(),
    );
    VirtualBackend::new(options()).unwrap();
}
