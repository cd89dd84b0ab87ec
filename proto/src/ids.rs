//! Identifiers that travel between processes.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One request submitted to the engine (all its `n` choices). Never used twice in the life of a daemon.
    RequestId,
    "r"
);
id!(
    /// One worker process. A restart gets a new id, so that a late message from a dead worker moves nothing.
    WorkerId,
    "w"
);
id!(
    /// One attempt to serve one revision of a model. Fresh per attempt, for the same reason as [`WorkerId`].
    DeploymentId,
    "d"
);
