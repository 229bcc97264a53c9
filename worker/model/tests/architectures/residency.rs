//! A forward pass's calls to the residency policy and its observer, and the inputs that it rejects.

use std::collections::{HashMap, HashSet};

use hearth_formats::Checkpoint;
use hearth_kernels::{CpuBackend, CpuKv, CpuTensor, Isa, KvDType, Span};
use hearth_model::{Batch, ModelError, ModuleId, ModuleWeights, Observer, TensorShape, modules};

use crate::harness::{Golden, Runner};

#[test]
fn a_token_acquires_its_experts_and_no_others() {
    for (case, layers, per_token, shared) in [
        ("qwen3_moe", 0..3, 3, false),
        ("deepseek_v3", 1..3, 3, true),
    ] {
        let golden = Golden::load(case);
        let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
        let mut sequence = runner.sequence(1);
        runner.step(&mut [(&mut sequence, &[7])]);
        let acquired = runner.residency.acquired.lock().unwrap().clone();
        for layer in layers {
            let experts: Vec<u32> = acquired
                .iter()
                .filter_map(|id| match id {
                    ModuleId::Expert(l, expert) if *l == layer => Some(*expert),
                    _ => None,
                })
                .collect();
            assert_eq!(experts.len(), per_token, "{case}, layer {layer}");
            assert!(experts.is_sorted(), "{case}, layer {layer}: {experts:?}");
            assert_eq!(acquired.contains(&ModuleId::SharedExpert(layer)), shared);
        }
        assert_eq!(acquired.first(), Some(&ModuleId::Embedding));
        assert_eq!(acquired.last(), Some(&ModuleId::Head));
    }
}

