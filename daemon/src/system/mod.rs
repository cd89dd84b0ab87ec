//! The operating system's side: memory limits, systemd's protocol, sockets, signals. Leaves; nothing here decides.

pub mod memory;
pub mod notify;
pub mod signals;
pub mod sockets;
