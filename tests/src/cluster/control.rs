//! The control plane: etcd, the API server, the controllers, the scheduler.

use std::net::TcpListener;
use std::path::Path;

use super::Options;
use super::audit;
use super::network::AddressFamily;
use super::pki::{Pki, service_account_keys};
use super::process::{Launch, Place, Workspace};

/// Addresses that the control plane listens on.
#[derive(Clone, Debug)]
pub(super) struct Endpoints {
    pub(super) api: String,
    api_port: u16,
    etcd: String,
    etcd_peers: String,
    pub(super) place: Place,
}

impl Endpoints {
    /// Uses the loopback address with currently free ports: for a control plane without nodes.
    pub(super) fn on_loopback() -> anyhow::Result<Self> {
        // All are held until all are known; otherwise the kernel could return the same one twice.
        let listeners = (0..3)
            .map(|_| TcpListener::bind("127.0.0.1:0"))
            .collect::<Result<Vec<_>, _>>()?;
        let ports = listeners
            .iter()
            .map(|listener| Ok(listener.local_addr()?.port()))
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self {
            api: format!("https://127.0.0.1:{}", ports[0]),
            api_port: ports[0],
            etcd: format!("http://127.0.0.1:{}", ports[1]),
            etcd_peers: format!("http://127.0.0.1:{}", ports[2]),
            place: Place::Host,
        })
    }

    /// Uses the network namespace of the process `control`.
    pub(super) fn in_namespace(control: u32, family: AddressFamily) -> Self {
        Self {
            api: format!("https://{}:6443", in_url(family.first().control)),
            api_port: 6443,
            etcd: "http://127.0.0.1:2379".to_owned(),
            etcd_peers: "http://127.0.0.1:2380".to_owned(),
            place: Place::Network(control),
        }
    }
}

