//! Profile of the node: rates are measured once and stored on disk; everything else is read again at each call.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hearth_crds::{GpuProfile, NodeProfileStatus};
use hearth_fetch::Cache;
use hearth_profiler::{
    Kept, Measured, ProfileOptions, Scope, available_on_node_bytes, hardware, observe, take_rates,
};
use tonic::Status;

use super::spare::Spare;
use super::tool;
use crate::tools::VirtualDevice;

/// File in the cache directory.
const KEPT: &str = "profile.json";
/// Time limit for measuring, which takes seconds, or longer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Interval at which the memory that the node can spare is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Time after which a call repeats a failed measurement.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// The node and its measured rates.
pub(super) struct Node {
    options: ProfileOptions,
    kept: PathBuf,
    /// Stands for the node's GPUs.
    device: Option<VirtualDevice>,
    /// Whether a device plugin hands it out.
    from_device_plugin: bool,
    state: Mutex<State>,
    spare: Mutex<Spare>,
}

enum State {
    /// Measuring for the first time, or after a hardware change; with the reason.
    Measuring(String),
    Measured(Box<Kept>),
    Failed {
        why: String,
        at: Instant,
    },
}

impl Node {
    /// Takes the rates stored by an earlier agent, or starts measuring. Requires a tokio runtime.
    pub(super) fn start(
        name: &str,
        cache: &Cache,
        device: Option<VirtualDevice>,
        from_device_plugin: bool,
    ) -> Arc<Self> {
        let disk = cache.disk_of_models();
        let first = "this node is being measured; ask again in some seconds";
        let node = Arc::new(Self {
            options: ProfileOptions {
                node: Some(name.to_owned()),
                scope: Scope::Node,
                disk: Some(disk.clone()),
                ..ProfileOptions::default()
            },
            kept: cache.path().join(KEPT),
            device,
            from_device_plugin,
            state: Mutex::new(State::Measuring(first.to_owned())),
            spare: Mutex::default(),
        });
        // Models may be on another disk by now.
        let is_of_disk = |kept: &Kept| {
            let mut disks = kept.profile.disks.iter();
            disks.all(|measured| Path::new(&measured.path) == disk)
        };
        match Kept::read(&node.kept).filter(is_of_disk) {
            Some(kept) => {
                tracing::info!(measured_at = kept.profile.measured_at, "rates are kept");
                *node.lock() = State::Measured(Box::new(kept));
            }
            None => node.measure(),
        }
        tokio::spawn(watch(Arc::downgrade(&node)));
        node
    }

    /// Notes what memory is available. What measuring takes for a moment does not count.
    fn note(&self, available_bytes: u64) {
        if self.check_quiet().is_ok() {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            spare.note(available_bytes, Instant::now());
        }
    }

    /// Adds the least memory that was available in the last minutes.
    fn add_least(&self, profile: &mut NodeProfileStatus) {
        let memory = &mut profile.memory;
        self.note(memory.available_bytes);
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((bytes, seconds)) = spare.least(Instant::now()) {
            memory.least_available_bytes = Some(bytes.min(memory.available_bytes));
            memory.least_over_seconds = seconds;
        }
    }

