//! Tests of the client part against a fake API server.

use http::Method;
use serde_json::{Value, json};

use super::fake::{FakeApi, settings};
use super::*;

const CA: &str = "/api/v1/namespaces/hearth-system/secrets/hearth-ca";
const AGENT: &str = "/api/v1/namespaces/hearth-system/secrets/hearth-agent-tls";
const DEMO: &str = "/api/v1/namespaces/default/secrets/demo-hearth-certificates";
const OLD: &str = "/api/v1/namespaces/default/secrets/demo-tls";
const DAY: Duration = Duration::from_secs(24 * 3600);

fn start() -> Timestamp {
    "2026-11-20T12:00:00Z".parse().expect("time")
}

fn days(count: u32) -> Timestamp {
    start().checked_add(DAY * count).expect("time")
}

fn authority(api: &FakeApi) -> Authority {
    let owner = OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name: "hearth-operator".to_owned(),
        uid: "op".to_owned(),
        ..OwnerReference::default()
    };
    Authority::new(api.client(), Arc::new(settings()), Some(owner))
}

fn deployment() -> InferenceDeployment {
    let value = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "demo", "namespace": "default", "uid": "u1"},
        "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
    });
    serde_json::from_value(value).expect("deployment")
}

fn object(api: &FakeApi, path: &str) -> Value {
    api.object(path).expect(path)
}

#[tokio::test]
async fn the_authority_is_made_once_and_owned_by_the_operator() {
    let api = FakeApi::default();
    let first = authority(&api);
    first.keep(start()).await.expect("authority");
    let ca = object(&api, CA);
    assert_eq!(ca["metadata"]["ownerReferences"][0]["uid"], "op");
    assert_eq!(object(&api, AGENT)["data"]["ca.crt"], ca["data"]["ca.crt"]);
    let writes = api.writes();
    assert_eq!(writes, [format!("POST {CA}"), format!("POST {AGENT}")]);
    // Neither this replica nor one that starts later has anything to write.
    first.keep(days(1)).await.expect("authority");
    authority(&api).keep(days(2)).await.expect("authority");
    assert_eq!(api.writes(), writes);
}

#[tokio::test]
async fn of_two_replicas_that_begin_at_once_one_makes_the_authority() {
    let (api, elsewhere) = (FakeApi::default(), FakeApi::default());
    authority(&elsewhere)
        .keep(start())
        .await
        .expect("authority");
    api.be_quicker(Method::POST, CA, object(&elsewhere, CA));
    authority(&api).keep(start()).await.expect("authority");
    assert_eq!(object(&api, CA), object(&elsewhere, CA));
    assert_eq!(
        object(&api, AGENT)["data"]["ca.crt"],
        object(&elsewhere, CA)["data"]["ca.crt"]
    );
}

#[tokio::test]
async fn a_deployment_keeps_its_certificate_until_two_thirds_of_its_life() {
    let api = FakeApi::default();
    let authority = authority(&api);
    let issued = authority
        .deployment(&deployment(), false, start())
        .await
        .expect("issued");
    let secret = object(&api, DEMO);
    assert_eq!(secret["type"], "kubernetes.io/tls");
    assert_eq!(secret["metadata"]["ownerReferences"][0]["uid"], "u1");
    assert_eq!(
        secret["metadata"]["labels"]["hearth.dev/deployment"],
        "demo"
    );
    let writes = api.writes().len();
    for day in [0, 1, 59] {
        let again = authority
            .deployment(&deployment(), false, days(day))
            .await
            .expect("issued");
        assert_eq!(again.serial, issued.serial, "day {day}");
    }
    assert_eq!(api.writes().len(), writes);
    let renewed = authority
        .deployment(&deployment(), false, days(60))
        .await
        .expect("issued");
    assert_ne!(renewed.serial, issued.serial);
    assert_eq!(api.writes().len(), writes + 1);
}

