//! Links between nodes: agents measure them, one in the whole cluster at a time, and rarely ([`link_turns`]). The
//! operator tells one agent to await the other, gives both certificates that are for this alone, and takes the result
//! into the profile of the node that measured. Nothing waits for it: until then, plans say what they assume.
//!
//! [`link_turns`]: super::link_turns

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_controller_core::names::{host_port, link_tls_name};
use hearth_crds::{LinkProfile, NodeProfileStatus};
use hearth_transport::v1::{AwaitLinkRequest, LinkEnd, MeasureLinkRequest};
use jiff::Timestamp;
use tokio::time::Instant;

use super::link_turns::{End, Pair, Turns, is_same, keep_first};
use super::{Agent, AgentDirectory, Agents};

/// Pause before each measurement: of any minute, links carry its traffic for a small part.
const PAUSE: Duration = Duration::from_secs(5);

/// What this operator knows of links beside the profiles.
#[derive(Default)]
pub(super) struct Links(Mutex<BTreeMap<Pair, LinkProfile>>);

impl Links {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Pair, LinkProfile>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<G: AgentDirectory> Agents<G> {
    /// Has links measured one after the other.
    pub(super) async fn keep_links(&self) {
        let mut turns = Turns::default();
        let mut complaints: BTreeMap<Pair, String> = BTreeMap::new();
        let mut left_out = 0;
        loop {
            tokio::time::sleep(PAUSE).await;
            let agents = self.agents();
            let mut ends: Vec<End> = agents.iter().map(end_of).collect();
            let count = keep_first(&mut ends);
            if left_out != count - ends.len() {
                left_out = count - ends.len();
                tracing::info!(left_out, "nodes whose links are not measured");
            }
            // Before a node has been measured, its agent has something better to do.
            ends.retain(|end| self.directory.profile(&end.node).is_some());
            let is_there = |node: &str| self.directory.node_uid(node).is_some();
            turns.keep(is_there);
            complaints.retain(|(from, to), _| is_there(from) && is_there(to));
            self.links
                .lock()
                .retain(|(from, to), _| is_there(from) && is_there(to));
            let is_known = |from: &str, to: &str| self.link(from, to).is_some();
            let Some(pair) = turns.next(&ends, is_known, Instant::now()) else {
                continue;
            };
            let find = |end: &End| agents.iter().find(|agent| agent.node() == end.node);
            let [Some(from), Some(to)] = pair.map(find) else {
                continue;
            };
            turns.begin(pair, Instant::now());
            let outcome = self.take_link(from, to).await;
            turns.heard(pair, outcome.is_ok());
            complain(&mut complaints, [from.node(), to.node()], outcome);
        }
    }

    /// Links of a node: what this operator has had measured, and the rest as stored.
    pub(super) fn links_of(
        &self,
        node: &str,
        stored: Option<&NodeProfileStatus>,
    ) -> Vec<LinkProfile> {
        let stored = stored.into_iter().flat_map(|profile| &profile.links);
        let mut links: BTreeMap<String, LinkProfile> = stored
            .filter(|link| link.is_possible())
            .map(|link| (link.peer.clone(), link.clone()))
            .collect();
        for ((from, to), link) in &*self.links.lock() {
            if from == node {
                links.insert(to.clone(), link.clone());
            }
        }
        links.retain(|peer, _| self.directory.node_uid(peer).is_some());
        links.into_values().collect()
    }

    /// The link between two nodes as it was last taken.
    fn link(&self, from: &str, to: &str) -> Option<LinkProfile> {
        let stored = self.directory.profile(from);
        let links = self.links_of(from, stored.as_ref());
        links.into_iter().find(|link| link.peer == to)
    }

    /// Measures a link and takes it into the profile, if it says anything new.
    pub(super) async fn take_link(&self, from: &Agent, to: &Agent) -> Result<(), String> {
        let measured = self.measure_link(from, to).await?;
        let known = self.link(from.node(), to.node());
        if known.is_some_and(|known| is_same(&known, &measured)) {
            return Ok(());
        }
        tracing::info!(
            node = from.node(),
            peer = measured.peer,
            gbps = measured.gbps,
            rtt_us = measured.rtt_us,
            "link measured"
        );
        let pair = (from.node().to_owned(), to.node().to_owned());
        self.links.lock().insert(pair, measured);
        self.refresh_profile(from).await
    }

    async fn measure_link(&self, from: &Agent, to: &Agent) -> Result<LinkProfile, String> {
        let at = |agent: &Agent, why: String| format!("agent of node {}: {why}", agent.node());
        let end = self.link_end(to, from).await.map_err(|why| at(to, why))?;
        let request = AwaitLinkRequest {
            end: Some(end),
            port: self.link_port.into(),
        };
        let awaited = self.call(to, |mut stub| {
            let request = request.clone();
            async move { stub.await_link(request).await }
        });
        let port = awaited.await.map_err(|why| at(to, why))?.port;
        let port = u16::try_from(port).map_err(|_| at(to, format!("it awaits on port {port}")))?;
        let end = self.link_end(from, to).await.map_err(|why| at(from, why))?;
        let request = MeasureLinkRequest {
            end: Some(end),
            endpoint: host_port(&to.place.address, port),
        };
        let measured = self.call(from, |mut stub| {
            let request = request.clone();
            async move { stub.measure_link(request).await }
        });
        let measured = measured.await.map_err(|why| at(from, why))?;
        let link = LinkProfile {
            peer: to.node().to_owned(),
            gbps: measured.gbps,
            rtt_us: measured.rtt_us,
        };
        if !link.is_possible() {
            let (gbps, rtt_us) = (link.gbps, link.rtt_us);
            let why = format!("it says {gbps:e} GB/s and {rtt_us:e} µs, which no link has");
            return Err(at(from, why));
        }
        Ok(link)
    }

    /// What `agent` needs to know of `peer`.
    pub(super) async fn link_end(&self, agent: &Agent, peer: &Agent) -> Result<LinkEnd, String> {
        let key = self.public_key(agent).await?;
        let now = Timestamp::now();
        let certificate = self.authority.link(agent.node(), &key, now).await;
        Ok(LinkEnd {
            peer: peer.node().to_owned(),
            peer_tls_name: link_tls_name(peer.node()),
            certificate: certificate.map_err(|error| error.to_string())?,
        })
    }
}

fn end_of(agent: &Agent) -> End {
    End {
        node: agent.node().to_owned(),
        address: agent.place.address.clone(),
    }
}

/// Tells of a link that cannot be measured, once and not with every try.
fn complain(
    complaints: &mut BTreeMap<Pair, String>,
    [node, peer]: [&str; 2],
    outcome: Result<(), String>,
) {
    let pair = (node.to_owned(), peer.to_owned());
    match outcome {
        Ok(()) => {
            complaints.remove(&pair);
        }
        Err(why) => {
            if complaints.get(&pair) != Some(&why) {
                tracing::warn!(node, peer, %why, "the link cannot be measured: its last value stays");
                complaints.insert(pair, why);
            }
        }
    }
}
