//! Measuring the link between two agents.

use hearth_transport::v1::{AwaitLinkRequest, LinkEnd, MeasureLinkRequest, MeasureLinkResponse};

use super::*;

/// An agent as one end of a link, with the key that its certificates are for.
pub(super) struct End {
    pub(super) name: &'static str,
    agent: Agent,
    pub(super) operator: Worker,
    public_key: String,
    pub(super) cache: TempDir,
}

impl End {
    fn start(authority: &Authority) -> (Agent, Worker, TempDir) {
        let cache = TempDir::new().unwrap();
        let agent = Agent::start(&AgentOptions {
            tls: &authority.issue("agent.hearth"),
            cache: cache.path(),
            user: None,
            private_patience_s: 60,
            environment: &[],
        });
        let operator = agent.called_by(Some(&authority.issue("operator.hearth")));
        (agent, operator, cache)
    }

    /// Starts an agent and waits until its node is measured.
    pub(super) async fn new(authority: &Authority, name: &'static str) -> Self {
        let (agent, operator, cache) = Self::start(authority);
        first_profile(&operator).await;
        let told = operator.agent().identify(IdentifyRequest {}).await.unwrap();
        Self {
            name,
            agent,
            operator,
            public_key: told.into_inner().public_key,
            cache,
        }
    }

    /// What it is told of the other end, with a certificate for this name.
    pub(super) fn end(&self, authority: &Authority, own: &str, peer: &str) -> Option<LinkEnd> {
        Some(LinkEnd {
            peer: peer.to_owned(),
            peer_tls_name: format!("{peer}.link.agent.hearth"),
            certificate: authority.sign(&format!("{own}.link.agent.hearth"), &self.public_key),
        })
    }

    async fn wait_for(&self, authority: &Authority, peer: &str) -> String {
        let request = AwaitLinkRequest {
            end: self.end(authority, self.name, peer),
            port: 0,
        };
        let answer = self.operator.agent().await_link(request).await.unwrap();
        format!("127.0.0.1:{}", answer.into_inner().port)
    }

    async fn measure(
        &self,
        end: Option<LinkEnd>,
        endpoint: &str,
    ) -> Result<MeasureLinkResponse, Status> {
        let endpoint = endpoint.to_owned();
        let request = MeasureLinkRequest { end, endpoint };
        let answer = self.operator.agent().measure_link(request).await?;
        Ok(answer.into_inner())
    }
}

#[tokio::test]
async fn two_agents_measure_the_link_between_them() {
    let authority = Authority::new();
    let a = End::new(&authority, "a").await;
    let b = End::new(&authority, "b").await;
    let to_b = || a.end(&authority, "a", "b");
    // Another measurement takes the place of one that nobody came for.
    let stale = b.wait_for(&authority, "c").await;
    let endpoint = b.wait_for(&authority, "a").await;
    let refused = a.measure(to_b(), &stale).await.expect_err("stale");
    let words = "the agent of node b cannot be reached";
    assert!(refused.message().starts_with(words), "{refused}");
    // Who has another node's certificate is not answered, and takes it from nobody.
    let stranger = a.end(&authority, "c", "b");
    assert!(a.measure(stranger, &endpoint).await.is_err());
    let link = a.measure(to_b(), &endpoint).await.unwrap();
    eprintln!("{link:?}, at most {} MiB", a.agent.kib("VmHWM") >> 10);
    assert!(link.gbps.is_finite() && link.gbps > 0.0, "{link:?}");
    assert!(link.rtt_us.is_finite() && link.rtt_us > 0.0, "{link:?}");
    // It was for one.
    let again = a.measure(to_b(), &endpoint).await.expect_err("again");
    assert!(again.message().starts_with(words), "{again}");

    // A certificate without a name for the other would let everyone in.
    let mut nobody = to_b();
    nobody.as_mut().unwrap().peer_tls_name.clear();
    for (end, words) in [
        (nobody, "peer_tls_name is empty"),
        (None, "end is missing"),
        (b.end(&authority, "a", "b"), "does not belong"),
    ] {
        let refused = a.measure(end, &endpoint).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    let refused = a.measure(to_b(), "nowhere").await.expect_err("no address");
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_node_that_is_being_measured_measures_no_link() {
    let authority = Authority::new();
    let (_agent, operator, _cache) = End::start(&authority);
    let calls = (
        operator
            .agent()
            .await_link(AwaitLinkRequest::default())
            .await
            .map(drop),
        operator
            .agent()
            .measure_link(MeasureLinkRequest::default())
            .await
            .map(drop),
    );
    for refused in [calls.0, calls.1] {
        let status = refused.expect_err("it is busy");
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("being measured"), "{status}");
    }
}
