//! Pods that hold GPUs: through the device plugin, or by claims.

use hearth_crds::{
    InferenceDeployment, InferencePlanSpec, PlanExpertParallel, PlanKvGather, PlanPeers, PlanRole,
};
use serde_json::json;

use super::rank_holding;
use super::tests::{pods_of, resources};
use crate::names::ANNOTATION_PLAN;
use crate::observed::{Holding, Settings};
use crate::testing::samples::{deployment, plan, settings};

#[test]
fn gpus_are_asked_of_the_device_plugin() {
    let mut plan = plan();
    plan.ranks[1].gpus = 2;
    let pods = pods_of(&settings(), &deployment(), &plan);
    assert_eq!(pods[1].gpus, 2);
    assert_eq!(
        resources(&pods[1].pod)["limits"],
        json!({"nvidia.com/gpu": "2"})
    );
    assert_eq!(resources(&pods[2].pod)["limits"], json!(null));
}

/// A plan whose prefill rank computes on the GPU that the Pod of the first decode rank holds.
fn shared() -> InferencePlanSpec {
    let mut plan = plan();
    for rank in &mut plan.ranks[1..3] {
        rank.gpu_uuids = vec!["GPU-1".to_owned()];
        rank.gpu_memory_bytes = 1 << 30;
    }
    plan.ranks[2].gpus = 1;
    plan.ranks[1].in_pod_of = Some("decode-0".to_owned());
    plan
}

#[test]
fn ranks_that_share_a_gpu_are_one_pod_with_one_container() {
    let plan = shared();
    let pods = pods_of(&settings(), &deployment(), &plan);
    let names: Vec<&str> = pods.iter().map(|pod| pod.rank.as_str()).collect();
    assert_eq!(names, ["gateway-0", "decode-0", "decode-1"]);
    let pod = &pods[1];
    let second = pod.second.as_ref().expect("a second rank");
    assert_eq!(
        (&*second.rank, second.role),
        ("prefill-0", PlanRole::Prefill)
    );
    assert_eq!(pods[2].second, None);
    let spec = pod.pod.spec.as_ref().expect("a spec");
    let [container] = spec.containers.as_slice() else {
        panic!("not one container: {spec:?}");
    };
    let arguments = container.args.clone().unwrap_or_default().join(" ");
    assert!(
        arguments.starts_with("supervise --plan /etc/hearth/place/plan.json --rank decode-0 --rank prefill-0 --tls-dir "),
        "{arguments}"
    );
    let ports = container.ports.iter().flatten();
    let ports: Vec<i32> = ports.map(|port| port.container_port).collect();
    assert_eq!(ports, [9400, 9401, 9403]);
    let annotations = pod.pod.metadata.annotations.as_ref().expect("annotations");
    let told: InferencePlanSpec =
        serde_json::from_str(&annotations[ANNOTATION_PLAN]).expect("a plan");
    let told = told.ranks.iter();
    let told: Vec<_> = told
        .map(|rank| (&*rank.name, rank.endpoint.as_deref()))
        .collect();
    let [first, second] = [("decode-0", "[::]:9400"), ("prefill-0", "[::]:9403")];
    assert_eq!(told, [first, second].map(|(name, at)| (name, Some(at))));
}

/// One of two workers may wait until the other has loaded, so both must fit into the time for the start.
#[test]
fn a_pod_of_two_ranks_may_take_as_long_to_start_as_both() {
    let mut both = shared();
    let sizes = [(1, 10_000_000_000), (2, 25_000_000_000)];
    for (n, bytes) in sizes {
        let residency = both.ranks[n].residency.as_mut().expect("a residency");
        residency.weight_bytes = bytes;
    }
    let seconds = |plan: &InferencePlanSpec, n: usize| {
        let pods = pods_of(&settings(), &deployment(), plan);
        let spec = pods[n].pod.spec.as_ref().expect("a spec");
        let probe = spec.containers[0].startup_probe.as_ref();
        probe.and_then(|probe| probe.failure_threshold)
    };
    assert_eq!(seconds(&both, 1), Some(900 + 2000 + 5000));
    both.ranks[1].in_pod_of = None;
    assert_eq!([1, 2].map(|n| seconds(&both, n)), [Some(2900), Some(5900)]);
    // The head of a group starts once the others have loaded.
    for (place, n) in [(0, 1), (1, 2)] {
        both.ranks[n].peers = Some(PlanPeers {
            head: both.ranks[1].name.clone(),
            place,
            ranks: 2,
            experts: PlanExpertParallel::SmallEp,
            stands_in: false,
            kv: PlanKvGather::Direct,
        });
    }
    assert_eq!([1, 2].map(|n| seconds(&both, n)), [Some(5900), Some(5900)]);
}

