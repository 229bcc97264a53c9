//! What of a URL and of certificates reaches the objects of a deployment.

use std::collections::BTreeMap;

use hearth_crds::InferenceDeployment;
use serde_json::json;

use super::{deployment_of_plan, model_key, model_key_of, plan_object, rank_pods};
use crate::names::{ANNOTATION_MODEL_KEY, ANNOTATION_SPEC};
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
    let annotations = BTreeMap::from([(ANNOTATION_MODEL_KEY.to_owned(), key.clone())]);
    let kept = plan_object(&context, plan(), annotations);
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

    // As long as it is of the source as it is, the plan is of the very same spec.
    assert_eq!(deployment_of_plan(&now, &kept).spec, now.spec);
    // Of an older source it keeps what may be shown, and the key of what was fetched.
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
    let kept = plan_object(&context_of(&settings, &deployment), plan(), BTreeMap::new());
    assert!(
        kept.metadata
            .annotations
            .as_ref()
            .expect("annotations")
            .contains_key(ANNOTATION_SPEC)
    );
    assert_eq!(
        model_key_of(&kept).as_deref(),
        Some("0123456789abcdef0123456789abcdef")
    );
    let builtin = deployment_of(json!({"builtin": {"name": "hearth-demo"}}));
    let kept = plan_object(&context_of(&settings, &builtin), plan(), BTreeMap::new());
    assert_eq!(model_key_of(&kept), None);
}
