//! Permission to change the number of workers: what is accepted, what is refused, and the wording.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

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
            ("{mode: Auto}", 3),
            ("{mode: Auto, minReplicas: 1, maxReplicas: 2}", 2),
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
        for (mode, why) in [
            ("External", "autoscalers exist only in a cluster"),
            (
                "Auto",
                "on one machine there is no room that could be given back",
            ),
        ] {
            let spec = format!("{pool}: {{scaling: {{mode: {mode}}}}}");
            let refusal = format!(
                "spec.{pool}.scaling.mode is \"{mode}\"\n  {why}: remove scaling, and write the number in replicas"
            );
            assert_eq!(faults(&spec, Target::Machine), [refusal]);
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_write() {
    for (scaling, refusal) in [
        (
            "{mode: Auto, minReplicas: 3, maxReplicas: 2}",
            ".minReplicas is 3\n  write a minReplicas that is not above maxReplicas",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4}",
            " sets minReplicas and maxReplicas\n  remove minReplicas and maxReplicas: with mode Static the number is that of replicas. In a cluster, mode Auto lets Hearth follow the load within them, and External keeps an autoscaler's number within them",
        ),
        (
            "{mode: External, minReplicas: 3, maxReplicas: 2}",
            ".minReplicas is 3\n  write a minReplicas that is not above maxReplicas",
        ),
        (
            "{mode: Auto, minReplicas: 65}",
            ".minReplicas is 65\n  write 0 to 64 workers",
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
fn an_autoscaler_may_ask_for_no_workers_where_decode_says_so() {
    const NONE: &str = "spec.decode.replicas is 0\n  write 1 to 64 workers; the default is 1, and 0 takes scaling: {mode: External, minReplicas: 0}, with which an autoscaler ends all workers and starts them again";
    const EXTERNAL: &str = "\n  with decode.scaling.mode External the autoscaler alone ends workers and starts them: remove it, or write decode.scaling: {mode: Auto, minReplicas: 0}";
    let scaling = "scaling: {mode: External, minReplicas: 0, maxReplicas: 4}";
    let read = |decode: &str| {
        let spec = text(&format!(
            "decode: {{{decode}}}\n  prefill: {{replicas: 2, scaling: {{mode: External}}}}"
        ));
        let read = parse_deployment_for(&spec, Target::Cluster);
        read.unwrap_or_else(|error| panic!("{spec}: {error}")).spec
    };
    for (replicas, is_emptied) in [(0, true), (1, false), (9, false)] {
        let spec = read(&format!("replicas: {replicas}, {scaling}"));
        assert_eq!(spec.is_emptied(), is_emptied, "{replicas}");
        assert_eq!(spec.decode.planned_replicas(), replicas.clamp(1, 4));
        assert_eq!(spec.hold_timeout(), Some(Duration::from_secs(600)));
        assert!(spec.may_be_emptied() && !spec.may_rest());
        assert_eq!(spec.scale_to_zero_after(), None);
    }
    assert!(!read(scaling).is_emptied());
    let held = text(&format!(
        "decode: {{{scaling}}}\n  autoscaling: {{holdTimeout: 5m}}"
    ));
    parse_deployment_for(&held, Target::Cluster).unwrap();
    let set = |field: &str| format!("decode: {{{scaling}}}\n  autoscaling: {{{field}}}");
    for (spec, refusal) in [
        ("decode: {replicas: 0}".to_owned(), NONE.to_owned()),
        (
            "decode: {replicas: 0, scaling: {mode: External}}".to_owned(),
            NONE.to_owned(),
        ),
        (
            "decode: {replicas: 0, scaling: {mode: Auto, minReplicas: 0}}".to_owned(),
            NONE.to_owned(),
        ),
        (
            format!("decode: {{replicas: 65, {scaling}}}"),
            "spec.decode.replicas is 65\n  write 1 to 64 workers; the default is 1".to_owned(),
        ),
        (
            format!("decode: {{{scaling}}}\n  prefill: {{{scaling}}}"),
            "spec.prefill.scaling.minReplicas is 0\n  prefill workers end together with the decode workers, whose number 0 ends all: write 1 to 64 workers here, and decode.scaling: {mode: External, minReplicas: 0}".to_owned(),
        ),
        (
            set("scaleToZeroAfter: 5m"),
            format!("spec.autoscaling.scaleToZeroAfter is \"5m\"{EXTERNAL}"),
        ),
        (
            set("keep: true"),
            format!("spec.autoscaling.keep is true{EXTERNAL}"),
        ),
        (
            set("preload: true"),
            format!("spec.autoscaling.preload is true{EXTERNAL}"),
        ),
    ] {
        assert_eq!(faults(&spec, Target::Cluster), [refusal], "{spec}");
    }
}

#[test]
fn workers_may_end_for_want_of_requests_where_decode_says_so() {
    const STAYS: &str = "spec.autoscaling.scaleToZeroAfter is \"5m\"\n  with autoscaling.keep or autoscaling.preload workers stay without requests: remove scaleToZeroAfter, or remove keep and preload";
    let zero = "decode: {scaling: {mode: Auto, minReplicas: 0}}";
    let read = |spec: &str| {
        let read = parse_deployment_for(&text(spec), Target::Cluster);
        read.unwrap_or_else(|error| panic!("{spec}: {error}")).spec
    };
    let spec = read(zero);
    assert_eq!(spec.decode.planned_replicas(), 1);
    let ten_minutes = Some(Duration::from_secs(600));
    assert_eq!(spec.scale_to_zero_after(), ten_minutes);
    assert_eq!(spec.hold_timeout(), ten_minutes);
    let spec = read(&format!(
        "{zero}\n  prefill: {{scaling: {{mode: Auto, minReplicas: 0}}}}\n  \
         autoscaling: {{scaleToZeroAfter: 15m, holdTimeout: 90s}}"
    ));
    assert_eq!(spec.scale_to_zero_after(), Some(Duration::from_secs(900)));
    assert_eq!(spec.hold_timeout(), Some(Duration::from_secs(90)));
    for stays in ["keep: true", "preload: true", "keep: true, preload: true"] {
        let spec = read(&format!("{zero}\n  autoscaling: {{{stays}}}"));
        assert!(spec.may_rest());
        assert_eq!(spec.scale_to_zero_after(), None);
        assert_eq!(spec.hold_timeout(), ten_minutes);
    }
    let kept = read("decode: {scaling: {mode: Auto}}");
    assert_eq!(
        (kept.scale_to_zero_after(), kept.hold_timeout()),
        (None, None)
    );
    for (spec, refusal) in [
        (
            "prefill: {scaling: {mode: Auto, minReplicas: 0}}".to_owned(),
            "spec.prefill.scaling.minReplicas is 0\n  prefill workers end for want of requests together with the decode workers: write decode.scaling: {mode: Auto, minReplicas: 0} too, or 1 here",
        ),
        (
            "autoscaling: {holdTimeout: 5m}".to_owned(),
            "spec.autoscaling.holdTimeout is \"5m\"\n  it counts only where workers end for want of requests: write decode.scaling: {mode: Auto, minReplicas: 0}, or remove it",
        ),
        (
            format!("{zero}\n  autoscaling: {{scaleToZeroAfter: 9s}}"),
            "spec.autoscaling.scaleToZeroAfter is \"9s\"\n  write 10s to 720h; the default is 10m",
        ),
        (
            format!("{zero}\n  autoscaling: {{holdTimeout: 25h}}"),
            "spec.autoscaling.holdTimeout is \"25h\"\n  write 1s to 24h; the default is 10m",
        ),
        (
            format!("{zero}\n  autoscaling: {{preload: true, scaleToZeroAfter: 5m}}"),
            STAYS,
        ),
        (
            format!("{zero}\n  autoscaling: {{keep: true, scaleToZeroAfter: 5m}}"),
            STAYS,
        ),
        (
            format!("{zero}\n  autoscaling: {{keep: true, preload: true, scaleToZeroAfter: 5m}}"),
            STAYS,
        ),
        (
            "autoscaling: {keep: true}".to_owned(),
            "spec.autoscaling.keep is true\n  as it is, workers end for nobody: remove it, or write decode.scaling: {mode: Auto, minReplicas: 0} for workers that end for a higher priority",
        ),
        (
            "autoscaling: {preload: true}".to_owned(),
            "spec.autoscaling.preload is true\n  it counts only where workers end for want of requests: write decode.scaling: {mode: Auto, minReplicas: 0}, or remove it",
        ),
    ] {
        assert_eq!(faults(&spec, Target::Cluster), [refusal], "{spec}");
    }
}

#[test]
fn the_deprecated_bounds_are_refused_at_their_own_leaf() {
    const DECODE: &str = "bounds are deprecated here: write spec.decode.replicas: 1 or another number instead; in a cluster, scaling: {mode: Auto, minReplicas, maxReplicas} lets Hearth change it within bounds, and mode External an autoscaler (manifests/examples/hpa.yaml)";
    const PREFILL: &str = "bounds are deprecated here: write spec.prefill.replicas: 1 or another number instead; in a cluster, scaling: {mode: Auto, minReplicas, maxReplicas} lets Hearth change it within bounds, and mode External an autoscaler";
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
