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
use ernie_kernels::{Acts, Matrix, Pool, moe};

#[derive(Debug)]
pub struct MoeBlock {
    /// Router, `[experts][hidden]`, always f32.
    gate: Vec<f32>,
    bias: Vec<f32>,
    norm_min: f32,
    gate_up: Vec<Matrix>,
    down: Vec<Matrix>,
    shared: Option<Mlp>,
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
        names: &LayerNames,
    ) -> Result<Self, WeightsError> {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..config.num_experts {
            let expert = Mlp::load(loader, plan.experts, plan.experts_down, &names.expert(expert))?;
            gate_up.push(expert.gate_up);
            down.push(expert.down);
        }
        let shared = match config.num_shared_experts {
            0 => None,
            _ => Some(Mlp::load(loader, plan.linear, plan.down, &names.shared_experts())?),
        };
        let (gate, bias) = (loader.vector(&names.router())?, loader.vector(&names.router_bias())?);
        Ok(Self { gate, bias, norm_min: config.norm_min, gate_up, down, shared })
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
        expert_tokens: &mut [u64],
        layer: usize,
        observer: &mut impl Observer,
    ) {
        let MoeWorkspace { routing, scratch } = workspace;
        route(pool, input.rows, input.normed, &self.gate, &self.bias, self.norm_min, routing);
        for &expert in &routing.experts[..input.rows * routing.top_k] {
            expert_tokens[expert as usize] += 1;
        }
        observer.routed(layer, routing, input.rows);
        observer.after(Op::Router);
        moe(pool, scratch, input.rows, input.normed, routing, &self.gate_up, &self.down, x);
        observer.after(Op::Experts);
        if let Some(shared) = &self.shared {
            shared.forward(pool, input.acts, inner, x, observer);
        }
    }
}

/// One counter per expert and MoE layer.
pub(crate) fn expert_counters(config: &ModelConfig) -> Vec<Vec<u64>> {
    let experts = config.moe.as_ref().map_or(0, |m| m.num_experts);
    (0..config.num_layers).filter(|&l| config.is_moe_layer(l)).map(|_| vec![0; experts]).collect()
}
