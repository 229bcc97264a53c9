//! Peers of a benchmark's model: threads of this process, each with a device of its own, that read prompts together
//! (OSDI '26, section 3.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use hearth_kernels::Backend;
use hearth_model::{ExpertParallel, ExpertShare, Membership, Sharing};
use hearth_parallel::{Follower, GroupPeers, LocalGroup, OneGroup};

use super::session::cache;
use crate::cli::ModelArgs;
use crate::device::on_device;
use crate::environment::Environment;
use crate::load::{self, LoadOptions, LoadedOn};

/// How rows come to the experts of other peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertsArg {
    /// All rows go to all peers, and come back summed
    SmallEp,
    /// Each row goes to the peers of the experts that it chose
    Ep,
}

impl From<ExpertsArg> for ExpertParallel {
    fn from(experts: ExpertsArg) -> Self {
        match experts {
            ExpertsArg::SmallEp => Self::SmallEp,
            ExpertsArg::Ep => Self::Ep,
        }
    }
}

/// The other peers, which follow until this is dropped.
pub(super) struct Peers {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported by itself.
            let _ = thread.join();
        }
    }
}

/// Starts as many peers as `count` says, less `head`, which was opened as the first of them; each has a cache for `sequences`
/// sequences of `capacity_tokens` tokens.
///
/// # Errors
/// An error if one cannot be opened, or no thread be started.
pub(super) fn start<B: Backend>(
    head: &mut LoadedOn<B>,
    (args, environment): (&ModelArgs, &Environment),
    (count, experts): (usize, ExpertsArg),
    (sequences, capacity_tokens): (usize, usize),
) -> anyhow::Result<Peers> {
    let mut groups = LocalGroup::of(count).into_iter();
    let group = groups.next().context("a group has a member")?;
    let peers = GroupPeers::of_head(Box::new(OneGroup(Arc::new(group))));
    peers.rejoin(Duration::ZERO)?;
    let sharing = Sharing::new(experts.into(), count);
    head.model.share(Arc::new(peers), sharing.clone());
    let mut started = Peers {
        is_over: Arc::default(),
        threads: Vec::new(),
    };
    for (place, group) in (1..).zip(groups) {
        let options = LoadOptions {
            share: ExpertShare::of(place, count),
            ..LoadOptions::from_args(args, environment)?
        };
        let loaded = load::open(&args.model, options, &mut |_| {})?;
        let is_over = Arc::clone(&started.is_over);
        let thread = on_device!(loaded, loaded => {
            let (kv, _) = cache(&loaded.model, sequences, capacity_tokens, args.kv_dtype())?;
            let follower = Follower::new(loaded.model, kv, |model, peers| {
                model.share(peers, sharing.clone());
            });
            spawn(place, follower, group, is_over)?
        });
        started.threads.push(thread);
    }
    Ok(started)
}

fn spawn<B: Backend>(
    place: usize,
    mut follower: Follower<B>,
    group: LocalGroup,
    is_over: Arc<AtomicBool>,
) -> anyhow::Result<JoinHandle<()>> {
    let run = move || {
        let followed = follower
            .bind_thread()
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let goes_on = || !is_over.load(Ordering::Relaxed);
                let followed = follower.follow(Arc::new(group), goes_on);
                followed.map_err(|error| error.to_string())
            });
        if let Err(error) = followed {
            tracing::debug!(place, error, "a peer has ended");
        }
    };
    std::thread::Builder::new()
        .name(format!("peer-{place}"))
        .spawn(run)
        .context("a peer's thread cannot be started")
}
