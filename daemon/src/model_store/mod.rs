//! Models on disk: manifests, verification, the links to the revisions that serve, room in memory for two of them.
//!
//! A model is a folder with a `SHA256SUMS` that `sha256sum -c` also understands. Its **revision** is the SHA-256 of the
//! sorted manifest. A [`VerifiedModel`] can only be made by verifying. Nothing here knows a worker or a request.

mod links;
mod manifest;
mod registry;
mod smoke;
mod space;
mod verify;

pub use links::{Configured, Links, LinksError, Served, Serving};
pub use manifest::{MANIFEST_FILE, Manifest, ManifestError};
pub use registry::{Known, Registry, RegistryError};
pub use smoke::{SmokeError, SmokePrompt, SmokeSuite, SmokeText};
pub use space::{NoRoom, Placement, Space, place};
pub use verify::{
    Problem, VerifiedModel, VerifyError, copy_text_side, revision_on_disk, seal, unlisted, unread, verify_all,
    verify_for_load,
};
