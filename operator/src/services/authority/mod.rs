//! Small certificate authority in the operator: gateway, workers, agents and operator authenticate each other through
//! it.
//!
//! The authority is stored in the Secret `hearth-ca` of the operator's namespace. Each deployment has a certificate in
//! its Secret `NAME-hearth-certificates`. All agents start with the one in `hearth-agent-tls`, which proves nothing;
//! each is then issued its own, and neither that one nor the operator's own is ever stored. [`due`] decides which
//! actions are due when, [`issue`] creates and reads certificates, [`stored`] maps them to Secrets; this file holds
//! the client. Only the leader uses it.

mod due;
mod error;
#[cfg(test)]
pub(crate) mod fake;
mod issue;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use due::{AUTHORITY_LIFETIME, AuthorityDue, LeafAction, LeafWanted, authority_due, leaf_due};
use hearth_controller_core::names::{
    AGENT_TLS_NAME, FIELD_MANAGER, OPERATOR_TLS_NAME, agent_tls_name, certificates_secret,
    link_tls_name, old_certificates_secret,
};
use hearth_controller_core::observed::Settings;
use hearth_crds::{InferenceDeployment, tls_name};
use hearth_transport::{Tls, TlsNames};
use issue::{Facts, Pair, Usage, public_key_of};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Resource, ResourceExt};
use stored::{Keys, StoredLeaf, is_ours};

pub(crate) use error::AuthorityError;

/// Secret of the authority, in the operator's namespace.
pub(crate) const AUTHORITY_SECRET: &str = "hearth-ca";
/// Secret of the agents' certificate, in the operator's namespace.
pub(crate) const AGENT_SECRET: &str = "hearth-agent-tls";

/// Interval at which a Secret is checked, in case someone removed it.
const LOOK_AGAIN: Duration = Duration::from_secs(5 * 60);
/// Validity period of a certificate for the measurement of a link: clocks of nodes differ.
const LINK_LIFETIME: Duration = Duration::from_secs(10 * 60);
/// Attempts to write an object that another replica writes concurrently.
const ATTEMPTS: usize = 5;

/// The newest certificate of a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Issued {
    /// Its serial number, for `Observed::certificate`.
    pub(crate) serial: String,
    /// End of its validity.
    pub(crate) until: Timestamp,
    /// Time by which the certificate must be checked again.
    pub(crate) again: Timestamp,
}

impl Issued {
    fn of(facts: &Facts, again: Timestamp) -> Self {
        Self {
            serial: facts.serial.clone(),
            until: facts.not_after,
            again,
        }
    }
}

/// Issuer of certificates, which also renews them.
pub(crate) struct Authority {
    client: Client,
    settings: Arc<Settings>,
    /// The operator's Deployment, so that its deletion also deletes the agents' certificate, and the authority unless
    /// that is to be kept; `None` if it could not be found.
    owner: Option<OwnerReference>,
    /// The authority's keys as last read; `None` before the first read.
    keys: tokio::sync::Mutex<Option<Arc<Keys>>>,
    /// State of deployments' Secrets, by namespace and name.
    known: Mutex<BTreeMap<String, Known>>,
    operator: Mutex<Option<Own>>,
}

/// A Secret that was in order when it was last checked.
#[derive(Clone)]
struct Known {
    owner_uid: Option<String>,
    issued: Issued,
    old: Old,
}

/// State of a Secret under the former name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// No Secret of ours exists.
    Gone,
    /// It is kept current for the Pods that mount it.
    Mounted,
}

/// A certificate for the agent of one node, handed over and not stored.
pub(crate) struct AgentCertificate {
    /// PEM.
    pub(crate) certificate: String,
    /// The bundle when it was issued: a different bundle requires a new certificate.
    pub(crate) bundle: String,
    /// Time at which the next one is due.
    pub(crate) renew: Timestamp,
}

/// The operator's own certificate.
struct Own {
    tls: Tls,
    renew: Timestamp,
    bundle: String,
}

