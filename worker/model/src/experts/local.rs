//! Experts on the device that runs the rest of the model: from a bank, if all of a layer stay there; else as many of the
//! chosen ones at a time as the policy can hold.

use std::sync::Arc;

use hearth_kernels::Backend;

use super::chosen::ChosenExperts;
use super::{Experts, PendingExperts, RoutedLayer};
use crate::peers::GroupPass;
use crate::{ModelError, Residency};

/// Experts on the model's own device.
pub(crate) struct LocalExperts<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
}

impl<B: Backend> LocalExperts<B> {
    pub(crate) fn new(backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Self {
        Self { backend, residency }
    }
}

impl<B: Backend> Experts<B> for LocalExperts<B> {
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
        _group: Option<&Arc<GroupPass>>,
    ) -> Result<PendingExperts<B>, ModelError> {
        let choices = self.backend.shape(x).0 * layer.top_k;
        if let Some(bank) = self.residency.expert_bank(layer.layer, choices) {
            let out = self.backend.banked_experts(x, &chosen, &bank)?;
            return Ok(PendingExperts::new(|_, _| Ok(out)));
        }
        let chosen = ChosenExperts::new(layer, &self.backend.routing(chosen)?);
        // The policy loads them meanwhile.
        self.residency.announce(layer.layer, chosen.ids());
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |x, check| {
            chosen.run(&*backend, &*residency, x, check)
        }))
    }
}