    /// Returns the profile with measured rates, and the current memory and disk.
    ///
    /// # Errors
    /// UNAVAILABLE while there are no rates yet, or if they could not be measured.
    pub(super) async fn profile(self: &Arc<Self>) -> Result<NodeProfileStatus, Status> {
        let node = Arc::clone(self);
        let observed = tokio::task::spawn_blocking(move || observe(&node.options));
        let Measured {
            mut profile,
            warnings,
        } = observed
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::unavailable(error.to_string()))?;
        for warning in warnings {
            tracing::debug!("profile: {warning}");
        }
        let now = self.hardware(&profile);
        self.add_least(&mut profile);
        let mut state = self.lock();
        let why = match &*state {
            State::Measured(kept) if kept.hardware == now => {
                take_rates(&mut profile, &kept.profile);
                if let (Some(device), [measured, ..]) = (&self.device, &kept.profile.gpus[..]) {
                    let stand_in = GpuProfile {
                        from_device_plugin: self.from_device_plugin,
                        ..measured.clone()
                    };
                    device.stand_in(&stand_in, &mut profile);
                }
                return Ok(profile);
            }
            State::Measuring(why) => return Err(Status::unavailable(why.clone())),
            State::Failed { why, at } if at.elapsed() < AGAIN_AFTER => {
                return Err(Status::unavailable(why.clone()));
            }
            State::Failed { why, .. } => format!("this node is being measured again, after: {why}"),
            State::Measured(kept) => {
                tracing::info!(before = kept.hardware, now, "the hardware has changed");
                format!("this node is being measured again because it has changed: it is {now}")
            }
        };
        *state = State::Measuring(why.clone());
        drop(state);
        self.measure();
        Err(Status::unavailable(why))
    }

    /// Checks that the node is not being measured: a link's traffic would take of its rates, and they of the link's.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if it is.
    pub(super) fn check_quiet(&self) -> Result<(), Status> {
        match &*self.lock() {
            State::Measuring(why) => Err(Status::resource_exhausted(why.clone())),
            State::Measured(_) | State::Failed { .. } => Ok(()),
        }
    }

    /// Measures in the background; the state must be `Measuring`.
    fn measure(self: &Arc<Self>) {
        let node = Arc::clone(self);
        tokio::spawn(async move {
            let began = Instant::now();
            let outcome = node.ask().await;
            let state = match outcome {
                Ok(profile) => {
                    tracing::info!(took = ?began.elapsed(), "measured: {}", node.words(&profile));
                    let hardware = node.hardware(&profile);
                    let kept = Box::new(Kept { hardware, profile });
                    if let Err(error) = kept.write(&node.kept) {
                        let path = node.kept.display();
                        tracing::warn!("{path}: {error}: the next agent measures again");
                    }
                    State::Measured(kept)
                }
                Err(error) => {
                    let why = format!("this node could not be measured: {error}");
                    tracing::error!("{why}");
                    State::Failed {
                        why,
                        at: Instant::now(),
                    }
                }
            };
            *node.lock() = state;
        });
    }

    async fn ask(&self) -> Result<NodeProfileStatus, String> {
        let name = self.options.node.as_deref().unwrap_or_default();
        let disk = self.options.disk.as_deref().unwrap_or(Path::new("/"));
        let arguments = [
            "profile",
            "--json",
            "--scope",
            "node",
            "--node",
            name,
            "--probe-disk",
            "--disk",
        ];
        let mut arguments: Vec<&OsStr> = arguments.map(OsStr::new).to_vec();
        arguments.push(disk.as_os_str());
        if let Some(device) = &self.device {
            arguments.extend(["--virtual-device", device.text()].map(OsStr::new));
        }
        tool::ask(&arguments, PATIENCE).await
    }

    /// The hardware that rates belong to, the virtual device included.
    fn hardware(&self, profile: &NodeProfileStatus) -> String {
        let mut hardware = hardware(profile, &self.options.root);
        if let Some(device) = &self.device {
            hardware.push_str("; ");
            hardware.push_str(device.text());
            if let Some(cause) = device.lost() {
                hardware.push_str(", lost: ");
                hardware.push_str(&cause);
            }
        }
        hardware
    }

    /// Describes the measured node in one line.
    fn words(&self, profile: &NodeProfileStatus) -> String {
        let summary = hearth_profiler::summary(profile);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        summary.lines().map(words).collect::<Vec<_>>().join("; ")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at the node's memory again and again, as long as there is an agent.
async fn watch(node: Weak<Node>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(node) = node.upgrade() else {
            return;
        };
        // Reads one file of the kernel's, which does not wait for a disk.
        if let Some(bytes) = available_on_node_bytes(&node.options.root) {
            node.note(bytes);
        }
    }
}
