//! The bundle for nodes without internet: from a hub over a store and an archive to another store, which serves.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{Up, UpOptions, deployment, hearth, root, run, skipped};
use serde_json::{Value, json};

use super::server::hub::HubServer;
use super::server::sha256;
use super::{VERSION, refused, release, text, unpacked, write_programs};

const REPO: &str = "acme/demo";
/// Nothing listens here.
const NO_HUB: &str = "http://127.0.0.1:9";

/// Fetches the demo model from a hub into a store.
async fn stored(store: &Path) {
    let entries = std::fs::read_dir(root().join("models/hearth-demo")).expect("the demo model");
    let files: Vec<(String, Vec<u8>)> = entries
        .flatten()
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name");
            (name, std::fs::read(entry.path()).expect("a file"))
        })
        .collect();
    let listed: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    let hub = HubServer::start(REPO, &listed).await;
    let (code, _, stderr) = models(&["pull", REPO], store, &hub.url());
    assert_eq!(code, 0, "{stderr}");
}

/// Runs `hearth models` on a store.
fn models(words: &[&str], store: &Path, hub: &str) -> (i32, String, String) {
    run(hearth()
        .arg("models")
        .args(words)
        .env("HEARTH_STATE_DIR", store.join("state"))
        .env("HEARTH_CACHE", store)
        .env("HF_ENDPOINT", hub))
}

/// Writes what a release consists of, as far as a bundle looks at it.
fn write_release(directory: &Path) -> PathBuf {
    write_programs(&directory.join("programs"));
    let output = directory.join("release");
    let path = |name: &str| text(&directory.join("programs").join(name)).to_owned();
    release(&[
        "images",
        "--operator",
        &path("amd64/hearth"),
        "--worker",
        &path("amd64/hearth-worker"),
        "--kernels",
        &path("kernels"),
        "--demo",
        &path("kernels"),
        "--registry",
        "r.test",
        "--output",
        text(&output),
    ]);
    std::fs::write(output.join("install.yaml"), "# all of it\n").expect("a file");
    let sums: String = ["hearth-worker.tar", "hearth.tar", "install.yaml"]
        .iter()
        .map(|name| {
            let bytes = std::fs::read(output.join(name)).expect("a file");
            format!("{}  {name}\n", sha256(&bytes))
        })
        // Made with the release, and no part of another bundle.
        .chain([format!("{}  hearth-0-bundle.tar\n", sha256(b""))])
        .collect();
    std::fs::write(output.join("hearth-0-bundle.tar"), "").expect("a file");
    std::fs::write(output.join("SHA256SUMS"), sums).expect("a file");
    output
}

/// A node's directory with an unpacked bundle, and a ctr that writes down what it is told.
struct Node {
    directory: tempfile::TempDir,
}

impl Node {
    fn with(bundle: &Path) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let node = Self { directory };
        let (code, _, stderr) = run(Command::new("tar")
            .args(["-xf", text(bundle)])
            .current_dir(node.path()));
        assert_eq!(code, 0, "{stderr}");
        let ctr = node.path().join("ctr");
        let script = format!("#!/bin/sh\necho \"$@\" >>{}/told\n", node.path().display());
        std::fs::write(&ctr, script).expect("a program");
        std::fs::set_permissions(&ctr, PermissionsExt::from_mode(0o755)).expect("a mode");
        node
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn bundle(&self) -> PathBuf {
        self.path().join(format!("hearth-{VERSION}"))
    }

    fn store(&self) -> PathBuf {
        self.path().join("store")
    }

