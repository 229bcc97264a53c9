//! The cluster's own address ranges, as far as they can be determined.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kube::Client;
use serde_json::Value;

/// API path (1.33 and later) that lists the Service ranges.
const SERVICE_CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

/// The Service ranges as listed by the API server; `None` if the request fails.
pub(super) async fn of_services(client: &Client) -> Option<Vec<IpNet>> {
    let request = http::Request::get(SERVICE_CIDRS).body(Vec::new()).ok()?;
    match client.request::<Value>(request).await {
        Ok(list) => Some(told(&list)),
        Err(error) => {
            tracing::debug!(%error, "the ranges of Services are not told; the API server's address tells one");
            None
        }
    }
}

fn told(list: &Value) -> Vec<IpNet> {
    let items = list["items"].as_array().into_iter().flatten();
    let ranges = items.filter_map(|item| item["spec"]["cidrs"].as_array());
    let ranges = ranges.flatten().filter_map(Value::as_str);
    ranges.filter_map(|text| text.parse().ok()).collect()
}

/// The Service range whose first address is the API server's: the widest of the usual ones that can start there
/// (/12 with kubeadm, /16 with k3s, /24 with microk8s; /108 is the widest for IPv6).
pub(crate) fn around_api(address: IpAddr) -> IpNet {
    match address {
        IpAddr::V4(address) => {
            let before = u32::from(address).saturating_sub(1);
            let prefix = match before.trailing_zeros() {
                20.. => 12,
                16..20 => 16,
                12..16 => 20,
                _ => 24,
            };
            Ipv4Net::new_assert(address, prefix).trunc().into()
        }
        IpAddr::V6(address) => Ipv6Net::new_assert(address, 108).trunc().into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_range_of_services_follows_from_the_api_server_s_address() {
        for (address, range) in [
            ("10.96.0.1", "10.96.0.0/12"),
            ("10.43.0.1", "10.43.0.0/16"),
            ("172.20.0.1", "172.20.0.0/16"),
            ("34.118.224.1", "34.118.224.0/20"),
            ("10.152.183.1", "10.152.183.0/24"),
            ("192.168.7.9", "192.168.7.0/24"),
            ("fd43::1", "fd43::/108"),
        ] {
            assert_eq!(around_api(address.parse().unwrap()).to_string(), range);
        }
    }

    #[test]
    fn service_cidrs_are_read() {
        let list = json!({"items": [
            {"spec": {"cidrs": ["10.96.0.0/16", "fd43::/108"]}}, {"spec": {}}, {"spec": {"cidrs": ["?"]}},
        ]});
        let ranges: Vec<String> = told(&list).iter().map(ToString::to_string).collect();
        assert_eq!(ranges, ["10.96.0.0/16", "fd43::/108"]);
    }
}