/// A Secret with certificates that should exist.
struct Wanted {
    namespace: String,
    secret: String,
    /// Its component label.
    component: &'static str,
    deployment: Option<String>,
    /// DNS name in the certificate.
    name: String,
    usage: Usage,
    owner: Option<OwnerReference>,
}

impl Wanted {
    /// Checks that an existing Secret is ours. A deployment's Secret is recognised by the uid of its owner, whatever
    /// its name and labels; the operator's own Secrets are in its own namespace.
    fn check_owner(&self, secret: &Secret) -> Result<(), AuthorityError> {
        let path = || format!("{}/{}", self.namespace, self.secret);
        let Some(owner) = self.owner.as_ref().filter(|_| self.deployment.is_some()) else {
            return match is_ours(secret) {
                true => Ok(()),
                false => Err(AuthorityError::Taken(path())),
            };
        };
        let owners = secret.metadata.owner_references.iter().flatten();
        match owners
            .into_iter()
            .find(|found| found.controller == Some(true))
        {
            Some(found) if found.uid == owner.uid => Ok(()),
            Some(found) if found.kind == owner.kind && found.name == owner.name => {
                Err(AuthorityError::Going(path()))
            }
            _ => Err(AuthorityError::Taken(path())),
        }
    }
}

impl Authority {
    /// Creates the authority without reading anything.
    pub(crate) fn new(
        client: Client,
        settings: Arc<Settings>,
        owner: Option<OwnerReference>,
    ) -> Self {
        Self {
            client,
            settings,
            owner,
            keys: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            operator: Mutex::default(),
        }
    }

    /// Loads or creates the authority, carries out the action due for it, and maintains the agents' certificate. To be
    /// called at startup, and again no later than the time it returns.
    pub(crate) async fn keep(&self, now: Timestamp) -> Result<Timestamp, AuthorityError> {
        let again = self.load(now).await?;
        let agents = Wanted {
            namespace: self.settings.operator_namespace.clone(),
            secret: AGENT_SECRET.to_owned(),
            component: "agent",
            deployment: None,
            name: AGENT_TLS_NAME.to_owned(),
            usage: Usage::Server,
            owner: self.owner.clone(),
        };
        let issued = self.ensure(&agents, now).await?;
        Ok(again.min(issued.again))
    }

    /// Returns the deployment's newest certificate, issuing or renewing it if due. With `old_is_mounted`, Pods of it
    /// mount the Secret under its former name, which is kept current for them, and removed after the last of them.
    pub(crate) async fn deployment(
        &self,
        deployment: &InferenceDeployment,
        old_is_mounted: bool,
        now: Timestamp,
    ) -> Result<Issued, AuthorityError> {
        let (name, namespace) = (
            deployment.name_any(),
            deployment.namespace().unwrap_or_default(),
        );
        let key = format!("{namespace}/{name}");
        let uid = deployment.uid();
        let known = self.known().get(&key).cloned();
        let known = known.filter(|known| known.owner_uid == uid);
        if let Some(known) = &known
            && (known.old == Old::Mounted) == old_is_mounted
            && now < known.issued.again
        {
            return Ok(known.issued.clone());
        }
        let wanted = Wanted {
            secret: certificates_secret(&name),
            component: "tls",
            name: tls_name(&name, &namespace),
            usage: Usage::Both,
            owner: deployment.controller_owner_ref(&()),
            namespace,
            deployment: Some(name.clone()),
        };
        let mut issued = self.ensure(&wanted, now).await?;
        let look = now.checked_add(LOOK_AGAIN).unwrap_or(Timestamp::MAX);
        issued.again = issued.again.min(look);
        let before = Wanted {
            secret: old_certificates_secret(&name),
            ..wanted
        };
        let old = match known.map(|known| known.old) {
            _ if old_is_mounted => {
                match self.ensure(&before, now).await {
                    Ok(before) => issued.again = issued.again.min(before.again),
                    // It now belongs to someone else: those Pods continue with what they have read.
                    Err(AuthorityError::Taken(_) | AuthorityError::Going(_)) => {}
                    Err(error) => return Err(error),
                }
                Old::Mounted
            }
            Some(Old::Gone) => Old::Gone,
            Some(Old::Mounted) | None => {
                self.remove(&before).await?;
                Old::Gone
            }
        };
        let known = Known {
            owner_uid: uid,
            issued: issued.clone(),
            old,
        };
        self.known().insert(key, known);
        Ok(issued)
    }