#[tokio::test]
async fn a_removed_secret_comes_back_and_a_new_deployment_is_its_owner() {
    let api = FakeApi::default();
    let authority = authority(&api);
    let first = authority
        .deployment(&deployment(), false, start())
        .await
        .expect("issued");
    api.remove(DEMO);
    let later = start().checked_add(LOOK_AGAIN).expect("time");
    let second = authority
        .deployment(&deployment(), false, later)
        .await
        .expect("issued");
    assert_ne!(first.serial, second.serial);
    // Deleted and recreated under the same name: checked again without waiting.
    api.remove(DEMO);
    let mut again = deployment();
    again.metadata.uid = Some("u2".to_owned());
    authority
        .deployment(&again, false, later)
        .await
        .expect("issued");
    assert_eq!(
        object(&api, DEMO)["metadata"]["ownerReferences"][0]["uid"],
        "u2"
    );
}

#[tokio::test]
async fn a_secret_of_someone_else_is_not_touched() {
    let api = FakeApi::default();
    let theirs = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "demo-hearth-certificates", "resourceVersion": "5"}});
    api.put(DEMO, theirs.clone());
    let refused = authority(&api)
        .deployment(&deployment(), false, start())
        .await;
    let message = refused.expect_err("refused").to_string();
    assert!(
        message.contains("default/demo-hearth-certificates is there already"),
        "{message}"
    );
    assert_eq!(object(&api, DEMO), theirs);
}

#[tokio::test]
async fn ours_is_told_by_the_owner_s_uid_whatever_the_labels_say() {
    let api = FakeApi::default();
    authority(&api)
        .deployment(&deployment(), false, start())
        .await
        .expect("issued");
    let ours = object(&api, DEMO);
    for (owners, words) in [
        (json!(null), "is not Hearth's"),
        (
            json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "demo", "uid": "u1", "controller": false}]),
            "is not Hearth's",
        ),
        (
            json!([{"apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment", "name": "demo",
                    "uid": "u0", "controller": true}]),
            "of an earlier deployment",
        ),
    ] {
        let mut theirs = ours.clone();
        theirs["metadata"]["ownerReferences"] = owners;
        theirs["data"] = json!({"tls.crt": "AAAA"});
        api.put(DEMO, theirs.clone());
        let refused = authority(&api)
            .deployment(&deployment(), false, start())
            .await;
        let message = refused.expect_err("refused").to_string();
        assert!(message.contains(words), "{message}");
        assert_eq!(object(&api, DEMO), theirs);
    }
    // One that appears between the read and the write is not overwritten either.
    api.remove(DEMO);
    let theirs = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "demo-hearth-certificates"}});
    api.be_quicker(Method::POST, DEMO, theirs.clone());
    let refused = authority(&api)
        .deployment(&deployment(), false, start())
        .await;
    assert!(
        matches!(refused, Err(AuthorityError::Taken(_))),
        "{refused:?}"
    );
    assert_eq!(object(&api, DEMO), theirs);
}