#[test]
fn modules_name_every_tensor_of_the_checkpoint_once() {
    for case in [
        "deepseek_v3",
        "deepseek_v3_no_q_lora",
        "deepseek_v3_fp8",
        "kimi_k2",
        "qwen3_moe",
        "qwen3_moe_sparse_step",
        "qwen3_moe_fp8",
        "qwen3",
        "qwen2",
        "llama2",
        "llama_linear",
    ] {
        let golden = Golden::load(case);
        let specs = modules(&golden.config).unwrap();
        let named: Vec<&str> = specs
            .iter()
            .flat_map(|s| &s.tensors)
            .map(|t| t.name.as_str())
            .collect();
        let unique: HashSet<&str> = named.iter().copied().collect();
        let missing = unique.iter().find(|name| !golden.checkpoint.contains(name));
        assert_eq!(missing, None, "{case}");
        assert_eq!(golden.checkpoint.unused(&unique).next(), None, "{case}");
        let twice = named.len() - unique.len();
        assert_eq!(
            twice,
            usize::from(golden.config.tie_word_embeddings),
            "{case}"
        );
        let bytes: u64 = specs
            .iter()
            .map(|s| s.stored_bytes(&golden.checkpoint))
            .sum();
        if !golden.config.tie_word_embeddings {
            assert_eq!(bytes, golden.checkpoint.total_bytes(), "{case}");
        }
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let golden = Golden::load("llama3");
    let specs = modules(&golden.config).unwrap();
    let head = &specs.last().unwrap().tensors[1];
    assert_eq!(head.name, "model.embed_tokens.weight");
    assert_eq!(
        head.shape,
        TensorShape::Matrix {
            rows: 187,
            cols: 70
        }
    );
}

#[test]
fn a_missing_tensor_is_named() {
    let golden = Golden::load("llama2");
    let other = Golden::load("qwen2");
    let runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let load = |config, checkpoint: &Checkpoint, id| {
        let specs = modules(config).unwrap();
        let spec = specs.iter().find(|s| s.id == id).unwrap();
        let loaded = ModuleWeights::<CpuBackend>::load(
            spec,
            checkpoint,
            runner.model.backend(),
            &mut HashMap::new(),
        );
        loaded.err().unwrap().to_string()
    };
    let message = load(&other.config, &golden.checkpoint, ModuleId::Attention(0));
    assert!(
        message.contains("model.layers.0.input_layernorm.weight"),
        "{message}"
    );
    assert!(
        message.contains("[66]") && message.contains("[90]"),
        "{message}"
    );
    let mut biased = golden.config.clone();
    if let hearth_formats::AttentionConfig::Gqa { o_bias, .. } = &mut biased.attention {
        *o_bias = true;
    }
    let message = load(&biased, &golden.checkpoint, ModuleId::Attention(1));
    assert!(
        message.contains("model.layers.1.self_attn.o_proj.bias"),
        "{message}"
    );
}

/// Records the order of events.
#[derive(Default)]
struct Events(Vec<String>);

impl Observer<CpuBackend> for Events {
    fn layer_done(&mut self, layer: usize, _kv: &CpuKv) {
        self.0.push(format!("layer {layer} done"));
    }

    fn tensor(
        &mut self,
        name: &'static str,
        layer: Option<usize>,
        _backend: &CpuBackend,
        _x: &CpuTensor,
    ) {
        if ["attn_out", "ffn_norm"].contains(&name) {
            self.0.push(format!("{} {name}", layer.unwrap()));
        }
    }
}

#[test]
fn a_layers_keys_are_announced_before_the_rest_of_the_layer_runs() {
    let golden = Golden::load("qwen2");
    let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let mut sequence = runner.sequence(3);
    let mut events = Events::default();
    runner.observed_step(&mut [(&mut sequence, &[1, 2, 3])], &mut events);
    let want: Vec<String> = (0..3)
        .flat_map(|l| {
            [
                format!("{l} attn_out"),
                format!("layer {l} done"),
                format!("{l} ffn_norm"),
            ]
        })
        .collect();
    assert_eq!(events.0, want);
}

#[test]
fn only_wanted_rows_have_logits_in_the_order_asked_for() {
    let golden = Golden::load("qwen3");
    let prompt = golden.prompt();
    let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let mut sequence = runner.sequence(20);
    let all = runner.step(&mut [(&mut sequence, &prompt[..20])]);
    let batch = |logit_rows: Vec<u32>| Batch {
        tokens: prompt[..20].to_vec(),
        spans: vec![Span {
            first_row: 0,
            rows: 20,
            start: 0,
            blocks: sequence.blocks.clone(),
        }],
        logit_rows,
    };
    let got = runner
        .model
        .forward(&batch(vec![19, 3]), &mut runner.kv, &mut ())
        .unwrap();
    assert_eq!(got, [all[19].clone(), all[3].clone()].concat());
    runner.residency.acquired.lock().unwrap().clear();
    let got = runner
        .model
        .forward(&batch(vec![]), &mut runner.kv, &mut ())
        .unwrap();
    assert!(got.is_empty());
    assert!(
        !runner
            .residency
            .acquired
            .lock()
            .unwrap()
            .contains(&ModuleId::Head)
    );
}

#[test]
fn a_batch_that_does_not_fit_itself_is_refused() {
    let golden = Golden::load("llama2");
    let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let blocks = runner.sequence(16).blocks;
    let span = |first_row, rows, start| Span {
        first_row,
        rows,
        start,
        blocks: blocks.clone(),
    };
    let cases = [
        (vec![], vec![], vec![], "spans cover 0 rows, tokens are 0"),
        (
            vec![1, 2],
            vec![span(0, 1, 0)],
            vec![],
            "spans cover 1 rows, tokens are 2",
        ),
        (
            vec![1, 2],
            vec![span(1, 1, 0), span(0, 1, 0)],
            vec![],
            "rows 1+1 where row 0 comes next",
        ),
        (
            vec![1],
            vec![span(0, 0, 0), span(0, 1, 0)],
            vec![],
            "rows 0+0 where row 0 comes next",
        ),
        (
            vec![187],
            vec![span(0, 1, 0)],
            vec![],
            "token 187 is outside the vocabulary of 187",
        ),
        (
            vec![1],
            vec![span(0, 1, 0)],
            vec![1],
            "logits are wanted of row 1 of 1",
        ),
        (
            vec![1],
            vec![span(0, 1, usize::MAX)],
            vec![],
            "is too large",
        ),
    ];
    for (tokens, spans, logit_rows, want) in cases {
        let batch = Batch {
            tokens,
            spans,
            logit_rows,
        };
        let error = runner
            .model
            .forward(&batch, &mut runner.kv, &mut ())
            .unwrap_err();
        assert!(matches!(error, ModelError::Batch(_)), "{error}");
        assert!(error.to_string().contains(want), "{error}");
    }
}

#[test]
fn positions_without_blocks_are_refused_by_the_device_and_the_module_is_named() {
    let golden = Golden::load("llama2");
    let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let blocks = runner.sequence(16).blocks;
    let batch = Batch {
        tokens: vec![1],
        spans: vec![Span {
            first_row: 0,
            rows: 1,
            start: 16,
            blocks,
        }],
        logit_rows: vec![0],
    };
    let error = runner
        .model
        .forward(&batch, &mut runner.kv, &mut ())
        .unwrap_err();
    assert!(
        error.to_string().starts_with("layer 0 attention: "),
        "{error}"
    );
}
