//! A stage: a process that computes its layers for the head of its ring.

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hearth_crds::{InferencePlanSpec, PlanRank, PlanRing, PlanRole, WorkerReport};
use hearth_kernels::{Backend, KvDType};
use hearth_model::Part;
use hearth_parallel::{Group, Stage, StageError, StageProgress};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{Clients, Health, Listener, ServerOptions, server};
use tokio::sync::oneshot;

use super::membership::{Follower, JoinedGroup, Membership};
use super::terms::Terms;
use super::{kv_blocks, of_one_layer, windows, wrong};
use crate::load::{self, LoadedOn};
use crate::lost::DeviceLost;
use crate::roles::layers::Layers;
use crate::roles::report::{send_report, stay_alive};
use crate::signals;

/// Time between two looks at whether the head still needs a stage that is to end.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Time between two looks at whether its computation goes on.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

/// What a stage is in its plan. The others of its ring may change while it stays.
pub(in crate::roles) struct Place {
    name: String,
    place: usize,
    part: Part,
    /// Layers of the model.
    layers: usize,
    /// Bytes of its cache.
    kv_bytes: u64,
}

impl Place {
    /// A stage's place.
    ///
    /// # Errors
    /// An error if the rank is none, or its layers are not the model's.
    pub(super) fn of(
        plan: &InferencePlanSpec,
        rank: &PlanRank,
        ring: &PlanRing,
    ) -> anyhow::Result<Self> {
        if rank.role != PlanRole::Stage {
            bail!(
                "{}: place {} is {}'s, a {} rank",
                wrong(&ring.head),
                ring.place,
                rank.name,
                rank.role.as_str()
            );
        }
        let layers = plan.model.layers as usize;
        let part = Part::new(windows(ring).collect(), false, layers);
        Ok(Self {
            name: rank.name.clone(),
            place: ring.place as usize,
            part: part.with_context(|| wrong(&ring.head))?,
            layers,
            kv_bytes: rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes),
        })
    }

    /// The layers that it computes.
    pub(super) fn part(&self) -> &Part {
        &self.part
    }
}

/// A stage at work in a thread of its own.
pub(in crate::roles) struct StageWorker {
    progress: StageProgress,
    /// Takes what other members send.
    membership: Membership,
    /// Receives why it cannot go on.
    fault: oneshot::Receiver<anyhow::Error>,
}

impl StageWorker {
    /// Starts a stage on its part of a model; it waits for the head. Must be called within a runtime.
    ///
    /// # Errors
    /// An error if its cache cannot be allocated, or no thread be started.
    pub(in crate::roles) fn start<B: Backend>(
        place: Place,
        loaded: LoadedOn<B>,
        (block_tokens, kv_dtype): (usize, KvDType),
        clients: Clients,
    ) -> anyhow::Result<Self> {
        let LoadedOn {
            model, checkpoint, ..
        } = loaded;
        let layout = model.kv_layout(block_tokens, kv_dtype);
        let kv_blocks = kv_blocks(place.kv_bytes, place.part.layers(), &layout);
        let kv = model
            .kv_alloc(layout, kv_blocks as usize)
            .with_context(|| format!("the cache of {kv_blocks} blocks"))?;
        let numerics = load::numerics(&model, kv_dtype);
        let (joined, groups) = channel();
        let membership = Membership::of_follower(Follower {
            terms: Terms {
                name: place.name,
                place: place.place,
                part: place.part,
                layers: place.layers,
                model_fingerprint: checkpoint.fingerprint().to_owned(),
                kv_layout: of_one_layer(&layout),
                kv_blocks,
            },
            numerics,
            clients,
            joined: Mutex::new(joined),
        });
        let (failed, fault) = oneshot::channel();
        let stage = Stage::new(model, kv);
        let progress = stage.progress();
        std::thread::Builder::new()
            .name("stage".to_owned())
            .spawn(move || {
                // Files stay mapped as long as their weights are used.
                let _files = checkpoint;
                if let Err(error) = follow(stage, &groups) {
                    // Without a receiver the process ends anyway.
                    let _ = failed.send(error);
                }
            })
            .context("the stage's thread cannot be started")?;
        Ok(Self {
            progress,
            membership,
            fault,
        })
    }

    /// Serves until the process is told to stop, or the stage cannot go on. Then it goes on for `grace` at most, until its head
    /// has left the group, which may have answers to finish.
    ///
    /// # Errors
    /// An error if the listener fails, or why the stage cannot go on.
    pub(in crate::roles) async fn serve(
        self,
        listener: Listener,
        health: &Health,
        options: &ServerOptions,
        grace: Duration,
    ) -> anyhow::Result<()> {
        let membership = self.membership.clone();
        let stopped = async {
            signals::termination().await;
            send_report(&WorkerReport::Draining);
            health.clone().end().await;
            let deadline = Instant::now() + grace;
            while !membership.is_alone() && Instant::now() < deadline {
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        };
        let routes = Routes::new(health.service()).add_service(server::group(self.membership));
        let served = hearth_transport::serve(listener, routes, options, std::future::pending());
        tokio::select! {
            served = served => Ok(served?),
            () = stopped => Ok(()),
            never = stay_alive() => match never {},
            never = watch(self.progress) => match never {},
            fault = self.fault => match fault {
                Ok(error) => Err(error),
                Err(_) => Err(anyhow::anyhow!("the stage's thread has ended\n  its panic is in the log above")),
            },
        }
    }
}

/// Ends the process if its computation stands still: the head would wait for it without end.
async fn watch(progress: StageProgress) -> Infallible {
    let mut windows = Layers::new("window of layers");
    loop {
        tokio::time::sleep(PROGRESS_PERIOD).await;
        windows.end_if_stuck(progress.at_window_for());
    }
}

/// Computes for one group after the other, until none is to come.
fn follow<B: Backend>(mut stage: Stage<B>, groups: &Receiver<JoinedGroup>) -> anyhow::Result<()> {
    stage.bind_thread()?;
    while let Ok(joined) = groups.recv() {
        let JoinedGroup {
            group,
            route,
            taken,
        } = joined;
        // The head may have given it up meanwhile, and formed another.
        if group.lost().is_some() || taken.send(()).is_err() {
            group.leave();
            continue;
        }
        // The head tells what becomes of the ring, and tries again and again while a member is missing.
        tracing::debug!(epoch = group.epoch, "joined the ring");
        let followed = stage.follow(&*group, &route, || true);
        group.leave();
        match followed {
            Ok(()) => {}
            Err(StageError::Device(why)) => return Err(DeviceLost(why).into()),
            Err(error) => tracing::debug!(epoch = group.epoch, %error, "the ring is left"),
        }
    }
    Ok(())
}
