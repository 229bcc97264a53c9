//! SIGTERM and Ctrl-C.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listener for SIGTERM and Ctrl-C, which end the process by themselves only until it exists.
pub(crate) struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

/// From now on SIGTERM and Ctrl-C do not end this process: `heard` is called for each, on a thread of its own.
///
/// # Errors
/// The system refuses a handler or a thread.
pub(crate) fn hand_over(heard: impl Fn() + Send + 'static) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let mut signals = runtime.block_on(async { ShutdownSignals::new() })?;
    std::thread::Builder::new().spawn(move || {
        runtime.block_on(async {
            loop {
                signals.wait().await;
                heard();
            }
        });
    })?;
    Ok(())
}

impl ShutdownSignals {
    /// Begins to listen. Call it within a runtime.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?,
            interrupt: signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?,
        })
    }

    /// Completes at the next signal, or at once if one came since the last.
    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
