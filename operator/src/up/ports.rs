//! Ports: whether one is free, who holds it, and free ones.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener};

use anyhow::{Context, bail};

/// Checks that `address` can be listened on. `flag`: what chooses another, up to the port.
///
/// # Errors
/// Names the process that holds the port, where /proc tells, and the flag that chooses another.
pub(crate) fn check_free(address: SocketAddr, file: &str, flag: &str) -> anyhow::Result<()> {
    match hearth_transport::listen(address) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let holder = holder(address.port()).map_or_else(
                || "another process".to_owned(),
                |(pid, name)| format!("process {pid} ({name})"),
            );
            bail!(
                "port {} is in use by {holder}\n  choose another: hearth up -f {file} {flag}{}",
                address.port(),
                address.port().wrapping_add(1)
            );
        }
        Err(error) => Err(error).with_context(|| format!("{address} cannot be listened on")),
    }
}

/// Ports that are free now. They are held until this is dropped, or the system could give one away twice.
#[derive(Default)]
pub(crate) struct FreePorts(Vec<TcpListener>);

impl FreePorts {
    /// An address of `ip` with another free port.
    ///
    /// # Errors
    /// When the system has none.
    pub(crate) fn take(&mut self, ip: IpAddr) -> anyhow::Result<SocketAddr> {
        let listener =
            TcpListener::bind((ip, 0)).with_context(|| format!("no free port on {ip}"))?;
        let address = listener.local_addr()?;
        self.0.push(listener);
        Ok(address)
    }
}

/// Process id and name of who listens on `port`, as far as /proc shows it to us.
fn holder(port: u16) -> Option<(u32, String)> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .find_map(|table| listening_inode(&fs::read_to_string(table).ok()?, port))?;
    let wanted = format!("socket:[{inode}]");
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        let holds = descriptors.flatten().any(|fd| {
            fs::read_link(fd.path()).is_ok_and(|target| target.as_os_str() == wanted.as_str())
        });
        if holds {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_owned()));
        }
    }
    None
}

/// The socket's inode from a /proc/net/tcp table: fields are `sl local remote state … inode`.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local_port = fields.get(1)?.rsplit_once(':')?.1;
        let listens = *fields.get(3)? == LISTEN && u16::from_str_radix(local_port, 16) == Ok(port);
        listens.then(|| fields.get(9)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_free_port_is_given_twice() {
        let mut free = FreePorts::default();
        let ports: BTreeSet<u16> = (0..300)
            .map(|_| free.take(IpAddr::from([127, 0, 0, 1])).unwrap().port())
            .collect();
        assert_eq!(ports.len(), 300);
    }

    #[test]
    fn names_the_process_that_holds_a_port() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let message = check_free(address, "demo.yaml", "--port ")
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(&format!(
                "port {} is in use by process {}",
                address.port(),
                std::process::id()
            )),
            "{message}"
        );
        assert!(
            message.contains("hearth up -f demo.yaml --port"),
            "{message}"
        );
        drop(listener);
        check_free(address, "demo.yaml", "--port ").unwrap();
    }
}
