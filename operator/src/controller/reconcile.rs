//! One reconcile of one deployment: dereference → decide → apply → report.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_controller_core::conditions::{self, PROGRESSING, holds_nothing};
use hearth_controller_core::decide::decide;
use hearth_controller_core::decision::Decision;
use hearth_controller_core::key::Key;
use hearth_controller_core::observed::Turn;
use hearth_controller_core::observed::{Observed, Settings};
use hearth_controller_core::scaling::follows_load;
use hearth_controller_core::status::{self, told_first, undecided};
use hearth_controller_core::validate::{left_to_others, serves};
use hearth_crds::{InferenceDeployment, InferenceDeploymentStatus, InferencePlan, ModelSource};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::apply::report::Reporting;
use crate::apply::{Applier, Subject};
use crate::cluster::cache::{CacheNotifier, Unreadable};
use crate::cluster::dereference::{Dereferencer, UncachedState};
use crate::cluster::failure::Failure;
use crate::services::agents::Agents;
use crate::services::authority::Authority;
use crate::services::cluster_cache::ClusterCache;
use crate::services::measure::Measures;
use crate::telemetry::Telemetry;

/// Reconciles deployments.
pub(crate) struct Reconciler {
    pub(crate) notifier: CacheNotifier,
    pub(crate) settings: Arc<Settings>,
    pub(crate) dereferencer: Dereferencer,
    pub(crate) applier: Applier,
    pub(crate) reporting: Reporting,
    pub(crate) authority: Arc<Authority>,
    /// `None` if nodes have no agents.
    pub(crate) agents: Option<Arc<Agents<ClusterCache>>>,
    pub(crate) measures: Arc<Measures>,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) resync: Duration,
    /// Held from reading the nodes until a new plan has its reservation there: no two plans claim the same memory.
    pub(crate) planning: tokio::sync::Mutex<()>,
    /// Consecutive failures, and uids of deployments that were reconciled.
    pub(crate) known: Mutex<HashMap<Key, Known>>,
}

/// State kept about a deployment between reconciles.
#[derive(Debug, Default)]
pub(crate) struct Known {
    failures: u32,
    uid: String,
}

impl Reconciler {
    /// Reconciles a deployment and returns the delay until the next reconcile.
    pub(crate) async fn reconcile(&self, key: &Key) -> Option<Duration> {
        let began = Instant::now();
        let result = self.try_reconcile(key).await;
        let failed = result.as_ref().err();
        let label = failed.map_or("Ok", |failed| failed.failure.label());
        self.telemetry
            .reconciled(label, began.elapsed().as_secs_f64());
        match result {
            Ok(None) => {
                self.forget(key);
                None
            }
            Ok(Some(after)) => {
                if let Some(known) = self.known().get_mut(key) {
                    known.failures = 0;
                }
                // Jitter, so that deployments are not resynced all at once or in step with other periodic work.
                let resync = self.resync.mul_f64(0.625 + 0.625 * rand::random::<f64>());
                Some(after.map_or(resync, |after| after.min(resync)))
            }
            Err(Failed { failure, due }) => {
                let wait = self.failed(key, &failure);
                Some(failure.sooner(wait, due))
            }
        }
    }

    /// Handles a reconcile that panicked: the bug affects one deployment, the others continue.
    pub(crate) fn panicked(&self, key: &Key) -> Duration {
        self.telemetry.reconciled("Panic", 0.0);
        self.failed(key, &Failure::Server("a reconcile panicked".to_owned()))
    }

    /// Whether a Pod of the deployment was created when its certificate Secret had another name.
    fn mounts_old_certificates(&self, deployment: &InferenceDeployment) -> bool {
        let state = self.notifier.cache.lock();
        let uid = deployment.uid().unwrap_or_default();
        let mut pods = state.pods_of(&uid);
        pods.any(|row| row.value.mounts_old_certificates)
    }

