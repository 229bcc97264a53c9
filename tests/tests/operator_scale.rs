//! Many deployments: fifty here; `hearth-scale` runs any number.

use std::time::Duration;

use hearth_tests::cluster::Options;
use hearth_tests::operator::{Scale, Stand};

#[test]
fn fifty_deployments_on_fifteen_nodes() {
    let Some(stand) = Stand::start_or_skip(&Options::default()) else {
        return;
    };
    let scale = Scale {
        deployments: 50,
        nodes: 15,
        foreign_pods: 200,
        idle: Duration::from_secs(10),
    };
    let report = scale.run(&stand);
    println!("{report}");
    assert_eq!(report.idle_writes, 0, "{report}");
    assert!(report.writes_per_deployment() < 40.0, "{report}");
    let (_, most_mib) = report.resident_mib;
    assert!(most_mib < 40.0, "{report}");
}