/// The Pod holds what both ranks would hold alone, and one GPU; the second rank holds nothing beside that.
#[test]
fn a_pod_of_two_ranks_holds_the_sum_and_one_gpu() {
    let both = shared();
    let mut apart = shared();
    apart.ranks[1].in_pod_of = None;
    apart.ranks[1].gpus = 1;
    let held = |plan: &InferencePlanSpec| {
        let pods = pods_of(&settings(), &deployment(), plan);
        let workers = pods
            .iter()
            .filter(|pod| pod.node == "a" && pod.role.is_worker());
        workers.fold((0, 0, 0), |(cpu, memory, gpus), pod| {
            (
                cpu + pod.cpu_millis,
                memory + pod.memory_bytes,
                gpus + pod.gpus,
            )
        })
    };
    let (cpu_millis, memory_bytes, gpus) = held(&apart);
    assert_eq!(gpus, 2);
    assert_eq!(held(&both), (cpu_millis, memory_bytes, 1));
    let pods = pods_of(&settings(), &deployment(), &both);
    let asked = resources(&pods[1].pod);
    assert_eq!(asked["limits"], json!({"nvidia.com/gpu": "1"}));
    assert_eq!(asked["requests"]["memory"], memory_bytes.to_string());
    let [prefill, decode] = [1, 2].map(|n| rank_holding(&both, &both.ranks[n]));
    assert_eq!(prefill, Holding::default());
    assert_eq!((decode.memory_bytes, decode.gpus), (memory_bytes, 1));

    let mut on_virtual = shared();
    for rank in &mut on_virtual.ranks[1..] {
        rank.virtual_device = Some("virtual:memory=1Gi".to_owned());
        rank.gpu_memory_bytes = 512 << 20;
    }
    let decode = rank_holding(&on_virtual, &on_virtual.ranks[2]);
    assert_eq!(decode.virtual_bytes, 1 << 30);
    assert_eq!(decode.memory_bytes, memory_bytes + (1 << 30));
}

/// Followers on a node without their head have different experts; beside a rank that has all, they map the same.
#[test]
fn followers_hold_their_own_share_where_nobody_has_all_experts() {
    let with_stages = |decode_bytes: u64, (stage_bytes, stands_in): (u64, bool)| {
        let mut plan = plan();
        let follower = |n: u32| {
            let mut rank = plan.ranks[1].clone();
            (rank.name, rank.role) = (format!("stage-{n}"), PlanRole::Stage);
            rank.node = "b".to_owned();
            rank.gpu_uuids = vec![format!("GPU-{n}")];
            rank.peers = Some(PlanPeers {
                head: "prefill-0".to_owned(),
                place: n + 1,
                ranks: 4,
                experts: PlanExpertParallel::SmallEp,
                stands_in,
                kv: PlanKvGather::Direct,
            });
            rank.residency.as_mut().expect("a residency").host_bytes = stage_bytes;
            rank
        };
        let stages = [follower(0), follower(1)];
        plan.ranks[3].gpu_uuids = vec!["GPU-9".to_owned()];
        let decode = plan.ranks[3].residency.as_mut().expect("a residency");
        decode.host_bytes = decode_bytes;
        plan.ranks.extend(stages);
        let held = |n: usize| rank_holding(&plan, &plan.ranks[n]).memory_bytes;
        [3, 4, 5].map(held)
    };
    let share = (100 << 20, false);
    let [without, one, other] = with_stages(0, share);
    assert_eq!(one, other);
    let [decode, beside, _] = with_stages(400 << 20, share);
    // Page tables are each process's own.
    assert_eq!(decode - without, (400 << 20) + (400 << 20) / 512);
    assert_eq!(one - beside, 100 << 20);
    // Those that stand in for others map what is there once, with dense modules that stream, too.
    let [decode, one, other] = with_stages(400 << 20, (450 << 20, true));
    assert_eq!(decode - without, (400 << 20) / 512);
    assert_eq!(one - other, 450 << 20);
    assert_eq!(other - beside, (350 << 20) / 512);
}