    /// Issues a certificate for the agent of a node, given the agent's public key as PEM; it is not stored.
    pub(crate) async fn agent(
        &self,
        node: &str,
        public_key: &str,
        now: Timestamp,
    ) -> Result<AgentCertificate, AuthorityError> {
        let keys = self.keys(now).await?;
        let lifetime = self.settings.certificate_lifetime;
        let name = agent_tls_name(node);
        let key = public_key_of(public_key)?;
        let certificate = keys
            .signing
            .sign(&key, &name, Usage::Server, now, lifetime)?;
        Ok(AgentCertificate {
            certificate,
            bundle: keys.bundle(),
            renew: now.checked_add(lifetime * 2 / 3).unwrap_or(Timestamp::MAX),
        })
    }

    /// Issues a certificate with which the agent of a node takes part in the measurement of one link, or gives or takes a
    /// model, given its public key as PEM: for both ends of a connection, and for minutes. It is not stored.
    pub(crate) async fn link(
        &self,
        node: &str,
        public_key: &str,
        now: Timestamp,
    ) -> Result<String, AuthorityError> {
        let keys = self.keys(now).await?;
        let key = public_key_of(public_key)?;
        let name = link_tls_name(node);
        keys.signing
            .sign(&key, &name, Usage::Both, now, LINK_LIFETIME)
    }

    /// Returns the bundle of currently trusted authorities: see [`AgentCertificate::bundle`].
    pub(crate) async fn bundle(&self, now: Timestamp) -> Result<String, AuthorityError> {
        Ok(self.keys(now).await?.bundle())
    }

    /// End of the validity of the authority that signs; `None` before it is known.
    pub(crate) async fn until(&self) -> Option<Timestamp> {
        let keys = self.keys.lock().await;
        keys.as_ref().map(|keys| keys.signing.facts.not_after)
    }

    /// Forgets a deployment that is gone.
    pub(crate) fn forget(&self, namespace: &str, name: &str) {
        self.known().remove(&format!("{namespace}/{name}"));
    }

    /// Returns the operator's own certificate as a client of agents; clones of it follow later renewals.
    pub(crate) async fn operator(&self, now: Timestamp) -> Result<Tls, AuthorityError> {
        let keys = self.keys(now).await?;
        let bundle = keys.bundle();
        let mut own = self.operator.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = &*own
            && now < own.renew
            && own.bundle == bundle
        {
            return Ok(own.tls.clone());
        }
        let lifetime = self.settings.certificate_lifetime;
        let pair = keys
            .signing
            .issue(OPERATOR_TLS_NAME, Usage::Both, now, lifetime)?;
        let tls = match own.take() {
            Some(own) => {
                own.tls.replace(&pair.certificate, &pair.key, &bundle)?;
                own.tls
            }
            None => {
                let names = TlsNames {
                    server: Some(AGENT_TLS_NAME.to_owned()),
                    clients: Vec::new(),
                };
                Tls::from_pem(&pair.certificate, &pair.key, &bundle, &names)?
            }
        };
        let renew = now.checked_add(lifetime * 2 / 3).unwrap_or(Timestamp::MAX);
        *own = Some(Own {
            tls: tls.clone(),
            renew,
            bundle,
        });
        Ok(tls)
    }

    async fn keys(&self, now: Timestamp) -> Result<Arc<Keys>, AuthorityError> {
        let keys = self.keys.lock().await.clone();
        if let Some(keys) = keys {
            return Ok(keys);
        }
        self.load(now).await?;
        let keys = self.keys.lock().await.clone();
        keys.ok_or_else(|| AuthorityError::Spoilt(self.authority_path()))
    }

