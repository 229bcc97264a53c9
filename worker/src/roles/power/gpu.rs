//! One GPU under the policy: reads it, makes the changes that are due, and keeps the record of its owner's limit.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::driver::{self, Gpu, is_final, is_lacking};
use super::policy::{Change, Limit, Moment, Others, Policy};
use super::record::{Lowered, Record};

/// GPUs that could not be read yet: their indices, each with the last complaint, which is not repeated.
pub(super) struct Unread(Vec<(u32, String)>);

impl Unread {
    pub(super) fn new(count: u32) -> Self {
        Self((0..count).map(|index| (index, String::new())).collect())
    }

    /// Those that can be read by now. One that never will is left alone.
    pub(super) fn found<'nvml>(
        &mut self,
        nvml: &'nvml Nvml,
        policy: &Policy,
        record: &mut Record,
        now: Moment,
    ) -> Vec<Governed<'nvml>> {
        let mut found = Vec::new();
        self.0.retain_mut(|(index, told)| {
            let gpu = driver::gpu(nvml, *index).map_err(|error| (format!("GPU {index}"), error));
            let governed = gpu.and_then(|gpu| Governed::found(gpu, policy, record, now));
            let (what, error) = match governed {
                Ok(governed) => {
                    found.push(governed);
                    return false;
                }
                Err(unread) => unread,
            };
            let outcome = match is_final(&error) {
                true => "it is left alone",
                false => "it is tried again every minute",
            };
            let words = format!("{what} cannot be read: {}\n  {outcome}", refusal(&error));
            if *told != words {
                tracing::warn!("{words}");
                *told = words;
            }
            !is_final(&error)
        });
        found
    }
}

/// A GPU whose limit can be set, as far as is known.
pub(super) struct Governed<'nvml> {
    gpu: Gpu<'nvml>,
    limit: Limit,
    /// It refuses, or another program insists on limits of its own.
    is_left_alone: bool,
    /// The last complaint, which is not repeated.
    told: String,
}

impl<'nvml> Governed<'nvml> {
    /// A GPU as it was found.
    ///
    /// # Errors
    /// What it does not say, and why.
    fn found(
        gpu: Gpu<'nvml>,
        policy: &Policy,
        record: &mut Record,
        now: Moment,
    ) -> Result<Self, (String, NvmlError)> {
        let read = gpu
            .bounds()
            .and_then(|bounds| Ok((bounds, gpu.read()?.milliwatts)));
        let (bounds, in_force) =
            read.map_err(|error| (format!("the power limits of {gpu}"), error))?;
        let owners = record.owners_milliwatts(gpu.uuid(), in_force);
        let limit = Limit::found(bounds, in_force, owners, now);
        tracing::info!(
            "power limit of {gpu}: {} W; default {} W, {} to {} W can be set",
            watts(in_force),
            watts(bounds.default_milliwatts),
            watts(bounds.least_milliwatts),
            watts(bounds.most_milliwatts),
        );
        if policy.idle.is_some() && !gpu.reports_work {
            tracing::warn!(
                "{gpu} does not say whether it works, so it counts as working at all times"
            );
        }
        let mut governed = Self {
            gpu,
            limit,
            is_left_alone: false,
            told: String::new(),
        };
        governed.note(record);
        Ok(governed)
    }

    /// Reads the GPU and makes the change that is due, if any.
    pub(super) fn step(&mut self, policy: &Policy, record: &mut Record, now: Moment) {
        if self.is_left_alone {
            return;
        }
        let reading = match self.gpu.read() {
            Ok(reading) => reading,
            Err(error) => {
                return self.tell(format!(
                    "{} cannot be read, and its power limit stays until it can: {error}",
                    self.gpu
                ));
            }
        };
        match self.limit.read(reading.milliwatts, reading.works, now) {
            Others::Quiet => {}
            Others::Set { from_milliwatts } => {
                tracing::warn!(
                    "another program has set the power limit of {} from {} W to {} W, which is taken for the owner's from now on",
                    self.gpu,
                    watts(from_milliwatts),
                    watts(reading.milliwatts)
                );
                self.note(record);
            }
            Others::Insist => {
                self.is_left_alone = true;
                self.tell(format!(
                    "another program sets the power limit of {} again and again, now to {} W: it is left alone\n  let one program set it, \
                     then start this one again",
                    self.gpu,
                    watts(reading.milliwatts)
                ));
                return self.note(record);
            }
        }
        if let Some(change) = self.limit.due(policy, now) {
            self.make(change, record);
        }
    }

