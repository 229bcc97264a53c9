//! An engine whose model has layers on other ranks: what it does when those are lost.
#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc::Receiver};
use std::time::Duration;

use hearth_engine::{Engine, GenerateEvent};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::MemoryOps;
use hearth_kernels::{CpuBackend, CpuOptions, CpuTensor};
use hearth_model::{Away, Membership, Model, ModelError, OtherRanks, Part, modules};
use hearth_residency::Resident;
use support::{ask, checkpoints, finish, options, prompt, start};

const PATIENCE: Duration = Duration::from_secs(60);

/// Other ranks that add nothing to the residual stream, and are lost at each of the first `deaths` passes.
struct Mortal {
    deaths: AtomicU32,
    is_lost: AtomicBool,
    joins: AtomicU32,
    passes: AtomicU64,
    /// How often one comes that computes otherwise, before the right one does.
    strangers: AtomicU32,
}

impl OtherRanks<CpuBackend> for Mortal {
    fn begin_pass(&self) -> u64 {
        self.passes.fetch_add(1, Ordering::Relaxed)
    }

    fn send(&self, _: &Away<'_>, _: &CpuBackend, _: CpuTensor) -> Result<(), ModelError> {
        Ok(())
    }

    fn receive(
        &self,
        away: &Away<'_>,
        backend: &CpuBackend,
        _: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<CpuTensor, ModelError> {
        let lives = |left: u32| left.checked_sub(1);
        if (self.deaths)
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lives)
            .is_ok()
        {
            self.is_lost.store(true, Ordering::Relaxed);
            let why = "it has died".to_owned();
            return Err(ModelError::Group { why });
        }
        let rows = away.spans.iter().map(|span| span.rows).sum::<usize>();
        Ok(backend.upload(rows, away.hidden, &vec![0.5; rows * away.hidden])?)
    }

    fn flight_rows(&self) -> usize {
        4
    }
}

impl Membership for Mortal {
    fn numerics(&self) -> Vec<String> {
        Vec::new()
    }

    fn lost(&self) -> Option<String> {
        let is_lost = self.is_lost.load(Ordering::Relaxed);
        is_lost.then(|| "stage-0 is lost to its group".to_owned())
    }

    fn rejoin(&self, _: Duration) -> Result<bool, ModelError> {
        let comes = |left: u32| left.checked_sub(1);
        let stranger = (self.strangers).fetch_update(Ordering::Relaxed, Ordering::Relaxed, comes);
        if stranger.is_ok() {
            let why = "stage-0 computes with scalar, and avx2 is needed".to_owned();
            return Err(ModelError::Unlike { why });
        }
        self.joins.fetch_add(1, Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
        Ok(true)
    }
}

/// An engine with the first layer of a golden; the others are elsewhere.
fn engine(deaths: u32) -> (Engine, Arc<Mortal>) {
    let dir = &checkpoints()[0];
    let config = ModelConfig::read(dir).unwrap();
    let part = Part::new(vec![0..1; 1], true, config.layers).unwrap();
    let cpu = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    let backend = Arc::new(CpuBackend::new(cpu).unwrap());
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = part.of(modules(&config).unwrap());
    let residency = Arc::new(Resident::open(&checkpoint, specs, backend.clone()).unwrap());
    let mut model = Model::new(config, backend, residency)
        .unwrap()
        .of_part(part);
    let others = Arc::new(Mortal {
        deaths: deaths.into(),
        is_lost: AtomicBool::new(false),
        joins: AtomicU32::new(0),
        passes: AtomicU64::new(0),
        strangers: AtomicU32::new(0),
    });
    model.lead(others.clone());
    (Engine::start(model, options(&|_| {})).unwrap(), others)
}

/// The error that an answer ends with.
fn error(events: &Receiver<GenerateEvent>) -> String {
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            GenerateEvent::Failed(error) => return error.to_string(),
            GenerateEvent::Finished { .. } => panic!("it was answered"),
            _ => {}
        }
    }
}

#[test]
fn a_lost_member_costs_no_token() {
    let want = finish(start(&engine(0).0, ask(&prompt(20, 3), 8)));
    for deaths in [1, 2] {
        let (engine, others) = engine(deaths);
        assert_eq!(finish(start(&engine, ask(&prompt(20, 3), 8))), want);
        assert_eq!(others.joins.load(Ordering::Relaxed), deaths);
        let times = if deaths == 1 { "once" } else { "2 times" };
        let told = engine.group();
        assert!(told.starts_with("complete; members were lost"), "{told}");
        assert!(told.contains(times) && told.contains("stage-0"), "{told}");
    }
    assert_eq!(engine(0).0.group(), "");
}

#[test]
fn a_member_that_computes_otherwise_is_waited_out_and_named_meanwhile() {
    let want = finish(start(&engine(0).0, ask(&prompt(20, 3), 8)));
    let (engine, others) = engine(1);
    others.strangers.store(2, Ordering::Relaxed);
    let answer = start(&engine, ask(&prompt(20, 3), 8));
    let begun = std::time::Instant::now();
    while !engine
        .group()
        .contains("stage-0 computes with scalar, and avx2 is needed")
    {
        assert!(begun.elapsed() < PATIENCE, "{}", engine.group());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(finish(answer), want);
    assert_eq!(others.joins.load(Ordering::Relaxed), 1);
    let told = engine.group();
    assert!(
        told.starts_with("complete; members were lost once"),
        "{told}"
    );
}

#[test]
fn a_request_that_ends_members_again_and_again_is_given_up() {
    let (engine, others) = engine(3);
    let (events, _handle) = start(&engine, ask(&prompt(20, 3), 8));
    let error = error(&events);
    assert!(error.contains("lost 3 times"), "{error}");
    assert!(error.contains("stage-0"), "{error}");
    // The others are answered.
    let answer = finish(start(&engine, ask(&prompt(9, 1), 4)));
    assert_eq!(answer.len(), 4);
    assert_eq!(others.joins.load(Ordering::Relaxed), 3);
}
