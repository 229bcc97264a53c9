//! The applier against an in-memory API server: requests that it makes, and those that it avoids.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use hearth_controller_core::decision::Grace;
use hearth_controller_core::observed::forbidden::{Counted, Quota};
use hearth_controller_core::testing::samples;
use hearth_crds::{InferencePlanStatus, PlanInputs};
use http::{Method, Request, Response};
use jiff::Timestamp;
use kube::Client;
use kube::api::DynamicObject;
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::cluster::cache::Cache;

const OWNER: &str = "uid-of-demo";
const SUBJECT: Subject<'static> = Subject {
    namespace: "default",
    uid: OWNER,
};

/// Server with objects by path, and a record of requests.
#[derive(Default)]
struct Server {
    objects: Mutex<BTreeMap<String, Value>>,
    asked: Mutex<Vec<String>>,
    /// Message with which Pods are forbidden.
    forbids: Mutex<Option<&'static str>>,
    /// Whether its definition of plans is an earlier version, without inputs and without a status.
    has_old_plans: bool,
}

impl Server {
    fn client(self: &Arc<Self>) -> Client {
        let server = Arc::clone(self);
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = Arc::clone(&server);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let (code, object) = server.answer(&parts.method, parts.uri.path(), &body);
                let body = Body::from(object.to_string().into_bytes());
                let response = Response::builder().status(code).body(body);
                Ok::<_, std::convert::Infallible>(response.unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (u16, Value) {
        let asked = format!("{method} {}", path.rsplit('/').next().unwrap_or_default());
        self.asked.lock().unwrap().push(asked);
        let mut objects = self.objects.lock().unwrap();
        let count = objects.len() + self.asked.lock().unwrap().len();
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        match *method {
            Method::GET => match objects.get(path) {
                Some(object) => (200, object.clone()),
                None => (404, refusal(404, "NotFound")),
            },
            Method::POST => {
                let name = body["metadata"]["name"].as_str().unwrap_or_default();
                if let Some(words) = self
                    .forbids
                    .lock()
                    .unwrap()
                    .filter(|_| path.ends_with("/pods"))
                {
                    let mut forbidden = refusal(403, "Forbidden");
                    forbidden["message"] = json!(words);
                    return (403, forbidden);
                }
                let path = format!("{path}/{name}");
                if objects.contains_key(&path) {
                    return (409, refusal(409, "AlreadyExists"));
                }
                let mut object = stored(body.clone(), count);
                if self.has_old_plans && object["kind"] == "InferencePlan" {
                    object["spec"].as_object_mut().unwrap().remove("inputs");
                }
                objects.insert(path, object.clone());
                (201, object)
            }
            Method::PATCH if self.has_old_plans && path.ends_with("/status") => {
                (404, refusal(404, "NotFound"))
            }
            Method::PATCH => {
                let object = stored(body, count);
                objects.insert(path.to_owned(), object.clone());
                (200, object)
            }
            _ => match objects.remove(path) {
                Some(object) => (200, object),
                None => (404, refusal(404, "NotFound")),
            },
        }
    }

    fn take_asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut objects = self.objects.lock().unwrap();
        let object = objects.get_mut(path).unwrap();
        change(object);
        object.clone()
    }
}

/// Adds the fields that the API server sets.
fn stored(mut object: Value, version: usize) -> Value {
    object["metadata"]["uid"] = json!(format!("uid-of-{}", object["metadata"]["name"]));
    object["metadata"]["resourceVersion"] = json!(version.to_string());
    object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    if object["kind"] == "Service" {
        object["spec"]["clusterIP"] = json!("10.0.0.1");
    }
    object
}

fn refusal(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
           "message": format!("the server says {reason}")})
}

fn metadata(name: &str, owner: &str) -> Value {
    json!({"name": name, "namespace": "default", "labels": {"hearth.dev/deployment": "demo"},
           "ownerReferences": [{"apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
                                "name": "demo", "uid": owner, "controller": true}]})
}

fn service() -> DynamicObject {
    let value = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata("demo", OWNER),
                       "spec": {"ports": [{"port": 80}]}});
    serde_json::from_value(value).unwrap()
}

fn pod() -> Pod {
    let value = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata("demo-gateway-0-abc", OWNER)});
    serde_json::from_value(value).unwrap()
}

fn applier(server: &Arc<Server>, cache: &Arc<Cache>) -> Applier {
    let notifier = CacheNotifier {
        cache: Arc::clone(cache),
        queue: Arc::default(),
    };
    Applier::new(ApiClient::new(server.client()), notifier)
}

