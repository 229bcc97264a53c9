//! Pods as they run, where that is not quite what their plan would have made of them.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::Reconcile;
use crate::build::{DesiredPod, held_memory_bytes};
use crate::observed::PodView;

impl Reconcile<'_> {
    /// A Pod with the memory that it holds.
    pub(super) fn as_held<'p>(&self, pod: &'p PodView) -> Cow<'p, PodView> {
        let memory_bytes = held_memory_bytes(pod, &self.observed.plans);
        match memory_bytes == pod.memory_bytes {
            true => Cow::Borrowed(pod),
            false => Cow::Owned(PodView {
                memory_bytes,
                ..pod.clone()
            }),
        }
    }

    /// Pods with the names that they run under.
    pub(super) fn as_running(&self, built: Vec<DesiredPod>) -> Vec<DesiredPod> {
        let names: BTreeSet<&str> = self.workers().map(|pod| &*pod.name).collect();
        let built = built.into_iter();
        built
            .map(|pod| pod.renamed_as_running(|name| names.contains(name)))
            .collect()
    }
}
