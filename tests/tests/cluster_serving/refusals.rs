//! Bad specs: most are refused at admission, the rest by a condition; each names the remedy.

use hearth_tests::cluster::{Cluster, wait_until};
use serde_json::{Value, json};

use crate::release::{PATIENCE, deployment, infd, said};

/// Returns specs that the API server itself refuses, with words that its answer must contain.
fn at_admission() -> Vec<(&'static str, Value, [&'static str; 2])> {
    let demo = json!({"builtin": {"name": "hearth-demo"}});
    vec![
        (
            "no-source",
            json!({"model": {"source": {}}}),
            ["spec.model.source", "write exactly one of builtin"],
        ),
        (
            "two-sources",
            json!({"model": {"source": {"builtin": {"name": "hearth-demo"}, "hostPath": {"path": "/m"}}}}),
            ["spec.model.source", "write exactly one of builtin"],
        ),
        (
            "relative-path",
            json!({"model": {"source": {"hostPath": {"path": "models/m"}}}}),
            ["spec.model.source.hostPath.path", "write the absolute path"],
        ),
        (
            "forbidden-path",
            json!({"model": {"source": {"hostPath": {"path": "/etc/kubernetes"}}}}),
            ["/etc/kubernetes", "put the model below /models"],
        ),
        (
            "no-batch",
            json!({"decode": {"maxBatch": 0}}),
            [
                "spec.decode.maxBatch",
                "at least 1 stream must be able to decode",
            ],
        ),
        (
            "replicas-and-range",
            json!({"decode": {"replicas": 1, "minReplicas": 1, "maxReplicas": 2}}),
            ["spec.decode", "replicas"],
        ),
        (
            "tiny-context",
            json!({"model": {"source": demo, "contextLength": 1}}),
            ["spec.model.contextLength", "write a context of 16 to"],
        ),
        ("Upper", json!({}), ["Upper", "lower"]),
        (
            "typo",
            json!({"decode": {"maxBach": 4}}),
            ["spec.decode.maxBach", "field not declared in schema"],
        ),
    ]
}

/// Returns specs that only inspection of model and nodes can refuse: condition, reason, words.
fn by_condition() -> Vec<(&'static str, Value, [&'static str; 3])> {
    vec![
        (
            "long-context",
            json!({"model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 1_000_000}}),
            ["Planned", "ContextTooLong", "write at most 2048"],
        ),
        (
            "no-room",
            json!({"decode": {"kvCache": {"memory": "9000Gi"}}}),
            [
                "Planned",
                "InsufficientMemory",
                "lower spec.decode.kvCache.memory to",
            ],
        ),
        (
            "many-gpus",
            json!({"prefill": {"gpusPerWorker": 16}}),
            ["Planned", "TooFewGpus", "lower spec.prefill.gpusPerWorker"],
        ),
        (
            "nowhere",
            json!({"model": {"source": {"hostPath": {"path": "/models/no-such-model"}}}}),
            [
                "ModelReady",
                "ModelNotFound",
                "/models/no-such-model is not a directory",
            ],
        ),
    ]
}

/// Applies them all and checks the messages.
pub(crate) fn are_refused_with_help(cluster: &Cluster) {
    for (name, spec, words) in at_admission() {
        let refusal = cluster
            .try_apply(&deployment(name, spec).to_string())
            .expect_err(name);
        for word in words {
            assert!(refusal.contains(word), "{name}: no {word:?} in {refusal}");
        }
    }
    let conditions = by_condition();
    for (name, spec, _) in &conditions {
        cluster.apply(&deployment(name, spec.clone()).to_string());
    }
    for (name, _, [condition, reason, words]) in &conditions {
        let what = format!("{name}: {condition} says {reason} and {words:?}");
        wait_until(&what, PATIENCE, || {
            let (found, message) = said(&infd(cluster, name), condition);
            (found == *reason && message.contains(words)).then_some(())
        });
        cluster.kubectl(&["delete", "infd", name]);
    }
}
