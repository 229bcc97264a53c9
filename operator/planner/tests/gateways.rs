//! Several gateways: their placement and their resources.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{InferencePlanSpec, NodeProfileStatus, PlanRole};
use hearth_planner::{Advice, CpuOffer, PlanError, PlanInput, plan};
use support::{MIB, cpu_rooms, demo_model, dense_1_7b, laptop, plan_input, server, small_vm, spec};

fn named(name: &str) -> NodeProfileStatus {
    NodeProfileStatus {
        node: name.to_owned(),
        ..small_vm()
    }
}

/// Nodes of the gateways, in index order.
fn nodes(plan: &InferencePlanSpec) -> Vec<&str> {
    let gateways = plan.ranks_of(PlanRole::Gateway);
    gateways.map(|rank| rank.node.as_str()).collect()
}

#[test]
fn gateways_are_spread_over_nodes_and_the_first_stays_with_the_first_decode_rank() {
    let profiles = [named("attic"), named("cellar"), named("office")];
    let facts = demo_model();
    let with = |gateways: u32| {
        let spec = spec(&format!("gateway: {{replicas: {gateways}}}"));
        plan(&plan_input(&spec, &facts, &profiles)).unwrap()
    };
    let one = with(1);
    let first = nodes(&one)[0].to_owned();
    for gateways in [2, 3] {
        let plan = with(gateways);
        let mut nodes = nodes(&plan);
        assert_eq!(nodes[0], first, "gateway-0 stays where it is");
        assert_eq!(nodes.len(), gateways as usize);
        nodes.sort_unstable();
        nodes.dedup();
        assert_eq!(nodes.len(), gateways as usize, "each on a node of its own");
        let workers = |plan: &InferencePlanSpec| {
            let ranks = plan.ranks.iter().filter(|rank| rank.role.is_worker());
            ranks.cloned().collect::<Vec<_>>()
        };
        assert_eq!(workers(&plan), workers(&one), "workers are where they were");
        let why = plan.why.iter().find(|line| line.contains("gateways on"));
        assert!(
            why.unwrap()
                .starts_with(&format!("{gateways} gateways on "))
        );
        assert!(
            !plan.why.iter().any(|line| line.contains("prefetch")),
            "{:?}",
            plan.why
        );
    }
    let more = with(7);
    for profile in &profiles {
        let here = nodes(&more)
            .into_iter()
            .filter(|node| *node == profile.node);
        assert!((2..=3).contains(&here.count()), "{:?}", nodes(&more));
    }
    let names: Vec<&str> = more.ranks[..7]
        .iter()
        .map(|rank| rank.name.as_str())
        .collect();
    assert_eq!(names[..3], ["gateway-0", "gateway-1", "gateway-2"]);
}

#[test]
fn a_node_whose_weights_would_have_to_leave_gets_no_further_gateway() {
    let facts = dense_1_7b();
    let spec = spec("gateway: {replicas: 2}\nprefill: {mode: Chunked}\ndecode: {maxBatch: 1}");
    let roomy = plan(&plan_input(&spec, &facts, &[laptop(64 << 30)])).unwrap();
    assert_eq!(nodes(&roomy).len(), 2, "both on the only node");
    let first = &roomy.ranks[0];
    assert_eq!(roomy.ranks[1].scratch_bytes, first.scratch_bytes);
    // Room for one gateway in addition to the weights and the whole KV cache.
    let tight_bytes = {
        let held: u64 = roomy
            .ranks
            .iter()
            .map(|rank| rank.host_weight_bytes() + rank.host_kv_bytes() + rank.scratch_bytes)
            .sum();
        let less = held - first.scratch_bytes;
        less + less / 19 + MIB
    };
    let mut other = laptop(tight_bytes);
    other.node = "other".to_owned();
    let plan = plan(&plan_input(&spec, &facts, &[laptop(tight_bytes), other])).unwrap();
    let nodes = nodes(&plan);
    assert_ne!(nodes[0], nodes[1]);
    let alone = plan.ranks_of(PlanRole::Decode).next().unwrap();
    assert_eq!(alone.node, nodes[0]);
}

#[test]
fn gateways_that_request_too_much_cpu_are_refused_with_a_number_that_fits() {
    let profiles = [server()];
    let spec = spec("gateway: {replicas: 8}");
    let facts = demo_model();
    let of_plan = plan(&plan_input(&spec, &facts, &profiles)).unwrap();
    let millis: u64 = of_plan.ranks.iter().map(|rank| rank.cpu_millis()).sum();
    let rooms = cpu_rooms(&profiles, 0);
    let free = rooms.values().next().unwrap().free_millis();
    // One gateway less would fit.
    let gateway = of_plan.ranks[0].cpu_millis();
    let rooms = cpu_rooms(&profiles, free - millis + gateway);
    let error = plan(&PlanInput {
        cpus: CpuOffer::Requests(&rooms),
        ..plan_input(&spec, &facts, &profiles)
    })
    .unwrap_err();
    let PlanError::InsufficientCpu { what, advice, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(what, "the deployment");
    assert_eq!(advice[0], Advice::GatewayReplicas(7));
    assert!(
        error
            .to_string()
            .contains("lower spec.gateway.replicas to 7"),
        "{error}"
    );
}
