//! End to end: the real `ernied` and `ernie-ctl`, real sockets, real signals.

mod acts;
mod alerts;
mod answers;
mod boards;
mod faults;
mod flight;
mod load;
mod memory;
mod models;
mod operate;
mod package;
mod python;
mod storm;
mod swap;
mod systemd;
mod traces;
mod watch;
