//! Marks: events that are used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::KernelError;

use super::{Device, Event, Stream};

/// Events that no mark uses.
pub(crate) struct Marks {
    device: Arc<Device>,
    unused: Mutex<Vec<Event>>,
}

/// A point in the order of a stream; clones are the same point.
#[derive(Clone)]
pub(crate) struct Mark(Arc<Recorded>);

struct Recorded {
    /// Taken by the drop alone.
    event: Option<Event>,
    home: Arc<Marks>,
}

impl Marks {
    pub(crate) fn new(device: &Arc<Device>) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::clone(device),
            unused: Mutex::default(),
        })
    }

    /// Marks the end of the work queued in `stream` so far.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) -> Result<Mark, KernelError> {
        self.device.bind()?;
        let unused = self.unused().pop();
        let event = match unused {
            Some(event) => event,
            None => Event::timed(&self.device)?,
        };
        event.record(stream)?;
        Ok(Mark(Arc::new(Recorded {
            event: Some(event),
            home: Arc::clone(self),
        })))
    }

    fn unused(&self) -> MutexGuard<'_, Vec<Event>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mark {
    /// Makes work queued in `stream` from now on wait for this point.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn hold_back(&self, stream: &Stream) -> Result<(), KernelError> {
        match &self.0.event {
            Some(event) => stream.wait_for(event),
            None => Ok(()),
        }
    }

    /// Whether this point is reached.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn is_reached(&self) -> Result<bool, KernelError> {
        self.0.home.device.bind()?;
        match &self.0.event {
            Some(event) => event.is_reached(),
            None => Ok(true),
        }
    }

    /// Waits until this point is reached.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn wait(&self) -> Result<(), KernelError> {
        self.0.home.device.bind()?;
        match &self.0.event {
            Some(event) => event.wait(),
            None => Ok(()),
        }
    }

    /// Time from this point to a later one, ns; `None` if that is not reached yet, or the driver does not say.
    pub(crate) fn elapsed_ns(&self, to: &Self) -> Option<u64> {
        self.0.home.device.bind().ok()?;
        let (from, to) = (self.0.event.as_ref()?, to.0.event.as_ref()?);
        from.elapsed_ns(to)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // A stream that waits for the event waits for the point at which it was recorded then, whatever it marks later.
        if let Some(event) = self.event.take() {
            self.home.unused().push(event);
        }
    }
}