    /// Returns `Ok(None)` if the deployment is gone, otherwise the longest delay until the next reconcile, if any.
    async fn try_reconcile(&self, key: &Key) -> Result<Option<Option<Duration>>, Failed> {
        let read = {
            let state = self.notifier.cache.lock();
            state.deployments.get(key).map(|row| Arc::clone(&row.value))
        };
        let deployment = match read.as_deref() {
            None => return Ok(None),
            Some(Err(unreadable)) => {
                self.ask_nobody(key);
                self.refuse_unreadable(key, unreadable).await?;
                return Ok(Some(None));
            }
            Some(Ok(packed)) => match packed.get() {
                Ok(deployment) => Arc::new(deployment),
                Err(error) => return Err(Failure::Invalid(error.to_string()).into()),
            },
        };
        self.remember(key, &deployment);
        if deployment.metadata.deletion_timestamp.is_some() {
            // The garbage collector removes its dependents.
            self.ask_nobody(key);
            return Ok(Some(None));
        }
        if let Some(wait) = left_to_others(&self.settings, &deployment, Timestamp::now()) {
            self.telemetry.deployments.forget(key);
            self.ask_nobody(key);
            return Ok(Some(wait));
        }
        if let Some(wait) = self.leave_to_newer(key, &deployment).await? {
            self.ask_nobody(key);
            return Ok(Some(Some(wait)));
        }
        self.serve(key, &deployment).await.map(Some)
    }

    /// Nobody ends workers for a deployment that is not decided about.
    fn ask_nobody(&self, key: &Key) {
        let now = Timestamp::now();
        self.notifier.change(|state| {
            state.awaits(key, &BTreeSet::new());
            state.ask(key, 0, &[], now)
        });
    }

    /// Leaves a deployment alone if a newer operator has planned it in a way that this one cannot read: only its
    /// certificates are renewed, and the status says so. Returns the delay until the next reconcile in that case.
    async fn leave_to_newer(
        &self,
        key: &Key,
        deployment: &InferenceDeployment,
    ) -> Result<Option<Duration>, Failure> {
        let uid = deployment.uid().unwrap_or_default();
        let Some((plan, why)) = self.notifier.cache.lock().unreadable_plan(&uid) else {
            return Ok(None);
        };
        let now = Timestamp::now();
        let told = self.reporting.leave(deployment, &plan, &why, now).await;
        let old = self.mounts_old_certificates(deployment);
        let issued = self.authority.deployment(deployment, old, now).await?;
        let figures = &self.telemetry.deployments;
        figures.certified(key, issued.until);
        figures.reported(key, Some(&deployment.spec), &told?);
        let mut again = EarliestRequeue::default();
        again.at(now, issued.again);
        Ok(again.0)
    }

    async fn serve(
        &self,
        key: &Key,
        deployment: &Arc<InferenceDeployment>,
    ) -> Result<Option<Duration>, Failed> {
        let now = Timestamp::now();
        let mut again = EarliestRequeue::default();

        // Dereference: inputs that the caches do not hold.
        let (outside, uncertified) = self.look_outside(key, deployment, now, &mut again).await;

        // Decide: pure, from the caches and those inputs.
        let (observed, decision) = self.decide(deployment, now, &outside).await;
        again.after(decision.requeue_after);
        log_turn(key, &observed, &decision);
        let (priority, asks) = (deployment.spec.priority, &decision.asks);
        self.notifier.change(|state| {
            state.awaits(key, &decision.awaits);
            state.ask(key, priority, asks, now)
        });
        if let Some(agents) = &self.agents {
            let source = &deployment.spec.model.source;
            let commit = decision.fetch_commit.as_deref();
            agents.want(key, source, &decision.fetch_on, commit);
        }

        // Report first what the writes are about to end.
        let current = observed.deployment.status.as_ref();
        let first = told_first(current, &decision);
        let mut told = Ok(None);
        if let Some(first) = first {
            let metadata = &observed.deployment.metadata;
            told = match self.reporting.status(metadata, current, &first).await {
                // The decision was made from something old.
                Err(failure @ (Failure::Conflict(_) | Failure::NotFound(_))) => {
                    return Err(Failed::again(failure, again.0));
                }
                // A status that cannot be written must not keep the service from being healed.
                written => written.map(|_| Some(first)),
            };
        }

        // Apply.
        let applied = self.apply(key, &observed, &decision).await;

        // Report.
        let outcome = applied.and(uncertified.map_or(Ok(()), Err));
        let (first, told) = match told {
            Ok(first) => (first, Ok(())),
            Err(failure) => (None, Err(failure)),
        };
        let reported = self.report(&observed, decision, outcome, first, now);
        let reported = reported.await.and(told).map(|()| again.0);
        reported.map_err(|failure| Failed::again(failure, again.0))
    }

