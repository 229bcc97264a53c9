//! Ports: availability, current holders, and selection of free ones.

use std::net::{IpAddr, SocketAddr, TcpListener};

use anyhow::{Context, bail};
use procfs::net::TcpState;
use procfs::process::FDTarget;

/// Checks that `address` can be listened on. `flag` is the option that chooses another, up to the port.
///
/// # Errors
/// Names the process that holds the port, if /proc shows it, and the flag that chooses another.
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

/// Ports that are currently free. They are held until this is dropped, as the system could assign one twice.
#[derive(Default)]
pub(crate) struct FreePorts(Vec<TcpListener>);

impl FreePorts {
    /// Returns an address of `ip` with another free port.
    ///
    /// # Errors
    /// The system has none.
    pub(crate) fn take(&mut self, ip: IpAddr) -> anyhow::Result<SocketAddr> {
        let listener =
            TcpListener::bind((ip, 0)).with_context(|| format!("no free port on {ip}"))?;
        let address = listener.local_addr()?;
        self.0.push(listener);
        Ok(address)
    }
}

/// Process id and name of the listener on `port`, as far as /proc shows it to us.
fn holder(port: u16) -> Option<(i32, String)> {
    let tables = [procfs::net::tcp(), procfs::net::tcp6()];
    let mut sockets = tables.into_iter().flatten().flatten();
    let listener = sockets
        .find(|socket| socket.state == TcpState::Listen && socket.local_address.port() == port)?;
    procfs::process::all_processes()
        .ok()?
        .flatten()
        .find_map(|process| {
            let mut descriptors = process.fd().ok()?.flatten();
            let holds = descriptors.any(|it| it.target == FDTarget::Socket(listener.inode));
            holds.then(|| {
                let name = process.stat().map(|stat| stat.comm).unwrap_or_default();
                (process.pid(), name)
            })
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
