//! Clusters with only IPv6, and with both IP versions.

use std::net::IpAddr;

use hearth_tests::cluster::{AddressFamily, Cluster, Options, wait_until};
use serde_json::{Value, json};

use super::OPTIONS;
use super::release::{self, PATIENCE, SYSTEM, infd, patch, pods, wait_until_settled};
use super::streams::{self, Streams};

/// Ports of workers: gRPC and the kubelet's probes.
const WORKER_PORTS: [u16; 2] = [9400, 9401];

#[test]
fn a_cluster_of_ipv6_alone_serves() {
    let Some(cluster) = start(AddressFamily::Ipv6, true) else {
        return;
    };
    // The operator's Service is reached by its name, and the cluster's DNS over IPv6.
    release::helm_test(&cluster);
    let addresses = service_addresses(&cluster, "default", "demo");
    assert!(matches!(addresses[..], [IpAddr::V6(_)]), "{addresses:?}");
    streams_flow(&cluster, &addresses);
    urls_have_brackets(&cluster);
}

#[test]
fn a_cluster_of_both_ip_versions_serves_by_both() {
    let Some(cluster) = start(AddressFamily::Dual, false) else {
        return;
    };
    let operator = service_addresses(&cluster, SYSTEM, "hearth-operator");
    assert_eq!(operator.len(), 2, "{operator:?}");
    let addresses = service_addresses(&cluster, "default", "demo");
    let [IpAddr::V4(_), IpAddr::V6(_)] = addresses[..] else {
        panic!("one address of each IP version: {addresses:?}");
    };
    streams_flow(&cluster, &addresses);
    for pod in pods(&cluster, "demo", "") {
        let ports = match pod["metadata"]["labels"]["hearth.dev/role"].as_str() {
            Some("gateway") => &[8080][..],
            _ => &WORKER_PORTS,
        };
        let ips = pod["status"]["podIPs"].as_array().expect("addresses");
        assert_eq!(ips.len(), 2, "{ips:?}");
        for ip in ips.iter().filter_map(|ip| ip["ip"].as_str()) {
            for &port in ports {
                cluster.reach_address(ip, port);
            }
        }
    }
}

/// Starts a cluster with Hearth and the demo, and waits until it has settled.
fn start(family: AddressFamily, dns: bool) -> Option<Cluster> {
    let options = Options {
        family,
        dns,
        ..OPTIONS
    };
    let cluster = Cluster::start_or_skip(&options)?;
    let images = cluster.import_hearth();
    // Both nodes are measured: the operator has reached an agent on a node other than its own.
    release::install(&cluster, &images, 1);
    cluster.apply(&super::demo().to_string());
    wait_until_settled(&cluster, "demo");
    Some(cluster)
}

fn service_addresses(cluster: &Cluster, namespace: &str, name: &str) -> Vec<IpAddr> {
    let service = cluster.get("service", namespace, name).expect("a Service");
    let addresses = service["spec"]["clusterIPs"].as_array();
    let addresses = addresses.into_iter().flatten().filter_map(Value::as_str);
    addresses
        .map(|text| text.parse().expect("address"))
        .collect()
}

/// Checks that each of the Service's addresses gives complete answers: one worker reads the prompt, another writes the
/// answer.
fn streams_flow(cluster: &Cluster, addresses: &[IpAddr]) {
    for address in addresses {
        let reach = cluster.reach_address(&address.to_string(), 80);
        let streams = Streams::start(&reach.v1());
        streams.wait_for(2 * streams::STREAMS);
        streams.finish();
    }
}

/// Checks that the external address is shown as a URL, even if it is a bare IPv6 address.
fn urls_have_brackets(cluster: &Cluster) {
    patch(
        cluster,
        "demo",
        &json!({"endpoint": {"type": "LoadBalancer"}}),
    );
    wait_until("the Service is a load balancer", PATIENCE, || {
        let service = cluster.get("service", "default", "demo")?;
        (service["spec"]["type"] == "LoadBalancer").then_some(())
    });
    let given = json!({"status": {"loadBalancer": {"ingress": [{"ip": "2001:db8::7"}]}}});
    let given = given.to_string();
    let arguments = ["patch", "service", "demo", "--subresource=status"];
    cluster.kubectl(&[&arguments[..], &["--type=merge", "--patch", &given]].concat());
    wait_until("the URL is the load balancer's", PATIENCE, || {
        let url = infd(cluster, "demo")["status"]["endpointUrl"].clone();
        (url == "http://[2001:db8::7]/v1").then_some(())
    });
}