    /// Collects the inputs that are not in the caches, and the error if no certificate could be issued: no Pod starts
    /// without one, but everything else is still reported and done.
    async fn look_outside(
        &self,
        key: &Key,
        deployment: &Arc<InferenceDeployment>,
        now: Timestamp,
        again: &mut EarliestRequeue,
    ) -> (UncachedState, Option<Failure>) {
        self.measures
            .loads
            .follow(key, follows_load(&deployment.spec));
        let mut outside = UncachedState {
            measured: self.measures.measured(key),
            demand: self.measures.loads.demand(key, tokio::time::Instant::now()),
            idle_s: self.measures.loads.idle_s(tokio::time::Instant::now()),
            placements: self.measures.placements(key),
            ..UncachedState::default()
        };
        let model = deployment.spec.model.source.store_key(&key.namespace);
        if let (Some(agents), Some(model)) = (&self.agents, model) {
            outside.fetches = agents.fetches(&model);
            outside.fetched_commit = agents.commit(&model);
        }
        if !serves(&self.settings, &key.namespace) {
            return (outside, None);
        }
        let old = self.mounts_old_certificates(deployment);
        let uncertified = match self.authority.deployment(deployment, old, now).await {
            Ok(issued) => {
                self.telemetry.deployments.certified(key, issued.until);
                outside.certificate = Some(issued.serial);
                again.at(now, issued.again);
                None
            }
            Err(error) => Some(Failure::from(error)),
        };
        let hanging = self.dereferencer.ask_about_hanging_pods(deployment, now);
        again.after(hanging.await);
        outside.claim_modes = self.dereferencer.claim_modes(deployment).await;
        (outside, uncertified)
    }

    /// Writes the decision; the reservation of a rejected plan is released.
    async fn apply(
        &self,
        key: &Key,
        observed: &Observed,
        decision: &Decision,
    ) -> Result<(), Failure> {
        let uid = observed.deployment.metadata.uid.as_deref();
        let subject = Subject {
            namespace: &key.namespace,
            uid: uid.unwrap_or_default(),
        };
        let applied = self.applier.apply(subject, decision).await;
        if let Err(failure) = &applied
            && decision.create_plan.is_some()
            && is_refusal(failure)
        {
            self.notifier.change(|state| state.give_back(subject.uid));
        }
        applied
    }

    /// Decides; a new plan gets its reservation on the nodes before another deployment is planned, and so does the plan of workers
    /// that start after there were none.
    async fn decide(
        &self,
        deployment: &Arc<InferenceDeployment>,
        now: Timestamp,
        outside: &UncachedState,
    ) -> (Observed, Decision) {
        let observed = self.dereferencer.observe(deployment, now, outside);
        let decision = decide(&observed);
        let held_nothing = holds_nothing(deployment.status.as_ref());
        let starts_again =
            |decision: &Decision| held_nothing && !holds_nothing(Some(&decision.status));
        if decision.create_plan.is_none() && !starts_again(&decision) {
            return (observed, decision);
        }
        let _planning = self.planning.lock().await;
        let observed = self.dereferencer.observe(deployment, now, outside);
        let decision = decide(&observed);
        let uid = deployment.uid().unwrap_or_default();
        if let Some(plan) = &decision.create_plan {
            self.notifier.cache.lock().reserve(&uid, plan);
        }
        if starts_again(&decision) {
            self.notifier.cache.lock().take_again(&uid, now);
        }
        (observed, decision)
    }

