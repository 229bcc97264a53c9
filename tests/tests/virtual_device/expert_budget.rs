//! Experts of which not all are in memory: a worker obeys the plan's budget, and answers the same.

use hearth_tests::{Metrics, Ranks, deployment};
use serde_json::{Value, json};

use super::{completed, planned};

/// A plan whose decode rank has attention on a device and its experts on CPUs, which read prompts too.
fn hybrid() -> Value {
    let directory = tempfile::tempdir().expect("a directory");
    let file = deployment(directory.path(), |spec| {
        spec["model"]["contextLength"] = json!(128);
        spec["prefill"] = json!({"mode": "Chunked"});
        spec["decode"] = json!({"maxBatch": 2, "dualBatch": "On", "expertCache": "Off"});
    });
    planned(&file, "virtual:memory=24Mi").expect("a plan")
}

/// Texts of some prompts, and what the decode worker logged.
fn served(plan: Value) -> (Vec<Value>, String) {
    let mut ranks = Ranks::of_demo();
    ranks.edit(|of_demo| *of_demo = plan);
    let decode = ranks.start("decode", "decode-0", &[]);
    ranks.route_to(&[&decode]);
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    Metrics::wait_for(&gateway.metrics_base(), "it is ready", |metrics| {
        metrics.values("hearth_worker_ready", &[]) == [1.0]
    });
    let texts = [5_u32, 40, 100].map(|tokens| {
        let prompt: Vec<u32> = (0..tokens).map(|n| 3 + (n * 37 + tokens) % 2000).collect();
        let answer = completed(&format!("{}/v1", gateway.base()), &prompt);
        let answer = answer.unwrap_or_else(|error| panic!("{error}\n{}", decode.output()));
        answer["choices"][0]["text"].clone()
    });
    (texts.to_vec(), decode.output())
}

#[test]
fn experts_within_a_budget_of_the_plan_answer_as_if_all_were_in_memory() {
    let mut plan = hybrid();
    let residency = &plan["ranks"][1]["residency"];
    assert_eq!(residency["policy"], "HostExperts");
    assert!(residency["hostBudgetBytes"].is_null(), "the demo fits");
    let expert_bytes = residency["hostBytes"].as_u64().expect("bytes");
    let (expected, logs) = served(plan.clone());
    assert!(!logs.contains("read from their files"), "{logs}");

    let budget_bytes = expert_bytes / 4;
    plan["minVersion"] = json!(3);
    plan["ranks"][1]["residency"]["hostBudgetBytes"] = json!(budget_bytes);
    let (texts, logs) = served(plan.clone());
    assert_eq!(texts, expected);
    assert!(logs.contains(&budget_bytes.to_string()), "{logs}");
    assert!(logs.contains("read from their files"), "{logs}");

    // One that holds no expert is no budget.
    plan["ranks"][1]["residency"]["hostBudgetBytes"] = json!(100);
    let mut ranks = Ranks::of_demo();
    ranks.edit(|of_demo| *of_demo = plan);
    let mut decode = ranks.start("decode", "decode-0", &[]);
    assert!(!decode.wait().success());
    let said = decode.output();
    assert!(said.contains("budget of 100 bytes cannot hold"), "{said}");
}
