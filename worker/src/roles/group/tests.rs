//! Members that do not do as they should, over gRPC: each is refused, or lost to the group with a message that names it.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::Stream;
use hearth_model::Part;
use hearth_parallel::{Former, Group, GroupError, Op, StageProgress, Tag, Wanted};
use hearth_transport::tonic::{Code, Request, Response, Status, Streaming};
use hearth_transport::{ClientOptions, Clients, Endpoint, Listener, ServerOptions, server, v1};
use tokio::sync::mpsc;
use v1::parcel::Parcel as Content;
use v1::sign::Sign;

use super::addresses::Addresses;
use super::former::NetFormer;
use super::link::{hello, pieces};
use super::membership::{Follower, JoinedGroup};
use super::net::{Member, NetGroup};
use super::terms::{Terms, VERSION};
use super::{Membership, Place, Task};

/// Bytes of messages that may wait at a member.
const WAITING_BYTES: u64 = 200_000;
const PATIENCE: Duration = Duration::from_secs(20);
const PIECE_BYTES: usize = 64 << 10;
const SOON: Duration = Duration::from_millis(20);
const TAG: Tag = Tag {
    pass: 0,
    flight: 0,
    layer: 4,
    op: Op::Stream,
};

/// A head and a stage that serve, and what the head's join says.
struct Two {
    head: Membership,
    join: v1::Join,
    endpoints: [Endpoint; 2],
    /// Groups that the stage has joined.
    joined: Mutex<Receiver<JoinedGroup>>,
}

async fn serve(member: impl v1::group_server::Group) -> Endpoint {
    let listener = Listener::bind("127.0.0.1:0").expect("a port");
    let endpoint = listener.address().to_string();
    let routes = hearth_transport::tonic::service::Routes::new(server::group(member));
    tokio::spawn(async move {
        let options = ServerOptions::default();
        hearth_transport::serve(listener, routes, &options, std::future::pending()).await
    });
    endpoint.parse().expect("an address")
}

fn clients() -> Clients {
    Clients::new(ClientOptions::default())
}

/// Layers 4 to 7 of 8.
fn terms() -> Terms {
    let windows = std::iter::once(4..8).collect();
    let part = Part::new(windows, false, 8).expect("a part");
    Terms {
        place: Place {
            name: "stage-0".to_owned(),
            place: 1,
            task: Task::Windows { part, layers: 8 },
            is_self_sufficient: false,
            stands_in: false,
            kv_bytes: 0,
        },
        model_fingerprint: "demo".to_owned(),
        kv_layout: "f32 4".to_owned(),
        kv_blocks: 100,
    }
}

impl Two {
    async fn start() -> Self {
        let (sender, joined) = channel();
        let stage = Membership::of_follower(Follower {
            terms: terms(),
            numerics: "scalar".to_owned(),
            placement: Box::new(v1::Placement::default),
            clients: clients(),
            progress: StageProgress::default(),
            joined: Mutex::new(sender),
        });
        let head = Membership::of_head();
        let endpoints = [serve(head.clone()).await, serve(stage).await];
        let leg = |(rank, first_layer)| v1::Leg {
            rank,
            first_layer,
            end_layer: first_layer + 4,
        };
        let join = v1::Join {
            model_fingerprint: "demo".to_owned(),
            legs: [(0, 0), (1, 4)].map(leg).to_vec(),
            kv_layout: "f32 4".to_owned(),
            kv_blocks: 90,
            waiting_bytes: WAITING_BYTES,
            version: VERSION.to_owned(),
            ..v1::Join::default()
        };
        Self {
            head,
            join,
            endpoints,
            joined: Mutex::new(joined),
        }
    }

    /// What forms the head's groups.
    fn former(&self, patience: Duration) -> NetFormer {
        let names = [("decode-0", "attic"), ("stage-0", "cellar")];
        let names = names.map(|(name, node)| (name.to_owned(), node.to_owned()));
        NetFormer::new(
            (names.to_vec(), Addresses::Planned(self.endpoints.to_vec())),
            vec![false; 2],
            self.join.clone(),
            (clients(), patience),
            self.head.clone(),
        )
    }

