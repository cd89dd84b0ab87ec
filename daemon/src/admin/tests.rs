//! The control plane over a real socket.

use super::*;
