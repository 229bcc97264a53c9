//! Progress of the running forward pass, as seen from outside: a pass that is slow on a slow machine still advances
//! from layer to layer, and one that hangs does not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time at which the running pass last advanced; `None` while none is running. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<Mutex<Option<Instant>>>);

/// A running pass; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Pass(Progress);

impl Progress {
    /// Begins a pass.
    pub(crate) fn begin(&self) -> Pass {
        *self.lock() = Some(Instant::now());
        Pass(self.clone())
    }

    /// Time that the running pass has spent at its current layer.
    pub(crate) fn at_layer_for(&self) -> Option<Duration> {
        self.lock().map(|since| since.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass {
    /// Records that a layer is done.
    pub(crate) fn goes_on(&self) {
        *self.0.lock() = Some(Instant::now());
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_seen_while_it_runs_and_its_layers_count() {
        let progress = Progress::default();
        assert_eq!(progress.at_layer_for(), None);
        let pass = progress.begin();
        let slept = Duration::from_millis(500);
        std::thread::sleep(slept);
        assert!(progress.at_layer_for() >= Some(slept));
        pass.goes_on();
        assert!(progress.at_layer_for() < Some(slept));
        drop(pass);
        assert_eq!(progress.at_layer_for(), None);
    }
}
