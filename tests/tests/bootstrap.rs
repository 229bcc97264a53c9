//! `scripts/bootstrap.sh` on machines that lack something: the remedy that it prints works there.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use hearth_tests::{root, run};

/// Programs that every system has and the script uses.
const COMMON: [&str; 9] = [
    "bash", "dirname", "uname", "cut", "sed", "sort", "head", "grep", "sh",
];

/// Runs the script as an unprivileged user on a machine whose programs are all in `directory`: the common ones and
/// `scripts`, given by name and body. Returns its exit code and message.
fn bootstrap(directory: &Path, scripts: &[(&str, &str)], has_home: bool) -> (i32, String) {
    for name in COMMON {
        let (code, found, _) = run(Command::new("bash").args(["-c", &format!("type -P {name}")]));
        assert_eq!(code, 0, "this system has no {name}");
        symlink(found.trim(), directory.join(name)).expect("link");
    }
    for (name, body) in [("id", "echo 1000")].iter().chain(scripts) {
        let file = directory.join(name);
        let text = format!("#!{}/bash\n{body}\n", directory.display());
        fs::write(&file, text).expect("write");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("mode");
    }
    let mut command = Command::new(directory.join("bash"));
    command
        .arg(root().join("scripts/bootstrap.sh"))
        .arg("build")
        .env("PATH", directory)
        .env("HOME", if has_home { directory } else { Path::new("") })
        .env_remove("HEARTH_CACHE");
    let (code, _, said) = run(&mut command);
    (code, said)
}

#[test]
fn missing_packages_are_named_as_this_system_calls_them() {
    for (manager, line) in [
        (
            "apt-get",
            "    sudo apt-get install -y build-essential curl ca-certificates\n",
        ),
        (
            "dnf",
            "    sudo dnf install -y gcc gcc-c++ make curl ca-certificates\n",
        ),
        (
            "zypper",
            "    sudo zypper install -y gcc gcc-c++ make curl ca-certificates\n",
        ),
        (
            "pacman",
            "    sudo pacman -S --needed --noconfirm base-devel curl ca-certificates\n",
        ),
    ] {
        let directory = tempfile::tempdir().expect("directory");
        let (code, said) = bootstrap(directory.path(), &[(manager, "exit 1")], true);
        assert_eq!(code, 1, "{manager}: {said}");
        assert!(said.contains(line), "{manager}: {said}");
    }
    let directory = tempfile::tempdir().expect("directory");
    let (code, said) = bootstrap(directory.path(), &[], true);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("build-essential"), "{said}");
    assert!(!said.contains("sudo"), "{said}");
}

#[test]
fn rustup_takes_the_place_of_a_packaged_cargo_that_is_too_old() {
    let compilers = [("cc", "exit 0"), ("c++", "exit 0")];
    for (version, is_replaced) in [("1.75.0", true), ("1.9999.0", false)] {
        let directory = tempfile::tempdir().expect("directory");
        let cargo = format!("echo 'cargo {version} (Distribution)'");
        let mut scripts = compilers.to_vec();
        scripts.push(("cargo", &cargo));
        scripts.push(("curl", "echo 'echo rustup-init \"$@\"'"));
        let (code, said) = bootstrap(directory.path(), &scripts, true);
        assert_eq!(code, 0, "{version}: {said}");
        assert_eq!(said.contains("rustup-init -y"), is_replaced, "{said}");
        assert_eq!(
            said.contains("cargo is 1.75.0, and Hearth needs Rust 1."),
            is_replaced,
            "{said}"
        );
    }
}

#[test]
fn a_missing_home_is_told() {
    let directory = tempfile::tempdir().expect("directory");
    let (code, said) = bootstrap(directory.path(), &[], false);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("HOME is not set"), "{said}");
}
