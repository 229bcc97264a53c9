//! How far the running forward pass is, as others see it: a pass that is long on a slow machine goes on from layer to
//! layer, and one that stands still does not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// When the running pass last went on; `None` while none runs. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<Mutex<Option<Instant>>>);

/// A pass that runs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pass(Progress);

impl Progress {
    /// A pass begins.
    pub(crate) fn begin(&self) -> Pass {
        *self.lock() = Some(Instant::now());
        Pass(self.clone())
    }

    /// How long the running pass has been at its layer.
    pub(crate) fn at_layer_for(&self) -> Option<Duration> {
        self.lock().map(|since| since.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass {
    /// A layer is done.
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
        std::thread::sleep(Duration::from_millis(30));
        assert!(progress.at_layer_for() >= Some(Duration::from_millis(30)));
        pass.goes_on();
        assert!(progress.at_layer_for() < Some(Duration::from_millis(30)));
        drop(pass);
        assert_eq!(progress.at_layer_for(), None);
    }
}
