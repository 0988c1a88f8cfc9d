//! The file beside the run directory that has the address of the first launcher. All nodes share it
//! while the run lasts.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use spd_files::atomic::write_private;

use super::handshake::Secret;

/// Environment variable with the address of the first node, set by users, torchrun and Kubernetes.
const ADDRESS: &str = "MASTER_ADDR";

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rendezvous {
    /// The addresses of the first launcher, the likeliest first; a single one is in the run's
    /// network.
    pub(crate) addresses: Vec<SocketAddr>,
    secret: String,
}

/// The file of the first launcher, removed on drop.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(super) path: PathBuf,
    rendezvous: Rendezvous,
}

/// The path of the file for a run directory.
pub(crate) fn path(run_dir: &Path) -> PathBuf {
    let mut name = run_dir.file_name().unwrap_or_default().to_owned();
    name.push(".nodes");
    run_dir.with_file_name(name)
}

impl Rendezvous {
    /// Writes the file for a listener.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn post(
        run_dir: &Path,
        (listener, network): (&TcpListener, Option<IpAddr>),
        secret: Secret,
    ) -> anyhow::Result<Posted> {
        let port = listener.local_addr()?.port();
        let mut addresses = addresses(network, port);
        if network.is_none()
            && let Ok(name) = env::var(ADDRESS)
            && let Ok(named) = (name, port).to_socket_addrs()
        {
            // A name that is not of this machine may resolve to it all the same.
            addresses.splice(..0, named);
        }
        let rendezvous = Self {
            addresses,
            secret: secret.hex(),
        };
        let path = path(run_dir);
        let text = serde_json::to_string(&rendezvous)?;
        let written = write_private(&path, &[text.as_bytes()]);
        written.with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Posted { path, rendezvous })
    }

    /// The content of a run's file, if there is one; it may be of a launcher that is gone.
    pub(crate) fn posted(run_dir: &Path) -> Option<(Self, Secret)> {
        let text = spd_files::read(&path(run_dir)).ok()?;
        let found: Self = serde_json::from_slice(&text).ok()?;
        let secret = Secret::of(&found.secret)?;
        Some((found, secret))
    }

    /// The address of this node in the run's network, if known; it has reached the first launcher
    /// from `own`.
    pub(crate) fn network(&self, own: IpAddr) -> Option<IpAddr> {
        (self.addresses.len() == 1).then_some(own)
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        let is_own = |text: Vec<u8>| {
            let found: Option<Rendezvous> = serde_json::from_slice(&text).ok();
            found.as_ref() == Some(&self.rendezvous)
        };
        // Another launcher may have replaced the file.
        if spd_files::read(&self.path).is_ok_and(is_own) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The address of the first node in the run's network, if known: by `MASTER_ADDR`, or because there
/// is only one.
pub(crate) fn network() -> Option<IpAddr> {
    match env::var(ADDRESS) {
        Ok(name) => named(&name),
        Err(_) => own_addresses(0)
            .iter()
            .all(|own| own.ip().is_loopback())
            .then_some(Ipv4Addr::LOCALHOST.into()),
    }
}

/// The address of this machine to which a name resolves, if any.
fn named(name: &str) -> Option<IpAddr> {
    // Some systems resolve their own host name to a loopback address, while others resolve it to an
    // interface.
    let means_loopback = name == "localhost" || name.parse::<IpAddr>().is_ok();
    let mut found = (name, 0).to_socket_addrs().ok()?;
    let found = found.find(|found| {
        let ip = found.ip();
        !ip.is_unspecified()
            && (means_loopback || !ip.is_loopback())
            && TcpListener::bind(found).is_ok()
    });
    found.map(|found| found.ip())
}

/// A listener on an address of this machine, or on all of them.
///
/// # Errors
///
/// When the operating system has no ports left.
pub(crate) fn listener(network: Option<IpAddr>) -> io::Result<TcpListener> {
    match network {
        Some(ip) => TcpListener::bind((ip, 0)),
        None => TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")),
    }
}

/// The addresses of such a listener, the likeliest first.
pub(crate) fn addresses(network: Option<IpAddr>, port: u16) -> Vec<SocketAddr> {
    match network {
        Some(ip) => vec![SocketAddr::new(ip, port)],
        None => own_addresses(port),
    }
}

/// The addresses of a port of this machine: of its interfaces, then loopback.
fn own_addresses(port: u16) -> Vec<SocketAddr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    addresses.push(Ipv4Addr::LOCALHOST.into());
    addresses.retain(|address| !is_link_local(*address));
    // Loopback means another machine to others, so it comes last.
    addresses.sort_by_key(IpAddr::is_loopback);
    addresses.dedup();
    let with_port = addresses.into_iter().map(|ip| SocketAddr::new(ip, port));
    with_port.collect()
}

/// Whether an address is meaningless without its interface.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_unspecified(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_private_and_removed_with_its_launcher() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("tms");
        assert!(Rendezvous::posted(&run_dir).is_none());
        let (listener, secret) = (listener(None).unwrap(), Secret::new().unwrap());
        let posted = Rendezvous::post(&run_dir, (&listener, None), secret).unwrap();
        let (found, its_secret) = Rendezvous::posted(&run_dir).unwrap();
        assert_eq!(its_secret, secret);
        let port = listener.local_addr().unwrap().port();
        assert!(found.addresses.contains(&([127, 0, 0, 1], port).into()));
        assert!(found.addresses.last().unwrap().ip().is_loopback());
        let mode = fs::metadata(path(&run_dir)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // The file of a later launcher stays.
        let later = Rendezvous::post(&run_dir, (&listener, None), Secret::new().unwrap()).unwrap();
        drop(posted);
        assert!(Rendezvous::posted(&run_dir).is_some());
        drop(later);
        assert!(Rendezvous::posted(&run_dir).is_none());
    }

    #[test]
    fn a_run_on_one_address_listens_only_there() {
        let loopback = Some(IpAddr::from([127, 0, 0, 1]));
        assert_eq!(named("127.0.0.1"), loopback);
        assert!(named("localhost").unwrap().is_loopback());
        // Addresses of other machines, of all, and of none.
        for other in ["192.0.2.1", "0.0.0.0", "::", "no such name.invalid", ""] {
            assert_eq!(named(other), None, "{other}");
        }
        let listener = listener(loopback).unwrap();
        let own = listener.local_addr().unwrap();
        assert_eq!(addresses(loopback, own.port()), [own]);
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("tms");
        let secret = Secret::new().unwrap();
        let _posted = Rendezvous::post(&run_dir, (&listener, loopback), secret).unwrap();
        let (found, _) = Rendezvous::posted(&run_dir).unwrap();
        assert_eq!(
            (&found.addresses[..], found.network(own.ip())),
            (&[own][..], loopback)
        );
    }

    #[test]
    fn junk_is_not_a_rendezvous() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("tms");
        for junk in ["", "{}", "{\"addresses\":[],\"secret\":\"12\"}"] {
            write_private(&path(&run_dir), &[junk.as_bytes()]).unwrap();
            assert!(Rendezvous::posted(&run_dir).is_none());
        }
    }
}
