//! Where the launchers of a run find the first one: a file beside the run directory, which all nodes share, for as long as it runs.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use spd_files::atomic::write_private;

use super::handshake::Secret;

/// Where people, torchrun and Kubernetes say that the first node is.
const ADDRESS: &str = "MASTER_ADDR";

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rendezvous {
    /// Where the first launcher may be reached, the likeliest first.
    pub(crate) addresses: Vec<SocketAddr>,
    secret: String,
}

/// The file of the first launcher. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Posted {
    path: PathBuf,
    rendezvous: Rendezvous,
}

/// The file beside a run directory.
pub(crate) fn path(run_dir: &Path) -> PathBuf {
    let mut name = run_dir.file_name().unwrap_or_default().to_owned();
    name.push(".nodes");
    run_dir.with_file_name(name)
}

impl Rendezvous {
    /// Posts where a listener may be reached.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn post(
        run_dir: &Path,
        listener: &TcpListener,
        secret: Secret,
    ) -> anyhow::Result<Posted> {
        let port = listener.local_addr()?.port();
        let named = env::var(ADDRESS).ok();
        let named = named.and_then(|name| (name, port).to_socket_addrs().ok());
        let mut addresses: Vec<SocketAddr> = named.into_iter().flatten().collect();
        addresses.extend(own_addresses(port));
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

    /// What was posted for a run, if anything was; it may be of a launcher that is gone.
    pub(crate) fn posted(run_dir: &Path) -> Option<(Self, Secret)> {
        let text = spd_files::read(&path(run_dir)).ok()?;
        let found: Self = serde_json::from_slice(&text).ok()?;
        let secret = Secret::of(&found.secret)?;
        Some((found, secret))
    }
}

impl Posted {
    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        let is_own = |text: Vec<u8>| {
            let found: Option<Rendezvous> = serde_json::from_slice(&text).ok();
            found.as_ref() == Some(&self.rendezvous)
        };
        // Another launcher may have posted its own meanwhile.
        if spd_files::read(&self.path).is_ok_and(is_own) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listener on all addresses of this machine.
///
/// # Errors
///
/// When the operating system has none to give.
pub(crate) fn listener() -> io::Result<TcpListener> {
    let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Where a port of this machine may be reached: at the addresses of its interfaces, and from itself.
pub(crate) fn own_addresses(port: u16) -> Vec<SocketAddr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    addresses.push(Ipv4Addr::LOCALHOST.into());
    addresses.retain(|address| !is_link_local(*address));
    // What is this machine for whoever asks comes last.
    addresses.sort_by_key(IpAddr::is_loopback);
    addresses.dedup();
    let with_port = addresses.into_iter().map(|ip| SocketAddr::new(ip, port));
    with_port.collect()
}

/// An address that means nothing without the interface it is of.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_unspecified(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.is_unspecified(),
    }
}

/// Takes the next connection, if one waits.
///
/// # Errors
///
/// When the listener is broken.
pub(crate) fn next(listener: &TcpListener) -> io::Result<Option<std::net::TcpStream>> {
    match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        // Whoever knocked went away again.
        Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(None),
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_posted_is_found_by_its_owner_and_ends_with_its_launcher() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("tms");
        assert!(Rendezvous::posted(&run_dir).is_none());
        let (listener, secret) = (listener().unwrap(), Secret::new().unwrap());
        let posted = Rendezvous::post(&run_dir, &listener, secret).unwrap();
        let (found, its_secret) = Rendezvous::posted(&run_dir).unwrap();
        assert_eq!(its_secret, secret);
        let port = listener.local_addr().unwrap().port();
        assert!(found.addresses.contains(&([127, 0, 0, 1], port).into()));
        assert!(found.addresses.last().unwrap().ip().is_loopback());
        let mode = fs::metadata(path(&run_dir)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // That of a later launcher stays.
        let later = Rendezvous::post(&run_dir, &listener, Secret::new().unwrap()).unwrap();
        drop(posted);
        assert!(Rendezvous::posted(&run_dir).is_some());
        drop(later);
        assert!(Rendezvous::posted(&run_dir).is_none());
    }

    #[test]
    fn junk_is_no_rendezvous() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("tms");
        for junk in ["", "{}", "{\"addresses\":[],\"secret\":\"12\"}"] {
            write_private(&path(&run_dir), &[junk.as_bytes()]).unwrap();
            assert!(Rendezvous::posted(&run_dir).is_none());
        }
    }
}
