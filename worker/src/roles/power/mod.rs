//! `hearth-worker power`: keeps the power limits of a node's GPUs below their owners', while they have no work and in quiet hours.
//!
//! When it ends, and when the next one starts after it was killed, each GPU gets back the limit that it had. The library stays
//! open meanwhile: a driver that nobody uses may forget what was set.

mod driver;
mod gpu;
mod hours;
mod policy;
mod record;

use std::path::PathBuf;
use std::pin::pin;
use std::time::{Duration, Instant};

use clap::Args;
use hearth_crds::DurationText;
use hearth_profiler::{NvmlUnavailable, open_nvml};
use jiff::Timestamp;
use nvml_wrapper::Nvml;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::signals;
use gpu::{Governed, Unread};
use hours::{QuietHours, Zone};
use policy::{Idle, Moment, Policy};
use record::Record;

/// Time between two readings of a GPU. With the driver's sample, work is seen within about a second.
const PERIOD: Duration = Duration::from_millis(250);
/// Time between two attempts to find GPUs, and to read those that could not be read yet.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Arguments of `power`.
#[derive(Args)]
pub(crate) struct PowerArgs {
    /// Power limit of a GPU that has no work, in percent of its default limit [default: the owner's limit]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    idle_percent: Option<u8>,
    /// Time without work after which that limit holds
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10m",
        requires = "idle_percent"
    )]
    idle_after: DurationText,
    /// Hours of each day, and the power limit of all GPUs in them in percent of their default limits, such as 22:30-07:00=60; may be
    /// repeated, and the lowest holds
    #[arg(long, value_name = "FROM-TO=PERCENT")]
    quiet_hours: Vec<QuietHours>,
    /// Time zone of these hours, by its name in the IANA database
    #[arg(long, value_name = "NAME", default_value = "UTC")]
    time_zone: Zone,
    /// Directory for the owner's limits: whoever comes after a process that was killed sets them again
    #[arg(long, value_name = "DIR", default_value = "/run/hearth-power")]
    state_dir: PathBuf,
}

impl PowerArgs {
    fn policy(&self) -> anyhow::Result<Policy> {
        if self.idle_percent.is_none() && self.quiet_hours.is_empty() {
            anyhow::bail!(
                "neither --idle-percent nor --quiet-hours is given, so no limit would ever change\n  give one of them, or both"
            );
        }
        Ok(Policy {
            idle: self.idle_percent.map(|percent| Idle {
                percent,
                after: self.idle_after,
            }),
            quiet: self.quiet_hours.clone(),
            zone: self.time_zone.clone(),
        })
    }
}

/// Keeps the limits until told to stop.
pub(crate) fn run(args: &PowerArgs) -> anyhow::Result<()> {
    let policy = args.policy()?;
    let record = Record::open(&args.state_dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(&policy, record));
    Ok(())
}

/// Looks for GPUs until there are some, and then keeps their limits.
async fn serve(policy: &Policy, record: Record) {
    let start = Instant::now();
    let mut ending = pin!(told_to_end());
    let (mut told, mut pause) = (String::new(), Duration::ZERO);
    loop {
        // Signals are waited for before anything is set that the end would have to take back.
        tokio::select! {
            biased;
            () = &mut ending => return,
            () = tokio::time::sleep(pause) => {}
        }
        let why = match open_nvml() {
            Ok(nvml) => match driver::count(&nvml) {
                Some(count) => {
                    let unread = Unread::new(count);
                    return keep(&nvml, unread, policy, record, start, ending).await;
                }
                None => "the driver has none".to_owned(),
            },
            Err(NvmlUnavailable::NoGpus(why) | NvmlUnavailable::Trouble(why)) => why,
        };
        if told != why {
            tracing::info!("no GPU here, looked for again every minute: {why}");
            told = why;
        }
        pause = AGAIN_AFTER;
    }
}

async fn keep(
    nvml: &Nvml,
    mut unread: Unread,
    policy: &Policy,
    mut record: Record,
    start: Instant,
    mut ending: std::pin::Pin<&mut impl Future<Output = ()>>,
) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut gpus: Vec<Governed<'_>> = Vec::new();
    let mut look_at = Duration::ZERO;
    loop {
        tokio::select! {
            biased;
            () = &mut ending => break,
            _ = ticks.tick() => {}
        }
        let now = now(start);
        if now.elapsed >= look_at {
            gpus.extend(unread.found(nvml, policy, &mut record, now));
            look_at = now.elapsed + AGAIN_AFTER;
        }
        gpus.iter_mut()
            .for_each(|gpu| gpu.step(policy, &mut record, now));
    }
    gpus.iter_mut().for_each(|gpu| gpu.end(&mut record));
}

/// Completes on SIGTERM, on Ctrl-C, and when its terminal is closed, unless it was started to outlive that (`nohup`).
async fn told_to_end() {
    let hangups = match ignores_hangups() {
        true => None,
        false => signal(SignalKind::hangup()).ok(),
    };
    let hung_up = async {
        match hangups {
            Some(mut hangups) => {
                hangups.recv().await;
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = signals::termination() => {}
        () = hung_up => {}
    }
}

/// Whether who started this process made it ignore SIGHUP.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // The first bit is the first signal's, which is SIGHUP.
    ignored.is_some_and(|mask| mask & 1 != 0)
}

fn now(start: Instant) -> Moment {
    Moment {
        elapsed: start.elapsed(),
        at: Timestamp::now(),
    }
}
