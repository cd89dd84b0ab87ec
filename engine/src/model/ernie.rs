//! The whole model: weights by layer, and the forward pass over one step's flat batch.
//!
//! The residual stream stays in f32; every linear layer reads activations converted for its weight kind. A row's result
//! depends on that row and its own KV history only, never on what else is in the batch (the kernels promise it, and
//! nothing here mixes rows), so the last layer may drop the rows that nobody samples.

use super::attention::{AttentionBlock, Paged, qkv_width};
use super::calibrate::{Calibration, Calibrator};
use super::config::ModelConfig;
use super::mlp::Mlp;
use super::moe::{ExpertCounts, MoeBlock, MoeInput};
use super::observer::{Observer, Op};
use super::parameters::{EMBEDDING, FINAL_NORM, HEAD, LayerNames};
use super::plan::{Turn, WeightPlan};
use super::weights::{Loader, Rows, Side, WeightsError};
use super::workspace::Workspace;
use ernie_kernels::{Arrange, Matrix, Out, Pool, Rotation, attention, gemm, rope_append};
use std::ops::Range;

#[derive(Debug)]
pub struct Ernie {
    config: ModelConfig,
    /// `None`: rows are looked up in the packed head, which is the embedding.
    embedding: Option<Rows>,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Matrix,
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) input_norm: Vec<f32>,
    pub(crate) attention: AttentionBlock,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) feed_forward: FeedForward,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per layer, never moved")]
pub(crate) enum FeedForward {
    Dense(Mlp),
    Moe(Box<MoeBlock>),
}

/// One step's input for [`Ernie::forward`].
#[derive(Debug)]
pub struct Step<'a> {
    pub tokens: &'a [u32],
    pub paged: Paged<'a>,
    /// Tokens whose final state is wanted, strictly ascending.
    pub sampled: &'a [u32],
    /// Added to.
    pub experts: &'a mut ExpertCounts,
}

impl Ernie {
    /// Takes every parameter from `loader`.
    /// Quantised layers are rounded for what the calibration brings them, or at least for the first token of a sequence.
    pub fn load(
        config: ModelConfig,
        plan: &WeightPlan,
        loader: &mut Loader<'_>,
        calibration: Option<&Calibration>,
    ) -> Result<Self, WeightsError> {
        let tied = config.tie_word_embeddings;
        if plan.turn != Turn::Nothing {
            loader.rotate(Rotation::new(config.hidden_size), plan.turn == Turn::All);
        }
        // A turned head has the final norm in it.
        let norm_of_head = if plan.turn != Turn::Nothing { Some(loader.vector(FINAL_NORM)?) } else { None };
        let head_norm = norm_of_head.as_deref().unwrap_or_default();
        // A quantised head is no place to look embeddings up in: they are kept high. Nor is one with the norm in it.
        let head_is_embedding =
            tied && !plan.head.is_quantized() && plan.turn == Turn::Nothing && calibration.is_none();
        let keep_rows = (!head_is_embedding).then_some(plan.embedding);
        let embedding = loader.embedding(EMBEDDING, tied.then_some(plan.head), head_norm, keep_rows)?;
        // In the trained basis others have long channels of their own, and pay too much for what the first token gets.
        let first_tokens = (plan.turn != Turn::Nothing).then(|| Calibration::first_tokens(config.vocab_size));
        let layers = match (calibration.or(first_tokens.as_ref()), &embedding.rows) {
            (Some(calibration), Some(rows)) if plan.linear.is_quantized() && !loader.is_prepared() => {
                let mut sample = Calibrator::new(&config, plan, loader.pool(), calibration, rows);
                (0..config.num_layers).map(|l| sample.layer(loader, l)).collect::<Result<_, _>>()?
            }
            _ => (0..config.num_layers).map(|l| Layer::load(&config, plan, loader, l)).collect::<Result<_, _>>()?,
        };
        let final_norm = match &norm_of_head {
            Some(norm) => loader.norm_left(norm.clone()),
            None => loader.vector(FINAL_NORM)?,
        };
        let head = match embedding.head {
            Some(head) => head,
            None => loader.matrix(plan.head, Arrange::Concat, Side::reads(head_norm), &[HEAD])?,
        };
        Ok(Self { config, embedding: embedding.rows, layers, final_norm, head })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of all weights in memory.
    pub fn bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(Layer::bytes).sum();
        layers + self.head.bytes() + self.embedding.as_ref().map_or(0, Rows::bytes) + self.final_norm.len() * 4
    }

    /// Zeroed counters for [`Step::experts`].
    pub fn expert_counts(&self) -> ExpertCounts {
        ExpertCounts::new(&self.config)
    }

    /// Runs all layers. Afterwards row `i` of `workspace.x` is the residual stream of `step.sampled[i]`.
    pub fn forward(&self, pool: &Pool, step: &mut Step<'_>, workspace: &mut Workspace, observer: &mut impl Observer) {
        self.embed(pool, step.tokens, &mut workspace.x);
        observer.after(Op::Embed);
        for (index, layer) in self.layers.iter().enumerate() {
            let last = index + 1 == self.layers.len();
            layer.attend(&self.config, pool, index, step, workspace, observer);
            // What follows is row by row: in the last layer only the sampled rows matter.
            let rows = if last { step.sampled.len() } else { step.tokens.len() };
            if rows == 0 {
                return;
            }
            layer.project(&self.config, pool, step, workspace, last, observer);
            layer.feed(&self.config, pool, rows, step, workspace, index, observer);
        }
    }

