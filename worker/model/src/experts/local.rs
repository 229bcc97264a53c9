//! Experts on the device that runs the rest of the model: from a bank, if all of a layer stay there; else as many of the
//! chosen ones at a time as the policy can hold.

use std::sync::Arc;

use hearth_kernels::Backend;

use super::chosen::ChosenExperts;
use super::{Experts, PendingExperts, RoutedLayer};
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
    ) -> Result<Box<dyn PendingExperts<B>>, ModelError> {
        let choices = self.backend.shape(x).0 * layer.top_k;
        if let Some(bank) = self.residency.expert_bank(layer.layer, choices) {
            let out = self.backend.banked_experts(x, &chosen, &bank)?;
            return Ok(Box::new(Banked::<B>(out)));
        }
        let chosen = ChosenExperts::new(layer, &self.backend.routing(chosen)?);
        self.residency.announce(chosen.ids());
        Ok(Box::new(Announced {
            backend: Arc::clone(&self.backend),
            residency: Arc::clone(&self.residency),
            chosen,
        }))
    }
}

/// Output of a bank.
struct Banked<B: Backend>(B::Tensor);

impl<B: Backend> PendingExperts<B> for Banked<B> {
    fn finish(
        self: Box<Self>,
        _x: &B::Tensor,
        _check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        Ok(self.0)
    }
}

/// Experts that the policy is loading.
struct Announced<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
    chosen: ChosenExperts,
}

impl<B: Backend> PendingExperts<B> for Announced<B> {
    fn finish(
        self: Box<Self>,
        x: &B::Tensor,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        self.chosen.run(&*self.backend, &*self.residency, x, check)
    }
}
