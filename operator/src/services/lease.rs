//! Leader election among replicas: one works, the holder of a Lease, as client-go does it.
//!
//! Time is measured by this process alone: another's claim counts from when its last renewal was *seen*, so clocks may
//! differ. Each write carries the version that was read, so one of two concurrent claims fails. A holder that could
//! not renew in time stops working before another may begin.

use std::time::Duration;

use hearth_controller_core::names::{APP, FIELD_MANAGER, LABEL_APP, LABEL_MANAGED_BY, MANAGER};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::time::Instant;

use crate::cluster::failure::Failure;

/// Name of the Lease.
pub(crate) const LEASE: &str = "hearth-operator";
/// Time after which a claim without renewal has expired.
const DURATION: Duration = Duration::from_secs(15);
/// Time after which a holder that could not renew stops.
const GIVE_UP: Duration = Duration::from_secs(10);
/// Time between attempts.
const RETRY: Duration = Duration::from_secs(2);
/// Timeout of one attempt.
const WAIT: Duration = Duration::from_secs(4);

/// A candidate for the Lease.
pub(crate) struct Candidate {
    api: Api<Lease>,
    identity: String,
    owner: Option<OwnerReference>,
    seen: Option<Seen>,
}

/// Another replica's claim, and when its last renewal was seen.
struct Seen {
    holder: String,
    renewed: Option<MicroTime>,
    duration: Duration,
    at: Instant,
}

impl Candidate {
    /// Creates a candidate named `identity`.
    pub(crate) fn new(
        client: Client,
        namespace: &str,
        identity: &str,
        owner: Option<OwnerReference>,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            owner,
            seen: None,
        }
    }

    /// Waits until the Lease is held.
    pub(crate) async fn acquire(&mut self) {
        let mut told = String::new();
        loop {
            match self.attempt().await {
                Ok(true) => {
                    tracing::info!(identity = self.identity, "leading");
                    return;
                }
                Ok(false) => {
                    let holder = self.seen.as_ref().map_or("", |seen| seen.holder.as_str());
                    if told != holder {
                        tracing::info!(holder, "waiting: another replica leads");
                        told = holder.to_owned();
                    }
                }
                Err(failure) => {
                    let failure = failure.to_string();
                    if told != failure {
                        tracing::warn!("the Lease {LEASE} cannot be acquired: {failure}");
                        told = failure;
                    }
                }
            }
            tokio::time::sleep(RETRY.mul_f64(0.8 + 0.4 * rand::random::<f64>())).await;
        }
    }

    /// Renews the Lease until it is lost.
    pub(crate) async fn hold(&mut self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RETRY).await;
            let began = Instant::now();
            match self.attempt().await {
                Ok(true) => renewed = began,
                Ok(false) => {
                    tracing::error!("the Lease {LEASE} was taken by another replica");
                    return;
                }
                Err(failure) => {
                    tracing::warn!("the Lease {LEASE} could not be renewed: {failure}");
                }
            }
            if renewed.elapsed() > GIVE_UP {
                tracing::error!(
                    "the Lease {LEASE} could not be renewed for {} s",
                    GIVE_UP.as_secs()
                );
                return;
            }
        }
    }

    /// Releases the Lease, so that another replica need not wait.
    pub(crate) async fn release(&mut self) {
        let release = async {
            let mut lease = self.api.get(LEASE).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(&*self.identity) {
                return Ok(());
            }
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(Timestamp::now()));
            lease.metadata.managed_fields = None;
            self.api.replace(LEASE, &parameters(), &lease).await?;
            tracing::info!("the Lease {LEASE} is given back");
            Ok::<(), kube::Error>(())
        };
        match tokio::time::timeout(WAIT, release).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(
                "the Lease {LEASE} could not be given back: {}",
                Failure::from(&error)
            ),
            Err(_) => tracing::warn!("the Lease {LEASE} could not be given back in time"),
        }
    }

    /// Makes one attempt to take or renew the Lease. Returns whether it is held.
    async fn attempt(&mut self) -> Result<bool, Failure> {
        match tokio::time::timeout(WAIT, self.claim()).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Network(format!(
                "no answer in {} s",
                WAIT.as_secs()
            ))),
        }
    }

    async fn claim(&mut self) -> Result<bool, Failure> {
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.api.get_opt(LEASE).await? else {
            let lease = self.first(now);
            return match self.api.create(&parameters(), &lease).await {
                Ok(_) => Ok(true),
                Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
                Err(error) => Err(error.into()),
            };
        };
        let spec = lease.spec.get_or_insert_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.identity {
            if !holder.is_empty() && self.is_alive(&holder, spec) {
                return Ok(false);
            }
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0) + 1);
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = Some(DURATION.as_secs() as i32);
        spec.renew_time = Some(now);
        lease.metadata.managed_fields = None;
        match self.api.replace(LEASE, &parameters(), &lease).await {
            Ok(_) => Ok(true),
            // Someone else wrote in between: the next attempt reads the holder.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                Err(Failure::Conflict("written by another".to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether another replica's claim is still valid.
    fn is_alive(&mut self, holder: &str, spec: &LeaseSpec) -> bool {
        let duration = spec.lease_duration_seconds.unwrap_or(0).clamp(1, 600);
        let duration = Duration::from_secs(duration.unsigned_abs().into());
        let is_news = self
            .seen
            .as_ref()
            .is_none_or(|seen| seen.holder != holder || seen.renewed != spec.renew_time);
        if is_news {
            self.seen = Some(Seen {
                holder: holder.to_owned(),
                renewed: spec.renew_time.clone(),
                duration,
                at: Instant::now(),
            });
        }
        self.seen
            .as_ref()
            .is_some_and(|seen| seen.at.elapsed() < seen.duration)
    }

    fn first(&self, now: MicroTime) -> Lease {
        Lease {
            metadata: ObjectMeta {
                name: Some(LEASE.to_owned()),
                labels: Some(
                    [(LABEL_APP, APP), (LABEL_MANAGED_BY, MANAGER)]
                        .map(|(name, value)| (name.to_owned(), value.to_owned()))
                        .into(),
                ),
                owner_references: self.owner.clone().map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(DURATION.as_secs() as i32),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                lease_transitions: Some(0),
                ..LeaseSpec::default()
            }),
        }
    }
}

fn parameters() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}
