//! `hearth-worker own`: changes the owner of a directory.
//!
//! The kubelet creates missing host directories as root. An agent's image has no shell, so the one step that needs
//! root is a separate command, run before the agent and with no other privilege.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use rustix::fs::{Gid, Uid};

/// Arguments of `own`.
#[derive(Args)]
pub(crate) struct OwnArgs {
    /// The directory itself; its contents keep their owners
    #[arg(long, value_name = "DIR")]
    directory: PathBuf,
    /// Numeric id of the user, and of the group
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=0xFFFF_FFFE))]
    user: u32,
}

/// Changes the owner; a directory that already belongs to the user is left alone.
pub(crate) fn run(args: &OwnArgs) -> anyhow::Result<()> {
    let OwnArgs { directory, user } = args;
    let found = rustix::fs::lstat(directory)
        .with_context(|| format!("--directory {} cannot be read", directory.display()))?;
    if !rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir() {
        bail!(
            "--directory {} is not a directory\n  name one, not a link to it",
            directory.display()
        );
    }
    if (found.st_uid, found.st_gid) == (*user, *user) {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(*user), Gid::from_raw(*user));
    rustix::fs::chown(directory, Some(uid), Some(gid)).with_context(|| {
        format!(
            "{} cannot be given to user {user}\n  that needs the capability CHOWN",
            directory.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_s_own_directory_needs_no_right() {
        let directory = tempfile::tempdir().unwrap();
        let found = rustix::fs::lstat(directory.path()).unwrap();
        if found.st_uid == 0 {
            // Root may change the owner, and accepts one that is already correct.
            let args = OwnArgs {
                directory: directory.path().to_owned(),
                user: 65532,
            };
            run(&args).unwrap();
            run(&args).unwrap();
            let found = rustix::fs::lstat(directory.path()).unwrap();
            assert_eq!((found.st_uid, found.st_gid), (65532, 65532));
        } else {
            let args = OwnArgs {
                directory: directory.path().to_owned(),
                user: found.st_uid,
            };
            run(&args).unwrap();
        }
    }

    #[test]
    fn a_file_a_link_and_nothing_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("f"), directory.path().join("l"));
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        for path in [file, link, directory.path().join("none")] {
            let args = OwnArgs {
                directory: path.clone(),
                user: 65532,
            };
            let error = run(&args).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
    }
}