    fn embed(&self, pool: &Pool, tokens: &[u32], x: &mut [f32]) {
        let hidden = self.config.hidden_size;
        let x = &mut x[..tokens.len() * hidden];
        match &self.embedding {
            Some(rows) => rows.gather(pool, hidden, tokens, x),
            None => x.chunks_exact_mut(hidden).zip(tokens).for_each(|(row, &id)| self.head.row_f32(id as usize, row)),
        }
    }

    /// Logits of sampled rows after [`Self::forward`], into the first rows of `workspace.logits`.
    pub fn logits(&self, pool: &Pool, rows: Range<usize>, workspace: &mut Workspace, observer: &mut impl Observer) {
        self.norm_sampled(pool, &rows, workspace);
        observer.after(Op::Norm);
        let logits = &mut workspace.logits[..rows.len() * self.config.vocab_size];
        gemm(pool, &workspace.acts, &self.head, Out::Store(logits));
        observer.after(Op::Head);
    }

    /// The most likely token of sampled rows after [`Self::forward`], into the first rows of `workspace.best`.
    pub fn greedy(&self, pool: &Pool, rows: Range<usize>, workspace: &mut Workspace, observer: &mut impl Observer) {
        self.norm_sampled(pool, &rows, workspace);
        observer.after(Op::Norm);
        gemm(pool, &workspace.acts, &self.head, Out::ArgMax(&mut workspace.best[..rows.len()]));
        observer.after(Op::Head);
    }

    fn norm_sampled(&self, pool: &Pool, rows: &Range<usize>, workspace: &mut Workspace) {
        let hidden = self.config.hidden_size;
        let x = &workspace.x[rows.start * hidden..rows.end * hidden];
        let (kind, eps) = (self.head.act_kind(), self.config.rms_norm_eps);
        workspace.acts.rmsnorm(pool, kind, rows.len(), hidden, x, &self.final_norm, eps, None);
    }
}

impl Layer {
    fn load(
        config: &ModelConfig,
        plan: &WeightPlan,
        loader: &mut Loader<'_>,
        layer: usize,
    ) -> Result<Self, WeightsError> {
        let names = LayerNames::new(layer);
        let input_norm = loader.vector(&names.input_norm())?;
        let attention = AttentionBlock::load(loader, plan.linear, config.head_dim, &input_norm, &names)?;
        let post_norm = loader.vector(&names.post_norm())?;
        let feed_forward = match &config.moe {
            Some(moe) if config.is_moe_layer(layer) => {
                FeedForward::Moe(Box::new(MoeBlock::load(loader, plan, moe, &post_norm, &names)?))
            }
            _ => FeedForward::Dense(Mlp::load(loader, (plan.linear, plan.down), &post_norm, &names.mlp())?),
        };
        let (input_norm, post_norm) = (loader.norm_left(input_norm), loader.norm_left(post_norm));
        Ok(Self { input_norm, attention, post_norm, feed_forward })
    }