/// Writes all certificates, keys and kubeconfigs to the directory `pki` of the cluster's state.
pub(super) fn write_pki(workspace: &Workspace, nodes: usize, server: &str) -> anyhow::Result<()> {
    let directory = workspace.file("pki");
    std::fs::create_dir(&directory)?;
    let ca = Pki::new(&directory, "ca")?;
    let family = workspace.family;
    let mut names = vec![
        "127.0.0.1",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    let addresses = family.ranges().iter();
    names.extend(addresses.flat_map(|ranges| [ranges.control, ranges.api_service]));
    ca.sign("apiserver", "kube-apiserver", None, &names)?;
    ca.sign(
        "apiserver-kubelet",
        "kube-apiserver-kubelet-client",
        None,
        &[],
    )?;
    let clients = [
        ("admin", "admin", Some("system:masters")),
        ("controllers", "system:kube-controller-manager", None),
        ("scheduler", "system:kube-scheduler", None),
        ("proxy", "system:kube-proxy", None),
    ];
    for (file, user, group) in clients {
        ca.sign(file, user, group, &[])?;
        ca.kubeconfig(file, server)?;
    }
    for node in 1..=nodes {
        let name = super::node::name(node);
        let user = format!("system:node:{name}");
        let addresses = family.ranges().iter().map(|ranges| ranges.machine(node));
        let names: Vec<String> = addresses.chain([name.clone()]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        ca.sign(&name, &user, Some("system:nodes"), &names)?;
        ca.kubeconfig(&name, server)?;
    }
    let front = Pki::new(&directory, "front-proxy-ca")?;
    front.sign("front-proxy", "front-proxy-client", None, &[])?;
    service_account_keys(&directory)?;
    Ok(())
}

/// A single etcd member that does not wait for the disk.
pub(super) fn etcd(workspace: &Workspace, at: &Endpoints) -> anyhow::Result<Launch> {
    let launch = Launch::new("etcd", workspace.tools.get("etcd")?, &at.place)
        .flag("name", "hearth")
        .flag("data-dir", workspace.file("etcd"))
        .flag("listen-client-urls", &at.etcd)
        .flag("advertise-client-urls", &at.etcd)
        .flag("listen-peer-urls", &at.etcd_peers)
        .flag("initial-advertise-peer-urls", &at.etcd_peers)
        .flag("initial-cluster", format!("hearth={}", at.etcd_peers))
        .flag("log-level", "warn");
    Ok(launch.args(["--unsafe-no-fsync"]))
}

/// The API server.
pub(super) fn api_server(
    workspace: &Workspace,
    at: &Endpoints,
    options: &Options,
) -> anyhow::Result<Launch> {
    let pki = |name: &str| workspace.file(Path::new("pki").join(name));
    let mut launch = Launch::new(
        "apiserver",
        workspace.tools.get("kube-apiserver")?,
        &at.place,
    )
    .flag("etcd-servers", &at.etcd)
    .flag("secure-port", at.api_port.to_string())
    .flag("client-ca-file", pki("ca.crt"))
    .flag("tls-cert-file", pki("apiserver.crt"))
    .flag("tls-private-key-file", pki("apiserver.key"))
    .flag("kubelet-client-certificate", pki("apiserver-kubelet.crt"))
    .flag("kubelet-client-key", pki("apiserver-kubelet.key"))
    .flag("kubelet-certificate-authority", pki("ca.crt"))
    .flag("kubelet-preferred-address-types", "InternalIP")
    .flag("service-account-key-file", pki("sa.pub"))
    .flag("service-account-signing-key-file", pki("sa.key"))
    .flag(
        "service-account-issuer",
        "https://kubernetes.default.svc.cluster.local",
    )
    .flag(
        "service-cluster-ip-range",
        workspace.family.list(|ranges| ranges.services),
    )
    .flag("advertise-address", workspace.family.first().control)
    .flag("authorization-mode", "Node,RBAC")
    .flag("allow-privileged", "true")
    .flag("requestheader-client-ca-file", pki("front-proxy-ca.crt"))
    .flag("requestheader-allowed-names", "front-proxy-client")
    .flag("requestheader-extra-headers-prefix", "X-Remote-Extra-")
    .flag("requestheader-group-headers", "X-Remote-Group")
    .flag("requestheader-username-headers", "X-Remote-User")
    .flag("proxy-client-cert-file", pki("front-proxy.crt"))
    .flag("proxy-client-key-file", pki("front-proxy.key"));
    if options.nodes > 0 {
        launch = launch
            .flag("bind-address", workspace.family.any())
            .flag("enable-admission-plugins", "NodeRestriction")
            // No kube-proxy runs between the API server and aggregated APIs.
            .flag("enable-aggregator-routing", "true");
    } else {
        launch = launch
            .flag("bind-address", "127.0.0.1")
            // No controller creates service accounts here, and Pods that nothing runs do not need them.
            .flag("disable-admission-plugins", "ServiceAccount");
    }
    if options.audit {
        std::fs::write(workspace.file("audit-policy.json"), audit::POLICY)?;
        launch = launch
            .flag("audit-policy-file", workspace.file("audit-policy.json"))
            .flag("audit-log-path", workspace.log("audit"))
            .flag("audit-log-mode", "blocking-strict");
    }
    Ok(launch)
}

/// The controllers; without nodes, only those that clean up after deleted objects.
pub(super) fn controllers(
    workspace: &Workspace,
    at: &Endpoints,
    options: &Options,
) -> anyhow::Result<Launch> {
    let pki = |name: &str| workspace.file(Path::new("pki").join(name));
    let program = workspace.tools.get("kube-controller-manager")?;
    let config = pki("controllers.kubeconfig");
    let launch = Launch::new("controllers", program, &at.place)
        .flag("kubeconfig", &config)
        .flag("authentication-kubeconfig", &config)
        .flag("authorization-kubeconfig", &config)
        .flag("service-account-private-key-file", pki("sa.key"))
        .flag("root-ca-file", pki("ca.crt"))
        .flag("cluster-signing-cert-file", pki("ca.crt"))
        .flag("cluster-signing-key-file", pki("ca.key"))
        .flag("flex-volume-plugin-dir", workspace.file("flex"))
        .flag("kube-api-qps", "300")
        .flag("kube-api-burst", "600")
        .flag("leader-elect", "false")
        .flag("use-service-account-credentials", "true");
    if options.nodes == 0 {
        return Ok(launch
            .flag(
                "controllers",
                "garbage-collector-controller,namespace-controller",
            )
            // It serves nothing that a test uses, and its usual port may be taken.
            .flag("secure-port", "0"));
    }
    Ok(launch
        // Four kubelet heartbeats.
        .flag("node-monitor-grace-period", "12s")
        .flag("node-monitor-period", "2s")
        .flag("horizontal-pod-autoscaler-sync-period", "5s")
        .flag("horizontal-pod-autoscaler-downscale-stabilization", "15s")
        .flag("horizontal-pod-autoscaler-initial-readiness-delay", "5s")
        .flag("horizontal-pod-autoscaler-cpu-initialization-period", "5s"))
}

/// The scheduler.
pub(super) fn scheduler(workspace: &Workspace, at: &Endpoints) -> anyhow::Result<Launch> {
    let config = workspace.file("pki/scheduler.kubeconfig");
    let program = workspace.tools.get("kube-scheduler")?;
    Ok(Launch::new("scheduler", program, &at.place)
        .flag("kubeconfig", &config)
        .flag("authentication-kubeconfig", &config)
        .flag("authorization-kubeconfig", &config)
        .flag("leader-elect", "false"))
}

/// Returns a kube-proxy that runs in `place` as the one of `node`.
pub(super) fn proxy(
    workspace: &Workspace,
    name: &str,
    node: usize,
    place: &Place,
) -> anyhow::Result<Launch> {
    let config = serde_json::json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": workspace.file("pki/proxy.kubeconfig")},
        "clusterCIDR": workspace.family.list(|ranges| ranges.pods),
        "hostnameOverride": super::node::name(node),
        "oomScoreAdj": 0,
        // Only the machine's initial network namespace may set these.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "nftables": {"syncPeriod": "30s", "minSyncPeriod": "0s"},
    });
    let file = workspace.file(format!("{name}.json"));
    std::fs::write(&file, config.to_string())?;
    Ok(Launch::new(name, workspace.tools.get("kube-proxy")?, place).flag("config", file))
}

/// Formats an address for use in a URL.
fn in_url(address: &str) -> String {
    if address.contains(':') {
        format!("[{address}]")
    } else {
        address.to_owned()
    }
}
