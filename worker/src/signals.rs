//! Signal handling of the process.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a task waits for SIGTERM and shuts the process down in order.
static IS_AWAITED: AtomicBool = AtomicBool::new(false);

/// Makes SIGTERM end the process until [`termination`] waits for it. The first process of a container is not ended by
/// a signal that it has no handler for (`pid_namespaces(7)`): if told to stop while it loads, it would continue until
/// the kubelet kills it at the end of its grace period, minutes later.
pub(crate) fn end_when_told() {
    /// Exit code that a shell reports for a process ended by SIGTERM.
    const CODE: libc::c_int = 128 + libc::SIGTERM;
    extern "C" fn handler(_signal: libc::c_int) {
        // The task that waits has installed another handler, which calls this one.
        if !IS_AWAITED.load(Ordering::Relaxed) {
            // SAFETY: _exit is async-signal-safe.
            unsafe { libc::_exit(CODE) };
        }
    }
    if std::process::id() != 1 {
        return;
    }
    // SAFETY: the handler calls only async-signal-safe functions, and is installed before any thread starts.
    unsafe {
        libc::signal(
            libc::SIGTERM,
            handler as extern "C" fn(libc::c_int) as libc::sighandler_t,
        );
    }
}

/// Prints an explanation before the process dies of SIGBUS, from reading past the end of a truncated mapped file.
/// The supervisor restarts the worker, which then reports the file by name.
pub(crate) fn explain_bus_errors() {
    extern "C" fn handler(_signal: libc::c_int) {
        const MESSAGE: &[u8] = b"error: a weights file was truncated or its disk failed while it was mapped (SIGBUS)\n  \
            restore the model's files, then start the worker again.\n";
        // SAFETY: write and _exit are async-signal-safe, and MESSAGE is static.
        unsafe {
            libc::write(2, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(1);
        }
    }
    // SAFETY: the handler calls only async-signal-safe functions, and is installed before any thread starts.
    unsafe {
        libc::signal(
            libc::SIGBUS,
            handler as extern "C" fn(libc::c_int) as libc::sighandler_t,
        );
    }
}

/// Completes on SIGTERM or Ctrl-C.
pub(crate) async fn termination() {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = match signal(SignalKind::terminate()) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(%error, "SIGTERM cannot be handled; only Ctrl-C drains");
            let _ = tokio::signal::ctrl_c().await;
            return;
        }
    };
    IS_AWAITED.store(true, Ordering::Relaxed);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Has the kernel end this process when the thread that started it ends, one of the process `parent`.
///
/// # Errors
/// The kernel does not do so, or the parent had ended before it was asked to.
pub(crate) fn end_with_parent(parent: u32) -> anyhow::Result<()> {
    use anyhow::{Context, ensure};
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::TERM))
        .context("the kernel cannot signal the parent's end")?;
    let now = getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    ensure!(
        now == Some(parent),
        "process {parent} is not the parent of this one: it has ended, or another one stands between them; this one ends too"
    );
    Ok(())
}
