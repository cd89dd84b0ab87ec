//! The attention block: fused q, k, v projection, rotation and KV append, causal GQA over paged blocks, output projection.

use super::config::ModelConfig;
use super::parameters::LayerNames;
use super::plan::Form;
use super::weights::{Loader, Side, WeightsError};
use ernie_kernels::{Arrange, KvCache, Matrix, RopeTable, Span};

#[derive(Debug)]
pub struct AttentionBlock {
    pub(crate) qkv: Matrix,
    pub(crate) out: Matrix,
}

impl AttentionBlock {
    /// `norm`: weights of the norm in front of the block.
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        form: Form,
        head_dim: usize,
        norm: &[f32],
        names: &LayerNames,
    ) -> Result<Self, WeightsError> {
        let (q, k, v) = (names.attention("q"), names.attention("k"), names.attention("v"));
        let turn = loader.turn_inside(head_dim);
        let turn = turn.as_deref();
        Ok(Self {
            qkv: loader.matrix(form, Arrange::Concat, Side::Reads { norm, values: turn }, &[&q, &k, &v])?,
            out: loader.matrix(form, Arrange::Concat, Side::Writes(turn), &[&names.attention("o")])?,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes()
    }
}

/// Where the tokens of a step stand, and the KV memory that they read and extend.
#[derive(Debug)]
pub struct Paged<'a> {
    pub kv: &'a mut KvCache,
    pub rope: &'a RopeTable,
    pub positions: &'a [u32],
    pub slots: &'a [u32],
    pub spans: &'a [Span],
    pub block_tables: &'a [u32],
}

/// Rows of `qkv` that belong to one token.
pub(crate) fn qkv_width(config: &ModelConfig) -> usize {
    config.q_width() + 2 * config.kv_width()
}
