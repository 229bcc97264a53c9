//! Single requests to the API server, each with a timeout and a response that is reduced as it is read.

use std::time::Duration;

use hearth_controller_core::names::FIELD_MANAGER;
use kube::api::{ApiResource, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Request;
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cluster::failure::Failure;

/// Time limit of one request, including reading its response.
const WHOLE: Duration = Duration::from_secs(40);

/// Sender of requests.
#[derive(Clone)]
pub(crate) struct ApiClient {
    client: Client,
}

/// The collection of objects of one kind in one namespace.
pub(crate) struct Collection {
    request: Request,
    /// Kind, as used in messages.
    what: String,
}

impl Collection {
    /// Collection of a kind that is known at compile time.
    pub(crate) fn of<K: Resource<DynamicType = ()>>(namespace: &str) -> Self {
        Self {
            request: Request::new(K::url_path(&(), Some(namespace))),
            what: K::kind(&()).into_owned(),
        }
    }

    /// Collection of any kind.
    pub(crate) fn of_resource(resource: &ApiResource, namespace: &str) -> Self {
        Self {
            request: Request::new(kube::api::DynamicObject::url_path(
                resource,
                Some(namespace),
            )),
            what: resource.kind.clone(),
        }
    }
}

impl ApiClient {
    /// Creates an API client that sends through `client`.
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// Returns the underlying client.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Reads one object.
    ///
    /// # Errors
    /// [`Failure::NotFound`] if it does not exist.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
    ) -> Result<T, Failure> {
        let request = place.request.get(name, &kube::api::GetParams::default());
        self.send(place, name, request).await
    }

    /// Creates an object.
    ///
    /// # Errors
    /// [`Failure::Conflict`] if one with that name exists.
    pub(crate) async fn create<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
        object: &impl Serialize,
    ) -> Result<T, Failure> {
        let parameters = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let body =
            serde_json::to_vec(object).map_err(|error| Failure::Invalid(error.to_string()))?;
        self.send(place, name, place.request.create(&parameters, body))
            .await
    }

    /// Applies an object server-side: sets these fields and leaves others alone.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn apply<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
        object: &Value,
    ) -> Result<T, Failure> {
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(object);
        self.send(place, name, place.request.patch(name, &parameters, &patch))
            .await
    }

    /// Applies a status.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn apply_status<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
        object: &Value,
    ) -> Result<T, Failure> {
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(object);
        let request = place
            .request
            .patch_subresource("status", name, &parameters, &patch);
        self.send(place, name, request).await
    }

    /// Merges fields into an object. A uid among them is a precondition.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn merge<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
        fields: &Value,
    ) -> Result<T, Failure> {
        let parameters = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(fields);
        self.send(place, name, place.request.patch(name, &parameters, &patch))
            .await
    }

    /// Deletes an object, with a grace period of `grace_s` seconds or its own default. `Ok` also if it is gone, or if
    /// another object has its name.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn delete(
        &self,
        place: &Collection,
        name: &str,
        uid: &str,
        grace_s: Option<u32>,
    ) -> Result<(), Failure> {
        let parameters = DeleteParams {
            grace_period_seconds: grace_s,
            preconditions: (!uid.is_empty()).then(|| Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteParams::background()
        };
        let request = place.request.delete(name, &parameters);
        match self.send::<Value>(place, name, request).await {
            Ok(_) | Err(Failure::NotFound(_)) => Ok(()),
            // The precondition failed: the intended object is gone.
            Err(Failure::Conflict(_)) if !uid.is_empty() => Ok(()),
            Err(other) => Err(other),
        }
    }

    async fn send<T: DeserializeOwned>(
        &self,
        place: &Collection,
        name: &str,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Failure> {
        let what = format!("{} {name}", place.what);
        let request = request.map_err(|error| Failure::Invalid(format!("{what}: {error}")))?;
        let answer = tokio::time::timeout(WHOLE, self.client.request::<T>(request)).await;
        match answer {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(in_words(&what, Failure::from(&error))),
            Err(_) => Err(Failure::Network(format!(
                "{what}: the API server did not answer in {} s",
                WHOLE.as_secs()
            ))),
        }
    }
}

/// Names the object in a failure's message, unless the API server already did.
fn in_words(what: &str, failure: Failure) -> Failure {
    let name = what.rsplit(' ').next().unwrap_or(what);
    let words = |why: String| {
        if why.contains(name) {
            why
        } else {
            format!("{what}: {why}")
        }
    };
    match failure {
        Failure::Conflict(why) => Failure::Conflict(words(why)),
        Failure::NotFound(why) => Failure::NotFound(words(why)),
        Failure::Server(why) => Failure::Server(words(why)),
        Failure::Network(why) => Failure::Network(words(why)),
        Failure::Forbidden(why) => Failure::Forbidden(words(why)),
        Failure::Invalid(why) => Failure::Invalid(words(why)),
        other @ (Failure::Terminating(_) | Failure::Throttled { .. }) => other,
    }
}
