//! What GPUs that read prompts together exchange: more than may wait at a worker, or over a link that nobody has measured.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use hearth_crds::{InferencePlanSpec, LinkProfile, ModelFacts, NodeProfileStatus};
use hearth_planner::{PlanError, plan};
use support::{GIB, gpu, laptop, plan_input_here, qwen3_30b};

/// A machine with so many GPUs of 48 GiB.
fn machine(gpus: u32) -> NodeProfileStatus {
    NodeProfileStatus {
        gpus: (0..gpus).map(|n| gpu(&format!("L40 {n}"), n, 48)).collect(),
        ..laptop(200 * GIB)
    }
}

/// A plan of a context in which three peers exchange more than may wait, and of which two, four and eight exchange an eighth: their
/// sums come back added up.
fn asked(
    more: &str,
    facts: &ModelFacts,
    node: &NodeProfileStatus,
) -> Result<InferencePlanSpec, PlanError> {
    let yaml = format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 36864}}\nprefill: {{mode: DistributedStreamLoading{more}}}\n"
    );
    let spec = serde_norway::from_str(&yaml).unwrap();
    plan(&plan_input_here(&spec, facts, std::slice::from_ref(node)))
}

#[test]
fn a_number_of_gpus_that_exchange_too_much_is_told_with_one_that_fits() {
    for (gpus, fits) in [(3, 2), (6, 4), (8, 8)] {
        let node = machine(gpus);
        let with = |number: u32| asked(&format!(", gpusPerWorker: {number}"), &qwen3_30b(), &node);
        let refused = with(3).unwrap_err().to_string();
        assert!(
            refused.starts_with("spec.model.contextLength is 36864")
                && refused.contains("3 GPUs would exchange up to ")
                && refused.contains(&format!(
                    ": write spec.prefill.gpusPerWorker: {fits}, a shorter contextLength, or "
                )),
            "{refused}"
        );
        with(fits).unwrap_or_else(|still| panic!("{refused}\nand then {still}"));
        // Of all that could be asked for, none larger does.
        for more in fits + 1..=gpus {
            with(more).unwrap_err();
        }
    }
}

#[test]
fn no_number_is_told_where_none_fits() {
    let mut wide = qwen3_30b();
    wide.hidden = 1 << 20;
    for more in ["", ", gpusPerWorker: 3"] {
        let refused = asked(more, &wide, &machine(4)).unwrap_err().to_string();
        assert!(
            refused.starts_with("spec.model.contextLength is ")
                && refused.contains(": write a shorter contextLength, or "),
            "{refused}"
        );
    }
}

#[test]
fn a_link_between_gpus_that_was_not_measured_is_told_with_what_it_is_taken_for() {
    let yaml = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\nprefill: {mode: DistributedStreamLoading, gpusPerWorker: 2}\n";
    let spec = serde_norway::from_str(yaml).unwrap();
    let mut nodes = ["attic", "office"].map(|name| NodeProfileStatus {
        node: name.to_owned(),
        gpus: vec![gpu(&format!("L4 of {name}"), name.len() as u32, 8)],
        ..laptop(60 * GIB)
    });
    let warnings = |nodes: &[NodeProfileStatus]| {
        let why = plan(&plan_input_here(&spec, &qwen3_30b(), nodes))
            .unwrap()
            .why;
        let all = why.into_iter();
        all.filter(|line| line.starts_with("warning: links were not measured"))
            .collect::<Vec<_>>()
    };
    let told = warnings(&nodes);
    assert!(
        matches!(told.as_slice(), [one] if one.contains(" GB/s and ") && one.ends_with(" ms: attic to office")),
        "{told:?}"
    );
    // What one end has measured is enough.
    nodes[1].links = vec![LinkProfile {
        peer: "attic".to_owned(),
        gbps: 1.1,
        rtt_us: 100.0,
    }];
    assert_eq!(warnings(&nodes), Vec::<String>::new());
}