    fn install(&self) -> (i32, String) {
        let ctr = self.path().join("ctr");
        let (code, stdout, stderr) = run(Command::new(self.bundle().join("install-node.sh"))
            .args(["--store", text(&self.store()), "--ctr", text(&ctr)]));
        (code, format!("{stdout}{stderr}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_images_and_models_and_serves_without_a_hub() {
    let directory = tempfile::tempdir().expect("directory");
    let store = directory.path().join("cache");
    stored(&store).await;
    let made = write_release(directory.path());
    let bundle = bundled(&made, &store, "one.tar");
    let bytes = std::fs::read(&bundle).expect("a bundle");
    let again = bundled(&made, &store, "two.tar");
    assert!(bytes == std::fs::read(again).expect("a bundle"));
    let names: Vec<String> = unpacked(&bytes).into_iter().map(|(name, _)| name).collect();
    for expected in [
        "README.md",
        "install-node.sh",
        "install.yaml",
        "hearth.tar",
        "images.txt",
    ] {
        let expected = format!("hearth-{VERSION}/{expected}");
        assert!(names.contains(&expected), "no {expected} in {names:?}");
    }

    let node = Node::with(&bundle);
    if !rustix::process::geteuid().is_root() {
        skipped("only root may give files to the agents' user, so nothing was installed");
        return;
    }
    let (code, said) = node.install();
    assert_eq!(code, 0, "{said}");
    let told = std::fs::read_to_string(node.path().join("told")).expect("calls of ctr");
    for name in ["hearth", "hearth-worker"] {
        let pinned =
            format!("images label r.test/{name}:{VERSION} io.cri-containerd.pinned=pinned");
        for expected in [format!("images import --local {name}.tar"), pinned] {
            assert!(
                told.contains(&format!("--namespace k8s.io {expected}")),
                "{told}"
            );
        }
    }
    // Again: what is there stays, and a link where the pin was leads root nowhere.
    let victim = node.path().join("victim");
    std::fs::write(&victim, "root's").expect("a file");
    let pin = pin_of(&node.store());
    std::fs::remove_file(&pin).expect("the pin");
    std::os::unix::fs::symlink(&victim, &pin).expect("a link");
    let (code, said) = node.install();
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("is there already"), "{said}");
    assert_eq!(victim.metadata().expect("a file").uid(), 0);
    assert!(pin.symlink_metadata().expect("the pin").is_file());
    has_the_model(&node.store());
    serves_without_a_hub(directory.path(), &node.store());
}

/// Makes a bundle of the store's model beside a release.
fn bundled(made: &Path, store: &Path, name: &str) -> PathBuf {
    let bundle = made.with_file_name(name);
    let told = release(&[
        "bundle",
        "--release",
        text(made),
        "--store",
        text(store),
        "--output",
        text(&bundle),
    ]);
    assert!(told.contains("acme/demo@main"), "{told}");
    bundle
}

/// The file that pins the store's model.
fn pin_of(store: &Path) -> PathBuf {
    let entries = std::fs::read_dir(store.join("models")).expect("models");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let is_pin = |path: &PathBuf| text(path).contains("/.pinned-");
    paths.find(is_pin).expect("a pin")
}

/// The model is in the store as if an agent had fetched it and a person pinned it.
fn has_the_model(store: &Path) {
    let (code, stdout, stderr) = models(&["list", "-o", "json"], store, NO_HUB);
    assert_eq!(code, 0, "{stderr}");
    let listed: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(listed[0]["source"], "acme/demo@main");
    assert_eq!(listed[0]["pinned"], true);
    let model = PathBuf::from(listed[0]["directory"].as_str().expect("a directory"));
    for path in [model.clone(), model.join("config.json")] {
        let owner = path.metadata().expect("a file");
        assert_eq!((owner.uid(), owner.gid()), (65532, 65532), "{path:?}");
    }
}

fn serves_without_a_hub(directory: &Path, store: &Path) {
    let source = json!({"huggingFace": {"repo": REPO}});
    let file = deployment(directory, |spec| spec["model"]["source"] = source);
    let mut up = Up::spawn(&UpOptions {
        file: Some(file),
        arguments: ["--ask", "What is Hearth?", "--once"]
            .map(str::to_owned)
            .to_vec(),
        environment: [("HEARTH_CACHE", text(store)), ("HF_ENDPOINT", NO_HUB)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
        ..UpOptions::default()
    });
    let code = up.wait();
    let output = up.output();
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("acme/demo is in the cache"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_is_found_before_anything_is_installed() {
    let directory = tempfile::tempdir().expect("directory");
    let made = write_release(directory.path());
    let bundle = directory.path().join("bundle.tar");
    let arguments = [
        "bundle",
        "--release",
        text(&made),
        "--output",
        text(&bundle),
    ];
    release(&arguments);
    let node = Node::with(&bundle);
    if rustix::process::geteuid().is_root() {
        std::fs::write(node.bundle().join("hearth.tar"), "half").expect("a file");
        let (code, said) = node.install();
        assert_eq!(code, 1, "{said}");
        assert!(
            said.contains("hearth.tar") && said.contains("damaged"),
            "{said}"
        );
        assert!(!node.path().join("told").exists() && !node.store().exists());
    } else {
        let (code, said) = node.install();
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("run it with sudo"), "{said}");
    }

    // The same before a bundle is made.
    std::fs::remove_file(&bundle).expect("removed");
    std::fs::write(made.join("install.yaml"), "# other\n").expect("a file");
    let said = refused(&arguments);
    assert!(said.contains("install.yaml has changed"), "{said}");
    let store = directory.path().join("empty");
    let said = refused(&[&arguments[..], &["--store", text(&store)]].concat());
    assert!(said.contains("no model is there"), "{said}");
    let named = ["--store", text(&store), "--model", "acme/other@main"];
    let said = refused(&[&arguments[..], &named].concat());
    assert!(said.contains("no model acme/other@main is there"), "{said}");
    let left = std::fs::read_dir(directory.path())
        .expect("a directory")
        .flatten();
    let names: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert!(
        !names
            .iter()
            .any(|name| name == "bundle.tar" || name == "bundle.part"),
        "{names:?}"
    );
}
