//! Models that go from node to node: the operator has an agent that has a model give it to one that lacks it, by
//! certificates for both that are for this alone, as for links. Where that cannot be, the model comes from the hub.

use hearth_controller_core::names::host_port;
use hearth_transport::v1::{ModelRequest, ModelState, SeedPlace, SeedRequest};

use super::fetches::Poll;
use super::{Agent, AgentDirectory, Agents};

/// Maximum number of agents that are asked to give a model, for each start of a fetch.
const MOST_ASKED: usize = 2;

impl<G: AgentDirectory> Agents<G> {
    /// Has another agent give the model of a poll, if this one lacks it; returns where.
    pub(super) async fn seed_for(&self, agent: &Agent, poll: &Poll) -> Option<SeedPlace> {
        let givers = self.lock().givers(poll);
        if givers.is_empty() || !self.lacks(agent, poll).await {
            return None;
        }
        let agents = self.agents();
        let find = |node: String| agents.iter().find(|agent| agent.node() == node);
        for giver in givers.into_iter().filter_map(find).take(MOST_ASKED) {
            match self.have_given(giver, agent, poll).await {
                Ok(place) => {
                    tracing::info!(
                        node = agent.node(),
                        giver = giver.node(),
                        key = poll.key,
                        "model may be taken from another node"
                    );
                    return Some(place);
                }
                Err(why) => {
                    let giver = giver.node();
                    tracing::info!(node = agent.node(), giver, %why, "model not given");
                }
            }
        }
        None
    }

    /// Whether a request would begin to fetch now: the model is not there, and no earlier failure is waited out.
    async fn lacks(&self, agent: &Agent, poll: &Poll) -> bool {
        // Without a source, an agent only tells.
        let request = ModelRequest {
            key: poll.key.clone(),
            ..ModelRequest::default()
        };
        let told = self.call(agent, |mut stub| {
            let request = request.clone();
            async move { stub.model(request).await }
        });
        told.await
            .is_ok_and(|answer| answer.state() == ModelState::Absent)
    }

    async fn have_given(
        &self,
        giver: &Agent,
        taker: &Agent,
        poll: &Poll,
    ) -> Result<SeedPlace, String> {
        let request = SeedRequest {
            key: poll.key.clone(),
            commit: poll.commit.clone(),
            end: Some(self.link_end(giver, taker).await?),
            port: self.link_port.into(),
        };
        let end = self.link_end(taker, giver).await?;
        let given = self.call(giver, |mut stub| {
            let request = request.clone();
            async move { stub.seed(request).await }
        });
        let port = given.await?.port;
        let port = u16::try_from(port).map_err(|_| format!("it waits on port {port}"))?;
        Ok(SeedPlace {
            end: Some(end),
            endpoint: host_port(&giver.place.address, port),
        })
    }
}
