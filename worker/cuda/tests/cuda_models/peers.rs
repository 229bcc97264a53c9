//! Ranks that share passes, each with a backend of its own on the GPU: the bits of one.

use std::sync::Arc;
use std::time::Duration;

use hearth_cuda::CudaBackend;
use hearth_model::{ExpertParallel, Membership, Model, Residency, Sharing};
use hearth_parallel::{Follower, GroupPeers, LocalGroup, OneGroup, StageError};
use hearth_residency::RingSlots;

use crate::device::gpu;
use crate::streaming::{Files, bits_of, cache};

type Weights = dyn Fn(&Files, &Arc<CudaBackend>) -> Arc<dyn Residency<CudaBackend>> + Sync;

/// Bits of a prompt and of short passes after it, of which two ranks compute a share each.
fn bits(files: &Files, weights: &Weights, experts: ExpertParallel) -> [Vec<u32>; 3] {
    let model = |gpu: &Arc<CudaBackend>| {
        let weights = weights(files, gpu);
        Model::new(files.config.clone(), gpu.clone(), weights).unwrap()
    };
    std::thread::scope(|scope| {
        let mut groups = LocalGroup::of(2);
        let (of_follower, of_head) = (groups.remove(1), groups.remove(0));
        scope.spawn(move || {
            let gpu = gpu();
            let model = model(&gpu);
            let kv = cache(&gpu, &model);
            let sharing = Sharing::new(experts, 2);
            let mut follower = Follower::new(model, kv, |model, peers| model.share(peers, sharing));
            match follower.follow(Arc::new(of_follower), || true) {
                Ok(()) | Err(StageError::Group(_)) => {}
                Err(error) => panic!("{error}"),
            }
        });
        let gpu = gpu();
        let peers = GroupPeers::of_head(Box::new(OneGroup(Arc::new(of_head))));
        assert!(peers.rejoin(Duration::ZERO).unwrap());
        let mut model = model(&gpu);
        model.share(Arc::new(peers), Sharing::new(experts, 2));
        // With the model, the head's group ends, and the follower with it.
        bits_of(&gpu, model)
    })
}

#[test]
fn two_ranks_give_the_bits_of_one() {
    let resident = |files: &Files, gpu: &Arc<CudaBackend>| files.resident(gpu);
    let streamed = |files: &Files, gpu: &Arc<CudaBackend>| {
        files.streamed(gpu, RingSlots::Fixed(3)) as Arc<dyn Residency<CudaBackend>>
    };
    for case in ["deepseek_v3", "qwen3_moe_fp8"] {
        let files = Files::of(case);
        let gpu = gpu();
        let model = Model::new(files.config.clone(), gpu.clone(), files.resident(&gpu));
        let want = bits_of(&gpu, model.unwrap());
        for experts in [ExpertParallel::SmallEp, ExpertParallel::Ep] {
            assert!(
                bits(&files, &resident, experts) == want,
                "{case}, {experts:?}"
            );
            assert!(
                bits(&files, &streamed, experts) == want,
                "{case}, {experts:?}, streamed"
            );
        }
    }
}
