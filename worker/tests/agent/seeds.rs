//! Models that one agent takes from another.

use hearth_transport::stream::{Stream, connect};
use hearth_transport::v1::{AwaitLinkRequest, SeedPlace, SeedRequest};
use hearth_transport::{Tls, TlsFiles, TlsNames};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hub::{demo_files, start, wanted};
use super::links::End;
use super::server::hub::HubServer;
use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// An agent that has fetched a model of a hub.
struct Giver {
    end: End,
    server: HubServer,
    request: ModelRequest,
    commit: String,
}

impl Giver {
    async fn new(authority: &Authority) -> Self {
        let end = End::new(authority, "a").await;
        let server = start(&demo_files()).await;
        let request = wanted(&server, "", "", "");
        let ready = settled(&end.operator, &request).await.pop().unwrap();
        assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
        Self {
            end,
            server,
            request,
            commit: ready.commit,
        }
    }

    /// Has it await the agent of node `peer`; returns its address.
    async fn awaits(&self, authority: &Authority, peer: &str, port: u32) -> Result<String, Status> {
        let request = SeedRequest {
            key: self.request.key.clone(),
            commit: self.commit.clone(),
            end: self.end.end(authority, "a", peer),
            port,
        };
        let answer = self.end.operator.agent().seed(request).await?;
        Ok(format!("127.0.0.1:{}", answer.into_inner().port))
    }

    /// Connects as the agent of node `name`, which expects to find node `peer`.
    async fn connected(
        authority: &Authority,
        name: &str,
        peer: &str,
        address: &str,
    ) -> std::io::Result<impl Stream + use<>> {
        let directory = authority.issue(&format!("{name}.link.agent.hearth"));
        let files = TlsFiles {
            cert: directory.join("tls.crt"),
            key: directory.join("tls.key"),
            ca: directory.join("ca.crt"),
            names: TlsNames {
                server: Some(format!("{peer}.link.agent.hearth")),
                clients: Vec::new(),
            },
        };
        let tls = Tls::read(&files).unwrap();
        connect(&address.parse().unwrap(), &tls, PATIENCE).await
    }

    /// Requests for files that came to the hub.
    fn files_asked(&self) -> usize {
        let asked = self.server.asked();
        let files = asked
            .iter()
            .filter(|asked| !asked.path.starts_with("/api/"));
        files.count()
    }
}

