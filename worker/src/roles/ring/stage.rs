//! A stage: a process that computes its layers for the head of its ring.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use hearth_crds::{InferencePlanSpec, WorkerReport};
use hearth_kernels::{Backend, KvDType};
use hearth_parallel::{Stage, StageError};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{Clients, Health, Listener, ServerOptions, server};
use tokio::sync::oneshot;

use super::Ring;
use super::membership::{Follower, Membership};
use super::net::NetGroup;
use crate::load::{self, LoadedOn};
use crate::lost::DeviceLost;
use crate::roles::report::{send_report, stay_alive};
use crate::signals;

/// Time between two looks at whether the head still needs a stage that is to end.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// A stage at work in a thread of its own.
pub(in crate::roles) struct StageWorker {
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
        plan: &InferencePlanSpec,
        ring: Ring,
        loaded: LoadedOn<B>,
        (block_tokens, kv_dtype): (usize, KvDType),
        clients: Clients,
    ) -> anyhow::Result<Self> {
        let LoadedOn {
            model, checkpoint, ..
        } = loaded;
        let layout = model.kv_layout(block_tokens, kv_dtype);
        let expected = ring.join(
            plan,
            &checkpoint.fingerprint(),
            &layout,
            model.config().hidden_size,
        );
        let kv = model
            .kv_alloc(layout, expected.kv_blocks as usize)
            .with_context(|| format!("the cache of {} blocks", expected.kv_blocks))?;
        let numerics = load::numerics(&model, kv_dtype);
        let (joined, groups) = channel();
        let membership = Membership::of_follower(Follower {
            expected,
            members: ring.members.clone(),
            numerics,
            clients,
            joined: Mutex::new(joined),
        });
        let (failed, fault) = oneshot::channel();
        let stage = Stage::new(model, kv);
        std::thread::Builder::new()
            .name("stage".to_owned())
            .spawn(move || {
                // Files stay mapped as long as their weights are used.
                let _files = checkpoint;
                if let Err(error) = follow(stage, &ring, &groups) {
                    // Without a receiver the process ends anyway.
                    let _ = failed.send(error);
                }
            })
            .context("the stage's thread cannot be started")?;
        Ok(Self { membership, fault })
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
            fault = self.fault => match fault {
                Ok(error) => Err(error),
                Err(_) => Err(anyhow::anyhow!("the stage's thread has ended\n  its panic is in the log above")),
            },
        }
    }
}

/// Computes for one group after the other, until none is to come.
fn follow<B: Backend>(
    mut stage: Stage<B>,
    ring: &Ring,
    groups: &Receiver<Arc<NetGroup>>,
) -> anyhow::Result<()> {
    stage.bind_thread()?;
    while let Ok(group) = groups.recv() {
        // The head tells what becomes of the ring, and tries again and again while a member is missing.
        tracing::debug!(epoch = group.epoch, "joined the ring");
        let followed = stage.follow(&*group, &ring.route, || true);
        group.leave();
        match followed {
            Ok(()) => {}
            Err(StageError::Device(why)) => return Err(DeviceLost(why).into()),
            Err(error) => tracing::debug!(epoch = group.epoch, %error, "the ring is left"),
        }
    }
    Ok(())
}
