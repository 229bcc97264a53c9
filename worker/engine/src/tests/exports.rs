//! KV on its way to the host: how much at a time, in which order, and what becomes of it.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use hearth_kernels::{BlockId, KvLayout};
use hearth_schedule::SequenceId;

use super::*;
use crate::{
    EngineStats, RequestId,
    export::{ExportQueue, ExportRange, MOST_MOVING_BYTES},
    forward::{KvBytes, PendingKv},
    request::{Cancelled, EngineRequest, Export, Receiver as Callback},
    shared::{Shared, Slot},
    unread::Unread,
};

/// Bytes of a token in a layer: each is a piece of its own.
const TOKEN_BYTES: usize = 4 << 20;
const TOKENS: usize = 40;
const LAYOUT: KvLayout = KvLayout {
    layers: 3,
    kv_heads: 1,
    k_dim: TOKEN_BYTES / 4,
    v_dim: TOKEN_BYTES / 4,
    value_in_key: true,
    block_tokens: 16,
    dtype: KvDType::F32,
};

/// A device that copies nothing until somebody waits.
#[derive(Clone, Default)]
struct Device {
    moving: Arc<AtomicUsize>,
    most_moving: Arc<AtomicUsize>,
    waits: Arc<AtomicUsize>,
    /// The wait that fails, counted from 1.
    fails_at: Option<usize>,
}

struct Copy(Device);

impl KvBytes for Device {
    fn begin(
        &self,
        _: usize,
        _: &[BlockId],
        _: usize,
        _: usize,
    ) -> Result<Box<dyn PendingKv>, String> {
        let moving = self.moving.fetch_add(1, Relaxed) + 1;
        self.most_moving.fetch_max(moving, Relaxed);
        Ok(Box::new(Copy(self.clone())))
    }
}

impl PendingKv for Copy {
    fn has_arrived(&self) -> Result<bool, String> {
        Ok(false)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, String> {
        let wait = self.0.waits.fetch_add(1, Relaxed) + 1;
        match self.0.fails_at == Some(wait) {
            true => Err("it fell off the bus".to_owned()),
            false => Ok(vec![7]),
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, Relaxed);
    }
}

type Sent = Receiver<(usize, usize)>;

/// An export whose receiver is gone after `most` events, and the layers and first tokens that it gets.
fn request(id: u64, most: usize) -> (SequenceId, EngineRequest, Sent) {
    let shared = Arc::new(Shared::new(EngineStats::default()));
    let (sender, sent) = channel();
    let mut left = most;
    let sink = move |event| {
        if let PrefillEvent::Kv {
            layer, first_token, ..
        } = event
        {
            sender.send((layer, first_token)).unwrap();
        }
        left -= 1;
        left > 0
    };
    let export = Export {
        id: RequestId(id),
        cancelled: Cancelled::default(),
        receiver: Callback::new(Box::new(sink)),
        tokens: Vec::new(),
        sent_to: 0,
        alone: false,
        handed: HashSet::new(),
        cached_tokens: 0,
        unread: Unread::new(0, channel().0),
        owed: None,
        _slot: Slot::take(&shared, 1).unwrap(),
    };
    let request = EngineRequest::Export(Box::new(export));
    (SequenceId(id), request, sent)
}

fn range(sequence: SequenceId) -> ExportRange {
    ExportRange {
        sequence,
        blocks: (0..3).map(BlockId).collect(),
        from: 0,
        to: TOKENS,
    }
}

/// Everything of some layers, in order.
fn whole(layers: usize) -> Vec<(usize, usize)> {
    let tokens = |layer| (0..TOKENS).map(move |token| (layer, token));
    (0..layers).flat_map(tokens).collect()
}

#[test]
fn a_bounded_part_of_a_prompt_is_on_its_way_at_a_time() {
    let device = Device::default();
    let (id, export, sent) = request(1, usize::MAX);
    let mut requests = BTreeMap::from([(id, export)]);
    let mut queue = ExportQueue::default();
    for layer in 0..LAYOUT.layers {
        queue.begin(&range(id), layer, &LAYOUT, &device, &mut requests);
        queue.send_arrived(&mut requests);
    }
    let most = MOST_MOVING_BYTES / TOKEN_BYTES;
    assert_eq!(device.most_moving.load(Relaxed), most);
    // No piece was waited for but for those whose room others took.
    let all = whole(LAYOUT.layers);
    assert_eq!(device.waits.load(Relaxed), all.len() - most);
    while queue.send_next(&mut requests) {}
    assert!(queue.is_empty() && queue.lost.is_empty());
    assert_eq!(sent.try_iter().collect::<Vec<_>>(), all);
    assert_eq!(device.moving.load(Relaxed), 0);
}

#[test]
fn kv_that_cannot_be_read_ends_its_export_and_no_other() {
    let device = Device {
        fails_at: Some(3),
        ..Device::default()
    };
    let (first, export, sent) = request(1, usize::MAX);
    let (second, other, all_sent) = request(2, usize::MAX);
    let mut requests = BTreeMap::from([(first, export), (second, other)]);
    let mut queue = ExportQueue::default();
    for id in [first, second] {
        queue.begin(&range(id), 0, &LAYOUT, &device, &mut requests);
    }
    while queue.send_next(&mut requests) {}
    let lost: Vec<_> = queue.lost.iter().map(|(id, e)| (*id, e.clone())).collect();
    let reason = "it fell off the bus".to_owned();
    assert_eq!(lost, [(first, EngineError::Forward { reason })]);
    assert_eq!(sent.try_iter().collect::<Vec<_>>(), [(0, 0), (0, 1)]);
    assert_eq!(all_sent.try_iter().collect::<Vec<_>>(), whole(1));
    assert_eq!(device.moving.load(Relaxed), 0);
}

#[test]
fn kv_that_nobody_wants_is_not_waited_for() {
    let device = Device::default();
    let (id, export, sent) = request(1, 2);
    let mut requests = BTreeMap::from([(id, export)]);
    let mut queue = ExportQueue::default();
    let few = ExportRange {
        to: 10,
        ..range(id)
    };
    queue.begin(&few, 0, &LAYOUT, &device, &mut requests);
    while queue.send_next(&mut requests) {}
    assert_eq!(sent.try_iter().count(), 2);
    assert_eq!(device.waits.load(Relaxed), 2);
    queue.begin(&few, 1, &LAYOUT, &device, &mut requests);
    assert!(queue.is_empty(), "the receiver is gone");
    queue.begin(&few, 1, &LAYOUT, &device, &mut BTreeMap::new());
    assert!(queue.is_empty(), "the request is gone");
    assert_eq!(device.moving.load(Relaxed), 0);
}
