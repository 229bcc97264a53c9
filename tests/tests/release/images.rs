//! Images for two platforms under one name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{root, run, skipped};
use serde_json::{Value, json};

use super::server::sha256;
use super::{
    MACHINES, VERSION, inflated, program, refused, release, text, unpacked, write_programs,
};

/// An archive in OCI layout.
struct Layout {
    files: BTreeMap<String, Vec<u8>>,
}

impl Layout {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("an archive");
        let files = unpacked(&bytes).into_iter().collect();
        Self { files }
    }

    fn json(&self, name: &str) -> Value {
        let bytes = self.files.get(name);
        serde_json::from_slice(bytes.unwrap_or_else(|| panic!("no {name}"))).expect("JSON")
    }

    /// The bytes that a descriptor names.
    fn blob(&self, descriptor: &Value) -> &[u8] {
        let digest = descriptor["digest"].as_str().expect("a digest");
        let name = format!("blobs/{}", digest.replace(':', "/"));
        let bytes = &self.files[&name];
        assert_eq!(descriptor["size"], bytes.len());
        bytes
    }

    fn parsed(&self, descriptor: &Value) -> Value {
        serde_json::from_slice(self.blob(descriptor)).expect("JSON")
    }
}

/// Writes a demo model of some bytes.
fn demo(directory: &Path) -> PathBuf {
    let demo = directory.join("demo");
    std::fs::create_dir_all(&demo).expect("a directory");
    std::fs::write(demo.join("config.json"), "{}").expect("a file");
    demo
}

/// Makes the images of programs for these platforms in `directory/NAME`.
fn make(directory: &Path, name: &str, platforms: &[&str]) -> PathBuf {
    write_programs(&directory.join("programs"));
    let (demo, output) = (demo(directory), directory.join(name));
    let kernels = directory.join("programs/kernels");
    let mut arguments = vec!["images", "--registry", "registry.test/home", "--demo"];
    arguments.extend([
        text(&demo),
        "--kernels",
        text(&kernels),
        "--output",
        text(&output),
    ]);
    let programs: Vec<(PathBuf, PathBuf)> = platforms
        .iter()
        .map(|platform| directory.join("programs").join(platform))
        .map(|below| (below.join("hearth"), below.join("hearth-worker")))
        .collect();
    for (operator, worker) in &programs {
        arguments.extend(["--operator", text(operator), "--worker", text(worker)]);
    }
    arguments.extend(["--created", "86400"]);
    let told = release(&arguments);
    assert!(told.contains("registry.test/home/hearth:"), "{told}");
    output
}

#[test]
fn each_platform_finds_its_own_program_under_one_name() {
    let directory = tempfile::tempdir().expect("directory");
    let output = make(directory.path(), "out", &["amd64", "arm64"]);
    for name in ["hearth", "hearth-worker"] {
        let layout = Layout::read(&output.join(format!("{name}.tar")));
        for (path, bytes) in &layout.files {
            if let Some(digest) = path.strip_prefix("blobs/sha256/") {
                assert_eq!(digest, sha256(bytes), "{path}");
            }
        }
        assert_eq!(layout.json("oci-layout")["imageLayoutVersion"], "1.0.0");
        let named = layout.json("index.json")["manifests"].clone();
        assert_eq!(named.as_array().map(Vec::len), Some(1), "{named}");
        let reference = format!("registry.test/home/{name}:{VERSION}");
        let annotations = &named[0]["annotations"];
        assert_eq!(annotations["io.containerd.image.name"], json!(reference));
        let index = layout.parsed(&named[0]);
        let manifests = index["manifests"].as_array().expect("manifests");
        assert_eq!(manifests.len(), 2, "{index}");
        for (descriptor, (platform, machine)) in manifests.iter().zip(MACHINES) {
            let expected = json!({"architecture": platform, "os": "linux"});
            assert_eq!(descriptor["platform"], expected);
            is_image(&layout, descriptor, name, platform, machine);
        }
    }
}

