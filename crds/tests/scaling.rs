//! Permission to change the number of workers: what is accepted, what is refused, and the wording.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use hearth_crds::{ParseError, ScalingMode, Target, parse_deployment, parse_deployment_for};

fn text(spec: &str) -> String {
    format!(
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {{name: demo}}\nspec:\n  \
         model: {{source: {{builtin: {{name: hearth-demo}}}}}}\n  {spec}\n"
    )
}

/// Returns every error of a spec, one per line: the field, the problem, the remedy.
fn faults(spec: &str, target: Target) -> Vec<String> {
    match parse_deployment_for(&text(spec), target) {
        Ok(_) => panic!("accepted: {spec}"),
        Err(ParseError::Fields(fields)) => fields.iter().map(ToString::to_string).collect(),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn an_autoscaler_s_number_is_kept_within_bounds_in_a_cluster() {
    for pool in ["prefill", "decode"] {
        for (scaling, kept) in [
            ("{mode: External}", 3),
            ("{mode: External, minReplicas: 4}", 4),
            ("{mode: External, maxReplicas: 2}", 2),
            ("{mode: External, minReplicas: 2, maxReplicas: 2}", 2),
            ("{mode: Static}", 3),
            ("{}", 3),
        ] {
            let spec = format!("{pool}: {{replicas: 3, scaling: {scaling}}}");
            let spec = parse_deployment_for(&text(&spec), Target::Cluster);
            let spec = spec
                .unwrap_or_else(|error| panic!("{scaling}: {error}"))
                .spec;
            let planned = match pool {
                "prefill" => spec.prefill.planned_replicas(),
                _ => spec.decode.planned_replicas(),
            };
            assert_eq!(planned, kept, "{pool} {scaling}");
        }
    }
    let unset = parse_deployment(&text("decode: {replicas: 2}"))
        .unwrap()
        .spec;
    assert_eq!(unset.decode.scaling, None);
    let external = parse_deployment(&text("decode: {scaling: {mode: External}}")).unwrap();
    let scaling = external.spec.decode.scaling.unwrap();
    assert_eq!(scaling.mode, ScalingMode::External);
}

#[test]
fn one_machine_has_no_autoscaler() {
    for pool in ["prefill", "decode"] {
        let spec = format!("{pool}: {{scaling: {{mode: External}}}}");
        let refusal = format!(
            "spec.{pool}.scaling.mode is \"External\"\n  autoscalers exist only in a cluster: remove scaling, and write the number in replicas"
        );
        assert_eq!(faults(&spec, Target::Machine), [refusal]);
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_write() {
    for (scaling, refusal) in [
        (
            "{mode: Auto}",
            ".mode is \"Auto\"\n  this engine does not scale by itself: write Static and the number in replicas; in a cluster, External lets an autoscaler change it",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4}",
            " sets minReplicas and maxReplicas\n  remove minReplicas and maxReplicas: with mode Static the number is that of replicas. In a cluster, mode External keeps an autoscaler's number within them",
        ),
        (
            "{mode: External, minReplicas: 3, maxReplicas: 2}",
            ".minReplicas is 3\n  write a minReplicas that is not above maxReplicas",
        ),
        (
            "{mode: External, minReplicas: 0}",
            ".minReplicas is 0\n  write 1 to 64 workers: this engine keeps at least one worker of a pool",
        ),
        (
            "{mode: External, maxReplicas: 65}",
            ".maxReplicas is 65\n  write 1 to 64 workers",
        ),
    ] {
        for pool in ["prefill", "decode"] {
            let spec = format!("{pool}: {{scaling: {scaling}}}");
            let refusal = format!("spec.{pool}.scaling{refusal}");
            assert_eq!(faults(&spec, Target::Cluster), [refusal], "{spec}");
        }
    }
    let chunked = faults(
        "prefill: {mode: Chunked, scaling: {mode: External}}",
        Target::Cluster,
    );
    assert!(
        chunked[0].contains("remove replicas and scaling"),
        "{chunked:?}"
    );
}

#[test]
fn the_deprecated_bounds_are_refused_at_their_own_leaf() {
    const DECODE: &str = "this engine does not scale by itself: write spec.decode.replicas: 1 or another number instead; in a cluster, scaling: {mode: External, minReplicas, maxReplicas} lets an autoscaler change it within bounds (manifests/examples/hpa.yaml)";
    const PREFILL: &str = "this engine does not scale by itself: write spec.prefill.replicas: 1 or another number instead; in a cluster, scaling: {mode: External, minReplicas, maxReplicas} lets an autoscaler change it within bounds";
    for (pool, remedy) in [("prefill", PREFILL), ("decode", DECODE)] {
        for target in [Target::Machine, Target::Cluster] {
            assert_eq!(
                faults(
                    &format!("{pool}: {{minReplicas: 1, maxReplicas: 4}}"),
                    target
                ),
                [
                    format!("spec.{pool}.maxReplicas is 4\n  {remedy}"),
                    format!("spec.{pool}.minReplicas is 1\n  {remedy}"),
                ],
            );
        }
        let both = faults(
            &format!("{pool}: {{maxReplicas: 4, replicas: 2, scaling: {{}}}}"),
            Target::Cluster,
        );
        for words in [
            "write replicas alone: minReplicas and maxReplicas are deprecated",
            "write scaling alone: minReplicas and maxReplicas beside it are deprecated",
        ] {
            assert!(both.iter().any(|fault| fault.contains(words)), "{both:?}");
        }
    }
}
