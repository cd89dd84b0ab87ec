//! Every type that crosses a process boundary: worker frames, admin JSON, OpenAI JSON.
//!
//! Plain data and its encoding, nothing that acts. `ctl` and `tests` depend on this crate alone, so it links no
//! runtime, no tensor library and no HTTP stack.

pub mod admin;
pub mod flight;
pub mod frame;
pub mod ids;
pub mod model;
pub mod openai;
pub mod worker;