    /// Lets the head form a group; the stage takes it.
    fn form(&self) -> Result<Pair, GroupError> {
        let former = self.former(Duration::from_secs(60));
        let is_over = AtomicBool::new(false);
        // The stage's thread: it takes each group that the head asks it to join.
        let take = || {
            let mut taken = None;
            loop {
                match self.joined.lock().expect("a lock").recv_timeout(SOON) {
                    Ok(joined) => {
                        // The head may have given up.
                        let _ = joined.taken.send(());
                        taken = Some(joined.group);
                    }
                    Err(_) if is_over.load(Ordering::Relaxed) => return taken,
                    Err(_) => {}
                }
            }
        };
        tokio::task::block_in_place(|| {
            std::thread::scope(|scope| {
                let taking = scope.spawn(take);
                let formed = formed(&former);
                is_over.store(true, Ordering::Relaxed);
                let stage = taking.join().expect("no panic");
                formed.map(|head| {
                    let stage = stage.expect("a group");
                    let epoch = stage.epoch;
                    Pair { head, stage, epoch }
                })
            })
        })
    }

    /// Opens a way to a member by hand.
    async fn call(&self, to: usize, first: v1::Parcel) -> (Parcels, Result<Signs, Status>) {
        let worker = clients().worker(&self.endpoints[to]).expect("a client");
        let (parcels, mut sent) = mpsc::unbounded_channel();
        parcels.send(first).expect("a receiver");
        let sent = async_stream::stream! {
            while let Some(parcel) = sent.recv().await {
                yield parcel;
            }
        };
        let signs = worker.group().exchange(sent).await;
        (parcels, signs.map(|answer| answer.into_inner()))
    }

    /// Expects that a member refuses a way.
    async fn refuses(&self, to: usize, first: v1::Parcel, code: Code, words: &str) {
        let (_way, refused) = self.call(to, first).await;
        let status = refused.err().unwrap_or_else(|| panic!("{words}"));
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(words), "{status}");
    }
}

type Parcels = mpsc::UnboundedSender<v1::Parcel>;
type Signs = Streaming<v1::Sign>;

/// Both ends of a group.
struct Pair {
    head: Arc<dyn Group>,
    stage: Arc<NetGroup>,
    epoch: u64,
}

/// The next group, as its head sees it.
fn formed(former: &NetFormer) -> Result<Arc<dyn Group>, GroupError> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(formed) = former.form(Duration::from_secs(1), &Wanted::ALL)? {
            return Ok(formed.group);
        }
    }
    panic!("no group in {PATIENCE:?}")
}

