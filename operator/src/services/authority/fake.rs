//! A fake API server: it stores objects as JSON by path, with versions, and implements what a client of Secrets needs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_controller_core::observed::{NodeSettings, Settings};
use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// Settings of an operator in `hearth-system`.
pub(crate) fn settings() -> Settings {
    Settings {
        worker_image: "worker:1".to_owned(),
        pull_policy: "Never".to_owned(),
        pull_secrets: Vec::new(),
        operator_namespace: "hearth-system".to_owned(),
        namespaces: Vec::new(),
        gpu_runtime_class: None,
        claims: true,
        ledger: hearth_controller_core::testing::settings().ledger,
        model_cache: "/var/lib/hearth/models".to_owned(),
        host_paths: Vec::new(),
        cluster_ranges: Vec::new(),
        hub_endpoint: "http://hub.lan".to_owned(),
        network_policies: true,
        tracing: None,
        keeps_authority: false,
        certificate_lifetime: Duration::from_secs(90 * 24 * 3600),
        nodes: NodeSettings {
            move_after: Duration::from_secs(20),
            forget_after: Duration::from_secs(300),
            min_residence: Duration::from_secs(60),
            passing_taints: Vec::new(),
        },
    }
}

/// Fake API server whose clones share their objects.
#[derive(Clone, Default)]
pub(crate) struct FakeApi {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    writes: Vec<String>,
    version: u64,
    /// Results of token reviews, by token.
    tokens: BTreeMap<String, Value>,
    /// Changes made just before the next write of a method is handled: another replica was faster.
    before_write: Vec<(Method, String, Value)>,
}

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await?;
                let (status, value) = api.answer(&head.method, head.uri.path(), &body);
                let text = serde_json::to_vec(&value).expect("JSON");
                let response = Response::builder().status(status).body(Body::from(text));
                Ok::<_, kube::Error>(response.expect("response"))
            }
        });
        Client::new(service, "default")
    }

    /// Returns the object at a path.
    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.state.lock().expect("state").objects.get(path).cloned()
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        self.state
            .lock()
            .expect("state")
            .objects
            .insert(path.to_owned(), object);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.state.lock().expect("state").objects.remove(path);
    }

    /// Method and path of all writes so far.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.state.lock().expect("state").writes.clone()
    }

    /// Stores an object, or removes it (null), just before the next write with that method.
    pub(crate) fn be_quicker(&self, method: Method, path: &str, object: Value) {
        let mut state = self.state.lock().expect("state");
        state.before_write.push((method, path.to_owned(), object));
    }

    /// Registers a token with its review result; any other token is unknown.
    pub(crate) fn knows_token(&self, token: &str, status: Value) {
        let mut state = self.state.lock().expect("state");
        state.tokens.insert(token.to_owned(), status);
    }

    /// Returns one value of a Secret as text.
    pub(crate) fn secret_text(&self, path: &str, key: &str) -> String {
        let secret = self.object(path).expect("secret");
        let secret: k8s_openapi::api::core::v1::Secret =
            serde_json::from_value(secret).expect("Secret");
        String::from_utf8(secret.data.expect("data")[key].0.clone()).expect("text")
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        let mut state = self.state.lock().expect("state");
        if *method == Method::GET {
            return match state.objects.get(path) {
                Some(object) => (StatusCode::OK, object.clone()),
                None => refusal(StatusCode::NOT_FOUND, "NotFound"),
            };
        }
        while let Some(at) = state
            .before_write
            .iter()
            .position(|(on, _, _)| on == method)
        {
            let (_, path, object) = state.before_write.remove(at);
            match object {
                Value::Null => state.objects.remove(&path),
                object => state.objects.insert(path, object),
            };
        }
        if *method == Method::DELETE {
            state.writes.push(format!("{method} {path}"));
            return match state.objects.remove(path) {
                Some(object) => (StatusCode::OK, object),
                None => refusal(StatusCode::NOT_FOUND, "NotFound"),
            };
        }
        let mut object: Value = serde_json::from_slice(body).expect("JSON");
        if path == "/apis/authentication.k8s.io/v1/tokenreviews" {
            object["status"] = state.review(&object);
            return (StatusCode::CREATED, object);
        }
        let path = match object["metadata"]["name"].as_str() {
            Some(name) if *method == Method::POST => format!("{path}/{name}"),
            _ => path.to_owned(),
        };
        state.writes.push(format!("{method} {path}"));
        if let Some(path) = path.strip_suffix("/status") {
            return state.put_status(path, &object);
        }
        if let Some(reason) = state.conflict(method, &path, &object) {
            return reason;
        }
        (StatusCode::OK, state.put(path, object))
    }
}

impl State {
    /// Conflicts that the API server rejects: a name taken, an object gone, or one that was changed in the meantime.
    fn conflict(&self, method: &Method, path: &str, object: &Value) -> Option<(StatusCode, Value)> {
        let there = self.objects.get(path);
        let of = |key: &str| there.map(|there| &there["metadata"][key]);
        let differs = |key: &str| of(key) != Some(&object["metadata"][key]);
        match *method {
            Method::POST if there.is_some() => Some(refusal(StatusCode::CONFLICT, "AlreadyExists")),
            Method::PUT if there.is_none() => Some(refusal(StatusCode::NOT_FOUND, "NotFound")),
            Method::PUT if differs("resourceVersion") => {
                Some(refusal(StatusCode::CONFLICT, "Conflict"))
            }
            // An applied uid is a precondition, which another object, or none, does not meet.
            Method::PATCH if !object["metadata"]["uid"].is_null() && differs("uid") => {
                Some(refusal(StatusCode::CONFLICT, "Conflict"))
            }
            _ => None,
        }
    }

    /// Stores an object with the uid and the status of its predecessor.
    fn put(&mut self, path: String, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let there = self.objects.get(&path);
        if object["metadata"]["uid"].is_null() {
            let before = there.map(|there| there["metadata"]["uid"].clone());
            let made = json!(format!("made-{}", self.version));
            object["metadata"]["uid"] = before.filter(|uid| !uid.is_null()).unwrap_or(made);
        }
        if let Some(status) = there.and_then(|there| there.get("status")) {
            object["status"] = status.clone();
        }
        self.objects.insert(path, object.clone());
        object
    }

    /// Writes only the status, of an existing object.
    fn put_status(&mut self, path: &str, object: &Value) -> (StatusCode, Value) {
        self.version += 1;
        let version = self.version.to_string();
        let Some(there) = self.objects.get_mut(path) else {
            return refusal(StatusCode::NOT_FOUND, "NotFound");
        };
        there["status"] = object["status"].clone();
        there["metadata"]["resourceVersion"] = json!(version);
        (StatusCode::OK, there.clone())
    }

    fn review(&self, asked: &Value) -> Value {
        let token = asked["spec"]["token"].as_str().expect("token");
        let status = self.tokens.get(token).cloned();
        status.unwrap_or_else(|| json!({"error": "unknown token"}))
    }
}

fn refusal(status: StatusCode, reason: &str) -> (StatusCode, Value) {
    let value = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": reason, "message": reason, "code": status.as_u16(),
    });
    (status, value)
}