/// Between the read of a Secret and its renewal, others delete or recreate it.
#[tokio::test]
async fn a_renewal_meets_another_secret_and_comes_to_an_end() {
    let due = days(60);
    let input = async || {
        let api = FakeApi::default();
        let authority = authority(&api);
        let issued = authority.deployment(&deployment(), false, start()).await;
        let before = object(&api, DEMO);
        (api, authority, issued.expect("issued"), before)
    };
    let patches = |api: &FakeApi| {
        let writes = api.writes();
        writes.iter().filter(|w| w.starts_with("PATCH")).count()
    };

    // Gone: created again.
    let (api, authority, first, before) = input().await;
    api.be_quicker(Method::PATCH, DEMO, Value::Null);
    let issued = authority.deployment(&deployment(), false, due).await;
    assert_ne!(issued.expect("issued").serial, first.serial);
    assert_ne!(
        object(&api, DEMO)["metadata"]["uid"],
        before["metadata"]["uid"]
    );
    assert_eq!(patches(&api), 1);

    // Replaced by someone else's: reported, and left alone.
    let (api, authority, _, _) = input().await;
    let theirs = json!({"apiVersion": "v1", "kind": "Secret",
                        "metadata": {"name": "demo-hearth-certificates", "uid": "theirs"}});
    api.be_quicker(Method::PATCH, DEMO, theirs.clone());
    let refused = authority.deployment(&deployment(), false, due).await;
    assert!(
        matches!(refused, Err(AuthorityError::Taken(_))),
        "{refused:?}"
    );
    assert_eq!(object(&api, DEMO), theirs);
    assert_eq!(patches(&api), 1);

    // A restored backup of ours, as old as before: renewed too.
    let (api, authority, first, before) = input().await;
    let mut backup = before;
    backup["metadata"]["uid"] = json!("backup");
    api.be_quicker(Method::PATCH, DEMO, backup);
    let issued = authority.deployment(&deployment(), false, due).await;
    assert_ne!(issued.expect("issued").serial, first.serial);
    assert_eq!(object(&api, DEMO)["metadata"]["uid"], "backup");
    assert_eq!(patches(&api), 2);
}

#[tokio::test]
async fn the_secret_under_the_old_name_is_kept_while_it_is_mounted_and_then_removed() {
    let api = FakeApi::default();
    let before = authority(&api);
    before
        .deployment(&deployment(), true, start())
        .await
        .expect("issued");
    let old = object(&api, OLD);
    assert_eq!(old["metadata"]["ownerReferences"][0]["uid"], "u1");
    // Renewed like the new one.
    before
        .deployment(&deployment(), true, days(60))
        .await
        .expect("issued");
    assert_ne!(object(&api, OLD)["data"]["tls.crt"], old["data"]["tls.crt"]);
    before
        .deployment(&deployment(), false, days(60))
        .await
        .expect("issued");
    assert_eq!(api.object(OLD), None);
    assert!(api.object(DEMO).is_some());

    // An Ingress's Secret of that name is left alone.
    let theirs =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "demo-tls", "uid": "x"}});
    for is_mounted in [true, false] {
        api.put(OLD, theirs.clone());
        authority(&api)
            .deployment(&deployment(), is_mounted, days(60))
            .await
            .expect("issued");
        assert_eq!(object(&api, OLD), theirs);
    }
}

#[tokio::test]
async fn an_authority_that_is_kept_has_no_owner() {
    let api = FakeApi::default();
    authority(&api).keep(start()).await.expect("authority");
    let before = object(&api, CA);
    assert!(before["metadata"]["ownerReferences"].is_array());
    let keeping = |keeps_authority| {
        let settings = Settings {
            keeps_authority,
            ..settings()
        };
        let owner = authority(&api).owner;
        Authority::new(api.client(), Arc::new(settings), owner)
    };
    keeping(true).keep(start()).await.expect("authority");
    let kept = object(&api, CA);
    assert!(kept["metadata"]["ownerReferences"].is_null(), "{kept:#}");
    assert_eq!(kept["data"], before["data"]);
    assert!(object(&api, AGENT)["metadata"]["ownerReferences"].is_array());
    let writes = api.writes();
    keeping(true).keep(start()).await.expect("authority");
    assert_eq!(api.writes(), writes);
    // The next release in that namespace continues with it, and may decide otherwise.
    keeping(false).keep(start()).await.expect("authority");
    assert_eq!(
        object(&api, CA)["metadata"]["ownerReferences"][0]["uid"],
        "op"
    );
    assert_eq!(object(&api, CA)["data"], before["data"]);
}

