//! Listening sockets: bound here or inherited from systemd; and who holds an address that is taken.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// An address that can not be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("{address} is taken{}; stop that process or choose another port with --port", by(.holder.as_ref()))]
    Taken { address: SocketAddr, holder: Option<Holder> },
    #[error("{address} can not be listened on: {source}; {remedy}")]
    Refused { address: SocketAddr, source: io::Error, remedy: &'static str },
    #[error("another process answers on socket {path}; stop it or choose another path")]
    SocketTaken { path: PathBuf },
    #[error("socket {path} can not be made: {source}; check that its folder can be written by this user")]
    Socket { path: PathBuf, source: io::Error },
}

/// A process that listens on an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}

fn by(holder: Option<&Holder>) -> String {
    holder.map_or_else(|| " by a process of another user".to_owned(), |h| format!(" by {h}"))
}

/// A TCP listener, non-blocking.
pub fn tcp(host: IpAddr, port: u16) -> Result<TcpListener, BindError> {
    let address = SocketAddr::new(host, port);
    let listener = TcpListener::bind(address).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => BindError::Taken { address, holder: holder_of(port) },
        io::ErrorKind::PermissionDenied => BindError::Refused {
            address,
            source,
            remedy: "ports below 1024 need root or CAP_NET_BIND_SERVICE; use systemd's socket unit or a higher port",
        },
        io::ErrorKind::AddrNotAvailable => BindError::Refused {
            address,
            source,
            remedy: "this machine does not have that address; --host 0.0.0.0 listens on every interface",
        },
        _ => BindError::Refused { address, source, remedy: "check --host and --port" },
    })?;
    listener.set_nonblocking(true).map_err(|source| BindError::Refused {
        address,
        source,
        remedy: "the system refused non-blocking mode",
    })?;
    Ok(listener)
}

/// A Unix listener with these permissions. A socket file that nobody answers on is left over from a crash and replaced.
pub fn unix(path: &Path, mode: u32) -> Result<UnixListener, BindError> {
    let fail = |source| BindError::Socket { path: path.to_owned(), source };
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty() && !d.exists()) {
        fs::create_dir_all(dir).map_err(fail)?;
        // Nobody else may put things where our sockets lie.
        fs::set_permissions(dir, fs::Permissions::from_mode(0o750)).map_err(fail)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {
            if UnixStream::connect(path).is_ok() {
                return Err(BindError::SocketTaken { path: path.to_owned() });
            }
            fs::remove_file(path).map_err(fail)?;
        }
        Ok(_) => return Err(fail(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket lies there"))),
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(fail)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    Ok(listener)
}

/// What systemd's socket units handed over.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Named `ernied.socket`, `http` or not named at all.
    pub http: Option<TcpListener>,
    /// Named `admin`.
    pub admin: Option<UnixListener>,
}

/// Takes the inherited sockets. Call once, before anything else opens descriptors.
pub fn inherited() -> io::Result<Inherited> {
    let mut out = Inherited::default();
    for (fd, name) in sd_notify::listen_fds_with_names()? {
        // SAFETY: systemd passes descriptors from 3 up to this process alone (LISTEN_PID was checked), and this function
        // runs once before anything else could own them.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if name.starts_with("admin") || name.starts_with("ernied-admin") {
            let listener = UnixListener::from(fd);
            listener.set_nonblocking(true)?;
            out.admin = Some(listener);
        } else if out.http.is_none() {
            let listener = TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            out.http = Some(listener);
        }
    }
    Ok(out)
}

/// The worker's end of the socket pair that the supervisor made. Call once, first thing in the worker's `main`.
pub fn worker_socket() -> io::Result<UnixStream> {
    const WORKER_FD: i32 = 3;
    let target = fs::read_link(format!("/proc/self/fd/{WORKER_FD}"))?;
    if !target.to_string_lossy().starts_with("socket:") {
        return Err(io::Error::other("descriptor 3 is not a socket"));
    }
    // SAFETY: the supervisor passes this descriptor to this process alone, and nothing in it has opened or taken
    // descriptor 3 before (this is called once, before anything else).
    Ok(UnixStream::from(unsafe { OwnedFd::from_raw_fd(WORKER_FD) }))
}

/// Who listens on a TCP port, as far as /proc shows it to this user.
pub fn holder_of(port: u16) -> Option<Holder> {
    let inodes: Vec<u64> = [procfs::net::tcp().ok(), procfs::net::tcp6().ok()]
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.local_address.port() == port && e.state == procfs::net::TcpState::Listen)
        .map(|e| e.inode)
        .collect();
    if inodes.is_empty() {
        return None;
    }
    procfs::process::all_processes().ok()?.flatten().find_map(|process| {
        let holds = process
            .fd()
            .ok()?
            .flatten()
            .any(|fd| matches!(fd.target, procfs::process::FDTarget::Socket(inode) if inodes.contains(&inode)));
        let name = || process.stat().map(|s| s.comm).unwrap_or_default();
        holds.then(|| Holder { pid: u32::try_from(process.pid).unwrap_or(0), name: name() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_names_its_holder() {
        let first = tcp(IpAddr::from([127, 0, 0, 1]), 0).expect("a free port");
        let port = first.local_addr().expect("bound").port();
        let e = tcp(IpAddr::from([127, 0, 0, 1]), port).expect_err("taken");
        assert!(e.to_string().contains(&format!("(pid {})", std::process::id())), "{e}");
        assert!(e.to_string().contains("--port"), "{e}");
    }

    #[test]
    fn a_socket_left_by_a_crash_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().expect("temp");
        let path = dir.path().join("run/admin.sock");
        let live = unix(&path, 0o600).expect("made");
        assert!(matches!(unix(&path, 0o600), Err(BindError::SocketTaken { .. })));
        drop(live);
        unix(&path, 0o660).expect("replaced");
        let mode = fs::metadata(&path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode, 0o660);
    }

    #[test]
    fn a_file_in_the_place_of_a_socket_is_never_removed() {
        let dir = tempfile::tempdir().expect("temp");
        let path = dir.path().join("precious");
        fs::write(&path, "x").expect("written");
        assert!(matches!(unix(&path, 0o600), Err(BindError::Socket { .. })));
        assert!(path.exists());
    }
}
