//! Scalers of prefill workers.

use std::sync::Arc;

use hearth_controller_core::key::Key;
use hearth_controller_core::names::{deployment_of_scaler, scaler_name};
use hearth_controller_core::observed::ScalerView;

use crate::cluster::cache::{State, Touched};
use crate::cluster::table::{Identity, Put};

impl State {
    /// Stores a scaler.
    pub(crate) fn put_scaler(&mut self, mut identity: Identity, value: ScalerView) -> Touched {
        identity.share(&self.keys);
        let (key, owner) = (identity.key.clone(), Arc::clone(&identity.owner));
        let (generation, replicas) = (value.generation, value.replicas);
        match self.scalers.put(identity, value) {
            Put::Stale | Put::Same => Touched::default(),
            // The status is written by us. Changes to it by others are corrected at the next resync.
            Put::Changed(Some(before))
                if (before.generation, before.replicas) == (generation, replicas)
                    && before.status.is_some() =>
            {
                Touched::default()
            }
            Put::Changed(_) => self.touch_scaled(&key, &owner),
        }
    }

    /// Removes a scaler.
    pub(crate) fn remove_scaler(&mut self, key: &Key, uid: &str) -> Touched {
        match self.scalers.remove(key, uid) {
            None => Touched::default(),
            Some(row) => self.touch_scaled(key, &row.owner),
        }
    }

    /// The deployment that owns a scaler; if none does, the one whose scaler cannot have that name because of it.
    fn touch_scaled(&self, key: &Key, owner: &Arc<str>) -> Touched {
        let owners = self.touch_owner(owner);
        let Some(name) = deployment_of_scaler(&key.name).filter(|_| owners.keys.is_empty()) else {
            return owners;
        };
        let kept_out = Key::new(&key.namespace, name);
        match self.deployments.get(&kept_out) {
            Some(_) => Touched::one(kept_out),
            None => owners,
        }
    }

    /// Returns the scaler that a deployment owns.
    pub(crate) fn scaler_of(&self, owner: &str, deployment: &Key) -> Option<ScalerView> {
        let key = Key::new(&deployment.namespace, &scaler_name(&deployment.name));
        let row = self.scalers.get(&key).filter(|row| &*row.owner == owner)?;
        Some(ScalerView::clone(&row.value))
    }
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::deployment;

    use super::*;
    use crate::cluster::packed::Packed;

    fn identity(name: &str, uid: &str, owner: &str) -> Identity {
        Identity {
            key: Key::new("default", name),
            uid: uid.into(),
            owner: owner.into(),
            version: 1,
        }
    }

    fn scaler(name: &str, uid: &str) -> ScalerView {
        ScalerView {
            name: name.to_owned(),
            uid: uid.to_owned(),
            generation: Some(1),
            replicas: 2,
            status: None,
        }
    }

    /// Its deployment failed for a scaler that somebody else made, and must not wait for its next attempt.
    #[test]
    fn a_deployment_hears_when_another_s_scaler_makes_way() {
        let mut state = State::default();
        let read = Packed::new(&deployment("")).map_err(|_| unreachable!());
        state.put_deployment(identity("demo", "0b1c", ""), read);
        let demo = Touched::one(Key::new("default", "demo"));
        for (name, owner, told) in [
            ("demo-prefill", "0b1c", true),
            ("demo-prefill", "", true),
            ("demo-prefill", "of-another", true),
            ("other-prefill", "", false),
            ("demo", "", false),
        ] {
            let key = Key::new("default", name);
            let told = match told {
                true => &demo,
                false => &Touched::default(),
            };
            let uid = format!("scaler of {owner:?}");
            let put = state.put_scaler(identity(name, &uid, owner), scaler(name, &uid));
            assert_eq!(&put, told, "{name} of {owner:?}");
            assert_eq!(
                &state.remove_scaler(&key, &uid),
                told,
                "{name} of {owner:?}"
            );
        }
    }
}
