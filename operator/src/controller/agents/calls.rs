//! Calls to agents. All agents begin with one certificate, by which nobody can tell them apart; so the first thing that
//! the operator does is to give each a certificate of its node, and from then on it talks to nobody else at that address.

use hearth_transport::tonic::transport::Channel;
use hearth_transport::tonic::{Code, Response, Status};
use hearth_transport::v1::CertifyRequest;
use hearth_transport::v1::agent_client::AgentClient;
use hearth_transport::{ClientOptions, Clients, Endpoint, RpcErrorKind, Tls, Worker};
use jiff::Timestamp;

use super::{Agent, Agents, Ground, timed};
use crate::controller::authority::AuthorityError;
use crate::controller::names::{AGENT_TLS_NAME, agent_tls_name};

/// A connection to an agent that shows its node's certificate.
#[derive(Clone)]
pub(super) struct Certified {
    endpoint: Endpoint,
    worker: Worker,
    /// Who was trusted when the certificate was made.
    bundle: String,
    /// When it is due for another one.
    renew: Timestamp,
}

impl<G: Ground> Agents<G> {
    /// Calls the agent. One that has begun anew meanwhile is given its certificate again.
    ///
    /// # Errors
    /// What stands in the way, in words.
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
            match work(worker.agent()).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => {
                    let error = worker.error(&status);
                    if is_new || error.kind() != RpcErrorKind::Gone {
                        return Err(error.to_string());
                    }
                    self.certified().remove(&agent.node);
                }
            }
        }
    }

    /// The connection to an agent whose certificate is as it should be.
    async fn known(&self, agent: &Agent) -> Result<Option<Worker>, AuthorityError> {
        let now = Timestamp::now();
        let bundle = self.authority.bundle(now).await?;
        // Renewed behind the connections that there are.
        self.authority.operator(now).await?;
        let certified = self.certified();
        let known = certified.get(&agent.node).filter(|known| {
            known.endpoint == agent.endpoint && known.bundle == bundle && now < known.renew
        });
        Ok(known.map(|known| known.worker.clone()))
    }

    /// Gives the agent a certificate of its node: one that has one already by that, another by the one that all begin with.
    async fn certify(&self, agent: &Agent) -> Result<Worker, String> {
        let now = Timestamp::now();
        let words = |error: AuthorityError| error.to_string();
        let certificate = self
            .authority
            .agent(&agent.node, now)
            .await
            .map_err(words)?;
        let tls = self.authority.operator(now).await.map_err(words)?;
        let request = CertifyRequest {
            node: agent.node.clone(),
            certificate: certificate.certificate,
            key: certificate.key,
        };
        let own = connection(&tls, &agent_tls_name(&agent.node), &agent.endpoint)?;
        let mut outcome = own.agent().certify(timed(request.clone())).await;
        if let Err(status) = &outcome
            && own.error(status).kind() == RpcErrorKind::Gone
        {
            let first = connection(&tls, AGENT_TLS_NAME, &agent.endpoint)?;
            outcome = first.agent().certify(timed(request)).await;
        }
        outcome.map_err(|status| match status.code() {
            Code::Unimplemented => {
                "it is of an older version: kubectl rollout restart daemonset/hearth-agent"
                    .to_owned()
            }
            _ => own.error(&status).to_string(),
        })?;
        tracing::info!(
            node = agent.node,
            "the node's agent has a certificate of its own"
        );
        let worker = connection(&tls, &agent_tls_name(&agent.node), &agent.endpoint)?;
        let certified = Certified {
            endpoint: agent.endpoint.clone(),
            worker: worker.clone(),
            bundle: certificate.bundle,
            renew: certificate.renew,
        };
        self.certified().insert(agent.node.clone(), certified);
        Ok(worker)
    }

    fn certified(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, Certified>> {
        self.certified
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A connection to a server that must carry `name`.
fn connection(tls: &Tls, name: &str, endpoint: &Endpoint) -> Result<Worker, String> {
    let tls = tls.expecting(name).map_err(|error| error.to_string())?;
    let clients = Clients::new(ClientOptions {
        tls: Some(tls),
        ..ClientOptions::default()
    });
    clients.worker(endpoint).map_err(|error| error.to_string())
}