/// Whether the other end answers: it tells that there is no such file.
async fn answers(mut stream: impl Stream) -> bool {
    let name = b"no.safetensors";
    let mut request = vec![name.len() as u8, 0];
    request.extend(name);
    request.extend([0; 16]);
    let asked = async {
        stream.write_all(&request).await?;
        stream.read_u8().await
    };
    asked.await.is_ok_and(|answer| answer == 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_takes_the_model_from_the_first() {
    let authority = Authority::new();
    let first = Giver::new(&authority).await;
    let b = End::new(&authority, "b").await;
    let asked = first.files_asked();
    let endpoint = first.awaits(&authority, "b", 0).await.unwrap();
    let request = ModelRequest {
        seed: Some(SeedPlace {
            end: b.end(&authority, "b", "a"),
            endpoint,
        }),
        ..wanted(&first.server, "", "", &first.commit)
    };
    let ready = settled(&b.operator, &request).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert_eq!((&ready.commit, &*ready.from_node), (&first.commit, ""));
    assert_eq!(first.files_asked(), asked);
    let weights = |end: &End| {
        let model = end.cache.path().join("models").join(&request.key);
        fs::read(model.join("model.safetensors")).unwrap()
    };
    assert!(weights(&b) == weights(&first.end));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_gives_nothing_costs_no_model() {
    let authority = Authority::new();
    let first = Giver::new(&authority).await;
    // Nobody is there, and somebody else than was expected.
    for peer in ["a", "c"] {
        let b = End::new(&authority, "b").await;
        let endpoint = match peer {
            "a" => "127.0.0.1:1".to_owned(),
            _ => first.awaits(&authority, "b", 0).await.unwrap(),
        };
        let asked = first.files_asked();
        let request = ModelRequest {
            seed: Some(SeedPlace {
                end: b.end(&authority, "b", peer),
                endpoint,
            }),
            ..wanted(&first.server, "", "", &first.commit)
        };
        let ready = settled(&b.operator, &request).await.pop().unwrap();
        assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
        assert!(first.files_asked() > asked);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_whom_the_operator_names_reads_and_only_what_it_names() {
    let authority = Authority::new();
    let first = Giver::new(&authority).await;
    let address = first.awaits(&authority, "c", 0).await.unwrap();
    let port = address.rsplit_once(':').unwrap().1.parse().unwrap();
    // Another node, and the operator itself, are turned away; the next one waits until the port is free.
    let stranger = Giver::connected(&authority, "d", "a", &address).await;
    if let Ok(stranger) = stranger {
        assert!(!answers(stranger).await);
    }
    let next = first.awaits(&authority, "d", port);
    let comes = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Giver::connected(&authority, "c", "a", &address).await
    };
    let (next, c) = tokio::join!(next, comes);
    assert_eq!(next.unwrap(), address);
    let d = Giver::connected(&authority, "d", "a", &address).await;
    // Each reads over its own connection, and nobody comes any more.
    assert!(answers(c.unwrap()).await && answers(d.unwrap()).await);
    assert!(
        Giver::connected(&authority, "d", "a", &address)
            .await
            .is_err()
    );

    let seed = async |key: &str, commit: &str| {
        let request = SeedRequest {
            key: key.to_owned(),
            commit: commit.to_owned(),
            end: first.end.end(&authority, "a", "b"),
            port: 0,
        };
        let refused = first.end.operator.agent().seed(request).await;
        refused.expect_err("it is not given")
    };
    let missing = store_key("http://nas/m.tar", &"0".repeat(64), "");
    for (key, commit, code, words) in [
        ("../x", &*first.commit, Code::InvalidArgument, "key is"),
        (
            &missing,
            &first.commit,
            Code::FailedPrecondition,
            "not complete on this node",
        ),
        (
            &first.request.key,
            &"0".repeat(40),
            Code::FailedPrecondition,
            "not 000",
        ),
    ] {
        let status = seed(key, commit).await;
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(words), "{status}");
    }
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let fetched = request(&server, &sha256(&archive));
    settled(&first.end.operator, &fetched).await;
    let status = seed(&fetched.key, &first.commit).await;
    assert!(status.message().contains("not of a hub"), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_stays_while_it_is_read_by_as_many_as_may() {
    let authority = Authority::new();
    let first = Giver::new(&authority).await;
    let mut readers = Vec::new();
    for name in ["b", "c", "d", "e"] {
        let address = first.awaits(&authority, name, 0).await.unwrap();
        readers.push(
            Giver::connected(&authority, name, "a", &address)
                .await
                .unwrap(),
        );
    }
    let busy = first.awaits(&authority, "f", 0).await.unwrap_err();
    assert_eq!(busy.code(), Code::ResourceExhausted, "{busy}");
    // Its traffic would be measured with a link.
    let link = AwaitLinkRequest {
        end: first.end.end(&authority, "a", "b"),
        port: 0,
    };
    let busy = first.end.operator.agent().await_link(link.clone()).await;
    assert_eq!(busy.unwrap_err().code(), Code::ResourceExhausted);
    assert!(retain(&first.end.operator, &[]).await.is_empty());
    drop(readers);
    until("nobody reads any more", async || {
        let awaited = first.end.operator.agent().await_link(link.clone()).await;
        awaited.is_ok()
    })
    .await;
    let removed = retain(&first.end.operator, &[]).await;
    assert_eq!(removed, BTreeSet::from([first.request.key.clone()]));
}
