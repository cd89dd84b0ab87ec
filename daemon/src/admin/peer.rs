//! Who is at the other end of the admin socket, and which role that makes.

use crate::audit::Actor;
use crate::config::AdminConfig;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

/// Least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// Looks.
    Viewer,
    /// Drains, reloads, swaps, changes the log level.
    Operator,
    /// Changes settings and keys.
    Admin,
}

impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

/// Credentials as the kernel noted them when the connection was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    credentials: Option<Credentials>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Credentials {
    uid: u32,
    gid: u32,
    pid: Option<i32>,
    groups: Vec<u32>,
    exe: Option<String>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        let credentials = stream.io().peer_cred().ok().map(|cred| Credentials {
            uid: cred.uid(),
            gid: cred.gid(),
            pid: cred.pid(),
            groups: cred.pid().map(groups).unwrap_or_default(),
            exe: cred.pid().and_then(exe),
        });
        Self { credentials }
    }
}

impl Peer {
    pub(crate) fn actor(&self) -> Actor {
        self.credentials.as_ref().map_or(Actor::Peer { uid: u32::MAX, gid: u32::MAX, pid: None, exe: None }, |c| {
            Actor::Peer { uid: c.uid, gid: c.gid, pid: c.pid, exe: c.exe.clone() }
        })
    }

    /// `None`: may not even look.
    pub(crate) fn role(&self, config: &AdminConfig) -> Option<Role> {
        let c = self.credentials.as_ref()?;
        let own = rustix::process::geteuid().as_raw();
        let in_any = |gids: &[u32]| gids.iter().any(|g| *g == c.gid || c.groups.contains(g));
        if c.uid == 0 || c.uid == own || config.admin_uids.contains(&c.uid) {
            Some(Role::Admin)
        } else if in_any(&config.operator_gids) {
            Some(Role::Operator)
        } else if in_any(&config.viewer_gids) {
            Some(Role::Viewer)
        } else {
            None
        }
    }
}

/// Supplementary groups; the kernel's credentials hold the first only.
fn groups(pid: i32) -> Vec<u32> {
    let status = procfs::process::Process::new(pid).and_then(|p| p.status());
    status.map(|s| s.groups.clone()).unwrap_or_default()
}

/// For the record only: whoever writes his own executable chooses its name.
fn exe(pid: i32) -> Option<String> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok().map(|p| p.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> AdminConfig {
        AdminConfig {
            socket: "/x".into(),
            mode: 0o660,
            admin_uids: vec![1000],
            operator_gids: vec![50],
            viewer_gids: vec![60],
        }
    }

    fn peer(uid: u32, gid: u32, groups: &[u32]) -> Peer {
        Peer { credentials: Some(Credentials { uid, gid, pid: None, groups: groups.to_vec(), exe: None }) }
    }

    #[test]
    fn users_and_groups_decide_the_role_and_strangers_have_none() {
        let c = config();
        let stranger = rustix::process::geteuid().as_raw() + 77;
        assert_eq!(peer(0, 0, &[]).role(&c), Some(Role::Admin));
        assert_eq!(peer(rustix::process::geteuid().as_raw(), 5, &[]).role(&c), Some(Role::Admin));
        assert_eq!(peer(1000, 5, &[]).role(&c), Some(Role::Admin));
        assert_eq!(peer(stranger, 50, &[]).role(&c), Some(Role::Operator));
        assert_eq!(peer(stranger, 5, &[60, 50]).role(&c), Some(Role::Operator));
        assert_eq!(peer(stranger, 5, &[60]).role(&c), Some(Role::Viewer));
        assert_eq!(peer(stranger, 5, &[7]).role(&c), None);
        assert_eq!(Peer { credentials: None }.role(&c), None);
    }
}
