//! Measuring a node.

use super::*;

#[tokio::test]
async fn a_node_is_measured_once_and_looked_at_each_time() {
    let fixture = Fixture::new();
    let status = profile(&fixture.operator)
        .await
        .expect_err("it cannot be measured yet");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("being measured"), "{status}");
    let first = first_profile(&fixture.operator).await;
    assert_eq!(first.node, "node-1");
    assert_eq!(first.memory.total_bytes, meminfo("MemTotal"));
    assert!(!first.cpus.is_empty() && first.memory.read_one_thread_gbps > 0.0);
    assert!(first.compute.f32_one_thread_gflops > 0.0);
    let least = first.memory.least_available_bytes;
    assert!(least.is_some_and(|bytes| 0 < bytes && bytes <= first.memory.available_bytes));
    let disk = &first.disks[0];
    assert_eq!(disk.path, fixture.cache.path().display().to_string());
    assert!(disk.free_bytes > 0 && disk.read_gbps > 0.0, "{disk:?}");
    // Measuring left only its result behind.
    let names: BTreeSet<_> = fs::read_dir(fixture.cache.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        names,
        ["models", "partial", "profile.json"]
            .map(str::to_owned)
            .into()
    );

    // Memory used by a measuring child does not stay in the agent, since it was never there.
    let (now_mib, peak_mib) = (
        fixture.agent.kib("VmRSS") >> 10,
        fixture.agent.kib("VmHWM") >> 10,
    );
    eprintln!("agent: {now_mib} MiB, at most {peak_mib} MiB");
    assert!(peak_mib < 64, "the agent took {peak_mib} MiB");

    // The next agent takes over the rates, and reads memory and disk itself.
    edit_kept(&fixture, |value| {
        value["profile"]["memory"]["availableBytes"] = 1.into();
        value["profile"]["disks"][0]["freeBytes"] = 1.into();
        value["profile"]["node"] = "node-0".into();
    });
    let fixture = fixture.restarted();
    let again = profile(&fixture.operator)
        .await
        .expect("the rates are kept");
    assert_eq!(again.measured_at, first.measured_at);
    assert_eq!(again.compute, first.compute);
    assert_eq!(again.disks[0].read_gbps, first.disks[0].read_gbps);
    assert!(again.memory.available_bytes > 1 && again.disks[0].free_bytes > 1);
    assert_eq!(again.node, "node-1");
}

#[tokio::test]
async fn other_hardware_is_measured_again() {
    let fixture = Fixture::new();
    let first = first_profile(&fixture.operator).await;
    edit_kept(&fixture, |value| {
        value["hardware"] = "another machine".into();
        value["profile"]["measuredAt"] = "2020-01-01T00:00:00Z".into();
    });
    let fixture = fixture.restarted();
    let status = profile(&fixture.operator)
        .await
        .expect_err("these rates are another machine's");
    assert!(status.message().contains("it has changed"), "{status}");
    let again = first_profile(&fixture.operator).await;
    // RFC 3339 times in the same time zone sort chronologically.
    assert!(again.measured_at >= first.measured_at);
}
