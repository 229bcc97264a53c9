//! The way from this member to another: messages in parcels, and beats when there are none.

use std::time::Duration;

use futures::{FutureExt, Stream};
use hearth_model::Exchanged;
use hearth_parallel::{Op, Tag};
use hearth_transport::{Worker, v1};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tonic::Status;
use v1::parcel::Parcel as Content;

/// Time between two signs of life on an idle way, in either direction.
pub(super) const BEAT_PERIOD: Duration = Duration::from_millis(500);
/// Silence after which the other end is lost. Slow links carry a part of a message in less.
pub(super) const SILENCE: Duration = Duration::from_secs(4);
/// Metadata of the end of a way: the rank that its receiver has lost.
pub(super) const LOST: &str = "hearth-lost";
/// What a member says that is about to end.
pub(super) const LEFT: &str = "it has left";

/// A message as parcels of at most `piece_bytes`, which is more than none.
pub(super) fn pieces(
    tag: Tag,
    bytes: &[u8],
    piece_bytes: usize,
) -> impl Iterator<Item = v1::Parcel> {
    let count = bytes.len().div_ceil(piece_bytes).max(1);
    let op = told(tag.op);
    (0..count).map(move |index| {
        let end = bytes.len().min((index + 1) * piece_bytes);
        parcel(Content::Piece(v1::Piece {
            pass: tag.pass,
            flight: tag.flight,
            layer: tag.layer,
            op: op.into(),
            data: bytes[index * piece_bytes..end].to_vec(),
            more: index + 1 < count,
        }))
    })
}

/// The tag of a piece; `None` for an operation that this version does not know.
pub(super) fn tag(piece: &v1::Piece) -> Option<Tag> {
    Some(Tag {
        pass: piece.pass,
        flight: piece.flight,
        layer: piece.layer,
        op: op(piece.op())?,
    })
}

fn told(op: Op) -> v1::Op {
    match op {
        Op::Stream => v1::Op::Stream,
        Op::Fault => v1::Op::Fault,
        Op::Pass => v1::Op::Pass,
        Op::Exchange(what) => match what {
            Exchanged::Before => v1::Op::Before,
            Exchanged::Kv => v1::Op::Kv,
            Exchanged::KvBehind => v1::Op::KvBehind,
            Exchanged::Choices => v1::Op::Choices,
            Exchanged::Tokens => v1::Op::Tokens,
            Exchanged::Sums => v1::Op::Sums,
            Exchanged::Dispatched => v1::Op::Dispatched,
            Exchanged::Combined => v1::Op::Combined,
            Exchanged::Last => v1::Op::Last,
        },
    }
}

fn op(told: v1::Op) -> Option<Op> {
    Some(match told {
        v1::Op::Unspecified => return None,
        v1::Op::Stream => Op::Stream,
        v1::Op::Fault => Op::Fault,
        v1::Op::Pass => Op::Pass,
        v1::Op::Before => Op::Exchange(Exchanged::Before),
        v1::Op::Kv => Op::Exchange(Exchanged::Kv),
        v1::Op::KvBehind => Op::Exchange(Exchanged::KvBehind),
        v1::Op::Choices => Op::Exchange(Exchanged::Choices),
        v1::Op::Tokens => Op::Exchange(Exchanged::Tokens),
        v1::Op::Sums => Op::Exchange(Exchanged::Sums),
        v1::Op::Dispatched => Op::Exchange(Exchanged::Dispatched),
        v1::Op::Combined => Op::Exchange(Exchanged::Combined),
        v1::Op::Last => Op::Exchange(Exchanged::Last),
    })
}

fn parcel(content: Content) -> v1::Parcel {
    v1::Parcel {
        parcel: Some(content),
    }
}

/// The first parcel of a way.
pub(super) fn hello(epoch: u64, from: usize, join: Option<v1::Join>) -> v1::Parcel {
    parcel(Content::Hello(v1::Hello {
        epoch,
        from: from as u32,
        join,
    }))
}

/// What the head says once it is to end.
pub(super) fn draining() -> v1::Parcel {
    parcel(Content::Beat(v1::Beat {
        draining: true,
        ..v1::Beat::default()
    }))
}

/// What a member says last that leaves because it has lost another.
pub(super) fn farewell(lost: usize, why: String) -> v1::Parcel {
    parcel(Content::Farewell(v1::Farewell {
        lost: lost as u32,
        why,
    }))
}