#[tokio::test]
async fn the_agents_first_certificate_is_good_for_servers_alone() {
    let api = FakeApi::default();
    authority(&api).keep(start()).await.expect("authority");
    let facts = issue::Facts::read(&api.secret_text(AGENT, "tls.crt")).expect("facts");
    assert_eq!(
        (facts.usage, &*facts.names),
        (Usage::Server, &["agent.hearth".to_owned()][..])
    );
    let key = rcgen::KeyPair::generate().expect("key").public_key_pem();
    let own = authority(&api)
        .agent("a", &key, start())
        .await
        .expect("certificate");
    let facts = issue::Facts::read(&own.certificate).expect("facts");
    assert_eq!(
        (facts.usage, &*facts.names),
        (Usage::Server, &["a.node.agent.hearth".to_owned()][..])
    );
    assert_eq!(own.renew, days(60));
    let other = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("key");
    for wrong in ["", "-----BEGIN PUBLIC KEY-----", &other.public_key_pem()] {
        let refused = authority(&api).agent("a", wrong, start()).await;
        assert!(matches!(refused, Err(AuthorityError::PublicKey)));
    }
}

#[tokio::test]
async fn a_spoilt_authority_is_named_and_left_alone() {
    let api = FakeApi::default();
    authority(&api).keep(start()).await.expect("authority");
    let mut spoilt = object(&api, CA);
    spoilt["data"]["tls.key"] = json!("AAAA");
    api.put(CA, spoilt.clone());
    let error = authority(&api)
        .keep(start())
        .await
        .expect_err("spoilt")
        .to_string();
    assert!(
        error.contains("hearth-system/hearth-ca") && error.contains("delete it"),
        "{error}"
    );
    assert_eq!(object(&api, CA), spoilt);
}

#[tokio::test]
async fn the_secret_of_a_running_authority_comes_back_as_it_was() {
    let api = FakeApi::default();
    let authority = authority(&api);
    authority.keep(start()).await.expect("authority");
    let before = object(&api, CA)["data"].clone();
    api.remove(CA);
    authority.keep(days(1)).await.expect("authority");
    assert_eq!(object(&api, CA)["data"], before);
}

#[tokio::test]
async fn the_operator_s_own_certificate_is_renewed_in_place() {
    let api = FakeApi::default();
    let authority = authority(&api);
    authority.operator(start()).await.expect("TLS");
    let renew = |authority: &Authority| {
        authority
            .operator
            .lock()
            .expect("own")
            .as_ref()
            .map(|own| own.renew)
    };
    assert_eq!(renew(&authority), Some(days(60)));
    authority.operator(days(59)).await.expect("TLS");
    assert_eq!(renew(&authority), Some(days(60)));
    authority.operator(days(60)).await.expect("TLS");
    assert_eq!(renew(&authority), Some(days(120)));
    assert_eq!(
        api.writes(),
        [format!("POST {CA}")],
        "it is never written down"
    );
}

/// Years of one operator, checked at the times of due actions: writes are few, and a conflict is overcome.
#[tokio::test]
async fn an_authority_changes_under_a_running_operator() {
    let api = FakeApi::default();
    let authority = authority(&api);
    authority.keep(start()).await.expect("authority");
    let first = object(&api, CA)["data"]["tls.crt"].clone();
    let announce = days(3650 * 2 / 3 + 1);
    let mut theirs = object(&api, CA);
    theirs["metadata"]["resourceVersion"] = json!("other");
    api.be_quicker(Method::PUT, CA, theirs);
    authority.keep(announce).await.expect("authority");
    assert_eq!(object(&api, CA)["data"]["tls.crt"], first);
    let next = object(&api, CA)["data"]["next.crt"].clone();
    assert!(next.is_string());
    authority
        .keep(announce.checked_add(DAY).expect("time"))
        .await
        .expect("authority");
    let ca = object(&api, CA);
    assert_eq!(
        (&ca["data"]["tls.crt"], &ca["data"]["old.crt"]),
        (&next, &first)
    );
    authority
        .keep(announce.checked_add(DAY * 92).expect("time"))
        .await
        .expect("authority");
    let ca = object(&api, CA);
    assert_eq!(
        (&ca["data"]["ca.crt"], &ca["data"]["old.crt"]),
        (&next, &Value::Null)
    );
}
