//! Quantising a model for what it reads: layer by layer, each matrix is rounded for the inputs that a sample of token
//! sequences brings to it, coming through the layers quantised before it (`ernie_kernels::compensate`).
//!
//! The residual stream of the whole sample is kept in f32; everything else is one layer at a time.
//!
//! Without a sample the first token of a sequence is still known: whatever it is, it becomes the same few long vectors
//! (an attention sink), most attention of a model goes to it, and so an error in it goes to every token. A few tokens
//! alone on their first position are taken through the layers, and each matrix is rounded so that it gives them what it gave.

mod inputs;

use super::attention::{AttentionBlock, qkv_width};
use super::config::{ModelConfig, MoeConfig};
use super::ernie::{FeedForward, Layer};
use super::mlp::Mlp;
use super::moe::{ExpertCounts, MoeBlock, MoeInput};
use super::parameters::{LayerNames, linear};
use super::plan::{Form, WeightPlan};
use super::weights::{Loader, Rows, Side, WeightsError};
use super::workspace::Workspace;
use ernie_kernels::ops::route;
use ernie_kernels::{
    ActKind, Acts, Arrange, Compensation, KvCache, Matrix, Out, Pool, RopeTable, Rotation, Span, attention, gemm,
    rope_append,
};
use inputs::Inputs;

/// Token sequences that stand for what the model will read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    sequences: Vec<Vec<u32>>,
    /// Whether these are tokens alone, each on the first position.
    first_tokens: bool,
}

impl Calibration {
    /// Longest sequence that is kept whole.
    pub const SEQUENCE_MAX: usize = 512;
    /// A sample of fewer tokens says too little about a matrix with thousands of inputs.
    pub const TOKENS_MIN: usize = 2048;

    /// Cuts sequences into parts of at most [`Self::SEQUENCE_MAX`] tokens.
    pub fn new(sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let parts = |ids: Vec<u32>| ids.chunks(Self::SEQUENCE_MAX).map(<[u32]>::to_vec).collect::<Vec<_>>();
        let sequences = sequences.into_iter().flat_map(parts).filter(|part| part.len() > 1).collect();
        Self { sequences, first_tokens: false }
    }

    /// Tokens alone, spread over the vocabulary: what can be known without a sample.
    pub(crate) fn first_tokens(vocab_size: usize) -> Self {
        let token = |i: usize| ((2 * i + 1) * vocab_size / (2 * FIRST_TOKENS)) as u32;
        Self { sequences: (0..FIRST_TOKENS).map(|i| vec![token(i)]).collect(), first_tokens: true }
    }

    #[cfg(test)]
    pub(crate) fn tokens_in_turn(&self) -> Vec<u32> {
        self.sequences.concat()
    }

    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }

    /// The first id that a vocabulary of this size lacks.
    pub fn foreign_id(&self, vocab_size: usize) -> Option<u32> {
        self.sequences.iter().flatten().copied().find(|&id| id as usize >= vocab_size)
    }
}

/// Tokens worked on at once.
const CHUNK: usize = Calibration::SEQUENCE_MAX;
/// Tokens that stand for all that a sequence may begin with.
const FIRST_TOKENS: usize = 16;
/// The sample on its way through the layers.
pub(crate) struct Calibrator<'a> {
    config: &'a ModelConfig,
    plan: &'a WeightPlan,
    pool: &'a Pool,
    calibration: &'a Calibration,
    /// Tokens worked on at once.
    most: usize,
    /// Residual stream of all tokens.
    x: Vec<f32>,
    attended: Vec<f32>,
    workspace: Workspace,
    kv: KvCache,
    rope: RopeTable,
    counts: ExpertCounts,
}

