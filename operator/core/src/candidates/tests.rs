use super::*;
use crate::observed::Sight;
use crate::testing::{GIB, deployment, node, observed};

fn placement(yaml: &str) -> PlacementSpec {
    serde_norway::from_str(yaml).unwrap()
}

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    Taint {
        key: key.to_owned(),
        value: value.to_owned(),
        effect: effect.to_owned(),
        since: None,
    }
}

#[test]
fn nodes_that_drop_out_say_why() {
    let mut observed = observed(deployment(""));
    observed.nodes.clear();
    let mut add = |name: &str, change: fn(&mut NodeView)| {
        let mut view = node(name, 4, 8 * GIB);
        change(&mut view);
        observed.nodes.insert(name.to_owned(), view.into());
    };
    add("attic", |node| {
        node.labels.clear();
    });
    add("cellar", |node| node.profile = None);
    add("den", |node| node.is_ready = false);
    add("office", |node| node.is_cordoned = true);
    add("shed", |node| {
        node.taints = vec![taint("gpu", "yes", "NoSchedule")];
    });
    add("study", |node| {
        node.taints = vec![taint("slow", "", "PreferNoSchedule")];
    });
    for name in ["cellar", "den", "office", "shed", "study"] {
        let mut view = (*observed.nodes[name]).clone();
        view.labels.insert("disk".to_owned(), "ssd".to_owned());
        observed.nodes.insert(name.to_owned(), view.into());
    }
    let candidates = Candidates::of(&observed, &placement("nodeSelector: {disk: ssd}"));
    assert_eq!(candidates.free.keys().collect::<Vec<_>>(), ["study"]);
    assert_eq!(
        candidates.left_out_sentence().unwrap(),
        "5 of 6 nodes cannot take it: attic lacks the label disk=ssd, cellar has not been measured yet \
         (its agent has not answered), den is not Ready, office is cordoned, shed has the taint \
         gpu=yes:NoSchedule, which spec.placement.tolerations does not name"
    );
}

#[test]
fn tolerations_match_as_the_scheduler_has_it() {
    let gpu = taint("gpu", "yes", "NoSchedule");
    for (yaml, expected) in [
        ("{key: gpu, value: 'yes'}", true),
        ("{key: gpu, operator: Equal, value: 'no'}", false),
        ("{key: gpu}", false),
        ("{key: gpu, operator: Exists}", true),
        ("{key: gpu, operator: Exists, effect: NoExecute}", false),
        ("{operator: Exists}", true),
        ("{operator: Equal}", false),
        ("{key: other, operator: Exists}", false),
    ] {
        let toleration: TolerationSpec = serde_norway::from_str(yaml).unwrap();
        assert_eq!(tolerates(&toleration, &gpu), expected, "{yaml}");
    }
}

