//! Reads of an expert after its slot was released.

use std::sync::Arc;

use hearth_model::{
    ExpertShare, Guard, ModuleId, ModuleWeights, Residency, ResidencyError, ResidencyStats,
};
use hearth_residency::StreamLoading;
use hearth_virtual::VirtualBackend;

use super::{CASES, Files, device, prompt};

/// A policy with the fault to be found: it releases experts before what reads them is queued.
struct Hasty {
    of: Arc<StreamLoading<VirtualBackend>>,
    /// The expert that it does so with, if there is one.
    victim: Option<ModuleId>,
}

impl Residency<VirtualBackend> for Hasty {
    fn acquire(&self, id: ModuleId) -> Result<Guard<VirtualBackend>, ResidencyError> {
        let guard = self.of.acquire(id)?;
        if self.victim != Some(id) {
            return Ok(guard);
        }
        let field = |name| (name, guard.matrix(name).unwrap().clone());
        let matrices = Vec::from(["gate", "up", "down"].map(field));
        let kept = ModuleWeights::new(id, matrices, Vec::new(), guard.bytes());
        Ok(Guard::new(Arc::new(kept), None))
    }

    fn begin_pass(&self, rows: usize, share: ExpertShare) -> Result<(), ResidencyError> {
        self.of.begin_pass(rows, share)
    }

    fn announce(&self, layer: u32, upcoming: &[ModuleId]) {
        self.of.announce(layer, upcoming);
    }

    fn group(&self, upcoming: &[ModuleId]) -> usize {
        self.of.group(upcoming)
    }

    fn stats(&self) -> ResidencyStats {
        self.of.stats()
    }
}

/// With a slot for each expert none is filled twice in a pass, so that nothing but the release can tell.
#[test]
fn an_expert_that_is_read_after_its_release_is_found() {
    for case in CASES {
        let files = Files::of(case);
        let experts = files.expert_ids();
        let run = |victim| {
            let device = device(1 << 30);
            let of = files.streamed(&device, Some(experts.len())).unwrap();
            let mut runner = files.model(Arc::clone(&device), Arc::new(Hasty { of, victim }));
            runner.try_run(0, &prompt(), &mut ())
        };
        let chosen = super::chosen(&files, &prompt(), 0);
        for victim in [
            chosen[0],
            chosen[chosen.len() / 2],
            chosen[chosen.len() - 1],
        ] {
            let error = run(Some(victim)).err().map(|error| error.to_string());
            let is_found = error
                .as_ref()
                .is_some_and(|error| error.contains("its slot was released"));
            assert!(is_found, "{case}, {victim}: {error:?}");
        }
        // Without the fault, the same policy runs.
        assert!(run(None).is_ok(), "{case}");
    }
}
