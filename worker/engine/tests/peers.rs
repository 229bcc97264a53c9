//! An engine whose model has peers, and computes alone what they cannot.
#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hearth_engine::{Engine, Health, PrefillEvent, PrefillInput};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{CpuBackend, CpuOptions};
use hearth_model::{
    Exchange, ExpertParallel, GroupRows, Membership, Model, ModelError, Peers, Sharing, modules,
};
use hearth_residency::Resident;
use support::{checkpoints, options, prompt};

const PATIENCE: Duration = Duration::from_secs(60);

/// What the other rank does in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It is gone when the pass begins.
    Lost,
    /// It gives the pass up.
    GivesUp,
}

/// A second rank that can do nothing.
struct Useless {
    fault: Fault,
    is_lost: AtomicBool,
    passes: AtomicU32,
    joins: AtomicU32,
}

impl Membership for Useless {
    fn numerics(&self) -> Vec<String> {
        Vec::new()
    }

    fn lost(&self) -> Option<String> {
        let is_lost = self.is_lost.load(Ordering::Relaxed);
        is_lost.then(|| "stage-0 is lost to its group".to_owned())
    }

    fn rejoin(&self, _: Duration) -> Result<bool, ModelError> {
        self.joins.fetch_add(1, Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
        Ok(true)
    }
}

impl Peers for Useless {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn begin_pass(&self, _: &GroupRows) -> Result<u64, ModelError> {
        Ok(self.passes.fetch_add(1, Ordering::Relaxed).into())
    }

    fn give_up(&self, _: u64, _: &str) {}

    fn send(&self, _: Exchange, _: usize, _: Vec<u8>) -> Result<(), ModelError> {
        Ok(())
    }

    fn receive(
        &self,
        exchange: Exchange,
        _: usize,
        _: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<Vec<u8>, ModelError> {
        let why = format!("it ends in layer {}", exchange.layer);
        match self.fault {
            Fault::Lost => {
                self.is_lost.store(true, Ordering::Relaxed);
                Err(ModelError::Group { why })
            }
            Fault::GivesUp => Err(ModelError::Member { why }),
        }
    }

    fn accuse(&self, _: usize, why: String) -> ModelError {
        ModelError::Group { why }
    }
}

fn golden() -> std::path::PathBuf {
    let mut all = checkpoints().into_iter();
    let is_moe = |dir: &std::path::PathBuf| dir.ends_with("qwen3_moe");
    all.find(is_moe).unwrap()
}

/// An engine of a model with experts, and a second rank that has this fault.
fn engine(fault: Option<Fault>) -> (Engine, Option<Arc<Useless>>) {
    let dir = golden();
    let config = ModelConfig::read(&dir).unwrap();
    let cpu = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    let backend = Arc::new(CpuBackend::new(cpu).unwrap());
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let specs = modules(&config).unwrap();
    let residency = Arc::new(Resident::open(&checkpoint, specs, backend.clone()).unwrap());
    let mut model = Model::new(config, backend, residency).unwrap();
    let peers = fault.map(|fault| {
        let peers = Arc::new(Useless {
            fault,
            is_lost: AtomicBool::new(false),
            passes: AtomicU32::new(0),
            joins: AtomicU32::new(0),
        });
        let sharing = Sharing {
            is_self_sufficient: true,
            ..Sharing::new(ExpertParallel::SmallEp, 2)
        };
        model.share(peers.clone(), sharing);
        peers
    });
    (Engine::start(model, options(&|_| {})).unwrap(), peers)
}

/// Logits of a prompt's last token, and the bytes of its last KV of each layer.
fn read(engine: &Engine, tokens: &[u32], alone: bool) -> (Vec<f32>, Vec<bytes::Bytes>) {
    let (tx, events) = channel();
    let input = PrefillInput {
        tokens: tokens.to_vec(),
        alone,
        ..PrefillInput::default()
    };
    let sink = Box::new(move |event| tx.send(event).is_ok());
    let _prefill = engine.prefill(input, sink).unwrap();
    let mut kv = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            PrefillEvent::Started { .. } => {}
            PrefillEvent::Kv { layer, data, .. } => {
                kv.resize(kv.len().max(layer + 1), bytes::Bytes::new());
                kv[layer] = data;
            }
            PrefillEvent::Done { logits, .. } => return (logits, kv),
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_prompt_that_peers_cannot_read_is_read_alone_with_the_same_bits() {
    let tokens = prompt(40, 3);
    let want = read(&engine(None).0, &tokens, false);
    // Who is lost may be back, and is tried again once.
    for (fault, tries) in [(Fault::Lost, 2), (Fault::GivesUp, 1)] {
        let (engine, peers) = engine(Some(fault));
        let peers = peers.unwrap();
        assert_eq!(read(&engine, &tokens, false), want, "{fault:?}");
        assert_eq!(peers.passes.load(Ordering::Relaxed), tries, "{fault:?}");
        assert_eq!(engine.health(), Health::Healthy, "{fault:?}");
        // Nobody waits for it, and it is asked to join again.
        let deadline = Instant::now() + PATIENCE;
        while fault == Fault::Lost && peers.joins.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < deadline, "nobody asked");
            std::thread::sleep(Duration::from_millis(10));
        }
        let other = prompt(33, 5);
        read(&engine, &other, false);
        assert_eq!(peers.passes.load(Ordering::Relaxed), 2 * tries, "{fault:?}");
    }
}

#[test]
fn a_prompt_that_is_to_be_read_alone_asks_no_peer() {
    let tokens = prompt(40, 3);
    let want = read(&engine(None).0, &tokens, false);
    let (engine, peers) = engine(Some(Fault::GivesUp));
    assert_eq!(read(&engine, &tokens, true), want);
    assert_eq!(peers.unwrap().passes.load(Ordering::Relaxed), 0);
}