impl<'a> Calibrator<'a> {
    pub(crate) fn new(
        config: &'a ModelConfig,
        plan: &'a WeightPlan,
        pool: &'a Pool,
        calibration: &'a Calibration,
        embedding: &Rows,
    ) -> Self {
        let tokens: Vec<u32> = calibration.sequences.iter().flatten().copied().collect();
        let most = tokens.len().min(CHUNK);
        let mut x = vec![0.0; tokens.len() * config.hidden_size];
        embedding.gather(pool, config.hidden_size, &tokens, &mut x);
        Self {
            config,
            plan,
            pool,
            calibration,
            most,
            x,
            attended: vec![0.0; tokens.len() * config.q_width()],
            workspace: Workspace::new(config, pool.threads(), most, 1),
            kv: KvCache::new(plan.kv, 1, config.num_kv_heads, config.head_dim, CHUNK.div_ceil(16)),
            rope: RopeTable::new(config.head_dim, config.rope_theta, CHUNK),
            counts: ExpertCounts::new(config),
        }
    }

    /// Loads and quantises one layer, and takes the sample through it.
    pub(crate) fn layer(&mut self, loader: &mut Loader<'_>, layer: usize) -> Result<Layer, WeightsError> {
        let names = LayerNames::new(layer);
        let input_norm = loader.vector(&names.input_norm())?;
        let left = loader.norm_left(input_norm.clone());
        let attention = self.attention(loader, &input_norm, &left, &names)?;
        let post_norm = loader.vector(&names.post_norm())?;
        let post_left = loader.norm_left(post_norm.clone());
        let feed_forward = match &self.config.moe {
            Some(moe) if self.config.is_moe_layer(layer) => {
                FeedForward::Moe(Box::new(self.experts(loader, moe, &post_norm, &post_left, layer)?))
            }
            _ => FeedForward::Dense(self.mlp(loader, &post_norm, &post_left, &names)?),
        };
        Ok(Layer { input_norm: left, attention, post_norm: post_left, feed_forward })
    }

    fn attention(
        &mut self,
        loader: &mut Loader<'_>,
        norm: &[f32],
        left: &[f32],
        names: &LayerNames,
    ) -> Result<AttentionBlock, WeightsError> {
        let inputs = self.normed_inputs(left).compensation(self.pool);
        let (q, k, v) = (names.attention("q"), names.attention("k"), names.attention("v"));
        let turn = loader.turn_inside(self.config.head_dim);
        let side = Side::Reads { norm, values: turn.as_deref() };
        let qkv = loader.matrix_for(self.plan.linear, Arrange::Concat, side, &[&q, &k, &v], inputs.as_ref())?;
        self.attend(&qkv, left);

        let width = self.config.q_width();
        let mut gathered = self.inputs(width);
        gathered.add(self.pool, &self.attended);
        let inputs = gathered.compensation(self.pool);
        let name = names.attention("o");
        let side = Side::Writes(turn.as_deref());
        let out = loader.matrix_for(self.plan.linear, Arrange::Concat, side, &[&name], inputs.as_ref())?;
        let hidden = self.config.hidden_size;
        let acts = &mut self.workspace.acts;
        for (x, attended) in self.x.chunks_mut(CHUNK * hidden).zip(self.attended.chunks(CHUNK * width)) {
            acts.convert(self.pool, out.act_kind(), attended.len() / width, width, attended);
            gemm(self.pool, acts, &out, Out::Add(x));
        }
        Ok(AttentionBlock { qkv, out })
    }

    fn inputs(&self, k: usize) -> Inputs {
        Inputs::new(k, self.calibration.first_tokens)
    }

    /// The stream under the norm, of all tokens.
    fn normed_inputs(&mut self, norm: &[f32]) -> Inputs {
        let hidden = self.config.hidden_size;
        let mut gathered = self.inputs(hidden);
        let mut normed = vec![0.0; CHUNK * hidden];
        for x in self.x.chunks(CHUNK * hidden) {
            let normed = &mut normed[..x.len()];
            norm_rows(self.pool, &mut self.workspace.acts, x, norm, self.config.rms_norm_eps, normed);
            gathered.add(self.pool, normed);
        }
        gathered
    }

