//! End to end: the real `ernied` and `ernie-ctl`, real sockets, real signals.

mod answers;
mod faults;
mod memory;
mod models;
mod operate;
mod python;
mod storm;
mod swap;
mod watch;
