//! Writes the status when it differs from the current one, and events on transitions.

use std::sync::{Mutex, PoisonError};

use hearth_controller_core::decision::Transition;
use hearth_controller_core::status::undecided::{self, NEWER_PLAN, shortened};
use hearth_crds::{API_VERSION, InferenceDeployment, InferenceDeploymentStatus};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use serde_json::json;

use crate::cluster::api::{ApiClient, Collection};
use crate::cluster::cache::CacheNotifier;
use crate::cluster::digest;
use crate::cluster::failure::Failure;
use crate::cluster::lean::LeanDeployment;
use crate::cluster::table::Identity;

const KIND: &str = "InferenceDeployment";
/// Maximum length of an event's note in bytes.
const EVENT_NOTE_BYTES: usize = 1000;

/// Number of events after which the recorder is replaced: it counts repetitions, and never frees its memory.
const REMEMBERED_EVENTS: usize = 256;

/// Writer of status and events.
pub(crate) struct Reporting {
    requests: ApiClient,
    notifier: CacheNotifier,
    reporter: Reporter,
    /// The recorder, with the number of events that it has written.
    recorder: Mutex<(Recorder, usize)>,
}

impl Reporting {
    /// Creates a reporter that writes through `requests`; `identity` is this replica's name in events.
    pub(crate) fn new(requests: ApiClient, notifier: CacheNotifier, identity: &str) -> Self {
        let reporter = Reporter {
            controller: "hearth-operator".to_owned(),
            instance: Some(identity.to_owned()),
        };
        let recorder = Recorder::new(requests.client().clone(), reporter.clone());
        Self {
            requests,
            notifier,
            reporter,
            recorder: Mutex::new((recorder, 0)),
        }
    }

    /// Returns the recorder for one more event.
    fn recorder(&self) -> Recorder {
        let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        recorder.1 += 1;
        if recorder.1 > REMEMBERED_EVENTS {
            let fresh = Recorder::new(self.requests.client().clone(), self.reporter.clone());
            *recorder = (fresh, 1);
        }
        recorder.0.clone()
    }

    /// Writes the status unless `current` already equals it. Returns whether it was written.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn status(
        &self,
        metadata: &ObjectMeta,
        current: Option<&InferenceDeploymentStatus>,
        wanted: &InferenceDeploymentStatus,
    ) -> Result<bool, Failure> {
        if current == Some(wanted) {
            return Ok(false);
        }
        let name = metadata.name.as_deref().unwrap_or_default();
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": KIND,
            // The uid is a precondition: a deployment that was recreated has its own status.
            "metadata": {"name": name, "namespace": namespace, "uid": metadata.uid},
            "status": wanted,
        });
        let place = Collection::of::<InferenceDeployment>(namespace);
        let written: LeanDeployment = self.requests.apply_status(&place, name, &body).await?;
        let identity = Identity::of(&written.metadata);
        self.notifier
            .change(|state| state.put_deployment(identity, written.into_read()));
        Ok(true)
    }

    /// Reports that a deployment's spec cannot be read, and returns that status. Its current status is read from the API
    /// server, as it is not cached.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn refuse(
        &self,
        metadata: &ObjectMeta,
        reason: &str,
        now: Timestamp,
    ) -> Result<InferenceDeploymentStatus, Failure> {
        let name = metadata.name.as_deref().unwrap_or_default();
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let place = Collection::of::<InferenceDeployment>(namespace);
        let there: serde_json::Value = self.requests.get(&place, name).await?;
        let current = there.get("status").cloned();
        let current: Option<InferenceDeploymentStatus> =
            current.and_then(|status| serde_json::from_value(status).ok());
        let wanted = undecided::unreadable(current.as_ref(), metadata.generation, reason, now);
        self.status(metadata, current.as_ref(), &wanted).await?;
        Ok(wanted)
    }

    /// Reports that a deployment is left as it is because of a plan that cannot be read, and returns that status.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn leave(
        &self,
        deployment: &InferenceDeployment,
        plan: &str,
        why: &str,
        now: Timestamp,
    ) -> Result<InferenceDeploymentStatus, Failure> {
        let current = deployment.status.as_ref();
        let namespace = deployment.namespace().unwrap_or_default();
        let message = format!(
            "InferencePlan {plan} is of a newer operator: {why}. Pods and objects stay as they are; let that version of the \
             operator run again, or have this one plan anew: kubectl -n {namespace} delete inferenceplan {plan}"
        );
        let generation = deployment.metadata.generation;
        let wanted = undecided::left_to_newer(current, generation, &message, now);
        let metadata = &deployment.metadata;
        if self.status(metadata, current, &wanted).await? {
            let transition = Transition {
                reason: NEWER_PLAN.to_owned(),
                message,
                is_warning: true,
            };
            self.events(deployment, &[transition]).await;
        }
        Ok(wanted)
    }

    /// Publishes transitions as events. A failure is only logged: events are a convenience, and the conditions stay.
    pub(crate) async fn events(&self, deployment: &InferenceDeployment, events: &[Transition]) {
        for transition in events {
            let name = deployment.name_any();
            let namespace = deployment.namespace().unwrap_or_default();
            tracing::info!(
                namespace,
                name,
                reason = transition.reason,
                "{}",
                transition.message
            );
            let reference = ObjectReference {
                api_version: Some(API_VERSION.to_owned()),
                kind: Some(KIND.to_owned()),
                name: Some(name),
                namespace: Some(namespace),
                uid: deployment.uid(),
                ..ObjectReference::default()
            };
            if let Err(error) = self
                .recorder()
                .publish(&event(transition), &reference)
                .await
            {
                tracing::warn!(
                    reason = transition.reason,
                    "an event could not be written: {}",
                    Failure::from(&error)
                );
            }
        }
    }
}

fn event(transition: &Transition) -> Event {
    let message = digest::of_value(&transition.message.as_str().into());
    // Events with the same action are counted as one, so a different message gets a different action.
    let action: String = message[..4].iter().map(|b| format!("{b:02x}")).collect();
    Event {
        type_: if transition.is_warning {
            EventType::Warning
        } else {
            EventType::Normal
        },
        reason: transition.reason.clone(),
        note: Some(shortened(&transition.message, EVENT_NOTE_BYTES)),
        action: format!("Reconcile-{action}"),
        secondary: None,
    }
}