    /// Attention of every sequence, into `attended`.
    fn attend(&mut self, qkv: &Matrix, norm: &[f32]) {
        let (hidden, width, eps) = (self.config.hidden_size, self.config.q_width(), self.config.rms_norm_eps);
        let positions: Vec<u32> = (0..CHUNK as u32).collect();
        let Workspace { acts, qkv: projected, attention: scratch, .. } = &mut self.workspace;
        let mut first = 0;
        for sequence in &self.calibration.sequences {
            let rows = sequence.len();
            let x = &self.x[first * hidden..(first + rows) * hidden];
            acts.rmsnorm(self.pool, qkv.act_kind(), rows, hidden, x, norm, eps, None);
            let projected = &mut projected[..rows * qkv_width(self.config)];
            gemm(self.pool, acts, qkv, Out::Store(projected));
            let slots = &positions[..rows];
            let heads = self.config.num_heads;
            rope_append(self.pool, &mut self.kv, 0, projected, slots, slots, &self.rope, scratch, heads);
            let span = Span {
                token_start: 0,
                token_len: rows as u32,
                context_len: rows as u32,
                table_start: 0,
                table_len: rows.div_ceil(16) as u32,
            };
            let out = &mut self.attended[first * width..(first + rows) * width];
            attention(self.pool, &self.kv, 0, &[span], &positions[..rows.div_ceil(16)], scratch, out);
            first += rows;
        }
    }

    fn mlp(
        &mut self,
        loader: &mut Loader<'_>,
        norm: &[f32],
        left: &[f32],
        names: &LayerNames,
    ) -> Result<Mlp, WeightsError> {
        let inputs = self.normed_inputs(left).compensation(self.pool);
        let forms = (self.plan.linear, self.plan.down);
        let mlp = self.one_mlp(loader, forms, norm, left, &names.mlp(), inputs.as_ref())?;
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let Workspace { acts, inner, .. } = &mut self.workspace;
        for x in self.x.chunks_mut(CHUNK * hidden) {
            acts.rmsnorm(self.pool, mlp.gate_up.act_kind(), x.len() / hidden, hidden, x, left, eps, None);
            mlp.forward(self.pool, acts, inner, x, &mut ());
        }
        Ok(mlp)
    }

    /// An MLP that all tokens go through. `inputs` is about the tokens in front of it.
    fn one_mlp(
        &mut self,
        loader: &mut Loader<'_>,
        (gate_up, down): (Form, Form),
        norm: &[f32],
        left: &[f32],
        prefix: &str,
        inputs: Option<&Compensation>,
    ) -> Result<Mlp, WeightsError> {
        let (gate, up) = (linear(prefix, "gate"), linear(prefix, "up"));
        let gate_up = loader.matrix_for(gate_up, Arrange::GateUp, Side::reads(norm), &[&gate, &up], inputs)?;
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let turn = loader.turn_inside(gate_up.n() / 2);
        let mut gathered = self.inputs(gate_up.n() / 2);
        let Workspace { acts, inner, .. } = &mut self.workspace;
        for x in self.x.chunks(CHUNK * hidden) {
            acts.rmsnorm(self.pool, gate_up.act_kind(), x.len() / hidden, hidden, x, left, eps, None);
            gemm(self.pool, acts, &gate_up, products(inner, turn.as_deref()));
            gathered.add(self.pool, &inner.values());
        }
        let inputs = gathered.compensation(self.pool);
        let name = linear(prefix, "down");
        let side = Side::Writes(turn.as_deref());
        let down = loader.matrix_for(down, Arrange::Concat, side, &[&name], inputs.as_ref())?;
        Ok(Mlp { gate_up, down, turn })
    }