    async fn report(
        &self,
        observed: &Observed,
        decision: Decision,
        outcome: Result<(), Failure>,
        told: Option<InferenceDeploymentStatus>,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let deployment = &observed.deployment;
        let current = told.as_ref().or(deployment.status.as_ref());
        let key = Key::new(
            &deployment.namespace().unwrap_or_default(),
            &deployment.name_any(),
        );
        let is_at_zero = decision.status.is_at_zero();
        self.measures.loads.note_zero(&key, is_at_zero);
        let waits = status::waits(&decision, deployment.spec.suspend);
        self.notifier.cache.lock().set_waiting(&key, waits);
        let figures = &self.telemetry.deployments;
        figures.planned(&key, &observed.plans);
        match outcome {
            Ok(()) => {
                let metadata = &deployment.metadata;
                figures.reported(&key, Some(&deployment.spec), &decision.status);
                self.reporting
                    .status(metadata, current, &decision.status)
                    .await?;
                self.reporting.events(deployment, &decision.events).await;
                Ok(())
            }
            Err(failure) if failure.needs_a_person() => {
                let generation = deployment.metadata.generation;
                let why = failure.to_string();
                let mut decided = decision.status;
                // A plan that was refused leaves its number to the next one.
                if let Some(plan) = &decision.create_plan
                    && !self.is_there(&key, plan)
                {
                    decided.plan = current.and_then(|current| current.plan.clone());
                }
                let status = undecided::with_refusal(decided, current, generation, &why, now);
                figures.reported(&key, Some(&deployment.spec), &status);
                self.reporting
                    .status(&deployment.metadata, current, &status)
                    .await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    fn is_there(&self, deployment: &Key, plan: &InferencePlan) -> bool {
        let key = Key::new(&deployment.namespace, &plan.name_any());
        self.notifier.cache.lock().plans.get(&key).is_some()
    }

    async fn refuse_unreadable(&self, key: &Key, unreadable: &Unreadable) -> Result<(), Failure> {
        let metadata = &unreadable.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        if metadata.deletion_timestamp.is_some() || !serves(&self.settings, namespace) {
            return Ok(());
        }
        let told = self
            .reporting
            .refuse(metadata, &unreadable.reason, Timestamp::now())
            .await?;
        self.telemetry.deployments.reported(key, None, &told);
        Ok(())
    }

    fn failed(&self, key: &Key, failure: &Failure) -> Duration {
        let failures = {
            let mut known = self.known();
            let known = known.entry(key.clone()).or_default();
            known.failures = known.failures.saturating_add(1);
            known.failures
        };
        self.telemetry.deployments.failed(key);
        let wait = failure.wait(failures, rand::random());
        let seconds = wait.as_secs_f64();
        if failure.needs_a_person() || failures > 3 {
            tracing::warn!(deployment = %key, failures, "{failure}; again in {seconds:.1} s");
        } else {
            tracing::debug!(deployment = %key, failures, "{failure}; again in {seconds:.1} s");
        }
        wait
    }

    /// Updates the state kept about a deployment; one that was recreated with the same name shares nothing with the
    /// old one.
    fn remember(&self, key: &Key, deployment: &InferenceDeployment) {
        let uid = deployment.uid().unwrap_or_default();
        let mut known = self.known();
        let known = known.entry(key.clone()).or_default();
        if known.uid != uid {
            if !known.uid.is_empty() {
                self.applier.forget(&known.uid);
                self.authority.forget(&key.namespace, &key.name);
                self.measures.forget(key);
                self.telemetry.deployments.forget(key);
            }
            known.uid = uid;
            known.failures = 0;
        }
    }

    fn forget(&self, key: &Key) {
        if let Some(known) = self.known().remove(key) {
            self.applier.forget(&known.uid);
        }
        self.authority.forget(&key.namespace, &key.name);
        self.measures.forget(key);
        self.telemetry.deployments.forget(key);
        if let Some(agents) = &self.agents {
            agents.want(key, &ModelSource::default(), &[], None);
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reconcile that failed.
struct Failed {
    failure: Failure,
    /// Longest delay until the next reconcile had it not failed: deadlines do not wait for a person to act.
    due: Option<Duration>,
}

impl Failed {
    fn again(failure: Failure, due: Option<Duration>) -> Self {
        Self { failure, due }
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self::again(failure, None)
    }
}

/// The earliest of several times for the next reconcile.
#[derive(Debug, Default)]
struct EarliestRequeue(Option<Duration>);

impl EarliestRequeue {
    fn after(&mut self, wait: Option<Duration>) {
        self.0 = [self.0, wait].into_iter().flatten().min();
    }

    fn at(&mut self, now: Timestamp, time: Timestamp) {
        let wait = Duration::try_from(time.duration_since(now)).unwrap_or_default();
        // Never immediately: what is due now was just done.
        self.after(Some(wait.max(Duration::from_secs(1))));
    }
}

/// Logs the turn's holder, which must not appear in the status: others than the holder's users can read it.
fn log_turn(key: &Key, observed: &Observed, decision: &Decision) {
    let current = observed.deployment.status.as_ref();
    let reason = |status| conditions::of(status, PROGRESSING).map(|it| it.reason.clone());
    let is_news = reason(current) != reason(Some(&decision.status));
    if let (true, true, Turn::After(holder) | Turn::HeldBack(holder)) =
        (decision.waits_for_turn, is_news, &observed.turn)
    {
        let failed = matches!(observed.turn, Turn::HeldBack(_));
        tracing::info!(deployment = %key, %holder, failed, "waits for its turn with the worker image");
    }
}

/// Whether a write certainly did not take effect.
fn is_refusal(failure: &Failure) -> bool {
    !matches!(failure, Failure::Server(_) | Failure::Network(_))
}
