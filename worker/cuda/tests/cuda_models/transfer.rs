//! KV moves between a GPU and a CPU: one computes the prompt, the other continues.

use hearth_kernels::KvDType;

use crate::device::{cpu, engine, gpu};
use crate::support::{answer, ask, checkpoints, disaggregated, prompt};

/// Tokens per answer; the prompts were not specially chosen.
const ANSWER_TOKENS: usize = 8;

#[test]
fn a_prompt_computed_on_one_device_is_continued_on_the_other() {
    let cpu = cpu();
    for dir in checkpoints() {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        if !["deepseek_v3_fp8", "qwen3_moe", "qwen2"].contains(&name.as_str()) {
            continue;
        }
        for dtype in [KvDType::Bf16, KvDType::F32] {
            let on_gpu = engine(&dir, gpu(), &|o| o.kv_dtype = dtype);
            let on_cpu = engine(&dir, cpu.clone(), &|o| o.kv_dtype = dtype);
            assert_eq!(
                on_gpu.kv_layout().fingerprint(),
                on_cpu.kv_layout().fingerprint()
            );
            let mut input = ask(&prompt(21, 4), ANSWER_TOKENS);
            input.sampling.temperature = 0.0;
            let tokens =
                |answer: Vec<(u32, u32)>| -> Vec<u32> { answer.into_iter().map(|t| t.0).collect() };
            let want = tokens(answer(&on_cpu, input.clone()));
            assert_eq!(
                tokens(answer(&on_gpu, input.clone())),
                want,
                "{name}: on the GPU alone"
            );
            let from_gpu = disaggregated(&on_cpu, &on_gpu, input.clone());
            assert_eq!(
                tokens(from_gpu),
                want,
                "{name} {dtype:?}: prompt on the GPU, answer on the CPU"
            );
            let fresh = engine(&dir, gpu(), &|o| o.kv_dtype = dtype);
            let from_cpu = disaggregated(&fresh, &on_cpu, input);
            assert_eq!(
                tokens(from_cpu),
                want,
                "{name} {dtype:?}: prompt on the CPU, answer on the GPU"
            );
        }
    }
}
