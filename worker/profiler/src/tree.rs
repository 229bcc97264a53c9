//! Reads the small files of `/proc` and `/sys` below a root, and collects warnings about anything unexpected in them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Limit of a file's size: a sysfs file has at most a page, but `/proc/cpuinfo` of a large server is larger.
const MAX_FILE_BYTES: u64 = 16 << 20;

pub(crate) struct Tree {
    root: PathBuf,
    warnings: RefCell<Vec<String>>,
}

impl Tree {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            warnings: RefCell::new(Vec::new()),
        }
    }

    /// Whether the root belongs to the running machine, not to a recorded tree.
    pub(crate) fn is_this_machine(&self) -> bool {
        self.root == Path::new("/")
    }

    pub(crate) fn warn(&self, text: String) {
        let mut warnings = self.warnings.borrow_mut();
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    pub(crate) fn into_warnings(self) -> Vec<String> {
        self.warnings.into_inner()
    }

    /// Returns the path of `name` (`/sys/…`) below the root.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name.trim_start_matches('/'))
    }

    /// Reads a file's text, trimmed of white space; `None` if it is missing, unreadable or too large.
    pub(crate) fn read(&self, name: &str) -> Option<String> {
        use std::io::Read;
        let file = std::fs::File::open(self.path(name)).ok()?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Reads a number from a file; `None` if the file is missing, `None` with a warning if it does not contain a
    /// number.
    pub(crate) fn number<N: std::str::FromStr>(&self, name: &str) -> Option<N> {
        let text = self.read(name)?;
        let number = text.parse().ok();
        if number.is_none() {
            self.warn(format!(
                "{name} is {text:?}, not a number: treated as unknown"
            ));
        }
        number
    }

    /// Reads a list such as `0-3,8`; `None` if the file is missing, `None` with a warning if it does not contain a
    /// list.
    pub(crate) fn ids(&self, name: &str) -> Option<BTreeSet<u32>> {
        let text = self.read(name)?;
        let ids = parse_id_list(&text);
        if ids.is_none() {
            self.warn(format!(
                "{name} is {text:?}, not a list such as 0-3,8: treated as unknown"
            ));
        }
        ids
    }

    /// Returns the names in a directory, sorted; `None` if it cannot be listed.
    pub(crate) fn names(&self, directory: &str) -> Option<Vec<String>> {
        let entries = std::fs::read_dir(self.path(directory)).ok()?;
        let mut names: Vec<String> = entries
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_unstable();
        Some(names)
    }

    pub(crate) fn host_name(&self) -> String {
        let names = ["/proc/sys/kernel/hostname", "/etc/hostname"];
        let found = names.iter().find_map(|n| self.read(n));
        found.filter(|n| !n.is_empty()).unwrap_or_else(|| {
            self.warn("the host has no name: named localhost".to_owned());
            "localhost".to_owned()
        })
    }
}

/// Parses a list of ids in the kernel's format: `0-3,8` is 0, 1, 2, 3 and 8; an empty text contains no ids.
///
/// `None` for anything else, including ids above 65535.
pub fn parse_id_list(text: &str) -> Option<BTreeSet<u32>> {
    const MAX_ID: u32 = u16::MAX as u32;
    let mut ids = BTreeSet::new();
    for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > MAX_ID {
            return None;
        }
        ids.extend(first..=last);
    }
    Some(ids)
}

/// Formats a list of ids like the kernel, `0-3,8`; `none` if it is empty.
pub fn format_id_list(ids: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &id in ids {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == id => *last = id,
            _ => runs.push((id, id)),
        }
    }
    let runs: Vec<String> = runs
        .into_iter()
        .map(|(first, last)| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        })
        .collect();
    if runs.is_empty() {
        "none".to_owned()
    } else {
        runs.join(",")
    }
}

/// Returns the value in bytes of a line `Name:   123 kB`.
pub(crate) fn kib_line(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| {
        // Lines of a NUMA node's meminfo begin with `Node 0 `.
        let line = line.trim_start();
        let line = line
            .strip_prefix("Node ")
            .and_then(|rest| rest.split_once(' '))
            .map_or(line, |(_, rest)| rest);
        line.strip_prefix(name)?.strip_prefix(':')
    })?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use super::*;

    #[test]
    fn lists_of_ids() {
        let ids = |text| parse_id_list(text).map(|s| s.into_iter().collect::<Vec<_>>());
        assert_eq!(ids("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(ids(""), Some(vec![]));
        assert_eq!(ids("5"), Some(vec![5]));
        for bad in ["3-1", "a", "1,", "-1", "0-99999999999", "0-4000000000"] {
            assert_eq!(ids(bad), None, "{bad:?}");
        }
        assert_eq!(format_id_list(&parse_id_list("0,1,2,7").unwrap()), "0-2,7");
        assert_eq!(format_id_list(&BTreeSet::new()), "none");
    }

    #[test]
    fn lines_of_meminfo() {
        let host = "MemTotal:       16 kB\nMemFree:  8 kB\nOdd: 3\n";
        assert_eq!(kib_line(host, "MemFree"), Some(8192));
        assert_eq!(kib_line(host, "Mem"), None);
        assert_eq!(kib_line(host, "Odd"), None);
        assert_eq!(kib_line("Node 0 MemFree:  2 kB", "MemFree"), Some(2048));
    }
}