fn is_image(layout: &Layout, descriptor: &Value, name: &str, platform: &str, machine: u16) {
    let manifest = layout.parsed(descriptor);
    let config = layout.parsed(&manifest["config"]);
    assert_eq!(config["architecture"], platform);
    assert_eq!(config["created"], "1970-01-02T00:00:00Z");
    let inside = format!("/usr/bin/{name}");
    assert_eq!(config["config"]["Entrypoint"], json!([inside]));
    assert_eq!(config["config"]["User"], "65532:65532");
    let layer = inflated(layout.blob(&manifest["layers"][0]));
    let diff_id = format!("sha256:{}", sha256(&layer));
    assert_eq!(config["rootfs"]["diff_ids"], json!([diff_id]));
    let files: BTreeMap<_, _> = unpacked(&layer).into_iter().collect();
    let expected = program(machine, &format!("{name} for {platform}"));
    assert!(
        files[inside.trim_start_matches('/')] == expected,
        "{platform}"
    );
    let is_worker = name == "hearth-worker";
    let kernel = "usr/share/hearth/kernels/k.cubin";
    assert_eq!(files.contains_key(kernel), is_worker);
    let environment = config["config"]["Env"].to_string();
    let driver = containerfile_variable("NVIDIA_DRIVER_CAPABILITIES");
    assert_eq!(environment.contains(&driver), is_worker, "{environment}");
}

/// A variable as the other way to build images sets it, which must give the same ones.
fn containerfile_variable(name: &str) -> String {
    let file = std::fs::read_to_string(root().join("images/Containerfile")).expect("it");
    let line = file.lines().find_map(|line| line.strip_prefix("ENV "));
    let line = line.filter(|line| line.starts_with(name));
    line.unwrap_or_else(|| panic!("no ENV {name}")).to_owned()
}

#[test]
fn the_same_programs_give_the_same_bytes() {
    let directory = tempfile::tempdir().expect("directory");
    let first = make(directory.path(), "first", &["amd64", "arm64"]);
    let second = make(directory.path(), "second", &["arm64", "amd64"]);
    assert!(super::contents(&first) == super::contents(&second));
}

#[test]
fn one_platform_needs_no_index() {
    let directory = tempfile::tempdir().expect("directory");
    let output = make(directory.path(), "out", &["arm64"]);
    let layout = Layout::read(&output.join("hearth.tar"));
    let named = &layout.json("index.json")["manifests"][0];
    is_image(&layout, named, "hearth", "arm64", 183);
    // Engines that know no index look here.
    let docker = layout.json("manifest.json");
    let config = docker[0]["Config"].as_str().expect("a config");
    assert_eq!(
        format!("sha256:{}", sha256(&layout.files[config])),
        layout.parsed(named)["config"]["digest"]
    );
}

#[test]
fn skopeo_reads_both_platforms() {
    if Command::new("skopeo").arg("--version").output().is_err() {
        skipped("skopeo is not installed: apt-get install skopeo");
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let output = make(directory.path(), "out", &["amd64", "arm64"]);
    for (platform, _) in MACHINES {
        let copy = directory.path().join(platform);
        let (code, _, stderr) = run(Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--override-arch", platform])
            .arg(format!(
                "oci-archive:{}",
                output.join("hearth.tar").display()
            ))
            .arg(format!("dir:{}", copy.display())));
        assert_eq!(code, 0, "{stderr}");
    }
    let all = directory.path().join("all");
    let (code, _, stderr) = run(Command::new("skopeo")
        .args(["--insecure-policy", "copy", "--all"])
        .arg(format!(
            "oci-archive:{}",
            output.join("hearth.tar").display()
        ))
        .arg(format!("oci:{}", all.display())));
    assert_eq!(code, 0, "{stderr}");
    // Index, two manifests, two configs, two layers.
    let blobs = std::fs::read_dir(all.join("blobs/sha256")).expect("blobs");
    assert_eq!(blobs.count(), 7);
}

#[test]
fn what_is_no_program_for_a_platform_is_refused() {
    let directory = tempfile::tempdir().expect("directory");
    make(directory.path(), "out", &["amd64"]);
    let below = directory.path().join("programs");
    std::fs::write(below.join("text"), "#!/bin/sh\n").expect("a file");
    std::fs::write(below.join("riscv"), program(243, "x")).expect("a file");
    let of = |operator: &str| {
        let path = |name: &str| text(&below.join(name)).to_owned();
        let (operators, workers) = (path(operator), path("amd64/hearth-worker"));
        refused(&[
            "images",
            "--operator",
            &operators,
            "--operator",
            &path("amd64/hearth"),
            "--worker",
            &workers,
            "--kernels",
            &path("kernels"),
            "--demo",
            &path("../demo"),
            "--registry",
            "r.test",
            "--output",
            &path("out"),
        ])
    };
    assert!(of("text").contains("text is no 64-bit ELF program"));
    assert!(of("riscv").contains("riscv is for ELF machine 243"));
    assert!(of("amd64/hearth").contains("two images for amd64"));
}
