//! Groups of peers over gRPC that are formed of those who are there.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_model::ExpertParallel;
use hearth_parallel::{Formed, Former, Group, StageProgress, Wanted};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{ClientOptions, Clients, Endpoint, Listener, ServerOptions, server, v1};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::addresses::Addresses;
use super::former::NetFormer;
use super::membership::{Follower, JoinedGroup};
use super::terms::{Terms, VERSION};
use super::{Membership, Place, Task};

const PATIENCE: Duration = Duration::from_secs(30);
const PEERS: usize = 4;
const NUMERICS: &str = "scalar";

fn clients() -> Clients {
    Clients::new(ClientOptions::default())
}

/// A follower that takes every group.
struct Peer {
    member: Membership,
    endpoint: Endpoint,
    /// Ends its service.
    end: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Peer {
    async fn start(place: usize, address: &str, numerics: &str) -> Self {
        let (sender, joined) = channel::<JoinedGroup>();
        // It ends with the membership.
        std::thread::spawn(move || {
            let mut now: Option<Arc<dyn Group>> = None;
            for JoinedGroup { group, taken, .. } in joined {
                drop(now.replace(group));
                let _ = taken.send(());
            }
        });
        let member = Membership::of_follower(Follower {
            terms: Terms {
                place: Place {
                    name: name(place),
                    place,
                    task: Task::Share {
                        peers: PEERS,
                        experts: ExpertParallel::SmallEp,
                    },
                    is_self_sufficient: false,
                    stands_in: true,
                    kv_bytes: 0,
                },
                model_fingerprint: "demo".to_owned(),
                kv_layout: "f32 4".to_owned(),
                kv_blocks: 100,
            },
            numerics: numerics.to_owned(),
            placement: Box::new(v1::Placement::default),
            clients: clients(),
            progress: StageProgress::default(),
            joined: Mutex::new(sender),
        });
        let (end, ended) = oneshot::channel();
        let (endpoint, server) = serve(member.clone(), address, ended).await;
        Self {
            member,
            endpoint,
            end,
            server,
        }
    }

    /// Ends it, with all connections; its address.
    async fn end(self) -> String {
        self.member.leave();
        let _ = self.end.send(());
        self.server.await.expect("no panic");
        self.endpoint.to_string()
    }
}

fn name(place: usize) -> String {
    match place {
        0 => "prefill-0".to_owned(),
        place => format!("stage-{}", place - 1),
    }
}

async fn serve(
    member: Membership,
    address: &str,
    ended: oneshot::Receiver<()>,
) -> (Endpoint, JoinHandle<()>) {
    let begun = Instant::now();
    let listener = loop {
        match Listener::bind(address) {
            Ok(listener) => break listener,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let endpoint = listener.address().to_string();
    let routes = Routes::new(server::group(member));
    let server = tokio::spawn(async move {
        let options = ServerOptions::default();
        let ended = async { drop(ended.await) };
        let served = hearth_transport::serve(listener, routes, &options, ended).await;
        served.expect("a service");
    });
    (endpoint.parse().expect("an address"), server)
}

/// Four peers, and what forms their head's groups.
struct Four {
    followers: BTreeMap<usize, Peer>,
    former: NetFormer,
    /// Ends the head's service.
    _end: oneshot::Sender<()>,
}

impl Four {
    async fn start() -> Self {
        let head = Membership::of_head();
        let (end, ended) = oneshot::channel();
        let mut endpoints = vec![serve(head.clone(), "127.0.0.1:0", ended).await.0];
        let mut followers = BTreeMap::new();
        for place in 1..PEERS {
            let peer = Peer::start(place, "127.0.0.1:0", NUMERICS).await;
            endpoints.push(peer.endpoint.clone());
            followers.insert(place, peer);
        }
        let join = v1::Join {
            model_fingerprint: "demo".to_owned(),
            kv_layout: "f32 4".to_owned(),
            kv_blocks: 90,
            waiting_bytes: 200_000,
            experts: v1::Experts::SmallEp.into(),
            version: VERSION.to_owned(),
            planned_peers: PEERS as u32,
            ..v1::Join::default()
        };
        let names = (0..PEERS).map(|place| (name(place), "attic".to_owned()));
        let former = NetFormer::new(
            (names.collect(), Addresses::Planned(endpoints)),
            vec![false, true, true, true],
            join,
            (clients(), Duration::from_secs(60)),
            head,
        );
        Self {
            followers,
            former,
            _end: end,
        }
    }

    /// Ends a follower; its address.
    async fn end(&mut self, place: usize) -> String {
        self.followers.remove(&place).expect("it lives").end().await
    }

    /// Starts its successor.
    async fn start_again(&mut self, place: usize, address: &str, numerics: &str) {
        let peer = Peer::start(place, address, numerics).await;
        self.followers.insert(place, peer);
    }

    /// Tries once to form a group of more than are together.
    fn try_to_form(&self) -> Option<Formed> {
        let numerics = vec![NUMERICS.to_owned(); PEERS - 1];
        let wanted = Wanted {
            fits: &|ranks| ExpertParallel::SmallEp.keeps_bits(ranks),
            numerics: Some(&numerics),
        };
        let form = || self.former.form(Duration::from_secs(2), &wanted);
        tokio::task::block_in_place(form).expect("all fit")
    }

    fn form(&self) -> Formed {
        let begun = Instant::now();
        loop {
            if let Some(formed) = self.try_to_form() {
                return formed;
            }
            assert!(begun.elapsed() < PATIENCE, "no group");
        }
    }
}

fn wait_until_lost(formed: &Formed) {
    let begun = Instant::now();
    while formed.group.lost().is_none() {
        assert!(begun.elapsed() < PATIENCE, "the group goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn those_that_are_left_go_on_and_who_returns_is_taken_back() {
    let mut four = Four::start().await;
    let all = four.form();
    assert_eq!((all.places.len(), &all.short), (4, &None));
    assert!(four.try_to_form().is_none(), "there is nobody more");
    assert_eq!(all.group.lost(), None);

    let address = four.end(2).await;
    wait_until_lost(&all);
    let two = four.form();
    assert_eq!((&*two.places, two.group.size()), (&[0, 1][..], 2));
    let told = two.short.clone().expect("two are missing");
    let begin = "2 of 4 ranks, without stage-1 on attic (";
    let end =
        "stage-2 on attic (it is there, and with it they would be too many for the same bits)";
    assert!(told.starts_with(begin) && told.ends_with(end), "{told}");
    // Who is together is not disturbed as long as nobody has come back.
    assert!(four.try_to_form().is_none());
    assert_eq!(two.group.lost(), None);

    four.start_again(2, &address, NUMERICS).await;
    let again = four.form();
    assert_eq!((again.group.size(), &again.short), (4, &None));
    wait_until_lost(&two);

    // Lost again soon after, it is left alone for a while, and then taken back.
    let address = four.end(2).await;
    wait_until_lost(&again);
    assert_eq!(four.form().group.size(), 2);
    four.start_again(2, &address, NUMERICS).await;
    assert_eq!(four.form().group.size(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_computes_otherwise_stays_out_and_is_named() {
    let mut four = Four::start().await;
    let all = four.form();
    let address = four.end(1).await;
    wait_until_lost(&all);
    four.start_again(1, &address, "avx2").await;
    let two = four.form();
    assert_eq!((&*two.places, two.group.lost()), (&[0, 2][..], None));
    let told = two.short.expect("two are missing");
    let why = "stage-0 on attic (it computes with avx2, and scalar is needed";
    assert!(told.contains(why), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_missing_is_not_asked_for_without_a_pause() {
    let mut four = Four::start().await;
    let form = |four: &Four, patience: Duration| {
        let form = || four.former.form(patience, &Wanted::ALL);
        tokio::task::block_in_place(form).expect("all fit")
    };
    let all = form(&four, PATIENCE).expect("all are there");
    four.end(2).await;
    wait_until_lost(&all);
    let begun = Instant::now();
    let mut tries = 0;
    while begun.elapsed() < Duration::from_secs(1) {
        assert!(form(&four, Duration::from_millis(200)).is_none());
        tries += 1;
    }
    assert!(tries < 15, "{tries} tries in a second");
}
