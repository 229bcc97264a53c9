//! Scalers of prefill workers.

use std::sync::Arc;

use hearth_controller_core::key::Key;
use hearth_controller_core::names::scaler_name;
use hearth_controller_core::observed::ScalerView;

use crate::cluster::cache::{State, Touched};
use crate::cluster::table::{Identity, Put};

impl State {
    /// Stores a scaler.
    pub(crate) fn put_scaler(&mut self, mut identity: Identity, value: ScalerView) -> Touched {
        identity.share(&self.keys);
        let owner = Arc::clone(&identity.owner);
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
            Put::Changed(_) => self.touch_owner(&owner),
        }
    }

    /// Removes a scaler.
    pub(crate) fn remove_scaler(&mut self, key: &Key, uid: &str) -> Touched {
        match self.scalers.remove(key, uid) {
            None => Touched::default(),
            Some(row) => self.touch_owner(&row.owner),
        }
    }

    /// Returns the scaler that a deployment owns.
    pub(crate) fn scaler_of(&self, owner: &str, deployment: &Key) -> Option<ScalerView> {
        let key = Key::new(&deployment.namespace, &scaler_name(&deployment.name));
        let row = self.scalers.get(&key).filter(|row| &*row.owner == owner)?;
        Some(ScalerView::clone(&row.value))
    }
}
