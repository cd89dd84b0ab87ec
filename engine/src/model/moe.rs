//! The mixture-of-experts block: router in f32, top-k experts, and the shared experts added without a gate.
//!
//! The correction bias takes part in the choice only; the weights are the plain softmax values of the chosen, renormalised.

use super::config::{ModelConfig, MoeConfig};
use super::mlp::Mlp;
use super::observer::{Observer, Op};
use super::parameters::LayerNames;
use super::plan::WeightPlan;
use super::weights::{Loader, WeightsError};
use super::workspace::MoeWorkspace;
use ernie_kernels::ops::route;
use ernie_kernels::{Acts, Matrix, Pool, Rotation, Routing, moe};
use std::sync::Arc;

#[derive(Debug)]
pub struct MoeBlock {
    /// Router, `[experts][hidden]`, always f32.
    pub(crate) gate: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    pub(crate) norm_min: f32,
    pub(crate) gate_up: Vec<Matrix>,
    pub(crate) down: Vec<Matrix>,
    /// As in [`Mlp`], of all experts.
    pub(crate) turn: Option<Arc<Rotation>>,
    pub(crate) shared: Option<Mlp>,
}

/// What a MoE block reads: its rows, normed, in f32 for router and experts and converted for the shared experts.
pub(crate) struct MoeInput<'a> {
    pub(crate) rows: usize,
    pub(crate) normed: &'a [f32],
    pub(crate) acts: &'a Acts,
}

impl MoeBlock {
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        plan: &WeightPlan,
        config: &MoeConfig,
        norm: &[f32],
        names: &LayerNames,
    ) -> Result<Self, WeightsError> {
        let (mut gate_up, mut down, mut turn) = (Vec::new(), Vec::new(), None);
        for expert in 0..config.num_experts {
            let expert = Mlp::load(loader, (plan.experts, plan.experts_down), norm, &names.expert(expert))?;
            gate_up.push(expert.gate_up);
            down.push(expert.down);
            turn = expert.turn;
        }
        let shared = match config.num_shared_experts {
            0 => None,
            _ => Some(Mlp::load(loader, (plan.linear, plan.down), norm, &names.shared_experts())?),
        };
        let (gate, bias) = (loader.reader(&names.router(), norm)?, loader.vector(&names.router_bias())?);
        Ok(Self { gate, bias, norm_min: config.norm_min, gate_up, down, turn, shared })
    }

    pub(crate) fn bytes(&self) -> usize {
        let experts: usize = self.gate_up.iter().chain(&self.down).map(Matrix::bytes).sum();
        experts + self.shared.as_ref().map_or(0, Mlp::bytes) + (self.gate.len() + self.bias.len()) * 4
    }

    /// Number form that the shared experts read; any will do without them.
    pub(crate) fn act_kind(&self) -> ernie_kernels::ActKind {
        self.shared.as_ref().map_or(self.gate_up[0].act_kind(), |s| s.gate_up.act_kind())
    }

    /// Adds the block to `x` and counts the tokens of each expert.
    #[expect(clippy::too_many_arguments, reason = "parts of the step that are borrowed apart")]
    pub(crate) fn forward(
        &self,
        pool: &Pool,
        input: &MoeInput<'_>,
        workspace: &mut MoeWorkspace,
        inner: &mut Acts,
        x: &mut [f32],
        counts: &mut ExpertCounts,
        layer: usize,
        observer: &mut impl Observer,
    ) {
        let MoeWorkspace { routing, scratch } = workspace;
        route(pool, input.rows, input.normed, &self.gate, &self.bias, self.norm_min, routing);
        counts.count(layer, routing, input.rows);
        observer.routed(layer, routing, input.rows);
        observer.after(Op::Router);
        moe(pool, scratch, input.rows, input.normed, routing, &self.gate_up, &self.down, self.turn.as_deref(), x);
        observer.after(Op::Experts);
        if let Some(shared) = &self.shared {
            shared.forward(pool, input.acts, inner, x, observer);
        }
    }
}

/// What routing did since load, by layer of the model; a dense layer of a MoE model has empty entries, a dense model has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Tokens per expert.
    pub tokens: Vec<Vec<u64>>,
    /// Steps in which a token of the layer had no active expert: every weight was zero or not a number. That is no load, it
    /// is a routing bug or a damaged router.
    pub zero_active: Vec<u64>,
}

impl ExpertCounts {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let Some(moe) = &config.moe else { return Self::default() };
        let experts = |layer| if config.is_moe_layer(layer) { moe.num_experts } else { 0 };
        Self {
            tokens: (0..config.num_layers).map(|layer| vec![0; experts(layer)]).collect(),
            zero_active: vec![0; config.num_layers],
        }
    }

    /// Forgets what was counted.
    pub(crate) fn reset(&mut self) {
        self.tokens.iter_mut().for_each(|layer| layer.fill(0));
        self.zero_active.fill(0);
    }

    fn count(&mut self, layer: usize, routing: &Routing, rows: usize) {
        let chosen = rows * routing.top_k;
        let tokens = &mut self.tokens[layer];
        for &expert in &routing.experts[..chosen] {
            tokens[expert as usize] += 1;
        }
        let idle = |weights: &[f32]| !weights.iter().any(|weight| weight.is_finite() && *weight != 0.0);
        self.zero_active[layer] += u64::from(routing.weights[..chosen].chunks_exact(routing.top_k).any(idle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_whose_weights_are_all_zero_or_no_numbers_has_no_active_expert() {
        let mut counts = ExpertCounts { tokens: vec![vec![], vec![0; 4]], zero_active: vec![0; 2] };
        let routing = |weights: &[f32]| Routing { experts: vec![0, 1, 2, 3], weights: weights.to_vec(), top_k: 2 };
        counts.count(1, &routing(&[0.5, 0.5, 1.0, 0.0]), 2);
        assert_eq!(counts.zero_active, [0, 0], "one of two is enough");
        counts.count(1, &routing(&[0.5, 0.5, 0.0, 0.0]), 2);
        counts.count(1, &routing(&[f32::NAN, f32::NAN, 1.0, 1.0]), 2);
        counts.count(1, &routing(&[0.5, 0.5, 0.0, 0.0]), 1);
        assert_eq!(counts.zero_active, [0, 2], "a step counts once, and only its own rows");
        assert_eq!(counts.tokens, [vec![], vec![4, 4, 3, 3]]);
    }
}
