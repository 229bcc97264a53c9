//! `scripts/release.sh` in a checkout of its own, with programs that are built already.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{release_tool, root, run, skipped};

use super::{VERSION, contents, inflated, refused, text, unpacked, write_programs};

/// Time of the checkout's only commit, in seconds since 1970, and as the SBOMs write it.
const COMMITTED: (&str, &str) = ("1767225600", "2026-01-01T00:00:00Z");
const REGISTRY: &str = "registry.test:5000/home";

/// A checkout whose one commit is the tree as it is now, without tensors, which would only take time to compress.
struct Checkout {
    directory: tempfile::TempDir,
}

impl Checkout {
    fn new_or_skip() -> Option<Self> {
        let listed = outside("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root())
            .output();
        let Some(listed) = listed.ok().filter(|listed| listed.status.success()) else {
            skipped("Hearth's sources are no git checkout here, and a release is made of a commit");
            return None;
        };
        let directory = tempfile::tempdir().expect("directory");
        let names = String::from_utf8(listed.stdout).expect("names of letters");
        let is_wanted = |name: &&str| !name.is_empty() && !name.ends_with(".safetensors");
        for name in names.split('\0').filter(is_wanted) {
            let (from, to) = (root().join(name), directory.path().join(name));
            // A file that was removed since the last commit is still listed.
            if from.is_file() {
                std::fs::create_dir_all(to.parent().expect("above")).expect("a directory");
                std::fs::copy(&from, &to).expect("a copy");
            }
        }
        let checkout = Self { directory };
        checkout.git(&["init", "--quiet"]);
        checkout.git(&["add", "--all"]);
        checkout.git(&["commit", "--quiet", "--message", "all"]);
        write_programs(&checkout.path().join("target"));
        // What would push writes down what it is told.
        let fakes = checkout.path().join("target/fakes");
        std::fs::create_dir(&fakes).expect("a directory");
        for name in ["skopeo", "helm"] {
            let script = format!("#!/bin/sh\necho {name} \"$@\" >>{}/told\n", fakes.display());
            std::fs::write(fakes.join(name), script).expect("a program");
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(fakes.join(name), mode).expect("a mode");
        }
        Some(checkout)
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn git(&self, words: &[&str]) {
        let when = format!("{} +0000", COMMITTED.0);
        let (code, _, stderr) = run(outside("git")
            .args([
                "-c",
                "user.name=x",
                "-c",
                "user.email=x@x.test",
                "-c",
                "commit.gpgsign=false",
            ])
            .args(words)
            .env("GIT_AUTHOR_DATE", &when)
            .env("GIT_COMMITTER_DATE", &when)
            .current_dir(self.path()));
        assert_eq!(code, 0, "git {words:?}: {stderr}");
    }

    /// Runs the script with programs from `target`; returns its exit code and what it says.
    fn release(&self, words: &[&str]) -> (i32, String) {
        let target = self.path().join("target");
        let cargo = Path::new(env!("CARGO")).parent().expect("above cargo");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = [target.join("fakes"), cargo.to_path_buf()]
            .into_iter()
            .chain(std::env::split_paths(&path));
        let (code, stdout, stderr) = run(outside(self.path().join("scripts/release.sh"))
            .args(["--programs", text(&target)])
            .args(["--kernels", text(&target.join("kernels"))])
            .args(["--tool", text(&release_tool())])
            .args(words)
            .env("PATH", std::env::join_paths(path).expect("a path"))
            .env_remove("SOURCE_DATE_EPOCH"));
        (code, format!("{stdout}{stderr}"))
    }

    /// Makes a release; returns its directory.
    fn made(&self, name: &str, more: &[&str]) -> PathBuf {
        let output = self.path().join("target").join(name);
        let words = [&["--output", text(&output)], more, &[VERSION]].concat();
        let (code, said) = self.release(&words);
        assert_eq!(code, 0, "{said}");
        output
    }
}

/// Creates a command that looks for its checkout where it runs: whoever runs the tests may be git itself.
fn outside(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("GIT_") {
            command.env_remove(name);
        }
    }
    command
}

#[test]
fn a_release_is_whole_and_its_bytes_follow_from_the_commit() {
    let Some(checkout) = Checkout::new_or_skip() else {
        return;
    };
    let first = checkout.made("first", &["--registry", REGISTRY]);
    let chart = format!("hearth-{VERSION}.tgz");
    let names: Vec<String> = contents(&first)
        .into_iter()
        .map(|(path, _)| path.display().to_string())
        .collect();
    let expected = [
        "SHA256SUMS",
        &chart,
        "hearth-worker.cdx.json",
        "hearth-worker.tar",
        "hearth.cdx.json",
        "hearth.tar",
        "install.yaml",
    ];
    assert_eq!(names, expected);
    sums_are_right(&first, expected.len() - 1);
    let read = |name: &str| std::fs::read(first.join(name)).expect("a file");
    let bill = String::from_utf8(read("hearth.cdx.json")).expect("text");
    assert!(bill.contains(COMMITTED.1), "{bill:.500}");
    packed_as_it_is(checkout.path(), &inflated(&read(&chart)));
    let manifest = String::from_utf8(read("install.yaml")).expect("text");
    for name in ["hearth", "hearth-worker"] {
        let image = format!("\"{REGISTRY}/{name}:{VERSION}\"");
        assert!(manifest.contains(&image), "no {image} in install.yaml");
    }
    assert!(!manifest.contains("\"hearth.dev/hearth"));

    // Another time, another place, the same bytes; the earlier release there makes way.
    std::fs::create_dir(checkout.path().join("target/second")).expect("a directory");
    std::fs::write(checkout.path().join("target/second/SHA256SUMS"), "").expect("a file");
    let second = checkout.made("second", &["--registry", REGISTRY]);
    assert!(contents(&first) == contents(&second));

    // Without a registry, the manifest is the one of the source tree.
    let third = checkout.made("third", &["--platform", "amd64"]);
    let manifest = std::fs::read(third.join("install.yaml")).expect("a file");
    let source = std::fs::read(checkout.path().join("manifests/install.yaml"));
    assert!(manifest == source.expect("a file"));

    let told = checkout.path().join("target/fakes/told");
    assert!(!told.exists(), "something was pushed that nobody asked for");
    let pushed = checkout.made("pushed", &["--push", REGISTRY]);
    let told = std::fs::read_to_string(told).expect("calls");
    let shown = pushed.display();
    for name in ["hearth", "hearth-worker"] {
        let call = format!(
            "skopeo copy --all oci-archive:{shown}/{name}.tar docker://{REGISTRY}/{name}:{VERSION}\n"
        );
        assert!(told.contains(&call), "{told}");
    }
    let call = format!("helm push {shown}/{chart} oci://{REGISTRY}/charts\n");
    assert!(told.contains(&call), "{told}");
    assert!(contents(&first) == contents(&pushed));
}

/// The chart's files are as they are in the tree, except for the registry.
fn packed_as_it_is(checkout: &Path, packed: &[u8]) {
    let chart = checkout.join("charts/hearth");
    let packed = unpacked(packed);
    let files = contents(&chart);
    assert_eq!(packed.len(), files.len());
    for ((name, bytes), (path, source)) in packed.iter().zip(&files) {
        assert_eq!(*name, format!("hearth/{}", path.display()));
        if path != Path::new("values.yaml") {
            assert!(bytes == source, "{name}");
            continue;
        }
        let line = format!("  registry: {REGISTRY}\n");
        let source = String::from_utf8(source.clone()).expect("text");
        let expected = source.replace("  registry: hearth.dev\n", &line);
        assert_eq!(String::from_utf8_lossy(bytes), expected);
    }
}

fn sums_are_right(directory: &Path, number: usize) {
    let (code, stdout, stderr) = run(Command::new("sha256sum")
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(directory));
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(stdout.lines().count(), number, "{stdout}");
}

#[test]
fn what_cannot_be_released_is_told_before_anything_is_made() {
    let Some(checkout) = Checkout::new_or_skip() else {
        return;
    };
    let output = checkout.path().join("target/out");
    let refused = |words: &[&str]| {
        let words = [&["--output", text(&output)], words].concat();
        let (code, said) = checkout.release(&words);
        assert_ne!(code, 0, "{said}");
        assert!(!output.exists(), "{said}");
        said
    };
    let said = refused(&["9.9.9"]);
    let words = format!("Cargo.toml: version is {VERSION}, and 9.9.9 is to be released");
    assert!(said.contains(&words), "{said}");
    let said = refused(&[]);
    assert!(
        said.contains(&format!("Cargo.toml has {VERSION}")),
        "{said}"
    );
    let said = refused(&["--platform", "riscv64", VERSION]);
    assert!(said.contains("--platform is amd64 or arm64"), "{said}");

    let worker = checkout.path().join("target/arm64/hearth-worker");
    std::fs::rename(&worker, worker.with_extension("away")).expect("renamed");
    let said = refused(&[VERSION]);
    assert!(
        said.contains("arm64/hearth-worker, which --programs should have"),
        "{said}"
    );

    let description = checkout.path().join("charts/hearth/Chart.yaml");
    let chart = std::fs::read_to_string(&description).expect("a file");
    let other = chart.replace(&format!("appVersion: {VERSION}"), "appVersion: 0.0.9");
    std::fs::write(&description, other).expect("a file");
    let said = refused(&[VERSION]);
    assert!(said.contains("Chart.yaml: appVersion is 0.0.9"), "{said}");
    std::fs::write(&description, chart + "# changed\n").expect("a file");
    let said = refused(&[VERSION]);
    assert!(said.contains("changes that no commit has"), "{said}");
    assert!(said.contains("M charts/hearth/Chart.yaml"), "{said}");
}

#[test]
fn a_registry_that_is_no_name_is_refused() {
    let directory = tempfile::tempdir().expect("directory");
    let chart = root().join("charts/hearth");
    let output = text(directory.path());
    let pack = ["chart", "--chart", text(&chart), "--output", output];
    let said = refused(&[&pack[..], &["--registry", "a: b"]].concat());
    assert!(said.contains("\"a: b\" is no plain YAML text"), "{said}");
    assert!(contents(directory.path()).is_empty());
}

#[test]
fn a_directory_with_other_files_is_left_alone() {
    let Some(checkout) = Checkout::new_or_skip() else {
        return;
    };
    let output = checkout.path().join("target/mine");
    std::fs::create_dir(&output).expect("a directory");
    std::fs::write(output.join("notes"), "mine").expect("a file");
    // Also one where an earlier release is, or somebody else's.
    for sums in ["", &format!("{}  hearth.tar\n", "0".repeat(64))] {
        if !sums.is_empty() {
            std::fs::write(output.join("SHA256SUMS"), sums).expect("a file");
        }
        let (code, said) = checkout.release(&["--output", text(&output), VERSION]);
        assert_eq!(code, 1, "{said}");
        assert!(
            said.contains("of no release") && said.contains("notes"),
            "{said}"
        );
        assert!(output.join("notes").exists());
    }
}
