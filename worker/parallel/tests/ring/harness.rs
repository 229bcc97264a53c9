//! Rings of threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_kernels::CpuBackend;
use hearth_model::{Membership, Part};
use hearth_parallel::{Group, LocalGroup, OneGroup, RingHead, Route, Stage, StageError};

use crate::support::{Files, Head, cache};

impl Files {
    /// A follower with its cache.
    pub(crate) fn stage(&self, part: Part) -> Stage<CpuBackend> {
        let model = self.part(&part).of_part(part);
        let kv = cache(&model);
        Stage::new(model, kv)
    }

    /// The head of a ring.
    pub(crate) fn head(&self, group: Arc<dyn Group>, route: &Route, flight_rows: usize) -> Head {
        let part = route.part(0).unwrap();
        let others = RingHead::new(Box::new(OneGroup(group)), route.clone(), flight_rows);
        assert!(others.rejoin(Duration::ZERO).unwrap());
        let mut model = self.part(&part).of_part(part);
        model.lead(Arc::new(others));
        let kv = cache(&model);
        Head { model, kv }
    }
}

/// What a ring computes, each stage in a thread.
pub(crate) fn run_ring(files: &Files, route: &Route, flight_rows: usize) -> Vec<u32> {
    in_ring(files, route, flight_rows, |head, _| head.answers().unwrap())
}

/// Runs `with` at the head of a ring whose other stages follow in threads until it returns. It may give the groups of
/// single ranks away.
pub(crate) fn in_ring<R>(
    files: &Files,
    route: &Route,
    flight_rows: usize,
    with: impl FnOnce(&mut Head, &dyn Group) -> R,
) -> R {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut ranks = LocalGroup::of(route.ranks());
        let group: Arc<dyn Group> = Arc::new(ranks.remove(0));
        for (rank, group) in (1..).zip(ranks) {
            let Ok(part) = route.part(rank) else {
                // It has no layers: it waits with its group.
                std::mem::forget(group);
                continue;
            };
            let mut stage = files.stage(part);
            let goes_on = || !is_over.load(Ordering::Relaxed);
            scope.spawn(move || match stage.follow(&group, route, goes_on) {
                Ok(()) | Err(StageError::Group(_)) => {}
                Err(error) => panic!("rank {rank}: {error}"),
            });
        }
        let mut head = files.head(Arc::clone(&group), route, flight_rows);
        let result = with(&mut head, &*group);
        is_over.store(true, Ordering::Relaxed);
        // With the head's group, every wait of the others ends.
        drop((head, group));
        result
    })
}