    /// Sets the owner's limit again, unless another program has set one meanwhile.
    pub(super) fn end(&mut self, record: &mut Record) {
        if let Some(change) = self.limit.back() {
            let reading = self.gpu.read();
            if reading.is_ok_and(|it| it.milliwatts != change.from_milliwatts) {
                // No limit of this policy is in force any more.
                return self.forget(record);
            }
            self.make(change, record);
        }
        if let Some(change) = self.limit.back() {
            tracing::error!(
                "the power limit of {} stays at {} W\n  set the owner's again: nvidia-smi -i {} -pl {}",
                self.gpu,
                watts(change.from_milliwatts),
                self.gpu.uuid(),
                watts(change.to_milliwatts)
            );
        }
    }

    fn make(&mut self, change: Change, record: &mut Record) {
        let (from, to) = (change.from_milliwatts, change.to_milliwatts);
        let owners_milliwatts = self.limit.owners_milliwatts();
        if to < owners_milliwatts {
            // Before it is set: a process that is killed in between leaves either of the two.
            let mut own_milliwatts = vec![to];
            if from != owners_milliwatts {
                own_milliwatts.insert(0, from);
            }
            let lowered = Lowered {
                owners_milliwatts,
                own_milliwatts,
            };
            if let Err(error) = record.keep(self.gpu.uuid(), Some(lowered)) {
                return self.tell(format!(
                    "the power limit of {} stays at {} W, since the owner's cannot be recorded: {error}",
                    self.gpu,
                    watts(from)
                ));
            }
        }
        match self.gpu.set(to) {
            Ok(in_force) if !change.is_kept(in_force) => {
                self.limit.changed(change, in_force);
                self.tell(format!(
                    "the power limit of {} was set to the owner's {} W, but is {} W\n  set it again: nvidia-smi -i {} -pl {}",
                    self.gpu,
                    watts(to),
                    watts(in_force),
                    self.gpu.uuid(),
                    watts(to)
                ));
            }
            Ok(in_force) => {
                let verb = if to < from { "falls" } else { "rises" };
                tracing::info!(
                    "power limit of {} {verb} from {} W to {} W: {}",
                    self.gpu,
                    watts(from),
                    watts(in_force),
                    change.why
                );
                self.limit.changed(change, in_force);
            }
            Err(error) => self.refused(&error, to),
        }
        self.note(record);
    }

    fn refused(&mut self, error: &NvmlError, milliwatts: u32) {
        self.is_left_alone = is_final(error);
        let outcome = match self.is_left_alone {
            true => "it is left alone",
            false => "it is tried again",
        };
        self.tell(format!(
            "the power limit of {} cannot be set to {} W: {}\n  {outcome}",
            self.gpu,
            watts(milliwatts),
            refusal(error)
        ));
    }

    /// Records the owner's limit while another one is in force.
    fn note(&mut self, record: &mut Record) {
        let (owners_milliwatts, in_force) = (
            self.limit.owners_milliwatts(),
            self.limit.in_force_milliwatts(),
        );
        let lowered = (in_force != owners_milliwatts).then(|| Lowered {
            owners_milliwatts,
            own_milliwatts: vec![in_force],
        });
        self.write(record, lowered);
    }

    fn forget(&mut self, record: &mut Record) {
        self.write(record, None);
    }

    /// Writes what need not be on disk before something else happens.
    fn write(&mut self, record: &mut Record, lowered: Option<Lowered>) {
        if let Err(error) = record.keep(self.gpu.uuid(), lowered) {
            self.tell(format!(
                "the record of the power limit of {} cannot be written: {error}",
                self.gpu
            ));
        }
    }

    fn tell(&mut self, words: String) {
        if self.told != words {
            tracing::warn!("{words}");
            self.told = words;
        }
    }
}

/// Why the library refuses, and what to do.
fn refusal(error: &NvmlError) -> String {
    match error {
        NvmlError::NoPermission => "no permission\n  it takes root with the capability SYS_ADMIN, outside of user namespaces; \
            in a cluster, the chart's DaemonSet hearth-power has both"
            .to_owned(),
        error if is_lacking(error) => {
            format!("{error}, as on most laptops")
        }
        error => error.to_string(),
    }
}

/// Watts, with what a limit has beyond whole ones.
fn watts(milliwatts: u32) -> String {
    let text = format!("{:.3}", f64::from(milliwatts) / 1000.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
