//! Virtual devices of nodes: plans that stream experts and have CPUs compute others, a device that is lost while its node is
//! Ready, and devices that kubelets hand out as GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use hearth_tests::cluster::{Cluster, condition, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::release::{self, PATIENCE, deployment, infd, names, patch, pods, said};
use super::release::{settled, wait_until_settled};
use super::streams::{self, Streams};
use super::{OPTIONS, sharing};

/// Memory of each node's device, and the file in a worker's Pod that has it lost.
const DEVICE: &str = "virtual:memory=96Mi,fault=/tmp/fault";

#[test]
fn virtual_devices_stream_experts_through_kills_a_rollout_and_a_loss() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    let devices = values();
    let values: Vec<&str> = devices.iter().map(String::as_str).collect();
    release::install_with(&cluster, &images, 1, &values);
    are_measured(&cluster);
    read_prompts_together_also_when_one_dies(&cluster);
    hold_a_plan_with_a_ring_and_halves(&cluster);
    lose_no_token_when_a_worker_is_killed(&cluster);
    lose_no_token_in_a_rollout(&cluster);
    that_are_lost_are_left(&cluster);
    cluster.kubectl(&["delete", "infd", "demo"]);
    are_handed_out_as_gpus(&cluster);
    that_are_handed_out_have_both_workers_in_one_container(&cluster);
    that_are_handed_out_go_to_more_workers_and_nobody_moves(&cluster);
    cluster.kubectl(&["delete", "infd", "demo"]);
    sharing::a_gpu_goes_by_priority_and_idleness(&cluster);
}

/// Returns values of the chart that give each node its device.
pub(crate) fn values() -> [String; 2] {
    ["node-1", "node-2"].map(|node| {
        let device = DEVICE.replace(',', "\\,");
        format!("agent.virtualDevices.{node}={device}")
    })
}

fn are_measured(cluster: &Cluster) {
    for node in ["node-1", "node-2"] {
        let profile = cluster.get("nodeprofile", "", node).expect("a profile");
        let gpu = &profile["status"]["gpus"][0];
        assert_eq!(gpu["virtualDevice"], DEVICE, "{profile:#}");
        for rate in ["copyGbps", "readGbps", "bf16Gflops"] {
            assert!(gpu[rate].as_f64() > Some(0.0), "{rate} of {profile:#}");
        }
    }
}

/// Returns a deployment whose prompts the devices of both nodes read together.
pub(crate) fn together() -> Value {
    let spec = json!({
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512},
        "prefill": {"mode": "DistributedStreamLoading", "chunkedBelowTokens": 0},
        "decode": {"maxBatch": 4},
    });
    deployment("together", spec)
}

