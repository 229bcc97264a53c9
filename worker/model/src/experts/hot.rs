//! Experts of which some are on the device too: a cache of those that are used most, in memory that is left there.
//!
//! A layer's choices are split three ways. The device computes experts that it has; a few of the others are copied to it
//! while the host computes the rest, as many as end the layer soonest by the rates of both. Each side returns weighted outputs
//! that are not added yet, and the device adds them in the order in which one device would have.

use std::sync::Arc;

use hearth_kernels::{Backend, ExpertProducts, Routing};

use super::Check;
use super::chosen::ChosenExperts;
use super::host::{Host, HostOutput};
use crate::ModelError;
use crate::residency::{ExpertCache, Kept};

/// Most rows of a pass for which the device's experts are used: with more, the host needs most experts anyway.
pub const CACHED_STEP_ROWS: usize = 32;

/// A layer's experts that the device computes.
pub(super) struct OnDevice {
    /// Those that it has.
    hits: ChosenExperts,
    /// Those on their way to it.
    loads: ChosenExperts,
    _kept: Vec<Kept>,
}

impl OnDevice {
    /// Takes the experts that the device has out of a choice, and those that pay to be copied there, which are begun;
    /// `None` if there are neither. `host_ms`: milliseconds that the host takes for an expert.
    pub(super) fn take<B: Backend>(
        cache: &dyn ExpertCache<B>,
        chosen: &mut ChosenExperts,
        host_ms: f64,
    ) -> Option<Self> {
        let here = cache.keep(chosen.ids());
        let hits = chosen.take(|index| here[index].is_some());
        let coming = cache.load(chosen.ids(), host_ms);
        let loads = chosen.take(|index| coming[index].is_some());
        let kept: Vec<Kept> = here.into_iter().chain(coming).flatten().collect();
        (!kept.is_empty()).then_some(Self {
            hits,
            loads,
            _kept: kept,
        })
    }
}

/// A layer's experts on both sides.
pub(super) struct Split<B: Backend> {
    device: Arc<B>,
    cache: Arc<dyn ExpertCache<B>>,
    routing: Routing,
    on_device: OnDevice,
    /// Weighted outputs `[choices, hidden]` of the experts that the device had.
    hits: Option<B::Tensor>,
    on_host: ChosenExperts,
    host_output: Option<HostOutput>,
}

impl<B: Backend> Split<B> {
    /// Lets the host compute the experts `on_host` for `rows`, the values of `x` `[rows, hidden]`, and runs those that the
    /// device has.
    pub(super) fn begin(
        (device, cache): (&Arc<B>, &Arc<dyn ExpertCache<B>>),
        routing: Routing,
        on_device: OnDevice,
        (host, on_host): (&Host, ChosenExperts),
        (x, rows): (&B::Tensor, Vec<f32>),
    ) -> Result<Self, ModelError> {
        let mut split = Self {
            device: Arc::clone(device),
            cache: Arc::clone(cache),
            routing,
            on_device,
            hits: None,
            on_host,
            host_output: None,
        };
        if !split.on_host.is_empty() {
            let (products, inputs) = split.on_host.products();
            let hidden = device.shape(x).1;
            split.host_output = Some(host.begin(products, Some(inputs), rows, hidden)?);
        }
        if !split.on_device.hits.is_empty() {
            split.hits = Some(split.products(&split.on_device.hits, x, &mut || Ok(()))?);
        }
        Ok(split)
    }

    /// Weighted outputs `[choices, hidden]` of experts on the device.
    fn products(
        &self,
        chosen: &ChosenExperts,
        x: &B::Tensor,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let (products, inputs) = chosen.products();
        let x = self.device.rows(x, &inputs)?;
        products.run(&*self.device, &*self.cache, &x, check)
    }

    /// Waits for the host, and adds the outputs of both sides `[rows, hidden]`.
    pub(super) fn finish(self, x: &B::Tensor, check: Check<'_>) -> Result<B::Tensor, ModelError> {
        let (device, hidden) = (&*self.device, self.device.shape(x).1);
        // What was queued since runs meanwhile, and so do copies: this thread computes before it waits for them.
        device.submit()?;
        let here = self.host_output.as_ref().filter(|output| output.is_here());
        let computed = here.map(|output| output.wait(check)).transpose()?;
        let loads = &self.on_device.loads;
        let loaded = match loads.is_empty() {
            true => None,
            false => Some(self.products(loads, x, check)?),
        };
        let values = match (computed, &self.host_output) {
            (None, Some(output)) => {
                device.submit()?;
                Some(output.wait(check)?)
            }
            (computed, _) => computed,
        };
        let rows = self.on_host.choices();
        let from_host = values.map(|values| device.upload(rows, hidden, &values));
        let from_host = from_host.transpose()?;
        let choices = self.routing.experts.len();
        let mut products = device.zeros(choices, hidden)?;
        let (mut rows, mut first) = (vec![0; choices], 0);
        let parts = [
            (&self.on_device.hits, &self.hits),
            (loads, &loaded),
            (&self.on_host, &from_host),
        ];
        for (chosen, part) in parts {
            if let Some(part) = part {
                device.put_tile(&mut products, (first, 0), part)?;
                chosen.place_products(first, &mut rows);
                first += chosen.choices();
            }
        }
        let of = ExpertProducts {
            experts: self.on_host.experts(),
            routing: &self.routing,
            rows: &rows,
        };
        Ok(device.product_sum(&products, of)?)
    }
}