    /// Reads the authority's Secret and carries out the action due. If another replica was faster, its result is read.
    async fn load(&self, now: Timestamp) -> Result<Timestamp, AuthorityError> {
        let mut held = self.keys.lock().await;
        let api = self.secrets(&self.settings.operator_namespace);
        let failed = |source| self.failed(&self.authority_path(), source);
        for _ in 0..ATTEMPTS {
            let Some(secret) = api.get_opt(AUTHORITY_SECRET).await.map_err(failed)? else {
                // Removing the Secret of a running operator must not make Pods distrust each other.
                let keys = match held.take() {
                    Some(keys) => Arc::unwrap_or_clone(keys),
                    None => Keys::new(now)?,
                };
                let secret = keys.secret(self.authority_metadata(), None);
                match api.create(&PostParams::default(), &secret).await {
                    Ok(_) => *held = Some(Arc::new(keys)),
                    Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                    Err(error) => return Err(failed(error)),
                }
                continue;
            };
            let path = self.authority_path();
            let keys = Keys::read(&secret).ok_or(AuthorityError::Spoilt(path))?;
            let due = authority_due(keys.times(), self.settings.certificate_lifetime, now);
            let owners = self.authority_owner().map(|owner| vec![owner]);
            let is_owned = secret.metadata.owner_references.is_some() == owners.is_some();
            if let (AuthorityDue::Nothing(again), true) = (due, is_owned) {
                *held = Some(Arc::new(keys));
                return Ok(again);
            }
            let keys = keys.after(due, now)?;
            tracing::info!(?due, "the certificate authority changes");
            let mut metadata = secret.metadata;
            metadata.managed_fields = None;
            metadata.owner_references = owners;
            let secret = keys.secret(metadata, secret.immutable);
            match api
                .replace(AUTHORITY_SECRET, &PostParams::default(), &secret)
                .await
            {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Err(AuthorityError::Contended(self.authority_path()))
    }

    /// Brings a Secret with certificates into its desired state.
    async fn ensure(&self, wanted: &Wanted, now: Timestamp) -> Result<Issued, AuthorityError> {
        let keys = self.keys(now).await?;
        let api = self.secrets(&wanted.namespace);
        let path = format!("{}/{}", wanted.namespace, wanted.secret);
        let failed = |error| self.failed(&path, error);
        let mut found = api.get_opt(&wanted.secret).await.map_err(failed)?;
        let trusted = keys.trusted();
        let bundle = keys.bundle();
        let lifetime = self.settings.certificate_lifetime;
        // At most: another replica is faster, a new authority becomes trusted, then it signs.
        for _ in 0..ATTEMPTS {
            found
                .as_ref()
                .map_or(Ok(()), |found| wanted.check_owner(found))?;
            let stored = found.as_ref().and_then(StoredLeaf::read);
            let due = leaf_due(
                stored.as_ref().map(|stored| &stored.leaf),
                LeafWanted {
                    name: &wanted.name,
                    usage: wanted.usage,
                    signing: &keys.signing.facts,
                    trusted: &trusted,
                    bundle: &bundle,
                    lifetime,
                },
                now,
            );
            let pair = match (due, &stored) {
                (LeafAction::Nothing(again), Some(stored)) => {
                    return Ok(Issued::of(&stored.leaf.facts, again));
                }
                (LeafAction::Trust, Some(stored)) => stored.pair.clone(),
                _ => keys
                    .signing
                    .issue(&wanted.name, wanted.usage, now, lifetime)?,
            };
            let next = StoredLeaf::following(stored.as_ref(), pair, &bundle, now);
            let mut metadata = self.leaf_metadata(wanted);
            // The uid prevents overwriting another Secret in its place.
            metadata.uid = found.as_ref().and_then(ResourceExt::uid);
            let secret = next.secret(metadata);
            let written = match &found {
                Some(_) => {
                    let parameters = PatchParams::apply(FIELD_MANAGER).force();
                    let patch = Patch::Apply(&secret);
                    api.patch(&wanted.secret, &parameters, &patch).await
                }
                None => {
                    let parameters = PostParams {
                        field_manager: Some(FIELD_MANAGER.to_owned()),
                        ..PostParams::default()
                    };
                    api.create(&parameters, &secret).await
                }
            };
            found = match written {
                Ok(written) => {
                    let serial = next.leaf.facts.serial;
                    tracing::info!(secret = path, ?due, serial, "certificate written");
                    Some(written)
                }
                Err(kube::Error::Api(status))
                    if status.is_conflict() || status.is_already_exists() =>
                {
                    api.get_opt(&wanted.secret).await.map_err(failed)?
                }
                Err(error) => return Err(failed(error)),
            };
        }
        Err(AuthorityError::Contended(path))
    }

    /// Removes a Secret of ours that is no longer used; a Secret of someone else is left alone.
    async fn remove(&self, wanted: &Wanted) -> Result<(), AuthorityError> {
        let api = self.secrets(&wanted.namespace);
        let path = format!("{}/{}", wanted.namespace, wanted.secret);
        let failed = |error| self.failed(&path, error);
        let found = api.get_metadata_opt(&wanted.secret).await.map_err(failed)?;
        let Some(found) = found.map(|found| Secret {
            metadata: found.metadata,
            ..Secret::default()
        }) else {
            return Ok(());
        };
        if wanted.check_owner(&found).is_err() {
            return Ok(());
        }
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: found.uid(),
                ..Preconditions::default()
            }),
            ..DeleteParams::default()
        };
        match api.delete(&wanted.secret, &parameters).await {
            Ok(_) => tracing::info!(secret = path, "certificates under the old name removed"),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            Err(error) => return Err(failed(error)),
        }
        Ok(())
    }

    fn secrets(&self, namespace: &str) -> Api<Secret> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn authority_path(&self) -> String {
        format!("{}/{AUTHORITY_SECRET}", self.settings.operator_namespace)
    }

    fn failed(&self, secret: &str, source: kube::Error) -> AuthorityError {
        AuthorityError::Api {
            secret: secret.to_owned(),
            source: Box::new(source),
        }
    }

    fn authority_metadata(&self) -> ObjectMeta {
        stored::metadata(
            &self.settings.operator_namespace,
            AUTHORITY_SECRET,
            "authority",
            None,
            self.authority_owner(),
        )
    }

    /// The authority's owner; without one it outlives the operator, and deployments that are kept trust the next
    /// operator too.
    fn authority_owner(&self) -> Option<OwnerReference> {
        self.owner
            .clone()
            .filter(|_| !self.settings.keeps_authority)
    }

    fn leaf_metadata(&self, wanted: &Wanted) -> ObjectMeta {
        stored::metadata(
            &wanted.namespace,
            &wanted.secret,
            wanted.component,
            wanted.deployment.as_deref(),
            wanted.owner.clone(),
        )
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys {
    /// Creates a first authority.
    fn new(now: Timestamp) -> Result<Self, AuthorityError> {
        Ok(Self {
            signing: Pair::authority(now, AUTHORITY_LIFETIME)?,
            next: None,
            old: None,
            promoted: None,
        })
    }

    /// Carries out the action due.
    fn after(mut self, due: AuthorityDue, now: Timestamp) -> Result<Self, AuthorityError> {
        match due {
            AuthorityDue::Nothing(_) => {}
            AuthorityDue::Announce => self.next = Some(Pair::authority(now, AUTHORITY_LIFETIME)?),
            AuthorityDue::Promote => {
                if let Some(next) = self.next.take() {
                    let old = std::mem::replace(&mut self.signing, next);
                    self.old = Some((old.certificate, old.facts));
                    self.promoted = Some(now);
                }
            }
            AuthorityDue::DropOld => (self.old, self.promoted) = (None, None),
            AuthorityDue::Replace => self = Self::new(now)?,
        }
        Ok(self)
    }
}
