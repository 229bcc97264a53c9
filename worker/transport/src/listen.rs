//! Listens on both IPv6 and IPv4.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};

use socket2::{Domain, Protocol, Socket, Type};

/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 1024;

/// Listens on the first of `address`'s addresses that allows it. `[::]` means any address of both IP versions,
/// whatever the system's default for such sockets; on a system without IPv6 it means any IPv4 address.
///
/// # Errors
/// An error if the name resolves to no address, or none of its addresses is ours and free.
pub fn listen(address: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let mut failure = io::Error::other("the name resolves to no address");
    for address in address.to_socket_addrs()? {
        match listen_by(address, bind) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn listen_by<T>(address: SocketAddr, bind: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let is_any = address.is_ipv6() && address.ip().is_unspecified();
    match bind(address) {
        Err(error) if is_any && error.kind() != io::ErrorKind::AddrInUse => {
            let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
            bind(SocketAddr::new(any, address.port()))
        }
        bound => bound,
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // Same as the standard library: a restarted worker gets its port even if old connections linger.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn any_address_takes_both_ip_versions() {
        let listener = listen("[::]:0").unwrap();
        let address = listener.local_addr().unwrap();
        let port = address.port();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        if address.is_ipv4() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: IPv6 here: the system has none");
            return;
        }
        TcpStream::connect(("::1", port)).unwrap();
        // In use for IPv4 too, and no other address is used instead.
        for held in ["[::]", "0.0.0.0"] {
            let error = listen(format!("{held}:{port}")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{held}");
        }
    }

    #[test]
    fn a_system_without_ipv6_listens_on_ipv4() {
        let lacks_ipv6 = |address: SocketAddr| {
            if address.is_ipv6() {
                return Err(io::Error::from(io::ErrorKind::Unsupported));
            }
            Ok(address.to_string())
        };
        let any = listen_by("[::]:9400".parse().unwrap(), lacks_ipv6);
        assert_eq!(any.unwrap(), "0.0.0.0:9400");
        // An address that names one interface means only that one.
        assert!(listen_by("[::1]:9400".parse().unwrap(), lacks_ipv6).is_err());
        let ipv4 = listen_by("127.0.0.1:9400".parse().unwrap(), lacks_ipv6);
        assert_eq!(ipv4.unwrap(), "127.0.0.1:9400");
    }

    #[test]
    fn a_name_is_listened_on_by_one_of_its_addresses() {
        let listener = listen("localhost:0").unwrap();
        assert!(listener.local_addr().unwrap().ip().is_loopback());
        assert!(listen("no.such.name.invalid:1").is_err());
    }
}