#[test]
fn a_pod_is_another_if_its_second_rank_changes() {
    let names = |plan: &InferencePlanSpec| {
        let pods = pods_of(&settings(), &deployment(), plan);
        pods.into_iter().map(|pod| pod.name).collect::<Vec<_>>()
    };
    let before = names(&shared());
    assert_eq!(before, names(&shared()));
    let mut changed = shared();
    changed.ranks[1].scratch_bytes += 1;
    let after = names(&changed);
    assert_ne!(before[1], after[1]);
    assert_eq!((&before[0], &before[2]), (&after[0], &after[2]));
}

#[test]
fn gpus_that_can_be_claimed_are_claimed_by_uuid() {
    let mut plan = plan();
    plan.ranks[1].gpus = 2;
    plan.ranks[1].claims_gpus = true;
    plan.ranks[1].gpu_uuids = vec!["GPU-1".to_owned()];
    let pods = pods_of(&settings(), &deployment(), &plan);
    let template = pods[1].claim_template.clone().expect("a template");
    assert_eq!(pods[1].claimed_gpus, ["GPU-1"]);
    let resources = resources(&pods[1].pod);
    assert_eq!(resources["limits"], json!(null));
    assert_eq!(resources["claims"], json!([{"name": "gpus"}]));
    let spec = serde_json::to_value(&pods[1].pod.spec).expect("JSON");
    let name = template.metadata.name.as_deref().expect("a name");
    assert_eq!(
        spec["resourceClaims"],
        json!([{"name": "gpus", "resourceClaimTemplateName": name}])
    );
    let requests = &template.data["spec"]["spec"]["devices"]["requests"];
    assert_eq!(
        requests[0]["exactly"]["selectors"][0]["cel"]["expression"],
        "device.attributes[\"gpu.nvidia.com\"].uuid == \"GPU-1\""
    );
    assert_eq!(requests[1]["exactly"]["count"], 1);
    let labels = &template.data["spec"]["metadata"]["labels"];
    assert_eq!(labels["hearth.dev/deployment"], "demo");
    assert!(pods[2].claim_template.is_none());
}

#[test]
fn pods_that_hold_gpus_have_the_runtime_class_of_the_spec_or_of_the_chart() {
    let class = |settings: &Settings, deployment: &InferenceDeployment| {
        let mut plan = plan();
        plan.ranks[1].gpus = 1;
        let pods = pods_of(settings, deployment, &plan);
        let specs = pods.iter().map(|pod| pod.pod.spec.clone().expect("spec"));
        specs
            .map(|spec| spec.runtime_class_name)
            .collect::<Vec<_>>()
    };
    let (mut settings, mut deployment) = (settings(), deployment());
    assert_eq!(class(&settings, &deployment)[1], None);
    settings.gpu_runtime_class = Some("nvidia".to_owned());
    let classes = class(&settings, &deployment);
    assert_eq!(
        (classes[0].as_deref(), classes[1].as_deref()),
        (None, Some("nvidia"))
    );
    deployment.spec.pod_template.runtime_class_name = Some("nvidia-cdi".to_owned());
    assert_eq!(
        class(&settings, &deployment)[1].as_deref(),
        Some("nvidia-cdi")
    );
}
