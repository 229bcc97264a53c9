//! A follower: a process that computes its part of what the head of its group begins.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use hearth_crds::WorkerReport;
use hearth_kernels::{Backend, KvDType};
use hearth_model::{Model, ModelError, Sharing};
use hearth_parallel::{Follower as Peer, Group, Stage, StageError, StageProgress, lost_after};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{Clients, Health, Listener, ServerOptions, server};
use tokio::sync::oneshot;

use super::membership::{Follower, JoinedGroup, Membership};
use super::net::NetGroup;
use super::terms::{Terms, Work};
use super::{Place, Task, kv_blocks, of_one_layer};
use crate::load::{self, LoadedOn};
use crate::logging;
use crate::lost::DeviceLost;
use crate::roles::binding::Binding;
use crate::roles::report::{send_report, stay_alive};
use crate::signals;

/// Time between two looks at whether the head still needs a stage that is to end.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Least time that a member which is told to end goes on: where its head is told so, too, that says it by then.
const COURTESY: Duration = Duration::from_secs(5);

/// Time that a peer gives the others to finish the pass whose part it has computed, before it leaves.
const FAREWELL: Duration = Duration::from_secs(1);

/// Time between two looks at whether its computation goes on.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

/// Time that the head has to say which member stands still, before that ends itself.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);

/// A follower at work in a thread of its own.
pub(in crate::roles) struct FollowerWorker {
    progress: StageProgress,
    /// Takes what other members send.
    membership: Membership,
    /// Receives why it cannot go on.
    fault: oneshot::Receiver<anyhow::Error>,
}

impl FollowerWorker {
    /// Starts a follower on its part of a model; it waits for the head. Must be called within a runtime.
    ///
    /// # Errors
    /// An error if its cache cannot be allocated, or no thread be started.
    pub(in crate::roles) fn start<B: Backend>(
        place: Place,
        loaded: LoadedOn<B>,
        (block_tokens, kv_dtype): (usize, KvDType),
        binding: Arc<Binding>,
        clients: Clients,
    ) -> anyhow::Result<Self> {
        let LoadedOn {
            model, checkpoint, ..
        } = loaded;
        let layout = model.kv_layout(block_tokens, kv_dtype);
        let kv_blocks = kv_blocks(place.kv_bytes, layout.layers, &layout);
        let kv = model
            .kv_alloc(layout, kv_blocks as usize)
            .with_context(|| format!("the cache of {kv_blocks} blocks"))?;
        let mut numerics = load::numerics(&model, kv_dtype);
        let member = match place.task {
            Task::Windows { .. } => Member::Stage(Stage::new(model, kv)),
            Task::Share {
                peers: ranks,
                experts,
            } => {
                let share = |model: &mut Model<B>, peers| {
                    model.share(peers, Sharing::new(experts, ranks));
                    // As the head's: with the order in which so many ranks add.
                    numerics = load::numerics(model, kv_dtype);
                };
                Member::Peer(Peer::new(model, kv, share))
            }
        };
        let (joined, groups) = channel();
        let progress = member.progress();
        let membership = Membership::of_follower(Follower {
            terms: Terms {
                place: place.clone(),
                model_fingerprint: checkpoint.fingerprint().to_owned(),
                kv_layout: of_one_layer(&layout),
                kv_blocks,
            },
            numerics,
            placement: Box::new(move || binding.placement()),
            clients,
            progress: progress.clone(),
            joined: Mutex::new(joined),
        });
        let (failed, fault) = oneshot::channel();
        std::thread::Builder::new()
            .name("follower".to_owned())
            .spawn(move || {
                // Files stay mapped as long as their weights are used.
                let _files = checkpoint;
                if let Err(error) = follow(member, &groups) {
                    // Without a receiver the process ends anyway.
                    let _ = failed.send(error);
                }
            })
            .context("the follower's thread cannot be started")?;
        Ok(Self {
            progress,
            membership,
            fault,
        })
    }