    fn bytes(&self) -> usize {
        let feed_forward = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.bytes(),
            FeedForward::Moe(moe) => moe.bytes(),
        };
        self.attention.bytes() + feed_forward + (self.input_norm.len() + self.post_norm.len()) * 4
    }

    /// Norm, q|k|v, rotation, KV append and attention of all tokens; the result is in `workspace.attended`.
    fn attend(
        &self,
        config: &ModelConfig,
        pool: &Pool,
        index: usize,
        step: &mut Step<'_>,
        workspace: &mut Workspace,
        observer: &mut impl Observer,
    ) {
        let (rows, hidden) = (step.tokens.len(), config.hidden_size);
        let Workspace { x, qkv, attended, acts, attention: scratch, .. } = workspace;
        let (x, qkv) = (&x[..rows * hidden], &mut qkv[..rows * qkv_width(config)]);
        let kind = self.attention.qkv.act_kind();
        acts.rmsnorm(pool, kind, rows, hidden, x, &self.input_norm, config.rms_norm_eps, None);
        observer.after(Op::Norm);
        gemm(pool, acts, &self.attention.qkv, Out::Store(qkv));
        observer.after(Op::Qkv);
        let paged = &mut step.paged;
        let (positions, slots) = (paged.positions, paged.slots);
        rope_append(pool, paged.kv, index, qkv, positions, slots, paged.rope, scratch, config.num_heads);
        observer.after(Op::Rope);
        let out = &mut attended[..rows * config.q_width()];
        attention(pool, paged.kv, index, paged.spans, paged.block_tables, scratch, out);
        observer.after(Op::Attention);
    }

    /// Output projection into the residual stream; in the `last` layer of the sampled rows only, which then come first.
    fn project(
        &self,
        config: &ModelConfig,
        pool: &Pool,
        step: &Step<'_>,
        workspace: &mut Workspace,
        last: bool,
        observer: &mut impl Observer,
    ) {
        let (hidden, width) = (config.hidden_size, config.q_width());
        let Workspace { x, attended, acts, .. } = workspace;
        let kind = self.attention.out.act_kind();
        let rows = if last {
            acts.gather(pool, kind, width, attended, step.sampled);
            for (to, &from) in step.sampled.iter().enumerate() {
                let from = from as usize * hidden;
                x.copy_within(from..from + hidden, to * hidden);
            }
            observer.after(Op::Gather);
            step.sampled.len()
        } else {
            let rows = step.tokens.len();
            acts.convert(pool, kind, rows, width, &attended[..rows * width]);
            observer.after(Op::Convert);
            rows
        };
        gemm(pool, acts, &self.attention.out, Out::Add(&mut x[..rows * hidden]));
        observer.after(Op::AttentionOut);
    }

    /// Norm and MLP or experts of the first `rows` rows.
    #[expect(clippy::too_many_arguments, reason = "parts of the step that are borrowed apart")]
    fn feed(
        &self,
        config: &ModelConfig,
        pool: &Pool,
        rows: usize,
        step: &mut Step<'_>,
        workspace: &mut Workspace,
        index: usize,
        observer: &mut impl Observer,
    ) {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let Workspace { x, normed, acts, inner, moe, .. } = workspace;
        let x = &mut x[..rows * hidden];
        match (&self.feed_forward, moe) {
            (FeedForward::Moe(block), Some(workspace)) => {
                let normed = &mut normed[..rows * hidden];
                acts.rmsnorm(pool, block.act_kind(), rows, hidden, x, &self.post_norm, eps, Some(&mut *normed));
                observer.after(Op::Norm);
                let input = MoeInput { rows, normed, acts };
                block.forward(pool, &input, workspace, inner, x, step.experts, index, observer);
            }
            (FeedForward::Dense(mlp), _) => {
                acts.rmsnorm(pool, mlp.gate_up.act_kind(), rows, hidden, x, &self.post_norm, eps, None);
                observer.after(Op::Norm);
                mlp.forward(pool, acts, inner, x, observer);
            }
            (FeedForward::Moe(_), None) => unreachable!("a model with MoE layers has a MoE workspace"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Checkpoint;
    use super::*;
    use ernie_kernels::{ActKind, Acts};
    use std::path::Path;

    fn loaded(pool: &Pool, dir: &Path, plan: &str) -> Ernie {
        let (config, text) = ModelConfig::read(dir).unwrap();
        let checkpoint = Checkpoint::open(dir, &config).unwrap();
        let mut progress = |_, _| {};
        let mut loader = Loader::new(checkpoint, text.as_bytes(), None, pool, &mut progress).unwrap();
        Ernie::load(config, &WeightPlan::parse(plan).unwrap(), &mut loader, None).unwrap()
    }

    /// Length of what rounding changes in the outputs for these inputs.
    fn change(exact: &[f32], rounded: &[f32], inputs: &[f32]) -> f32 {
        let off = |(w, q): (&[f32], &[f32])| w.iter().zip(q).zip(inputs).map(|((w, q), x)| (w - q) * x).sum::<f32>();
        let rows = exact.chunks_exact(inputs.len()).zip(rounded.chunks_exact(inputs.len()));
        rows.map(|rows| off(rows).powi(2)).sum::<f32>().sqrt()
    }

    #[test]
    fn what_first_tokens_have_in_common_survives_rounding() {
        let pool = Pool::new(1, false);
        for name in ["tiny-dense", "tiny-moe"] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
            let (exact, rounded) = (loaded(&pool, &dir, "f32-rr"), loaded(&pool, &dir, "int4g128-ag-rr"));
            let hidden = exact.config.hidden_size;
            let tokens = Calibration::first_tokens(exact.config.vocab_size).tokens_in_turn();
            let mut x = vec![0.0; tokens.len() * hidden];
            rounded.embedding.as_ref().unwrap().gather(&pool, hidden, &tokens, &mut x);
            let mut acts = Acts::new(tokens.len(), hidden);
            let norm = vec![1.0; hidden];
            acts.rmsnorm(&pool, ActKind::F32, tokens.len(), hidden, &x, &norm, exact.config.rms_norm_eps, None);
            let rows = acts.values();
            let common: Vec<f32> = (0..hidden).map(|i| rows[i..].iter().step_by(hidden).sum()).collect();
            // As long, and at right angles: neighbours exchanged, one of them negated.
            let other: Vec<f32> = common.as_chunks::<2>().0.iter().flat_map(|[a, b]| [-b, *a]).collect();
            let qkv = |model: &Ernie| model.layers[0].attention.qkv.dequantized();
            let (exact, rounded) = (qkv(&exact), qkv(&rounded));
            let (kept, changed) = (change(&exact, &rounded, &common), change(&exact, &rounded, &other));
            println!("{name}: {kept:.4} along what they have in common, {changed:.4} across");
            assert!(kept < 0.3 * changed, "{name}: {kept} along what they have in common, {changed} across");
        }
    }
}