fn wants(object: DynamicObject) -> Decision {
    Decision {
        objects: vec![object],
        ..Decision::default()
    }
}

const SERVICE_PATH: &str = "/api/v1/namespaces/default/services/demo";

#[tokio::test]
async fn what_is_in_order_is_neither_written_nor_read() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let first = applier(&server, &cache);
    first.apply(SUBJECT, &wants(service())).await.unwrap();
    assert_eq!(server.take_asked(), ["GET demo", "PATCH demo"]);
    first.apply(SUBJECT, &wants(service())).await.unwrap();
    assert_eq!(server.take_asked(), [""; 0]);

    // After a restart, a single read suffices.
    let second = applier(&server, &cache);
    second.apply(SUBJECT, &wants(service())).await.unwrap();
    second.apply(SUBJECT, &wants(service())).await.unwrap();
    assert_eq!(server.take_asked(), ["GET demo"]);
}

#[tokio::test]
async fn drift_is_put_right_and_additions_of_others_stay() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    applier.apply(SUBJECT, &wants(service())).await.unwrap();
    server.take_asked();
    let seen = |live: &Value| {
        let metadata: ObjectMeta = serde_json::from_value(live["metadata"].clone()).unwrap();
        let mut state = cache.lock();
        state.put_object("Service", Identity::of(&metadata), Facts::of(live));
    };

    seen(&server.change(SERVICE_PATH, |live| {
        live["metadata"]["annotations"] = json!({"cloud": "balancer"});
        live["metadata"]["resourceVersion"] = json!("100");
    }));
    applier.apply(SUBJECT, &wants(service())).await.unwrap();
    applier.apply(SUBJECT, &wants(service())).await.unwrap();
    assert_eq!(server.take_asked(), ["GET demo"]);

    seen(&server.change(SERVICE_PATH, |live| {
        live["spec"]["ports"][0]["port"] = json!(81);
        live["metadata"]["resourceVersion"] = json!("101");
    }));
    applier.apply(SUBJECT, &wants(service())).await.unwrap();
    assert_eq!(server.take_asked(), ["GET demo", "PATCH demo"]);
}

#[tokio::test]
async fn what_is_not_ours_is_left_alone() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    applier.apply(SUBJECT, &wants(service())).await.unwrap();
    let other = Subject {
        uid: "uid-of-the-next-demo",
        ..SUBJECT
    };
    server.take_asked();
    // The cluster is about to collect what a deployment of the same name left behind.
    let failure = applier.apply(other, &wants(service())).await.unwrap_err();
    assert_eq!(failure.label(), "Terminating");
    server.change(SERVICE_PATH, |live| {
        live["metadata"]["ownerReferences"] = json!([]);
    });
    let failure = applier.apply(other, &wants(service())).await.unwrap_err();
    assert!(failure.needs_a_person());
    let words = failure.to_string();
    assert!(
        words.contains("Service demo") && words.contains("rename"),
        "{words}"
    );
    assert_eq!(server.take_asked(), ["GET demo", "GET demo"]);
}

#[tokio::test]
async fn a_pod_that_is_there_is_as_good_as_made_unless_it_ends() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    let decision = Decision {
        create_pods: vec![pod()],
        ..Decision::default()
    };
    applier.apply(SUBJECT, &decision).await.unwrap();
    assert_eq!(cache.lock().pods.of(OWNER).count(), 1);
    // A stale cache creates it again.
    applier.apply(SUBJECT, &decision).await.unwrap();
    assert_eq!(
        server.take_asked(),
        ["POST pods", "POST pods", "GET demo-gateway-0-abc"]
    );
    let path = "/api/v1/namespaces/default/pods/demo-gateway-0-abc";
    server.change(path, |live| {
        live["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    let failure = applier.apply(SUBJECT, &decision).await.unwrap_err();
    assert_eq!(failure.label(), "Terminating");
}

#[tokio::test]
async fn an_end_is_asked_for_and_known_at_once() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    let make = Decision {
        create_pods: vec![pod()],
        ..Decision::default()
    };
    applier.apply(SUBJECT, &make).await.unwrap();
    let uid = {
        let state = cache.lock();
        state.pods.of(OWNER).next().unwrap().1.uid.to_string()
    };
    let end = Decision {
        delete_pods: vec![PodEnd {
            name: "demo-gateway-0-abc".to_owned(),
            uid,
            grace: Grace::None,
        }],
        ..Decision::default()
    };
    applier.apply(SUBJECT, &end).await.unwrap();
    assert_eq!(cache.lock().pods.of(OWNER).count(), 0);
    // It is already gone, which is the desired result.
    applier.apply(SUBJECT, &end).await.unwrap();
}

#[tokio::test]
async fn a_failed_write_stops_the_rest() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    let decision = Decision {
        mark_pods: vec![Marks {
            name: "demo-gateway-0-abc".to_owned(),
            annotations: vec![("a".to_owned(), "b".to_owned())],
        }],
        remove_objects: vec![("Ingress".to_owned(), "demo".to_owned())],
        ..Decision::default()
    };
    let failure = applier.apply(SUBJECT, &decision).await.unwrap_err();
    assert!(failure.to_string().contains("Ingress"), "{failure}");
    assert_eq!(server.take_asked(), [""; 0]);
}

