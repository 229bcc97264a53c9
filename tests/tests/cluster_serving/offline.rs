//! Hearth from a bundle, on nodes that reach neither a registry nor a hub.

use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_release::bundle::Bundle;
use hearth_release::chart;
use hearth_release::elf::Platform;
use hearth_release::image::{Image, Program};
use hearth_release::layout::Layout;
use hearth_tests::cluster::{Cluster, Options};
use hearth_tests::{copy_of_demo, elf_header, hearth, root, run, worker};
use serde_json::json;

use super::server::hub::HubServer;
use super::server::sha256;
use super::{OPTIONS, release, sources};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const REGISTRY: &str = "hearth.test";
const REPO: &str = "acme/demo";

#[test]
fn a_bundle_is_all_that_nodes_without_internet_need() {
    let options = Options {
        nodes: 1,
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let directory = tempfile::tempdir().expect("directory");
    let unpacked = unpacked(directory.path());
    for node in cluster.list("nodes", "", "") {
        let name = node["metadata"]["name"].as_str().expect("a name");
        has_no_way_out(&cluster, name);
        is_installed_on(&cluster, name, &unpacked);
    }
    let packed = unpacked.join(format!("hearth-{VERSION}.tgz"));
    release::install_chart(&cluster, packed.to_str().expect("a path"), &[]);
    sources::serves(&cluster, "offline", &json!({"huggingFace": {"repo": REPO}}));
}

/// Nothing that a node asks leaves the cluster: there is no route, and the answer is that at once.
fn has_no_way_out(cluster: &Cluster, name: &str) {
    let node = cluster.node_named(name);
    let connects = |address: &str, port: u16| {
        let connect = format!("exec 3<>/dev/tcp/{address}/{port}");
        let output = node.exec(&["timeout", "10", "env", "LC_ALL=C", "bash", "-c", &connect]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let kubelet = connects(&node.address(), 10250);
    assert_eq!(kubelet.0, Some(0), "its own kubelet: {}", kubelet.1);
    // An address of the internet that RFC 5737 keeps for documents: with a route, nobody would answer, and 10 s would pass.
    let (code, said) = connects("192.0.2.1", 443);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("unreachable"), "{said}");
}

/// Runs the bundle's script on a node, and finds the images there, pinned.
fn is_installed_on(cluster: &Cluster, name: &str, unpacked: &Path) {
    let node = cluster.node_named(name);
    let script = unpacked.join("install-node.sh");
    let output = node.exec(&[script.to_str().expect("a path")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let listed = node.exec(&["ctr", "--namespace", "k8s.io", "images", "list"]);
    let listed = String::from_utf8_lossy(&listed.stdout);
    for image in ["hearth", "hearth-worker"] {
        let reference = format!("{REGISTRY}/{image}:{VERSION} ");
        let line = listed.lines().find(|line| line.starts_with(&reference));
        let line = line.unwrap_or_else(|| panic!("no {reference} in\n{listed}"));
        assert!(line.contains("io.cri-containerd.pinned=pinned"), "{line}");
    }
}

/// Makes a bundle with the demo model as a hub gives it, and unpacks it as a person would.
fn unpacked(directory: &Path) -> PathBuf {
    let made = directory.join("release");
    std::fs::create_dir(&made).expect("a directory");
    for (program, built) in [(Program::Operator, hearth()), (Program::Worker, worker())] {
        write_images(&made, program, Path::new(built.get_program()));
    }
    chart::pack(&root().join("charts/hearth"), VERSION, REGISTRY, &made).expect("the chart");
    let mut sums = String::new();
    for entry in std::fs::read_dir(&made).expect("a directory").flatten() {
        let bytes = std::fs::read(entry.path()).expect("a file");
        let name = entry.file_name().into_string().expect("a name");
        sums += &format!("{}  {name}\n", sha256(&bytes));
    }
    std::fs::write(made.join("SHA256SUMS"), sums).expect("a file");
    let store = directory.join("store");
    pull(&store, directory);
    let archive = directory.join("bundle.tar");
    let bundle = Bundle {
        release: &made,
        store: Some(&store),
        models: &[format!("{REPO}@main")],
        version: VERSION,
    };
    bundle.write(&archive).expect("a bundle");
    let (code, _, stderr) = run(Command::new("tar")
        .arg("-xf")
        .arg(&archive)
        .current_dir(directory));
    assert_eq!(code, 0, "{stderr}");
    directory.join(format!("hearth-{VERSION}"))
}

/// Writes the images of a program for this machine, and of one for the other platform, which nothing here can run: the nodes
/// take their own.
fn write_images(directory: &Path, program: Program, built: &Path) {
    let foreign = directory.with_extension("elf");
    let machine = match Platform::of_machine() {
        Some(Platform::Amd64) => 183,
        _ => 62,
    };
    std::fs::write(&foreign, elf_header(machine)).expect("a program");
    let demo = root().join("models/hearth-demo");
    let image = |built: &Path| Image::of(program, built, &demo).expect("an image");
    let name = program.name();
    Layout::new(&format!("{REGISTRY}/{name}:{VERSION}"))
        .image(image(&foreign))
        .image(image(built))
        .write(&directory.join(format!("{name}.tar")))
        .expect("an archive");
}

/// Fetches the demo model from a hub, which is gone afterwards, into a store.
fn pull(store: &Path, directory: &Path) {
    let demo = directory.join("demo");
    std::fs::create_dir(&demo).expect("a directory");
    let model = copy_of_demo(&demo);
    let entries = std::fs::read_dir(&model).expect("the demo model").flatten();
    let files: Vec<(String, Vec<u8>)> = entries
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name");
            (name, std::fs::read(entry.path()).expect("a file"))
        })
        .collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let hub = runtime.block_on(HubServer::start(REPO, &files));
    let (code, _, stderr) = run(hearth()
        .args(["models", "pull", REPO])
        .env("HEARTH_STATE_DIR", directory.join("state"))
        .env("HEARTH_CACHE", store)
        .env("HF_ENDPOINT", hub.url()));
    assert_eq!(code, 0, "{stderr}");
}
