//! The scaler of prefill workers: created with an initial number, given status updates, removed.

use hearth_controller_core::decision::ScalerStep;
use hearth_controller_core::key::Key;
use hearth_crds::{API_VERSION, InferencePoolScaler, InferencePoolScalerStatus};
use kube::ResourceExt;
use serde_json::json;

use super::{Applier, Subject, orphan};
use crate::cluster::api::Collection;
use crate::cluster::failure::Failure;
use crate::cluster::lean::{LeanScaler, owner};
use crate::cluster::table::Identity;

impl Applier {
    pub(super) async fn scaler(
        &self,
        subject: Subject<'_>,
        step: Option<&ScalerStep>,
    ) -> Result<(), Failure> {
        match step {
            None => Ok(()),
            Some(ScalerStep::Create(scaler)) => self.create_scaler(subject, scaler).await,
            Some(ScalerStep::Status { name, uid, status }) => {
                self.write_scaler_status(subject, (name, uid), status).await
            }
            Some(ScalerStep::Remove { name, uid }) => {
                let place = Collection::of::<InferencePoolScaler>(subject.namespace);
                self.requests.delete(&place, name, uid, None).await?;
                tracing::info!(
                    namespace = subject.namespace,
                    name,
                    "InferencePoolScaler removed"
                );
                let key = Key::new(subject.namespace, name);
                self.notifier.change(|state| state.remove_scaler(&key, uid));
                Ok(())
            }
        }
    }

    async fn create_scaler(
        &self,
        subject: Subject<'_>,
        scaler: &InferencePoolScaler,
    ) -> Result<(), Failure> {
        let place = Collection::of::<InferencePoolScaler>(subject.namespace);
        let name = scaler.name_any();
        let made = self.requests.create::<LeanScaler>(&place, &name, scaler);
        let there = match made.await {
            Ok(made) => {
                let replicas = scaler.spec.replicas;
                tracing::info!(
                    namespace = subject.namespace,
                    name,
                    replicas,
                    "InferencePoolScaler made"
                );
                made
            }
            // A stale cache, or another owner's scaler.
            Err(Failure::Conflict(_)) => {
                let there: LeanScaler = self.requests.get(&place, &name).await?;
                let is_ending = there.metadata.deletion_timestamp.is_some();
                let owner = owner(&there.metadata);
                if owner.is_empty() && !is_ending {
                    return Err(orphan("InferencePoolScaler", &name));
                }
                if is_ending || owner != subject.uid {
                    return Err(Failure::Terminating(format!("InferencePoolScaler {name}")));
                }
                there
            }
            Err(other) => return Err(other),
        };
        self.take_scaler(there);
        Ok(())
    }

    async fn write_scaler_status(
        &self,
        subject: Subject<'_>,
        (name, uid): (&str, &str),
        status: &InferencePoolScalerStatus,
    ) -> Result<(), Failure> {
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "InferencePoolScaler",
            "metadata": {"name": name, "namespace": subject.namespace, "uid": uid},
            "status": status,
        });
        let place = Collection::of::<InferencePoolScaler>(subject.namespace);
        let told = self
            .requests
            .apply_status::<LeanScaler>(&place, name, &body)
            .await;
        let key = Key::new(subject.namespace, name);
        self.drop_if_gone(&told, |state| state.remove_scaler(&key, ""));
        match told {
            Ok(told) => self.take_scaler(told),
            // It is created again at the next reconcile.
            Err(Failure::NotFound(_)) => {}
            Err(other) => return Err(other),
        }
        Ok(())
    }

    fn take_scaler(&self, scaler: LeanScaler) {
        let identity = Identity::of(&scaler.metadata);
        if let Ok(scaler) = scaler.scaler {
            self.notifier
                .change(|state| state.put_scaler(identity, scaler));
        }
    }
}
