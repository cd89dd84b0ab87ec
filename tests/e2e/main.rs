//! End to end: the real `ernied` and `ernie-ctl`, real sockets, real signals.

mod answers;
mod faults;
mod operate;
mod python;
