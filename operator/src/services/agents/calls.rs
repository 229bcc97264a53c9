//! Calls to agents. All agents start with the same certificate, which identifies none of them; so the operator first
//! has an agent prove which Pod it is and gives it a certificate for its node, for a key that only the agent has. From
//! then on it talks to nothing else at that address.

use hearth_controller_core::names::{AGENT_TLS_NAME, agent_tls_name};
use hearth_transport::tonic::transport::Channel;
use hearth_transport::tonic::{Code, Response, Status};
use hearth_transport::v1::agent_client::AgentClient;
use hearth_transport::v1::{CertifyRequest, IdentifyRequest, ModelResponse, ModelState};
use hearth_transport::{ClientOptions, Clients, Endpoint, RpcErrorKind, Tls, Worker};
use jiff::Timestamp;

use super::{Agent, AgentDirectory, Agents, identity};
use crate::services::authority::AuthorityError;

/// Message about an agent that lacks the call by which it proves its identity.
const OLD_AGENT: &str = "it is of an older version, which cannot prove whose it is: let the DaemonSet hearth-agent have the \
                         worker image of the operator's version";

/// Message about an agent that lacks another call.
const OLDER_AGENT: &str = "it is of an older version, which does not do this: let the DaemonSet hearth-agent have the worker \
                           image of the operator's version";

/// A connection to an agent that presents its node's certificate.
#[derive(Clone)]
pub(super) struct Certified {
    endpoint: Endpoint,
    worker: Worker,
    /// The agent's public key, as PEM.
    public_key: String,
    /// The CA bundle in force when the certificate was issued.
    bundle: String,
    /// Time at which the certificate is due for renewal.
    renew: Timestamp,
}

impl<G: AgentDirectory> Agents<G> {
    /// Calls the agent. One that has restarted in the meantime is issued its certificate again.
    ///
    /// # Errors
    /// The obstacle, in words.
    pub(super) async fn call<T, F>(
        &self,
        agent: &Agent,
        work: impl Fn(AgentClient<Channel>) -> F,
    ) -> Result<T, String>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut is_new = false;
        loop {
            let known = self.known(agent).await.map_err(|error| error.to_string())?;
            let worker = match known {
                Some(worker) => worker,
                None => {
                    is_new = true;
                    self.certify(agent).await?
                }
            };
            match self.in_time(work(worker.agent())).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) if status.code() == Code::Unimplemented => {
                    return Err(OLDER_AGENT.to_owned());
                }
                Err(status) => {
                    let error = worker.error(&status);
                    if is_new || error.kind() != RpcErrorKind::Gone {
                        return Err(error.to_string());
                    }
                    self.certified().remove(agent.node());
                }
            }
        }
    }

    /// Limits a call from its beginning to the end of its answer: gRPC's own deadline ends with the answer's first byte,
    /// and a compromised agent may leave it at that.
    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Status> {
        let limit = self.call_timeout;
        let answer = tokio::time::timeout(limit, call).await;
        answer.unwrap_or_else(|_| {
            let message = format!("no answer within {} s", limit.as_secs_f64());
            Err(Status::deadline_exceeded(message))
        })
    }

    /// Returns the connection to an agent whose certificate is current.
    async fn known(&self, agent: &Agent) -> Result<Option<Worker>, AuthorityError> {
        let now = Timestamp::now();
        let bundle = self.authority.bundle(now).await?;
        // Renewed underneath existing connections.
        self.authority.operator(now).await?;
        let certified = self.certified();
        let known = certified.get(agent.node()).filter(|known| {
            known.endpoint == agent.endpoint && known.bundle == bundle && now < known.renew
        });
        Ok(known.map(|known| known.worker.clone()))
    }

    /// Issues the agent a certificate for its node once it has proved that it is that node's agent: an agent that
    /// already has one is called by that name, others by the name that all start with.
    async fn certify(&self, agent: &Agent) -> Result<Worker, String> {
        let now = Timestamp::now();
        let words = |error: AuthorityError| error.to_string();
        let node = agent.node();
        let tls = self.authority.operator(now).await.map_err(words)?;
        let mut worker = connection(&tls, &agent_tls_name(node), &agent.endpoint)?;
        let identify = |worker: &Worker| {
            let mut stub = worker.agent();
            self.in_time(async move { stub.identify(IdentifyRequest {}).await })
        };
        let mut told = identify(&worker).await;
        if let Err(status) = &told
            && worker.error(status).kind() == RpcErrorKind::Gone
        {
            worker = connection(&tls, AGENT_TLS_NAME, &agent.endpoint)?;
            told = identify(&worker).await;
        }
        let failed = |status: Status| match status.code() {
            Code::Unimplemented => OLD_AGENT.to_owned(),
            _ => worker.error(&status).to_string(),
        };
        let told = told.map_err(failed)?.into_inner();
        identity::prove(&self.client, &self.namespace, &agent.place, told.token).await?;
        let certificate = self.authority.agent(node, &told.public_key, now).await;
        let certificate = certificate.map_err(words)?;
        let request = CertifyRequest {
            node: node.to_owned(),
            certificate: certificate.certificate,
        };
        let mut stub = worker.agent();
        let taken = self.in_time(stub.certify(request)).await;
        taken.map_err(failed)?;
        tracing::info!(node, "the node's agent has a certificate of its own");
        let worker = connection(&tls, &agent_tls_name(node), &agent.endpoint)?;
        let certified = Certified {
            endpoint: agent.endpoint.clone(),
            worker: worker.clone(),
            public_key: told.public_key,
            bundle: certificate.bundle,
            renew: certificate.renew,
        };
        self.certified().insert(node.to_owned(), certified);
        Ok(worker)
    }

    /// The public key of the agent, as PEM, which it has proved to be its own.
    ///
    /// # Errors
    /// The obstacle, in words.
    pub(super) async fn public_key(&self, agent: &Agent) -> Result<String, String> {
        let known = self.known(agent).await.map_err(|error| error.to_string())?;
        if known.is_none() {
            self.certify(agent).await?;
        }
        let certified = self.certified();
        let known = certified.get(agent.node());
        known
            .map(|known| known.public_key.clone())
            .ok_or_else(|| "it has just been replaced".to_owned())
    }

    fn certified(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, Certified>> {
        self.certified
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Creates a connection to a server that must present `name`.
fn connection(tls: &Tls, name: &str, endpoint: &Endpoint) -> Result<Worker, String> {
    let tls = tls.expecting(name).map_err(|error| error.to_string())?;
    let clients = Clients::new(ClientOptions {
        tls: Some(tls),
        ..ClientOptions::default()
    });
    clients.worker(endpoint).map_err(|error| error.to_string())
}

/// Message about an agent that takes no notice of a source of this kind.
pub(super) fn no_source(kind: &str) -> String {
    format!(
        "its agent is of an older version, which fetches no models {kind}: let the DaemonSet hearth-agent have the worker image of \
         the operator's version"
    )
}

/// An agent that takes a request for wrong has answered: the next time it would say the same.
pub(super) fn refused(status: Status) -> Result<Response<ModelResponse>, Status> {
    match status.code() {
        Code::InvalidArgument => Ok(Response::new(ModelResponse {
            state: ModelState::Failed.into(),
            message: status.message().to_owned(),
            ..ModelResponse::default()
        })),
        _ => Err(status),
    }
}
