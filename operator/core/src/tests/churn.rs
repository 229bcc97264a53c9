//! Whatever comes, changes, goes or is lost, no memory, CPU or GPU is booked twice, and no plan asks a node for more than it has.

use std::time::Duration;

use crate::testing::churn::{Churn, Mix, Setting};

/// Deployments that run all the time.
const STEADY: Mix = Mix {
    rings_per_mille: 0,
    rests: false,
    broken_percent: 0,
};
/// Some whose workers end for want of requests, of which some keep them or start without one, some rings, and changes that are given up.
const MIXED: Mix = Mix {
    rings_per_mille: 50,
    rests: true,
    broken_percent: 15,
};

/// Seeds, nodes, deployments a node, steps and which deployments: sizes at which most nodes are full and some deployments wait, and the
/// time that the test takes is short. `docs/benchmarks/churn.sh` has the large ones.
const COURSES: [(u64, usize, usize, usize, Mix); 5] = [
    (1, 6, 4, 300, STEADY),
    (2, 8, 3, 250, STEADY),
    (3, 10, 3, 200, STEADY),
    (1, 8, 4, 250, MIXED),
    (4, 8, 4, 200, MIXED),
];

fn setting(nodes: usize, deployments: usize, mix: Mix) -> Setting {
    Setting {
        nodes,
        deployments,
        mix,
        retries: 2,
        step: Duration::from_secs(15),
        times_planner: false,
    }
}

#[test]
fn nothing_is_booked_twice() {
    for (seed, nodes, a_node, steps, mix) in COURSES {
        let setting = setting(nodes, nodes * a_node, mix);
        let mut churn = Churn::new(seed, setting, false, || Duration::ZERO);
        let done = (0..steps).try_for_each(|_| churn.step());
        assert_eq!(done, Ok(()), "seed {seed}");
        let preloads = churn.figures().preloads;
        assert_eq!(
            preloads > 0,
            mix.rests,
            "seed {seed}: {preloads} starts without a request"
        );
    }
}