#[test]
fn what_others_hold_is_not_free() {
    let mut observed = observed(deployment(""));
    let mut view = node("office", 4, 8 * GIB);
    view.memory_bytes = 6 * GIB;
    view.gpus = 2;
    observed.nodes = BTreeMap::from([("office".to_owned(), view.into())]);
    let held = Holding {
        cpu_millis: 2000,
        memory_bytes: 2 * GIB,
        gpus: 1,
        exclusive_cpus: vec![1, 2],
        ..Holding::default()
    };
    observed.held_by_others.insert("office".to_owned(), held);
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    let free = &candidates.free["office"];
    // Allocatable is less than what was measured: 6 GiB, of which others hold 2.
    assert_eq!(free.memory.available_bytes, 4 * GIB);
    assert_eq!(free.numa_nodes[0].free_bytes, 4 * GIB);
    assert_eq!(free.cpus.iter().map(|c| c.id).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(free.numa_nodes[0].cpus, [0, 3]);
    assert_eq!(candidates.gpus_free["office"], 1);
    let room = rooms(&observed)["office"];
    assert_eq!(room.memory_bytes, 4 * GIB - 4 * GIB / 20);
    assert_eq!((room.gpus, room.cpu_millis), (1, 1900));
}

#[test]
fn what_foreign_pods_request_is_not_free() {
    let mut observed = observed(deployment(""));
    let mut view = node("office", 4, 8 * GIB);
    view.memory_bytes = 6 * GIB;
    view.gpus = 2;
    observed.nodes = BTreeMap::from([("office".to_owned(), view.into())]);
    let foreign = Requests {
        cpu_millis: 1500,
        memory_bytes: GIB,
        gpus: 1,
    };
    observed.others.sight = Sight::All;
    observed
        .others
        .requests
        .insert("office".to_owned(), foreign);
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    let free = &candidates.free["office"];
    assert_eq!(free.memory.available_bytes, 5 * GIB);
    assert_eq!(candidates.gpus_free["office"], 1);
    assert_eq!(candidates.cpu_rooms["office"].free_millis(), 2400);
    // Where they request little and use much, the measurement applies.
    let mut view = (*observed.nodes["office"]).clone();
    if let Some(profile) = &mut view.profile {
        profile.memory.available_bytes = 2 * GIB;
    }
    observed.nodes.insert("office".to_owned(), view.into());
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    assert_eq!(candidates.free["office"].memory.available_bytes, 2 * GIB);
}

#[test]
fn what_others_hold_is_missing_from_the_least_of_a_day_too() {
    let mut observed = observed(deployment(""));
    let held = Holding {
        memory_bytes: GIB,
        ..Holding::default()
    };
    for (name, least) in [
        ("attic", None),
        ("cellar", Some(2 * GIB)),
        ("office", Some(7 * GIB)),
    ] {
        let mut view = node(name, 4, 8 * GIB);
        view.memory_bytes = 6 * GIB;
        if let Some(profile) = &mut view.profile {
            profile.memory.least_available_bytes = least;
        }
        observed.nodes.insert(name.to_owned(), view.into());
        observed
            .held_by_others
            .insert(name.to_owned(), held.clone());
    }
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    let least = |name: &str| candidates.free[name].memory.least_available_bytes;
    assert_eq!(least("attic"), None);
    assert_eq!(least("cellar"), Some(GIB));
    // Allocatable is less than what was available at any time.
    assert_eq!(least("office"), Some(5 * GIB));
}

#[test]
fn a_virtual_device_has_its_memory_from_the_node_and_excludes_real_gpus() {
    let mut observed = observed(deployment(""));
    let gpu = |virtual_device: Option<&str>| GpuProfile {
        memory_bytes: GIB,
        free_bytes: GIB,
        virtual_device: virtual_device.map(str::to_owned),
        ..GpuProfile::default()
    };
    for (name, device) in [("office", Some("virtual:memory=1Gi")), ("attic", None)] {
        let mut view = node(name, 4, 8 * GIB);
        view.profile.as_mut().unwrap().gpus = vec![gpu(device)];
        observed.nodes.insert(name.to_owned(), view.into());
    }
    let held = Holding {
        memory_bytes: 3 * GIB / 2,
        virtual_bytes: GIB / 2,
        ..Holding::default()
    };
    observed.held_by_others.insert("office".to_owned(), held);
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    // Of 8 GiB the device has one, and others hold another one beside their half of the device.
    let free = &candidates.free["office"];
    assert_eq!(free.memory.available_bytes, 6 * GIB);
    assert_eq!(free.gpus[0].free_bytes, GIB / 2);
    assert_eq!(free.gpus[0].obstacle, None);
    assert_eq!(
        rooms(&observed)["office"].memory_bytes,
        usable(6 * GIB) + GIB / 2
    );
    let left_out = candidates.free["attic"].gpus[0].obstacle.clone();
    assert!(left_out.unwrap().contains("agent.virtualDevices"));
}

#[test]
fn gpus_that_another_plan_is_about_to_claim_are_left_to_it() {
    let mut observed = observed(deployment(""));
    let uuids = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    observed.claimable = BTreeMap::from([("office".to_owned(), uuids(&["GPU-1", "GPU-2"]))]);
    let held = Holding {
        claimed_gpus: uuids(&["GPU-1"]),
        ..Holding::default()
    };
    observed.held_by_others.insert("office".to_owned(), held);
    let candidates = Candidates::of(&observed, &PlacementSpec::default());
    assert_eq!(candidates.claimable["office"], uuids(&["GPU-2"]));
    assert!(!candidates.claimable.contains_key("attic"));
}

#[test]
fn pods_that_cannot_be_seen_are_reckoned_with() {
    let mut observed = observed(deployment(""));
    observed.others.sight = Sight::Forbidden;
    let room = rooms(&observed)["office"];
    // 500m and 512 MiB are assumed for them, and 100m are kept free.
    assert_eq!(room.cpu_millis, 4000 - 500 - 100);
    assert_eq!(room.memory_bytes, usable(4 * GIB - (512 << 20)));
}