    fn experts(
        &mut self,
        loader: &mut Loader<'_>,
        config: &MoeConfig,
        norm: &[f32],
        left: &[f32],
        layer: usize,
    ) -> Result<MoeBlock, WeightsError> {
        let names = LayerNames::new(layer);
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        // Any expert may be sent any token: all share one picture of their inputs.
        let inputs = self.normed_inputs(left).compensation(self.pool);
        let gate = loader.reader(&names.router(), norm)?;
        let bias = loader.vector(&names.router_bias())?;
        let mut normed = vec![0.0; self.x.len()];
        norm_rows(self.pool, &mut self.workspace.acts, &self.x, left, eps, &mut normed);
        let chosen = self.route(&normed, &gate, &bias, config);
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        let turn = loader.turn_inside(config.intermediate_size);
        for (expert, rows) in chosen.iter().enumerate() {
            let prefix = names.expert(expert);
            let pair = (linear(&prefix, "gate"), linear(&prefix, "up"));
            let side = Side::reads(norm);
            let first =
                loader.matrix_for(self.plan.experts, Arrange::GateUp, side, &[&pair.0, &pair.1], inputs.as_ref())?;
            let mut gathered = self.inputs(config.intermediate_size);
            let Workspace { acts, .. } = &mut self.workspace;
            let mut inner = Acts::new(self.most, config.intermediate_size);
            for rows in rows.chunks(CHUNK) {
                acts.gather(self.pool, first.act_kind(), hidden, &normed, rows);
                gemm(self.pool, acts, &first, products(&mut inner, turn.as_deref()));
                gathered.add(self.pool, &inner.values());
            }
            let seen = gathered.compensation(self.pool);
            let name = linear(&prefix, "down");
            let form = self.plan.experts_down;
            let side = Side::Writes(turn.as_deref());
            down.push(loader.matrix_for(form, Arrange::Concat, side, &[&name], seen.as_ref())?);
            gate_up.push(first);
        }
        drop(normed);
        let shared = match config.num_shared_experts {
            0 => None,
            _ => {
                let forms = (self.plan.linear, self.plan.down);
                Some(self.one_mlp(loader, forms, norm, left, &names.shared_experts(), inputs.as_ref())?)
            }
        };
        let block = MoeBlock { gate, bias, norm_min: config.norm_min, gate_up, down, turn, shared };
        let Workspace { acts, inner, moe, normed, .. } = &mut self.workspace;
        let moe = moe.as_mut().expect("a model with MoE layers has a MoE workspace");
        for x in self.x.chunks_mut(CHUNK * hidden) {
            let rows = x.len() / hidden;
            let normed = &mut normed[..x.len()];
            acts.rmsnorm(self.pool, block.act_kind(), rows, hidden, x, left, eps, Some(&mut *normed));
            let input = MoeInput { rows, normed, acts };
            block.forward(self.pool, &input, moe, inner, x, &mut self.counts, layer, &mut ());
        }
        Ok(block)
    }

    /// Which tokens each expert is sent.
    fn route(&mut self, normed: &[f32], gate: &[f32], bias: &[f32], config: &MoeConfig) -> Vec<Vec<u32>> {
        let hidden = self.config.hidden_size;
        let mut chosen = vec![Vec::new(); config.num_experts];
        let routing = &mut self.workspace.moe.as_mut().expect("a model with MoE layers has a MoE workspace").routing;
        for (chunk, normed) in normed.chunks(CHUNK * hidden).enumerate() {
            let rows = normed.len() / hidden;
            route(self.pool, rows, normed, gate, bias, config.norm_min, routing);
            for (choice, &expert) in routing.experts[..rows * routing.top_k].iter().enumerate() {
                chosen[expert as usize].push((chunk * CHUNK + choice / routing.top_k) as u32);
            }
        }
        chosen
    }
}

/// SiLU products as a down projection reads them, in f32.
fn products<'a>(acts: &'a mut Acts, turn: Option<&'a Rotation>) -> Out<'a> {
    Out::SiluMul { acts, kind: ActKind::F32, turn }
}

/// RMS norm of rows of `norm.len()` values, in f32.
fn norm_rows(pool: &Pool, acts: &mut Acts, x: &[f32], norm: &[f32], eps: f32, out: &mut [f32]) {
    let hidden = norm.len();
    for (x, out) in x.chunks(CHUNK * hidden).zip(out.chunks_mut(CHUNK * hidden)) {
        acts.rmsnorm(pool, ActKind::F32, x.len() / hidden, hidden, x, norm, eps, Some(out));
    }
}
