//! Carries decisions out where there is no cluster.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_core::ResourceExt;
use serde_json::Value;

use crate::decision::{Decision, Grace};
use crate::names::{
    ANNOTATION_CERTIFICATE, ANNOTATION_FORM, ANNOTATION_PLAN, ANNOTATION_PLAN_GENERATION,
    ANNOTATION_ROUTED, ANNOTATION_ROUTES, ANNOTATION_SOURCE, LABEL_RANK, LABEL_ROLE,
};
use crate::observed::{Observed, PodRole, PodView, SecondRank};
use crate::quantity;

/// Carries out what a decision says about plans, Pods and the status; `uid` gives each new Pod one.
///
/// # Panics
/// When the decision is none that an API server would carry out.
pub(crate) fn carry_out(
    observed: &mut Observed,
    decision: &Decision,
    mut uid: impl FnMut() -> String,
) {
    carry_out_plans(observed, decision);
    let now = observed.now;
    for pod in &decision.create_pods {
        let view = view(pod, uid(), now);
        let mut others = observed.pods.iter();
        assert!(
            others.all(|other| other.name != view.name),
            "{} is there",
            view.name
        );
        observed.pods.push(Arc::new(view));
    }
    for marks in &decision.mark_pods {
        let pods = &mut observed.pods;
        let pod = pods.iter_mut().find(|pod| pod.name == marks.name);
        let pod = Arc::make_mut(pod.expect("marks of a Pod that is there"));
        for (key, value) in &marks.annotations {
            match key.as_str() {
                ANNOTATION_ROUTES => pod.routes.clone_from(value),
                ANNOTATION_ROUTED => pod.routed = value.parse().ok(),
                ANNOTATION_CERTIFICATE => pod.certificate.clone_from(value),
                ANNOTATION_PLAN_GENERATION => {
                    pod.plan_generation = value.parse().expect("a generation");
                }
                other => panic!("mark {other}"),
            }
        }
    }
    for end in &decision.delete_pods {
        let pods = &mut observed.pods;
        if end.grace == Grace::None {
            pods.retain(|pod| pod.uid != end.uid);
        } else if let Some(pod) = pods.iter_mut().find(|pod| pod.uid == end.uid) {
            Arc::make_mut(pod).is_deleting = true;
        }
    }
    observed.pods.sort_by(|a, b| a.name.cmp(&b.name));
    let deployment = Arc::make_mut(&mut observed.deployment);
    deployment.status = Some(decision.status.clone());
}

fn carry_out_plans(observed: &mut Observed, decision: &Decision) {
    let now = observed.now;
    let plans = &mut observed.plans;
    if let Some(plan) = &decision.create_plan {
        assert!(
            plans
                .iter()
                .all(|old| old.spec.generation < plan.spec.generation)
        );
        let mut plan = plan.clone();
        plan.metadata.creation_timestamp = Some(Time(now));
        plans.push(Arc::new(plan));
    }
    for change in &decision.plan_statuses {
        let plan = plans.iter_mut().find(|plan| plan.name_any() == change.name);
        let plan = Arc::make_mut(plan.expect("the status of a plan that is there"));
        plan.status = Some(change.status.clone());
    }
    plans.retain(|plan| !decision.delete_plans.contains(&plan.name_any()));
}

/// What is seen of a Pod once it is created.
fn view(pod: &Pod, uid: String, now: Timestamp) -> PodView {
    let label = |name: &str| pod.labels().get(name).cloned().unwrap_or_default();
    let annotation = |name: &str| pod.annotations().get(name).cloned().unwrap_or_default();
    let value = serde_json::to_value(pod).expect("a Pod as JSON");
    let text = |at: &str| value.pointer(at).and_then(Value::as_str);
    let node = text(
        "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
         /nodeSelectorTerms/0/matchFields/0/values/0",
    );
    let slice: Value = serde_json::from_str(&annotation(ANNOTATION_PLAN)).unwrap_or_default();
    let told = |at: &str| slice.pointer(at).and_then(Value::as_str);
    let second = told("/ranks/1/name").and_then(|name| {
        let first = told("/ranks/0/name").unwrap_or_default();
        SecondRank::named(name.to_owned(), first, told("/ranks/1/inPodOf"))
    });
    let cpu = text("/spec/containers/0/resources/requests/cpu");
    let memory = text("/spec/containers/0/resources/requests/memory");
    let gpus = text("/spec/containers/0/resources/limits/nvidia.com~1gpu");
    let list = |at: &str| {
        let items = slice.pointer(at).and_then(Value::as_array);
        items.into_iter().flatten()
    };
    let is_exclusive = told("/ranks/0/pinning") == Some("Exclusive");
    let claims = slice.pointer("/ranks/0/claimsGpus") == Some(&Value::Bool(true));
    let cpus = list("/ranks/0/cpus").filter_map(Value::as_u64);
    let uuids = list("/ranks/0/gpuUuids").filter_map(Value::as_str);
    PodView {
        name: pod.name_any(),
        uid,
        role: PodRole::of_label(&label(LABEL_ROLE)),
        rank: label(LABEL_RANK),
        second,
        form: annotation(ANNOTATION_FORM),
        plan_generation: annotation(ANNOTATION_PLAN_GENERATION).parse().unwrap_or(0),
        source: annotation(ANNOTATION_SOURCE),
        routes: annotation(ANNOTATION_ROUTES),
        certificate: annotation(ANNOTATION_CERTIFICATE),
        wanted_node: node.unwrap_or_default().to_owned(),
        phase: "Pending".to_owned(),
        created: Some(now),
        cpu_millis: cpu.and_then(quantity::millis).unwrap_or(0),
        memory_bytes: memory.and_then(quantity::bytes).unwrap_or(0),
        gpus: gpus.and_then(quantity::whole).unwrap_or(0),
        exclusive_cpus: cpus
            .filter(|_| is_exclusive)
            .filter_map(|cpu| u32::try_from(cpu).ok())
            .collect(),
        claimed_gpus: uuids.filter(|_| claims).map(str::to_owned).collect(),
        ..PodView::default()
    }
}
