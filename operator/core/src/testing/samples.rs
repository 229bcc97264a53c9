//! A deployment, its plan, its load and the operator's settings, for the tests.

use std::time::Duration;

use hearth_crds::{
    DeploymentRef, InferenceDeployment, InferencePlanSpec, ModelSource, ObjectivesSpec,
    PlanActivations, PlanKv, PlanKvType, PlanMlaForm, PlanModel, PlanPrediction, PlanRank,
    PlanResidency, PlanRole, PlanRouting, PlanStrategy, RankPrediction, ResidencyPolicy,
};
use serde_json::json;

use crate::build::BuildContext;
use crate::observed::{Demand, NodeSettings, Settings};

/// Settings of an operator with the default chart.
pub fn settings() -> Settings {
    Settings {
        worker_image: "hearth.dev/hearth-worker:0.1.0".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        pull_secrets: Vec::new(),
        operator_namespace: "hearth-system".to_owned(),
        namespaces: vec!["default".to_owned()],
        gpu_runtime_class: None,
        claims: true,
        ledger: crate::testing::settings().ledger,
        model_cache: "/var/lib/hearth/models".to_owned(),
        host_paths: Vec::new(),
        cluster_ranges: Vec::new(),
        hub_endpoint: "http://hub.lan".to_owned(),
        network_policies: true,
        tracing: None,
        keeps_authority: false,
        certificate_lifetime: Duration::from_secs(90 * 24 * 3600),
        nodes: NodeSettings {
            move_after: Duration::from_secs(20),
            forget_after: Duration::from_secs(300),
            min_residence: Duration::from_secs(60),
            passing_taints: vec!["example.net/agent-not-ready".to_owned()],
        },
    }
}

/// A deployment of the built-in model.
pub fn deployment() -> InferenceDeployment {
    let value = json!({
        "apiVersion": "hearth.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "demo", "namespace": "default", "uid": "0d1e2f30-0000-4000-8000-000000000001"},
        "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
    });
    serde_json::from_value(value).expect("deployment")
}

/// Build context for a model that is not fetched.
pub fn context_of<'a>(
    settings: &'a Settings,
    deployment: &'a InferenceDeployment,
) -> BuildContext<'a> {
    BuildContext {
        settings,
        deployment,
        model_key: None,
    }
}

/// A deployment of a model from `source`.
pub fn deployment_of(source: serde_json::Value) -> InferenceDeployment {
    let mut deployment = deployment();
    deployment.spec.model.source =
        serde_json::from_value::<ModelSource>(source).expect("model source");
    deployment
}

/// A steady load of that many requests a second, of 250 tokens and answers of 100.
pub fn steady(arrivals_per_s: f64) -> Demand {
    Demand {
        age_s: 1.0,
        span_s: 60.0,
        arrivals: arrivals_per_s * 60.0,
        long_span_s: 300.0,
        long_arrivals: arrivals_per_s * 300.0,
        recent_span_s: 15.0,
        recent_arrivals: arrivals_per_s * 15.0,
        prompt_tokens: Some(250.0),
        prompt_cv2: 0.5,
        output_tokens: Some(100.0),
        ..Demand::default()
    }
}

/// A gateway, one prefill rank and two decode ranks: decode-1 alone on node b.
pub fn plan() -> InferencePlanSpec {
    InferencePlanSpec {
        generation: 1,
        min_version: 0,
        worker_image: None,
        deployment: DeploymentRef {
            name: "demo".to_owned(),
            namespace: "default".to_owned(),
        },
        strategy: PlanStrategy::Hybrid,
        model: PlanModel {
            served_name: "hearth-demo".to_owned(),
            path: "/usr/share/hearth/models/hearth-demo".to_owned(),
            source: "builtin hearth-demo".to_owned(),
            architecture: "deepseek_v3".to_owned(),
            parameter_count: 7_100_000,
            weight_bytes: 7_733_248,
            context_length: 2048,
            layers: 6,
            kv_bytes_per_token: 960,
            dtype: "FP8".to_owned(),
        },
        ranks: vec![
            rank(PlanRole::Gateway, 0, "a"),
            rank(PlanRole::Prefill, 0, "a"),
            rank(PlanRole::Decode, 0, "a"),
            rank(PlanRole::Decode, 1, "b"),
        ],
        routing: PlanRouting {
            chunked_below_tokens: 32,
            together_after_quiet_ms: None,
            max_queue: 256,
            queue_timeout_ms: 120_000,
            hold_timeout_ms: None,
        },
        predicted: PlanPrediction {
            ttft_ms: 12.7,
            ttft_prompt_tokens: 512,
            tpot_ms: 0.2,
            tokens_per_second: 15_000.0,
        },
        objectives: ObjectivesSpec::default(),
        mixed_numerics: Vec::new(),
        inputs: None,
        why: vec!["hybrid: no GPU".to_owned()],
        not_chosen: vec!["a ring needs more nodes".to_owned()],
    }
}

fn rank(role: PlanRole, index: u32, node: &str) -> PlanRank {
    let is_worker = role != PlanRole::Gateway;
    PlanRank {
        name: format!("{}-{index}", role.as_str()),
        role,
        index,
        node: node.to_owned(),
        cpus: vec![0, 1],
        numa_nodes: if is_worker { vec![0] } else { Vec::new() },
        threads: 2,
        pinning: hearth_crds::Pinning::Shared,
        device_name: "cpu".to_owned(),
        gpus: 0,
        in_pod_of: None,
        gpu_uuids: Vec::new(),
        claims_gpus: false,
        gpu_memory_bytes: 0,
        device_memory: None,
        virtual_device: None,
        activations: PlanActivations::F32,
        mla_form: PlanMlaForm::Absorbed,
        ring: None,
        peers: None,
        residency: is_worker.then_some(PlanResidency {
            policy: ResidencyPolicy::Resident,
            weight_bytes: 7_733_248,
            budget_bytes: 7_733_248,
            read_ahead_bytes: None,
            host_bytes: 0,
            host_budget_bytes: None,
            ring_slots: None,
            ring_lengths: Vec::new(),
            streams_dense: false,
            cache_slots: None,
        }),
        kv: is_worker.then_some(PlanKv {
            memory_bytes: 15_728_640,
            key_type: PlanKvType::BF16,
            value_type: PlanKvType::BF16,
            block_tokens: 16,
        }),
        max_batch: if is_worker { 8 } else { 0 },
        dual_batch: false,
        chunk_tokens: if is_worker { 256 } else { 0 },
        idle_chunk_tokens: None,
        scratch_bytes: if is_worker { 80_150_528 } else { 134_217_728 },
        endpoint: None,
        predicted: is_worker.then_some(RankPrediction {
            ttft_ms: None,
            prompt_tokens: None,
            tpot_ms: Some(0.2),
            tokens_per_second: 15_000.0,
        }),
    }
}
