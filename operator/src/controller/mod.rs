//! `hearth operator`: does with Pods what `hearth up` does with processes.
//!
//! - `cluster`: watches keep the cache current and fill the queue. [`reconcile`] takes one deployment through its
//!   stages: dereference → decide (pure: the crate `hearth-controller-core`) → apply → report.
//! - `services`, besides the reconciles: certificates, agents that measure nodes and fetch models, measurements by
//!   gateways, the Lease that elects one of several replicas, health and metrics.
//!
//! **Invariants**
//! - Only `apply`, `services` and `cluster` hold a client, and `cluster` writes nothing.
//! - A reconcile that changes nothing writes nothing.
//! - No Secret's data is kept; workers and agents never call the API server.

mod args;
mod reconcile;

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hearth_controller_core::observed::Settings;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::Api;
use kube::{Client, Resource};
use rustix::process::{Resource as Limited, Rlimit, getrlimit, setrlimit};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::apply::Applier;
use crate::apply::report::Reporting;
use crate::cluster::api::ApiClient;
use crate::cluster::cache::{self, Cache, CacheNotifier};
use crate::cluster::client;
use crate::cluster::dereference::Dereferencer;
use crate::cluster::failure::Failure;
use crate::cluster::queue::Queue;
use crate::cluster::watches::Watches;
use crate::environment::Environment;
use crate::services::agents::Agents;
use crate::services::authority::Authority;
use crate::services::cluster_cache::ClusterCache;
use crate::services::health::{self, HealthState};
use crate::services::lease::Candidate;
use crate::services::measure::Measures;
use crate::services::watch;
use crate::signals::ShutdownSignals;
use crate::telemetry::{self, Telemetry};

pub(crate) use self::args::OperatorArgs;
use self::reconcile::Reconciler;

/// Threads of the runtime: the operator mostly waits.
const THREADS: usize = 2;
/// Grace period for running reconciles at shutdown.
const GRACE: Duration = Duration::from_secs(6);
/// Timeout of one request for the operator's own Deployment.
const OWNER_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before that request is retried.
const OWNER_AGAIN: Duration = Duration::from_secs(2);
/// Interval at which expired reservations are released.
const HOUSEKEEPING: Duration = Duration::from_secs(30);

/// Runs the operator until it is told to stop.
pub(crate) fn run(args: &OperatorArgs, environment: &Environment) -> anyhow::Result<ExitCode> {
    telemetry::start_log(&args.log, args.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(4)
        .enable_all()
        .build()?;
    let code = runtime.block_on(operate(args, environment))?;
    // Watches and pooled connections need no graceful shutdown.
    runtime.shutdown_background();
    Ok(code)
}

/// Dependencies shared by all parts.
struct Parts {
    client: Client,
    settings: Arc<Settings>,
    identity: String,
    owner: Option<OwnerReference>,
    cache: ClusterCache,
    authority: Arc<Authority>,
    /// Where the metrics find the agents.
    agents: Arc<OnceLock<Arc<Agents<ClusterCache>>>>,
}

async fn operate(args: &OperatorArgs, environment: &Environment) -> anyhow::Result<ExitCode> {
    // As PID 1 of a container, a process ignores signals that it has no handler for.
    let mut signals = ShutdownSignals::new()?;
    let telemetry = Arc::new(Telemetry::new());
    let client = client::connect(Arc::clone(&telemetry)).await?;
    let namespace = environment.pod_namespace.clone();
    let settings = Arc::new(args.settings(namespace));
    let cache = ClusterCache {
        cache: Arc::new(Cache::default()),
        queue: Arc::new(Queue::default()),
        telemetry,
    };
    let agents = Arc::new(OnceLock::new());
    let state = HealthState {
        telemetry: Arc::clone(&cache.telemetry),
        cache: Arc::clone(&cache.cache),
        queue: Arc::clone(&cache.queue),
        settings: Arc::clone(&settings),
        agents: Arc::clone(&agents),
    };
    allow_open_files();
    let _health = tokio::spawn(health::serve(args.listen, state).await?);
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        namespace = settings.operator_namespace,
        serving = if settings.namespaces.is_empty() {
            "all namespaces".to_owned()
        } else {
            settings.namespaces.join(",")
        },
        "hearth operator"
    );
    let work = async {
        let owner = owner(&client, &settings, args.operator_deployment.as_deref()).await;
        let authority = Authority::new(client.clone(), Arc::clone(&settings), owner.clone());
        let parts = Parts {
            identity: identity(args),
            authority: Arc::new(authority),
            client,
            settings,
            owner,
            cache,
            agents,
        };
        lead(args, parts, &mut signals).await
    };
    work.await
}

