//! The form of latent attention in plans.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{
    GpuProfile, InferencePlanSpec, KvShape, ModelFacts, NodeProfileStatus, PlanMlaForm, PlanRank,
};
use hearth_planner::plan;
use support::{GIB, gpu, plan_input_here, qwen3_30b, server};

/// A model of experts with attention as DeepSeek-V3 has it, with a quarter of the heads.
fn latent_model() -> ModelFacts {
    ModelFacts {
        architecture: "deepseek_v3".into(),
        kv: KvShape::Latent {
            rank: 512,
            rope_dim: 64,
            nope_dim: 128,
            value_dim: 128,
        },
        ..qwen3_30b()
    }
}

fn planned(facts: &ModelFacts, gpu: GpuProfile, context: u32, mode: &str) -> InferencePlanSpec {
    let yaml = format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: {context}}}\nstrategy: Hybrid\nprefill: {{mode: {mode}}}\ndecode: {{maxBatch: 1}}\n"
    );
    let machine = NodeProfileStatus {
        gpus: vec![gpu],
        ..server()
    };
    let spec = serde_norway::from_str(&yaml).unwrap();
    plan(&plan_input_here(&spec, facts, &[machine])).unwrap()
}

/// The form of the prefill rank, and the line about it.
fn prefill(plan: &InferencePlanSpec) -> (PlanMlaForm, Option<&String>) {
    let others = plan.ranks.iter().filter(|rank| rank.name != "prefill-0");
    for rank in others {
        assert!(rank.mla_form.is_absorbed(), "{rank:?}");
    }
    let begin = "latent attention of prefill-0";
    let line = plan.why.iter().find(|line| line.starts_with(begin));
    (plan.rank("prefill-0").unwrap().mla_form, line)
}

fn small_gpu() -> GpuProfile {
    gpu("NVIDIA RTX 2000", 1, 12)
}

#[test]
fn streamed_prompts_are_read_with_expanded_latents() {
    let facts = latent_model();
    let plan = planned(&facts, small_gpu(), 16_384, "StreamLoading");
    let (form, line) = prefill(&plan);
    assert_eq!(form, PlanMlaForm::Expanded);
    let line = line.unwrap();
    assert!(
        line.contains("is expanded: the longest prompt of 16384 tokens takes"),
        "{line}"
    );
    // The same prompts, were the form not known to the plan.
    let absorbed = planned(
        &of_an_earlier_version(),
        small_gpu(),
        16_384,
        "StreamLoading",
    );
    assert!(plan.predicted.ttft_ms <= absorbed.predicted.ttft_ms);
    let written = |name: &str| serde_json::to_value(plan.rank(name).unwrap()).unwrap();
    assert_eq!(written("prefill-0")["mlaForm"], "Expanded");
    assert!(written("decode-0").get("mlaForm").is_none());
    let read: PlanRank = serde_json::from_value(written("decode-0")).unwrap();
    assert!(read.mla_form.is_absorbed());
}

fn of_an_earlier_version() -> ModelFacts {
    let mut text = serde_json::to_value(latent_model()).unwrap();
    let shape = text["kv"]["latent"].as_object_mut().unwrap();
    assert!(shape.remove("nopeDim").is_some() && shape.remove("valueDim").is_some());
    serde_json::from_value(text).unwrap()
}

#[test]
fn grouped_queries_and_facts_of_earlier_versions_stay_absorbed() {
    let plan = planned(
        &of_an_earlier_version(),
        small_gpu(),
        16_384,
        "StreamLoading",
    );
    assert_eq!(prefill(&plan), (PlanMlaForm::Absorbed, None));
    let plan = planned(&qwen3_30b(), small_gpu(), 16_384, "StreamLoading");
    assert_eq!(prefill(&plan), (PlanMlaForm::Absorbed, None));
}

#[test]
fn short_prompts_stay_absorbed_where_an_operation_takes_longer_than_their_attention() {
    let slow = GpuProfile {
        uuid: hearth_crds::VIRTUAL_UUID.to_owned(),
        memory_bytes: 12 * GIB,
        free_bytes: 12 * GIB,
        copy_gbps: 20.0,
        copy_beside_reads_gbps: 15.0,
        operation_us: 50.0,
        virtual_device: Some("virtual:memory=12Gi,copy=1GB/s".to_owned()),
        ..small_gpu()
    };
    let facts = latent_model();
    let plan = planned(&facts, slow.clone(), 256, "StreamLoading");
    let (form, line) = prefill(&plan);
    assert_eq!(form, PlanMlaForm::Absorbed);
    assert!(
        line.unwrap()
            .contains("is absorbed: the longest prompt of 256 tokens")
    );
    let plan = planned(&facts, slow, 8192, "StreamLoading");
    assert_eq!(prefill(&plan).0, PlanMlaForm::Expanded);
}
