//! Parts of URLs and certificates that reach the objects of a deployment.

use hearth_crds::{InferenceDeployment, PlanInputs};
use serde_json::json;

use super::{deployment_of_plan, kept_spec, model_key, plan_object, rank_pods};
use crate::names::ANNOTATION_SPEC;
use crate::plan_record::model_key_of;
use crate::testing::samples::{context_of, deployment_of, plan, settings};

fn http(url: &str) -> InferenceDeployment {
    let sha256 = "0123456789abcdef".repeat(4);
    deployment_of(json!({"http": {"url": url, "sha256": sha256}}))
}

#[test]
fn a_plan_shows_no_secret_of_a_url_and_its_pods_find_their_model() {
    let settings = settings();
    let now = http("https://ann:hush@nas.lan/m.tar?sig=hush#hush");
    let key = model_key(&now, &now.spec.model.source).expect("a key");
    let mut context = context_of(&settings, &now);
    context.model_key = Some(&key);
    let mut spec = plan();
    spec.inputs = Some(PlanInputs {
        deployment_spec: kept_spec(&now.spec),
        model_key: Some(key.clone()),
        ..PlanInputs::default()
    });
    let kept = plan_object(&context, spec);
    let text = serde_json::to_string(&kept).expect("JSON");
    assert!(
        text.contains("nas.lan/m.tar") && !text.contains("hush"),
        "{text}"
    );
    assert_eq!(model_key_of(&kept).as_ref(), Some(&key));
    for pod in rank_pods(&context, &plan()) {
        let text = serde_json::to_string(&pod.pod).expect("JSON");
        assert!(
            text.contains(&format!("models/{key}")) && !text.contains("hush"),
            "{text}"
        );
    }

    // As long as the plan's source is the current one, the plan has the very same spec.
    assert_eq!(deployment_of_plan(&now, &kept).spec, now.spec);
    // For an older source it keeps what may be shown, and the key of what was fetched.
    let other = http("https://ann:other@nas.lan/m.tar?sig=other");
    let then = deployment_of_plan(&other, &kept);
    let url = &then.spec.model.source.http.as_ref().expect("http").url;
    assert_eq!(url, "https://nas.lan/m.tar");
    assert_ne!(model_key(&other, &other.spec.model.source), Some(key));
}

#[test]
fn a_plan_of_before_finds_its_model_under_the_half_of_its_checksum() {
    let settings = settings();
    let deployment = http("https://nas.lan/m.tar");
    let of_before = |deployment: &InferenceDeployment| {
        let mut kept = plan_object(&context_of(&settings, deployment), plan());
        let spec = serde_json::to_string(&deployment.spec).expect("JSON");
        kept.metadata.annotations = Some([(ANNOTATION_SPEC.to_owned(), spec)].into());
        kept
    };
    let kept = of_before(&deployment);
    assert_eq!(
        model_key_of(&kept).as_deref(),
        Some("0123456789abcdef0123456789abcdef")
    );
    let builtin = deployment_of(json!({"builtin": {"name": "hearth-demo"}}));
    assert_eq!(model_key_of(&of_before(&builtin)), None);
}