/// Why a group is over, once it is.
fn lost(group: &dyn Group) -> String {
    let begun = Instant::now();
    loop {
        if let Some(error) = group.lost() {
            return error.to_string();
        }
        assert!(begun.elapsed() < PATIENCE, "the group goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// That `why` ends the group of the head, with the stage's name.
fn assert_names_the_stage(group: &dyn Group, why: &str) {
    let error = lost(group);
    assert!(
        error.starts_with("stage-0 on cellar (127.0.0.1:") && error.contains(why),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_go_both_ways_and_are_known_to_have_arrived() {
    let two = Two::start().await;
    let Pair { head, stage, .. } = two.form().expect("a group");
    let bytes = vec![7; 150_000];
    for group in [&head, &(stage.clone() as Arc<dyn Group>)] {
        let to = 1 - group.rank();
        group.send(to, TAG, bytes.clone()).expect("sent");
    }
    assert_eq!(head.recv(1, TAG, PATIENCE), Ok(Some(bytes.clone())));
    assert_eq!(stage.recv(0, TAG, PATIENCE), Ok(Some(bytes)));
    let begun = Instant::now();
    while !stage.ways().is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", stage.ways());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_more_than_may_wait_loses_its_sender() {
    let two = Two::start().await;
    let Pair { head, epoch, .. } = two.form().expect("a group");
    let (parcels, signs) = two.call(0, hello(epoch, 1, None)).await;
    let _signs = signs.expect("a way");
    for piece in pieces(TAG, &vec![0; WAITING_BYTES as usize + 1], PIECE_BYTES) {
        // It may have been hung up on.
        let _ = parcels.send(piece);
    }
    assert_names_the_stage(&*head, "it sends a message of over 200000 bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_more_than_may_wait_together_lose_their_sender() {
    let two = Two::start().await;
    let Pair { head, epoch, .. } = two.form().expect("a group");
    let (parcels, signs) = two.call(0, hello(epoch, 1, None)).await;
    let _signs = signs.expect("a way");
    for layer in 0..3 {
        let tag = Tag { layer, ..TAG };
        for piece in pieces(tag, &vec![0; WAITING_BYTES as usize / 2], PIECE_BYTES) {
            let _ = parcels.send(piece);
        }
    }
    assert_names_the_stage(&*head, "it sends more than anybody takes");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_leaves_for_a_loss_says_whom_it_has_lost() {
    let two = Two::start().await;
    let Pair { head, stage, .. } = two.form().expect("a group");
    stage.lose(0, "it has said nothing");
    // As its thread does that learns of it.
    stage.leave();
    assert_names_the_stage(&*head, "it has lost this rank: it has said nothing");
    let Pair { head, stage, .. } = two.form().expect("a group");
    stage.leave();
    assert_names_the_stage(&*head, "lost to its group: it has left");
}

/// Of a ring's members that learn of a loss, one may hear nothing of the lost member itself, and has no way to whoever tells it.
#[tokio::test(flavor = "multi_thread")]
async fn the_lost_member_is_named_also_by_those_whom_the_one_before_tells_of_it() {
    let hearer = Membership::of_head();
    let endpoint = serve(hearer.clone()).await;
    let names = ["decode-0", "stage-0", "stage-1"];
    let members = || {
        names.map(|name| Member {
            name: name.to_owned(),
            node: "attic".to_owned(),
            endpoint: endpoint.clone(),
        })
    };
    let of = |epoch, rank| {
        let most = WAITING_BYTES as usize;
        Arc::new(NetGroup::new(
            epoch,
            rank,
            members().to_vec(),
            most,
            clients(),
        ))
    };
    let name = |rank: usize| format!("{} on attic ({endpoint})", names[rank]);
    // Which of the two comes first, the last message or the end of its way, is a matter of luck where both are sent at once.
    for epoch in 1..20 {
        let (teller, told) = (of(epoch, 1), of(epoch, 2));
        hearer.enter(&told).expect("a later epoch");
        teller.send(2, TAG, vec![7]).expect("sent");
        assert_eq!(told.recv(1, TAG, PATIENCE), Ok(Some(vec![7])));
        teller.lose(0, "it is silent");
        teller.leave();
        let says = format!("it is silent, says {}", name(1));
        let want = format!("{} is lost to its group: {says}", name(0));
        assert_eq!(lost(&*told), want);
        assert_eq!(told.lost_member().as_deref(), Some("decode-0"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_hello_or_pieces_of_two_messages_lose_their_sender() {
    let two = Two::start().await;
    let Pair { head, epoch, .. } = two.form().expect("a group");
    let (parcels, signs) = two.call(0, hello(epoch, 1, None)).await;
    let _signs = signs.expect("a way");
    parcels.send(hello(epoch, 1, None)).expect("a receiver");
    assert_names_the_stage(&*head, "it says hello again");

    let Pair { head, epoch, .. } = two.form().expect("a group");
    let (parcels, signs) = two.call(0, hello(epoch, 1, None)).await;
    let _signs = signs.expect("a way");
    let mut of_two = pieces(TAG, &[0; 100_000], PIECE_BYTES);
    let other = Tag { layer: 5, ..TAG };
    for piece in [of_two.next(), pieces(other, &[0], PIECE_BYTES).next()] {
        parcels.send(piece.expect("a piece")).expect("a receiver");
    }
    assert_names_the_stage(&*head, "in the middle of");
}

#[tokio::test(flavor = "multi_thread")]
async fn ways_that_no_member_opens_are_refused_and_the_group_goes_on() {
    let two = Two::start().await;
    let pair = two.form().expect("a group");
    let epoch = pair.epoch;
    let (_way, signs) = two.call(0, hello(epoch, 1, None)).await;
    let _signs = signs.expect("a way");
    let join = || Some(v1::Join::default());
    let beat = v1::Parcel {
        parcel: Some(Content::Beat(v1::Beat::default())),
    };
    let cases = [
        (
            0,
            hello(epoch, 1, None),
            Code::AlreadyExists,
            "rank 1 has opened its way here already",
        ),
        (
            0,
            hello(epoch, 7, None),
            Code::InvalidArgument,
            "rank 7 is no other one of the 2 members",
        ),
        (
            0,
            hello(epoch, 0, None),
            Code::InvalidArgument,
            "rank 0 is no other one",
        ),
        (
            0,
            hello(epoch, 1, join()),
            Code::FailedPrecondition,
            "this rank is the head",
        ),
        (
            1,
            hello(epoch + 1, 3, join()),
            Code::PermissionDenied,
            "rank 3 is not the head",
        ),
        (
            1,
            hello(epoch, 1, None),
            Code::InvalidArgument,
            "rank 1 is no other one",
        ),
        (
            0,
            beat,
            Code::InvalidArgument,
            "the first parcel is a hello",
        ),
    ];
    for (to, first, code, words) in cases {
        two.refuses(to, first, code, words).await;
    }
    assert_eq!(pair.head.lost(), None);
    assert_eq!(pair.stage.lost(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_way_of_an_epoch_that_is_over_is_refused_with_who_asked_and_who_has_gone_on() {
    let two = Two::start().await;
    let over = two.form().expect("a group").epoch;
    let pair = two.form().expect("a group");
    for (to, first, words) in [
        (
            0,
            hello(over - 1, 1, None),
            " of rank 1 is over: decode-0 on attic (127.0.0.1:",
        ),
        (0, hello(over, 1, None), " of stage-0 on cellar (127.0.0.1:"),
        (1, hello(over, 0, None), " of decode-0 on attic (127.0.0.1:"),
    ] {
        two.refuses(to, first, Code::Aborted, words).await;
    }
    assert_eq!(pair.head.lost(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_another_version_or_model_does_not_fit_and_is_named() {
    type Edit = fn(&mut v1::Join);
    let cases: [(Edit, &str); 3] = [
        (
            |join| join.version = "9.9.9, groups 1".to_owned(),
            "and the head's: 9.9.9, groups 1",
        ),
        (
            |join| join.version.clear(),
            "an earlier one that does not say it",
        ),
        (
            |join| join.model_fingerprint = "other".to_owned(),
            "its model: demo, and the head wants other",
        ),
    ];
    for (edit, words) in cases {
        let mut two = Two::start().await;
        edit(&mut two.join);
        let error = two.form().err().unwrap_or_else(|| panic!("{words}"));
        assert!(matches!(error, GroupError::Unfit { .. }), "{error}");
        let error = error.to_string();
        assert!(
            error.starts_with("stage-0 on cellar (") && error.contains(words),
            "{error}"
        );
    }
}

/// A member that joins whatever it is asked, after a while, lives, and takes nothing.
struct Deaf {
    version: &'static str,
    answers_after: Duration,
}

#[tonic::async_trait]
impl v1::group_server::Group for Deaf {
    type ExchangeStream = Pin<Box<dyn Stream<Item = Result<v1::Sign, Status>> + Send>>;

    async fn exchange(
        &self,
        request: Request<Streaming<v1::Parcel>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let joined = v1::Joined {
            numerics: "scalar".to_owned(),
            version: self.version.to_owned(),
            placement: None,
        };
        tokio::time::sleep(self.answers_after).await;
        let signs = async_stream::stream! {
            // The way stays open as long as this does.
            let _unread = request;
            yield Ok(v1::Sign { sign: Some(Sign::Joined(joined)) });
            loop {
                tokio::time::sleep(SOON).await;
                yield Ok(v1::Sign { sign: Some(Sign::Beat(v1::Beat::default())) });
            }
        };
        Ok(Response::new(Box::pin(signs)))
    }
}

fn deaf(version: &'static str) -> Deaf {
    Deaf {
        version,
        answers_after: Duration::ZERO,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_answers_later_than_it_is_asked_again_joins() {
    let mut two = Two::start().await;
    let slow = Deaf {
        answers_after: Duration::from_millis(2500),
        ..deaf(VERSION)
    };
    two.endpoints[1] = serve(slow).await;
    let former = two.former(PATIENCE);
    let head = tokio::task::block_in_place(|| formed(&former)).expect("it joins");
    assert_eq!(head.lost(), None);
}

/// As versions did before members said theirs.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_an_earlier_version_that_joins_does_not_fit_either() {
    let mut two = Two::start().await;
    two.endpoints[1] = serve(deaf("")).await;
    let error = two.form().err().expect("it says no version").to_string();
    assert!(
        error.starts_with("stage-0 on cellar (")
            && error
                .contains("its version: an earlier one that does not say it, and the head's: 0."),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_waits_for_a_member_that_takes_nothing_until_that_is_lost() {
    const PART_PATIENCE: Duration = Duration::from_secs(2);
    let mut two = Two::start().await;
    two.endpoints[1] = serve(deaf(VERSION)).await;
    let former = two.former(PART_PATIENCE);
    let sent = tokio::task::block_in_place(|| {
        let head = formed(&former).expect("it joins");
        let begun = Instant::now();
        let bytes = || vec![0; WAITING_BYTES as usize * 3 / 4];
        head.send(1, TAG, bytes()).expect("there is room");
        assert!(begun.elapsed() < PART_PATIENCE, "{:?}", begun.elapsed());
        let waits = head.send(1, TAG, bytes());
        assert!(begun.elapsed() >= PART_PATIENCE, "{:?}", begun.elapsed());
        waits.err()
    });
    let error = sent.expect("nobody takes it").to_string();
    assert!(
        error.starts_with("stage-0 on cellar (127.0.0.1:")
            && error.contains("nothing of 150001 bytes from decode-0 on attic (127.0.0.1:"),
        "{error}"
    );
}