/// What a way carries: messages, and what is said last, which does not wait for them.
pub(super) struct Outgoing {
    pub(super) messages: mpsc::UnboundedReceiver<v1::Parcel>,
    pub(super) last: oneshot::Receiver<v1::Parcel>,
}

/// Sends `first`, and then what is `outgoing`, until messages end or the last one is said; `heard` is called with what the
/// receiver says. Returns why it ended otherwise.
pub(super) async fn run(
    to: Worker,
    first: v1::Parcel,
    outgoing: Outgoing,
    mut heard: impl FnMut(v1::sign::Sign),
) -> Result<(), Status> {
    let mut client = to.group();
    let opened = timeout(SILENCE, client.exchange(parcels(first, outgoing))).await;
    let opened = opened.map_err(|_| Status::unavailable("it does not answer"))?;
    let mut signs = opened?.into_inner();
    loop {
        let sign = timeout(SILENCE, signs.message()).await;
        let silent = |_| Status::unavailable(format!("it has said nothing for {SILENCE:?}"));
        match sign.map_err(silent)?? {
            Some(v1::Sign { sign: Some(sign) }) => heard(sign),
            // Of a later version.
            Some(v1::Sign { sign: None }) => {}
            None => return Err(Status::unavailable(LEFT)),
        }
    }
}

/// A first parcel, then messages, and a beat where none has come for a while. What is said last goes ahead of messages that wait:
/// nobody takes them any more.
fn parcels(first: v1::Parcel, outgoing: Outgoing) -> impl Stream<Item = v1::Parcel> {
    let Outgoing { mut messages, last } = outgoing;
    async_stream::stream! {
        yield first;
        let mut last = last.fuse();
        loop {
            let (next, is_last) = tokio::select! {
                biased;
                Ok(said) = &mut last => (Some(said), true),
                message = messages.recv() => (message, false),
                () = sleep(BEAT_PERIOD) => (Some(parcel(Content::Beat(v1::Beat::default()))), false),
            };
            let Some(next) = next else {
                return;
            };
            yield next;
            if is_last {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::StreamExt;

    use super::*;

    const PIECE_BYTES: usize = 1000;
    const TAG: Tag = Tag {
        pass: 7,
        flight: 1,
        layer: 3,
        op: Op::Fault,
    };

    /// On a slow way many parcels wait.
    #[tokio::test]
    async fn a_farewell_does_not_wait_for_messages() {
        let (sender, messages) = mpsc::unbounded_channel();
        let (say_last, last) = oneshot::channel();
        for piece in pieces(TAG, &[1; 5 * PIECE_BYTES], PIECE_BYTES) {
            sender.send(piece).expect("a receiver");
        }
        let mut sent = pin!(parcels(hello(1, 0, None), Outgoing { messages, last }));
        let mut next = async || sent.next().await.map(|parcel| parcel.parcel);
        assert!(matches!(next().await, Some(Some(Content::Hello(_)))));
        assert!(matches!(next().await, Some(Some(Content::Piece(_)))));
        say_last
            .send(farewell(2, "it is silent".to_owned()))
            .expect("a receiver");
        let Some(Some(Content::Farewell(said))) = next().await else {
            panic!("no farewell");
        };
        assert_eq!((said.lost, &*said.why), (2, "it is silent"));
        assert_eq!(next().await, None, "nothing comes behind it");
    }

    /// Whoever leaves without a reason says nothing last.
    #[tokio::test]
    async fn messages_go_on_where_nothing_will_be_said_last() {
        let (sender, messages) = mpsc::unbounded_channel();
        let (say_last, last) = oneshot::channel();
        drop(say_last);
        let mut sent = pin!(parcels(hello(1, 0, None), Outgoing { messages, last }));
        assert!(sent.next().await.is_some());
        for _ in 0..2 {
            sender.send(draining()).expect("a receiver");
            assert_eq!(sent.next().await, Some(draining()));
        }
        drop(sender);
        assert_eq!(sent.next().await, None);
    }

    #[test]
    fn a_message_is_put_together_from_its_pieces() {
        for len in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut whole = Vec::new();
            let mut is_last = false;
            for parcel in pieces(TAG, &bytes, PIECE_BYTES) {
                let Some(Content::Piece(piece)) = parcel.parcel else {
                    panic!("no piece");
                };
                assert!(!is_last && tag(&piece) == Some(TAG));
                is_last = !piece.more;
                whole.extend(piece.data);
            }
            assert!(is_last && whole == bytes, "{len} bytes");
        }
    }
}
