//! Lets a caller watch a step from inside: which operation just ended, where tokens were routed. The engine has no clock;
//! whoever wants times brings one.

use ernie_kernels::Routing;

/// One operation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// Block copies for copy-on-write.
    Copy,
    Embed,
    /// RMSNorm and conversion of activations.
    Norm,
    Qkv,
    /// Rotation and KV append.
    Rope,
    Attention,
    /// Conversion of the attention's output.
    Convert,
    AttentionOut,
    Router,
    Experts,
    /// Gate and up projection with SiLU.
    GateUp,
    Down,
    /// Picking the sampled rows.
    Gather,
    Head,
}

/// Called on the engine's thread, in order.
pub trait Observer {
    /// `op` has just ended.
    fn after(&mut self, _op: Op) {}

    /// The experts chosen in `layer`, one row per token that the layer computed.
    fn routed(&mut self, _layer: usize, _routing: &Routing, _rows: usize) {}
}

/// Watches nothing.
impl Observer for () {}