/// Definitions that drop a plan's inputs must not lead to endless new plans, and a plan that serves must not be
/// forgotten because its status cannot be stored.
#[tokio::test]
async fn older_definitions_are_told_and_no_plan_is_lost() {
    let server = Arc::new(Server {
        has_old_plans: true,
        ..Server::default()
    });
    let cache = Arc::new(Cache::default());
    let applier = applier(&server, &cache);
    let mut spec = samples::plan();
    let mut before = InferencePlan::new("demo-1", spec.clone());
    before.metadata = serde_json::from_value(metadata("demo-1", OWNER)).unwrap();
    let decision = Decision {
        create_plan: Some(before.clone()),
        ..Decision::default()
    };
    applier.apply(SUBJECT, &decision).await.unwrap();
    server.take_asked();

    spec.generation = 2;
    spec.inputs = Some(PlanInputs::default());
    let decision = Decision {
        create_plan: Some(InferencePlan::new("demo-2", spec)),
        ..Decision::default()
    };
    let failure = applier.apply(SUBJECT, &decision).await.unwrap_err();
    assert!(failure.to_string().contains("hearth crd"), "{failure}");
    assert_eq!(
        server.take_asked(),
        ["POST inferenceplans", "DELETE demo-2"]
    );

    let decision = Decision {
        plan_statuses: vec![PlanStatusChange {
            name: before.name_any(),
            status: InferencePlanStatus::default(),
        }],
        ..Decision::default()
    };
    let failure = applier.apply(SUBJECT, &decision).await.unwrap_err();
    assert!(failure.to_string().contains("hearth crd"), "{failure}");
    let key = Key::new("default", "demo-1");
    assert!(cache.lock().plans.get(&key).is_some());
}

/// A forbidden Pod must not prevent the deletion of what stands in its way.
#[tokio::test]
async fn a_forbidden_pod_stops_no_end_and_its_plan_holds_its_place_for_a_while_only() {
    let (server, cache) = (Arc::new(Server::default()), Arc::new(Cache::default()));
    let applier = applier(&server, &cache);
    let make = |name: &str| {
        let mut pod = pod();
        pod.metadata.name = Some(name.to_owned());
        pod.annotations_mut()
            .insert(ANNOTATION_PLAN_GENERATION.to_owned(), "2".to_owned());
        pod.labels_mut()
            .insert(LABEL_ROLE.to_owned(), "gateway".to_owned());
        pod
    };
    let old = Decision {
        create_pods: vec![make("old")],
        ..Decision::default()
    };
    applier.apply(SUBJECT, &old).await.unwrap();
    let words = "pods \"new\" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1";
    *server.forbids.lock().unwrap() = Some(words);
    let decision = Decision {
        create_pods: vec![make("new")],
        delete_pods: vec![PodEnd {
            name: "old".to_owned(),
            uid: "uid-of-\"old\"".to_owned(),
            grace: Grace::Whole,
        }],
        ..Decision::default()
    };
    server.take_asked();
    let quota = |cache: &Cache| {
        let state = cache.lock();
        state
            .forbidden
            .get(OWNER)
            .map(|it| it.quota(2, Counted::default().with(0, 0, 0), Timestamp::now()))
    };
    let failure = applier.apply(SUBJECT, &decision).await.unwrap_err();
    assert_eq!(failure, Failure::Forbidden(words.to_owned()));
    assert_eq!(server.take_asked(), ["POST pods", "DELETE old", "GET old"]);
    // The old one is gone, so another attempt is worthwhile.
    assert_eq!(quota(&cache), Some(Quota::Tight));
    let again = Decision {
        create_pods: vec![make("new")],
        ..Decision::default()
    };
    applier.apply(SUBJECT, &again).await.unwrap_err();
    assert_eq!(quota(&cache), Some(Quota::Full));
    *server.forbids.lock().unwrap() = None;
    applier.apply(SUBJECT, &again).await.unwrap();
    assert_eq!(quota(&cache), Some(Quota::Tight));
}