    /// Serves until the process is told to stop, or the follower cannot go on. Then it goes on for `grace` at most: if its head is
    /// told to stop, too, until that has finished its requests and left the group; otherwise until the pass is over that it
    /// computes, for its successor is to come soon. Once a part of a pass takes longer than `patience`, and far longer than any
    /// like it before, the process ends.
    ///
    /// # Errors
    /// An error if the listener fails, or why the follower cannot go on.
    pub(in crate::roles) async fn serve(
        self,
        listener: Listener,
        health: &Health,
        options: &ServerOptions,
        (grace, patience): (Duration, Duration),
    ) -> anyhow::Result<()> {
        let membership = self.membership.clone();
        let stopped = async {
            signals::termination().await;
            send_report(&WorkerReport::Draining { choices: None });
            health.clone().end().await;
            let told = Instant::now();
            while !membership.is_alone() && told.elapsed() < grace {
                if told.elapsed() >= COURTESY && !membership.head_drains() {
                    membership.retire();
                }
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        };
        let routes = Routes::new(health.service()).add_service(server::group(self.membership));
        let served = hearth_transport::serve(listener, routes, options, std::future::pending());
        tokio::select! {
            served = served => Ok(served?),
            () = stopped => Ok(()),
            never = stay_alive() => match never {},
            never = watch(self.progress, patience) => match never {},
            fault = self.fault => match fault {
                Ok(error) => Err(error),
                Err(_) => Err(anyhow::anyhow!("the follower's thread has ended\n  its panic is in the log above")),
            },
        }
    }
}

/// Ends the process if its computation stands still, by the rule by which its head loses it, and a moment later: nothing else would, since
/// its threads never finish.
async fn watch(progress: StageProgress, patience: Duration) -> Infallible {
    loop {
        tokio::time::sleep(PROGRESS_PERIOD).await;
        let Some((part, times)) = progress.now() else {
            continue;
        };
        if times.present >= lost_after(times.longest, patience) + HEAD_PATIENCE {
            logging::say_last(format_args!(
                "the computation stands still: it has been at layers {} to {} in pass {} for {} s, and the longest before took {:.1} s\n  \
                 the supervisor restarts this worker",
                part.layers.start,
                part.layers.end.saturating_sub(1),
                part.pass,
                times.present.as_secs(),
                times.longest.unwrap_or_default().as_secs_f64()
            ));
            std::process::exit(1);
        }
    }
}

/// What a follower is.
enum Member<B: Backend> {
    Stage(Stage<B>),
    Peer(Peer<B>),
}

impl<B: Backend> Member<B> {
    fn progress(&self) -> StageProgress {
        match self {
            Self::Stage(stage) => stage.progress(),
            Self::Peer(peer) => peer.progress(),
        }
    }

    fn bind_thread(&self) -> Result<(), ModelError> {
        match self {
            Self::Stage(stage) => stage.bind_thread(),
            Self::Peer(peer) => peer.bind_thread(),
        }
    }

    /// Computes for a group until that is over.
    fn follow(&mut self, group: &Arc<NetGroup>, work: &Work) -> Result<(), StageError> {
        match (self, work) {
            (Self::Stage(stage), Work::Ring(route)) => stage.follow(&**group, route, || true),
            (Self::Peer(peer), Work::Share) => peer.follow(Arc::clone(group) as _, || true),
            // Terms agree to nothing else.
            (Self::Stage(_), Work::Share) | (Self::Peer(_), Work::Ring(_)) => Ok(()),
        }
    }
}

/// Computes for one group after the other, until none is to come.
fn follow<B: Backend>(mut member: Member<B>, groups: &Receiver<JoinedGroup>) -> anyhow::Result<()> {
    member.bind_thread()?;
    while let Ok(joined) = groups.recv() {
        let JoinedGroup { group, work, taken } = joined;
        // The head may have given it up meanwhile, and formed another.
        if group.lost().is_some() || taken.send(()).is_err() {
            group.leave();
            continue;
        }
        // The head tells what becomes of the group, and tries again and again while a member is missing.
        tracing::debug!(epoch = group.epoch, "joined the group");
        let followed = member.follow(&group, &work);
        if group.is_retiring() && matches!(work, Work::Share) {
            std::thread::sleep(FAREWELL);
        }
        group.leave();
        match followed {
            Ok(()) => {}
            Err(StageError::Device(why)) => return Err(DeviceLost(why).into()),
            Err(error) => tracing::debug!(epoch = group.epoch, %error, "the group is left"),
        }
    }
    Ok(())
}