/// Keeps the caches warm, waits for the Lease, and works while holding it.
async fn lead(
    args: &OperatorArgs,
    parts: Parts,
    signals: &mut ShutdownSignals,
) -> anyhow::Result<ExitCode> {
    let notifier = CacheNotifier {
        cache: Arc::clone(&parts.cache.cache),
        queue: Arc::clone(&parts.cache.queue),
    };
    let authority = Arc::clone(&parts.authority);
    let forget = move |namespace: &str, deployment: &str| authority.forget(namespace, deployment);
    let watches = Watches::new(notifier.clone(), Arc::new(forget));
    let mut candidate = Candidate::new(
        parts.client.clone(),
        &parts.settings.operator_namespace,
        &parts.identity,
        parts.owner.clone(),
    );
    let telemetry = Arc::clone(&parts.cache.telemetry);
    let ready = async {
        let tasks = watches.start(&parts.client, &parts.settings).await;
        watches.wait_until_filled().await;
        telemetry.is_synced.store(true, Ordering::Relaxed);
        tracing::info!("the caches are filled");
        if args.leader_elect {
            candidate.acquire().await;
        }
        tasks
    };
    let _tasks = tokio::select! {
        tasks = ready => tasks,
        () = signals.wait() => return Ok(ExitCode::SUCCESS),
    };
    telemetry.is_leader.store(true, Ordering::Relaxed);
    let held = async {
        if args.leader_elect {
            candidate.hold().await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    let permits = Arc::new(Semaphore::new(args.concurrency as usize));
    let is_lost = tokio::select! {
        () = held => true,
        () = work(args, parts, notifier, Arc::clone(&permits)) => false,
        () = signals.wait() => false,
    };
    if is_lost {
        // Another replica may already be active: any further write could conflict with its writes.
        return Ok(ExitCode::FAILURE);
    }
    tracing::info!("ending");
    let all = permits.acquire_many(args.concurrency);
    if tokio::time::timeout(GRACE, all).await.is_err() {
        tracing::warn!("some reconciles did not end in {} s", GRACE.as_secs());
    }
    if args.leader_elect {
        candidate.release().await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reconciles deployments and runs the services besides.
async fn work(args: &OperatorArgs, parts: Parts, notifier: CacheNotifier, permits: Arc<Semaphore>) {
    let Parts {
        client,
        settings,
        identity,
        owner: _,
        cache,
        authority,
        agents: found,
    } = parts;
    let requests = ApiClient::new(client.clone());
    let agents = args.agents.then(|| {
        let directory = Arc::new(cache.clone());
        let agents = Agents::new(client.clone(), Arc::clone(&authority), directory, &settings);
        Arc::clone(found.get_or_init(|| Arc::new(agents)))
    });
    let measures = Arc::new(Measures::default());
    let reconciler = Arc::new(Reconciler {
        dereferencer: Dereferencer::new(client, Arc::clone(&cache.cache), Arc::clone(&settings)),
        applier: Applier::new(requests.clone(), notifier.clone()),
        reporting: Reporting::new(requests, notifier.clone(), &identity),
        authority: Arc::clone(&authority),
        agents: agents.clone(),
        measures: Arc::clone(&measures),
        telemetry: Arc::clone(&cache.telemetry),
        resync: args.resync(),
        planning: tokio::sync::Mutex::default(),
        known: std::sync::Mutex::default(),
        notifier: notifier.clone(),
        settings,
    });
    {
        let state = notifier.cache.lock();
        let keys = state.deployments.keys();
        keys.for_each(|key| notifier.queue.add(key.clone(), Duration::ZERO));
    }
    let agents = async {
        match &agents {
            Some(agents) => agents.run().await,
            None => std::future::pending().await,
        }
    };
    // Apart, so that gateways that have much to say hold up nothing but each other.
    let mut watching = JoinSet::new();
    let (watched, listed) = (Arc::clone(&measures), cache.clone());
    watching.spawn(async move { watch::run(&watched, &listed).await });
    tokio::join!(
        dispatch(&reconciler, &permits),
        keep_authority(&authority, &cache.telemetry),
        expire_reservations(&notifier),
        measures.run(&cache),
        agents,
        async {
            if let Some(Err(error)) = watching.join_next().await
                && let Ok(panic) = error.try_into_panic()
            {
                std::panic::resume_unwind(panic);
            }
        },
    );
}

/// Starts a reconcile for each deployment that is due, limited by the permits.
async fn dispatch(reconciler: &Arc<Reconciler>, permits: &Arc<Semaphore>) {
    loop {
        let Ok(permit) = Arc::clone(permits).acquire_owned().await else {
            return;
        };
        let key = reconciler.notifier.queue.take().await;
        let reconciler = Arc::clone(reconciler);
        tokio::spawn(async move {
            let reconcile = {
                let (reconciler, key) = (Arc::clone(&reconciler), key.clone());
                tokio::spawn(async move { reconciler.reconcile(&key).await })
            };
            let again = match reconcile.await {
                Ok(again) => again,
                Err(_panic) => Some(reconciler.panicked(&key)),
            };
            reconciler.notifier.queue.done(&key);
            if let Some(after) = again {
                reconciler.notifier.queue.add(key, after);
            }
            drop(permit);
        });
    }
}

async fn keep_authority(authority: &Authority, telemetry: &Telemetry) {
    let mut told = String::new();
    loop {
        let now = Timestamp::now();
        let wait = match authority.keep(now).await {
            Ok(again) => {
                told.clear();
                if let Some(until) = authority.until().await {
                    let seconds = until.as_second();
                    telemetry.authority_s.store(seconds, Ordering::Relaxed);
                }
                Duration::try_from(again.duration_since(now)).unwrap_or_default()
            }
            Err(error) => {
                let words = error.to_string();
                if told != words {
                    tracing::warn!("the certificate authority: {words}");
                    told = words;
                }
                Duration::from_secs(5)
            }
        };
        let wait = wait.clamp(Duration::from_secs(1), Duration::from_secs(3600));
        tokio::time::sleep(wait).await;
    }
}

async fn expire_reservations(notifier: &CacheNotifier) {
    loop {
        tokio::time::sleep(HOUSEKEEPING).await;
        notifier.change(cache::State::expire_reservations);
    }
}

/// Reference to the operator's own Deployment, so that deleting it also deletes what the operator keeps for itself.
/// Retried until it is known: objects created without an owner would stay forever.
async fn owner(client: &Client, settings: &Settings, name: Option<&str>) -> Option<OwnerReference> {
    let name = name?;
    let api: Api<Deployment> = Api::namespaced(client.clone(), &settings.operator_namespace);
    loop {
        let why = match tokio::time::timeout(OWNER_TIMEOUT, api.get(name)).await {
            Ok(Ok(deployment)) => return deployment.owner_ref(&()),
            Ok(Err(error)) => match Failure::from(&error) {
                Failure::NotFound(why) => {
                    tracing::warn!("there is no Deployment {name}: {why}");
                    return None;
                }
                other => other.to_string(),
            },
            Err(_) => format!("no answer in {} s", OWNER_TIMEOUT.as_secs()),
        };
        tracing::warn!("the operator's Deployment {name} cannot be read: {why}; asked again");
        tokio::time::sleep(OWNER_AGAIN).await;
    }
}

/// Raises the limit of open files to what the machine allows: each gateway whose deployment follows its load takes one.
fn allow_open_files() {
    let limit = getrlimit(Limited::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Limited::Nofile, raised) {
        tracing::warn!(%error, limit.current, "the limit of open files stays");
    }
}

/// Returns this replica's name.
fn identity(args: &OperatorArgs) -> String {
    let host = || {
        let name = rustix::system::uname();
        let name = name.nodename().to_string_lossy().into_owned();
        format!("{name}-{}", std::process::id())
    };
    args.identity.clone().unwrap_or_else(host)
}