/// The devices of two nodes read each prompt together (DSLP). A follower that is killed twice is away until its kubelet has waited.
fn read_prompts_together_also_when_one_dies(cluster: &Cluster) {
    cluster.apply(&together().to_string());
    let plan = plan_of(cluster, &wait_until_settled(cluster, "together"));
    let ranks = plan["ranks"].as_array().expect("ranks");
    let peers: Vec<_> = ranks.iter().filter(|it| it["peers"].is_object()).collect();
    assert_eq!(peers.len(), 2, "{plan:#}");
    assert_ne!(peers[0]["node"], peers[1]["node"], "{plan:#}");
    let members = || -> Option<Vec<Value>> {
        let found = infd(cluster, "together");
        found["status"]["groups"][0]["members"].as_array().cloned()
    };
    let all_are_ready = || {
        let members = members()?;
        let is_whole = members.len() == 2 && members.iter().all(|it| it["state"] == "Ready");
        is_whole.then_some(())
    };
    wait_until("both members are ready", PATIENCE, all_are_ready);
    let streams = Streams::start(&cluster.reach("default", "together", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    let follower = names(&pods(cluster, "together", "stage")).remove(0);
    for _ in 0..2 {
        wait_until("a follower to kill", PATIENCE, || {
            (cluster.kill_pod_processes("default", &follower) > 0).then_some(())
        });
        streams.wait_for(streams::STREAMS / 2);
    }
    wait_until("the status says who is missing", PATIENCE, || {
        let missing = members()?.into_iter().find(|it| it["state"] != "Ready")?;
        assert_eq!(missing["pod"], follower.as_str(), "{missing:#}");
        Some(())
    });
    streams.wait_for(streams::STREAMS / 2);
    wait_until("it has been taken back", 2 * PATIENCE, all_are_ready);
    streams.wait_for(streams::STREAMS);
    println!("{} answers around a peer that dies", streams.finish());
    cluster.kubectl(&["delete", "infd", "together"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "together", "").is_empty().then_some(())
    });
}

fn hold_a_plan_with_a_ring_and_halves(cluster: &Cluster) {
    let plan = demo_with_a_ring_and_halves(cluster, &json!({}));
    for (role, policy) in [("Prefill", "StreamLoading"), ("Decode", "HostExperts")] {
        let rank = rank(&plan, role);
        assert_eq!(rank["residency"]["policy"], policy, "{plan:#}");
        assert_eq!(rank["virtualDevice"], DEVICE, "{plan:#}");
        let share = rank["gpuMemoryBytes"].as_u64().expect("bytes");
        let pod = &pods(cluster, "demo", &role.to_lowercase())[0];
        let resources = &pod["spec"]["containers"][0]["resources"];
        let requested = resources["requests"]["memory"].as_str().expect("memory");
        assert!(
            requested.parse::<u64>().expect("bytes") > share,
            "{resources:#}"
        );
        assert!(resources["limits"].is_null(), "{resources:#}");
    }
    assert_eq!(rank(&plan, "Decode")["dualBatch"], true, "{plan:#}");
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(2 * streams::STREAMS);
    streams.finish();
}

/// Applies a deployment that streams experts for prompts and has the CPUs compute them for answers; returns its plan once it
/// serves.
fn demo_with_a_ring_and_halves(cluster: &Cluster, placement: &Value) -> Value {
    let model = json!({"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512});
    let spec = json!({
        "model": model,
        "prefill": {"mode": "StreamLoading", "chunkedBelowTokens": 0},
        "decode": {"maxBatch": 4, "dualBatch": "On"},
        "placement": placement,
    });
    cluster.apply(&deployment("demo", spec).to_string());
    plan_of(cluster, &wait_until_settled(cluster, "demo"))
}

fn lose_no_token_when_a_worker_is_killed(cluster: &Cluster) {
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    for role in ["prefill", "decode"] {
        streams.wait_for(streams::STREAMS / 2);
        let worker = names(&pods(cluster, "demo", role)).remove(0);
        assert!(cluster.kill_pod_processes("default", &worker) > 0);
    }
    streams.wait_for(streams::STREAMS);
    println!("{} answers around two killed workers", streams.finish());
}

fn lose_no_token_in_a_rollout(cluster: &Cluster) {
    let before = names(&pods(cluster, "demo", "decode"));
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    patch(cluster, "demo", &json!({"decode": {"maxBatch": 2}}));
    let found = wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS / 2);
    println!("{} answers around a rollout", streams.finish());
    assert_ne!(names(&pods(cluster, "demo", "decode")), before);
    let plan = plan_of(cluster, &found);
    assert_eq!(rank(&plan, "Decode")["maxBatch"], 2, "{plan:#}");
}

/// The work goes to the other node's device, and from there, once the spec allows it, to the CPUs.
fn that_are_lost_are_left(cluster: &Cluster) {
    let home = node_of_decode(cluster);
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    lose_device(cluster);
    let found = wait_until("another device has the work", 2 * PATIENCE, || {
        settled(cluster, "demo").filter(|_| node_of_decode(cluster) != home)
    });
    streams.wait_for(streams::STREAMS / 2);
    println!("{} answers around a lost device", streams.finish());
    let ready = cluster.get("node", "", &home).expect("the node");
    assert_eq!(condition(&ready, "Ready"), Some("True"), "{ready:#}");
    let cause = format!("GPU VIRTUAL-0 of {home} is lost: decode-0");
    for kind in ["Degraded", "Planned"] {
        let (_, message) = said(&found, kind);
        assert!(message.contains(&cause), "{kind}: {message}");
        assert!(message.contains("Xid 79"), "{kind}: {message}");
    }
    assert_eq!(said(&found, "Degraded").0, "GpuLost");
    let plan = plan_of(cluster, &found);
    for role in ["Prefill", "Decode"] {
        let rank = rank(&plan, role);
        assert_eq!(rank["device"], "VIRTUAL-0", "{plan:#}");
        assert_ne!(rank["node"], home.as_str(), "{plan:#}");
    }

    // A device that nobody uses is not missed.
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    lose_device(cluster);
    wait_until("no place is left, and that is told", 2 * PATIENCE, || {
        let (reason, message) = said(&infd(cluster, "demo"), "Degraded");
        (reason == "GpuLost" && message.contains("fits nowhere else")).then_some(())
    });
    let modes = json!({"prefill": {"mode": "Auto"}, "decode": {"dualBatch": "Auto"}});
    patch(cluster, "demo", &modes);
    let plan = plan_of(cluster, &wait_until_settled(cluster, "demo"));
    for role in ["Prefill", "Decode"] {
        assert_eq!(rank(&plan, role)["device"], "cpu", "{plan:#}");
    }
    streams.wait_for(streams::STREAMS);
    streams.finish();
}

fn are_handed_out_as_gpus(cluster: &Cluster) {
    let directory = "agent.devicePluginDirectory=/var/lib/kubelet/device-plugins";
    release::upgrade(cluster, &format!("{directory},nodes.minResidence=5s"));
    let is_offered = |name: &str| {
        let node = cluster.get("node", "", name).expect("the node");
        let profile = cluster.get("nodeprofile", "", name).expect("a profile");
        node["status"]["allocatable"]["nvidia.com/gpu"] == "1"
            && profile["status"]["gpus"][0]["fromDevicePlugin"] == true
    };
    wait_until("kubelets offer the devices", PATIENCE, || {
        ["node-1", "node-2"]
            .into_iter()
            .all(is_offered)
            .then_some(())
    });
}

/// The kubelet gives a device to one container, which has both workers; each of them is killed and starts again alone.
fn that_are_handed_out_have_both_workers_in_one_container(cluster: &Cluster) {
    let one_node = json!({"nodeSelector": {"kubernetes.io/hostname": "node-2"}});
    let plan = demo_with_a_ring_and_halves(cluster, &one_node);
    let [prefill, decode] = ["Prefill", "Decode"].map(|role| rank(&plan, role));
    assert_eq!(prefill["inPodOf"], decode["name"], "{plan:#}");
    assert_eq!(
        (&decode["gpus"], &prefill["gpus"]),
        (&json!(1), &Value::Null)
    );
    for rank in [prefill, decode] {
        assert_eq!(rank["virtualDevice"], DEVICE, "{plan:#}");
    }
    assert!(pods(cluster, "demo", "prefill").is_empty());
    let pod = pods(cluster, "demo", "decode").remove(0);
    let containers = pod["spec"]["containers"].as_array().expect("containers");
    let [container] = &containers[..] else {
        panic!("not one container: {pod:#}");
    };
    let limits = &container["resources"]["limits"];
    assert_eq!(limits["nvidia.com/gpu"], "1", "{container:#}");

    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    for (victim, other) in [("prefill", "decode"), ("decode", "prefill")] {
        streams.wait_for(streams::STREAMS / 2);
        let before = workers_in(cluster, &pod);
        kill_process(before[victim], Signal::KILL).expect("a signal");
        let after = wait_until("the supervisor starts it again", PATIENCE, || {
            let now = workers_in(cluster, &pod);
            (now.get(victim)? != &before[victim]).then_some(now)
        });
        assert_eq!(after.get(other), before.get(other), "{victim} was killed");
    }
    streams.wait_for(streams::STREAMS);
    let now = pods(cluster, "demo", "decode").remove(0);
    assert_eq!(now["metadata"]["uid"], pod["metadata"]["uid"], "{now:#}");
    let status = &now["status"]["containerStatuses"][0];
    assert_eq!(status["restartCount"], 0, "{now:#}");

    are_traced(cluster, &pod);

    // There is one device, so the next Pod waits for the end of this one, and answers wait with it.
    patch(cluster, "demo", &json!({"decode": {"maxBatch": 2}}));
    let plan = plan_of(cluster, &wait_until_settled(cluster, "demo"));
    streams.wait_for(streams::STREAMS / 2);
    println!("{} answers in one container", streams.finish());
    assert_eq!(rank(&plan, "Prefill")["inPodOf"], "decode-0", "{plan:#}");
    let next = pods(cluster, "demo", "decode").remove(0);
    assert_ne!(next["metadata"]["uid"], pod["metadata"]["uid"], "{next:#}");
}

/// A second worker gets the other node's device beside the first one; a third has none, and waits.
fn that_are_handed_out_go_to_more_workers_and_nobody_moves(cluster: &Cluster) {
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
    let model = json!({"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512});
    let spec = json!({"model": model, "prefill": {"mode": "Chunked"}, "decode": {"maxBatch": 4}});
    cluster.apply(&deployment("demo", spec).to_string());
    let uids = || -> BTreeSet<String> {
        let pods = pods(cluster, "demo", "").into_iter();
        pods.map(|pod| pod["metadata"]["uid"].to_string()).collect()
    };
    let plan = plan_of(cluster, &wait_until_settled(cluster, "demo"));
    assert_eq!(rank(&plan, "Decode")["device"], "VIRTUAL-0", "{plan:#}");
    let first = uids();
    patch(cluster, "demo", &json!({"decode": {"replicas": 2}}));
    let plan = plan_of(cluster, &wait_until_settled(cluster, "demo"));
    let both = uids();
    assert!(both.is_superset(&first), "{first:?} {both:?} {plan:#}");
    let ranks = plan["ranks"].as_array().expect("ranks").iter();
    let decode: Vec<_> = ranks.filter(|rank| rank["role"] == "Decode").collect();
    assert_eq!(decode.len(), 2, "{plan:#}");
    assert!(decode.iter().all(|rank| rank["device"] == "VIRTUAL-0"));
    assert_ne!(decode[0]["node"], decode[1]["node"], "{plan:#}");
    patch(cluster, "demo", &json!({"decode": {"replicas": 3}}));
    wait_until("a third has no device", PATIENCE, || {
        (said(&infd(cluster, "demo"), "Planned").0 == "TooFewGpus").then_some(())
    });
    assert_eq!(uids(), both);
    patch(cluster, "demo", &json!({"decode": {"replicas": 1}}));
    wait_until_settled(cluster, "demo");
    assert_eq!(uids(), first);
}

/// A trace from within the container has what both of its workers compute.
fn are_traced(cluster: &Cluster, pod: &Value) {
    let name = pod["metadata"]["name"].as_str().expect("a name");
    let seconds = "--seconds=2";
    let trace = cluster.kubectl(&["exec", name, "--", "hearth-worker", "trace", seconds]);
    let trace: Value = serde_json::from_str(&trace).expect("a trace");
    let events = trace["traceEvents"].as_array().expect("events");
    for rank in ["prefill-0", "decode-0"] {
        let is_its_name = |event: &&Value| {
            let name = event["args"]["name"].as_str().unwrap_or_default();
            event["name"] == "process_name" && name.starts_with(rank)
        };
        let process = events.iter().find(is_its_name).expect(rank);
        let recorded = events.iter().filter(|event| event["pid"] == process["pid"]);
        assert!(
            recorded.filter(|event| event["ph"] == "X").count() > 0,
            "{rank}"
        );
    }
    let gateway = &pods(cluster, "demo", "gateway")[0];
    let name = gateway["metadata"]["name"].as_str().expect("a name");
    let words = ["exec", name, "--", "hearth-worker", "trace"];
    let refused = cluster.try_kubectl(&words).expect_err("no worker");
    assert!(refused.contains("use a Pod of a worker"), "{refused}");
}

/// The processes of the workers in a Pod, by role.
fn workers_in(cluster: &Cluster, pod: &Value) -> BTreeMap<String, Pid> {
    let name = pod["metadata"]["name"].as_str().expect("a name");
    let processes = cluster.pod_processes("default", name).into_iter();
    let role = |process: u32| {
        let line = std::fs::read_to_string(format!("/proc/{process}/cmdline")).ok()?;
        let role = line.split('\0').nth(1)?;
        let pid = Pid::from_raw(process.cast_signed())?;
        ["prefill", "decode"]
            .contains(&role)
            .then(|| (role.to_owned(), pid))
    };
    processes.filter_map(role).collect()
}

/// Has the device of the decode worker lost, by the file in its Pod.
fn lose_device(cluster: &Cluster) {
    let decode = names(&pods(cluster, "demo", "decode")).remove(0);
    let processes = cluster.pod_processes("default", &decode);
    let write = |process: &u32| {
        let file = PathBuf::from(format!("/proc/{process}/root/tmp/fault"));
        std::fs::write(file, "Xid 79: it has fallen off the bus\n").is_ok()
    };
    assert!(processes.iter().any(write), "{processes:?}");
}

fn node_of_decode(cluster: &Cluster) -> String {
    let decode = pods(cluster, "demo", "decode").remove(0);
    let node = decode["spec"]["nodeName"].as_str();
    node.unwrap_or_default().to_owned()
}

pub(crate) fn plan_of(cluster: &Cluster, found: &Value) -> Value {
    let name = found["status"]["plan"]["name"].as_str().expect("a plan");
    let plan = cluster.get("inferenceplan", "default", name);
    plan.expect("the plan")["spec"].clone()
}

pub(crate) fn rank<'a>(plan: &'a Value, role: &str) -> &'a Value {
    let ranks = plan["ranks"].as_array().expect("ranks");
    let found = ranks.iter().find(|rank| rank["role"] == role);
    found.unwrap_or_else(|| panic!("no {role} in {plan:#}"))
}
